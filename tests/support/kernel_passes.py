"""Passes whose bits are compared, on kernels of our own."""

from __future__ import annotations

import pytest
import torch

from specbench.decoding.cpu import native
from specbench.decoding.kv_cache import ForwardContext, KVCache
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import Draft
from specbench.decoding.tree import Tree

needs_kernels = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))
PROMPT, TOKENS = 20, 6


def prefilled(target: StagedModel, ids: torch.Tensor, slots: int = 1) -> KVCache:
    """A cache with the first `PROMPT` of ids [1, n] in each slot."""
    cache = target.new_cache(64, slots)
    for slot in range(slots):
        target.prefill(ids[:, :PROMPT], cache.slot(slot))
    return cache


def passes(target: StagedModel, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, KVCache]]:
    """The tokens after the prompt, of ids [1, PROMPT + TOKENS]: alone, in a chain, in a tree, and beside another one.

    The other sequence is as long, or ends three tokens earlier.

    Returns:
        Logits [TOKENS, vocab] of each way; the caches after the first two.
    """
    first, rest = ids[:, PROMPT : PROMPT + 1], ids[:, PROMPT + 1 :]
    caches = {name: prefilled(target, ids) for name in ("alone", "chain", "tree")}
    alone = [
        target.verify(ids[:, i : i + 1], Draft(ids[:, :0]), caches["alone"], i)[0]
        for i in range(PROMPT, PROMPT + TOKENS)
    ]
    # The tokens after the first are nodes 0, 2, 3, 5 and 6 of a tree; the others are siblings.
    tree = Tree.of(torch.tensor([-1, -1, 0, 2, 0, 3, 5]))
    nodes = torch.cat([rest[:, :1], ids[:, 3:4], rest[:, 1:3], ids[:, 4:5], rest[:, 3:]], dim=1)
    ctx = ForwardContext.nodes(PROMPT, tree.offsets()[0], tree.visible[0])
    in_tree = target.verify(first, Draft(nodes, tree=tree), caches.pop("tree"), ctx)
    others = ids.flip(1)[:, PROMPT:]
    two = target.verify(
        torch.cat([others[:, :1], first]),
        Draft(torch.cat([others[:, 1:], rest])),
        prefilled(target, ids, 2),
        PROMPT,
    )
    ragged_cache, starts = prefilled(target, ids, 2), torch.tensor([[PROMPT - 3], [PROMPT]])
    positions = starts + torch.arange(TOKENS)
    ragged = ForwardContext(
        PROMPT + TOKENS,
        (positions + torch.tensor([[0], [ragged_cache.capacity]])).flatten(),
        None,
        positions,
        torch.arange(PROMPT + TOKENS).unsqueeze(0),
    )
    logits = {
        "alone": torch.cat(alone),
        "chain": target.verify(first, Draft(rest), caches["chain"], PROMPT)[0],
        "tree": in_tree[0, [0, 1, 3, 4, 6, 7]],
        "two": two[1],
        "ragged": target.verify(
            torch.cat([others[:, :1], first]), Draft(torch.cat([others[:, 1:], rest])), ragged_cache, ragged
        )[1],
    }
    return logits, caches
