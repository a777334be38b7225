"""The drafter of an MTP head: a chain, each token of which costs a pass of one layer and of the target's head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from methods.common.heads import Chosen, chosen_in_turn
from methods.eagle.base import EagleDrafter
from specbench.decoding.drafter import Needs
from specbench.decoding.state import Batch, Draft
from specbench.models.pairs import Pair
from specbench.system.settings import Count

if TYPE_CHECKING:
    import torch


class Mtp(EagleDrafter):
    """Drafts a chain; when sampling, tokens are drawn, and verified with the distributions they were drawn from.

    Args:
        pair: with the target.
        weights: folder of the head's checkpoint.
        max_draft_tokens: draft length.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="mtp", trims=True)
    deterministic = False

    def __init__(
        self,
        pair: Pair,
        weights: str,
        max_draft_tokens: Count = 3,
    ):
        from methods.mtp.checkpoint import load_mtp  # late: transformers' models take seconds to import

        model = load_mtp(weights, pair.staged, pair.expansion)
        super().__init__(pair, model)
        self.max_draft_tokens = max_draft_tokens

    def draft(self, batch: Batch) -> Draft:
        """Drafts token by token, each from the output of the one before."""
        k = batch.max_draft

        def chained(batch: Batch, out: torch.Tensor) -> Chosen:
            def after(j: int, before: torch.Tensor) -> torch.Tensor:
                nonlocal out
                if j:
                    out = self._level(batch, out, before.unsqueeze(1), j - 1)
                return self.head.logits(out[:, 0])

            return chosen_in_turn(self.head, batch, k, after)

        outputs = self._outputs[: batch.size]
        drafted = self._layer_cache.run(batch, ("draft", k), chained, outputs, entries=k - 1)
        return Draft(*drafted, bytes_read=k * self._bytes)
