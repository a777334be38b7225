"""Trains a plain draft model by distillation: `specbench train sps pair=... [draft=MODEL layers=[0,1]]`.

The draft model learns the target's own next-token distribution (soft cross-entropy) on conversations. It begins as the
pair's draft model, as another one of the same vocabulary (`draft=`), or as some of the target's layers (`layers=`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from methods.common.losses import ALL, Head, Loss
from methods.common.training import (
    DRAFT_SETTINGS,
    NextToken,
    finals_of,
    held_out_figures,
    pair_to_train,
    train_draft,
    trainer,
)
from specbench.config.compose import program
from specbench.models.pairs import draft_of

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


class Distillation(NextToken):
    """batch -> cross-entropy of a draft model against the frozen target."""

    def __init__(self, draft: PreTrainedModel, target: StagedModel, loss: Loss = ALL):
        super().__init__(Head.of(draft), target, loss)
        self.draft = draft

    def finals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `NextToken`."""
        student = self.draft.get_decoder()(batch["input_ids"], use_cache=False).last_hidden_state
        return student, finals_of(self.target, batch)


@trainer(DRAFT_SETTINGS)
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_sps.yaml) and returns the folder of the finished draft model."""
    pair = pair_to_train(cfg)
    draft = draft_of(pair)
    module = Distillation(draft, pair.staged, Loss.of(cfg))

    return train_draft(module, draft, held_out_figures(module.choices), cfg, pair)


main = program("train_sps", train)
