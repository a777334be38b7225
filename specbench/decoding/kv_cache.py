"""Keys and values of attention layers, preallocated.

A `ForwardContext` holds where the tokens of a pass are written and what they attend to. Rolling back is free: rejected
entries are overwritten. Keeping an accepted tree path is one gather over all layers. The stock `DynamicCache` copies
the whole cache in every pass instead.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import groupby

import torch

EMPTY = 2**62  # the position of an entry that holds nothing: after every token


@dataclass(slots=True)  # one is made in every pass: a frozen one takes four times as long to make
class ForwardContext:
    """Write positions and visibility of one pass over the first b slots of a cache, n tokens each.

    Attributes:
        kv_len: entries of each slot that are attended to.
        write_index: where keys and values go: an entry that is the same for all sequences, or [b * n] indices
            (slot x capacity + entry).
        start: first position of a pass whose tokens are consecutive in every sequence, after a cache of exactly the
            positions before it; None for every other pass, which has the fields below.
        positions: [b, n] each token's position in its own sequence.
        kv_positions: [b or 1, kv_len] the position of the token in each entry. A token attends to positions up to its
            own, so that `EMPTY` marks a hole.
        visible: [b or 1, n, m] for a tree: which of the last m entries each token attends to; among all before them, it
            attends to positions up to its own.
    """

    kv_len: int
    write_index: torch.Tensor | int
    start: int | None = None
    positions: torch.Tensor | None = None
    kv_positions: torch.Tensor | None = None
    visible: torch.Tensor | None = None

    @classmethod
    def consecutive(cls, start: int, n: int) -> ForwardContext:
        """The context of n tokens that follow `start` others."""
        return cls(start + n, start, start)

    @classmethod
    def nodes(cls, base: int, offsets: torch.Tensor, visible: torch.Tensor) -> ForwardContext:
        """The context of the last n of m entries of one sequence that are not consecutive tokens.

        Args:
            base: entries before them, which are consecutive tokens and visible to every token.
            offsets: [m] the position of each of the m entries after `base`.
            visible: [n, m] which of them each of the n tokens attends to.
        """
        n, m = visible.shape
        held = torch.cat([torch.arange(base, device=offsets.device), offsets + base])
        write = base + m - n
        return cls(base + m, write, None, held[write:].unsqueeze(0), held.unsqueeze(0), visible.unsqueeze(0))


class KVCache:
    """Keys and values of attention layers for several sequences, each of which has a slot.

    Args:
        devices: the device of each layer.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        slots: sequences that fit.
        capacity: positions that fit into each slot.
        dtype: of keys and values.

    Attributes:
        segments: tensors [layers, 2, slots, capacity, kv_heads, head_dim], one for each run of layers that follow one
            another on one device: what a token adds is contiguous.
        layers: how many there are, on all devices.
        slots: as given.
        capacity: as given.
        device: of the first layer.
        counting: [capacity] 0, 1, 2, ... there.
    """

    def __init__(
        self,
        devices: list[torch.device],
        kv_heads: int,
        head_dim: int,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
    ):
        shape = (2, slots, capacity, kv_heads, head_dim)
        runs = ((device, len(list(run))) for device, run in groupby(devices))
        self.segments = [torch.zeros(layers, *shape, device=device, dtype=dtype) for device, layers in runs]
        self.layers, self.slots, self.capacity = len(devices), slots, capacity
        self.device = self.segments[0].device
        self.counting = torch.arange(capacity, device=self.device)

    def slot(self, slot: int) -> KVCache:
        """A view of one slot as a cache, to prefill it. It shares the memory."""
        cache = copy(self)
        cache.segments, cache.slots = [segment[:, :, slot : slot + 1] for segment in self.segments], 1
        return cache

    def begin_pass(self, lo: int, hi: int, ctx: ForwardContext, b: int, n: int) -> None:
        """Prepares a pass of n tokens of each of the first b slots through the layers [lo, hi).

        The views of all layers are made at once: making them in every layer costs more than copying an entry.
        """
        self._first, self._write = lo, ctx.write_index
        self._views: tuple[torch.Tensor, ...] = ()  # keys and values of one layer after the other
        self._new: tuple[torch.Tensor, ...] = ()  # the part that the pass fills
        first = 0
        for segment in self.segments:
            flat = segment[max(lo - first, 0) : max(hi - first, 0)].flatten(0, 1)
            view = flat.narrow(1, 0, b).transpose(2, 3)
            self._views += view.narrow(3, 0, ctx.kv_len).unbind(0)
            if isinstance(ctx.write_index, int):
                self._new += view.narrow(3, ctx.write_index, n).unbind(0)
            else:
                self._new += flat.flatten(1, 2).unbind(0)
            first += segment.shape[0]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [b, kv_heads, n, head_dim]; returns views of all, [b, kv_heads, kv_len, head_dim]."""
        entries, index = self.entries(layer_idx)
        for new, states in zip(entries[2:], (keys, values)):
            if index is None:
                new.copy_(states)
            else:
                new.index_copy_(0, index.to(new.device), states.transpose(1, 2).flatten(0, 1))
        return entries[0], entries[1]

    def entries(self, layer: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The entries that a layer reads and writes in the current pass.

        Returns:
            Views [b, kv_heads, kv_len, head_dim] of its keys and of its values, and of the places of new ones: [b,
            kv_heads, n, head_dim], or with an index [slots * capacity, kv_heads, head_dim]. The index [b * n], if the
            new entries are not consecutive; else None.
        """
        i = 2 * (layer - self._first)
        index = None if isinstance(self._write, int) else self._write
        return (*self._views[i : i + 2], *self._new[i : i + 2]), index

    def copy_slots(self, sources: torch.Tensor, destinations: torch.Tensor, kv_len: int) -> None:
        """Copies the first `kv_len` entries of the slots `sources` to the slots `destinations`, all at once."""
        for segment in self.segments:
            origin, goal = sources.to(segment.device), destinations.to(segment.device)
            for layer in segment:  # layer by layer, to fit into the caches of a CPU
                layer[:, goal, :kv_len] = layer[:, origin, :kv_len]

    def move_entries(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies entries within each of the first b slots, all at once, in every layer.

        Args:
            sources: [b, n] entries to copy.
            destinations: [b, n] where to.
        """
        for segment in self.segments:
            flat = segment.flatten(0, 1).flatten(1, 2)
            moved = flat.index_select(1, self.indices(sources).to(segment.device))
            flat.index_copy_(1, self.indices(destinations).to(segment.device), moved)

    def indices(self, entries: torch.Tensor) -> torch.Tensor:
        """Entries [b, n] of the first b slots -> indices [b * n] into all entries of a layer."""
        if entries.shape[0] == 1:
            return entries[0]
        slots = torch.arange(entries.shape[0], device=entries.device).unsqueeze(1)
        return (entries + self.capacity * slots).flatten()
