"""Rules for draft lengths: by hand, and around drafters, where no rule may change a text."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from methods.eagle import Eagle2
from methods.pld import PromptLookup
from methods.ragged import RaggedBatch
from methods.sps import SpeculativeSampling
from specbench.decoding.draft_length import Adaptive, Constant, Goodput, RuledDrafter, rule_of
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.report.replay import rounds_of
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.decoding import random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.lossless import assert_lossless, cases
from tests.support.methods import saved_eagle

COSTS = [1.0, 1.3, 1.5, 1.7, 2.6]


def test_the_rule_of_transformers():
    rule, memory = Adaptive(8), np.zeros(2)
    following = [
        rule.following(last, accepted, memory) for last, accepted in ((5, 5), (8, 8), (5, 4), (1, 0))
    ]
    assert rule.first == 5 and following == [7, 8, 4, 1]
    assert Adaptive(3).first == 3 and Constant(3).following(3, 0, memory) == 3


def test_goodput_takes_the_length_with_most_tokens_for_its_cost():
    rule, memory = Goodput(6, COSTS), np.zeros(2)
    lengths = [rule.first, *(rule.following(3, accepted, memory) for accepted in (0, 0, 0, 0))]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] < lengths[0]
    expected = memory[0], memory[1]
    acceptance = (expected[0] + 1.4) / (expected[1] + 2)
    costs = [*COSTS, 3.5, 4.4]  # the last two cost as much more as the fourth
    gains = [sum(acceptance**i for i in range(k + 1)) / costs[k] for k in range(1, 7)]
    assert lengths[-1] == 1 + int(np.argmax(gains))
    for _ in range(20):
        last = rule.following(3, 3, memory)
    assert last == 3  # a fourth token costs more than it can give


def test_the_last_rounds_count_most():
    rule, old, new = Goodput(4, [1.0, 1.4, 1.8, 2.2, 2.6]), np.zeros(2), np.zeros(2)
    for accepted in (4, 4, 4, 0, 0, 0):
        early = rule.following(4, accepted, old)
    for accepted in (0, 0, 0, 4, 4, 4):
        late = rule.following(4, accepted, new)
    assert early < late


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("adaptive", 0, None), "methods that draft"),
        (("goodput", 4, None), "decoding.round_costs"),
        (("goodput", 4, [1.0]), "decoding.round_costs"),
    ],
)
def test_a_rule_that_cannot_be(arguments, says):
    with pytest.raises(UserError, match=says):
        rule_of(*arguments)


def lengths_of(steps) -> list[int]:
    return [step.drafted for step in steps]


@pytest.mark.parametrize("rule", [Adaptive(6), Goodput(6, COSTS)])
def test_lossless_and_as_long_as_the_rule_says(rule):
    """Each round's draft is what the rule makes of the ones before it, until the answer's end cuts it."""
    pair = random_pair("llama")
    drafter = RuledDrafter(SpeculativeSampling(pair, 6), rule)
    assert len({*lengths_of(assert_lossless("llama", drafter))}) > 2
    prompt, cap, *_ = cases("llama")[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    memory, length, left = np.zeros(2), rule.first, cap - 2
    for step in steps:
        assert step.drafted == min(length, left)
        if step.drafted:
            length = rule.following(step.drafted, step.accepted, memory)
        left -= step.emitted


def test_the_engine_and_a_replay_choose_alike():
    pair, rule = random_pair("llama"), Adaptive(6)
    prompt, cap, *_ = cases("llama")[6]
    drafter = RuledDrafter(SpeculativeSampling(pair, 6), rule)
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    right, at = np.ones(cap - 1), 0
    for step in steps:
        if step.accepted < step.drafted:
            right[at + step.accepted] = 0
        at += step.emitted
    assert rounds_of(right, rule) == [(step.drafted, step.accepted) for step in steps]


def test_a_tree_has_as_many_levels(tmp_path):
    pair = random_pair("llama")
    drafter = RuledDrafter(Eagle2(pair, saved_eagle("llama", tmp_path), 12, 3, 5), Adaptive(5))
    steps = assert_lossless("llama", drafter)
    assert len({step.depth for step in steps}) > 3
    assert all(step.depth <= 5 for step in steps)


def test_each_answer_begins_anew_and_batches_share_a_round():
    requests, expected = batches.cases("qwen2")
    pair = random_pair("qwen2")
    drafter = RuledDrafter(SpeculativeSampling(pair, 5), Adaptive(5))
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(3))
    steps = batches.assert_lossless(engine, requests, expected)
    assert len({*lengths_of(steps)}) > 2
    alone = Engine(StagedModel(pair.target), drafter, frozenset())
    firsts = [alone.answer(one.prompt, one.decoding).steps[:1] for one in requests]
    assert {one[0].drafted for one in firsts if one and one[0].drafted > 3} == {5}


def test_a_drafter_that_stops_early_is_judged_by_what_it_drafted():
    """A look-up that finds little: a whole short draft is a whole draft."""
    pair, seen = random_pair("llama"), []

    class Noted(Adaptive):
        def following(self, last, accepted, memory):
            seen.append((last, accepted))
            return super().following(last, accepted, memory)

    drafter = RuledDrafter(PromptLookup(pair, max_draft_tokens=4, max_ngram=2), Noted(4))
    prompt = [3, 9, 27, 3, 9, 27, 3, 9]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(30)).steps
    assert seen == [(step.drafted, step.accepted) for step in steps if step.drafted]


@pytest.mark.slow
def test_samples_follow_the_target():
    """Lengths depend on what was accepted, which the target decides: no token of a draft is chosen by its length."""
    pair = random_pair("llama", **SHAPE)
    drafter = RuledDrafter(SpeculativeSampling(pair, 3), Goodput(3, COSTS))
    assert p_value_alone(pair, drafter) > 1e-3


def test_nothing_drafted_is_nothing_learnt():
    with pytest.raises(UserError, match="methods that draft"):
        rule_of("adaptive", Drafter().max_draft_tokens, None)


def test_lengths_grow_and_fall_by_turns():
    pair = random_pair("llama")
    drafter = RuledDrafter(SpeculativeSampling(pair, 8), Adaptive(8))
    prompt, cap, *_ = cases("llama")[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    changes = [b.drafted - a.drafted for a, b in pairwise(steps[:-2])]
    assert {*changes} <= {-1, 0, 1, 2} and min(changes) < 0
