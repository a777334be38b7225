"""Whether sampled answers lean towards their drafts: those of an honest rule do not, those of a faulty one do."""

from __future__ import annotations

import math

import pytest
import torch

from specbench.decoding import acceptance
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.measure.lean import leans
from specbench.measure.metrics.drawn import likelihoods
from specbench.report import remarks, verdicts
from tests.support.decoding import random_pair
from tests.support.distribution import PROMPT, SHAPE
from tests.support.drafters import ModelChain, ModelTree

KINDS = ((0.0, None), (0.5, None), (0.0, 3))  # where a draft stops; sequences of a batch


def errors(drafter, pair, slots: int | None = None, answers: int = 40) -> float:
    """How many standard errors the answers lean towards their drafts."""
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), slots and Scheduler(slots))
    requests = [Request(PROMPT, SamplingParams(32 - i % 3, 1.0), i) for i in range(answers)]
    found = leans(engine, requests)
    assert engine.observe is None and len(found) == answers
    variance = sum(one.variance for one in found)
    return sum(one.total for one in found) / math.sqrt(variance) if variance else math.nan


@pytest.fixture(scope="module")
def pair():
    return random_pair("llama", **SHAPE)


@pytest.mark.parametrize(("stop", "slots"), KINDS)
def test_an_honest_rule_does_not_lean(pair, stop, slots):
    assert abs(errors(ModelChain(pair.draft, 3, stop), pair, slots)) < 3


@pytest.mark.slow
def test_errors_are_those_of_a_normal_distribution(pair):
    """Over many runs their mean is 0 and their size 1."""
    engine = Engine(StagedModel(pair.target), ModelChain(pair.draft, 3), frozenset())
    found = leans(engine, [Request(PROMPT, SamplingParams(24, 1.0), seed) for seed in range(400)])
    each = torch.tensor([one.total / math.sqrt(one.variance) for one in found])
    assert abs(each.mean()) < 4 / math.sqrt(400) and abs(each.std() - 1) < 0.15


@pytest.mark.parametrize(("stop", "slots"), KINDS)
def test_drawing_from_p_after_a_rejection_is_found(pair, monkeypatch, stop, slots):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    assert errors(ModelChain(pair.draft, 3, stop), pair, slots) > 4


def test_keeping_draft_tokens_too_readily_is_found(pair, monkeypatch):
    right = acceptance.sampled_chain
    monkeypatch.setattr(
        acceptance, "sampled_chain", lambda p, tokens, q, u, *more: right(p, tokens, q, u / 2, *more)
    )
    assert errors(ModelChain(pair.draft, 3), pair) > 4


def test_of_trees_nothing_is_summed(pair):
    assert math.isnan(errors(ModelTree(pair.draft), pair, answers=2))


def test_answers_that_lean_are_violations():
    plain = {"tokens": 9, "logprob": -3.0, "surprise": 0.0, "variance": 1.0}

    def summary(total: float) -> dict:
        lean = {"total": total, "variance": 4.0}
        records = [{"turns": [{"likelihood": {"baseline": plain, "method": plain | {"lean": lean}}}]}]
        return {"likelihood": likelihoods(records), "engine": None}

    assert summary(3.0)["likelihood"]["method"]["lean"] == 1.5
    assert summary(3.0)["likelihood"]["baseline"]["lean"] is None
    assert verdicts.improbable(summary(7.9)) == [] and verdicts.improbable(summary(-8.1)) == ["method"]
    assert "+1.5 towards its drafts" in remarks.likelihood_line(summary(3.0))
