"""GGUF files: the models and tokenizers that they become, and files that cannot be read."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Starcoder2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specbench.models import gguf as conversion
from specbench.models.gguf import MODEL, converted, is_gguf, source_of
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.commands import measure_here, run_main
from tests.support.conf import composed
from tests.support.gguf import rounded, write_gguf

pytestmark = pytest.mark.slow  # a file is written, read and converted

PARTIAL = f"partial-{MODEL}"  # as `made_once` names what is not complete
CHAT = [{"role": "user", "content": "How many owls are there?"}]


@pytest.fixture(scope="module")
def tiny():
    """The embedded pair, of which the files are made."""
    return load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, 0, with_draft=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def file_of(tiny, path: Path, **options) -> Path:
    """A GGUF file of the draft model, which is the smaller one."""
    write_gguf(path, tiny.draft, tiny.tokenizer, **options)
    return path


def loaded(path: Path, *overrides: str):
    return load_pair(
        composed("bench", "pair=tiny", f"pair.target={path}", "pair.tokenizer=null", *overrides).pair,
        0,
        with_draft=False,
    )


def test_a_file_in_float32_becomes_the_very_model_with_its_tokenizer_template_and_stop_ids(tiny, tmp_path):
    pair = loaded(file_of(tiny, tmp_path / "small.gguf"))
    theirs, ours = pair.target.state_dict(), tiny.draft.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert pair.prompt_ids(CHAT) == tiny.prompt_ids(CHAT)
    assert tiny.tokenizer.eos_token_id in pair.stop_ids
    assert pair.tokenizer.get_vocab() == tiny.tokenizer.get_vocab()
    assert pair.source == "from a GGUF file in F32"


def test_tokens_that_stand_for_padding_are_none(tiny, tmp_path):
    """Files of one family differ in them, where their models have more or fewer rows."""
    pair = loaded(file_of(tiny, tmp_path / "small.gguf", padding=3))
    assert pair.tokenizer.get_vocab() == tiny.tokenizer.get_vocab()
    assert pair.prompt_ids(CHAT) == tiny.prompt_ids(CHAT) and pair.vocab_size == tiny.vocab_size


def test_a_file_is_dequantised_into_the_pairs_dtype(tiny, tmp_path, cache):
    """A large one would take twice the memory in float32, and as much of the disk."""
    path = file_of(tiny, tmp_path / "small.gguf")
    sizes = [
        (converted(path, dtype) / "model.safetensors").stat().st_size for dtype in ("float32", "bfloat16")
    ]
    assert sizes[1] < 0.6 * sizes[0] and len([*cache.iterdir()]) == 2
    half, whole = (loaded(path, f"pair.dtype={dtype}").target for dtype in ("bfloat16", "float32"))
    for ours, theirs in zip(half.parameters(), whole.parameters()):
        assert torch.equal(ours, theirs.to(torch.bfloat16))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_quantised_file_becomes_the_model_of_its_rounded_weights(tiny, tmp_path, kind):
    path = file_of(tiny, tmp_path / "small.gguf", kind=kind)
    pair = loaded(path)
    expected = AutoModelForCausalLM.from_config(tiny.draft.config, dtype=torch.float32)
    expected.load_state_dict(tiny.draft.state_dict())
    rounded(expected, kind)
    weights = pair.target.state_dict()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)
    assert pair.source == f"dequantised from {kind}"
    assert loaded(path, "pair.dtype=bfloat16").target.dtype == torch.bfloat16


@pytest.mark.nightly
def test_it_is_converted_once_and_by_one_of_two_processes(tiny, tmp_path, cache):
    path = file_of(tiny, tmp_path / "small.gguf")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(converted, [path, path])
    assert first == second
    [folder] = cache.iterdir()
    written = (folder / MODEL / "model.safetensors").stat().st_mtime_ns
    assert converted(path) == first
    assert (folder / MODEL / "model.safetensors").stat().st_mtime_ns == written
    assert not (folder / PARTIAL).exists()


def test_what_a_killed_conversion_left_is_done_anew(tiny, tmp_path, cache, monkeypatch):
    path = file_of(tiny, tmp_path / "small.gguf")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        converted(path)
    [folder] = cache.iterdir()
    assert (folder / PARTIAL / "config.json").exists()
    assert not (folder / MODEL).exists()
    monkeypatch.undo()
    monkeypatch.setenv("SPECBENCH_CACHE", str(cache.parent))
    assert source_of(converted(path)) == "from a GGUF file in F32"


@pytest.mark.nightly
def test_another_file_of_the_same_name_is_another_model(tiny, tmp_path):
    path = file_of(tiny, tmp_path / "small.gguf")
    first = converted(path)
    assert converted(file_of(tiny, path, kind="Q8_0")) != first


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def not_one(path: Path) -> None:
    path.write_bytes(b"GIF89a" + bytes(100))


@pytest.mark.parametrize("damage", [cut_in_half, not_one, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_one_line(tiny, tmp_path, damage):
    path = file_of(tiny, tmp_path / "small.gguf")
    damage(path)
    with pytest.raises(UserError, match=r"cannot read '.*small\.gguf'") as caught:
        converted(path)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_architecture_is_one_line(tiny, tmp_path):
    path = file_of(tiny, tmp_path / "small.gguf", architecture="rwkv6")
    with pytest.raises(UserError, match=r"cannot read .* architecture rwkv6 is not supported"):
        converted(path)


def test_a_file_that_lacks_a_tensor_is_refused(tiny, tmp_path):
    path = file_of(tiny, tmp_path / "small.gguf", left_out="blk.1.ffn_up.weight")
    with pytest.raises(UserError, match=r"lacks 1 tensors, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        converted(path)


def test_a_file_with_weights_that_nothing_reads_is_refused(tiny, tmp_path):
    """Such as biases that the family does not have: without them it would be another model."""
    path = file_of(tiny, tmp_path / "small.gguf", added={"blk.1.ffn_up.bias": 64})
    with pytest.raises(UserError, match=r"holds .* weights, of which transformers reads"):
        converted(path)


@pytest.mark.nightly
def test_a_file_whose_vocabulary_does_not_fit_the_draft_model_is_one_line(tiny, tmp_path):
    target = file_of(tiny, tmp_path / "other.gguf", renamed={1: "<|person|>"})
    draft = file_of(tiny, tmp_path / "small.gguf")
    both = f"pair.target={target}", f"pair.draft={draft}", "pair.tokenizer=null"
    cfg = composed("bench", "pair=tiny", *both).pair
    with pytest.raises(UserError, match=r"the vocabularies differ: id 1 is '<\|person\|>'"):
        load_pair(cfg, 0, with_draft=True)


def test_names_of_files():
    assert is_gguf("/models/x.gguf")
    assert not is_gguf("org/x-GGUF")


def test_a_run_names_the_form_of_the_weights_and_is_exact(tiny, tmp_path, monkeypatch, capfd):
    path = file_of(tiny, tmp_path / "small.gguf", kind="Q8_0")
    measure_here(monkeypatch)
    code, out, err = run_main(
        monkeypatch,
        capfd,
        *("method=pld", "pair=tiny", f"pair.target={path}", "pair.tokenizer=null", "data.limit=1"),
        *("task=qa", "decoding.max_new_tokens=8", f"runs_root={tmp_path / 'runs'}"),
    )
    assert code == 0, err
    folder = Path(out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights_source"] == "dequantised from Q8_0"
    assert "float32 (dequantised from Q8_0)" in " ".join(out.split())
    assert summary["equivalence"]["exact"] == summary["equivalence"]["answers"] > 0
    provenance = json.loads((folder / "provenance.json").read_text())
    assert list(provenance["weights"]["target"]["files"]) == ["small.gguf"]


def test_a_file_that_is_not_there_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch, capfd):
    code, _, err = run_main(monkeypatch, capfd, "method=pld", f"pair.target={tmp_path / 'none.gguf'}")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: there is no file")


def reader_of(arch: str = "llama", divisors=None, **scaling) -> SimpleNamespace:
    """What is read of a file's rotary positions."""
    fields = {f"{arch}.rope.scaling.{k}": SimpleNamespace(contents=lambda v=v: v) for k, v in scaling.items()}
    tensors = (
        [] if divisors is None else [SimpleNamespace(name=conversion.FREQUENCIES, data=divisors.numpy())]
    )
    return SimpleNamespace(fields=fields, tensors=tensors)


