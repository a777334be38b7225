"""EAGLE's drafters: one layer estimates the target's next state, and the target's head turns it into tokens.

A tree grows from the output of the last true pair (`methods.eagle.base`). Each level is one pass over the nodes that
get children: leaves never go through the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from methods.common.dynamic_trees import Growth, most_nodes
from methods.common.rank_trees import EAGLE_TREE, RankTrees, checked_paths, fill_with_likeliest
from methods.eagle.base import EagleDrafter
from specbench.decoding.drafter import Needs
from specbench.decoding.state import Batch, Draft
from specbench.decoding.tree import Tree
from specbench.models.pairs import Pair
from specbench.system.settings import Count

if TYPE_CHECKING:
    import torch

    from methods.common.draft_layer import CachedLayer


class Eagle(EagleDrafter):
    """EAGLE-1: a static tree of ranks, filled level by level; see the module.

    Not as published: when sampling, the tree holds the likeliest tokens and is verified by the target's own draws. The
    authors draw its tokens.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        nodes: most nodes of the tree, the most frequently correct ones first; None: all that config.json names. A
            checkpoint without a tree gets the authors' of 25 nodes, the likeliest ranks first.
        max_draft_tokens: most levels of the tree, each of which costs a pass; None: all.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="eagle", trims=True)

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count | None = 25,
        max_draft_tokens: Count | None = None,
    ):
        model, settings = _loaded(pair, weights)
        super().__init__(pair, model)
        tree = settings.get("tree")
        paths = checked_paths(tree, f"the tree in '{weights}'") if tree else EAGLE_TREE
        rows = self.head.rows
        self.trees = RankTrees(paths, leaves_last=True, levels=max_draft_tokens, nodes=nodes, rows=rows)
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth

    def draft(self, batch: Batch) -> Draft:
        """Fills the tree from the likeliest followers of each node."""
        tree, levels, nodes = self.trees.of(batch)

        def filled(batch: Batch, out: torch.Tensor) -> list[torch.Tensor]:
            def logits_of(depth: int, tokens: torch.Tensor | None) -> torch.Tensor:
                nonlocal out
                if tokens is not None:
                    above = levels[depth - 1]
                    features = out[:, above.parents[: above.inner]]
                    out = self._level(batch, features, tokens, above.start, tree)
                return self.head.logits(out)

            return [fill_with_likeliest(levels, logits_of, self.head.ids)]

        key, outputs = ("draft", nodes, len(levels)), self._outputs[: batch.size]
        drafted = self._layer_cache.run(batch, key, filled, outputs, entries=nodes)
        return Draft(*drafted, tree=tree, bytes_read=len(levels) * self._bytes)


class DynamicEagle(EagleDrafter):
    """Base of EAGLE-2 and EAGLE-3: a tree that grows where the drafter is confident.

    In a batch every tree has the levels of the sequence with most room: in another's, deeper nodes are wasted.

    Args:
        pair: as in `EagleDrafter`.
        model: likewise.
        nodes: most nodes of a tree; the authors count the pending token, too.
        width: nodes of a level that get children, and children of each.
        max_draft_tokens: levels, of which each but the first costs a pass; the authors count these passes.
    """

    def __init__(
        self,
        pair: Pair,
        model: CachedLayer,
        nodes: int,
        width: int,
        max_draft_tokens: int,
    ):
        super().__init__(pair, model)
        # A path has no more nodes than the tree: deeper levels would be passes for nothing.
        self.width, self.max_draft_tokens = min(width, self.head.rows), min(max_draft_tokens, nodes)
        self.max_nodes = min(nodes, most_nodes(self.width, self.max_draft_tokens))
        self.expanded = self.width * (self.max_draft_tokens - 1)

    def draft(self, batch: Batch) -> Draft:
        """Lets the tree grow level by level, and keeps its likeliest nodes."""
        width = min(self.width, self.head.rows)
        levels = min(batch.max_draft, batch.max_nodes)
        nodes = min(self.max_nodes, batch.max_nodes, most_nodes(width, levels))

        def grown(batch: Batch, out: torch.Tensor) -> list[torch.Tensor]:
            growth = Growth(width)
            growth.add(self.head.logits(out))
            for depth in range(levels - 1):
                rows, above = growth.expand()
                features = out.gather(1, above.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
                out = self._level(batch, features, self.head.ids(rows), depth * width, growth.expanded)
                growth.add(self.head.logits(out))
            rows, tree = growth.best(nodes)
            return [self.head.ids(rows), *(tree.tensors if width > 1 else ())]  # otherwise it is a chain

        key, outputs = ("draft", levels, nodes), self._outputs[: batch.size]
        tokens, *tree = self._layer_cache.run(batch, key, grown, outputs, entries=width * (levels - 1))
        read = self._once + levels * self._bytes
        return Draft(tokens, tree=Tree(*tree) if tree else None, bytes_read=read)


class Eagle2(DynamicEagle):
    """EAGLE-2: EAGLE-1's drafting model and a tree that grows where it is confident.

    See `methods.common.dynamic_trees`.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        nodes: as in `DynamicEagle`; the published 60 count the pending token.
        width: as in `DynamicEagle`.
        max_draft_tokens: as in `DynamicEagle`; the published depth of 5 is one of 6 levels.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="eagle", trims=True)

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count = 59,
        width: Count = 10,
        max_draft_tokens: Count = 6,
    ):
        model, _ = _loaded(pair, weights)
        super().__init__(pair, model, nodes, width, max_draft_tokens)


def _loaded(pair: Pair, weights: str) -> tuple[CachedLayer, dict[str, Any]]:
    """The drafting model of a pair, and the content of its config.json."""
    from methods.eagle.checkpoint import load_eagle  # late: transformers' models take seconds to import

    return load_eagle(weights, pair.staged, pair.expansion)
