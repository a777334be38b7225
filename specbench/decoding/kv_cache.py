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
        # Indexing the big tensor in every layer of every pass costs more than the copy of one row.
        self._keys = [self.data[i, 0] for i in range(layers)]
        self._values = [self.data[i, 1] for i in range(layers)]

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.data.shape[4]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Appends keys and values [1, kv_heads, n, head_dim]; returns all valid ones of the layer as views."""
        start = self.lengths[layer_idx]
        end = start + keys.shape[2]
        all_keys = self._keys[layer_idx].narrow(2, 0, end)
        all_values = self._values[layer_idx].narrow(2, 0, end)
        all_keys.narrow(2, start, end - start).copy_(keys)
        all_values.narrow(2, start, end - start).copy_(values)
        self.lengths[layer_idx] = end
        return all_keys, all_values

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
