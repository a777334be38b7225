"""EAGLE-1 in training: chained steps, the loss and the ranks by hand, what a fresh model does and a fit makes of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from methods.common.chained_steps import chained
from methods.eagle.train import Distillation, fit, fresh_model
from methods.eagle.train import pairs_of as eagle_pairs
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import NORMED
from tests.support.decoding import random_pair
from tests.support.eagle import by_chain, outputs, pairs_of
from tests.support.methods import fitted_eagle, true_states
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.training import batch_of

IDS = [[5, 9, 20, 11, 4, 30, 8, 2, 14, 40]]


def test_a_chained_step_is_the_step_of_a_draft():
    """Step j at row t: j tokens drafted after the true pairs up to t, with the text's own tokens."""
    pair, model = random_pair("llama"), fitted_eagle("llama")
    features, embeds = pairs_of(pair, IDS[0])
    for j, out in enumerate(chained(model, features, embeds, 4)):
        for t in range(features.shape[1] - j):
            expected = by_chain(model, pair, IDS[0][: t + 2], IDS[0][t + 2 : t + 2 + j])
            torch.testing.assert_close(out[0, t], expected, atol=1e-5, rtol=1e-4)


def test_the_loss_by_hand():
    """At row t: the state and the distribution of position t + 1, where token t + 2 counts."""
    pair, model = random_pair("llama"), fitted_eagle("llama")
    weights = [0, 0, 0, 1, 1, 0.5, 0, 1, 1, 0]
    found = Distillation(model, StagedModel(pair.target)).eval()(batch_of(IDS, [weights]))
    states = true_states(pair, torch.tensor(IDS), (NORMED,))[NORMED][0]
    out = outputs(model, *pairs_of(pair, IDS[0]))[0]
    size, expected = states[1:].pow(2).mean().sqrt(), 0.0
    for t in range(8):
        distance = torch.nn.functional.smooth_l1_loss(out[t] / size, states[t + 1] / size)
        teacher = pair.target.lm_head(states[t + 1]).softmax(-1)
        entropy = -(teacher * pair.target.lm_head(out[t]).log_softmax(-1)).sum()
        expected += weights[t + 2] * (distance + 0.1 * entropy)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_noise_only_while_it_learns():
    pair = random_pair("llama")
    model = fresh_model(StagedModel(pair.target))
    with torch.no_grad():  # a silent layer would not learn but in its last matrices
        model.layer.self_attn.o_proj.weight.normal_(0, 0.1)
        model.layer.mlp.down_proj.weight.normal_(0, 0.1)
    module, batch = Distillation(model, StagedModel(pair.target)), batch_of(IDS, [[1] * 10])
    losses = [module.train(mode)(batch) for mode in (False, False, True, True)]
    assert losses[0] == losses[1] and len({loss.item() for loss in losses}) == 3
    losses[-1].backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(p.grad is None for p in pair.target.parameters())


@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_a_fresh_model_passes_the_state_on(arch):
    """Its layer adds nothing."""
    target = StagedModel(random_pair(arch).target)
    model = fresh_model(target)
    h = model.config.hidden_size
    states, nothing = torch.randn(1, 5, h), torch.zeros(1, 5, h)
    joined = model.fc(torch.cat([nothing, states], dim=-1))
    torch.testing.assert_close(joined, states)
    torch.testing.assert_close(outputs(model, states, nothing), states)


def test_a_fitted_model_estimates_the_next_state_best():
    """Its errors have nothing in common with what it reads, as those of a least-squares fit."""
    pair = random_pair("llama")
    target, ids = StagedModel(pair.target), torch.randint(0, 60, (8, 64))
    batch = {"input_ids": ids, "loss_weight": torch.ones(ids.shape)}
    model = fresh_model(target)
    before = Distillation(model, target).eval()(batch)
    fit(model, target, [batch])
    features, embeds, goals = eagle_pairs(target, batch)
    inputs = torch.cat([embeds, features, torch.ones(*embeds.shape[:2], 1)], -1).flatten(0, 1)
    errors = (goals - model.fc(torch.cat([embeds, features], -1))).flatten(0, 1)
    products = (inputs.T @ errors) / (inputs.norm(dim=0).outer(errors.norm(dim=0)))
    assert products.abs().max() < 0.05
    assert errors.square().mean() < (goals - features).square().mean() / 2
    assert Distillation(model, target).eval()(batch) < before


def test_rank_paths_and_choices_by_hand(monkeypatch):
    monkeypatch.setattr(
        "methods.common.head_training.RANKS", 60
    )  # of a vocabulary this small: some tokens are among them
    pair, model = random_pair("llama"), fitted_eagle("llama")
    module = Distillation(model, StagedModel(pair.target))
    batch = batch_of(IDS, [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    found, (student, teacher) = module.rank_paths(batch), module.choices(batch)
    states = true_states(pair, torch.tensor(IDS), (NORMED,))[NORMED][0]
    ids, expected = IDS[0], Counter()
    for t in range(1, 3):  # token t + 1 is the assistant's, and so are the six after it
        ranks = []
        for j in range(6):
            logits = pair.target.lm_head(by_chain(model, pair, ids[: t + 2], ids[t + 2 : t + 2 + j]))
            ranks.append(int((logits > logits[ids[t + 2 + j]]).sum()))
        for n in range(1, 7):
            if all(rank < 60 for rank in ranks[:n]):
                expected[tuple(ranks[:n])] += 1
    assert found == expected and found
    for j in range(4):
        for i, t in enumerate(range(5)):
            logits = pair.target.lm_head(by_chain(model, pair, ids[: t + 2], ids[t + 2 : t + 2 + j]))
            assert student[j, i] == logits.argmax()
            assert teacher[j, i] == pair.target.lm_head(states[t + 1 + j]).argmax()
