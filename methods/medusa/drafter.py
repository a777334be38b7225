"""Medusa-1's drafter: a static tree of ranks, filled from heads on the state after the last accepted token.

The heads do not see the pending token: head i guesses i + 1 places after it from the state in front of it (Cai et al.
2024, section 2.1). The tree says which ranks of which heads are combined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from methods.common.heads import DraftHead, draft_head, target_ids
from methods.common.rank_trees import RankTrees, chosen_paths, likeliest_ids
from methods.medusa.checkpoint import load_heads, save_for_vllm
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.state import NORMED, Batch, Draft, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.paths import packaged
from specbench.system.settings import Count

if TYPE_CHECKING:
    from pathlib import Path

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill


class Medusa(Drafter):
    """Drafts with heads on the target's states; see the module.

    Not as published: with temperature the tree is verified by the target's own draws, which keeps its distribution; the
    authors' "typical acceptance" does not.

    Args:
        pair: with the target.
        weights: folder of the heads' checkpoint, the authors' or vLLM's.
        nodes: of the tree, the most frequently right ones first; None: all that config.json names. Heads without a tree
            get the authors' of 63 nodes.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.common.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.

    Raises:
        UserError: the heads cannot be read, do not fit the target, or have no tree of so many nodes.
    """

    needs = Needs(part="medusa")
    deterministic = True
    taps = (NORMED,)

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count | None = None,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        self.target = target = pair.staged
        self.heads, settings, ids = load_heads(packaged(weights), target, pair)
        if ids is not None and vocab_map is not None:
            raise UserError(
                f"the heads in '{weights}' score some tokens alone, by a map of their own: set vocab=full"
            )
        self.head = (
            draft_head(pair, target, vocab_map, vocab_size)
            if ids is None
            else DraftHead(target, target_ids(pair), ids)
        )
        self.trees = RankTrees(chosen_paths(settings.get("tree"), self.heads.heads, nodes, self.head.rows))
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth
        self.ranks = 1 + max(rank for path in self.trees.paths for rank in path)
        self._output: torch.Tensor | None = self.heads.output
        if self._output is not None and self.head.token_ids is not None and ids is None:
            self._output = self._output[:, self.head.token_ids]
        output_bytes = 0 if self._output is None else self._output.nbytes
        blocks = weight_bytes(self.heads) - (0 if self.heads.output is None else self.heads.output.nbytes)
        # The rows of all heads go through the target's head in one product.
        self._bytes = blocks + (output_bytes or self.head.bytes)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for the state that each sequence drafts from."""
        self._states = slots.tensor(target.hidden_size, dtype=target.dtype)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Notes the state of the prompt's last token."""
        self._states[slot] = prefill.hidden_states[NORMED][0, -1]

    def draft(self, batch: Batch) -> Draft:
        """Fills the tree from the likeliest tokens of each head."""
        tree, levels, nodes = self.trees.of(batch)

        def filled(_batch: Batch, states: torch.Tensor) -> list[torch.Tensor]:
            states = self.heads(states)[:, : len(levels)]
            if self._output is None:
                logits = self.head.logits(states)
            else:
                logits = torch.einsum("bkd,kvd->bkv", states, self._output[: len(levels)])
            likely = self.head.ids(likeliest_ids(logits, self.ranks))
            tokens = [likely[:, depth, level.ranks] for depth, level in enumerate(levels)]
            return [torch.cat(tokens, dim=1)]

        key = ("draft", nodes, len(levels))
        drafted = self.target.run_batch(batch, self.heads, key, filled, self._states[: batch.size])
        return Draft(*drafted, tree=tree, bytes_read=self._bytes)

    def export(self, folder: Path) -> None:
        """Writes the heads as vLLM reads them, which has chains of their likeliest tokens in place of the tree."""
        if self.head.token_ids is not None:
            raise UserError("heads that score some tokens alone are not exported: set vocab=full")
        save_for_vllm(self.heads, self.target.lm_head.weight, folder, self.target.dtype)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes the state of the last token that was accepted."""
        self._states[: batch.size] = verified.last(verified.hidden_states[NORMED])
