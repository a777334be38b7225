"""Random schedules on a fake model, under the schedulers of the batch methods and where all rows end alike."""

from __future__ import annotations

import random

import pytest
import torch

from methods.common.aligned_layout import AlignedLayout, gather
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.ragged import RaggedBatch
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from tests.support.aligned import AlignedChaos
from tests.support.decoding import random_pair
from tests.support.drafters import ModelTree
from tests.support.schedules import assert_found, run_schedules

SEEDS, SCHEDULES, ALIGNED = 24, 125, 60


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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDED)
def test_rows_that_end_alike_run_in_any_order(seed):
    ran = run_schedules(seed, ALIGNED, lambda rng: AlignedChaos(rng.randint(1, 6), rng))
    assert ran == {(AlignedChaos, AlignedLayout)}


def test_a_tree_leaves_no_hole_in_a_batch_of_one(monkeypatch):
    monkeypatch.setattr(AlignedLayout, "_realign", lambda *_: pytest.fail("there is nothing to align"))
    pair = random_pair("llama")
    engine = Engine(StagedModel(pair.target), ModelTree(pair.draft), frozenset(), EqSpec(1))
    (answer,) = engine.generate([Request([3, 9, 27], SamplingParams(30))])
    assert any(step.accepted for step in answer.steps)


def test_order_is_gathered_slot_by_slot():
    cache = KVCache([torch.device("cpu")], 1, 1, 2, 4, torch.float32)
    cache.segments[0][0, :] = torch.arange(8.0).view(2, 4, 1, 1)
    gather(cache, torch.tensor([[3, 1], [0, 2]]))
    assert cache.segments[0][0, 1, :, :2, 0, 0].tolist() == [[3.0, 1.0], [4.0, 6.0]]


class Forgetful(AlignedLayout):
    """Leaves what was rejected in sight."""

    def commit(self, batch, count, counts, path):
        super().commit(batch, count, counts, path)
        fresh = self._held[: len(counts), self._end : self._end + self._width]
        fresh.copy_(torch.arange(self._width) + fresh[:, :1])


def test_a_faulty_layout_is_found():
    assert_found(Forgetful)
