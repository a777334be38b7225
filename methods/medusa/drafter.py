"""Medusa-1's drafter: a static tree of ranks, filled by heads on the state after the last accepted token.

The heads do not see the pending token: head i guesses the token i + 1 places after it, from the state before it (Cai et
al. 2024, section 2.1). The tree defines which ranks of which heads are combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from methods.common.heads import draft_head
from methods.common.rank_trees import likeliest_ids
from methods.common.state_heads import StateHeads
from methods.medusa.checkpoint import load_heads, save_for_vllm
from specbench.decoding.cpu.packed_linear import packed_linear
from specbench.decoding.drafter import Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from methods.common.rank_trees import Level
    from methods.medusa.heads import MedusaHeads
    from specbench.decoding.state import Batch
    from specbench.models.pairs import Pair


class Medusa(StateHeads):
    """Drafts with heads on the target's states; see the module. The folder is in the authors' or vLLM's form."""

    needs = Needs(part="medusa", trims=True)
    heads: MedusaHeads

    def load(self, pair: Pair, weights: str) -> tuple[int, Sequence[tuple[int, ...]] | None]:
        """Loads the heads, and trims their own output matrices as the target's head."""
        self.heads, settings, ids = load_heads(weights, self.target, pair.expansion)
        self.head = draft_head(pair, self.target, ids)
        rows = self.head.token_ids if ids is None else None
        outputs = [] if self.heads.output is None else self.heads.output
        self._outputs = [packed_linear(one if rows is None else one[rows], None) for one in outputs]
        return self.heads.heads, settings.get("tree")

    def fill(self, batch: Batch, states: torch.Tensor, levels: Sequence[Level]) -> torch.Tensor:
        """Tokens [b, k] by the likeliest ones of each head."""
        states = self.heads(states, len(levels))
        if self._outputs:
            parts = zip(self._outputs, states.unbind(1))
            logits = torch.stack([output(some) for output, some in parts], dim=1)
        else:
            logits = self.head.logits(states)
        likely = self.head.ids(likeliest_ids(logits, max(level.most_ranks for level in levels)))
        return torch.cat([likely[:, depth, level.ranks] for depth, level in enumerate(levels)], dim=1)

    def draft_bytes(self, levels: int) -> float:
        """Bytes of the first heads; if the output matrix is the target's, one product with it serves all of them."""
        output = sum(map(weight_bytes, self._outputs[:levels])) if self._outputs else self.head.bytes
        return self.heads.weight[:levels].nbytes + self.heads.bias[:levels].nbytes + output

    def export(self, folder: Path) -> None:
        """Writes the heads as vLLM reads them; it drafts chains of their likeliest tokens, no tree."""
        if self.head.token_ids is not None:
            raise UserError("heads that score only some tokens are not exported: set vocab=full")
        save_for_vllm(self.heads, self.target.lm_head.weight, folder, self.target.dtype)
