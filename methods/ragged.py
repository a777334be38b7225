"""Ragged batches: each sequence has its own length and its own end in the cache, so that nothing is ever aligned."""

from __future__ import annotations

from specbench.decoding.scheduler import Scheduler


class RaggedBatch(Scheduler):
    """The batch engine's default scheduler."""


class AutoregressiveBatch(RaggedBatch):
    """Batched autoregressive decoding that fills free slots at once: the baseline of every batch."""

    drafts = False
