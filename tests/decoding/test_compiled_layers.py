"""Layers as compiled functions: what they give is what the layers give, and who cannot be compiled runs as before."""

from __future__ import annotations

import copy
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch._inductor
from transformers import PreTrainedModel

from specbench.decoding.cpu import compiled_layers, packed_linear
from specbench.decoding.cpu.native import COMPILERS
from specbench.decoding.cpu.packed_linear import FusedSlice, by_columns, packed_weights
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.graphs import Options, set_options
from specbench.decoding.model.staged_model import StagedModel
from tests.support.kernel_passes import PROMPT, TOKENS, needs_kernels, passes
from tests.support.models import ARCHITECTURES, random_model

pytestmark = needs_kernels

FAST = ("llama", "gemma2")  # the second has attention of its own


def driven(model: PreTrainedModel) -> StagedModel:
    """With compiled layers."""
    set_options(model, Options(compile=True))
    return StagedModel(model)


def compiled(arch: str, dtype: torch.dtype = torch.float32, **config) -> StagedModel:
    return driven(copy.deepcopy(random_model(arch, 0, **config)).to(dtype))


def plain(target: StagedModel) -> StagedModel:
    """The same model without."""
    twin = copy.copy(target)
    twin.stack = copy.copy(target.stack)
    twin.stack.compiled = None
    return twin


