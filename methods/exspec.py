"""EXSPEC (Zhang et al. 2025, arXiv 2510.22876): a pool of rows from which each round takes some of the same length."""

from __future__ import annotations

from collections import defaultdict

from specbench.decoding.batch import Row, Scheduler
from specbench.decoding.rows import Aligned
from specbench.values import Count, NotNegative


class ExSpec(Scheduler):
    """window: prefilled rows that rounds are chosen from; a new one enters as soon as one is done.

    A round takes a full batch of rows of one length, if there is one. But rows outside the batch of the last round must
    be copied into it, so a group counts only if half of it is there already, and none once a row was passed over by
    younger ones for `patience` rounds. Otherwise the oldest rows run. Where they end in different columns holes remain;
    up to `slack` of them are tolerated before rows are realigned (see `Aligned`), as with right positions they cost
    attention to some empty columns and no copy.

    Not as in the paper: its authors take the first group that reaches the batch size, in the order of the window,
    wherever its rows are, and a row can be passed over without end. Here it is the group of which most rows ran in the
    last round, only if that is at least half of them, and `patience` bounds the wait.
    """

    def __init__(
        self,
        batch_size: Count,
        token_budget: Count | None = None,
        window: Count = 32,
        slack: NotNegative = 0.25,
        patience: Count = 16,
    ):
        super().__init__(batch_size, token_budget)
        self.rows = max(window, batch_size)
        self.slack, self.patience = slack, patience
        self._last = 0  # rows that ran in the last round: the first ones

    def layout(self, cache) -> Aligned:
        self._last = 0
        return Aligned(cache, self.slack)

    def choose(self, held: list[Row]) -> list[int]:
        b = min(self.batch_size, len(held))
        by_age = sorted(range(len(held)), key=lambda slot: held[slot].place)
        chosen = by_age[:b]
        if all(row.waited < self.patience for row in held):
            chosen = self._group(held, by_age, b) or chosen
        self.grouped = len({held[slot].length for slot in chosen}) == 1 if b > 1 else None
        self._last = b
        return sorted(chosen)

    def _group(self, held: list[Row], by_age: list[int], b: int) -> list[int]:
        """`b` rows of one length of which at least half ran in the last round; empty if there are none."""
        groups = defaultdict(list)
        for slot in by_age:
            groups[held[slot].length].append(slot)
        full = [
            sorted(group, key=lambda slot: slot >= self._last)[:b]
            for group in groups.values()
            if len(group) >= b
        ]
        staying = {tuple(group): sum(slot < self._last for slot in group) for group in full}
        best = max(staying, key=staying.get, default=())
        return list(best) if best and 2 * staying[best] >= b else []
