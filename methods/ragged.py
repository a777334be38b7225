"""Ragged batches: per-row lengths and per-row places in the cache, so that nothing ever has to be lined up."""

from __future__ import annotations

from specbench.decoding.batch import Scheduler


class RaggedBatch(Scheduler):
    """What the batch engine does when it is told nothing else. With a drafter that drafts nothing it is plain batched
    decoding that fills a freed place at once, the baseline of every batch.
    """
