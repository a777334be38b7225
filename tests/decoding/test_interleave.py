"""Arms that take turns: who is next, whose time it is, and that no arm's answer depends on the others."""

import time
from functools import partial

import pytest
import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.interleave import Interleaver, checkpoint
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.trace import Clock
from tests.support.decoding import random_pair

CLOCK = Clock(torch.device("cpu"))


def writer(name: str, tokens: int, total: int, log: list):
    """An arm that writes `tokens` a round; it notes in `log` what it has written."""

    def arm() -> str:
        for written in range(tokens, total + 1, tokens):
            log.append((name, written))
            checkpoint(CLOCK, written)
        return name

    return arm


def test_the_arm_with_the_fewest_tokens_is_next():
    log: list = []
    assert Interleaver(0.0).run([writer("a", 1, 6, log), writer("b", 3, 6, log), writer("c", 2, 6, log)]) == [
        "a",
        "b",
        "c",
    ]
    assert [name for name, _ in log[:3]] == ["a", "b", "c"]
    reached = {"a": 0, "b": 0, "c": 0}
    for name, written in log[3:]:
        assert reached[name] <= min(reached.values()) + 3
        reached[name] = written


def test_a_slice_lasts_until_its_time_is_over():
    log: list = []
    Interleaver(60.0).run([writer("a", 1, 3, log), writer("b", 1, 3, log)])
    assert log == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]


def test_tokens_of_the_next_answer_are_added():
    """Two answers of three tokens, one after the other, beside one of six."""
    log: list = []

    def two() -> None:
        writer("two", 1, 3, log)()
        writer("two", 1, 3, log)()

    Interleaver(0.0).run([two, writer("one", 1, 6, log)])
    assert [name for name, _ in log] == ["two", "one"] * 6


def test_without_turns_nothing_happens():
    assert checkpoint(CLOCK, 1) is None


def test_an_arm_that_fails_ends_the_others_in_good_order():
    ended = []

    def other() -> None:
        try:
            writer("other", 1, 100, [])()
        finally:
            ended.append("other")

    def failing() -> None:
        checkpoint(CLOCK, 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Interleaver(0.0).run([other, failing])
    assert ended == ["other"] and checkpoint(CLOCK, 1) is None and not torch.is_inference_mode_enabled()


def engine(pair) -> Engine:
    return Engine(StagedModel(pair.target), Drafter(), frozenset(), context_length=256)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_each_arm_alone(temperature):
    pair = random_pair("llama")
    prompts = [[5, 6, 7], [9, 8], [3, 4, 5, 6]]
    decoding = SamplingParams(24, temperature)
    alone = [engine(pair).answer(prompt, decoding, seed=3).tokens for prompt in prompts]
    arms = [partial(engine(pair).answer, prompt, decoding, 3) for prompt in prompts]
    assert [answer.tokens for answer in Interleaver(0.0).run(arms)] == alone


@pytest.mark.slow
def test_the_time_of_the_others_does_not_count():
    """Three engines and an arm that sleeps: together they take no longer than the clock on the wall."""
    pair = random_pair("llama")

    def sleeper() -> None:
        for written in range(12):
            time.sleep(0.05)
            checkpoint(CLOCK, written)

    arms = [partial(engine(pair).answer, [5, 6, 7], SamplingParams(12)) for _ in range(3)]
    begun = time.perf_counter()
    *answers, _ = Interleaver(0.0).run([*arms, sleeper])
    wall = time.perf_counter() - begun
    assert sum(answer.seconds for answer in answers) <= wall - 12 * 0.05
    for answer in answers:
        in_rounds = sum(s.draft_seconds + s.verify_seconds + s.other_seconds for s in answer.steps)
        assert 0 < in_rounds + answer.prefill_seconds <= answer.seconds


@pytest.mark.slow
def test_a_clock_that_runs_on_while_others_do_is_found(monkeypatch):
    """The test above would fail if the marks that an arm gets were not left out of its time."""
    monkeypatch.setattr("specbench.decoding.engine.checkpoint", lambda *a: checkpoint(*a) and None)
    with pytest.raises(AssertionError):
        test_the_time_of_the_others_does_not_count()
