"""Drafting layers with a cache of their own: what a drafter calls them with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.layer_stack import attention_mask, rope_of

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.slots import Slots


class DraftingLayer(Protocol):
    """A layer, or several in a row, that attend to their own keys and values."""

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        """An empty cache."""

    def rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, n, head_dim] for positions [1, n], in the dtype of `like`."""


class LayerCache:
    """Keys and values of drafting layers for every sequence, and the angles of their positions.

    Args:
        layer: whose they are, or several.
        slots: of the sequences.
        dtype: of the angles.
        extra: entries of each slot beyond the capacity of `slots`.
    """

    def __init__(self, layer: DraftingLayer, slots: Slots, dtype: torch.dtype, extra: int = 0):
        capacity = slots.capacity + extra
        self.layout = slots.cache(layer.new_cache(capacity, slots.count))
        positions = torch.arange(capacity, device=slots.device).unsqueeze(0)
        self._rope = layer.rope(positions, torch.empty(1, dtype=dtype, device=slots.device))

    def arguments(
        self, ctx: ForwardContext, states: torch.Tensor, cache: KVCache | None = None, masked: bool = True
    ) -> dict[str, Any]:
        """What the layers are called with in a pass over states [b, n, d], beside these.

        Args:
            ctx: of the pass.
            states: give size, dtype and device.
            cache: a view of the cache; None: the whole one.
            masked: whether they attend; if not, keys and values are only written, and there is no mask.
        """
        b, n = states.shape[:2]
        cache = self.layout.cache if cache is None else cache
        cache.begin_pass(0, cache.layers, ctx, b, n)
        mask = {"attention_mask": attention_mask(ctx, n, states)} if masked else {}
        return {"position_embeddings": rope_of(self._rope, ctx, n), "past_key_values": cache, **mask}

    def prompt(self, slot: int, states: torch.Tensor, masked: bool = True) -> dict[str, Any]:
        """The same for a prompt with states [1, n, d], whose keys and values fill a slot."""
        n = states.shape[1]
        cache = self.layout.prefill_view(slot, n)
        return self.arguments(ForwardContext.consecutive(0, n), states, cache, masked)
