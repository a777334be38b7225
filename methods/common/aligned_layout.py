"""A layout in which all sequences of a batch end at the same entry, as those of static batches do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbench.decoding.device import move_slots, span
from specbench.decoding.kv_cache import EMPTY, ForwardContext, KVCache
from specbench.decoding.kv_layout import RaggedLayout

if TYPE_CHECKING:
    from specbench.decoding.kv_layout import Lengths
    from specbench.decoding.tree import Tree


class AlignedLayout(RaggedLayout):
    """All sequences of a round write to the same entries, the first that are free in every one of them.

    Holes (entries at `EMPTY`) remain if a sequence keeps fewer tokens than another, and in front of a shorter
    sequence. Realigning compacts the content of each slot up to the common end (EQSPEC's unpad-append-repad).

    Args:
        cache: where the sequences are.
        slack: realign when the batch uses this share more entries than its longest sequence needs. None: after every
            round in which sequences kept different numbers of tokens.
    """

    aligns = True

    def __init__(self, cache: KVCache, slack: float | None = None):
        super().__init__(cache)
        self.slack = slack
        shape = (cache.slots, cache.capacity)
        self._held = torch.full(shape, EMPTY, device=cache.device)  # the position that each entry holds
        self._ends = [0] * cache.slots  # after the last entry that each sequence has in use
        self._end = 0  # the common end of this round
        self._width = 0  # entries that this round has filled

    def prefill_view(self, slot: int, length: int) -> KVCache:
        """The cache to prefill a sequence of `length` tokens into, from entry 0 on."""
        self._held[slot] = EMPTY
        self._held[slot, :length] = self._entries[0, :length]
        self._ends[slot] = length
        return super().prefill_view(slot, length)

    def begin_round(self, lengths: list[int], n: int) -> None:
        """Begins a round; realigns first if there are more holes than `slack` allows."""
        b = len(lengths)
        longest = max(lengths) - 1  # the pending token has no entry yet
        self._end, self._width = max(self._ends[:b]), 0
        if self.slack is None:
            realign = len({*self._ends[:b]}) > 1 or self._end > longest
        else:
            realign = self._end - longest > self.slack * longest
        if realign or self._end + n > self.cache.capacity:
            self._realign(b, longest)

    def place(self, batch: Lengths, n: int, offset: int = 0, tree: Tree | None = None) -> ForwardContext:
        """The pass of `n` tokens of each sequence, in entries after the common end; arguments as in `RaggedLayout`."""
        b, entry = len(batch.lengths), self._end + offset
        self._width = max(self._width, offset + n)
        kv_len = entry + n
        if tree is None and min(batch.lengths) - 1 == self._end:  # no holes
            self._held[:b, entry:kv_len] = self._entries[:, entry:kv_len]
            return ForwardContext.consecutive(entry, n)
        if tree is None:
            positions, visible = span(batch.seq_lens - 1 + offset, n), None
        else:
            there = offset + n
            positions = batch.seq_lens.unsqueeze(1) - 1 + tree.offsets()[:, offset:there]
            visible = tree.visible[:, offset:there, :there]
        self._held[:b, entry:kv_len] = positions
        return ForwardContext(kv_len, entry, None, positions, self._held[:b, :kv_len], visible)

    def held_by(self, batch: Lengths, i: int) -> torch.Tensor:
        """As in `RaggedLayout`."""
        return self._held[i, : self._end]

    def commit(
        self, batch: Lengths, count: torch.Tensor, counts: list[int], path: torch.Tensor | None
    ) -> None:
        """Ends a round: the entries of the tokens that were not kept become holes. Only a tree's path moves."""
        b, end, width, n = len(counts), self._end, self._width, max(counts)
        if path is not None:
            if n > 0:
                destinations = self._entries[:, end + 1 : end + 1 + n].expand(b, -1)
                self.cache.move_entries(end + 1 + path[:, :n], destinations)
            self._held[:b, end : end + width] = span(batch.seq_lens - 1, width)
        gone = self._entries[:, :width] > count.unsqueeze(1)  # entry 0 is the pending token's
        self._held[:b, end : end + width].masked_fill_(gone, EMPTY)
        self._ends[:b] = [end + 1 + accepted for accepted in counts]

    def move(self, sources: list[int], destinations: list[int], kv_len: int) -> None:
        """Copies whole slots with the positions of their entries, all at once."""
        ends = [self._ends[source] for source in sources]
        super().move(sources, destinations, max(ends))
        move_slots(self._held, sources, destinations)
        for destination, end in zip(destinations, ends):
            self._ends[destination] = end

    def _realign(self, b: int, longest: int) -> None:
        """Moves the content of the first `b` slots together, so that each ends at entry `longest`."""
        held = self._held[:b, : self._end]
        # Content in order of position; in front of it as many holes as are needed.
        keys = held.masked_fill(held == EMPTY, -1)
        order = keys.argsort(dim=1, stable=True)[:, self._end - longest :]
        aligned = held.gather(1, order)
        gather(self.cache, order)
        held.fill_(EMPTY)
        self._held[:b, :longest] = aligned
        self._ends[:b] = [longest] * b
        self._end = longest


def gather(cache: KVCache, order: torch.Tensor) -> None:
    """Moves the entries order[i] of slot i, order [b, width], to its first `width` entries.

    It works layer by layer: the copies then fit into a CPU's caches (all at once took six times as long on the
    embedded target) and need little memory on a GPU.
    """
    b, width = order.shape
    for segment in cache.segments:
        index = cache.indices(order).to(segment.device)
        for layer in segment:
            moved = layer.flatten(1, 2).index_select(1, index)
            layer[:, :b, :width] = moved.view(2, b, width, *layer.shape[3:])
