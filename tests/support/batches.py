"""Requests for batches with transformers' own answers, and toy schedulers for the decoding core's own tests."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache

import pytest

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from tests.support.decoding import STOP, generate_with_transformers, random_pair, random_prompt

SIZES = (1, 3, 8, 16)
REQUESTS = 12


class Static(Scheduler):
    """A batch begins together, and the next one begins when its last row is done."""

    def joining(self, held: int) -> int:
        return self.slots if held == 0 else 0


class Chaos(Scheduler):
    """Runs any rows in any order, and lets rows join whenever it likes."""

    def __init__(self, batch_size: int, rng: random.Random):
        super().__init__(batch_size)
        self.slots, self.rng = batch_size + rng.randint(0, 4), rng

    def joining(self, held: int) -> int:
        return self.slots if held == 0 else self.rng.randint(0, self.slots - held)

    def choose(self, held: list) -> list[int]:
        some = self.rng.sample(range(len(held)), self.rng.randint(1, min(self.batch_size, len(held))))
        return sorted(some)


@cache
def cases(arch: str) -> tuple[list[Request], list[list[int]]]:
    """Requests of many lengths, caps and stop sets, and transformers' answers."""
    pair, rng = random_pair(arch), random.Random(arch)
    requests, answers = [], []
    for seed in range(REQUESTS):
        prompt = random_prompt(rng, pair.target.config.vocab_size)
        cap, stops = rng.choice((1, 2, 3, 9, 15, 15)), rng.choice(((STOP,), (STOP, 3), ()))
        requests.append(Request(prompt, SamplingParams(cap), seed, frozenset(stops)))
        answers.append(generate_with_transformers(pair.target, prompt, cap, stops))
    return requests, answers


def assert_lossless(engine: Engine, requests: list[Request], expected: list[list[int]]) -> list:
    """Decodes the requests, checks answers and trace, and returns all steps."""
    answers, size = engine.generate(requests), engine.scheduler.batch_size
    assert [a.tokens for a in answers] == expected
    for request, answer in zip(requests, answers):
        assert sum(s.emitted for s in answer.steps) + 1 == len(answer.tokens)
        assert all(s.accepted <= s.drafted and 1 <= s.sequences <= size for s in answer.steps)
        ended = answer.tokens[-1] in request.stop_ids
        assert answer.finish == ("stop" if ended else "length")
    return [s for a in answers for s in a.steps]


def assert_drafts_as_alone(
    engine: Engine, requests: list[Request], numbers: Sequence[str] = ("drafted", "accepted")
) -> None:
    """What a sequence of a batch drafts does not depend on the others; compared are these numbers of its rounds."""
    for request, answer in zip(requests, engine.generate(requests)):
        alone = Engine(engine.target, engine.drafter, request.stop_ids).generate([request])[0]
        one, other = ([[getattr(s, n) for n in numbers] for s in a.steps] for a in (alone, answer))
        assert one == other


def assert_freed_places_are_filled_at_once(drafter: Drafter, scheduler: Scheduler) -> None:
    """With a drafter that drafts nothing and a scheduler of four sequences, which run in every round while any wait."""
    pair = random_pair("llama")
    requests = [Request(p.prompt, SamplingParams(6 + 5 * (i % 3))) for i, p in enumerate(cases("llama")[0])]
    answers = Engine(StagedModel(pair.target), drafter, frozenset(), scheduler).generate(requests)
    rounds = sum(1 / s.sequences for a in answers for s in a.steps)
    full = sum(1 / s.sequences for a in answers for s in a.steps if s.sequences == 4)
    assert rounds - full < 17, "only while the last rows end may places be empty"
    assert rounds == pytest.approx(round(rounds))


def assert_the_seconds_of_all_rows_are_the_time_of_the_call(drafter: Drafter, scheduler: Scheduler) -> list:
    """Returns all steps."""
    pair, (requests, _) = random_pair("llama"), cases("llama")
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), scheduler)
    begun = time.perf_counter()
    answers = engine.generate(requests)
    spent = time.perf_counter() - begun
    assert 0.5 * spent < sum(answer.seconds for answer in answers) <= spent
    for answer in answers:
        parts = sum(
            s.draft_seconds + s.verify_seconds + s.other_seconds + s.align_seconds for s in answer.steps
        )
        assert answer.seconds == pytest.approx(answer.prefill_seconds + parts)
    return [s for a in answers for s in a.steps]


def assert_static_batches_wait_for_their_last_row(drafter: Drafter, scheduler: Scheduler) -> None:
    """With a drafter that drafts nothing and a scheduler of two sequences, which take no new one while any runs."""
    pair = random_pair("llama")
    requests = [Request([3, 4, 5], SamplingParams(cap)) for cap in (2, 9, 4, 4)]
    answers = Engine(StagedModel(pair.target), drafter, frozenset(), scheduler).generate(requests)
    assert [[s.sequences for s in a.steps] for a in answers] == [[2], [2] + [1] * 7, [2] * 3, [2] * 3]
