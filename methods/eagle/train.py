"""Trains EAGLE-1's drafting model: `specbench train eagle pair=... [conversations=FILE] [out=FOLDER]`.

The loss is the authors': the distance of the estimated state to the target's (smooth L1), and a tenth of the
cross-entropy against the target's own distribution (EAGLE-1, section 4.2), with noise on the states that go in. Unlike
in their script the loss counts the tokens that the assistant says by the token that is predicted; noise and distance
are taken relative to the size of the target's states, for which the authors' numbers were made; and the linear layer
begins as the best estimate of the next state. At the end a tree is made of the ranks at which chained drafts had the
right tokens: the most frequent paths. EAGLE-2 uses the same model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import smooth_l1_loss

from methods.common.chained_steps import chained
from methods.common.checkpoints import layer_sizes
from methods.common.head_training import Guesses, count_ranks, train_heads
from methods.common.initialisation import least_squares, silence, some_of
from methods.common.losses import ALL, Guess, Loss, choices_ahead, teacher_of
from methods.common.training import (
    SETTINGS,
    batches_on,
    finals_of,
    predicting,
    target_pair,
    trainer,
)
from specbench.config.compose import program
from specbench.data.training_folder import saved
from specbench.system.errors import UserError
from specbench.system.settings import Count

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.eagle.model import EagleModel
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel

CLASSIFICATION = 0.1  # weight of the cross-entropy
NOISE, NOISE_LENGTH = 0.1, 512  # of a text of that length; longer ones get less
BEGINS = "a linear layer that fits the next state by least squares, and a silent layer"
AGREEMENTS, DEPTH = 4, 6  # depths whose agreement is measured; levels of the tree


@torch.no_grad()
def fresh_model(target: StagedModel) -> EagleModel:
    """A drafting model to train, which passes the state on: its layer adds nothing yet."""
    from transformers import LlamaConfig  # late: it takes seconds to import

    from methods.eagle.model import EagleModel

    model = EagleModel(LlamaConfig(**layer_sizes(target))).to(target.device)
    hidden = model.config.hidden_size
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, hidden:] = torch.eye(hidden)
    model.fc.bias.zero_()
    silence(model.layer)
    return model


@torch.no_grad()
def fit(model: EagleModel, target: StagedModel, text: Iterator[Batch]) -> None:
    """Fits the linear layer of a fresh model to the next state.

    The authors begin at random. On SmolLM2-135M that had an agreement of 0.24 after 40 steps; this begins at 0.30.
    """
    pairs = (pairs_of(target, batch) for batch in some_of(text))
    weight, bias = least_squares(
        (torch.cat([embeds, features], dim=-1), goals) for features, embeds, goals in pairs
    )
    model.fc.weight.copy_(weight)
    model.fc.bias.copy_(bias)


@torch.no_grad()
def pairs_of(target: StagedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features and embedded tokens of the pairs [B, T - 1, h], and the states to predict, in float32."""
    states = finals_of(target, batch).float()
    return states[:, :-1], target.embed(batch["input_ids"][:, 1:]).float(), states[:, 1:]


class Distillation(Guesses):
    """batch -> loss of a drafting model against the frozen target."""

    def __init__(self, model: EagleModel, target: StagedModel, loss: Loss = ALL):
        super().__init__(target)
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the losses of a batch."""
        features, embeds, goals = pairs_of(self.target, batch)
        size = goals.float().pow(2).mean().sqrt()
        noisy = features
        if self.training:
            spread = NOISE * min(1.0, NOISE_LENGTH / features.shape[1]) * size
            noisy = features + (2 * torch.rand_like(features) - 1) * spread
        (out,) = chained(self.model, noisy, embeds, 1)
        predicted = shifted(batch, 1)
        distances = smooth_l1_loss(
            predicting(out, predicted).float() / size,
            predicting(goals, predicted).float() / size,
            reduction="none",
        ).mean(-1)
        weights = predicted["loss_weight"][:, 1:]
        regression = weights[weights > 0] @ distances
        return regression + CLASSIFICATION * self.loss(
            batch,
            self.loss.goals(batch, ahead=2),
            [Guess(1.0, out, self.head, 2)],
            # Its first state is the second token's.
            teacher_of(batch, self.head, goals, 2),
        )

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [AGREEMENTS, n] of chained steps and of the target, if as many assistant tokens follow."""
        features, embeds, goals = pairs_of(self.target, batch)
        steps = chained(self.model, features, embeds, AGREEMENTS)
        finals = torch.cat([features[:, :1], goals], dim=1)
        return choices_ahead(batch, steps, [self.head] * AGREEMENTS, finals, self.head)

    @torch.no_grad()
    def rank_paths(self, batch: Batch) -> Counter[tuple[int, ...]]:
        """As in `Guesses`."""
        features, embeds, _ = pairs_of(self.target, batch)
        states = chained(self.model, features, embeds, DEPTH)
        return count_ranks(states, lambda out, _: self.head(out), batch, DEPTH)


def shifted(batch: Batch, n: int) -> Batch:
    """The weights of a batch without those of its first n tokens."""
    return {"loss_weight": batch["loss_weight"][:, n:]}


@trainer(SETTINGS | {"nodes": Count})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_eagle.yaml) and returns the folder of the finished drafting model."""
    if cfg.length < DEPTH + 2:
        raise UserError(f"length={cfg.length} leaves no room for the {DEPTH} levels of a tree")
    from methods.eagle.checkpoint import save_eagle  # late, as above

    pair = target_pair(cfg)
    target = pair.staged
    model = fresh_model(target)
    if saved(cfg) is None:
        fit(model, target, batches_on(cfg, pair))
    return train_heads(
        Distillation(model, target, Loss.of(cfg)), cfg, pair, partial(save_eagle, model), BEGINS, "depth"
    )


main = program("train_eagle", train)
