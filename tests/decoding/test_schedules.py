"""Random schedules, 2,400 of them, on a fake model, under toy schedulers; and faulty layouts, which they must find."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specbench.decoding.engine import Engine
from specbench.decoding.kv_layout import AlignedLayout, RaggedLayout
from specbench.decoding.scheduler import Scheduler
from tests.support.batches import Chaos, Static
from tests.support.schedules import FakeDrafter, FakeTarget, any_requests, expected_answers, run_schedules

SEEDS, SCHEDULES = 20, 120


def any_scheduler(rng: random.Random) -> Scheduler:
    size = rng.randint(1, 6)
    return rng.choice((Scheduler(size), Static(size), Chaos(size, rng), Chaos(size, rng)))


SEEDED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDED)
def test_every_schedule_gives_every_row_its_own_run(seed):
    ran = run_schedules(seed, SCHEDULES, any_scheduler)
    assert ran == {
        (Scheduler, RaggedLayout),
        (Static, AlignedLayout),
        (Chaos, RaggedLayout),
        (Chaos, AlignedLayout),
    }


class OffByOne(RaggedLayout):
    def place(self, batch, n, offset=0, tree=None):
        ctx = super().place(batch, n, offset, tree)
        own, held = ctx.positions, ctx.kv_positions
        if ctx.start is not None:
            held = torch.arange(ctx.kv_len).unsqueeze(0)
            own = held[:, ctx.start :]
        return replace(ctx, start=None, positions=own + 1, kv_positions=held)


class Forgetful(AlignedLayout):
    """Leaves what was rejected in sight."""

    def commit(self, batch, count, counts, path):
        super().commit(batch, count, counts, path)
        fresh = self._held[: len(counts), self._end : self._end + self._width]
        fresh.copy_(torch.arange(self._width) + fresh[:, :1])


class Unmoved(RaggedLayout):
    """Sequences change slots, their keys and values do not."""

    def move(self, sources, destinations, kv_len):
        pass


class Straight(RaggedLayout):
    """Leaves the accepted nodes of a tree where they were."""

    def commit(self, batch, count, counts, path):
        pass


@pytest.mark.first_fast
@pytest.mark.parametrize("layout", [OffByOne, Forgetful, Unmoved, Straight])
def test_a_faulty_layout_is_found(layout):
    rng, wrong = random.Random(5), 0
    for _ in range(40):
        scheduler, requests = Chaos(3, rng), any_requests(rng)
        scheduler.layout = layout
        answers = Engine(FakeTarget(), FakeDrafter(rng), frozenset(), scheduler).generate(requests)
        wrong += [a.tokens for a in answers] != expected_answers(requests)
    assert wrong > 5
