"""Kangaroo's own promises: what is drafted, what is in its caches, what no layer does twice, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from methods.kangaroo import Kangaroo
from methods.kangaroo.adapter import Adapter, adapter_config, load_adapter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support.checkpoints import RunsCode, spoil
from tests.support.decoding import PROMPT, random_pair, tokens_through_layers
from tests.support.methods import saved_adapter
from tests.support.models import random_model


@pytest.fixture
def folder(tmp_path):
    return saved_adapter(random_pair("llama"), tmp_path)


def run(folder: str, gamma: int, eta: float, kind=Kangaroo, cap: int = 40):
    pair = random_pair("llama")
    drafter = kind(pair, folder, 2, gamma, eta)
    return Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(cap)).steps


def full_rounds(steps, gamma: int, cap: int = 40) -> list:
    """The rounds in which the cap left room for gamma draft tokens and one of the target."""
    full, emitted = [], 1
    for step in steps:
        if cap - emitted > gamma:
            full.append(step)
        emitted += step.emitted
    return full


@pytest.mark.slow
def test_eta_zero_drafts_gamma_and_eta_one_drafts_one(folder):
    for gamma in (1, 3, 6):
        steps = full_rounds(run(folder, gamma, 0.0), gamma)
        assert {s.drafted for s in steps} == {gamma}
    assert {s.drafted for s in full_rounds(run(folder, 6, 1.0), 6)} == {1}


def test_between_them_the_length_follows_the_confidence(folder):
    lengths = {s.drafted for s in full_rounds(run(folder, 6, 0.4), 6)}
    assert len(lengths) > 1 and lengths <= set(range(1, 7))


def test_caches_after_every_round(folder):
    """The target holds all but the pending token in every layer; the adapter the same, but for the last draft token
    after a full acceptance; and what it holds is what one pass over the known tokens would give."""
    seen = set()

    class Checked(Kangaroo):
        def commit(self, batch, verified):
            super().commit(batch, verified)
            (sequence,), held = batch.sequences, self._adapted[0]
            known = sequence.length - 1
            full = known - held
            assert full == (verified.counts[0] == verified.logits.shape[1] - 1)
            seen.add(bool(full))
            fresh = self.target.new_cache(known)
            hidden = self.target.embed(torch.tensor([sequence.tokens[:-1]]))
            states = self.target.run_layers(hidden, fresh, 0, 0, 2)
            whole = self.target.run_layers(states, fresh, 0, 2)
            assert whole.shape == states.shape
            other = self.adapter.new_cache(known)
            other.begin_pass(0, 1, ForwardContext.consecutive(0, known), 1, known)
            rope = self.adapter.rope(torch.arange(known).unsqueeze(0), states)
            self.adapter(states, position_embeddings=rope, past_key_values=other)
            for cache, expected, n in (
                (self._layer_cache.layout.cache, other, held),
                (batch.layout.cache, fresh, known),
            ):
                ours, theirs = (c.segments[0][:, :, :, :n] for c in (cache, expected))
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(self._before[:1], states[:, -1:], atol=1e-4, rtol=1e-4)

    run(folder, 3, 0.0, Checked)
    assert seen == {True, False}


def test_no_layer_sees_a_token_twice_in_a_round(folder):
    pair = random_pair("llama")
    with tokens_through_layers(pair.target) as tokens:
        steps = run(folder, 4, 0.0)
    assert tokens == [len(PROMPT) + sum(s.drafted + 1 for s in steps)] * len(tokens)


def test_bytes_of_a_round(folder):
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    adapter = load_adapter(folder, StagedModel(pair.target))
    adapter_bytes = 4 * sum(p.numel() for p in adapter.parameters())
    head, shallow = target.pass_bytes(0, 0), target.pass_bytes(0, 2, head=False)
    rounds = full_rounds(run(folder, 4, 0.0), 4)
    assert rounds
    for step in rounds:
        assert step.draft_bytes == 4 * (adapter_bytes + head) + 5 * shallow
        assert step.target_bytes == target.pass_bytes(2)


@pytest.mark.parametrize(("width", "heads", "count"), [(4096, 32, 67_117_056), (5120, 40, 104_867_840)])
def test_parameters_of_the_published_adapters(width, heads, count):
    with torch.device("meta"):
        adapter = Adapter(adapter_config(LlamaConfig(hidden_size=width, num_attention_heads=heads)))
    assert sum(p.numel() for p in adapter.parameters()) == count
    assert set(adapter.state_dict()) == {
        "norm.weight",
        "layers.0.input_layernorm.weight",
        *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
    }


def test_loads_the_authors_format(folder, tmp_path):
    """config.json without head_dim, a pickle, and the rotary buffer that old transformers stored."""
    pair = random_pair("llama")
    state = load_file(f"{folder}/model.safetensors")
    authors = tmp_path / "authors"
    authors.mkdir()
    config = pair.target.config
    (authors / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": config.hidden_size,
                "intermediate_size": 99,
                "num_attention_heads": config.num_attention_heads,
                "num_hidden_layers": 1,
                "rms_norm_eps": 1e-6,
                "vocab_size": config.vocab_size,
                "torch_dtype": "float16",
            }
        )
    )
    torch.save(
        state | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, authors / "pytorch_model.bin"
    )
    ours, theirs = (load_adapter(f, StagedModel(pair.target)) for f in (folder, authors))
    hidden = torch.randn(1, 5, config.hidden_size)
    rope = ours.rope(torch.arange(5).unsqueeze(0), hidden)
    assert torch.equal(*(one(hidden, position_embeddings=rope) for one in (ours, theirs)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.weight"), "missing norm.weight"),
        (lambda s: s.update({"lm_head.weight": torch.ones(2)}), "unknown lm_head.weight"),
        (lambda s: s.update({"norm.weight": torch.ones(2)}), r"norm.weight is \(2,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(folder, change, message):
    spoil(folder, change)
    with pytest.raises(UserError, match=message):
        load_adapter(folder, StagedModel(random_pair("llama").target))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_adapter_that_cannot_be_read_is_refused(folder, name):
    (Path(folder) / name).write_text("neither JSON nor tensors")
    with pytest.raises(UserError, match=f"adapter .*'{folder}'.*: "):
        load_adapter(folder, StagedModel(random_pair("llama").target))


def test_an_adapter_whose_folder_is_a_file_is_refused(folder):
    with pytest.raises(UserError, match=r"adapter .*config\.json"):
        load_adapter(f"{folder}/config.json", StagedModel(random_pair("llama").target))


def test_an_adapter_of_another_width_is_refused(folder):
    with pytest.raises(UserError, match="another target"):
        load_adapter(folder, StagedModel(random_model("llama", 0, hidden_size=48)))


def edited(folder: str, **settings: object) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_an_adapter_for_another_vocabulary_is_told(folder, capsys):
    target = StagedModel(random_pair("llama").target)
    load_adapter(folder, target)
    assert capsys.readouterr().err == ""
    edited(folder, vocab_size=99)
    load_adapter(folder, target)
    assert f"'{folder}' were made for a target of 99 tokens, and this one has 61" in capsys.readouterr().err


def test_an_adapter_whose_angles_are_those_of_a_whole_pass_is_refused(folder):
    edited(folder, rope_parameters=None, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UserError, match="'dynamic'"):
        load_adapter(folder, StagedModel(random_pair("llama").target))


def test_a_pickle_that_runs_code_is_not_loaded(folder, tmp_path):
    (tmp_path / "model.safetensors").unlink()
    torch.save({"norm.weight": RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="[Ww]eights.only"):
        load_adapter(folder, StagedModel(random_pair("llama").target))


def test_the_exit_layer_is_the_adapters_own_or_said(folder, monkeypatch):
    pair = random_pair("llama")
    for layer in (None, 99):
        with pytest.raises(UserError, match=r"set exit_layer" if layer is None else r"exit_layer .*\b99\b"):
            Kangaroo(pair, folder, layer)
    saved_adapter(pair, folder, exit_layer=3)
    assert Kangaroo(pair, folder).exit_layer == Kangaroo(pair, folder, 3).exit_layer == 3
    with pytest.raises(UserError, match=r"exit layer .*\b3\b.*\b2\b"):
        Kangaroo(pair, folder, 2)
    # The config of a model that also sees holds that of its language model alone.
    text = pair.target.config
    monkeypatch.setattr(pair.target, "config", SimpleNamespace(get_text_config=lambda: text))
    assert Kangaroo(pair, folder).exit_layer == 3
