"""Kernels of our own: a token has the same bits whatever it is computed with, and no machine needs a compiler."""

from __future__ import annotations

import copy
import errno
import mmap
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specbench.decoding.cpu import huge_pages, native, packed_linear
from specbench.decoding.cpu.huge_pages import ALIGNED, CHUNK, in_huge_pages
from specbench.decoding.cpu.native import MOST_TOKENS
from specbench.decoding.cpu.packed_linear import PackedWeight, Panels
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import argmax_token
from specbench.decoding.state import Draft
from specbench.system.errors import UserError
from tests.support.kernel_passes import PROMPT, TOKENS, needs_kernels, passes
from tests.support.models import ARCHITECTURES, random_model


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 24, 129])
@pytest.mark.parametrize("columns", [8, 50, 576])
def test_an_output_has_the_same_bits_beside_any_others(dtype, rows, columns):
    weight, bias = torch.randn(rows, columns, dtype=dtype), torch.randn(rows, dtype=dtype)
    panels, states = Panels(weight), torch.randn(MOST_TOKENS, columns, dtype=dtype)
    for summand in (None, bias):
        alone = torch.cat([panels.times(state, summand) for state in states.split(1)])
        for tokens in (2, 3, 6, 7, 13, 17, 33, 49, MOST_TOKENS):
            assert torch.equal(panels.times(states[:tokens], summand), alone[:tokens])
        assert torch.equal(panels.times(states.view(4, -1, columns), summand).view(-1, rows), alone)
        right = torch.nn.functional.linear(
            states.double(), weight.double(), None if summand is None else bias.double()
        )
        tolerance = (1e-5 if dtype == torch.float32 else 1e-2) * columns**0.5
        torch.testing.assert_close(alone.double(), right, atol=tolerance, rtol=1e-2)


