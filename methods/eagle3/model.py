"""EAGLE-3's drafting model: three depths of the target's states in one layer, and a head over a draft vocabulary.

g = fc([low; mid; high]) of the target's states at three depths. The layer ("midlayer") reads RMSNorm(embedding of the
next token) beside RMSNorm(g): its queries, keys and values have inputs twice as wide. Its residual is g itself. Its
output replaces g of the next token in the next step of a draft, without fc; its norm and head predict the token after
that (Li et al. 2025, section 3.1). The names of the parts are the keys of the authors' checkpoints.

P-EAGLE's also reads masks, pairs whose state and token are not known: all masks share one learnt state and one token.
More layers may follow the first (arXiv 2602.01469).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from methods.common.draft_layer import CachedLayer
from methods.eagle.layer import EagleLayer
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel

DEPTHS = 3  # of the target, whose states the authors read


class Eagle3Config(LlamaConfig):
    """A Llama config of the layers, with EAGLE-3's settings.

    Attributes:
        target_hidden_size: width of the target; None: the drafting model's own.
        norm_before_residual: the residual is RMSNorm(g), not g.
        norm_before_fc: one RMSNorm over the states of all depths in front of fc.
        fc_norm: an RMSNorm over those of each depth.
        norm_output: the next step gets the layer's output after the norm.
        own_embedding: whether the drafting model has its own embedding; otherwise the target's is used.
        mask_token_id: the token of a mask; None: the model has no masks.
    """

    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    mask_token_id: int | None = None

    @property
    def input_width(self) -> int:
        """Width of the target's states."""
        return self.target_hidden_size or self.hidden_size


class Midlayer(EagleLayer):
    """The first layer: its input is tokens and features side by side, each after its own norm.

    Args:
        config: of the layer and the variants.
    """

    def __init__(self, config: Eagle3Config):
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, features: torch.Tensor, embeds: torch.Tensor, /, **attention: Any) -> torch.Tensor:
        """Features and embedded tokens [b, n, h] -> [b, n, h]."""
        normed = self.hidden_norm(features)
        states = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        residual = normed if self.norm_before_residual else features
        return super().forward(states, residual, **attention)


class Eagle3Model(CachedLayer):
    """The drafting model; see the module.

    Args:
        config: of the layer and the variants.
        taps: depths of the target whose states are read, as in `Drafter.taps`, in ascending order.
        token_ids: [draft vocabulary] token ids of the target that the head scores, in the order of its rows.
    """

    config: Eagle3Config
    token_ids: torch.Tensor

    def __init__(self, config: Eagle3Config, taps: tuple[int, ...], token_ids: torch.Tensor):
        super().__init__(config)
        self.taps = taps
        width, read, eps = config.hidden_size, config.input_width, config.rms_norm_eps
        self.fc = nn.Linear(len(taps) * read, width, bias=False)
        self.input_norm = LlamaRMSNorm(len(taps) * read, eps=eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(read, eps=eps) for _ in taps] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.midlayer = Midlayer(config)
        # Named as in speculators' checkpoints, whose layer 0 is the midlayer.
        self.depth = config.num_hidden_layers
        self.compiled_layers = ("midlayer", *(f"layers.{i}" for i in range(1, self.depth)))
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer(config, i) for i in range(1, self.depth)})
        self.mask_hidden = (
            None if config.mask_token_id is None else nn.Parameter(torch.zeros(1, 1, len(taps) * read))
        )
        self.norm = LlamaRMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, token_ids.shape[0], bias=False)
        self.register_buffer("token_ids", token_ids, persistent=False)

    def embed(self, tokens: torch.Tensor, target: StagedModel) -> torch.Tensor:
        """Token ids [b, n] -> [b, n, h]."""
        return target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    @property
    def tables(self) -> list[torch.Tensor]:
        """The model's own embedding."""
        return [] if self.embed_tokens is None else [self.embed_tokens.weight]

    def features(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """The target's states [b, n, d] of each tap -> g [b, n, h]."""
        return self._joined([states[tap] for tap in self.taps])

    def mask_features(self) -> torch.Tensor:
        """Returns g [1, 1, h] of a mask."""
        assert self.mask_hidden is not None
        return self._joined(list(self.mask_hidden.chunk(len(self.taps), dim=-1)))

    def _joined(self, depths: list[torch.Tensor]) -> torch.Tensor:
        """States [b, n, d] of all depths -> g [b, n, h]."""
        if self.config.fc_norm:
            depths = [norm(depth) for norm, depth in zip(self.fc_norm, depths, strict=True)]
        joined = torch.cat(depths, dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(self, features: torch.Tensor, embeds: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Pairs: features, embedded tokens [b, n, h] -> [b, n, h], for `logits` and the features of the next pairs."""
        out = self.midlayer(features, embeds, **attention)
        for layer in self.layers.values():
            out = layer(out, **attention)
        return self.output(out)

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """The last layer's output for the next step."""
        return self.norm(states) if self.config.norm_output else states

    def logits(self, output: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs [..., h] of `forward` -> logits [..., draft vocabulary], or [..., c] of some rows [c] of it."""
        normed = output if self.config.norm_output else self.norm(output)
        return self.lm_head(normed) if rows is None else linear(normed, self.lm_head.weight[rows])


def default_taps(layers: int) -> tuple[int, ...]:
    """The depths that the authors read, 2, L/2 and L - 3; for few layers the nearest that differ, none of them 0.

    Args:
        layers: L, of the target.

    Raises:
        UserError: there are no three depths between the layers.
    """
    if layers <= DEPTHS:
        raise UserError(
            f"EAGLE-3 reads states between layers at {DEPTHS} depths: the target has {layers} layers"
        )
    high = max(layers - 3, DEPTHS)
    low = min(2, high - 2)
    return low, min(max(layers // 2, low + 1), high - 1), high
