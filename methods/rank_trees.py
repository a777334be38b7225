"""Token trees whose nodes are paths of ranks: child r of a node is the r-th likeliest token there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specbench.decoding.device import on_device
from specbench.decoding.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

Path = tuple[int, ...]
BLOCK = 64  # of logits, whose maximum is looked at first


def grown(root: int, children: Mapping[str, int]) -> list[Path]:
    """The nodes of a tree that is given by numbers of children, which always have the first ranks.

    Args:
        root: children of the pending token.
        children: of other nodes, by their ranks as a text such as "001"; none where nothing is given.
    """
    paths: list[Path] = [(rank,) for rank in range(root)]
    for path in paths:  # which grows
        paths += [(*path, rank) for rank in range(children.get("".join(map(str, path)), 0))]
    return paths


@lru_cache(maxsize=64)
def rank_tree(
    paths: tuple[Path, ...], depth: int, device: torch.device
) -> tuple[Tree, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A tree of ranks, cut at a depth.

    Args:
        paths: of its nodes; with a node its parent is there, too.
        depth: of the longest path that is of use.
        device: of the tensors.

    Returns:
        The tree, level by level, and for each level the index [n] of each node's parent in the level above, and its
        rank [n].
    """
    nodes = sorted((path for path in paths if len(path) <= depth), key=lambda path: (len(path), path))
    places = {path: i for i, path in enumerate(nodes)}
    parents = on_device([places.get(path[:-1], -1) for path in nodes], device)
    levels: list[tuple[torch.Tensor, torch.Tensor]] = []
    above: dict[Path, int] = {(): 0}
    for length in range(1, max(map(len, nodes), default=0) + 1):
        level = [path for path in nodes if len(path) == length]
        of_level = on_device([(above[path[:-1]], path[-1]) for path in level], device)
        levels.append((of_level[:, 0], of_level[:, 1]))
        above = {path: i for i, path in enumerate(level)}
    return Tree.of(parents), levels


def likeliest_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [..., k] of the k largest of [..., n], the largest first.

    They lie in the k blocks of the largest maxima, which are found in a pass that is vectorised: on a CPU this takes a
    tenth of the time of `topk` over all.
    """
    n = logits.shape[-1]
    if n < 2 * k * BLOCK:
        return logits.topk(k, dim=-1).indices
    spare = -n % BLOCK
    blocks = torch.nn.functional.pad(logits, (0, spare), value=float("-inf")) if spare else logits
    blocks = blocks.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).topk(k, dim=-1).indices
    within = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, BLOCK)).flatten(-2)
    found = within.topk(k, dim=-1).indices
    return best.gather(-1, found // BLOCK) * BLOCK + found % BLOCK
