"""Token trees whose nodes are paths of ranks: child r of a node is the r-th likeliest token there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from specbench.decoding.device import on_device
from specbench.decoding.tree import Tree
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.decoding.state import Batch

    LogitsOf = Callable[[int, torch.Tensor | None], torch.Tensor]
    Choose = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]

Path = tuple[int, ...]
BLOCK = 64  # logits per block; block maxima are found first
# How likely each rank is to be accepted, relative to the others: orders the nodes of a tree that is cut.
LIKELY = (0.5, 0.14, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02, 0.016, 0.013)


def chance(path: Path) -> float:
    """How likely a node is to be accepted, relative to others; a child is always less likely than its parent."""
    return math.prod(LIKELY[rank] for rank in path)


def grown(root: int, children: str) -> list[Path]:
    """Returns the nodes of a tree given by numbers of children, likeliest first; children have the first ranks.

    Args:
        root: children of the pending token.
        children: of other nodes, by the ranks that lead to them: "001:2 ..."; 0 if not given.
    """
    counts = dict(entry.split(":") for entry in children.split())
    paths: list[Path] = [(rank,) for rank in range(root)]
    for path in paths:  # which grows
        paths += [(*path, rank) for rank in range(int(counts.get("".join(map(str, path)), 0)))]
    return sorted(paths, key=chance, reverse=True)


# The authors' tree "mc_sim_7b_63" of Medusa, which Hydra and Spec-Bench use, too: children by path of ranks.
MEDUSA_TREE = grown(
    10,
    "0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1 000:2",
)
# The authors' tree of EAGLE-1, 25 nodes, likewise.
EAGLE_TREE = grown(4, "0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2")


def chosen_paths(named: Iterable[Sequence[int]] | None, heads: int, nodes: int | None) -> list[Path]:
    """Returns the nodes of a tree that heads fill, one head per level.

    Args:
        named: the tree that the heads' config.json names; None: the published one, as far as the heads reach.
        heads: how many there are.
        nodes: number of nodes to keep, the first ones; None: all.

    Raises:
        UserError: the named tree is broken, has more levels than heads, or too few nodes.
    """
    if named is None:
        paths = [path for path in MEDUSA_TREE if len(path) <= heads]
    else:
        paths = checked_paths(named, "the tree of the heads")
        if (deepest := max(map(len, paths))) > heads:
            raise UserError(f"the tree of the heads has {deepest} levels, but there are {heads} heads")
    if nodes is not None and nodes > len(paths):
        raise UserError(f"nodes={nodes}: the tree of the heads has {len(paths)}")
    return paths[:nodes]


def checked_paths(named: Iterable[Sequence[int]], what: str) -> list[Path]:
    """The paths that a file names.

    Args:
        named: the ranks of each.
        what: the file, for messages.

    Raises:
        UserError: there are none, one is repeated, or one comes before its parent.
    """
    paths: dict[Path, None] = {(): None}
    try:
        listed = [tuple(map(int, ranks)) for ranks in named]
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} is no list of paths, such as [[0], [0, 0]]") from error
    for ranks in listed:
        if not ranks or min(ranks) < 0 or ranks[:-1] not in paths or ranks in paths:
            raise UserError(f"{what} is broken: {list(ranks)} has no parent in front of it")
        paths[ranks] = None
    if len(paths) == 1:
        raise UserError(f"{what} is empty")
    return [*paths][1:]


def shaped(children: Sequence[int]) -> list[Path]:
    """The nodes of a tree in which all nodes of a level have equally many children, level by level.

    Args:
        children: of the pending token, of each of its children, and so on.
    """
    paths: list[Path] = []
    level: list[Path] = [()]
    for count in children:
        level = [(*path, rank) for path in level for rank in range(count)]
        paths += level
    return paths


def ranks_in(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The rank [n] of each of n tokens in its scores [n, vocab].

    Of equal scores, which are common in bfloat16, the one with the lower id comes first.
    """
    theirs = scores.gather(1, tokens.unsqueeze(1))
    before = torch.arange(scores.shape[1], device=scores.device) < tokens.unsqueeze(1)
    return ((scores > theirs) | ((scores == theirs) & before)).sum(1)


def counted_paths(ranks: Iterable[Sequence[int]], limit: int) -> Counter[Path]:
    """Counts the paths of ranks, prefixes included.

    Args:
        ranks: for each position of a text the ranks of the tokens after it, one after the other.
        limit: a path ends before a rank that is not below it.
    """
    counts: Counter[Path] = Counter()
    for row in ranks:
        path: Path = ()
        for rank in row:
            if rank >= limit:
                break
            path = (*path, rank)
            counts[path] += 1
    return counts


def best_tree(counts: Counter[Path], nodes: int) -> list[Path]:
    """Returns the paths that are right most often. A prefix is right at least as often, so it is included."""
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes]


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth of a tree.

    Attributes:
        start: nodes with children at smaller depths.
        inner: nodes with children at this depth.
        parents: [n] index of each node's parent among the nodes of the depth before.
        ranks: [n] rank of each node.
        order: [n] siblings in front of each node.
        most_ranks: the largest of `ranks`, plus 1.
        most_siblings: the largest of `order`, plus 1.
        leaves: whether there are nodes without children.
    """

    start: int
    inner: int
    parents: torch.Tensor
    ranks: torch.Tensor
    order: torch.Tensor
    most_ranks: int
    most_siblings: int
    leaves: bool

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [b, m, rows] after the nodes above that have children -> the row [b, n] of each node's rank."""
        return likeliest_ids(logits, self.most_ranks)[:, self.parents, self.ranks]


