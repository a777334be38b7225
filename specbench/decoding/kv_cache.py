"""The key/value cache: the one file that speaks transformers' cache protocol.

A decoder layer calls `update(keys, values, layer_idx)` and attends to what comes back. Everything lives in one
preallocated tensor, so appending copies only the new rows, rolling back is an integer, and compacting an accepted
tree path is one gather over all layers. The stock `DynamicCache` copies the whole cache in every pass instead.
"""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of `layers` attention layers for one sequence.

    data: [layers, 2, 1, kv_heads, capacity, head_dim]; `lengths[i]` positions of layer i are valid. Layers may hold
    different lengths while a drafter has run only the first of them.
    """

    is_compileable = False  # read by transformers' mask code when a whole model is called with this cache

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.data = torch.zeros(layers, 2, 1, kv_heads, capacity, head_dim, device=device, dtype=dtype)
        self.lengths = [0] * layers
        self._reserved = (0, 0, 0, 0)  # first layer, last + 1, positions before the pass and in it
        self._whole: tuple[torch.Tensor, ...] = ()  # keys and values of one reserved layer after the other
        self._new: tuple[torch.Tensor, ...] = ()  # their part that the pass fills

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.data.shape[4]

    def reserve(self, lo: int, hi: int, n: int) -> None:
        """Prepares a pass that appends `n` positions to each of the layers [lo, hi), which hold equally many.

        The views of all layers are made at once: made in every layer anew they cost more than the copy of a row.
        """
        start = self.lengths[lo]
        flat = self.data[lo:hi].flatten(0, 1)
        self._whole = flat.narrow(3, 0, start + n).unbind(0)
        self._new = flat.narrow(3, start, n).unbind(0)
        self._reserved = (lo, hi, start, n)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
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
        self.data.narrow(4, start, n).copy_(self.data.index_select(4, path + start))
        self.lengths = [start + n] * len(self.lengths)
