"""Token trees: which nodes lie on the path to each node, and how deep it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a draft that is a tree. A static tree is made once and used in every round.

    Attributes:
        parents: [b or 1, k] index of each node's parent, -1 for children of the pending token. Parents stand before
            their children.
        on_path: [b or 1, k, k] which nodes lie on the path to each node, itself included.
        depths: [b or 1, k] nodes on that path.
        widest: a bound on the children of one node, for trees of drawn tokens; None: k.
    """

    parents: torch.Tensor
    on_path: torch.Tensor
    depths: torch.Tensor
    widest: int | None = None

    @classmethod
    def of(cls, parents: torch.Tensor, widest: int | None = None) -> Tree:
        """The tree of `parents`, [b, k], or [k] for one that all sequences share."""
        parents = parents if parents.dim() == 2 else parents.unsqueeze(0)
        on_path = ancestors(parents)
        return cls(parents, on_path, on_path.sum(-1), widest)

    def visible(self) -> torch.Tensor:
        """[b or 1, 1 + k, 1 + k] which of the pending token and the nodes each of them attends to."""
        seen = torch.nn.functional.pad(self.on_path, (1, 0, 1, 0))
        seen[..., 0] = True
        return seen

    def offsets(self) -> torch.Tensor:
        """[b or 1, 1 + k] positions of the pending token and the nodes behind the pending token's."""
        return torch.nn.functional.pad(self.depths, (1, 0))

    def siblings_before(self) -> torch.Tensor:
        """[b or 1, k] how many children of the same parent stand before each node."""
        return (self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)).tril(-1).sum(-1)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes lie on the path to each node of a tree, itself included.

    Args:
        parents: [..., k] as in `Tree`.

    Returns:
        [..., k, k] bool, a row for each node.
    """
    k = parents.shape[-1]
    nodes = torch.arange(k, device=parents.device)
    closure = torch.eye(k, dtype=torch.bool, device=parents.device).expand(*parents.shape, k)
    parent = torch.where(parents < 0, nodes, parents)
    for _ in range(max(k - 1, 0).bit_length()):  # each doubling reaches twice as far towards the root
        closure = closure | closure.gather(-2, parent.unsqueeze(-1).expand(closure.shape))
        parent = parent.gather(-1, parent)
    return closure
