"""Drafts from counts of what followed before: the likeliest nodes first, by the shares along their paths."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Place = TypeVar("Place")


@dataclass(slots=True)
class Counted:
    """A tree of tokens that followed before.

    Attributes:
        tokens: of the nodes, parents before their children.
        parents: index of each node's parent, -1 for children of the pending token.
        score: the sum of the shares along the paths of all nodes: the tokens that are accepted if they follow as often
            as before.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


def likeliest(
    place: Place,
    followers: Callable[[Place, int], Iterable[tuple[int, Place, float]]],
    nodes: int,
    depth: int,
    least: float = 0.0,
) -> Counted:
    """The likeliest nodes behind a place, from the likeliest on; of equal ones those that were found first.

    Args:
        place: where the pending token ends.
        followers: (a place, tokens between it and the pending one) -> token, place behind it and share among what
            followed, of each token.
        nodes: of the tree at most.
        depth: of the tree at most.
        least: the product of shares that a node must have.
    """
    tree = Counted()
    found = count()
    # Products are negative: a heap has the smallest first.
    waiting: list[tuple[float, int, int, int, int, Place]] = []

    def look(place: Place, product: float, parent: int, above: int) -> None:
        for token, behind, share in followers(place, above) if above < depth else ():
            if product * share >= least:
                heapq.heappush(waiting, (-product * share, next(found), token, parent, above + 1, behind))

    look(place, 1.0, -1, 0)
    while waiting and len(tree.tokens) < nodes:
        product, _, token, parent, at, place = heapq.heappop(waiting)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.score -= product
        look(place, -product, len(tree.tokens) - 1, at)
    return tree


def most_frequent(columns: np.ndarray, end: int, nodes: int, children: int) -> Counted:
    """The tree of the most frequent beginnings of some texts: the nodes, in the order, of `likeliest` for these texts.

    A node is a stretch of neighbouring texts with one beginning, as they are sorted. All are found at once.

    Args:
        columns: [depth, n] the tokens of n texts, which are sorted by them; those behind an end do not count.
        end: the token that ends a text, the largest one.
        nodes: of the tree at most.
        children: of a node at most, the most frequent ones, of equal ones those with the smaller token.
    """
    depth, n = columns.shape
    begins = np.ones((depth, n), dtype=bool)
    np.logical_or.accumulate(columns[:, 1:] != columns[:, :-1], axis=0, out=begins[:, 1:])
    # The first text of each node, level by level.
    first = np.flatnonzero(begins)
    counts = np.diff(first, append=begins.size)
    inside = np.logical_and.accumulate(columns != end, axis=0).ravel()[first]
    first, counts = first[inside], counts[inside]
    parents = _parents(first, n)

    beyond = _sibling_ranks(parents, counts) >= children
    if beyond.any():
        for level in range(1, depth):
            below = np.searchsorted(first, level * n)
            beyond[below:] |= beyond[parents[below:]]
        first, counts = first[~beyond], counts[~beyond]
    if len(first) > nodes:
        enough = counts >= np.partition(counts, -nodes)[-nodes]
        first, counts = first[enough], counts[enough]
    parents = _parents(first, n)

    order = _found_first(first % n, parents, counts, n, int(first[-1]) // n if len(first) else 0)[:nodes]
    places = np.full(len(first) + 1, -1)
    places[order] = np.arange(len(order))
    return Counted(
        columns.ravel()[first[order]].tolist(),
        places[parents[order]].tolist(),
        counts[order].sum().item() / n,
    )


def _parents(first: np.ndarray, n: int) -> np.ndarray:
    """The index [m] of each node's parent, -1 at the top: the last node of the level above that begins no later."""
    return np.searchsorted(first, first - n, side="right") - 1


def _sibling_ranks(parents: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many siblings [m] of each node are more frequent, or as frequent and in front of it."""
    order = np.lexsort((-counts, parents))
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - np.searchsorted(parents[order], parents[order])
    return ranks


def _found_first(
    rows: np.ndarray, parents: np.ndarray, counts: np.ndarray, n: int, levels: int
) -> np.ndarray:
    """The order [m] in which `likeliest` takes nodes: by counts, then by the turns of their parents, then by tokens."""
    # Whatever is above the top had its turn first.
    parents, counts = np.append(parents, -1), np.append(counts, n + 1)
    above = parents[:-1]
    keys = [-counts[:-1]]
    for _ in range(levels):
        keys.append(-counts[above])
        above = parents[above]
    return np.lexsort((rows, *reversed(keys)))
