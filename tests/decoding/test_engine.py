"""What the engine promises beside the right tokens: caps, contexts, clean state, and a trace that adds up."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Draft, Request
from specbench.decoding.tree import Tree
from specbench.system.errors import UserError
from tests.support.decoding import STOP, random_pair, random_prompt
from tests.support.drafters import Oracle


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**20),
    cap=st.integers(1, 30),
    error=st.sampled_from([0, 0.2, 0.5]),
    tree=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_random_schedules(seed, cap, error, tree):
    """Caps are exact, the trace adds up, and a second answer on the same buffers is the same."""
    target = StagedModel(random_pair("llama").target)
    prompt = random_prompt(random.Random(seed), target.vocab_size)
    plain = Engine(target, Drafter(), frozenset([STOP])).answer(prompt, SamplingParams(cap))
    oracle = Oracle(len(prompt), plain.tokens, target.vocab_size, seed, error, 6, tree)
    engine = Engine(target, oracle, frozenset([STOP]))
    for _ in range(2):  # the second answer reuses the buffers of the first
        answer = engine.answer(prompt, SamplingParams(cap))
        assert answer.tokens == plain.tokens
        assert len(answer.tokens) == cap or answer.tokens[-1] == STOP
        for step in answer.steps:
            assert 0 <= step.accepted <= step.depth <= step.drafted
            assert step.emitted in (step.accepted, step.accepted + 1)
        spans = sum(s.draft_seconds + s.verify_seconds + s.other_seconds for s in answer.steps)
        assert answer.prefill_seconds + spans <= answer.seconds * 1.0001
        oracle.rng.seed(seed)


@pytest.mark.parametrize(
    ("prompt", "cap", "message"),
    [([], 5, "empty"), ([1], 0, "max_new_tokens .*1.*0"), ([1] * 500, 100, "500 .*100 .*512")],
)
def test_impossible_requests_are_refused(prompt, cap, message):
    target = StagedModel(random_pair("llama", max_position_embeddings=512).target)
    with pytest.raises(UserError, match=message):
        Engine(target, Drafter(), frozenset()).answer(prompt, SamplingParams(cap))


def test_answers_may_fill_the_context_to_the_brim():
    target = StagedModel(random_pair("llama", max_position_embeddings=64).target)
    plain = Engine(target, Drafter(), frozenset()).answer([7] * 40, SamplingParams(24))
    oracle = Oracle(40, plain.tokens, target.vocab_size, 0, 0.0, 8, False)
    assert Engine(target, oracle, frozenset()).answer([7] * 40, SamplingParams(24)).tokens == plain.tokens
    assert len(plain.tokens) == 24


class Raising(Drafter):
    """Raises in the round that completes a sequence."""

    max_draft_tokens = 1

    def __init__(self):
        self.ended = []

    def draft(self, batch):
        return Draft(batch.tokens[: batch.size, :1])

    def commit(self, batch, verified):
        if any(one.done for one in batch.sequences):
            raise RuntimeError

    def end(self, slot):
        self.ended.append(slot)


def test_each_sequence_ends_once_for_the_drafter_whatever_raises():
    target, drafter = StagedModel(random_pair("llama").target), Raising()
    requests = [Request([7, 9, 4 + i], SamplingParams(4 + i)) for i in range(3)]
    with pytest.raises(RuntimeError):
        Engine(target, drafter, frozenset(), Scheduler(3)).generate(requests)
    assert sorted(drafter.ended) == [0, 1, 2]


def test_an_engine_that_failed_makes_its_buffers_as_large_as_they_were():
    """A later, longer request would else make them anew within its own time."""
    engine = Engine(StagedModel(random_pair("llama").target), Raising(), frozenset(), Scheduler(2))
    engine.reserve([Request([7] * 300, SamplingParams(300))])
    size = engine._cache.capacity
    with pytest.raises(RuntimeError):
        engine.generate([Request([7, 9, 4], SamplingParams(4 + i)) for i in range(2)])
    assert engine._cache is None
    engine.reserve([Request([7, 9, 4], SamplingParams(4))])
    assert engine._cache.capacity == size


class Told:
    """A clock that only moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def synchronize(self):
        pass

    def seconds(self, start, end):
        return end - start


