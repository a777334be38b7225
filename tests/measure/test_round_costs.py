"""Costs of rounds by draft length, measured before the first question: by arms whose rounds take a known time."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from specbench.config.spec import BASELINE, METHOD, RunSpec
from specbench.data.question_files import Question
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Rounds
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation, Step
from specbench.measure import round_costs, warm_up
from specbench.measure.arms import Setup
from specbench.measure.draft_length import Constant, Goodput, VariableLength
from specbench.measure.protocol import Protocol
from specbench.measure.round_costs import LEAST_ROUNDS, set_round_costs
from tests.support.graphs import PretendedRunner

SECONDS = {0: 0.01, 1: 0.013, 2: 0.016, 4: 0.022, 6: 0.03}


class Workplace:
    """A setup whose method drafts as many tokens as the rule says, for as long as `SECONDS` tell.

    Args:
        longest: draft length.
        rounds: of each answer.
        size: of a batch, whose sequences share a round's seconds.
    """

    def __init__(self, longest: int = 6, rounds: int = 20, size: int = 1, passes: object = None):
        inner = Drafter()
        inner.max_draft_tokens = longest
        self.drafter, self.rounds, self.size = VariableLength(inner, Constant(longest)), rounds, size
        self.lengths: list[int] = []
        arms = {BASELINE: self.baseline, METHOD: self.method}
        self.pair = SimpleNamespace(context_length=512, prompt_ids=lambda messages: [1, 2, 3])
        self.setup = Setup(
            self.pair, SimpleNamespace(runner=passes), self.drafter, arms, RunSpec({}, None, size)
        )

    def answered(self, requests: list[Request], length: int) -> Rounds:
        yield 1
        share = SECONDS[length] / self.size
        steps = [Step(length, 0, 1, length, 0.0, share, 0.0, 0, 0, self.size) for _ in range(self.rounds)]
        # Rounds that were cut at an answer's end, or shared by fewer, cost something else.
        steps += [Step(1, 0, 1, 1, 0.0, 9.0, 0.0, 0, 0, self.size)] * (length > 1)
        steps += [Step(length, 0, 1, length, 0.0, 9.0, 0.0, 0, 0, self.size + 1)] * self.rounds
        return [Generation([1], 0.0, 1.0, "length", steps) for _ in requests]

    def baseline(self, requests: list[Request]) -> Rounds:
        return self.answered(requests, 0)

    def method(self, requests: list[Request]) -> Rounds:
        self.lengths.append(self.drafter.rule.initial)
        return self.answered(requests, self.drafter.rule.initial)

    def protocol(self) -> Protocol:
        questions = [Question(1, "qa", ("a question",), None, "qa")]
        return Protocol(self.pair, SamplingParams(64), "paired", 0, questions)


@pytest.mark.parametrize("size", [1, 4])
def test_some_lengths_are_measured_and_those_between_follow(size):
    place = Workplace(size=size)
    costs = set_round_costs(place.setup, place.protocol(), None)
    assert place.lengths == [1, 2, 4, 6]
    assert costs == pytest.approx([1.0, 1.3, 1.6, 1.9, 2.2, 2.6, 3.0], abs=1e-3)
    assert isinstance(place.drafter.rule, Goodput)


def test_costs_that_are_there_are_taken():
    place = Workplace()
    costs = set_round_costs(place.setup, place.protocol(), OmegaConf.create([1, 1.1]))
    assert json.dumps(costs) == "[1.0, 1.1]", "as provenance has it"
    assert not place.lengths and isinstance(place.drafter.rule, Goodput)


def test_too_few_rounds_tell_nothing():
    """Then every length costs the same, and the longest draft is best."""
    place = Workplace(rounds=LEAST_ROUNDS // 2)  # in two answers
    assert set_round_costs(place.setup, place.protocol(), None) == [1.0, 1.0]
    assert place.drafter.rule.initial == 6


def test_passes_of_every_length_are_captured_before_they_are_timed():
    place = Workplace(longest=2, passes=PretendedRunner())
    rule = place.drafter.rule
    warm_up.warm_up(place.setup, place.protocol())
    assert place.lengths == [2, 1, 2] and place.drafter.rule is rule
    place = Workplace(longest=2)
    warm_up.warm_up(place.setup, place.protocol())
    assert place.lengths == [2]
    assert round_costs.TOKENS > warm_up.TOKENS
