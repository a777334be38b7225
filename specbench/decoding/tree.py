"""Token trees: which nodes lie on the path to each node, and how deep it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from specbench.decoding.device import on_device


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a draft that is a tree. A static tree is made once and used in every round.

    Attributes:
        parents: [b or 1, k] index of each node's parent, -1 for children of the pending token. Parents precede their
            children.
        depths: [b or 1, k] nodes on the path to each node, itself included.
        visible: [b or 1, 1 + k, 1 + k] which of the pending token and the nodes each of them attends to.
        max_children: a bound on the children of one node, for trees of drawn tokens; None: k.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    visible: torch.Tensor
    _: KW_ONLY
    max_children: int | None = None

    @classmethod
    def of(cls, parents: torch.Tensor, max_children: int | None = None) -> Tree:
        """The tree of `parents`, [b, k], or [k] for one that all sequences share."""
        parents = parents if parents.dim() == 2 else parents.unsqueeze(0)
        seen = torch.nn.functional.pad(ancestors(parents), (1, 0, 1, 0))
        seen[..., 0].fill_(True)
        return cls(parents, seen[:, 1:, 1:].sum(-1), seen, max_children=max_children)

    @classmethod
    def of_lists(cls, parents: Sequence[Sequence[int]], device: torch.device) -> Tree:
        """The trees of `parents` on the host, equally many for each sequence, without the doublings of `ancestors`."""
        n = 1 + len(parents[0])
        width = -(-n // 8)  # bytes of a set of nodes, a bit each
        sets = bytearray()
        for tree_parents in parents:
            paths = [1]  # of the pending token: itself
            for i, parent in enumerate(tree_parents, 1):
                paths.append(paths[1 + parent] | 1 << i)
            for path in paths:
                sets += path.to_bytes(width, "little")
        bits = np.frombuffer(sets, dtype=np.uint8).reshape(len(parents), n, width)
        seen = on_device(np.unpackbits(bits, axis=2, count=n, bitorder="little"), device, torch.bool)
        return cls(on_device(parents, device), seen[:, 1:, 1:].sum(-1), seen)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its fields without `max_children`: `Tree(*tree.tensors)` is the same tree."""
        return self.parents, self.depths, self.visible

    @property
    def on_path(self) -> torch.Tensor:
        """[b or 1, k, k] which nodes lie on the path to each node, itself included."""
        return self.visible[:, 1:, 1:]

    def offsets(self) -> torch.Tensor:
        """[b or 1, 1 + k] positions of the pending token and the nodes after the pending token's."""
        return torch.nn.functional.pad(self.depths, (1, 0))

    def siblings_before(self) -> torch.Tensor:
        """[b or 1, k] how many children of the same parent precede each node."""
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
