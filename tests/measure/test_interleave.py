"""Arms that take turns: who is next, whose time it is, and that no arm's answer depends on the others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine, exhaust
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Clock
from specbench.measure.arms import as_generator, hf_generate_arm
from specbench.measure.interleave import Interleaver
from tests.support.decoding import generate_with_transformers, random_pair

CLOCK = Clock(torch.device("cpu"))
PROMPT = [5, 6, 7]


def interleaver(seconds: float = 0.0) -> Interleaver:
    return Interleaver(CLOCK, seconds)


def writer(name: str, tokens: int, total: int, log: list):
    """An arm that writes `tokens` a round; it notes in `log` what it has written."""
    for written in range(tokens, total + 1, tokens):
        log.append((name, written))
        yield tokens
    return name


def test_the_arm_with_the_fewest_tokens_is_next():
    log: list = []
    arms = [writer("a", 1, 6, log), writer("b", 3, 6, log), writer("c", 2, 6, log)]
    assert interleaver().run(arms) == ["a", "b", "c"]
    assert [name for name, _ in log[:3]] == ["a", "b", "c"]
    reached = {"a": 0, "b": 0, "c": 0}
    for name, written in log[3:]:
        assert reached[name] <= min(reached.values()) + 3
        reached[name] = written


def test_a_slice_lasts_until_its_time_is_over():
    log: list = []
    interleaver(60.0).run([writer("a", 1, 3, log), writer("b", 1, 3, log)])
    assert log == [(name, written) for name in "ab" for written in (1, 2, 3)]


def test_tokens_of_the_next_answer_are_added():
    """Two answers of three tokens, one after the other, beside one of six."""
    log: list = []

    def two():
        yield from writer("two", 1, 3, log)
        yield from writer("two", 1, 3, log)

    interleaver().run([two(), writer("one", 1, 6, log)])
    assert [name for name, _ in log] == ["two", "one"] * 6


def test_the_device_is_done_before_another_arm_begins(monkeypatch):
    """Or the other's passes would wait for this one's."""
    log: list = []
    monkeypatch.setattr(Clock, "synchronize", lambda clock: log.append("synchronised"))
    interleaver().run([writer("a", 1, 2, log), writer("b", 1, 2, log)])
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == [
        *("a", "synchronised", "b", "synchronised"),
        *("a", "synchronised", "b", "synchronised"),
    ]


def test_an_arm_that_fails_ends_the_others_in_good_order():
    ended = []

    def other():
        try:
            yield from writer("other", 1, 100, [])
        finally:
            ended.append("other")

    def failing():
        yield 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        interleaver().run([other(), failing()])
    assert ended == ["other"] and not torch.is_inference_mode_enabled()


# -- engines


class Counting(Drafter):
    """Drafts nothing; counts the sequences that it serves."""

    serving = 0

    def begin(self, slot, sequence, prefill):
        self.serving += 1

    def end(self, slot):
        self.serving -= 1


def engine(pair, drafter: Drafter | None = None) -> Engine:
    return Engine(StagedModel(pair.target), drafter or Drafter(), frozenset(), context_length=256)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_each_arm_alone(temperature):
    pair = random_pair("llama")
    requests = [Request(p, SamplingParams(12, temperature), 3) for p in (PROMPT, [9, 8], [3, 4, 5, 6])]
    alone = [engine(pair).generate([request]) for request in requests]
    together = interleaver().run([engine(pair).rounds([request]) for request in requests])
    assert [a.tokens for (a,) in together] == [a.tokens for (a,) in alone]


def test_rounds_add_up_to_the_answers():
    pair = random_pair("llama")
    requests = [Request(p, SamplingParams(cap)) for p, cap in ((PROMPT, 9), ([9, 8], 5), (PROMPT, 7))]
    turns = interleaver()
    (answers,) = turns.run([engine(pair).rounds(requests)])
    assert [len(answer.tokens) for answer in answers] == [9, 5, 7] and turns.tokens == [9 + 5 + 7]


def modes() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["engine", "generate", "generate, static cache"])
@pytest.mark.parametrize("within", [False, True])
def test_no_mode_of_an_arm_leaks_into_its_caller(monkeypatch, kind, within):
    """Between two rounds the caller's modes hold, and within each round the arm's own."""
    pair, seen = random_pair("llama"), []
    static = {"cache_implementation": "static"} if kind.endswith("cache") else {}
    arm = engine(pair).rounds if kind == "engine" else hf_generate_arm(pair, **static)
    mark = Clock.mark
    monkeypatch.setattr(Clock, "mark", lambda clock: (seen.append(modes()), mark(clock))[1])
    with torch.inference_mode(within):
        before, rounds = modes(), arm([Request(PROMPT, SamplingParams(6))])
        for _ in rounds:
            assert modes() == before == (within, not within)
        assert modes() == before
    inference = within or not static
    assert len(seen) > 6 and set(seen) == {(inference, False)}


@pytest.mark.parametrize("kind", ["engine", "generate"])
def test_an_arm_that_is_closed_early_leaves_nothing_behind(kind):
    """What it has begun is given up, what it leaves in its cache is not used, and it answers as before."""
    pair, drafter = random_pair("llama"), Counting()
    own = engine(pair, drafter)
    arm = own.rounds if kind == "engine" else hf_generate_arm(pair)
    requests = [Request(PROMPT, SamplingParams(12))]
    right = generate_with_transformers(pair.target, PROMPT, 12)
    rounds = arm(requests)
    next(rounds)
    next(rounds)
    assert drafter.serving == (kind == "engine") == (own._cache is not None)
    rounds.close()
    assert drafter.serving == 0 and own._cache is None and modes() == (False, True)
    assert [answer.tokens for answer in exhaust(arm(requests))] == [right]


def sleeper(rounds: int) -> Iterator[int]:
    for _ in range(rounds):
        time.sleep(0.05)
        yield 1


def check_that_the_time_of_the_others_does_not_count() -> None:
    """Two engines, transformers' generate and an arm that sleeps: together they take no longer than the clock on the
    wall."""
    pair = random_pair("llama")
    arms = [engine(pair).rounds, engine(pair).rounds, hf_generate_arm(pair)]
    begun = time.perf_counter()
    turns = interleaver().run([*(arm([Request(PROMPT, SamplingParams(12))]) for arm in arms), sleeper(12)])
    wall = time.perf_counter() - begun
    answers = [answer for (answer,) in turns[:-1]]
    assert sum(answer.seconds for answer in answers) <= wall - 12 * 0.05
    for answer in answers:
        in_rounds = sum(s.draft_seconds + s.verify_seconds + s.other_seconds for s in answer.steps)
        assert 0 < in_rounds + answer.prefill_seconds <= answer.seconds * 1.0001


@pytest.mark.slow
def test_the_time_of_the_others_does_not_count():
    check_that_the_time_of_the_others_does_not_count()


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["engine", "generate"])
def test_a_clock_that_runs_on_while_others_do_is_found(monkeypatch, arm):
    """The test above fails if an arm does not take a mark when it goes on."""
    mark, last, resumed = Clock.mark, {}, []

    def late(clock):
        if resumed:
            resumed.clear()
        else:
            last[clock] = mark(clock)
        return last[clock]

    def running_on(rounds):
        def outer(*given):
            inner = rounds(*given)
            while True:
                try:
                    yield next(inner)
                except StopIteration as end:
                    return end.value
                resumed.append(True)

        return outer

    monkeypatch.setattr(Clock, "mark", late)
    if arm == "engine":
        monkeypatch.setattr(Engine, "rounds", running_on(Engine.rounds))
    else:
        monkeypatch.setattr("specbench.measure.arms.as_generator", running_on(as_generator))
    with pytest.raises(AssertionError):
        check_that_the_time_of_the_others_does_not_count()


def test_a_function_becomes_a_generator():
    def work(pause):
        pause(1)
        pause(2)
        return ["an answer"]

    rounds = as_generator(work)
    assert next(rounds) == 1 and next(rounds) == 2
    with pytest.raises(StopIteration) as end:
        next(rounds)
    assert end.value.value == ["an answer"]


def test_a_function_that_fails_or_is_given_up():
    ended = []

    def work(pause):
        try:
            pause(1)
            raise ValueError("no")
        finally:
            ended.append(True)

    rounds = as_generator(work)
    next(rounds)
    with pytest.raises(ValueError, match="no"):
        next(rounds)
    rounds = as_generator(work)
    next(rounds)
    rounds.close()
    assert ended == [True, True]