def logits_of(target: StagedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the tokens after the prompt, in each way."""
    return passes(target, ids)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "arch",
    [pytest.param(a, marks=[] if a in FAST else pytest.mark.nightly) for a in (*ARCHITECTURES, "gemma2")],
)
def test_a_compiled_layer_gives_what_the_layer_gives(arch, dtype, capfd):
    target, ids = compiled(arch, dtype), torch.randint(3, 60, (1, PROMPT + TOKENS))
    with torch.inference_mode():
        logits, expected = logits_of(target, ids), logits_of(plain(target), ids)
        exact = logits_of(StagedModel(copy.deepcopy(random_model(arch, 0)).double()), ids)["alone"]
    for name, of in logits.items():  # what is fused is rounded otherwise, and no worse
        ours, theirs = (of - exact).abs(), (expected[name] - exact).abs()
        if dtype == torch.float32:
            assert ours.max() < 2 * theirs.max()
        else:
            assert ours.mean() < 1.2 * theirs.mean()
        if not getattr(target.config, "attn_logit_softcapping", None):
            assert torch.equal(of, logits["alone"]), f"{name}: other bits than alone"
    assert target.stack.is_compiled, capfd.readouterr().err


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("attention", ["of our own", "torch's"])
def test_products_without_panels_and_other_attention_are_called_from_python(attention, monkeypatch):
    if attention == "torch's":
        monkeypatch.setattr(compiled_layers, "is_plain", lambda options: False)
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
        for weight in packed_weights(target.layers):
            weight._forms = by_columns(weight.weight), weight.weight
    logits, expected = logits_of(target, ids), logits_of(plain(target), ids)
    for name, of in logits.items():
        torch.testing.assert_close(of, expected[name], atol=1e-4, rtol=1e-4)
    assert target.stack.is_compiled


@torch.inference_mode()
def test_a_family_with_attention_of_its_own_does_not_pass_for_one_on_our_kernels():
    assert (
        StagedModel(random_model("gemma2", 0)).uses_torch == "for attention, of which the family has its own"
    )


@pytest.mark.slow
@torch.inference_mode()
def test_layers_share_a_function_and_a_changed_weight_is_seen():
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    first = logits_of(target, ids)["chain"]
    functions = {layer._compiled[torch.float32, False][0] for layer in target.stack.compiled}
    assert len(functions) == 1
    with torch.inference_mode(False):
        for layer in target.model.model.layers:
            layer.mlp.down_proj.weight.mul_(1.5)
            layer.input_layernorm.weight.mul_(0.5)
    second = logits_of(target, ids)["chain"]
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, logits_of(plain(target), ids)["chain"], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_cache_of_a_pass_is_given_back_before_the_next_one_is_made():
    """Or a cache that grows would take the memory of both."""
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    logits_of(target, ids)
    cache = target.new_cache(PROMPT)
    target.prefill(ids[:, :PROMPT], cache)
    held = weakref.ref(cache)
    del cache
    target.new_cache(PROMPT)
    assert held() is None


@pytest.mark.slow
@pytest.mark.parametrize("in_front", [False, True])
@torch.inference_mode()
def test_a_fault_in_a_compiled_layer_is_found_by_its_first_pass(monkeypatch, capfd, in_front):
    """One in front of the projections leaves wrong keys and values in the cache."""
    monkeypatch.setattr(compiled_layers, "_UNCOMPILED", {})
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    call = compiled_layers.CompiledLayer._call

    def faulty(layer, function, attention, states, arguments):
        if in_front:
            return call(layer, function, attention, [some + some.roll(1, -1) for some in states], arguments)
        return 1.01 * call(layer, function, attention, states, arguments)

    monkeypatch.setattr(compiled_layers.CompiledLayer, "_call", faulty)
    torch.testing.assert_close(logits_of(target, ids)["chain"], logits_of(plain(target), ids)["chain"])
    said = "its states would be " if in_front else "its states would be 0.01 off"
    assert f"is not compiled: {said}" in capfd.readouterr().err
    assert not target.stack.is_compiled


@torch.inference_mode()
def test_states_that_do_not_follow_one_another_are_read_as_they_are():
    """Such as part of what S2D keeps for several sequences."""
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    logits_of(target, ids)
    wide = torch.randn(2, 7, target.hidden_size)
    found = [
        target.run_layers(states, target.new_cache(64, slots=2), 0)
        for states in (wide[:, 2:5], wide[:, 2:5].contiguous())
    ]
    assert target.stack.is_compiled and torch.equal(*found)


@pytest.mark.slow
@torch.inference_mode()
def test_what_cannot_be_traced_runs_as_it_is_and_says_so_once(monkeypatch, capfd):
    monkeypatch.setattr(compiled_layers, "_UNCOMPILED", {})

    def refuse(*arguments):
        raise RuntimeError("no such operation")

    monkeypatch.setattr(compiled_layers, "_FUNCTIONS", {})
    monkeypatch.setattr(compiled_layers, "_compile", refuse)
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    assert torch.equal(logits_of(target, ids)["chain"], logits_of(plain(target), ids)["chain"])
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["warning: LlamaDecoderLayer is not compiled: RuntimeError: no such operation"]


@pytest.mark.slow
@torch.inference_mode()
def test_a_model_that_changes_its_type_is_compiled_anew():
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    logits_of(target, ids)
    with torch.inference_mode(False):
        target.model.to(torch.bfloat16)
        moved = StagedModel(target.model)
    states = torch.randn(1, 3, target.hidden_size, dtype=torch.bfloat16)
    for layer, other in zip(target.stack.compiled, moved.stack.compiled):
        cache = moved.new_cache(64)
        cos, sin = (torch.randn(1, 3, 16, dtype=torch.bfloat16) for _ in range(2))
        arguments = {"position_embeddings": (cos, sin), "attention_mask": None, "use_cache": True}
        outputs = []
        for each in (layer, other):
            cache.begin_pass(0, len(moved.layers), ForwardContext.consecutive(0, 3), 1, 3)
            outputs.append(each(states, past_key_values=cache, **arguments))
        torch.testing.assert_close(*outputs, atol=0.1, rtol=0.1)


@pytest.mark.slow
@torch.inference_mode()
def test_joint_products_have_the_biases_of_their_own_layer(monkeypatch, capfd):
    monkeypatch.setattr(packed_linear, "LEAST_JOINED", 0)
    with torch.inference_mode(False):
        model = random_model("qwen2", 0)
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias.normal_(std=0.3)
        target, ids = driven(model), torch.randint(3, 60, (1, PROMPT + TOKENS))
    assert isinstance(target.layers[0].self_attn.q_proj, FusedSlice)
    logits, expected = logits_of(target, ids), logits_of(plain(target), ids)
    for name, of in logits.items():
        torch.testing.assert_close(of, expected[name], atol=1e-3, rtol=1e-3)
    assert all(layer.is_compiled for layer in target.stack.compiled), capfd.readouterr().err


class Doubled(torch.nn.Module):
    """An activation with a tensor that is neither a parameter nor a buffer."""

    def __init__(self, width: int):
        super().__init__()
        self.factors = torch.full((width,), 2.0)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.factors * torch.nn.functional.silu(states)


@pytest.mark.slow
@torch.inference_mode()
def test_a_layer_with_a_tensor_that_is_no_input_is_not_compiled(monkeypatch, capfd):
    monkeypatch.setattr(compiled_layers, "_UNCOMPILED", {})
    with torch.inference_mode(False):
        model = random_model("llama", 0)
        for layer in model.model.layers:
            layer.mlp.act_fn = Doubled(model.config.intermediate_size)
        target, ids = driven(model), torch.randint(3, 60, (1, PROMPT + TOKENS))
    assert torch.equal(logits_of(target, ids)["chain"], logits_of(plain(target), ids)["chain"])
    lines = capfd.readouterr().err.splitlines()
    reason = "TraceError: it reads a tensor that is none of its parameters and buffers"
    assert lines == [f"warning: LlamaDecoderLayer is not compiled: {reason}"]
    assert compiled_layers.uncompiled() == {"LlamaDecoderLayer": reason}


@torch.inference_mode()
def test_a_trace_leaves_other_layers_alone():
    """A thread may trace while another one is in a pass of another model."""
    with torch.inference_mode(False):
        target, other = compiled("llama"), compiled("llama")
    states = torch.randn(1, TOKENS, other.hidden_size)
    expected = other.layers[0].mlp(states)
    with target.stack.compiled[0]._traceable(lambda *_, **__: None):
        assert torch.equal(other.layers[0].mlp(states), expected)


@pytest.mark.parametrize(
    ("command", "programs"),
    [(["clang++"], ("clang++",)), (["ccache", "g++"], COMPILERS), (["g++", "-m64"], COMPILERS)],
)
def test_layers_are_compiled_by_what_has_compiled_the_kernels(monkeypatch, command, programs):
    """Torch's compiler takes no arguments, and by itself looks for g++ alone."""
    asked = {}

    def compile(*_, dynamic_shapes, options):
        asked.update(options["config_patches"])
        raise NotImplementedError

    monkeypatch.setattr(compiled_layers, "compiler", lambda: command)
    monkeypatch.setattr(torch._inductor, "standalone_compile", compile)
    with pytest.raises(NotImplementedError):
        compiled_layers._compile(SimpleNamespace(code=""), [], "a layer")
    assert asked["cpp.cxx"] == programs


def test_a_library_that_a_killed_linker_has_left_is_removed(tmp_path):
    """Torch's compiler would load it, in this run and in every later one."""
    for name, content in {"empty": b"", "torn": bytes(64), "whole": b"\x7fELF...", "new": b""}.items():
        path = tmp_path / name / "layer.so"
        path.parent.mkdir()
        path.write_bytes(content)
        if name != "new":  # that another process is linking
            os.utime(path, (0, 0))
    compiled_layers._remove_torn(tmp_path)
    assert {path.parent.name for path in tmp_path.rglob("*.so")} == {"whole", "new"}


def test_of_what_a_compiler_prints_the_first_error_is_told():
    lines = ["C++ compile error", "Command:", "g++ -Werror x.cpp", "In file included from x.cpp:1:"]
    lines += ["x.h:1:10: fatal error: Python.h: No such file or directory", "x.h:2:1: error: 'y' is no type"]
    told = compiled_layers._reason(RuntimeError("\n".join(lines)))
    assert told == "x.h:1:10: fatal error: Python.h: No such file or directory"
    assert compiled_layers._reason(RuntimeError("no operation\nat all")) == "RuntimeError: no operation"


def test_each_processor_has_a_folder_and_each_set_of_its_instructions(monkeypatch):
    folders = {compiled_layers._folder()}
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        folders.add(compiled_layers._folder())
    monkeypatch.setattr(compiled_layers, "processor", lambda: "another")
    folders.add(compiled_layers._folder())
    assert len(folders) == 3 and len({folder.parent for folder in folders}) == 1


@torch.inference_mode()
def test_layers_with_hooks_are_not_compiled(monkeypatch, capfd):
    monkeypatch.setattr(compiled_layers, "_UNCOMPILED", {})
    with torch.inference_mode(False):
        target, ids = compiled("llama"), torch.randint(3, 60, (1, PROMPT + TOKENS))
    met = []
    for layer in target.layers:
        layer.mlp.register_forward_hook(lambda *_: met.append(1))
    logits_of(target, ids)
    assert met and not target.stack.is_compiled
