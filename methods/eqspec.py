"""EQSPEC (Zhang et al. 2025, arXiv 2510.22876): static batches that are aligned again after every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from methods.common.aligned_layout import AlignedLayout
from specbench.decoding.scheduler import Scheduler

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache


class EqSpec(Scheduler):
    """Static batches: all sequences of a batch begin together; the next batch begins when the last of them is done.

    After a round in which sequences kept different numbers of tokens, all content moves up to a common end, in one
    gather per layer (unpad, append, repad). Unlike in the authors' code, finished sequences leave the batch, and a
    fully accepted draft earns its bonus token.
    """

    def layout(self, cache: KVCache) -> AlignedLayout:
        """One that aligns after every round in which sequences kept different numbers of tokens."""
        return AlignedLayout(cache)

    def joining(self, held: int) -> int:
        """A whole batch, and only once the last one is done."""
        return self.slots if held == 0 else 0
