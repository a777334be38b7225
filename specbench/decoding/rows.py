"""Layouts of the sequences of a batch in memory: each with an end of its own, or all with the same end.

Both make the `Places` of a pass: where its tokens are written and what they attend to. A token's position is its index
in its own sequence, whatever lies around it; that alone makes a batch exact (see `Places`).
"""

from __future__ import annotations

import torch

from specbench.decoding.kv_cache import FAR, KVCache, Places, RowCache


def span(starts: torch.Tensor, n: int) -> torch.Tensor:
    """[b, n] the n positions from `starts` [b] on."""
    return starts.unsqueeze(1) + torch.arange(n, device=starts.device)


class Ragged:
    """Position p of a sequence lies in column p of its row, so that nothing is ever moved for alignment."""

    aligns = False

    def __init__(self, cache: RowCache):
        self.cache = cache
        device = cache.data.device
        self._columns = torch.arange(cache.capacity, device=device).unsqueeze(0)
        self._rows = torch.arange(cache.rows, device=device).unsqueeze(1) * cache.capacity

    def entering(self, row: int, length: int) -> KVCache:
        """The cache to prefill a sequence of `length` tokens into."""
        return self.cache.row(row)

    def begin(self, lengths: list[int], n: int) -> None:
        """Begins a round of sequences of `lengths` tokens, the last one pending; each may get `n` more."""

    def places(self, starts: torch.Tensor, n: int, reach: int, offset: int = 0) -> Places:
        """The places of `n` tokens of each sequence.

        Args:
            starts: [b] the position of the first of them in each sequence.
            n: tokens of each sequence.
            reach: a bound on all positions, exclusive.
            offset: tokens between a sequence's pending token and the first of these.
        """
        positions = span(starts, n)
        to = (self._rows[: starts.shape[0]] + positions).flatten()
        return Places(positions, reach, self._columns[:, :reach], to)

    def settle(self, counts: torch.Tensor, kept: list[int]) -> None:
        """Ends a round: `counts` [b] (on the host: `kept`) of the tokens behind each pending one stay."""

    def move(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies whole rows, sequences of fewer than `reach` tokens, all at once."""
        device = self.cache.data.device
        self.cache.move(
            torch.tensor(sources, device=device),
            torch.tensor(destinations, device=device),
            reach,
        )


class Aligned(Ragged):
    """All rows of a round write to the same columns, the first that are free in every one of them.

    Where a row keeps fewer tokens than another, holes remain (columns at `FAR`), and in front of a shorter sequence.
    Realigning moves the content of each row together and up to the common end (the paper's unpad-append-repad).

    Args:
        cache: where the rows are.
        slack: realign when the rows take this share more columns than the longest of them needs. None: after every
            round in which the rows did not keep equally many tokens.
    """

    aligns = True

    def __init__(self, cache: RowCache, slack: float | None = None):
        super().__init__(cache)
        self.slack = slack
        shape = (cache.rows, cache.capacity)
        self._held = torch.full(shape, FAR, device=cache.data.device)  # the position that each column holds
        self._ends = [0] * cache.rows  # behind the last column that each row has in use
        self._end = 0  # the common end of this round
        self._width = 0  # columns that this round has filled

    def entering(self, row: int, length: int) -> KVCache:
        """The cache to prefill a sequence of `length` tokens into, from column 0 on."""
        self._held[row] = FAR
        self._held[row, :length] = self._columns[0, :length]
        self._ends[row] = length
        return super().entering(row, length)

    def begin(self, lengths: list[int], n: int) -> None:
        """Begins a round, and realigns first where there are more holes than `slack` allows."""
        b = len(lengths)
        longest = max(lengths) - 1  # the pending token has no column yet
        self._end, self._width = max(self._ends[:b]), 0
        if self.slack is None:
            realign = len({*self._ends[:b]}) > 1 or self._end > longest
        else:
            realign = self._end - longest > self.slack * longest
        if realign or self._end + n > self.cache.capacity:
            self._realign(b, longest)

    def places(self, starts: torch.Tensor, n: int, reach: int, offset: int = 0) -> Places:
        """The places of `n` tokens of each sequence, in columns behind the common end; arguments as in `Ragged`."""
        positions = span(starts, n)
        b, column = starts.shape[0], self._end + offset
        self._held[:b, column : column + n] = positions
        self._width = max(self._width, offset + n)
        return Places(positions, column + n, self._held[:b, : column + n], column)

    def settle(self, counts: torch.Tensor, kept: list[int]) -> None:
        """Ends a round: the columns of the tokens that were not kept become holes."""
        b, end = len(kept), self._end
        fresh = self._held[:b, end : end + self._width]
        fresh.masked_fill_(self._columns[:, : self._width] > counts.unsqueeze(1), FAR)
        self._ends[:b] = [end + 1 + count for count in kept]

    def move(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies whole rows with what is known of their columns, all at once."""
        ends = [self._ends[source] for source in sources]
        super().move(sources, destinations, max(ends))
        self._held[destinations] = self._held[sources]
        for destination, end in zip(destinations, ends):
            self._ends[destination] = end

    def _realign(self, b: int, longest: int) -> None:
        """Moves the content of the first `b` rows together, so that each ends at column `longest`."""
        held = self._held[:b, : self._end]
        # Content in the order of its positions, holes in front of it; of the holes only as many as are needed.
        keys = held.masked_fill(held == FAR, -1)
        order = keys.argsort(dim=1, stable=True)[:, self._end - longest :]
        kept = held.gather(1, order)
        self.cache.gather(order)
        held.fill_(FAR)
        self._held[:b, :longest] = kept
        self._ends[:b] = [longest] * b
        self._end = longest
