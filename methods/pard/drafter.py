"""PARD's drafter: a draft model that was fine-tuned to fill several mask tokens in one pass (An et al. 2025).

The pass reads the tokens that are new to the draft model, then copies of one mask token, with plain causal attention.
The state of the last new token predicts the first draft token, and each mask's state another. Keys and values of masks
are past the sequence's end, where the next pass overwrites them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from methods.common.heads import chosen_at_once
from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Needs
from specbench.decoding.state import Batch, Draft, Verified
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MASK = "pard_token"  # of config.json, as in the authors' checkpoints


class ParallelDraft(SpeculativeSampling):
    """PARD; the draft model is the pair's part `pard`, whose config.json names the mask token.

    A draft token does not depend on the draft tokens before it: when sampling, each is drawn from its own distribution,
    with which it is verified.

    Args:
        pair: with a draft model.
        max_draft_tokens: draft length.

    Raises:
        UserError: the draft model names no mask token, or one for which it has no embedding.
    """

    needs = Needs(draft_model=True, part="pard", trims=True)

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 12,
    ):
        super().__init__(pair, max_draft_tokens, 0.0)
        self.mask = mask_token(self.model.config)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes that the draft model has seen the tokens known when it drafted, but only masks of the draft."""
        self._drafted = min(self._drafted, 1)
        super().commit(batch, verified)

    def _steps(self, batch: Batch, n: int, k: int) -> Draft:
        """Drafts k tokens in one pass over the n newest tokens and k - 1 masks."""
        newest = batch.last_tokens(n)
        ids = torch.cat([newest, newest.new_full((batch.size, k - 1), self.mask)], dim=1)
        ctx = self._layout.place(batch, n + k - 1, 1 - n)
        hidden = self.model.run_layers(ids, self._layout.cache, ctx)[:, n - 1 :]
        chosen = chosen_at_once(self.head, self.head.logits(self.model.norm(hidden)), batch)
        return Draft(*chosen, bytes_read=self._draft_bytes(batch, n, k))

    def _draft_bytes(self, batch: Batch, n: int, k: int) -> float:
        """Bytes of weights that the one pass of a draft reads."""
        return self._pass_bytes(batch.size * (n + k - 1))


def mask_token(config: PretrainedConfig) -> int:
    """The id of the mask token that a draft model was tuned with. Raises UserError if it names none."""
    mask = getattr(config, MASK, None)
    if mask is None:
        raise UserError(
            f"this draft model drafts one token a pass: its config.json has no {MASK}; "
            "train one (specbench train pard), or use sps"
        )
    if not 0 <= mask < config.vocab_size:
        raise UserError(f"{MASK}={mask} lies beyond the {config.vocab_size} embeddings of the draft model")
    return int(mask)