@needs_kernels
def test_threads_change_no_bit():
    panels, states = Panels(torch.randn(4096, 256)), torch.randn(6, 256)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs += [panels.times(states, None), panels.times(states[:1], None)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0][: len(output)], output) for output in outputs)


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++")
def test_kernels_start_as_many_threads_as_torch_computes_with(tmp_path, monkeypatch):
    """Also by the OpenMP that Clang brings, which is not torch's."""
    for name, value in {"CXX": "clang++", "OMP_NUM_THREADS": "1", "SPECBENCH_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    code = """if True:
        import os, torch
        from specbench.decoding.cpu.packed_linear import Panels
        panels = Panels(torch.zeros(4096, 256))
        torch.set_num_threads(3)
        before = len(os.listdir("/proc/self/task"))
        panels.times(torch.zeros(1, 256), None)
        print(len(os.listdir("/proc/self/task")) - before)
    """
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "2\n"


@needs_kernels
@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.parametrize(
    ("without", "tiles"), [("-mno-amx-tile -mno-amx-bf16", True), ("-mno-avx512bf16", False)]
)
def test_a_processor_with_instructions_for_bfloat16_has_the_kernels_of_others_too(
    without, tiles, tmp_path, monkeypatch
):
    """Both compute the same products, to rounding."""
    has = (
        native.has_tiles(torch.device("cpu"), torch.bfloat16)
        if tiles
        else torch.cpu._is_avx512_bf16_supported()
    )
    if not has:
        pytest.skip("this processor has no AMX" if tiles else "it does not multiply bfloat16 in pairs")
    code = """if True:
        import sys, torch
        from specbench.decoding.cpu.native import has_tiles
        from specbench.decoding.cpu.packed_linear import Panels
        torch.manual_seed(0)
        panels, states = Panels(torch.randn(70, 50).bfloat16()), torch.randn(40, 50).bfloat16()
        torch.save(panels.times(states, None), sys.argv[1])
        print(has_tiles(torch.device("cpu"), torch.bfloat16))
    """
    outputs, said = [], []
    for flags in ("", f" {without}"):
        monkeypatch.setenv("CXX", "g++" + flags)
        path = tmp_path / f"{len(outputs)}.pt"
        said.append(subprocess.check_output([sys.executable, "-c", code, path], text=True).strip())
        outputs.append(torch.load(path))
    torch.testing.assert_close(*outputs)
    assert said == ["True", "False"] if tiles else said[0] == said[1]


@needs_kernels
def test_a_transposed_state_is_read_as_it_is():
    panels, states = Panels(torch.randn(24, 16)), torch.randn(16, 5).t()
    assert torch.equal(panels.times(states, None), panels.times(states.contiguous(), None))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_without_tokens_is_empty(dtype):
    panels, bias = Panels(torch.randn(240, 16, dtype=dtype)), torch.randn(240, dtype=dtype)
    for shape in [(0, 16), (2, 0, 16)]:
        assert panels.times(torch.empty(shape, dtype=dtype), bias).shape == (*shape[:-1], 240)


@needs_kernels
def test_a_product_of_what_does_not_fit_is_refused():
    """The kernel would read and write beside the tensors."""
    panels, states, bias = Panels(torch.randn(24, 16)).panels, torch.randn(2, 16), torch.randn(24)
    wrong = [
        (torch.randn(2, 500), panels, None, 24),
        (states[:, :0], panels, None, 24),
        (states[0, 0], panels, None, 24),
        (states.bfloat16(), panels, None, 24),
        (states, panels.bfloat16(), None, 24),
        (states, panels[1:], None, 24),
        (states, panels.t().contiguous().t(), None, 24),
        (states, panels, None, 240),
        (states, panels, bias[1:], 24),
        (states, panels, bias.view(1, 24), 24),
    ]
    for tensors in wrong:
        with pytest.raises(RuntimeError, match="product: "):
            torch.ops.specbench.product(*tensors)
    assert torch.ops.specbench.product(states, panels, bias, 24).shape == (2, 24)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_product_with_many_tokens_is_torchs(dtype, has_instructions, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    weight, bias = torch.randn(24, 16, dtype=dtype), torch.randn(24, dtype=dtype)
    states = torch.randn(MOST_TOKENS + 1, 16, dtype=dtype)
    for summand in (None, bias):
        with torch.inference_mode():
            product = packed_linear.packed_linear(weight, summand)(states)
        torch.testing.assert_close(product, torch.nn.functional.linear(states, weight, summand))


@needs_kernels
def test_a_prompt_in_half_precision_is_computed_in_float32(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    packed = PackedWeight([torch.nn.Parameter(torch.randn(24, 16, dtype=torch.bfloat16))])
    seen = []
    inner = packed_linear.linear

    def linear(states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        seen.append(states.dtype)
        return inner(states, *others)

    monkeypatch.setattr(packed_linear, "linear", linear)
    packed.times(torch.randn(MOST_TOKENS + 1, 16, dtype=torch.bfloat16), None)
    assert seen == [torch.float32]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 32, 70, 4096, 49_157])
def test_the_likeliest_token_is_numpys(dtype, size):
    """The first of several, in whatever place; that of a NaN, as there."""
    logits = torch.randn(3, 4, size).to(dtype)
    logits[0, 1] = float("-inf")
    logits[0, 2] = 1.5
    logits[0, 3, size // 2 :] = 7.0
    logits[1, 0, -1] = float("inf")
    logits[1, 1, size // 3] = float("nan")
    logits[1, 2, [0, -1]] = float("nan")
    logits[1, 3, -1] = 7.0
    expected = torch.from_numpy(logits.float().numpy().argmax(-1))
    assert torch.equal(argmax_token(logits), expected)
    assert torch.equal(argmax_token(logits.transpose(0, 1)), expected.T)


@pytest.mark.parametrize("weight", [torch.zeros(4, 4, dtype=torch.float16), torch.zeros(4, 4, device="meta")])
def test_other_weights_are_refused(weight):
    with pytest.raises(RuntimeError):
        Panels(weight)


def test_copies_in_large_pages_are_apart():
    first = torch.arange(5, dtype=torch.bfloat16)
    second = torch.arange(CHUNK // 4 + 1, dtype=torch.float32).view(1, -1)
    copies = [in_huge_pages(values) for values in (first, second, first)]
    for values, copied in zip((first, second, first), copies):
        assert torch.equal(values, copied)
        assert copied.data_ptr() % ALIGNED == 0
    copies[0].zero_()
    assert torch.equal(copies[2], first)


def test_a_system_without_large_pages_gives_small_ones(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *option):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Memory)
    values = torch.arange(CHUNK // 4, dtype=torch.float32)
    assert torch.equal(in_huge_pages(values), values)


@needs_kernels
@pytest.mark.first_fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_verified_token_has_the_bits_of_a_decoded_one(arch, dtype):
    """In a chain, on a path of a tree, beside another sequence: logits, and what is in the cache."""
    model = copy.deepcopy(random_model(arch, 0)).to(dtype)
    if getattr(model.config, "attn_logit_softcapping", None):
        pytest.skip("scores that are capped go to transformers' attention")
    target, ids = StagedModel(model), torch.randint(3, 60, (1, PROMPT + TOKENS))
    with torch.inference_mode():
        logits, caches = passes(target, ids)
    for name, of in logits.items():
        assert torch.equal(of, logits["alone"]), f"{name}: other bits than alone"
    alone, chain = (caches[name].segments for name in ("alone", "chain"))
    assert all(torch.equal(a, b) for a, b in zip(alone, chain, strict=True))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [pytest.param(81, marks=pytest.mark.slow), MOST_TOKENS])
def test_a_token_has_its_bits_in_a_wide_pass_too(dtype, tokens):
    """As in the trees of Token Recycling, of 80 nodes."""
    model = copy.deepcopy(random_model("llama", 0, num_hidden_layers=2)).to(dtype)
    target, ids = StagedModel(model), torch.randint(3, 60, (1, PROMPT + tokens))
    with torch.inference_mode():
        caches = [target.new_cache(PROMPT + tokens) for _ in range(2)]
        for cache in caches:
            target.prefill(ids[:, :PROMPT], cache)
        single = [
            target.verify(ids[:, i : i + 1], Draft(ids[:, :0]), caches[0], i)[0]
            for i in range(PROMPT, PROMPT + tokens)
        ]
        first, rest = ids[:, PROMPT : PROMPT + 1], ids[:, PROMPT + 1 :]
        wide = target.verify(first, Draft(rest), caches[1], PROMPT)[0]
    assert torch.equal(wide, torch.cat(single))


@pytest.mark.one_in(3)
@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({native.SWITCH: "0"}, "SPECBENCH_KERNELS=0"),
        ({"CXX": "no-such-compiler -m64"}, "$CXX=no-such-compiler -m64 is not a C++ compiler"),
        ({"CXX": sys.executable}, "kernels cannot be compiled: "),
    ],
)
def test_without_kernels_the_reason_is_said_in_a_line(environment, expected, tmp_path, monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    for name, value in (environment | {"SPECBENCH_CACHE": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    code = "from specbench.decoding.cpu import native; print(native.reason())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(expected)
    assert len(ran.stdout.splitlines()) == 1
    assert not list(tmp_path.rglob("*.so")) + list(tmp_path.rglob("*.part"))


def test_another_source_compiler_or_torch_is_another_library(tmp_path, monkeypatch):
    source = tmp_path / "product.cpp"
    source.write_text("// one")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    digests = {native._digest([sys.executable])}
    source.write_text("// two")
    digests.add(native._digest([sys.executable]))
    digests.add(native._digest(["/bin/true"]))
    monkeypatch.setattr(torch, "__version__", "0")
    digests.add(native._digest(["/bin/true"]))
    assert len(digests) == 4


def test_a_compiler_that_cannot_be_run_is_told_in_words(tmp_path, monkeypatch):
    """Such as one of another architecture. What an editor leaves beside the sources is no source."""
    broken = tmp_path / "c++"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.delenv(native.SWITCH, raising=False)
    found, reason = native.load.__wrapped__()
    assert found == [] and "OSError" in reason and "c++" in reason
    (tmp_path / ".product.cpp.swp").write_bytes(b"\xff\x00")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    assert len(native._digest(["/bin/true"])) == 16


def test_an_old_compiler_is_refused_by_its_version():
    compiler = native.compiler()
    if not compiler or "clang" in compiler[0]:
        pytest.skip("there is no g++")
    old = ("-fsyntax-only", "-x", "c++", "-U__GNUC__", "-D__GNUC__=11")
    command = [*compiler, *old, str(native.SOURCES / "simd.h")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode and "g++ 12 or newer is needed" in ran.stderr


def test_a_compiler_that_fails_hides_no_other(tmp_path, monkeypatch):
    """And is not tried again where another one has compiled the kernels."""
    tried, loaded = [], []

    def compile(compiler: list[str], library: Path) -> None:
        tried.append(compiler)
        if compiler == ["g++"]:
            raise UserError("kernels cannot be compiled: g++ 12 or newer is needed")
        library.touch()

    for name in ("CXX", native.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(native, "_digest", lambda compiler: compiler[0])
    monkeypatch.setattr(native, "_compile", compile)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.library, "register_fake", lambda *_: None)
    for _ in range(2):
        assert native.load.__wrapped__() == (["clang++"], None)
    assert tried == [["g++"], ["clang++"]] and loaded == [str(tmp_path / "kernels" / "clang++.so")] * 2
    monkeypatch.setattr(native, "COMPILERS", ("g++",))
    assert native.load.__wrapped__() == ([], "kernels cannot be compiled: g++ 12 or newer is needed")


def test_what_does_not_compile_leaves_nothing_behind(tmp_path, monkeypatch):
    compiler = native.compiler()
    if not compiler:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    with pytest.raises(UserError, match="kernels cannot be compiled: .*error"):
        native._compile(compiler, tmp_path / "library.so")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.cpp"]
