"""Token trees whose nodes are paths of ranks: child r of a node is the r-th likeliest token there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specbench.decoding.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

Path = tuple[int, ...]


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
    parents = torch.tensor([places.get(path[:-1], -1) for path in nodes], dtype=torch.int64, device=device)
    levels: list[tuple[torch.Tensor, torch.Tensor]] = []
    above: dict[Path, int] = {(): 0}
    for length in range(1, max(map(len, nodes), default=0) + 1):
        level = [path for path in nodes if len(path) == length]
        of_level = torch.tensor([(above[path[:-1]], path[-1]) for path in level], device=device)
        levels.append((of_level[:, 0], of_level[:, 1]))
        above = {path: i for i, path in enumerate(level)}
    return Tree.of(parents), levels