class Slow(Raising):
    """Takes so many seconds for each of its tasks."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def open(self, slots, target):
        self.clock.now += 8

    def begin(self, slot, sequence, prefill):
        self.clock.now += 4

    def draft(self, batch):
        self.clock.now += 2
        return super().draft(batch)

    def commit(self, batch, verified):
        self.clock.now += 1


def test_a_drafters_time_lies_where_it_spends_it():
    """What is made for all answers and the work on the prompt are prefill; what follows a verification is not draft."""
    clock = Told()
    engine = Engine(StagedModel(random_pair("llama").target), Slow(clock), frozenset(), Scheduler(2))
    engine.clock = clock
    answers = engine.generate([Request([7, 9, 4 + i], SamplingParams(6)) for i in range(2)])
    for answer in answers:
        assert answer.prefill_seconds == 8 / 2 + 4
        drafting = [step for step in answer.steps if step.drafted]
        assert drafting and all((s.draft_seconds, s.other_seconds) == (2 / 2, 1 / 2) for s in drafting)
    assert sum(answer.seconds for answer in answers) == clock.now


class Spectator(Drafter):
    """Two candidates for each sequence but the first, and a chain of three that is only looked at."""

    max_draft_tokens, max_nodes = 4, 5

    def draft(self, batch):
        tree = Tree.of(torch.tensor([-1, -1, 0, 2, 3]))
        counts = torch.tensor([2 * (one.request_index > 0) for one in batch.sequences])
        tokens = torch.arange(5).expand(batch.size, -1)
        return Draft(tokens, tree=tree, candidates=counts, report=self.behind)

    def behind(self, logits):
        self.logits = logits
        return logits[:, 1:].argmax(-1)

    def commit(self, batch, verified):
        assert verified.logits is self.logits
        assert verified.report == self.logits[:, 1:].argmax(-1).tolist()
        self.rounds = getattr(self, "rounds", 0) + 1


@pytest.mark.parametrize("slots", [1, 3])
def test_what_is_only_looked_at(slots):
    """It is no part of a draft's depth, and the drafter learns on the host what it makes of its logits."""
    target, spectator = StagedModel(random_pair("llama").target), Spectator()
    requests = [Request([7, 9, 4 + i], SamplingParams(12)) for i in range(3)]
    plain = Engine(target, Drafter(), frozenset()).generate(requests)
    answers = Engine(target, spectator, frozenset(), Scheduler(slots)).generate(requests)
    assert [a.tokens for a in answers] == [a.tokens for a in plain]
    assert spectator.rounds > 5
    for i, answer in enumerate(answers):
        assert {(s.drafted, s.depth) for s in answer.steps[:-1]} == {(2, 1) if i else (0, 0)}


def test_nan_in_one_sequence_ends_a_greedy_batch(monkeypatch):
    target = StagedModel(random_pair("llama").target)
    unembed, calls = target.unembed, itertools.count()

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        logits = unembed(hidden)
        if hidden.dim() == 3 and next(calls) > 0:
            logits[-1] = float("nan")
        return logits

    monkeypatch.setattr(target, "unembed", spoiled)
    requests = [Request([7, 9, 4 + i], SamplingParams(6)) for i in range(3)]
    with pytest.raises(UserError, match="no token can be chosen.*NaN"):
        Engine(target, Drafter(), frozenset(), Scheduler(3)).generate(requests)


@pytest.mark.parametrize("place", [0, 3])
def test_logits_that_are_no_numbers_end_a_greedy_answer(monkeypatch, place):
    """The likeliest of NaN would be some token, the same in both arms: an exact answer that means nothing."""
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    passes = []

    def finish(products: torch.Tensor) -> torch.Tensor:
        passes.append(products)
        return products * float("nan") if len(passes) > place else products

    monkeypatch.setattr(target, "finish_logits", finish)
    engine = Engine(target, Drafter(), frozenset())
    with pytest.raises(UserError, match="no token can be chosen.*NaN"):
        engine.answer([3, 9, 27], SamplingParams(8))
