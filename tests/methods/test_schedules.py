"""Three thousand random schedules on a fake model, under the schedulers of the batch methods."""

from __future__ import annotations

import random

import pytest

from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.ragged import RaggedBatch
from specbench.decoding.kv_layout import AlignedLayout, RaggedLayout
from specbench.decoding.scheduler import Scheduler
from tests.support.schedules import run_schedules

SEEDS, SCHEDULES = 24, 125


def any_scheduler(rng: random.Random) -> Scheduler:
    size = rng.randint(1, 6)
    window, slack, skipped = rng.randint(1, 8), rng.random(), rng.randint(1, 4)
    return rng.choice((RaggedBatch(size), EqSpec(size), ExSpec(size, None, window, slack, skipped)))


SEEDED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS))]


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDED)
def test_every_schedule_gives_every_row_its_own_run(seed):
    ran = run_schedules(seed, SCHEDULES, any_scheduler)
    assert ran == {(RaggedBatch, RaggedLayout), (EqSpec, AlignedLayout), (ExSpec, AlignedLayout)}
