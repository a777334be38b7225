"""Dynamic trees: the likeliest paths of a toy drafter, found by looking at all of them, and trees that stay trees."""

from __future__ import annotations

import math

import pytest
import torch

from methods.common.dynamic_trees import Growth, most_nodes, next_level
from specbench.decoding.tree import Tree

ROWS = 7


def random_logits(b: int, path: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((b, *path)) % 2**31)
    return 2 * torch.randn(ROWS, generator=generator)


def sure(b: int, path: tuple[int, ...]) -> torch.Tensor:
    """A distribution whose likeliest token has probability 1: a child's score is its parent's."""
    return torch.full((ROWS,), -1e4).index_fill(0, torch.tensor((b + len(path)) % ROWS), 1e4)


def even(b: int, path: tuple[int, ...]) -> torch.Tensor:
    """Equal probabilities: all paths of a length are equal."""
    return torch.zeros(ROWS)


def one_is_no_number(b: int, path: tuple[int, ...]) -> torch.Tensor:
    return torch.full((ROWS,), math.nan) if path else torch.arange(ROWS).float()


def grow(logits, b: int, width: int, levels: int, nodes: int):
    """A batch of trees, and the paths [b][nodes] of their tokens."""
    growth = Growth(width)
    growth.add(torch.stack([logits(i, ())[None] for i in range(b)]))
    expanded: list[list[tuple[int, ...]]] = [[()] for _ in range(b)]
    for _ in range(levels - 1):
        tokens, above = growth.expand()
        expanded = [
            [(*expanded[i][parent], token) for parent, token in zip(above[i].tolist(), tokens[i].tolist())]
            for i in range(b)
        ]
        growth.add(torch.stack([torch.stack([logits(i, path) for path in expanded[i]]) for i in range(b)]))
    tokens, tree = growth.best(nodes)
    parents, paths = tree.parents.tolist(), []
    for i in range(b):
        found: list[tuple[int, ...]] = []
        for parent, token in zip(parents[i], tokens[i].tolist()):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        paths.append(found)
    return growth, tree, paths


def by_looking(logits, b: int, width: int, levels: int, nodes: int) -> list[tuple[int, ...]]:
    """The tree of one sequence, one path after the other: (score down, depth up, index up)."""
    candidates: list[tuple[float, int, int, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for depth in range(1, levels + 1):
        level: list[tuple[float, int, int, tuple[int, ...]]] = []
        for score, path in frontier:
            probs = logits(b, path).log_softmax(-1)
            for token in probs.topk(width).indices.tolist():
                level.append((-(score + probs[token].item()), depth, len(level), (*path, token)))
        candidates += level
        frontier = [(-score, path) for score, _, _, path in sorted(level)[:width]]
    kept = sorted(candidates)[:nodes]
    return [path for *_, path in sorted(kept, key=lambda one: one[1:3])]


@pytest.mark.parametrize(
    ("width", "levels", "nodes"), [(3, 4, 10), (4, 3, 36), (2, 5, 1), (5, 2, 7), (1, 4, 3)]
)
def test_the_likeliest_paths(width, levels, nodes):
    _, tree, paths = grow(random_logits, 3, width, levels, nodes)
    for b in range(3):
        assert paths[b] == by_looking(random_logits, b, width, levels, nodes)
        assert tree.depths[b].tolist() == [len(path) for path in paths[b]]


def test_published_dimensions():
    """Ten nodes of five levels get ten children each: 510 candidates, of which 59 are kept."""
    assert most_nodes(10, 6) == 510 and most_nodes(4, 1) == 4
    growth, tree, paths = grow(lambda b, path: random_logits(b, path).repeat(5), 1, 10, 6, 59)
    assert tree.parents.shape == (1, 59) and growth.expanded.parents.shape == (1, 50)
    assert paths[0] == by_looking(lambda b, path: random_logits(b, path).repeat(5), 0, 10, 6, 59)


@pytest.mark.parametrize("logits", [random_logits, sure, even, one_is_no_number])
@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20, 39])
def test_trees_are_closed_under_parents(logits, nodes):
    """With ties, with probability 1, and with what is no number."""
    _, tree, paths = grow(logits, 2, 3, 5, nodes)
    for b in range(2):
        assert len(set(paths[b])) == nodes, "siblings differ, and so do all paths"
        assert {path[:-1] for path in paths[b]} <= {(), *paths[b]}
        assert all(parent < i for i, parent in enumerate(tree.parents[b].tolist()))


def test_ties_are_told_apart_by_depth_and_place():
    """A drafter that is sure drafts a chain first: each of its nodes scores as high as the one above."""
    _, _, paths = grow(sure, 2, 3, 5, 5)
    assert paths == [[tuple((b + i) % ROWS for i in range(n)) for n in range(1, 6)] for b in range(2)]
    _, _, paths = grow(even, 1, 3, 3, 6)
    assert [len(path) for path in paths[0]] == [1, 1, 1, 2, 2, 2], "longer paths of even odds are less likely"
    assert len({path[:1] for path in paths[0][3:]}) == 1


def test_a_node_goes_through_the_drafter_behind_its_ancestors():
    growth, _, _ = grow(random_logits, 2, 3, 4, 5)
    expanded = growth.expanded
    assert expanded.parents.shape == (2, 9)
    assert expanded.depths.tolist() == [[1] * 3 + [2] * 3 + [3] * 3] * 2
    assert all(p < i - i % 3 for row in expanded.parents.tolist() for i, p in enumerate(row))


def test_scores_are_in_float32():
    """In bfloat16 most of these paths would score the same."""

    def close(b: int, path: tuple[int, ...]) -> torch.Tensor:
        return (0.1 * random_logits(b, path)).to(torch.bfloat16)

    _, _, paths = grow(close, 1, 4, 4, 12)
    assert paths[0] == by_looking(lambda b, path: close(b, path).float(), 0, 4, 4, 12)


def test_a_tree_with_one_more_level_is_the_one_made_anew():
    generator, tree = torch.Generator().manual_seed(1), None
    parents = torch.empty(2, 0, dtype=torch.int64)
    for depth in range(5):
        above = torch.randint(0, 3, (2, 3), generator=generator)
        tree = next_level(tree, above)
        among_all = above + parents.shape[1] - 3 if depth else torch.full_like(above, -1)
        parents = torch.cat([parents, among_all], dim=1)
        for found, expected in zip(tree.tensors, Tree.of(parents).tensors, strict=True):
            assert torch.equal(found, expected)
    assert tree.depths[0].tolist() == [1 + i // 3 for i in range(15)]
