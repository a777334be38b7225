"""EQSPEC (Zhang et al. 2025, arXiv 2510.22876): static batches that are lined up again after every round."""

from __future__ import annotations

from specbench.decoding.batch import Scheduler
from specbench.decoding.rows import Aligned


class EqSpec(Scheduler):
    """A batch begins together, and the next one when its last row is done. After a round in which its rows kept
    different numbers of tokens: unpad, append, repad, that is, all content moves up to a common end, in one gather per
    layer. Unlike in the authors' code rows that are done leave the batch, and a fully accepted draft earns its bonus
    token.
    """

    def layout(self, cache) -> Aligned:
        return Aligned(cache)

    def joining(self, held: int) -> int:
        return self.rows if held == 0 else 0
