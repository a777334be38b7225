"""Token trees of a draft model (SpecInfer, Miao et al. 2024; Sequoia, Chen et al. 2024).

The tree has a fixed shape. The draft model runs once for each level, over the nodes that have children: each of them
sees the known tokens and its own ancestors. Leaves never go through it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from methods.common.heads import Chosen, drawable
from methods.common.rank_trees import Level, Path, RankTrees, checked_paths, fill_tree, shaped
from methods.sps import SpeculativeSampling
from specbench.decoding.sampling import SamplingParams, sample_inverse_cdf
from specbench.decoding.state import Batch, Draft, Verified
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.paths import packaged
from specbench.system.settings import Count

if TYPE_CHECKING:
    from specbench.decoding.tree import Tree

FILE = "tree.json"
SHAPE = (1, 1, 3, 1, 1, 1, 1, 1)  # SpecInfer's, if neither a shape nor a counted tree is given


class DraftModelTree(SpeculativeSampling):
    """A draft model drafts a tree of tokens, level by level; see the module.

    Args:
        pair: with a draft model.
        tree: folder of a counted tree, which `specbench train sps_tree` makes.
        max_draft_tokens: most levels of the tree, each of which costs a pass; None: all.
        nodes: most nodes of these levels, of a counted tree the most frequently correct ones; None: all.
        shape: children of each node, level by level, in place of the counted tree. None
            without a counted tree: SpecInfer's 1, 1, 3, 1, 1, 1, 1, 1.
        sampling: how the children of a node are chosen when sampling. "distinct": drawn without replacement
            (Sequoia). "independent": drawn independently, so that a token may come twice (SpecInfer). "likeliest":
            the likeliest tokens, as in greedy decoding.

    Raises:
        UserError: the counted tree cannot be read.
    """

    def __init__(
        self,
        pair: Pair,
        tree: str | None = None,
        max_draft_tokens: Count | None = None,
        nodes: Count | None = None,
        shape: list[Count] | None = None,
        sampling: Literal["distinct", "independent", "likeliest"] = "distinct",
    ):
        super().__init__(pair)
        rows = self.head.rows
        counted = None if tree is None or shape is not None else load_tree(tree)
        paths = counted or shaped(shape or SHAPE)
        self.trees = RankTrees(paths, leaves_last=True, levels=max_draft_tokens, nodes=nodes, rows=rows)
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth
        self.sampling, self.deterministic = sampling, sampling == "likeliest"
        if not self.deterministic:
            self.siblings = max(Counter(path[:-1] for path in self.trees.paths).values())

    @staticmethod
    def draws_trees(settings: Mapping[str, Any]) -> bool:
        """Whether children are drawn."""
        return settings.get("sampling") != "likeliest"

    draws = draws_trees  # whatever it draws is a tree

    def draft(self, batch: Batch) -> Draft:
        """Drafts the tree level by level, as deep as the sequence with most room can use it."""
        tree, levels, nodes = self.trees.of(batch)
        n = self._lacking(batch)  # the last token that was accepted may have been a leaf
        self._leaves = [level.leaves for level in levels]

        def filled(batch: Batch) -> Chosen:
            return self._filled(batch, n, tree, levels)

        key = ("draft", n, nodes, len(levels))
        drafted = self.model.run_batch(batch, self._layout.cache, key, filled, entries=nodes)
        fed = [n, *(level.inner for level in levels[:-1])]
        read = sum(self._pass_bytes(batch.size * tokens) for tokens in fed)
        return Draft(*drafted, tree=tree, bytes_read=read)

    def _filled(self, batch: Batch, n: int, tree: Tree, levels: list[Level]) -> Chosen:
        """Tokens [b, k] and, where they were drawn, the distributions [b, k, vocab]; n tokens are fed first."""

        def logits_of(depth: int, tokens: torch.Tensor | None) -> torch.Tensor:
            if tokens is None:
                return self._next(batch, batch.last_tokens(n), 1 - n)[0].unsqueeze(1)
            return self._level(batch, tokens, 1 + levels[depth - 1].start, tree)

        def choose(depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            level = levels[depth]
            draws = batch.draws(depth, level.most_siblings)
            return self._children(logits, level, batch.decoding, draws)

        tokens, probs = fill_tree(levels, logits_of, choose)
        return tokens, None if probs is None else self.head.widen(probs)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Moves the draft model's entries of the accepted path after the known tokens."""
        self._layout.commit(batch, verified.count, verified.counts, verified.path)
        for slot, (length, count) in enumerate(zip(batch.lengths, verified.counts)):
            # Only the device knows whether the path ended with a leaf: if it may have, that token is fed again.
            self._fed[slot] = length + count - (count > 0 and self._leaves[count - 1])

    def _level(self, batch: Batch, ids: torch.Tensor, offset: int, tree: Tree) -> torch.Tensor:
        """One pass over the nodes [b, n] of a level, the first of them node `offset` - 1 -> logits [b, n, rows]."""
        ctx = self._layout.place(batch, ids.shape[1], offset, tree)
        hidden = self.model.run_layers(ids, self._layout.cache, ctx)
        return self.head.logits(self.model.norm(hidden))

    def _children(
        self, logits: torch.Tensor, level: Level, decoding: SamplingParams, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses the nodes of a level.

        Args:
            logits: [b, m, rows] after the nodes that have children.
            level: n nodes.
            decoding: how tokens are chosen.
            uniforms: [b, siblings] to draw with; None when greedy.

        Returns:
            Tokens [b, n] and, where they were drawn, the distributions [b, n, rows] that they were drawn from.
        """
        parents, order = level.parents, level.order
        if uniforms is None or self.deterministic:
            return self.head.ids(level.likeliest(logits)), None
        probs = decoding.probs(logits)
        if self.sampling == "distinct":
            tokens, drawn_from = draws_without_replacement(probs, uniforms)
            return self.head.ids(tokens[:, parents, order]), drawn_from[:, parents, order]
        drawn_from = probs[:, parents]
        return self.head.ids(drawable(sample_inverse_cdf(drawn_from, uniforms[:, order]))), drawn_from


def draws_without_replacement(
    probs: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws different tokens from each distribution, one after the other.

    Once all of a distribution is drawn, the next token is drawn uniformly from the others.

    Args:
        probs: [b, m, rows].
        uniforms: [b, s] numbers in [0, 1) for s draws from each.

    Returns:
        Tokens [b, m, s] and the distributions [b, m, s, rows] of each draw, given those before it.
    """
    left, others = probs, torch.ones_like(probs)
    tokens: list[torch.Tensor] = []
    drawn_from: list[torch.Tensor] = []
    for uniform in uniforms.unbind(1):
        q = left
        if tokens:
            total = left.sum(-1, keepdim=True)
            q = torch.where(total == 0, others / others.sum(-1, keepdim=True), left / total)
        token = drawable(sample_inverse_cdf(q, uniform.unsqueeze(1).expand(q.shape[:2])))
        tokens.append(token)
        drawn_from.append(q)
        left, others = (rest.scatter(-1, token.unsqueeze(-1), 0.0) for rest in (left, others))
    return torch.stack(tokens, dim=2), torch.stack(drawn_from, dim=2)


def load_tree(folder: str) -> list[Path]:
    """The paths of a counted tree, the most frequent ones first.

    Raises:
        UserError: it cannot be read, or is no tree.
    """
    path = packaged(folder) / FILE
    if not path.is_file():
        raise UserError(f"no counted tree '{path}': `specbench train sps_tree` makes one")
    try:
        paths = [tuple(map(int, ranks)) for ranks in json.loads(path.read_text())["tree"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the counted tree '{path}' is broken ({error!r})") from error
    return checked_paths(paths, f"the counted tree '{path}'")
