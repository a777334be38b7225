"""The losses that trainers share: what is estimated from a part is right on average, and so are its gradients."""

from __future__ import annotations

import pytest
import torch

from methods.common import losses
from methods.common.losses import Distribution, Goals, Guess, Head, Loss, cross_entropies, sampled, teacher_of
from tests.support.gradients import assert_same_gradients, no_distribution_stays

SAME = Head(torch.eye(11))  # logits are states


def test_a_sample_stands_for_the_rest_of_the_vocabulary():
    """The sum of the exponentials is right on average, and the truth stays what it was."""
    torch.manual_seed(0)
    n, vocab = 6, 300
    logits, likeliest = 2 * torch.randn(n, vocab), torch.randint(0, vocab, (n, 3))
    truth = Distribution(torch.rand(n, 2).softmax(-1), torch.randint(0, vocab, (n, 2)))
    sums = []
    for _ in range(500):
        (ids, shifts), inside = sampled(truth, vocab, 40, likeliest)
        assert (
            len(ids.unique())
            == len(ids)
            == len({*likeliest.flatten().tolist(), *truth.ids.flatten().tolist()}) + 40
        )
        assert torch.equal(ids[inside.ids], truth.ids) and torch.equal(inside.probs, truth.probs)
        sums.append((logits[:, ids] + shifts).exp().sum(-1))
    sums = torch.stack(sums)
    error = sums.std(0) / len(sums) ** 0.5
    assert ((sums.mean(0) - logits.exp().sum(-1)).abs() < 4 * error).all()
    (ids, shifts), inside = sampled(truth, vocab, vocab, likeliest)
    exact = cross_entropies(logits, truth)
    torch.testing.assert_close(cross_entropies(logits[:, ids] + shifts, inside), exact)


@pytest.mark.slow
def test_drawn_goals_cost_what_all_goals_cost_on_average():
    """The mean loss of many draws is the loss of all; a weight of 0 is never drawn."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor(
        [[0.0, 0.2, 1.0, 0.0, 1.0, 0.2, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.2, 1.0, 0.0, 1.0]]
    )
    batch = {"loss_weight": weights}
    logits, told = (torch.randn(2, 8, 11, generator=generator) for _ in range(2))
    torch.manual_seed(0)

    def loss(count: int | None) -> torch.Tensor:
        loss = Loss(count)
        goals = loss.goals(batch, ahead=2)
        assert (goals.positions >= 2).all() and (weights[goals.batch_index, goals.positions] > 0).all()
        torch.testing.assert_close(goals.weights.sum(), weights[:, 2:].sum())
        guesses = [Guess(1.0, logits, SAME), Guess(0.5, logits, SAME, 2)]
        return loss(batch, goals, guesses, teacher_of(batch, SAME, told))

    drawn = torch.stack([loss(4) for _ in range(4000)])
    error = drawn.std() / len(drawn) ** 0.5
    assert abs(drawn.mean() - loss(None)) < 4 * error and drawn.std() > 0
    assert loss(8) is not None and torch.equal(loss(10_000), loss(None))


def test_goals_are_judged_from_the_states_in_front_of_them():
    """The loss by hand, over more goals than fit into one part."""
    weights = torch.rand(3, 400)
    logits, told = torch.randn(3, 400, 5), torch.randn(3, 400, 6)  # a teacher that is padded further
    goals = Goals.of({"loss_weight": weights}, None, ahead=3)
    batch = {"loss_weight": weights}
    padded = Head(torch.eye(6))
    found = Loss()(batch, goals, [Guess(0.7, logits, Head(torch.eye(5)), 3)], teacher_of(batch, padded, told))
    probs = told[:, 2:-1, :5].softmax(-1)
    losses = -(probs * logits[:, :-3].log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found, 0.7 * (weights[:, 3:] * losses).sum())


def test_logits_of_a_large_batch_are_computed_again_for_the_gradient(monkeypatch):
    """None of a whole vocabulary stays, and the gradients are those of a loss that keeps them."""
    torch.manual_seed(0)
    head, batch = torch.nn.Linear(8, 37), {"loss_weight": torch.rand(3, 400)}
    guessed, targets = torch.randn(3, 400, 8), torch.randn(3, 400, 37)
    loss, teacher = Loss(), teacher_of(batch, Head(torch.eye(37)), targets)
    goals = loss.goals(batch, ahead=2)

    def cost() -> torch.Tensor:
        own = Head(head.weight, head.bias)
        return loss(batch, goals, [Guess(0.7, guessed, own), Guess(0.3, guessed, own, 2)], teacher)

    kept = cost()
    monkeypatch.setattr(losses, "KEPT_LOGITS", 0)
    with no_distribution_stays(37):
        recomputed = cost()
    assert_same_gradients(head, recomputed, kept)
