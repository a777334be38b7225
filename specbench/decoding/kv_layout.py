"""How the sequences of a batch lie in memory: each with an end of its own. A scheduler may bring another layout.

A layout makes the `ForwardContext` of a pass: where its tokens are written and what they attend to. A token's position
is its index in its own sequence, regardless of its neighbours in memory; that alone makes a batch exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from specbench.decoding.device import on_device, span
from specbench.decoding.kv_cache import ForwardContext, KVCache

if TYPE_CHECKING:
    from specbench.decoding.tree import Tree


class Lengths(Protocol):
    """The part of a `Batch` that a layout reads: the lengths of its sequences, on the host and on the device."""

    lengths: list[int]
    kv_bucket: int | None

    @property
    def seq_lens(self) -> torch.Tensor:
        """[b] `lengths` on the device."""


class RaggedLayout:
    """Position p of a sequence is entry p of its slot, so that nothing is ever moved for alignment.

    Only an accepted tree path moves, to the end of its sequence.

    Attributes:
        aligns: whether `begin_round` may move entries; the trace then records its time separately.
    """

    aligns = False

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._entries = cache.counting.unsqueeze(0)

    def prefill_view(self, slot: int, length: int) -> KVCache:
        """The cache to prefill a sequence of `length` tokens into."""
        return self.cache.slot(slot)

    def begin_round(self, lengths: list[int], n: int) -> None:
        """Begins a round of sequences of `lengths` tokens, the last one pending; each may get `n` more."""

    def place(self, batch: Lengths, n: int, offset: int = 0, tree: Tree | None = None) -> ForwardContext:
        """The pass of `n` tokens of each sequence.

        Args:
            batch: the running sequences.
            n: tokens of each.
            offset: of the first of them after the pending token.
            tree: the tree whose nodes follow the pending token; None for consecutive tokens. The pass has n of them
                from `offset` on (the pending token is 0); those before were placed earlier in this round.
        """
        start, longest = min(batch.lengths) - 1 + offset, max(batch.lengths) - 1 + offset
        if batch.kv_bucket is not None:  # only the device knows the positions
            start, longest = -1, batch.kv_bucket - n
        if tree is None and start == longest:
            return ForwardContext.consecutive(start, n)
        kv_len = longest + n
        if tree is None:
            return self.place_at(batch.seq_lens - 1 + offset, n, kv_len)
        # The entries of a tree are consecutive, its positions are not.
        held = self._entries[:, :kv_len]
        there, b = offset + n, len(batch.lengths)
        positions = batch.seq_lens.unsqueeze(1) - 1 + tree.offsets()[:, :there]
        visible = tree.visible[:, offset:there, :there]
        if start == longest:
            in_front, of_trees = held[:, : start - offset], positions[: tree.depths.shape[0]]
            held = torch.cat([in_front.expand(of_trees.shape[0], -1), of_trees], dim=1)
            return ForwardContext(kv_len, start, None, positions[:, offset:], held, visible)
        # The trees begin at different entries, so visibility is written out over all of them.
        of_tree = span(batch.seq_lens - 1, there)
        held = held.expand(b, -1).scatter(1, of_tree, positions)
        sees = self._entries[:, :kv_len] < (batch.seq_lens - 1).unsqueeze(1)
        sees = sees.unsqueeze(1).expand(b, n, kv_len)
        sees = sees.scatter(2, of_tree.unsqueeze(1).expand(b, n, there), visible.expand(b, n, there))
        write_index = self.cache.indices(of_tree[:, offset:])
        return ForwardContext(kv_len, write_index, None, positions[:, offset:], held, sees)

    def place_at(self, starts: torch.Tensor, n: int, kv_len: int) -> ForwardContext:
        """The pass of `n` consecutive tokens from the position `starts` [b] of each sequence on.

        Args:
            starts: [b]; below 0 the first token of a sequence is written again, as `Batch.window` reads it.
            n: tokens of each sequence.
            kv_len: a bound on all positions, exclusive.
        """
        positions, held = span(starts, n), self._entries[:, :kv_len]
        if n > 1:  # a sequence may have fewer than the n tokens that another one lacks
            positions = positions.clamp_(min=0)
        return ForwardContext(kv_len, self.cache.indices(positions), None, positions, held)

    def held_by(self, batch: Lengths, i: int) -> torch.Tensor:
        """[end] the position that each entry of a sequence holds, up to the first entry of this round."""
        return self._entries[0, : batch.lengths[i] - 1]

    def commit(
        self, batch: Lengths, count: torch.Tensor, counts: list[int], path: torch.Tensor | None
    ) -> None:
        """Ends a round.

        Args:
            batch: the sequences that ran, as before the round.
            count: [b] draft tokens of each that stay.
            counts: the same on the host.
            path: [b, k] of a tree, which begins with the indices of the nodes that stay, from the root down; None for
                chains.
        """
        n = max(counts)
        if path is None or n == 0:
            return
        # After a path's end any node may be moved: the next round writes there again.
        self.cache.move_entries(batch.seq_lens.unsqueeze(1) + path[:, :n], span(batch.seq_lens, n))

    def move(self, sources: list[int], destinations: list[int], kv_len: int) -> None:
        """Copies whole slots, of sequences of fewer than `kv_len` tokens, all at once."""
        both = on_device([sources, destinations], self.cache.device)
        self.cache.copy_slots(both[0], both[1], kv_len)
