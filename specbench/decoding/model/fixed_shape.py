"""Passes of a fixed shape: padded to a width and a KV length, with tensors for all that two of them differ in.

Such a pass can be captured and replayed, and its results do not depend on how many tokens it was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbench.decoding.kv_cache import EMPTY, ForwardContext

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache

# KV lengths are rounded up to a multiple of this; the excess is masked. The fused attention of CPUs processes 512
# entries at a time: if its last block were shorter in one pass than in another, sums would round differently, with the
# same entries visible.
KV_BUCKET = 512
# Tokens of each sequence in a captured pass at most: published trees and windows have up to 120.
LONGEST = 128
QUERY_BLOCK = 32  # queries that it processes at a time; a single one that is left over uses another kernel


def rounded_up(number: int, step: int) -> int:
    """The first multiple of `step` that is not below a number."""
    return -(-number // step) * step


def kv_bucket(kv_len: int, capacity: int) -> int:
    """The KV length of a fixed-shape pass that needs `kv_len` entries of a cache with `capacity` positions."""
    return min(rounded_up(kv_len, KV_BUCKET), capacity)


def without_lone_query(width: int, groups: int) -> int:
    """Number of tokens of a pass, one more if the last query would use another kernel than those before it.

    Args:
        width: tokens of each sequence.
        groups: query heads that share keys.
    """
    return width + (width > 1 and width * groups % QUERY_BLOCK == 1)


def widened(inputs: torch.Tensor, width: int) -> torch.Tensor:
    """Ids [b, n] or states [b, n, d] with the last ones repeated until there are `width` of each sequence."""
    n = inputs.shape[1]
    if n == width:
        return inputs
    return torch.cat([inputs, inputs[:, -1:].expand(-1, width - n, *inputs.shape[2:])], dim=1)


def materialize(ctx: ForwardContext, cache: KVCache, b: int, n: int, width: int) -> ForwardContext:
    """The same pass with `width` tokens instead of n, tensors instead of numbers, and the KV length of its bucket.

    Added tokens are written to entries that the next pass overwrites.

    Args:
        ctx: of n tokens of each of b sequences.
        cache: that the pass writes to.
        b: sequences.
        n: tokens of each.
        width: at least n.
    """
    counting, capacity = cache.counting, cache.capacity
    kv_len = kv_bucket(ctx.kv_len, capacity)
    visible, more = ctx.visible, (0, kv_len - ctx.kv_len)
    if ctx.start is not None:
        positions = counting[None, ctx.start : ctx.start + n]
        kv_positions = counting[None, :kv_len]
    else:
        assert ctx.positions is not None
        assert ctx.kv_positions is not None
        positions = ctx.positions
        kv_positions = torch.nn.functional.pad(ctx.kv_positions, more, value=EMPTY)
        if visible is not None:
            visible = torch.nn.functional.pad(visible, more)
    if isinstance(ctx.write_index, int):
        entries = counting[ctx.write_index : ctx.write_index + n].unsqueeze(0)
        if b > 1:
            entries = entries + capacity * counting[:b].unsqueeze(1)
    else:
        entries = ctx.write_index.view(b, n)
    if width > n:
        positions = widened(positions, width)
        entries = torch.cat([entries, entries[:, -1:] + counting[1 : 1 + width - n]], dim=1)
        visible = None if visible is None else widened(visible, width)
    return ForwardContext(kv_len, entries.flatten(), None, positions, kv_positions, visible)
