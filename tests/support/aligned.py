"""A toy scheduler whose sequences end at a common entry."""

from __future__ import annotations

from methods.common.aligned_layout import AlignedLayout
from tests.support.batches import Chaos


class AlignedChaos(Chaos):
    """Runs any rows in any order, and aligns them after every round or only now and then."""

    def layout(self, cache) -> AlignedLayout:
        return AlignedLayout(cache, None if self.rng.random() < 0.3 else self.rng.random())
