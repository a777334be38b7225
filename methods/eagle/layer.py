"""The decoder layer of EAGLE's drafters.

It is made of transformers' own Llama parts, so that key names and arithmetic are those of the authors' checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig


class EagleLayer(nn.Module):
    """v = r + SelfAttn(y); out = v + MLP(RMSNorm(v)), of states y and a residual r. EAGLE-1 has y = r: no input norm.

    Args:
        config: dimensions, eps and rotary settings. `qkv_bias` adds a bias to the projections to queries, keys and
            values.
        inputs: width of y; None: the hidden size.
    """

    def __init__(self, config: LlamaConfig, inputs: int | None = None):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        bias = getattr(config, "qkv_bias", False)
        width = config.hidden_size if inputs is None else inputs
        if bias or width != config.hidden_size:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(width, rows, bias=bias))
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, states: torch.Tensor, residual: torch.Tensor, /, **attention: Any) -> torch.Tensor:
        """States y [b, n, inputs] and residual r [b, n, h] -> [b, n, h]; `attention` as of `LayerCache.arguments`."""
        residual = residual + self.self_attn(hidden_states=states, **attention)[0]
        return residual + self.mlp(self.post_attention_layernorm(residual))
