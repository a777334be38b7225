"""Which sequences run in each round, and how they lie in memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from specbench.decoding.kv_layout import RaggedLayout
from specbench.system.errors import require_at_least
from specbench.system.settings import Count

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.state import SequenceState


class Scheduler:
    """Chooses the sequences of each round.

    This one runs every sequence until it ends; a new one then takes its slot at once. Each sequence ends in its own
    column in memory (`RaggedLayout`).

    Args:
        batch_size: sequences in a round.
        token_budget: the most tokens of a verification pass, all sequences together; None: no limit. Drafts are cut to
            it by the batch size, not by how many sequences happen to run, so that a draft does not depend on others.

    Attributes:
        drafts: whether a drafter can be chosen for it.
    """

    drafts = True

    def __init__(self, batch_size: Count, token_budget: Count | None = None):
        self.batch_size = batch_size
        self.slots = batch_size  # sequences that are held at once
        self.longest_draft = sys.maxsize
        if token_budget is not None:
            # The pending token of every sequence is verified.
            require_at_least(batch_size, token_budget=token_budget)
            self.longest_draft = token_budget // batch_size - 1
        # Its own stats of the current round, as in `Draft`.
        self.stats: dict[str, Any] = {}

    def layout(self, cache: KVCache) -> RaggedLayout:
        """The layout of the sequences in a new cache."""
        return RaggedLayout(cache)

    def joining(self, held: int) -> int:
        """How many waiting sequences may be prefilled now, when `held` are in memory."""
        return self.slots - held

    def choose(self, held: list[SequenceState]) -> list[int]:
        """Indices of the held sequences that run in this round, `batch_size` at most.

        held: in memory, those that ran in the last round first.
        """
        return list(range(min(self.batch_size, len(held))))

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """Sums up the `stats` of some rounds, as `Drafter.summarise`."""
        return {}

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """Lines about such a summary, as `Drafter.describe`."""
        return []
