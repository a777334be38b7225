"""One decoder layer and a norm on the target's states, with a cache of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

from specbench.decoding.kv_cache import KVCache

if TYPE_CHECKING:
    from transformers import LlamaConfig


class DraftLayer(nn.Module):
    """A layer that attends, and the norm behind it: states in, states for the target's head out.

    Args:
        config: one layer; hidden size, heads, eps and rotary settings are used.
        layer: called with states, `position_embeddings`, `attention_mask` and `past_key_values`.
        attention: of that layer.
    """

    def __init__(self, config: LlamaConfig, layer: nn.Module, attention: LlamaAttention):
        super().__init__()
        config._attn_implementation = "sdpa"  # of the layer, too: it keeps the same config
        self.config, self.head_dim = config, attention.head_dim
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        """An empty cache of the one layer for `slots` sequences."""
        config, weight = self.config, self.norm.weight
        heads = config.num_key_value_heads or config.num_attention_heads
        return KVCache([weight.device], heads, self.head_dim, slots, capacity, weight.dtype)

    def rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, n, head_dim] for positions [1, n], in the dtype of `like`."""
        return self.rotary(like, positions)

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
