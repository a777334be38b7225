"""Rules for draft lengths: by hand, and around drafters, where no rule may change a text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from methods.eagle import Eagle2
from methods.ragged import RaggedBatch
from methods.samd import SAMDecoding
from methods.sps import SpeculativeSampling
from specbench.config.checks import check
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.measure import round_costs
from specbench.measure.draft_length import (
    Adaptive,
    Constant,
    Goodput,
    VariableLength,
    costs_by_length,
    make_rule,
)
from specbench.report.replay import rounds_of
from specbench.system.errors import UserError
from specbench.system.settings import GOODPUT
from tests.support import batches
from tests.support.conf import composed
from tests.support.decoding import PROMPT, random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.lossless import assert_lossless, cases
from tests.support.methods import saved_eagle

COSTS = [1.0, 1.3, 1.5, 1.7, 2.6]


def test_the_rule_of_transformers():
    rule, counts = Adaptive(8), np.zeros(2)
    following = [
        rule.next_length(length, last, accepted, counts)
        for length, last, accepted in ((5, 5, 5), (8, 8, 8), (5, 5, 4), (1, 1, 0), (5, 2, 2), (5, 2, 1))
    ]
    assert rule.initial == 5 and following == [7, 8, 4, 1, 7, 4], "of its own length, not of what was drafted"
    assert Adaptive(3).initial == 3 and Constant(3).next_length(3, 3, 0, counts) == 3


def test_costs_are_measured_up_to_the_length_that_a_batch_has_room_for(monkeypatch):
    """With a budget of tokens it is less than the drafter's own: no longer draft is made, or chosen."""
    drafter = VariableLength(
        SpeculativeSampling(random_pair("llama"), max_draft_tokens=5), make_rule(GOODPUT, 3, None)
    )
    lengths = []

    def answers(_arm: str, _requests: list) -> list:
        lengths.append(drafter.rule.longest)
        return []

    setup = SimpleNamespace(
        drafter=drafter,
        spec=SimpleNamespace(batch_size=8),
        answers=answers,
        set_reference_answers=lambda _: None,
    )
    monkeypatch.setattr(round_costs, "end_requests", lambda *_: [])
    monkeypatch.setattr(round_costs, "filled", lambda *_: [])
    round_costs.set_round_costs(setup, None, None)
    assert lengths == [3, 1, 2, 3] and drafter.rule.longest == 3


def test_goodput_takes_the_length_with_most_tokens_for_its_cost():
    rule, counts = Goodput(6, COSTS), np.zeros(2)
    lengths = [rule.initial, *(rule.next_length(3, 3, accepted, counts) for accepted in (0, 0, 0, 0))]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] < lengths[0]
    expected = counts[0], counts[1]
    acceptance = (expected[0] + 1.4) / (expected[1] + 2)
    costs = [*COSTS, 3.5, 4.4]  # the last two cost as much more as the fourth
    gains = [sum(acceptance**i for i in range(k + 1)) / costs[k] for k in range(1, 7)]
    assert lengths[-1] == 1 + int(np.argmax(gains))
    for _ in range(20):
        last = rule.next_length(3, 3, 3, counts)
    assert last == 3  # a fourth token costs more than it can give


def test_the_last_rounds_count_most():
    rule, old, new = Goodput(4, [1.0, 1.4, 1.8, 2.2, 2.6]), np.zeros(2), np.zeros(2)
    for accepted in (4, 4, 4, 0, 0, 0):
        early = rule.next_length(4, 4, accepted, old)
    for accepted in (0, 0, 0, 4, 4, 4):
        late = rule.next_length(4, 4, accepted, new)
    assert early < late


def test_costs_never_fall():
    assert costs_by_length([1.0, 1.3, 1.2], 5).tolist() == [1.0, 1.3, 1.3, 1.3, 1.3, 1.3]
    assert costs_by_length([1.0, 1.5, 2.0, 9.0], 2).tolist() == [1.0, 1.5, 2.0]
    assert costs_by_length([1, 2], 3).tolist() == [1, 2, 3, 4]


def test_until_there_are_costs_drafts_are_of_one_length():
    assert type(make_rule("goodput", 4, None)) is Constant and make_rule("goodput", 4, None).initial == 4
    assert isinstance(make_rule("goodput", 4, [1.0, 1.2]), Goodput)
    assert isinstance(make_rule("adaptive", 4, None), Adaptive)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ("method=ar", "decoding.draft_length=adaptive"),
            "drafts nothing: set decoding.draft_length=constant",
        ),
        (("method=mirror_sd", "decoding.draft_length=adaptive"), "drafts of one length"),
        (("method=ssd", "decoding.draft_length=goodput"), "drafts of one length"),
        (("method=sps", "decoding.round_costs=[1.0,1.2]"), "needs decoding.draft_length=goodput"),
        (("method=sps", "decoding.draft_length=goodput", "decoding.round_costs=[1.0]"), "round_costs"),
    ],
)
def test_a_rule_that_cannot_be(settings, says):
    with pytest.raises(UserError, match=says):
        check(composed("bench", *settings, "pair=tiny"))


def lengths_of(steps) -> list[int]:
    return [step.drafted for step in steps]


