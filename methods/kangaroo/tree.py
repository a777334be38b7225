"""Kangaroo's tree (Liu et al., NeurIPS 2024, section 4.2): the likeliest paths under the adapter, level by level.

Every node goes through the target's first layers, in the target's own cache, and is verified from there on. So draft
and verification use the same entries, and everything that is computed is verified.
"""

from __future__ import annotations

import torch

from methods.common.dynamic_trees import next_level
from methods.common.heads import StopTracker
from methods.common.rank_trees import likeliest_ids
from methods.kangaroo.drafter import Kangaroo
from specbench.decoding.state import Batch, Draft, Resume
from specbench.decoding.tree import Tree
from specbench.models.pairs import Pair
from specbench.system.settings import Count, Probability


class KangarooTree(Kangaroo):
    """Drafts a tree of `width` nodes a level; see the module.

    A level has the likeliest paths among the likeliest followers of the level above. A path's confidence
    is the product of its tokens' probabilities under the adapter (temperature 1).

    Not as published: the root is the pending token, not the first draft token, and nodes without a child all stay. The
    authors drop half of them, but here they have passed the first layers, and the target completes them. With
    temperature the tree is verified by the target's own draws, so that the text is that of autoregressive decoding.

    Args:
        pair: with the target.
        weights: as in `Kangaroo`.
        exit_layer: as in `Kangaroo`.
        width: nodes of a level (K).
        max_draft_tokens: levels; the paper bounds the size of a tree and does not state it.
        confidence_threshold: drafting stops after a level whose likeliest path has a confidence below it (eta); 0: the
            number of levels is constant.

    Raises:
        UserError: as in `Kangaroo`.
    """

    deterministic = True

    def __init__(
        self,
        pair: Pair,
        weights: str,
        exit_layer: Count | None = None,
        width: Count = 10,
        max_draft_tokens: Count = 6,
        confidence_threshold: Probability = 0.4,
    ):
        super().__init__(pair, weights, exit_layer, max_draft_tokens, confidence_threshold)
        self.width = width
        self.max_nodes = width * max_draft_tokens

    def draft(self, batch: Batch) -> Draft:
        """Drafts level by level; verification resumes after the exit layer with the states of all nodes."""
        width = min(self.width, self.head.rows, batch.max_nodes)
        levels = min(batch.max_draft, batch.max_nodes // width)
        feed, offset = self._begun(batch)
        states, tokens = [feed[:, -1:]], []
        scores = torch.zeros(batch.size, 1, device=feed.device)  # logarithms of the confidence of each path
        tree: Tree | None = None
        stop = StopTracker(self.confidence_threshold)
        for depth in range(levels):
            ids, scores, tree = self._level(batch, feed, offset, scores, tree, width)
            tokens.append(ids)
            offset = 1 + width * depth
            feed = self._shallow(batch, tokens[-1], offset, tree)
            states.append(feed)
            if not stop.continues_at(scores[:, 0].exp(), 1 + depth == levels):
                break
        self._states, self._depth = torch.cat(states, dim=1), len(tokens)
        return Draft(
            tokens=torch.cat(tokens, dim=1),
            tree=tree,
            candidates=None if stop.counts is None else stop.counts * width,
            resume=Resume(self.exit_layer, self._states),
            bytes_read=len(tokens) * self._draft_bytes
            + sum(self._shallow_bytes(of_level.shape[0] * of_level.shape[1]) for of_level in states),
        )

    def _level(
        self,
        batch: Batch,
        feed: torch.Tensor,
        offset: int,
        scores: torch.Tensor,
        tree: Tree | None,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, Tree]:
        """The next level.

        Args:
            batch: the running sequences.
            feed: [b, n, d] exit states of the level above; of the pending token for the first level.
            offset: of the first of them after the pending token.
            scores: [b, n] of the level above, [b, 1] for the first.
            tree: of the levels above; None for the first.
            width: nodes of a level.

        Returns:
            Token ids [b, width], scores [b, width], and the tree with this level.
        """
        n = feed.shape[1]

        def grown(
            batch: Batch, feed: torch.Tensor, scores: torch.Tensor, *above: torch.Tensor
        ) -> list[torch.Tensor]:
            tree = Tree(*above) if above else None
            adapted = self.adapter(feed, **self._layer_cache.arguments(batch, feed, offset, tree))
            # States in front of the pending token only fill the cache.
            logits = self.head.logits(adapted[:, -1:] if tree is None else adapted)
            followers = likeliest_ids(logits, width)
            log_probs = logits.gather(2, followers).float() - logits.float().logsumexp(-1, keepdim=True)
            scores, best = (scores.unsqueeze(2) + log_probs).flatten(1).topk(width)
            ids = self.head.ids(followers.flatten(1).gather(1, best))
            return [ids, scores, *next_level(tree, best // width).tensors]

        inputs = (feed, scores) if tree is None else (feed, scores, *tree.tensors)
        key = ("draft", n, offset, width)
        ids, scores, *tensors = self._layer_cache.run(batch, key, grown, *inputs, entries=offset + n)
        return ids, scores, Tree(*tensors, max_children=width)
