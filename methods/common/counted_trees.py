"""Drafts from counts of what followed before: the likeliest nodes first, by the shares along their paths."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np

Position = TypeVar("Position")


@dataclass(slots=True)
class Counted:
    """A tree of tokens that followed before.

    Attributes:
        tokens: of the nodes, parents before their children.
        parents: index of each node's parent, -1 for children of the pending token.
        score: the sum over all nodes of the product of shares along the path: the expected number of accepted tokens
            if tokens follow as often as before.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


def likeliest(
    position: Position,
    followers: Callable[[Position, int], Iterable[tuple[int, Position, float]]],
    nodes: int,
    depth: int,
    least: float = 0.0,
) -> Counted:
    """Returns the likeliest nodes after a position, likeliest first; ties are in order of discovery.

    Args:
        position: where the pending token ends.
        followers: (a position, tokens between it and the pending one) -> for each token that followed: token, position
            after it and share.
        nodes: most nodes of the tree.
        depth: most levels of the tree.
        least: least product of shares of a node.
    """
    tree = Counted()
    order = count()
    # Products are negative: a heap has the smallest first.
    waiting: list[tuple[float, int, int, int, int, Position]] = []

    def look(position: Position, product: float, parent: int, above: int) -> None:
        for token, follower, share in followers(position, above) if above < depth else ():
            if product * share >= least:
                heapq.heappush(waiting, (-product * share, next(order), token, parent, above + 1, follower))

    look(position, 1.0, -1, 0)
    while waiting and len(tree.tokens) < nodes:
        product, _, token, parent, at, position = heapq.heappop(waiting)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.score -= product
        look(position, -product, len(tree.tokens) - 1, at)
    return tree


def most_frequent(columns: np.ndarray, end: int, nodes: int, children: int) -> Counted:
    """Returns the tree of the most frequent prefixes of some texts, the same as `likeliest` for these texts.

    The texts are sorted, so a node is a run of neighbours with a common prefix. All nodes are found at once.

    Args:
        columns: [depth, n] the tokens of n sorted texts; those after an end do not count.
        end: the token that ends a text, the largest one.
        nodes: most nodes of the tree.
        children: most children of a node: the most frequent ones; of equal ones, the smaller token.
    """
    depth, n = columns.shape
    begins = np.ones(depth * n + 1, dtype=bool)
    differ = columns[:, 1:] != columns[:, :-1]
    np.logical_or.accumulate(differ, axis=0, out=begins[:-1].reshape(depth, n)[:, 1:])
    # The first text of each node, level by level, and the end.
    starts = begins.nonzero()[0]
    # Siblings are adjacent: the first child of each node.
    below = starts[:-1].searchsorted(starts + n).tolist()
    first, tokens = starts.tolist(), columns.ravel()[starts[:-1]].tolist()

    tree, total = Counted(), 0
    waiting: list[tuple[int, int, int]] = []

    def look(parent: int, begin: int, after: int) -> None:
        if begin < after and tokens[after - 1] == end:
            after -= 1
        candidates = [(first[i] - first[i + 1], parent, i) for i in range(begin, after)]
        for candidate in candidates if len(candidates) <= children else sorted(candidates)[:children]:
            heapq.heappush(waiting, candidate)

    look(-1, 0, below[0])
    while waiting and len(tree.tokens) < nodes:
        negative, parent, i = heapq.heappop(waiting)
        tree.tokens.append(tokens[i])
        tree.parents.append(parent)
        total -= negative
        look(len(tree.tokens) - 1, below[i], below[i + 1])
    tree.score = total / n
    return tree
