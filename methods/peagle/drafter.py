"""P-EAGLE's drafter: one pass of EAGLE-3's drafting model over the new pairs and over masks gives a whole draft.

The output of the last true pair gives the first draft token, and each mask after it gives another. The pass also feeds
the accepted tokens, so a round has only one. The next pass overwrites what masks leave in the layer's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from methods.common.heads import Chosen, chosen_at_once
from methods.eagle.base import EagleDrafter
from specbench.decoding.drafter import Needs
from specbench.decoding.state import Batch, Draft
from specbench.models.pairs import Pair
from specbench.system.settings import Count, Natural, Positive

if TYPE_CHECKING:
    from methods.eagle3.model import Eagle3Model
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots


class ParallelEagle(EagleDrafter):
    """P-EAGLE; see the module.

    A draft token does not depend on the draft tokens before it: when sampling, each is drawn from its own distribution,
    with which it is verified.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        max_draft_tokens: draft length.
        layers: as in `Eagle3`.
        rope_theta: as in `Eagle3`.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="peagle")
    deterministic = False
    model: Eagle3Model

    def __init__(
        self,
        pair: Pair,
        weights: str,
        max_draft_tokens: Count = 7,
        layers: list[Natural] | None = None,
        rope_theta: Positive | None = None,
    ):
        from methods.eagle3.checkpoint import load_eagle3  # late: transformers' models take seconds to import

        model = load_eagle3(weights, pair.staged, pair.expansion, layers, rope_theta, masks=True)
        super().__init__(pair, model)
        self.max_draft_tokens = self.outputs = max_draft_tokens
        self.expanded = max_draft_tokens - 1

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the layers' cache, and notes what a mask is made of."""
        super().open(slots, target)
        token = torch.full((1, 1), cast("int", self.model.config.mask_token_id), device=slots.device)
        self._mask = self.model.mask_features(), self.model.embed(token, target)

    def draft(self, batch: Batch) -> Draft:
        """Chooses all tokens from the outputs of the newest pass."""
        k = batch.max_draft

        def filled(batch: Batch, outputs: torch.Tensor) -> Chosen:
            return chosen_at_once(self.head, self.head.logits(outputs[:, :k]), batch)

        drafted = self._layer_cache.run(batch, ("draft", k), filled, self._outputs[: batch.size], entries=0)
        return Draft(*drafted, bytes_read=self._bytes)

    def _followed(
        self, features: torch.Tensor, embeds: torch.Tensor, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """True pairs, and masks after the last one of each sequence."""
        b, n = features.shape[:2]
        places = torch.arange(n + self.outputs - 1, device=features.device)
        last = n - 1 if count is None else count.unsqueeze(1)
        masked = (places > last).expand(b, -1).unsqueeze(-1)
        mask_features, mask_embeds = self._mask
        return _replaced(features, mask_features, masked), _replaced(embeds, mask_embeds, masked)


def _replaced(pairs: torch.Tensor, mask: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Extends a part of pairs [b, n, h] to [b, n + m, h], with a mask's [1, 1, h] wherever `masked` is true."""
    room = torch.nn.functional.pad(pairs, (0, 0, 0, masked.shape[1] - pairs.shape[1]))
    return torch.where(masked, mask, room)
