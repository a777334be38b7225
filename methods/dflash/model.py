"""The drafting model of DFlash, DSpark and DFlash2: a few layers that fill a block of mask tokens in one pass.

Each layer sees the known tokens as keys and values made from the target's states: c = hidden_norm(fc([states of some
depths])) goes through the layer's own projections to keys and values, and through nothing else of it. The block is the
pending token and masks after it, at their positions. All of a block see each other and everything before it
(arXiv 2602.06036). Layers and names of the parts are those of the authors' checkpoints, which are Qwen3's.

DSpark adds two small heads. A low-rank one corrects the logits of each place by the token in front of it, a Markov
chain; the other estimates from the state and that token how likely the target accepts the place's token. DFlash2 has
other layers, and a head that chooses among the likeliest tokens of a place by its state and the token in front.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
)

from methods.common.draft_layer import CachedLayer
from methods.dflash.kinds import INDEPENDENT, MARKOV, SELECTOR
from methods.dflash.layers import ConvolvedLayer
from specbench.decoding.cpu.packed_linear import packed_linear

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache

    Rope = tuple[torch.Tensor, torch.Tensor]
    # The projections of all layers to keys and values as one, and the weights [layers, 1, 1, 1, head_dim] of norms.
    Joint = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]


class BlockConfig(Qwen3Config):
    """A Qwen3 config of the drafting layers, with settings of block drafters.

    Attributes:
        block_size: places of a block that it was trained on, the pending token included.
        mask_token_id: a token of the target's embedding that marks the places to fill.
        fills_in: a mask guesses the token at its own place, so that the pending token's place guesses nothing
            (DFlash); otherwise each place guesses the token after it (DSpark).
        markov_rank: of DSpark's correction; 0: there is none.
        confidence: whether DSpark's estimate exists.
        conv_kernel_size: places that DFlash2's convolutions sum; 0: there are none.
        conv_group_size: channels that share what a state adds to a convolution.
        selector_rank: of DFlash2's selector; 0: there is none.
        selector_top_k: tokens among which the selector chooses.
    """

    block_size: int = 16
    mask_token_id: int = 0
    fills_in: bool = True
    markov_rank: int = 0
    confidence: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    @property
    def head(self) -> str:
        """What joins the tokens of a block, see `methods.dflash.kinds`."""
        return SELECTOR if self.selector_rank else MARKOV if self.markov_rank else INDEPENDENT

    @property
    def most_guesses(self) -> int:
        """Tokens that a block of `block_size` places guesses."""
        return self.block_size - self.fills_in


class MarkovHead(nn.Module):
    """What a token adds to the logits of the next one: a matrix of low rank [vocab, rows of the head]."""

    def __init__(self, vocab: int, rank: int, rows: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)


class CandidateSelector(nn.Module):
    """Scores how well candidates follow the token in front: low-rank products, weighted by the place's state.

    Args:
        vocab: tokens of the target.
        width: of the states.
        rank: of the products.
        count: of candidates.
    """

    def __init__(self, vocab: int, width: int, rank: int, count: int):
        super().__init__()
        self.count = count
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def scores(self, projected: torch.Tensor, before: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
        """Returns the terms for the logits of candidates.

        Args:
            projected: [n, rank] the states of places, by `hidden_projection`.
            before: [n] the tokens in front.
            successors: [n, count, rank] of the candidates.

        Returns:
            [n, count]
        """
        weighed = self.predecessor_codebook[before] * projected
        return (successors @ weighed.unsqueeze(-1)).squeeze(-1)


class ConfidenceHead(nn.Module):
    """States and embedded tokens before them, side by side [..., width] -> the logit of being accepted [..., 1]."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)


