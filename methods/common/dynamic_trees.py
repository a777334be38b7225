"""Trees that grow where a drafter is sure (EAGLE-2, Li et al. 2024): the likeliest paths, whatever their shape.

A path's score is the sum of the logarithms of its tokens' probabilities under the drafter, at temperature 1. Level by
level the `width` nodes with the best scores get `width` children each. All of them are candidates, and those with the
best scores become the tree.

If all tokens of a level are guessed at once, whatever precedes them, the best tree is found directly
(`tree_of_marginals`; DDTree, arXiv 2604.12989).

Nothing is read from the device: all sequences of a batch have equally many candidates, levels and nodes.
"""

from __future__ import annotations

import torch

from methods.common.rank_trees import likeliest_ids
from specbench.decoding.device import on_device
from specbench.decoding.tree import Tree


def most_nodes(width: int, levels: int) -> int:
    """Number of candidates of `levels` levels."""
    return width + (levels - 1) * width**2


class Growth:
    """The candidates of a batch of trees, while they grow: `add` the children of the first state, then `expand`, `add`.

    Candidates are in the order of their levels, which also breaks ties between scores: a node's score is never above
    its parent's, so the parent of a chosen node is always chosen, too, even if probabilities round to 1.

    Args:
        width: nodes of a level that get children, and children of each.
    """

    def __init__(self, width: int):
        self.width = width
        self.expanded: Tree | None = None  # the nodes that got children, by level
        self._tokens: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []  # among all candidates
        self._begins = 0  # the first candidate of the newest level
        self._frontier: torch.Tensor | None = None  # [b, width] the candidates that get children
        self._above: torch.Tensor | None = None  # [b, width] their scores

    def add(self, logits: torch.Tensor) -> None:
        """Adds a level.

        Args:
            logits: [b, n, rows] after the pending token (n is 1) or those of `expand`.
        """
        tokens, scores = _likeliest(logits, self.width)
        if self._above is not None:
            scores = scores + self._above.unsqueeze(-1)
        if self._frontier is None:
            parents = torch.full_like(tokens, -1)
        else:
            self._begins += self._tokens[-1].shape[1]
            parents = self._frontier.unsqueeze(-1).expand_as(tokens)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(parents.flatten(1))

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the nodes of the newest level that get children, the best ones first.

        Returns:
            Their tokens [b, width], as rows of the drafter's head; and the index [b, width] of each one's parent
            among those chosen at the level above.
        """
        best = _best_first(self._scores[-1])[:, : self.width]
        self._frontier = self._begins + best
        self._above = self._scores[-1].gather(1, best)
        above = best // self.width
        self.expanded = next_level(self.expanded, above)
        return self._tokens[-1].gather(1, best), above

    def best(self, nodes: int) -> tuple[torch.Tensor, Tree]:
        """The candidates with the best scores.

        Args:
            nodes: how many, at most as many as there are.

        Returns:
            Tokens [b, nodes], as rows of the drafter's head, and their tree.
        """
        return _best_nodes(self._tokens, self._scores, self._parents, nodes)


def next_level(tree: Tree | None, above: torch.Tensor) -> Tree:
    """Returns a tree with one more level, which is cheaper than a new tree.

    Args:
        tree: whose last n nodes are its deepest level; None: there is no level yet.
        above: [b, n] the index of each new node's parent among these; not used for the first level.
    """
    if tree is None:
        return Tree.of(torch.full_like(above, -1))
    (b, n), m = above.shape, tree.parents.shape[1]
    parents = torch.cat([tree.parents, above + m - n], dim=1)
    depths = torch.cat([tree.depths, tree.depths[:, -n:] + 1], dim=1)
    # A new node sees what its parent sees, and itself.
    seen_above = tree.visible[:, -n:].gather(1, above.unsqueeze(-1).expand(-1, -1, 1 + m))
    itself = torch.eye(n, dtype=torch.bool, device=above.device).expand(b, n, n)
    seen = torch.cat([seen_above, itself], dim=2)
    return Tree(parents, depths, torch.cat([torch.nn.functional.pad(tree.visible, (0, n)), seen], dim=1))


def tree_of_marginals(
    logits: torch.Tensor, children: torch.Tensor, width: int, nodes: int
) -> tuple[torch.Tensor, Tree]:
    """Returns the tree of `nodes` nodes with the greatest expected acceptance if levels are independent.

    A path's probability is the product of its tokens'. At most `nodes` paths of a level can be among the best.

    Args:
        logits: [b, levels, rows] of the tokens after the pending one, as many levels as the tree may have.
        children: `candidate_children` of `width`.
        width: paths of a level that are considered, at least `nodes` and at most as many as rows.
        nodes: of the tree.

    Returns:
        Tokens [b, nodes], as rows of the drafter's head, and their tree.
    """
    tokens, scores = _likeliest(logits, width)
    above, ranks = children
    all_tokens, all_scores = [tokens[:, 0]], [scores[:, 0]]
    all_parents = [torch.full_like(tokens[:, 0], -1)]
    for level in range(1, logits.shape[1]):
        candidates = all_scores[-1][:, above] + scores[:, level, ranks]
        best = _best_first(candidates)[:, :width]
        all_scores.append(candidates.gather(1, best))
        all_tokens.append(tokens[:, level].gather(1, ranks[best]))
        all_parents.append((level - 1) * width + above[best])
    return _best_nodes(all_tokens, all_scores, all_parents, nodes)


def candidate_children(width: int, device: torch.device) -> torch.Tensor:
    """Returns those children of a level's best paths that may be among the `width` best of the next level.

    At least (i + 1)(r + 1) - 1 others are no worse than the child of rank r of the i-th best path.

    Returns:
        [2, n] indices of paths, and ranks of their children.
    """
    pairs = [(i, rank) for i in range(width) for rank in range(width // (i + 1))]
    return on_device([*zip(*pairs)], device)


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest rows [..., count] of logits [..., rows], and the logarithms of their probabilities."""
    tokens = likeliest_ids(logits, count)
    log_probs = logits.gather(-1, tokens).float() - logits.float().logsumexp(-1, keepdim=True)
    # The difference is never above 0, as the sum is never below its largest term. NaN must neither win nor come without
    # its parent.
    return tokens, log_probs.clamp(max=0).nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def _best_nodes(
    tokens: list[torch.Tensor], scores: list[torch.Tensor], parents: list[torch.Tensor], nodes: int
) -> tuple[torch.Tensor, Tree]:
    """The candidates with the best scores.

    Args:
        tokens: [b, n] of each level's candidates.
        scores: of each level, likewise.
        parents: of each level, likewise: indices among all candidates, -1 for children of the pending token.
        nodes: how many, at most as many as there are.

    Returns:
        Tokens [b, nodes] and their tree.
    """
    chosen = _best_first(torch.cat(scores, dim=1))[:, :nodes].sort(dim=1).values
    above = torch.cat(parents, dim=1).gather(1, chosen)
    above = torch.where(above < 0, above, torch.searchsorted(chosen, above))
    return torch.cat(tokens, dim=1).gather(1, chosen), Tree.of(above)


def _best_first(scores: torch.Tensor) -> torch.Tensor:
    """Indices [b, n] that sort scores [b, n] from the best one down; the sort is stable."""
    return scores.sort(dim=1, descending=True, stable=True).indices
