"""Trees of ranks: their layout for a drafter with a cache, and the best one for counted paths."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch

from methods.common.rank_trees import (
    EAGLE_TREE,
    MEDUSA_TREE,
    RankTrees,
    best_tree,
    chance,
    chosen_paths,
    counted_paths,
    rank_tree,
    ranks_in,
    shaped,
)

COUNTED = ((0,), (0, 0), (1,), (0, 0, 0), (3,), (1, 2), (0, 2), (0, 0, 1))


def test_a_shape_has_equally_many_children_on_each_level():
    assert shaped([2, 1]) == [(0,), (1,), (0, 0), (1, 0)]
    assert [len(path) for path in shaped([1, 1, 1])] == [1, 2, 3]
    assert len(shaped([5, 2, 3])) == 5 + 10 + 30


def test_of_equal_scores_one_token_is_first():
    """In bfloat16 many are equal, and a drafter drafts only one of them as its first choice."""
    scores = torch.tensor([[3.0, 7.0, 7.0, 1.0, 7.0]]).expand(5, -1)
    assert ranks_in(scores, torch.arange(5)).tolist() == [3, 0, 1, 4, 2]


def test_paths_are_counted_up_to_the_first_rank_that_is_too_high():
    found = counted_paths([[0, 1, 0], [0, 3, 0], [2, 0, 1], [3, 0, 0]], 3)
    assert found == {(0,): 2, (0, 1): 1, (0, 1, 0): 1, (2,): 1, (2, 0): 1, (2, 0, 1): 1}


def test_the_best_tree_is_closed():
    found = Counter({(0,): 9, (0, 0): 9, (1,): 4, (0, 1): 3, (0, 0, 0): 9, (2,): 1})
    tree = best_tree(found, 5)
    assert tree == [(0,), (0, 0), (0, 0, 0), (1,), (0, 1)]
    assert all(path[:-1] in tree for path in tree if len(path) > 1)


@pytest.mark.parametrize("tree", [MEDUSA_TREE, EAGLE_TREE])
def test_the_first_nodes_of_a_published_tree_are_the_likeliest(tree):
    """Whatever their depth, so that a cut is as deep as it pays; with a node its parent is there, too."""
    chances = [chance(path) for path in tree]
    assert chances == sorted(chances, reverse=True)
    assert all(path[:-1] in tree[:i] for i, path in enumerate(tree) if len(path) > 1)
    assert tree[:3] == [(0,), (0, 0), (1,)] and max(map(len, tree[:10])) == 4
    assert max(map(len, chosen_paths(None, 3, 10))) == 3, "as far as the heads reach"


@pytest.mark.parametrize("seed", range(3))
def test_no_tree_of_its_size_has_more_tokens_accepted(seed):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 3, (60, 3), generator=g).tolist()
    found, all_paths = counted_paths(rows, 2), [p for n in (1, 2, 3) for p in product(range(2), repeat=n)]
    for nodes in (1, 3, 5):
        closed = (
            some
            for some in combinations(all_paths, nodes)
            if all(len(path) == 1 or path[:-1] in some for path in some)
        )
        best = max(sum(found[path] for path in some) for some in closed)
        assert sum(found[path] for path in best_tree(found, nodes)) == best


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("paths", [COUNTED, tuple(shaped([3, 2, 1])), ((0,),)])
def test_nodes_with_children_come_first_and_levels_find_their_own(paths, depth):
    tree, levels = rank_tree(paths, depth, torch.device("cpu"), leaves_last=True)
    kept = [path for path in paths if len(path) <= depth]
    parents, order = tree.parents[0].tolist(), tree.siblings_before()[0].tolist()
    with_children = sorted({parent for parent in parents if parent >= 0})
    assert with_children == list(range(len(with_children)))
    # Put together as a drafter does: of each level what has children, then the leaves of each.
    above, inner, leaves = [()], [], []
    for level in levels:
        rows = zip(level.parents.tolist(), level.ranks.tolist(), level.order.tolist())
        nodes = [((*above[parent], rank), place) for parent, rank, place in rows]
        assert level.start == len(inner) and level.leaves == (len(nodes) > level.inner)
        assert level.most_ranks == 1 + max(path[-1] for path, _ in nodes)
        assert level.most_siblings == 1 + max(place for _, place in nodes) <= tree.max_children
        inner += nodes[: level.inner]
        leaves += nodes[level.inner :]
        above = [path for path, _ in nodes[: level.inner]]
    found = inner + leaves
    assert {path for path, _ in found} == set(kept) and len(found) == len(kept) == len(parents)
    for (path, place), parent, before in zip(found, parents, order):
        assert path[:-1] == (found[parent][0] if parent >= 0 else ()) and place == before


@pytest.mark.parametrize(("nodes", "depth"), product((1, 3, 8, 99), (1, 2, 9)))
def test_a_round_gets_as_much_of_a_tree_as_it_has_room_for(nodes, depth):
    trees = RankTrees(COUNTED, leaves_last=True)
    assert (trees.paths, trees.max_nodes, trees.depth) == (COUNTED, 8, 3)
    batch = SimpleNamespace(max_nodes=nodes, max_draft=depth, tokens=torch.empty(0))
    tree, levels, drafted = trees.of(batch)
    expected, its_levels = rank_tree(COUNTED[:nodes], depth, torch.device("cpu"), leaves_last=True)
    assert tree is expected and levels is its_levels and drafted == min(nodes, 8)


def test_a_drafter_fills_what_its_levels_nodes_and_head_have_room_for():
    """Levels first, then nodes, then ranks that the head has."""
    assert RankTrees(COUNTED, levels=2).paths == tuple(path for path in COUNTED if len(path) <= 2)
    assert RankTrees(COUNTED, levels=2, nodes=4).paths == ((0,), (0, 0), (1,), (3,))
    trees = RankTrees(map(list, COUNTED), levels=2, nodes=4, rows=3)
    assert trees.paths == ((0,), (0, 0), (1,)) and (trees.max_nodes, trees.depth) == (3, 2)
