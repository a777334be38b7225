"""Training an adapter: what the loss sees, that it learns, that it goes on when stopped, where texts come from."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from hydra import compose, initialize_config_dir

from methods.kangaroo import train as kangaroo_train
from methods.kangaroo.adapter import Adapter, adapter_config, load_adapter
from methods.training import assistant_tokens, conversation_batches
from specbench.bench import CONF
from specbench.decoding.target import Target
from specbench.errors import UserError
from specbench.pairs import load_pair
from tests.decoding.helpers import random_pair
from tests.models import save_pair


def batch_of(*weights: float) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(3, 3 + len(weights)).unsqueeze(0),
        "loss_weight": torch.tensor([weights]),
    }


def test_loss_counts_exactly_the_predictions_of_weighted_tokens():
    """Token 4 weighs: the one term is the cross-entropy at position 3, teacher and student at the same place."""
    target = Target(random_pair("llama").target)
    adapter = Adapter(adapter_config(target.config))
    batch = batch_of(0, 0, 0, 0, 1.0, 0)
    with torch.no_grad():
        out = target.model(batch["input_ids"], output_hidden_states=True)
        rope = adapter.rope(torch.arange(6).unsqueeze(0), out.hidden_states[2])
        student = target.unembed(adapter(out.hidden_states[2], rope))[0, 3].log_softmax(-1)
        expected = -(out.logits[0, 3].softmax(-1) * student).sum()
    loss = kangaroo_train.distillation(target, 2)(adapter, batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in adapter.parameters())
    assert all(p.grad is None for p in target.model.parameters())


def test_weights_are_weights():
    target = Target(random_pair("llama").target)
    adapter = Adapter(adapter_config(target.config))
    loss = kangaroo_train.distillation(target, 2)
    with torch.no_grad():
        first, second = loss(adapter, batch_of(0, 0, 0, 1.0, 0)), loss(adapter, batch_of(0, 0, 0, 0, 1.0))
        both = loss(adapter, batch_of(0, 0, 0, 0.25, 0.75))
    torch.testing.assert_close(both, 0.25 * first + 0.75 * second)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    save_pair(folder, num_hidden_layers=4)
    conversations = [
        {
            "messages": [
                {"role": "user", "content": f"say {w}"},
                {"role": "assistant", "content": f"{w} {w} {w}"},
            ]
        }
        for w in ("one", "two", "three", "four")
    ]
    (folder / "talk.jsonl").write_text("".join(json.dumps(c) + "\n" for c in conversations))
    return folder


def settings(workplace, out, *more: str):
    overrides = [
        f"pair.target={workplace}/target",
        f"pair.tokenizer={workplace}/target",
        "pair.device=cpu",
        f"conversations={workplace}/talk.jsonl",
        "steps=40",
        "batch_size=4",
        "length=64",
        "learning_rate=1e-2",
        "save_every=15",
        "save_dtype=float32",
        f"out={out}",
        *more,
    ]
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train_kangaroo", overrides=overrides)


def test_training_learns_and_a_stopped_one_goes_on_to_the_same_adapter(workplace, tmp_path, monkeypatch):
    cfg = settings(workplace, tmp_path / "whole")
    whole = kangaroo_train.train(cfg)
    pair = load_pair(cfg.pair, 0, with_draft=False)
    target = Target(pair.target)
    batches = list(islice(kangaroo_train._batches(cfg, pair, 5), 2))
    trained = load_adapter(whole, pair.target.config, "cpu", torch.float32)
    torch.manual_seed(0)
    fresh = kangaroo_train.fresh_adapter(target, 2)
    score = [kangaroo_train.agreement(target, 2, a, batches) for a in (fresh, trained)]
    assert score[1] > score[0] + 0.3
    assert json.loads((whole / "config.json").read_text())["exit_layer"] == 2

    class Stopped(Exception):
        pass

    make_loss = kangaroo_train.distillation

    def interrupted(*args):
        loss, calls = make_loss(*args), iter(range(35))

        def limited(*inner):
            if next(calls, None) is None:
                raise Stopped
            return loss(*inner)

        return limited

    cfg = settings(workplace, tmp_path / "stopped")
    monkeypatch.setattr(kangaroo_train, "distillation", interrupted)
    with pytest.raises(Stopped):
        kangaroo_train.train(cfg)
    assert [p.name for p in (tmp_path / "stopped/checkpoints").iterdir()] == ["state-30"]
    monkeypatch.setattr(kangaroo_train, "distillation", make_loss)
    resumed = load_adapter(kangaroo_train.train(cfg), pair.target.config, "cpu", torch.float32)
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, msg=name)


def test_an_adapter_begins_like_a_layer_of_its_target_where_it_can():
    for heads, same in ((4, True), (2, False)):
        target = Target(random_pair("llama", num_key_value_heads=heads).target)
        adapter = kangaroo_train.fresh_adapter(target, 3)
        attention = adapter.layers[0].self_attn
        assert torch.equal(adapter.norm.weight, target.norm.weight)
        assert torch.equal(attention.q_proj.weight, target.layers[3].self_attn.q_proj.weight) == same
        assert (attention.o_proj.weight == 0).all() == (not same)


def test_conversations_are_masked_turn_by_turn(workplace, tmp_path):
    pair = load_pair(settings(workplace, tmp_path).pair, 0, with_draft=False)
    turns = [("human", "a?"), ("gpt", "bb"), ("human", "c?"), ("gpt", "dd")]
    file = tmp_path / "sharegpt.jsonl"
    file.write_text(json.dumps({"conversations": [{"from": f, "value": v} for f, v in turns]}) + "\n")
    batch = next(conversation_batches(assistant_tokens(pair), file, 2, 64, 0))
    ids, weights = batch["input_ids"][0], batch["loss_weight"][0]
    assert pair.tokenizer.decode(ids) == "<s><user>a?<assistant>bb</s><user>c?<assistant>dd</s>"
    assert pair.tokenizer.decode(ids[weights == 1]) == "bb</s>dd</s>"
    assert pair.tokenizer.decode(ids[:1]) == "<s>"  # BOS stays in


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{]", "line 1"),
        ('{"messages": [{"role": "user"}]}', "line 1"),
        ('{"messages": []}', "holds no conversation"),
    ],
)
def test_bad_conversations_are_named(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content + "\n")
    with pytest.raises(UserError, match=message):
        next(conversation_batches(lambda m: ([], []), tmp_path / "bad.jsonl", 1, 8, 0))


def test_a_pair_without_text_asks_for_conversations(workplace, tmp_path):
    with pytest.raises(UserError, match="conversations=FILE"):
        kangaroo_train.train(settings(workplace, tmp_path, "conversations=null", "pair.training=null"))
