"""Random schedules, 2,400 of them, on a fake model, under toy schedulers; and faulty layouts, which they must find."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.scheduler import Scheduler
from tests.support.batches import Chaos, Static
from tests.support.schedules import assert_found, run_schedules

SEEDS, SCHEDULES = 20, 120


def any_scheduler(rng: random.Random) -> Scheduler:
    size = rng.randint(1, 6)
    return rng.choice((Scheduler(size), Static(size), Chaos(size, rng), Chaos(size, rng)))


SEEDED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDED)
def test_every_schedule_gives_every_row_its_own_run(seed):
    ran = run_schedules(seed, SCHEDULES, any_scheduler)
    assert ran == {(Scheduler, RaggedLayout), (Static, RaggedLayout), (Chaos, RaggedLayout)}


class OffByOne(RaggedLayout):
    def place(self, batch, n, offset=0, tree=None):
        ctx = super().place(batch, n, offset, tree)
        own, held = ctx.positions, ctx.kv_positions
        if ctx.start is not None:
            held = torch.arange(ctx.kv_len).unsqueeze(0)
            own = held[:, ctx.start :]
        return replace(ctx, start=None, positions=own + 1, kv_positions=held)


class Unmoved(RaggedLayout):
    """Sequences change slots, their keys and values do not."""

    def move(self, sources, destinations, kv_len):
        pass


class Straight(RaggedLayout):
    """Leaves the accepted nodes of a tree where they were."""

    def commit(self, batch, count, counts, path):
        pass


@pytest.mark.first_fast
@pytest.mark.parametrize("layout", [OffByOne, Unmoved, Straight])
def test_a_faulty_layout_is_found(layout):
    assert_found(layout)
