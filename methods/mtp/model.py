"""An MTP head: a decoder layer on the target's normed state and the next token's embedding, used again and again.

x = input_proj([token_layernorm(embedding); hidden_layernorm(state)]); out = final_layernorm(Layer(x)). The target's own
head makes tokens of out, and out is the state of a draft's next pair (DeepSeek-V3, arXiv 2412.19437, section 2.2;
one layer used for every token ahead: FastMTP, arXiv 2509.18362). The target's state is that after its final norm, or
the one in front of it, on which speculators trains. The layer is Qwen3's; the parts have the names of speculators'
files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from methods.common.draft_layer import CachedLayer
from specbench.decoding.state import NORMED

if TYPE_CHECKING:
    from transformers import Qwen3Config


class MtpModel(CachedLayer):
    """The head; see the module.

    Args:
        config: of its layer.
        tap: depth of the target whose states it reads.
    """

    compiled_layers = ("layers.0",)

    def __init__(self, config: Qwen3Config, tap: int = NORMED):
        super().__init__(config)
        self.taps = (tap,)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_layernorm = Qwen3RMSNorm(width, eps=eps)
        self.token_layernorm = Qwen3RMSNorm(width, eps=eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config, 0)])
        self.final_layernorm = Qwen3RMSNorm(width, eps=eps)

    def forward(self, features: torch.Tensor, embeds: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Pairs: features, embedded tokens [b, n, h] -> [b, n, h], for the head and as features of the next pairs."""
        both = torch.cat([self.token_layernorm(embeds), self.hidden_layernorm(features)], dim=-1)
        return self.final_layernorm(self.layers[0](self.input_proj(both), **attention))
