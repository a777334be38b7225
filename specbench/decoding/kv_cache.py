"""The key/value caches, of one sequence and of many: the one file that uses transformers' cache protocol.

A decoder layer calls `update(keys, values, layer_idx)` and attends to what comes back. Everything lives in one
preallocated tensor, so appending copies only the new rows, rolling back is an integer, and compacting an accepted
tree path is one gather over all layers. The stock `DynamicCache` copies the whole cache in every pass instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch

FAR = 2**62  # the position of a column that holds nothing: behind every token


class KVCache:
    """Keys and values of attention layers for one sequence.

    `lengths[i]` positions of layer i are valid. Layers may hold different lengths while a drafter has run only the
    first of them. `parts` are tensors [layers, 2, 1, kv_heads, capacity, head_dim], one for each run of layers that
    follow one another on one device.

    Args:
        devices: the device of each layer.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        capacity: positions that fit.
        dtype: of keys and values.
    """

    is_compileable = False  # read by transformers' mask code when a whole model is called with this cache

    def __init__(
        self, devices: list[torch.device], kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype
    ):
        shape = (2, 1, kv_heads, capacity, head_dim)
        runs = ((device, len(list(run))) for device, run in groupby(devices))
        self._hold([torch.zeros(layers, *shape, device=device, dtype=dtype) for device, layers in runs])

    @classmethod
    def over(cls, data: torch.Tensor) -> KVCache:
        """An empty cache that lives in `data`, of the shape of a tensor of `KVCache` with any strides."""
        cache = cls.__new__(cls)
        cache._hold([data])
        return cache

    def _hold(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self.lengths = [0] * sum(part.shape[0] for part in parts)
        self._reserved = (0, 0, 0, 0)  # first layer, last + 1, positions before the pass and in it
        self._whole: tuple[torch.Tensor, ...] = ()  # keys and values of one reserved layer after the other
        self._new: tuple[torch.Tensor, ...] = ()  # their part that the pass fills

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.parts[0].shape[4]

    def reserve(self, lo: int, hi: int, n: int) -> None:
        """Prepares a pass that appends `n` positions to each of the layers [lo, hi), which hold equally many.

        The views of all layers are made at once: made in every layer anew they cost more than the copy of a row.
        """
        start = self.lengths[lo]
        self._whole, self._new, first = (), (), 0
        for part in self.parts:
            flat = part[max(lo - first, 0) : max(hi - first, 0)].flatten(0, 1)
            self._whole += flat.narrow(3, 0, start + n).unbind(0)
            self._new += flat.narrow(3, start, n).unbind(0)
            first += part.shape[0]
        self._reserved = (lo, hi, start, n)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values [1, kv_heads, n, head_dim]; returns all valid ones of the layer as views."""
        lo, hi, start, n = self._reserved
        if not lo <= layer_idx < hi or start != self.lengths[layer_idx] or n != keys.shape[2]:
            self.reserve(layer_idx, layer_idx + 1, keys.shape[2])
            lo, hi, start, n = self._reserved
        place = 2 * (layer_idx - lo)
        self._new[place].copy_(keys)
        self._new[place + 1].copy_(values)
        self.lengths[layer_idx] = start + n
        return self._whole[place], self._whole[place + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Valid positions of a layer."""
        return self.lengths[layer_idx]

    def truncate(self, length: int) -> None:
        """Forgets every position from `length` on, in every layer. No data moves."""
        self.lengths = [min(filled, length) for filled in self.lengths]

    def keep(self, start: int, path: torch.Tensor) -> None:
        """Keeps, of the positions from `start` on, only start + path[i], and moves them to start + i.

        path: [n] increasing indices, the accepted path through a tree that was appended at `start`.
        """
        n = path.shape[0]
        for part in self.parts:
            part.narrow(4, start, n).copy_(part.index_select(4, (path + start).to(part.device)))
        self.lengths = [start + n] * len(self.lengths)


@dataclass(frozen=True, slots=True)
class Places:
    """Write positions and attention visibility of one pass over b sequences of a `RowCache`, n tokens each.

    Attributes:
        positions: [b, n] each token's position in its own sequence.
        reach: columns that are attended to.
        columns: [b or 1, reach] the position of what each column holds; a token attends to those that are not behind
            its own, so that `FAR` marks a hole.
        to: where keys and values go: a column that all sequences share, or [b * n] indices (row x capacity + column)
            when each sequence has an end of its own.
    """

    positions: torch.Tensor
    reach: int
    columns: torch.Tensor
    to: torch.Tensor | int


class RowCache:
    """Keys and values of `layers` attention layers for many sequences, a row each.

    `data` is [layers, 2, rows, capacity, kv_heads, head_dim], so that what a token adds is contiguous. The cache keeps
    no lengths: every pass brings its own `Places`.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.data = torch.zeros(layers, 2, rows, capacity, kv_heads, head_dim, device=device, dtype=dtype)

    @property
    def rows(self) -> int:
        """Sequences that fit."""
        return self.data.shape[2]

    @property
    def capacity(self) -> int:
        """Positions that fit into each row."""
        return self.data.shape[3]

    def row(self, row: int) -> KVCache:
        """A row as the empty cache of a sequence of its own, to prefill it."""
        return KVCache.over(self.data[:, :, row : row + 1].transpose(3, 4))

    def open(self, lo: int, hi: int, places: Places) -> None:
        """Prepares a pass of the first rows through the layers [lo, hi)."""
        b, n = places.positions.shape
        flat = self.data[lo:hi].flatten(0, 1)
        self._first, self._to = lo, places.to
        self._whole = flat[:, :b, : places.reach].transpose(2, 3).unbind(0)
        if isinstance(places.to, int):
            self._new = flat[:, :b, places.to : places.to + n].transpose(2, 3).unbind(0)
        else:
            self._new = flat.flatten(1, 2).unbind(0)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [b, kv_heads, n, head_dim]; returns views of all, [b, kv_heads, reach, head_dim]."""
        place = 2 * (layer_idx - self._first)
        for half, new in ((place, keys), (place + 1, values)):
            if isinstance(self._to, int):
                self._new[half].copy_(new)
            else:
                self._new[half].index_copy_(0, self._to, new.transpose(1, 2).flatten(0, 1))
        return self._whole[place], self._whole[place + 1]

    def move(self, sources: torch.Tensor, destinations: torch.Tensor, reach: int) -> None:
        """Copies the first `reach` columns of the rows `sources` to the rows `destinations`.

        It happens all at once, so that two rows may change places.
        """
        for layer in self.data:  # as in `gather`
            layer[:, destinations, :reach] = layer[:, sources, :reach]

    def gather(self, order: torch.Tensor) -> None:
        """Moves the columns order[i] of row i, order [b, width], to its first `width` columns.

        Layer by layer: what is copied then stays small enough for the caches of a CPU (all at once it took six times as
        long on the embedded target), and on a GPU needs little memory.
        """
        b, width = order.shape
        places = (order + self.capacity * torch.arange(b, device=order.device).unsqueeze(1)).flatten()
        for layer in self.data:
            moved = layer.flatten(1, 2).index_select(1, places)
            layer[:, :b, :width] = moved.view(2, b, width, *layer.shape[3:])
