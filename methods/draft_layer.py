"""One attention layer on the target's states, with a cache of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specbench.decoding.kv_cache import ForwardContext, KVCache
from specbench.decoding.model.staged_model import attention_mask, rope_of

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from specbench.decoding.slots import Slots


class CachedLayer(nn.Module):
    """Base of what drafts with one attention layer: its rotary positions, and a cache for its keys and values.

    Args:
        config: of the layer; heads and rotary settings are used.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        config._attn_implementation = "sdpa"  # of the layer, too: it keeps the same config
        self.config = config
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        """An empty cache of the one layer for `slots` sequences."""
        config, weight = self.config, next(self.parameters())
        heads = config.num_key_value_heads or config.num_attention_heads
        return KVCache([weight.device], heads, self.head_dim, slots, capacity, weight.dtype)

    def rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, n, head_dim] for positions [1, n], in the dtype of `like`."""
        return cast("tuple[torch.Tensor, torch.Tensor]", self.rotary(like, positions))


class LayerCache:
    """Keys and values of a layer for every sequence, and the angles of its positions.

    Args:
        layer: whose they are.
        slots: of the sequences.
        dtype: of the angles.
        extra: entries of each slot beyond the capacity of `slots`.
    """

    def __init__(self, layer: CachedLayer, slots: Slots, dtype: torch.dtype, extra: int = 0):
        capacity = slots.capacity + extra
        self.layout = slots.cache(layer.new_cache(capacity, slots.count))
        positions = torch.arange(capacity, device=slots.device).unsqueeze(0)
        self._rope = layer.rope(positions, torch.empty(1, dtype=dtype, device=slots.device))

    def arguments(
        self, ctx: ForwardContext, states: torch.Tensor, cache: KVCache | None = None
    ) -> dict[str, Any]:
        """What the layer is called with in a pass over states [b, n, d], beside these.

        Args:
            ctx: of the pass.
            states: give size, dtype and device.
            cache: a view of the cache; None: the whole one.
        """
        b, n = states.shape[:2]
        cache = self.layout.cache if cache is None else cache
        cache.begin_pass(0, 1, ctx, b, n)
        return {
            "position_embeddings": rope_of(self._rope, ctx, n),
            "attention_mask": attention_mask(ctx, n, states),
            "past_key_values": cache,
        }

    def prompt(self, slot: int, states: torch.Tensor) -> dict[str, Any]:
        """The same for a prompt with states [1, n, d], whose keys and values fill a slot."""
        n = states.shape[1]
        cache = self.layout.prefill_view(slot, n)
        return self.arguments(ForwardContext.consecutive(0, n), states, cache)


class DraftLayer(CachedLayer):
    """A layer that attends, and the norm after it: states in, states for the target's head out.

    Args:
        config: one layer; hidden size, heads, eps and rotary settings are used.
        layer: called with states, `position_embeddings`, `attention_mask` and `past_key_values`.
    """

    def __init__(self, config: LlamaConfig, layer: nn.Module):
        super().__init__(config)
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: KVCache | None = None,
    ) -> torch.Tensor:
        """States [batch, n, d] -> states [batch, n, d] for the target's head (its final norm is not used)."""
        hidden = self.layers[0](
            hidden,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        return self.norm(hidden)