class BlockModel(CachedLayer):
    """The drafting model; see the module.

    Args:
        config: of its layers and heads.
        taps: depths of the target whose states it reads, as in `Drafter.taps`.
        token_ids: [draft vocabulary] tokens of the target that the model's own head scores, by row; None: it uses the
            target's.
    """

    config: BlockConfig
    token_ids: torch.Tensor

    def __init__(self, config: BlockConfig, taps: tuple[int, ...], token_ids: torch.Tensor | None = None):
        super().__init__(config)
        self.taps = taps
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=eps)
        size, group = config.conv_kernel_size, config.conv_group_size
        layer = partial(ConvolvedLayer, size=size, group=group) if size else Qwen3DecoderLayer
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps=eps)
        rank, rows = config.markov_rank, config.vocab_size if token_ids is None else token_ids.shape[0]
        self.markov_head = MarkovHead(config.vocab_size, rank, rows) if rank else None
        self.lm_head = None if token_ids is None else nn.Linear(width, rows, bias=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.confidence_head = ConfidenceHead(width + rank) if config.confidence else None
        sizes = config.vocab_size, width, config.selector_rank, config.selector_top_k
        self.candidate_selector = CandidateSelector(*sizes) if config.selector_rank else None
        self.depth = len(self.layers)
        self.compiled_layers = tuple(f"layers.{i}" for i in range(self.depth))
        self._joint: Joint | None = None

    @property
    def tables(self) -> list[torch.Tensor]:
        """Tables of the Markov head and of the selector, by token."""
        markov, selector = self.markov_head, self.candidate_selector
        tables: list[torch.Tensor] = [] if markov is None else [markov.markov_w1.weight]
        if selector is not None:
            tables += [selector.predecessor_codebook, selector.successor_codebook]
        return tables

    def features(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        """The target's states [b, n, d] of each tap -> features [b, n, d] for keys and values."""
        return self.hidden_norm(self.fc(torch.cat([states[tap] for tap in self.taps], dim=-1)))

    def context(self, features: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of known tokens in every layer, in one product.

        Args:
            features: [b, n, d].
            rope: cosines and sines [b or 1, n, head_dim] of their positions.

        Returns:
            Keys and values [layers, b, kv_heads, n, head_dim].
        """
        product, norms = self._joint or self._joined()
        both = product(features).unflatten(-1, (self.depth, 2, -1, self.head_dim)).permute(2, 3, 0, 4, 1, 5)
        keys, values = both.unbind(1)
        keys = norms * rms_norm(keys.float(), (self.head_dim,), eps=self.config.rms_norm_eps).to(keys.dtype)
        return apply_rotary_pos_emb(keys, keys, *rope)[1], values

    def inject(self, features: torch.Tensor, position_embeddings: Rope, past_key_values: KVCache) -> None:
        """Writes keys and values of known tokens, by their features [b, n, d], to a cache."""
        for i, entries in enumerate(zip(*self.context(features, position_embeddings))):
            past_key_values.update(*entries, i)

    def forward(self, hidden: torch.Tensor, places: int | None = None, **attention: Any) -> torch.Tensor:
        """Embedded blocks [b, n, d] -> normed states [b, n, d] for the target's head.

        Args:
            hidden: the blocks.
            places: of a block, if a row holds several side by side.
            **attention: as of `LayerCache.arguments`.
        """
        if places is not None and self.config.conv_kernel_size:
            attention["places"] = places
        for layer in self.layers:
            hidden = layer(hidden, **attention)
        return self.norm(hidden)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Normed states [..., d] -> logits [..., draft vocabulary] of its own head."""
        assert self.lm_head is not None
        return self.lm_head(output)

    def confidence(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Normed states [..., d] and embedded tokens in front of them [..., rank] -> logits of acceptance [...]."""
        assert self.confidence_head is not None
        return self.confidence_head.proj(torch.cat([states, before], dim=-1)).squeeze(-1)

    @property
    def context_bytes(self) -> int:
        """Bytes of the projections of `context`, which the block's own pass reads once more."""
        return sum(part.weight.nbytes for layer in self._attention for part in (layer.k_proj, layer.v_proj))

    def join(self) -> None:
        """Joins the projections of `context` for good: the weights must not change any more."""
        weight, bias = self._projections()
        self._joint = packed_linear(weight, bias), self._joined()[1]

    def _joined(self) -> Joint:
        weight, bias = self._projections()
        norms: list[torch.Tensor] = [layer.k_norm.weight for layer in self._attention]
        return partial(linear, weight=weight, bias=bias), torch.stack(norms).view(self.depth, 1, 1, 1, -1)

    def _projections(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [layers * 2 * kv_heads * head_dim, d] and bias of all projections to keys and values."""
        parts = [part for layer in self._attention for part in (layer.k_proj, layer.v_proj)]
        weights: list[torch.Tensor] = [part.weight for part in parts]
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        return torch.cat(weights), torch.cat(biases) if biases else None

    @property
    def _attention(self) -> list[Qwen3Attention]:
        return [cast("Qwen3DecoderLayer", layer).self_attn for layer in self.layers]


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Returns the depths of a target that the authors read: from 2 to layers - 2, evenly spaced; one is in the middle.

    Args:
        layers: of the target.
        count: of depths; as many as there are, if the target has fewer.
    """
    if count == 1:
        return (min(layers // 2 + 1, layers - 1),)
    first, last = min(2, layers - 1), min(max(layers - 2, 1), layers - 1)
    return tuple(sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)}))
