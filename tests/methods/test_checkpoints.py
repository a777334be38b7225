"""Checkpoints of trained parts: where they are read, what is left out of them, and parts that are ready to draft."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from methods.common.checkpoints import (
    EMBEDDING,
    HEAD,
    WEIGHTS,
    Checkpoint,
    read_checkpoint,
    ready,
    sizes_trained_for,
    unknown_settings,
    write_checkpoint,
)
from specbench.decoding.cpu.packed_linear import PackedLinear
from specbench.decoding.model.staged_model import StagedModel
from specbench.system.errors import UserError
from tests.support.decoding import random_pair

WHAT = "the part"
EXPANSION = SimpleNamespace(old=SimpleNamespace(hidden=32, layers=2, vocab=50))


def target() -> StagedModel:
    return StagedModel(random_pair("llama").target)


def part(state: dict[str, torch.Tensor] | None = None) -> Checkpoint:
    return Checkpoint("folder", WHAT, {}, {} if state is None else state)


def copies() -> dict[str, torch.Tensor]:
    """The target's own, and a tensor beside them."""
    model = target()
    embedding, head = (part.weight.detach().clone() for part in (model.embed_tokens, model.lm_head))
    return {EMBEDDING: embedding, HEAD: head, "fc.weight": torch.ones(2)}


def test_a_folder_of_the_project_is_read_from_wherever_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = read_checkpoint("specbench/tiny/weights/medusa", WHAT, [WEIGHTS])
    assert found.settings["medusa_num_heads"] == len({name.split(".")[0] for name in found.state})


def test_whoever_reads_the_settings_of_a_part_reads_its_weights(tmp_path):
    write_checkpoint(tmp_path, {}, {"a": torch.ones(2)}, torch.float32)
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", WEIGHTS)}
    assert len(modes) == 1


@pytest.mark.parametrize("wrong", [{"hidden_size": "wide"}, {"hidden_size": 7, "num_attention_heads": 2}])
def test_a_config_of_wrong_values_is_one_line(wrong):
    with pytest.raises(UserError, match=r"the part in 'folder' cannot be used: config\.json: ") as caught:
        part().config(LlamaConfig, wrong)
    assert "\n" not in str(caught.value)
    assert part().config(LlamaConfig, {"hidden_size": 64}).hidden_size == 64


def test_a_config_without_a_width_is_of_no_known_form():
    """Such as vLLM's for EAGLE-1, which nests the drafter's settings."""
    with pytest.raises(UserError, match=r"config\.json names no hidden_size"):
        part().check_width(None, 32)
    with pytest.raises(UserError, match="made for another target"):
        part().check_width(64, 32)


def test_what_older_versions_wrote_for_generation_is_no_setting_of_drafting():
    written = {
        "max_length": 20,
        "top_k": 50,
        "temperature": 1.0,
        "decoder_start_token_id": 7,
        "unsloth_fixed": True,
    }
    assert [*unknown_settings(written, set(), {})] == []
    assert [*unknown_settings(written | {"new_rule": 1}, set(), {})] == [
        "sets new_rule, which is not known here"
    ]


def test_a_part_was_trained_for_the_target_as_it_was_before_it_was_expanded():
    model = target()
    sizes = model.hidden_size, len(model.layers), model.vocab_size
    assert sizes_trained_for(model, None) == sizes != (32, 2, 50)
    assert sizes_trained_for(model, EXPANSION) == (32, 2, 50)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_copies_of_the_targets_weights_are_left_out_once_they_are_compared(name):
    state = copies()
    part(state).drop_copies(target(), None)
    assert state.keys() == {"fc.weight"}
    changed = copies()
    changed[name][0] += 1
    with pytest.raises(UserError, match=f"'folder' were made for another target: {name} is not"):
        part({**changed}).drop_copies(target(), None)
    part(changed).drop_copies(target(), EXPANSION)  # whose weights are others
    assert changed.keys() == {"fc.weight"}


def test_a_head_that_is_no_copy_stays():
    state = copies() | {HEAD: torch.ones(3, 64)}
    part(state).drop_copies(target(), None, [EMBEDDING])
    assert state.keys() == {HEAD, "fc.weight"}


def test_a_part_that_is_ready_has_no_gradients_and_packed_products():
    like = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    model = ready(torch.nn.Sequential(torch.nn.Linear(4, 3)), like)
    assert not model.training and isinstance(model[0], PackedLinear)
    assert all(not weight.requires_grad and weight.dtype == torch.bfloat16 for weight in model.parameters())


def test_every_tensor_that_does_not_fit_is_named():
    model, state = torch.nn.Linear(4, 3), {"weight": torch.ones(3, 5), "more": torch.ones(1)}
    with pytest.raises(UserError, match=r"missing bias; unknown more; weight is \(3, 5\), not \(3, 4\)"):
        part(state).fill(model.state_dict())
    part({"weight": torch.ones(3, 4), "bias": torch.zeros(3)}).fill(model.state_dict())
    assert bool((model.weight == 1).all()) and not model.bias.any()
