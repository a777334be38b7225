"""Training an adapter: what the loss sees, that it learns, that it goes on when stopped, where texts come from."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from methods.common.training import agreement, batches
from methods.kangaroo import train as kangaroo_train
from methods.kangaroo.adapter import Adapter, adapter_config, load_adapter
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import load_pair
from tests.support.decoding import random_pair
from tests.support.training import Stopped, stop_after, training_settings

pytestmark = pytest.mark.slow


def batch_of(*weights: float) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(3, 3 + len(weights)).unsqueeze(0),
        "loss_weight": torch.tensor([weights]),
    }


def test_loss_counts_exactly_the_predictions_of_weighted_tokens():
    """Token 4 weighs: the one term is the cross-entropy at position 3, teacher and student at the same place."""
    target = StagedModel(random_pair("llama").target)
    adapter = Adapter(adapter_config(target.config))
    batch = batch_of(0, 0, 0, 0, 1.0, 0)
    with torch.no_grad():
        out = target.model(batch["input_ids"], output_hidden_states=True)
        rope = adapter.rope(torch.arange(6).unsqueeze(0), out.hidden_states[2])
        student = target.unembed(adapter(out.hidden_states[2], position_embeddings=rope))[0, 3].log_softmax(
            -1
        )
        expected = -(out.logits[0, 3].softmax(-1) * student).sum()
    loss = kangaroo_train.Distillation(adapter, target, 2)(batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())
    assert all(p.grad is None for p in target.model.parameters())


def test_weights_are_weights():
    target = StagedModel(random_pair("llama").target)
    adapter = Adapter(adapter_config(target.config))
    loss = kangaroo_train.Distillation(adapter, target, 2)
    with torch.no_grad():
        first, second = loss(batch_of(0, 0, 0, 1.0, 0)), loss(batch_of(0, 0, 0, 0, 1.0))
        both = loss(batch_of(0, 0, 0, 0.25, 0.75))
    torch.testing.assert_close(both, 0.25 * first + 0.75 * second)


def settings(workplace, out, *more: str):
    return training_settings("train_kangaroo", workplace, out, "learning_rate=1e-2", *more)


def test_training_learns_and_a_stopped_one_goes_on_to_the_same_adapter(workplace, tmp_path, monkeypatch):
    cfg = settings(workplace, tmp_path / "whole")
    whole = kangaroo_train.train(cfg)
    pair = load_pair(cfg.pair, 0, with_draft=False)
    target = StagedModel(pair.target)
    held_out = list(islice(batches(cfg, pair, held_out=True), 2))
    trained = load_adapter(whole, StagedModel(pair.target))
    torch.manual_seed(0)
    fresh, _ = kangaroo_train.fresh_adapter(target, 2)
    modules = [kangaroo_train.Distillation(adapter, target, 2) for adapter in (fresh, trained)]
    score = [agreement(module.choices, held_out) for module in modules]
    assert score[1] > score[0] + 0.3
    kept = json.loads((whole / "config.json").read_text())
    assert kept["exit_layer"] == 2 and kept["held_out_agreement"] > score[0] + 0.3

    stop_after(monkeypatch, kangaroo_train.Distillation, 35)
    cfg = settings(workplace, tmp_path / "stopped")
    with pytest.raises(Stopped):
        kangaroo_train.train(cfg)
    assert sorted(p.name for p in (tmp_path / "stopped/checkpoints").iterdir()) == [".lock", "state-30"]
    monkeypatch.undo()
    resumed = load_adapter(kangaroo_train.train(cfg), StagedModel(pair.target))
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, msg=name)


def test_an_adapter_begins_like_a_layer_of_its_target_where_it_can():
    for heads, same in ((4, True), (2, False)):
        target = StagedModel(random_pair("llama", num_key_value_heads=heads).target)
        adapter, is_like = kangaroo_train.fresh_adapter(target, 3)
        attention = adapter.layers[0].self_attn
        assert torch.equal(adapter.norm.weight, target.norm.weight) and is_like == same
        assert torch.equal(attention.q_proj.weight, target.layers[3].self_attn.q_proj.weight) == same
        assert (attention.o_proj.weight == 0).all() == (not same)
