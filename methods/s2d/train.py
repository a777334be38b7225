"""Trains a sorted draft model: `specbench train s2d pair=... [layers=12 exits=[6,9,12]]`.

SoFT (Kavehzadeh et al. 2024, from the authors' code): the draft model is cut from the target's first layers, with its
embeddings, final norm and head; every step trains all exits at once, with the mean of their cross-entropies on the text
itself. No target is its teacher, so one draft model serves them all. Not as the authors do, but as with all trained
parts here (`specbench.data.training.train`): the learning rate falls linearly, not by a cosine, weight decay is 0.01,
not 0, and the warm-up takes 5 % of the steps, not 4 %.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from methods.common.losses import ALL, Guess, Head, Loss, first_choices, text_of
from methods.common.training import (
    DRAFT_SETTINGS,
    agreement,
    check_layers,
    cut_from,
    finals_of,
    layers_of,
    predicting,
    target_pair,
    train_draft,
    trainer,
)
from specbench.config.compose import program
from specbench.decoding.model.staged_model import StagedModel
from specbench.system.errors import UserError
from specbench.system.settings import Count

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch


class Sorted(torch.nn.Module):
    """batch -> mean over the exits of the weighted sum of the text's cross-entropies, in one forward pass."""

    def __init__(self, model: PreTrainedModel, exits: list[int], loss: Loss = ALL):
        super().__init__()
        self.model, self.exits, self.loss = model, exits, loss
        self._norm = (StagedModel(model).norm,)  # in a tuple: it is registered as a part of the model already
        self._head = Head.of(model)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The mean [] over the exits of the weighted sums of the cross-entropies of a batch."""
        guesses = [Guess(1 / len(self.exits), states, self._head) for states in self.states(batch)]
        return self.loss(batch, self.loss.goals(batch), guesses, text_of(batch))

    def states(self, batch: Batch) -> list[torch.Tensor]:
        """The normed states [B, T, d] of every exit. Only the exits are normed; the deepest already is."""
        outputs = self.model.get_decoder()(batch["input_ids"], use_cache=False, output_hidden_states=True)
        norm, hidden = self._norm[0], outputs.hidden_states
        return [*(norm(hidden[exit]) for exit in self.exits[:-1]), outputs.last_hidden_state]

    def choices(self, batch: Batch, target: StagedModel) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [exits, n] and [n] of the exits and of a target before each assistant token."""
        final = finals_of(target, batch)
        exits = [first_choices(self._head, predicting(s, batch, 1.0)) for s in self.states(batch)]
        return torch.stack(exits), first_choices(Head.of(target.model), predicting(final, batch, 1.0))


@trainer(DRAFT_SETTINGS | {"layers": Count | list[int], "exits": list[Count]})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_s2d.yaml) and returns the folder of the finished draft model."""
    pair = target_pair(cfg)
    check_layers(cfg, pair)
    layers, exits = layers_of(cfg), sorted(cfg.exits)
    if not exits or exits[0] < 1 or exits[-1] != len(layers) or len({*exits}) < len(exits):
        raise UserError(
            f"exits must rise, begin at 1 or more, and end with all {len(layers)} layers of the draft; not {exits}"
        )
    model = cut_from(pair, cfg)
    model.config.exits = exits
    module = Sorted(model, exits, Loss.of(cfg))

    def evaluate(held_out: list[Batch]) -> dict[str, float]:
        shares = agreement(partial(module.choices, target=pair.staged), held_out)
        return {f"held_out_agreement_{exit}": share for exit, share in zip(exits, shares)}

    return train_draft(module, model, evaluate, cfg, pair)


main = program("train_s2d", train)
