"""EXSPEC (Zhang et al. 2025, arXiv 2510.22876): rounds of sequences of equal length, chosen from a window."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from methods.common.aligned_layout import AlignedLayout
from specbench.decoding.scheduler import Scheduler
from specbench.measure.metrics.acceptance import ratio, stat
from specbench.system.settings import Count, NotNegative

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.state import SequenceState


class ExSpec(Scheduler):
    """Forms each round of sequences of equal length, if the window has enough of them.

    Sequences that did not run in the last round must be copied into the batch. So a group of equal length is used only
    if at least half of it ran in the last round, and none is used once a sequence has been skipped `max_skipped_rounds`
    times in favour of younger ones. Otherwise the oldest sequences run. If sequences end in different entries, holes
    remain. Up to `slack` of them are tolerated before a realignment (see `AlignedLayout`): with correct positions they
    cost attention to some empty entries, but no copy.

    Not as in the paper: its authors take the first group that reaches the batch size, in the order of the window,
    wherever its sequences are, and a sequence can be skipped without end. Here the group is that with most
    sequences from the last round, and `max_skipped_rounds` bounds the wait.

    Args:
        batch_size: sequences in a round.
        token_budget: as in `Scheduler`.
        window: prefilled sequences among which rounds choose; a new one enters as soon as one is done.
        slack: as in `AlignedLayout`.
        max_skipped_rounds: rounds in which a sequence may be skipped in favour of younger ones.
    """

    def __init__(
        self,
        batch_size: Count,
        token_budget: Count | None = None,
        window: Count = 32,
        slack: NotNegative = 0.25,
        max_skipped_rounds: Count = 16,
    ):
        super().__init__(batch_size, token_budget)
        self.slots = max(window, batch_size)
        self.slack, self.max_skipped_rounds = slack, max_skipped_rounds
        self._last = 0  # sequences that ran in the last round: the first ones
        # By request: rounds in a row in which a younger sequence ran and this one did not.
        self._skipped: Counter[int] = Counter()

    def layout(self, cache: KVCache) -> AlignedLayout:
        """One that tolerates `slack` before it aligns."""
        self._last = 0
        self._skipped.clear()
        return AlignedLayout(cache, self.slack)

    def choose(self, held: list[SequenceState]) -> list[int]:
        """A group of one length, or else the oldest sequences."""
        b = min(self.batch_size, len(held))
        by_age = sorted(range(len(held)), key=lambda slot: held[slot].request_index)
        chosen = by_age[:b]
        if all(self._skipped[one.request_index] < self.max_skipped_rounds for one in held):
            chosen = self._group(held, by_age, b) or chosen
        self.stats = {"grouped": len({held[slot].length for slot in chosen}) == 1} if b > 1 else {}
        self._last = b
        ran = {held[slot].request_index for slot in chosen}
        youngest = max(ran)
        for index in (one.request_index for one in held):
            self._skipped[index] = 0 if index in ran else self._skipped[index] + (index < youngest)
        return sorted(chosen)

    def _group(self, held: list[SequenceState], by_age: list[int], b: int) -> list[int]:
        """`b` sequences of one length of which at least half ran in the last round; empty if there are none."""
        groups = defaultdict(list)
        for slot in by_age:
            groups[held[slot].length].append(slot)
        full = [
            sorted(group, key=lambda slot: slot >= self._last)[:b]
            for group in groups.values()
            if len(group) >= b
        ]
        staying = {tuple(group): sum(slot < self._last for slot in group) for group in full}
        best = max(staying, key=staying.__getitem__, default=())
        return list(best) if best and 2 * staying[best] >= b else []

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """`grouping_rate`: of the rounds of several sequences, the share whose sequences had one length."""
        judged = rounds.assign(grouped=stat(rounds, "grouped"))
        judged = judged[judged["grouped"].notna()]
        # A round of n sequences has n rows.
        same = (judged["grouped"].astype(float) / judged["sequences"]).sum()
        return {"grouping_rate": ratio(same, (1 / judged["sequences"]).sum())}

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """The grouping rate."""
        rate = stats.get("grouping_rate")
        return [] if rate is None else [f"grouping rate {rate:.0%}"]
