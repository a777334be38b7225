"""Trains Medusa-1's heads: `specbench train medusa pair=... [conversations=FILE] [out=FOLDER]`.

Cross-entropy of each head against the target's own distribution of the token that it guesses; head i weighs 0.8^i (Cai
et al. 2024, section 2.2.1). Unlike in the authors' script the loss counts the tokens that the assistant says by the
token that is guessed. Heads share the target's output matrix, unless `own_output` gives each one of its own. At the end
a tree is made of the ranks at which the heads had the right tokens: the most frequent paths.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from methods.common.head_training import HeadDistillation, train_heads
from methods.common.losses import ALL, Head, Loss
from methods.common.training import SETTINGS, check_length, target_pair, trainer
from methods.medusa.checkpoint import save_for_vllm, save_heads
from methods.medusa.heads import MedusaHeads
from specbench.config.compose import program
from specbench.system.settings import Count

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel

DECAY = 0.8
BEGINS = "blocks of zeros: every head says what the target's says"


class Distillation(HeadDistillation):
    """batch -> cross-entropy of the heads against the frozen target."""

    def __init__(self, heads: MedusaHeads, target: StagedModel, loss: Loss = ALL):
        super().__init__(heads.heads, target, DECAY, loss)
        self.heads = heads

    def states(self, batch: Batch, finals: torch.Tensor) -> list[torch.Tensor]:
        """States [B, T - 1 - i, d] of each head i."""
        states = self.heads(finals.to(self.heads.weight.dtype))
        return [states[:, : finals.shape[1] - 1 - i, i] for i in range(self.count)]

    def output(self, i: int) -> Head:
        """As in `HeadDistillation`."""
        return self.head if self.heads.output is None else Head(self.heads.output[i])


@trainer(SETTINGS | {"heads": Count, "nodes": Count, "own_output": bool, "form": Literal["authors", "vllm"]})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_medusa.yaml) and returns the folder of the finished heads."""
    check_length(cfg, "heads")
    pair = target_pair(cfg)
    target = pair.staged
    vocab = target.lm_head.weight.shape[0] if cfg.own_output else None
    heads = MedusaHeads(cfg.heads, target.hidden_size, vocab).to(target.device)
    if heads.output is not None:
        with torch.no_grad():
            heads.output.copy_(target.lm_head.weight.expand_as(heads.output))
    save = partial(save_heads, heads)
    if cfg.form == "vllm":
        save = partial(save_for_vllm, heads, target.lm_head.weight)
    return train_heads(Distillation(heads, target, Loss.of(cfg)), cfg, pair, save, BEGINS)


main = program("train_medusa", train)
