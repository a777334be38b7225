"""Tunes a draft model to fill masks: `specbench train pard pair=... [draft=MODEL layers=[0,1]]`.

Of a row of tokens, place t with j masks after it gives token t + 1 + j. All are learned in one pass over the row and
the masks of its places, where a mask sees the tokens up to its place and the masks before it there (section 3.2). Not
every place keeps every mask: of each further one only a share does, and those have the ones before (section 3.3).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from methods.common.losses import Guess, Head, Loss, choices_ahead, teacher_of
from methods.common.masked_places import JUDGED, MASKED_SETTINGS, Places, places_by_masks, shares_of
from methods.common.training import (
    DRAFT_SETTINGS,
    check_length,
    check_window,
    finals_of,
    held_out_figures,
    mask_to_fill,
    pair_to_train,
    train_draft,
    trainer,
)
from methods.pard.drafter import MASK
from specbench.config.compose import program
from specbench.models.pairs import draft_of

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


class ParallelDistillation(torch.nn.Module):
    """batch -> cross-entropy of guesses up to `ahead` tokens ahead against the frozen target.

    Args:
        draft: is tuned.
        target: frozen.
        mask: id of the mask token.
        ahead: K, tokens that a pass guesses.
        retention: share of the places that keep one more mask.
        least: share of the places that keep any mask, at least.
        loss: what of a batch is judged.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: StagedModel,
        mask: int,
        ahead: int,
        retention: float,
        least: float,
        loss: Loss,
    ):
        super().__init__()
        self.draft, self.target, self.mask, self.ahead = draft, target, mask, ahead
        self.shares = shares_of(ahead, retention, least)
        self.loss = loss
        self.heads = (Head.of(draft), Head.of(target.model))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted mean [] of the cross-entropies of all guesses, scaled as that of one token ahead."""
        length = batch["input_ids"].shape[1]
        by_masks = places_by_masks(length, self.shares, batch["input_ids"].device)
        draft_head, target_head = self.heads
        truth = teacher_of(batch, target_head, finals_of(self.target, batch))
        total = torch.zeros((), device=self.target.device)
        for j, (some, states) in enumerate(zip(by_masks, self.states(batch, by_masks))):
            guessed = torch.zeros_like(batch["loss_weight"])
            guessed[:, some + 1 + j] = 1.0
            judged = {**batch, "loss_weight": batch["loss_weight"] * guessed}
            total = total + self.loss(
                judged, self.loss.goals(judged, 1 + j), [Guess(1.0, states, draft_head, 1 + j)], truth
            )
        return total / sum(self.shares)

    def states(self, batch: Batch, by_masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """The draft model's states in one pass.

        Args:
            batch: of B rows of T tokens.
            by_masks: the places [n_j] that have j masks or more, for each j from 0 on.

        Returns:
            For each j [B, T, d] the states that guess token t + 1 + j at place t; zeros at places that lack the mask.
        """
        ids = batch["input_ids"]
        inputs = Places.of(by_masks)
        fed = ids[:, inputs.places].masked_fill(inputs.masks > 0, self.mask)
        hidden = self.draft.get_decoder()(
            input_ids=fed,
            attention_mask=inputs.attention(self.draft.dtype).expand(len(ids), 1, -1, -1),
            position_ids=(inputs.places + inputs.masks).unsqueeze(0),
            use_cache=False,
        ).last_hidden_state
        parts = hidden.split([len(some) for some in by_masks], dim=1)
        room = hidden.new_zeros(*ids.shape, hidden.shape[-1])
        return [room.index_copy(1, some, states) for some, states in zip(by_masks, parts)]

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [K, n] of draft model and target, at some places that K assistant tokens follow."""
        length, k = batch["input_ids"].shape[1], self.ahead
        every = torch.arange(length, device=batch["input_ids"].device)
        places = every[: length - k : JUDGED]
        states = [of[:, places] for of in self.states(batch, [every, *[places] * (k - 1)])]
        (draft_head, target_head), finals = self.heads, finals_of(self.target, batch)
        return choices_ahead(batch, states, [draft_head] * k, finals, target_head, places, ahead=1)


@trainer(DRAFT_SETTINGS | MASKED_SETTINGS)
def train(cfg: DictConfig) -> Path:
    """Tunes as configured (conf/train_pard.yaml) and returns the folder of the finished draft model."""
    check_length(cfg, "tokens_ahead")
    pair = pair_to_train(cfg)
    draft = draft_of(pair)
    check_window(cfg, draft)
    config = draft.config.get_text_config()
    mask = mask_to_fill(cfg, pair, config.vocab_size)
    setattr(config, MASK, mask)
    shares = cfg.retention, cfg.least_retention
    module = ParallelDistillation(draft, pair.staged, mask, cfg.tokens_ahead, *shares, Loss.of(cfg))

    return train_draft(module, draft, held_out_figures(module.choices, "token"), cfg, pair)


main = program("train_pard", train)
