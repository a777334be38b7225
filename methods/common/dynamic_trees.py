"""Trees that grow where a drafter is sure (EAGLE-2, Li et al. 2024): the likeliest paths, whatever their shape.

A path's score is the sum of the logarithms of its tokens' probabilities under the drafter, at temperature 1. Level by
level the `width` nodes with the best scores get `width` children each. All of them are candidates, and those with the
best scores become the tree.

Nothing is read from the device: all sequences of a batch have equally many candidates, levels and nodes.
"""

from __future__ import annotations

import torch

from methods.common.rank_trees import likeliest_ids
from specbench.decoding.tree import Tree


def most_nodes(width: int, levels: int) -> int:
    """The number of candidates of so many levels."""
    return width + (levels - 1) * width**2


class Growth:
    """The candidates of a batch of trees, while they grow: `add` the children of the first state, then `expand`, `add`.

    Candidates stand in the order of their levels. Equal scores are told apart by that order: a node's score is never
    above its parent's, so with a node its parent is always among the best, even where probabilities round to 1.

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
            logits: [b, n, rows] after the pending token (n is 1) or the nodes that `expand` gave.
        """
        tokens = likeliest_ids(logits, self.width)
        log_probs = logits.gather(-1, tokens).float() - logits.float().logsumexp(-1, keepdim=True)
        # The difference is never above 0, as the sum is never below its largest part.
        scores = log_probs.clamp(max=0)
        if self._above is not None:
            scores = scores + self._above.unsqueeze(-1)
        # What is no number must not win, nor come without its parent.
        scores = scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
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
            Their tokens [b, width], as rows of the drafter's head; and for each [b, width] the index of its parent
            among those that were chosen at the level above.
        """
        best = _best_first(self._scores[-1])[:, : self.width]
        self._frontier = self._begins + best
        self._above = self._scores[-1].gather(1, best)
        above = best // self.width
        if self.expanded is None:
            self.expanded = Tree.of(torch.full_like(best, -1))
        else:
            before = self.expanded.parents
            self.expanded = Tree.of(torch.cat([before, before.shape[1] - self.width + above], dim=1))
        return self._tokens[-1].gather(1, best), above

    def best(self, nodes: int) -> tuple[torch.Tensor, Tree]:
        """The candidates with the best scores.

        Args:
            nodes: how many, at most as many as there are.

        Returns:
            Tokens [b, nodes], as rows of the drafter's head, and their tree.
        """
        chosen = _best_first(torch.cat(self._scores, dim=1))[:, :nodes].sort(dim=1).values
        parents = torch.cat(self._parents, dim=1).gather(1, chosen)
        new_parents = torch.where(parents < 0, parents, torch.searchsorted(chosen, parents))
        return torch.cat(self._tokens, dim=1).gather(1, chosen), Tree.of(new_parents)


def _best_first(scores: torch.Tensor) -> torch.Tensor:
    """Indices [b, n] that sort scores [b, n] from the best one down, equal ones as they stand."""
    return scores.sort(dim=1, descending=True, stable=True).indices
