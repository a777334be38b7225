"""Faults that the tests must find, one module for each area; `runner.py` plants them."""

from tests.faults import (
    acceptance,
    batches,
    caches,
    data,
    drafting,
    engines,
    kernels,
    masks,
    measuring,
    reports,
    sampling,
    statistics,
    stores,
    training,
    trees,
    wiring,
)

FAULTS = (
    *acceptance.FAULTS,
    *trees.FAULTS,
    *sampling.FAULTS,
    *masks.FAULTS,
    *caches.FAULTS,
    *batches.FAULTS,
    *drafting.FAULTS,
    *kernels.FAULTS,
    *statistics.FAULTS,
    *measuring.FAULTS,
    *stores.FAULTS,
    *data.FAULTS,
    *training.FAULTS,
    *engines.FAULTS,
    *reports.FAULTS,
    *wiring.FAULTS,
)
