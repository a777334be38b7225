"""Trains a plain draft model by distillation: `specbench train sps pair=... [draft=MODEL layers=[0,1]]`.

The draft model learns the target's own next-token distribution (soft cross-entropy) on conversations. It begins as the
pair's draft model, as another one of the same vocabulary (`draft=`), or as some of the target's layers (`layers=`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from methods.common.losses import ALL, Guess, Head, Loss, first_choices, teacher_of
from methods.common.training import (
    DRAFT_SETTINGS,
    finals_of,
    held_out_figures,
    pair_to_train,
    predicting,
    train_draft,
    trainer,
)
from specbench.config.compose import program
from specbench.models.pairs import draft_of

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


class Distillation(torch.nn.Module):
    """batch -> cross-entropy of a draft model against the frozen target."""

    def __init__(self, draft: PreTrainedModel, target: StagedModel, loss: Loss = ALL):
        super().__init__()
        self.draft, self.target, self.loss = draft, target, loss
        self._heads = (Head.of(draft), Head.of(target.model))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the cross-entropies of a batch."""
        student, teacher = self.states(batch)
        draft_head, target_head = self._heads
        return self.loss(
            batch,
            self.loss.goals(batch),
            [Guess(1.0, student, draft_head)],
            teacher_of(batch, target_head, teacher),
        )

    def states(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states [B, T, d] of the draft model and [B, T, D] of the target."""
        student = self.draft.get_decoder()(batch["input_ids"], use_cache=False).last_hidden_state
        return student, finals_of(self.target, batch)

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [n] of draft and target before each assistant token."""
        both = zip(self._heads, self.states(batch))
        student, teacher = (first_choices(head, predicting(states, batch, 1.0)) for head, states in both)
        return student, teacher


@trainer(DRAFT_SETTINGS)
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_sps.yaml) and returns the folder of the finished draft model."""
    pair = pair_to_train(cfg)
    draft = draft_of(pair)
    module = Distillation(draft, pair.staged, Loss.of(cfg))

    return train_draft(module, draft, held_out_figures(module.choices), cfg, pair)


main = program("train_sps", train)
