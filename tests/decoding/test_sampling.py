"""At temperature 1 whole answers follow the target's own distribution, whatever kind of draft is verified."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specbench.decoding import acceptance
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import (
    NOT_DRAWN,
    TARGET,
    SamplingParams,
    check_sampled,
    position_draws,
    sample_inverse_cdf,
)
from specbench.system.errors import UserError
from tests.support.decoding import random_pair
from tests.support.distribution import PROMPT, SHAPE, p_value_alone
from tests.support.drafters import EarlyExit, ModelChain, ModelTree


@pytest.fixture(scope="module")
def pair() -> SimpleNamespace:
    return random_pair("llama", **SHAPE)


DRAFTERS = {
    "chain": lambda pair: ModelChain(pair.draft, 3),
    "chain with a stop": lambda pair: ModelChain(pair.draft, 3, 0.5),
    "tree": lambda pair: ModelTree(pair.draft),
    "early exit": lambda pair: EarlyExit(1, 3),
}


@pytest.mark.one_in(2)
@pytest.mark.slow  # the fast tests have the same of a batch, in test_batch
@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_follow_the_target(pair, kind):
    assert p_value_alone(pair, DRAFTERS[kind](pair)) > 1e-3


@pytest.mark.slow
def test_a_spoiled_residual_is_found(pair, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert p_value_alone(pair, ModelChain(pair.draft, 3)) < 1e-6


def test_probabilities_are_those_of_single_precision():
    """In bfloat16 they would have 8 bits, and logits over a temperature as well."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    probs = SamplingParams(4, 0.7).probs(logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, torch.softmax(logits.float() / 0.7, -1), rtol=0, atol=0)


def test_weights_that_are_no_distribution_give_no_token():
    weights = torch.tensor(
        [[1.0, 2.0, 1.0], [1.0, float("nan"), 1.0], [float("inf"), 1.0, 1.0], [0.0, 0.0, 2.0]]
    )
    assert sample_inverse_cdf(weights, torch.tensor([0.5, 0.5, 0.5, 0.0])).tolist() == [
        1,
        NOT_DRAWN,
        NOT_DRAWN,
        2,
    ]
    overflown = SamplingParams(1, 1e-38).select(torch.tensor([[1.0, 9.0, 3.0]]), uniforms=torch.tensor([0.5]))
    assert overflown[0].tolist() == [NOT_DRAWN]
    with pytest.raises(UserError, match=r"NaN or inf.*pair\.dtype"):
        check_sampled([4, NOT_DRAWN])
    assert check_sampled([4, 0]) == [4, 0]


def test_the_target_draws_with_the_same_numbers_whatever_the_drafter_needs():
    first, *others = (position_draws(5, 12, columns, torch.device("cpu"))[:, TARGET] for columns in (0, 1, 4))
    assert all(torch.equal(first, other) for other in others)


def test_a_seed_fixes_the_answer(pair):
    engine = Engine(StagedModel(pair.target), ModelChain(pair.draft, 3), frozenset())
    answers = {tuple(engine.answer(PROMPT, SamplingParams(12, 1.0), seed=s).tokens) for s in (1, 1, 2)}
    assert len(answers) == 2
