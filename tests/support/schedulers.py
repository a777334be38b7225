"""The schedulers of batches, and the check that a drafter leaves transformers' answers as they are in each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.ragged import RaggedBatch
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.scheduler import Scheduler
from tests.support import batches
from tests.support.decoding import random_pair

# Each made of the number of sequences that run at a time.
SCHEDULERS: dict[str, Callable[[int], Scheduler]] = {
    "ragged": RaggedBatch,
    "eqspec": EqSpec,
    "exspec": lambda size: ExSpec(size, window=7),
}
EVERY_SCHEDULER = pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)


def assert_lossless_with(
    scheduler: Callable[[int], Scheduler],
    arch: str,
    drafter: Drafter,
    size: int = 4,
    alone: Sequence[str] = (),
) -> list:
    """Decodes `batches.cases`, of which some draft tokens must be accepted; returns all steps.

    alone: numbers of its rounds that must be those of each request without the others.
    """
    requests, expected = batches.cases(arch)
    engine = Engine(StagedModel(random_pair(arch).target), drafter, frozenset(), scheduler(size))
    steps = batches.assert_lossless(engine, requests, expected)
    assert any(s.accepted for s in steps)
    if alone:
        batches.assert_drafts_as_alone(engine, requests, alone)
    return steps
