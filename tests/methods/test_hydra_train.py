"""Hydra and Hydra++: the fit of fresh heads, losses and ranks by hand, a whole training."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from methods.common.checkpoints import layer_sizes
from methods.hydra_heads import HydraHeads
from methods.hydra_heads.checkpoint import save_heads
from methods.hydra_heads.train import Distillation, fit, fresh_heads
from methods.hydra_heads.train import train as train_hydra_heads
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import load_pair
from tests.support.decoding import random_pair
from tests.support.hydra import KINDS, by_hand, finals, heads_for, prefix_model
from tests.support.methods import drafts
from tests.support.training import batch_of, training_settings, training_workplace


@pytest.mark.parametrize("prefix", [False, True])
def test_fitted_heads_estimate_their_states(prefix):
    target, ids = StagedModel(random_pair("llama").target), torch.randint(0, 60, (8, 64))
    batch = {"input_ids": ids, "loss_weight": torch.ones(ids.shape)}
    heads, _ = fresh_heads(target, 2, 1, prefix, False)
    states = finals_of(target, ids)

    def errors() -> list[float]:
        with torch.no_grad():
            guesses = Distillation(heads, target).states(batch, states)
        return [(guess - states[:, 1 + i :]).square().mean().item() for i, guess in enumerate(guesses)]

    before = errors()
    fit(heads, target, [batch])
    assert all(after < error / 2 for after, error in zip(errors(), before))


def finals_of(target: StagedModel, ids: torch.Tensor) -> torch.Tensor:
    """The target's states [B, T, d] after its final norm."""
    with torch.no_grad():
        return target.model.model(ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_by_hand(kind, tmp_path):
    """Head i at place t, given tokens t + 1 to t + 1 + i, against the target at t + 1 + i; token t + 2 + i counts.

    All three heads are judged by the same tokens: those with enough tokens in front for the last head.
    """
    pair = random_pair("llama")
    prefix, own = KINDS[kind]
    heads = heads_for(pair, prefix, own)
    save_heads(heads, tmp_path, torch.float32)
    ids, said = [5, 9, 20, 11, 4, 30, 8], [0, 0, 0, 1, 1, 0.5, 1]
    found = Distillation(heads, StagedModel(pair.target))(batch_of([ids], [said]))
    states = finals(pair, ids)
    teacher = pair.target.lm_head(states[0]).softmax(-1)
    if prefix:
        model = prefix_model(tmp_path, LlamaConfig(**layer_sizes(StagedModel(pair.target))))
        states = model(inputs_embeds=states, use_cache=False).last_hidden_state
    embedded = pair.target.model.embed_tokens(torch.tensor(ids))
    state, step, expected = load_file(tmp_path / "model.safetensors"), 2 if prefix else 1, 0.0
    for i in range(3):
        for t in range(2 - i, len(ids) - 2 - i):
            z = by_hand(state, i, torch.cat([states[0, t], *embedded[t + 1 : t + 2 + i]]), step)
            logits = heads.output[i](z) if own else pair.target.lm_head(z)
            expected += said[t + 2 + i] * -(teacher[t + 1 + i] * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in heads.parameters())
    assert pair.target.lm_head.weight.grad is None


def test_rank_paths_are_those_of_the_chain_on_the_true_tokens(tmp_path):
    """Counted in one pass; the ranks of what follows, each drafted after the true tokens in front."""
    pair = random_pair("llama")
    heads = heads_for(pair, prefix=True)
    ids = [5, 9, 20, 11, 4, 30, 8, 2]
    found = Distillation(heads, StagedModel(pair.target)).rank_paths(
        batch_of([ids], [[0, 0, 1, 1, 1, 1, 1, 1]])
    )
    save_heads(heads, tmp_path, torch.float32)
    model = prefix_model(tmp_path, LlamaConfig(**layer_sizes(StagedModel(pair.target))))
    states = model(inputs_embeds=finals(pair, ids), use_cache=False).last_hidden_state[0]
    state, embedded = (
        load_file(tmp_path / "model.safetensors"),
        pair.target.model.embed_tokens(torch.tensor(ids)),
    )
    expected: Counter = Counter()
    for place in range(
        1, 4
    ):  # the pending token, place + 1, is the assistant's, and so are the three after it
        ranks = []
        for i in range(3):
            read = torch.cat([states[place], *embedded[place + 1 : place + 2 + i]])
            logits = pair.target.lm_head(by_hand(state, i, read, 2))
            ranks.append(int((logits > logits[ids[place + 2 + i]]).sum()))
        for n in (1, 2, 3):
            if all(rank < 10 for rank in ranks[:n]):
                expected[tuple(ranks[:n])] += 1
    assert found == expected


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
def test_training_learns_and_what_is_saved_drafts_as_what_was_trained(prefix, tmp_path, monkeypatch):
    workplace = training_workplace(tmp_path)
    cfg = training_settings(
        "train_hydra_heads", workplace, tmp_path / "out", "learning_rate=1e-2", "heads=2", f"prefix={prefix}"
    )
    kept = {}
    from methods.hydra_heads import checkpoint

    def keep(heads, *args, **notes):
        kept["heads"] = heads
        save_heads(heads, *args, **notes)

    monkeypatch.setattr(checkpoint, "save_heads", keep)
    out = train_hydra_heads(cfg)
    settings = json.loads((out / "config.json").read_text())
    assert settings["head_2_agreement"] > 0.7 and len(settings["tree"]) == len(settings["tree_counts"]) > 0
    log = [
        json.loads(line)["held_out_agreement"] for line in (out / "train_log.jsonl").read_text().splitlines()
    ]
    assert log[-1] > log[0]
    pair = load_pair(cfg.pair, 0, with_draft=False)
    saved, trained = HydraHeads(pair, str(out)), HydraHeads(pair, str(out))
    trained.heads = kept["heads"].eval().requires_grad_(False)
    assert all(map(torch.equal, saved.heads.state_dict().values(), trained.heads.state_dict().values()))
    expected, found = (drafts(drafter, pair, 0.0) for drafter in (trained, saved))
    assert len(found) > 2 and all(torch.equal(a, b) for (a, _), (b, _) in zip(expected, found))