def test_the_scaling_of_rotary_positions_is_that_of_the_file():
    usual = {"rope_type": "default", "rope_theta": 500000.0}

    def scaled(reader) -> dict:
        config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(usual))
        conversion._scale_rope(config, reader)
        return config.rope_parameters

    llama_3 = usual | {"rope_type": "llama3", "factor": 32.0} | conversion.LLAMA_3
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=llama_3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    divisors = 500000.0 ** -(torch.arange(64).float() / 64) / frequencies
    assert scaled(reader_of(divisors=divisors)) == llama_3
    assert scaled(reader_of()) == scaled(reader_of(type="none")) == usual
    assert scaled(reader_of(type="linear", factor=4.0)) == usual | {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(UserError, match="'yarn' are not read"):
        scaled(reader_of(type="yarn", factor=4.0))
    partial = reader_of()
    partial.fields["llama.rope.dimension_count"] = SimpleNamespace(contents=lambda: 96)
    with pytest.raises(UserError, match="rotates 96 of 128 numbers"):
        scaled(partial)
    factors = reader_of()
    factors.tensors = [SimpleNamespace(name="rope_factors_long.weight")]
    with pytest.raises(UserError, match="rope_factors_long"):
        scaled(factors)
    with pytest.raises(UserError, match="not those of Llama 3"):
        scaled(reader_of(divisors=divisors.flip(0)))


def test_numbers_of_attention_that_transformers_does_not_read_are_those_of_the_file():
    def completed(config, **numbers):
        fields = {f"arch.{k}": SimpleNamespace(contents=lambda v=v: v) for k, v in numbers.items()}
        conversion._complete(config, SimpleNamespace(fields=fields, tensors=[]))
        return config

    starcoder = completed(Starcoder2Config(), **{"rope.freq_base": 1e5, "attention.sliding_window": 4096})
    assert starcoder.rope_parameters["rope_theta"] == 1e5 and starcoder.sliding_window == 4096
    assert completed(Starcoder2Config()).rope_parameters["rope_theta"] == 1e4
    old = completed(LlamaConfig(), **{"rope.scale_linear": 4.0})
    assert old.rope_parameters["rope_type"] == "linear" and old.rope_parameters["factor"] == 4.0
    assert completed(LlamaConfig(), **{"rope.scale_linear": 1.0}).rope_parameters["rope_type"] == "default"
    gemma = Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32)
    theta = gemma.rope_parameters["sliding_attention"]["rope_theta"]
    completed(gemma, **{"rope.freq_base": 2e6})
    assert gemma.query_pre_attn_scalar == 168
    assert gemma.rope_parameters["full_attention"]["rope_theta"] == 2e6
    assert gemma.rope_parameters["sliding_attention"]["rope_theta"] == theta
    assert completed(Gemma3TextConfig()).query_pre_attn_scalar == 256


def test_what_ends_a_turn_of_chat_ends_an_answer(tiny, tmp_path, monkeypatch):
    """Files name one token as the end, and chat models end a turn with others."""
    vocabulary = tiny.tokenizer.get_vocab()
    word = max(set(vocabulary.values()) - tiny.stop_ids - {*tiny.tokenizer.all_special_ids})
    monkeypatch.setattr(conversion, "END_TOKENS", (tiny.tokenizer.convert_ids_to_tokens(word),))
    assert loaded(file_of(tiny, tmp_path / "a.gguf")).stop_ids == {word, tiny.tokenizer.eos_token_id}
