"""At temperature 1 whole answers follow the target's own distribution, whatever kind of draft is verified."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from specbench.decoding import acceptance, sampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import (
    FEW,
    NOT_DRAWN,
    TARGET,
    SamplingParams,
    check_sampled,
    position_uniforms,
    sample_inverse_cdf,
)
from specbench.system.errors import UserError
from tests.support.decoding import random_pair
from tests.support.distribution import (
    LENGTH,
    PROMPT,
    SHAPE,
    answered_pairs,
    expected_counts,
    p_value,
    p_value_alone,
)
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


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_follow_the_target_with_top_k_and_top_p(pair, kind):
    """Of five tokens, some are left out at most places."""
    assert p_value_alone(pair, DRAFTERS[kind](pair), top_k=4, top_p=0.9) > 1e-3


@pytest.mark.slow
def test_a_target_that_leaves_nothing_out_is_found(pair):
    counts = answered_pairs(pair, ModelChain(pair.draft, 3), SamplingParams(LENGTH, 1.0))
    assert p_value(counts, expected_counts(pair.target, 4, 0.9)) < 1e-6


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


CUTS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 7, "top_p": 0.5},
    {"top_k": 1},
    {"top_p": 1e-6},
    {"top_k": 99},
]


@pytest.mark.parametrize("scale", [3.0, 0.1])  # steep, flat
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_top_k_and_top_p_are_those_of_transformers(cut, scale):
    generator = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(300, 2 * FEW, generator=generator)
    scores = logits / 0.7
    if "top_k" in cut:
        scores = TopKLogitsWarper(cut["top_k"])(None, scores)
    if "top_p" in cut:
        scores = TopPLogitsWarper(cut["top_p"])(None, scores)
    torch.testing.assert_close(SamplingParams(1, 0.7, **cut).probs(logits), scores.softmax(-1))


@pytest.mark.parametrize("few", [1, 2**20])  # as on a GPU, which sorts at once
def test_top_p_does_not_depend_on_how_many_tokens_are_tried_first(monkeypatch, few):
    logits = torch.randn(40, 2 * FEW, generator=torch.Generator().manual_seed(1))
    cut = SamplingParams(1, 0.7, top_p=0.9)
    right = cut.probs(logits)
    monkeypatch.setattr(sampling, "FEW", few)
    torch.testing.assert_close(cut.probs(logits), right, rtol=0, atol=0)


def test_tokens_as_likely_as_the_last_one_are_drawn_as_well():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for cut in ({"top_k": 2}, {"top_p": 0.6}):
        assert (SamplingParams(1, 1.0, **cut).probs(logits) > 0).tolist() == [[True] * 4 + [False]]
    # top_p counts all that top_k leaves in: of four tokens the first has 0.48.
    cut = SamplingParams(1, 1.0, top_k=2, top_p=0.5)
    assert (cut.probs(logits) > 0).sum() == 4 and (replace(cut, top_p=0.47).probs(logits) > 0).sum() == 1


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_token_is_drawn_of_logits_that_are_no_numbers(cut):
    logits = torch.tensor([[0.0, float("nan"), 2.0], [float("inf"), 1.0, 0.0], [float("nan")] * 3])
    tokens, _ = SamplingParams(1, 1.0, **cut).select(logits, torch.full((3,), 0.5))
    assert tokens.tolist() == [NOT_DRAWN] * 3


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
    first, *others = (
        position_uniforms(5, 12, columns, torch.device("cpu"))[:, TARGET] for columns in (0, 1, 4)
    )
    assert all(torch.equal(first, other) for other in others)


def test_a_seed_fixes_the_answer(pair):
    engine = Engine(StagedModel(pair.target), ModelChain(pair.draft, 3), frozenset())
    answers = {tuple(engine.answer(PROMPT, SamplingParams(12, 1.0), seed=s).tokens) for s in (1, 1, 2)}
    assert len(answers) == 2
