"""Attention of grouped query heads on a CPU, without copies of keys and values for every query head.

If several query heads share the keys and values of one head, transformers copies these for each of them whenever there
is a mask. In a short pass that costs more than the attention itself. Here the query heads of a group become further
tokens of one head: the same products, without moving keys and values out of the cache. If our own kernels are
available, short passes use them, see kernels/attention.cpp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from specbench.decoding.cpu.native import MOST_TOKENS, has_kernel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "grouped_sdpa"  # among transformers' attention functions
OF_STOCK = (
    "softcap",
    "position_bias",
)  # options that change scores: transformers' function takes or refuses them
SHORT = 64  # tokens of a pass on torch's kernels: with more, the copies cost little beside the attention


def grouped_attention_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a config that makes layers use this module's attention; the config itself is unchanged."""
    from transformers import AttentionInterface  # late: it takes seconds

    AttentionInterface.register(NAME, partial(attend, AttentionInterface()["sdpa"]))
    grouped = copy.copy(config)
    grouped._attn_implementation = NAME
    return grouped


def attention_of(
    config: PretrainedConfig, groups: int, captured: bool, like: torch.Tensor
) -> tuple[int, PretrainedConfig | None]:
    """How the layers of a model attend.

    Args:
        config: of the model.
        groups: query heads that share keys.
        captured: whether passes are captured.
        like: a tensor with the dtype and the device of the states.

    Returns:
        Number of query heads that share a mask, 1 if each has its own; and the config that makes layers use this
        module's attention, None if they keep their own.
    """
    if config._attn_implementation != "sdpa":
        return 1, None
    # Without graphs, most passes on CUDA have no mask; with them all do.
    shared = groups if captured or like.device.type == "cpu" else 1
    ours = shared > 1 or has_kernel(like.device, like.dtype)
    return shared, grouped_attention_config(config) if ours else None


def is_plain(options: Mapping[str, Any]) -> bool:
    """Whether none of the options of an attention function changes scores."""
    return all(options.get(name) is None for name in OF_STOCK)


@contextmanager
def attending(config: PretrainedConfig, name: str) -> Iterator[None]:
    """Within the context, the layers that read this config use the attention function of that name."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def fold_mask(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """The mask [b, 1, n, kv_len] of a short pass for `groups` query heads as tokens of one head, once a pass.

    Returns:
        [b, 1, groups * n, kv_len]; for a longer pass the unchanged mask.
    """
    return mask if mask is None or mask.shape[-2] > SHORT else mask.repeat(1, 1, groups, 1)


def attend(
    stock: Callable[..., tuple[torch.Tensor, None]],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        stock: transformers' own function, for passes that are not short.
        module: the attention layer.
        query: [b, heads, n, d].
        key: [b, kv_heads, kv_len, d].
        value: likewise.
        attention_mask: folded by `fold_mask`, or not; None: a prefill, or a single token that sees everything.
        scaling: of the scores.
        dropout: share of the weights of attention that is left out, in training.
        **options: for `stock`. A window is in the mask.

    Returns:
        [b, n, heads, d], contiguous as transformers', and None.
    """
    (b, heads, n, d), kv_heads = query.shape, key.shape[1]
    tokens = heads // kv_heads * n
    masked, plain = attention_mask is not None, is_plain(options)
    of_kernel = (n == 1 or (n <= MOST_TOKENS and masked)) and plain and dropout == 0
    if of_kernel and has_kernel(query.device, query.dtype) and not torch.is_grad_enabled():
        scale = d**-0.5 if scaling is None else scaling
        return torch.ops.specbench.attend.default(query, key, value, attention_mask, scale), None
    folded = n == 1 or (attention_mask is not None and attention_mask.shape[-2] == tokens)
    if not ((n == 1 or (n <= SHORT and masked)) and folded and plain):
        return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    grouped = query.reshape(b, kv_heads, tokens, -1)
    attended = scaled_dot_product_attention(grouped, key, value, attention_mask, dropout, scale=scaling)
    # Kernels of GPUs return other strides than those of CPUs: a dimension can be split, but two cannot be joined.
    split = attended.unflatten(2, (tokens // n, n))
    return split.permute(0, 3, 1, 2, 4).reshape(b, n, heads, -1).contiguous(), None
