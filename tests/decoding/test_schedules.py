"""Five thousand random schedules on a fake model, under toy schedulers; and faulty layouts, which they must find."""

from __future__ import annotations

import random

import pytest
import torch

from specbench.decoding.batch import BatchEngine, Scheduler
from specbench.decoding.kv_cache import Places
from specbench.decoding.rows import Aligned, Ragged
from tests.support.batches import Chaos, Static
from tests.support.schedules import FakeDrafter, FakeTarget, any_requests, expected_answers, run_schedules

SEEDS, SCHEDULES = 20, 250


def any_scheduler(rng: random.Random) -> Scheduler:
    size = rng.randint(1, 6)
    return rng.choice((Scheduler(size), Static(size), Chaos(size, rng), Chaos(size, rng)))


SEEDED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS))]


@pytest.mark.parametrize("seed", SEEDED)
def test_every_schedule_gives_every_row_its_own_run(seed):
    ran = run_schedules(seed, SCHEDULES, any_scheduler)
    assert ran == {(Scheduler, Ragged), (Static, Aligned), (Chaos, Ragged), (Chaos, Aligned)}


class OffByOne(Ragged):
    def places(self, starts, n, reach, offset=0):
        places = super().places(starts, n, reach, offset)
        return Places(places.positions + 1, places.reach, places.columns, places.to)


class Forgetful(Aligned):
    """Leaves what was rejected in sight."""

    def settle(self, counts, kept):
        super().settle(counts, kept)
        fresh = self._held[: len(kept), self._end : self._end + self._width]
        fresh.copy_(torch.arange(self._width) + fresh[:, :1])


class Unmoved(Ragged):
    """Rows change places, their keys and values do not."""

    def move(self, sources, destinations, reach):
        pass


@pytest.mark.parametrize("layout", [OffByOne, Forgetful, Unmoved])
def test_a_faulty_layout_is_found(layout):
    rng, wrong = random.Random(5), 0
    for _ in range(40):
        scheduler, requests = Chaos(3, rng), any_requests(rng)
        scheduler.layout = layout
        answers = BatchEngine(FakeTarget(), FakeDrafter(rng), scheduler, frozenset()).generate(requests)
        wrong += [a.tokens for a in answers] != expected_answers(requests)
    assert wrong > 5