@pytest.mark.parametrize("rule", [Adaptive(6), Goodput(6, COSTS)])
def test_lossless_and_as_long_as_the_rule_says(rule):
    """Each round's draft is what the rule makes of the ones before it, until the answer's end cuts it."""
    pair = random_pair("llama")
    drafter = VariableLength(SpeculativeSampling(pair, 6), rule)
    assert len({*lengths_of(assert_lossless("llama", drafter, third=0))}) > 2
    prompt, cap, *_ = cases("llama")[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    counts, length, left = np.zeros(2), rule.initial, cap - 2
    for step in steps:
        assert step.drafted == min(length, left)
        if step.drafted:
            length = rule.next_length(length, step.drafted, step.accepted, counts)
        left -= step.emitted


def test_the_engine_and_a_replay_choose_alike():
    pair, rule = random_pair("llama"), Adaptive(6)
    prompt, cap, *_ = cases("llama")[6]
    drafter = VariableLength(SpeculativeSampling(pair, 6), rule)
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    right, at = np.ones(cap - 1), 0
    for step in steps:
        if step.accepted < step.drafted:
            right[at + step.accepted] = 0
        at += step.emitted
    assert rounds_of(right, np.full(len(right), len(right)), rule) == [
        (step.drafted, step.accepted) for step in steps
    ]


def test_a_tree_is_judged_by_the_levels_that_it_has(tmp_path):
    """A rule may have wished for more: a small tree that was accepted whole is a whole draft."""
    pair, seen = random_pair("llama"), []

    class Noted(Adaptive):
        def next_length(self, length, last, accepted, counts):
            seen.append((last, accepted))
            return super().next_length(length, last, accepted, counts)

    drafter = VariableLength(Eagle2(pair, saved_eagle("llama", tmp_path), 3, 2, 6), Noted(6))
    prompt, cap, *_ = cases("llama")[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    assert seen == [(step.depth, step.accepted) for step in steps if step.depth]
    assert any(0 < accepted == depth < 3 for depth, accepted in seen)


def test_a_tree_has_as_many_levels(tmp_path):
    pair = random_pair("llama")
    drafter = VariableLength(Eagle2(pair, saved_eagle("llama", tmp_path), 12, 3, 5), Adaptive(5))
    steps = assert_lossless("llama", drafter, third=0)
    assert len({step.depth for step in steps}) > 3
    assert all(step.depth <= 5 for step in steps)


def test_each_answer_begins_anew_and_batches_share_a_round():
    requests, expected = batches.cases("qwen2")
    pair = random_pair("qwen2")
    drafter = VariableLength(SpeculativeSampling(pair, 5), Adaptive(5))
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(3))
    steps = batches.assert_lossless(engine, requests, expected)
    assert len({*lengths_of(steps)}) > 2
    alone = Engine(StagedModel(pair.target), drafter, frozenset())
    caps = [min(one.decoding.max_new_tokens, 9) for one in requests]  # of an answer the first round counts
    firsts = [alone.answer(one.prompt, SamplingParams(cap)).steps[:1] for one, cap in zip(requests, caps)]
    assert {one[0].drafted for one in firsts if one and one[0].drafted > 3} == {5}


def test_a_drafter_that_stops_early_is_judged_by_what_it_drafted():
    """A look-up that finds little: a whole short draft is a whole draft, and the length is still the rule's own."""
    pair, seen, lengths = random_pair("llama"), [], [5]

    class Noted(Adaptive):
        def next_length(self, length, last, accepted, counts):
            seen.append((last, accepted))
            assert last <= length == lengths[-1]
            lengths.append(super().next_length(length, last, accepted, counts))
            return lengths[-1]

    drafter = VariableLength(SAMDecoding(pair, max_draft_tokens=8, growth=1), Noted(8))
    prompt = [18, 28, 29, 14, 26, 38] * 2
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(30)).steps
    assert seen == [(step.drafted, step.accepted) for step in steps if step.drafted]
    short = [accepted == last for (last, accepted), length in zip(seen, lengths) if last < length]
    assert {*short} == {True, False}


@pytest.mark.slow
def test_samples_follow_the_target():
    """Lengths depend on what was accepted, which the target decides: no token of a draft is chosen by its length."""
    pair = random_pair("llama", **SHAPE)
    drafter = VariableLength(SpeculativeSampling(pair, 3), Goodput(3, COSTS))
    assert p_value_alone(pair, drafter) > 1e-3


def test_each_sequence_of_a_batch_has_a_length_of_its_own():
    """Of its drafts and of what is accepted of them: it fares as it does alone, drawn drafts included."""
    pair = random_pair("llama")
    drafter = VariableLength(SpeculativeSampling(pair, 6), Adaptive(6))
    for decoding in (SamplingParams(12), SamplingParams(12, temperature=1.0)):
        requests = [Request([*PROMPT[i:], 3 + i], decoding, seed=i) for i in range(4)]
        alone = [
            Engine(StagedModel(pair.target), drafter, frozenset()).generate([one])[0] for one in requests
        ]
        engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(3))
        together = engine.generate(requests)
        facts = [
            [(answer.tokens, [(s.depth, s.accepted) for s in answer.steps]) for answer in some]
            for some in (alone, together)
        ]
        assert facts[0] == facts[1] and len({depth for _, steps in facts[0] for depth, _ in steps}) > 2


def test_lengths_grow_and_fall_by_turns():
    pair = random_pair("llama")
    drafter = VariableLength(SpeculativeSampling(pair, 8), Adaptive(8))
    prompt, cap, *_ = cases("llama")[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    changes = [b.drafted - a.drafted for a, b in pairwise(steps[:-2])]
    assert {*changes} <= {-1, 0, 1, 2} and min(changes) < 0