def fill_tree(
    levels: Sequence[Level], logits_of: LogitsOf, choose: Choose
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fills a tree whose leaves come last, level by level.

    Args:
        levels: of the tree, from `rank_tree` with `leaves_last`.
        logits_of: (depth, tokens [b, m] with children of the level above, None at depth 0) -> logits [b, m, rows]
            after these.
        choose: (depth, these logits) -> the level's token ids [b, n] and, if they are drawn, the distributions
            [b, n, rows] that they are drawn from.

    Returns:
        Tokens [b, k], and distributions [b, k, rows] or None.
    """
    inner: list[torch.Tensor] = []
    leaves: list[torch.Tensor] = []
    inner_probs: list[torch.Tensor] = []
    leaf_probs: list[torch.Tensor] = []
    for depth, level in enumerate(levels):
        tokens, probs = choose(depth, logits_of(depth, inner[-1] if depth else None))
        inner.append(tokens[:, : level.inner])
        leaves.append(tokens[:, level.inner :])
        if probs is not None:
            inner_probs.append(probs[:, : level.inner])
            leaf_probs.append(probs[:, level.inner :])
    drawn = [*inner_probs, *leaf_probs]
    return torch.cat([*inner, *leaves], dim=1), torch.cat(drawn, dim=1) if drawn else None


def fill_with_likeliest(
    levels: Sequence[Level], logits_of: LogitsOf, ids: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Fills a tree with the likeliest tokens of each level.

    Args:
        levels: as in `fill_tree`.
        logits_of: likewise.
        ids: rows of the head -> token ids.

    Returns:
        Tokens [b, k].
    """
    return fill_tree(levels, logits_of, lambda depth, logits: (ids(levels[depth].likeliest(logits)), None))[0]


@cache  # without a bound: captured graphs read these tensors as long as they are replayed
def rank_tree(
    paths: tuple[Path, ...], depth: int, device: torch.device, leaves_last: bool = False
) -> tuple[Tree, list[Level]]:
    """A tree of ranks, cut at a depth.

    Args:
        paths: of its nodes, parents included.
        depth: longest path to keep.
        device: of the tensors.
        leaves_last: nodes with children come first, by depth, and all others after them, so that the tokens fed to a
            drafter with a cache fill consecutive entries; else all nodes are sorted by depth.
    """
    fitting = [path for path in paths if len(path) <= depth]
    with_children = {path[:-1] for path in fitting}
    nodes = sorted(fitting, key=lambda path: (leaves_last and path not in with_children, len(path), path))
    node_index = {path: i for i, path in enumerate(nodes)}
    levels: list[Level] = []
    above: dict[Path, int] = {(): 0}
    start = 0
    for length in range(1, max(map(len, nodes), default=0) + 1):
        level = [path for path in nodes if len(path) == length]
        inner = sum(path in with_children for path in level)
        siblings: Counter[Path] = Counter()
        rows = []
        for path in level:
            rows.append((above[path[:-1]], path[-1], siblings[path[:-1]]))
            siblings[path[:-1]] += 1
        most_ranks = 1 + max(rank for _, rank, _ in rows)
        parent_index, ranks, order = on_device(rows, device).unbind(1)
        most = max(siblings.values())
        levels.append(Level(start, inner, parent_index, ranks, order, most_ranks, most, inner < len(level)))
        above = {path: i for i, path in enumerate(level)}
        start += inner
    parents = on_device([node_index.get(path[:-1], -1) for path in nodes], device)
    return Tree.of(parents, max_children=max((level.most_siblings for level in levels), default=None)), levels


class RankTrees:
    """The trees of ranks that a drafter fills: as many and as long paths as a round has room for.

    Args:
        paths: of the nodes, in order of priority if there is no room for all.
        leaves_last: as in `rank_tree`.
        levels: longer paths are left out; None: none is.
        nodes: number of the others to keep, the first ones; None: all.
        rows: tokens that the drafter's head scores: nodes of higher ranks are then left out, too; None: none is.

    Attributes:
        paths: those that are left.
        max_nodes: how many there are.
        depth: of the longest.
    """

    def __init__(
        self,
        paths: Iterable[Sequence[int]],
        leaves_last: bool = False,
        *,
        levels: int | None = None,
        nodes: int | None = None,
        rows: int | None = None,
    ):
        fitting = [tuple(path) for path in paths if levels is None or len(path) <= levels][:nodes]
        self.paths = tuple(path for path in fitting if rows is None or max(path) < rows)
        self._leaves_last = leaves_last
        self.max_nodes, self.depth = len(self.paths), max(map(len, self.paths))

    def of(self, batch: Batch) -> tuple[Tree, list[Level], int]:
        """Returns a round's tree, its levels, and the number of paths with room, too long ones included.

        That number and the number of levels identify the tree.
        """
        nodes = min(batch.max_nodes, self.max_nodes)
        device = batch.tokens.device
        return *rank_tree(self.paths[:nodes], batch.max_draft, device, leaves_last=self._leaves_last), nodes


def likeliest_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [..., k] of the k largest of [..., n], the largest first.

    They are in the k blocks with the largest maxima, which a vectorised pass finds: on a CPU this takes a tenth of the
    time of `topk` over all.
    """
    n = logits.shape[-1]
    if n < 2 * k * BLOCK:
        return logits.topk(k, dim=-1).indices
    spare = -n % BLOCK
    blocks = torch.nn.functional.pad(logits, (0, spare), value=float("-inf")) if spare else logits
    blocks = blocks.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).topk(k, dim=-1).indices
    within = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, BLOCK)).flatten(-2)
    indices = within.topk(k, dim=-1).indices
    return best.gather(-1, indices // BLOCK) * BLOCK + indices % BLOCK
