"""Attention layers on the target's states, with a cache of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specbench.decoding.cpu.compiled_layers import compiled_copy
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.model.graphs import options_of

if TYPE_CHECKING:
    from transformers import LlamaConfig, Qwen3Config

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.models.pairs import Pair


class CachedLayer(nn.Module):
    """Base of drafting models with attention layers: their rotary positions, and a cache for keys and values.

    Attributes:
        taps: depths of the target whose states they read, as in `Drafter`.
        token_ids: [rows] tokens of the target that the model's own head scores, by row; None: it uses the target's
            head.
        depth: number of attention layers.
        compiled_layers: names of layers that are only called: on a CPU they are compiled.

    Args:
        config: of the layers; heads and rotary settings are used.
    """

    config: Any
    token_ids: torch.Tensor | None
    taps: tuple[int, ...] = ()
    depth: int = 1
    compiled_layers: tuple[str, ...] = ()

    def __init__(self, config: LlamaConfig | Qwen3Config):
        super().__init__()
        config._attn_implementation = "sdpa"  # of the layer, too: it keeps the same config
        self.config = config
        self.rotary = LlamaRotaryEmbedding(cast("LlamaConfig", config))
        self.register_buffer("token_ids", None, persistent=False)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def tables(self) -> list[torch.Tensor]:
        """Weights of which a pass looks up single rows."""
        return []

    def embed(self, tokens: torch.Tensor, target: StagedModel) -> torch.Tensor:
        """Token ids [b, n] -> [b, n, e], by the target's embedding unless the model has one."""
        return target.embed(tokens)

    def features(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """The target's states [b, n, d] of each tap -> [b, n, h] for the layers; a single tap's unchanged."""
        (tap,) = self.taps
        return states[tap]

    def pass_bytes(self) -> int:
        """Bytes of weights that a pass reads, including the model's own head; look-ups read none."""
        return weight_bytes(self) - sum(table.nbytes for table in self.tables)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs [..., h] -> logits [..., rows] of the model's own head, see `token_ids`."""
        raise NotImplementedError

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        """An empty cache for `slots` sequences."""
        config, weight = self.config, next(self.parameters())
        heads = config.num_key_value_heads or config.num_attention_heads
        return KVCache([weight.device] * self.depth, heads, self.head_dim, slots, capacity, weight.dtype)

    def rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, n, head_dim] for positions [1, n], in the dtype of `like`."""
        return cast("tuple[torch.Tensor, torch.Tensor]", self.rotary(like, positions))

    def for_drafting(self, pair: Pair) -> Self:
        """Returns a copy with cheaper calls; its layers are compiled if the pair's target's are."""
        return compiled_copy(self, *(self.compiled_layers if options_of(pair.target).compile else ()))


class DraftLayer(CachedLayer):
    """A layer that attends, and the norm after it: states in, states for the target's head out.

    Args:
        config: one layer; hidden size, heads, eps and rotary settings are used.
        layer: called with states and `LayerCache.arguments`.
    """

    def __init__(self, config: LlamaConfig, layer: nn.Module):
        super().__init__(config)
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """States [batch, n, d] -> states [batch, n, d] for the target's head (its final norm is not used)."""
        return self.norm(self.layers[0](hidden, **attention))
