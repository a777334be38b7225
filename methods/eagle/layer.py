"""The decoder layer of EAGLE's drafters, and what every drafting model of one such layer is.

It is made of transformers' own Llama parts, so that key names and arithmetic are those of the authors' checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from methods.common.draft_layer import CachedLayer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig

    from specbench.decoding.model.staged_model import StagedModel


class EagleLayer(nn.Module):
    """v = r + SelfAttn(y); out = v + MLP(RMSNorm(v)), of states y and a residual r. EAGLE-1 has y = r: no input norm.

    Args:
        config: dimensions, eps and rotary settings. `qkv_bias` of it gives the projections to queries, keys and values
            a bias.
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


class DraftingModel(CachedLayer):
    """Base of the models that draft: decoder layers with a cache, fed with pairs of a state and the next token.

    Pair j holds the target's state at position j, or an estimate of it, and token j + 1. Its position is j.

    Attributes:
        taps: depths of the target whose states it reads, as in `Drafter`.

    Args:
        config: of the layer.
    """

    taps: tuple[int, ...] = ()

    def embed(self, tokens: torch.Tensor, target: StagedModel) -> torch.Tensor:
        """Token ids [b, n] -> [b, n, e], by the target's embedding where the model has none of its own."""
        return target.embed(tokens)

    def features(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """The target's states [b, n, d] of each tap -> what stands for them in pairs, [b, n, h]."""
        raise NotImplementedError

    def forward(self, features: torch.Tensor, embeds: torch.Tensor, **attention: Any) -> torch.Tensor:
        """The features [b, n, h] of the next pairs.

        Args:
            features: [b, n, h] of pairs.
            embeds: [b, n, e] their embedded tokens.
            **attention: what their layers attend with, as of `LayerCache.arguments`.
        """
        raise NotImplementedError
