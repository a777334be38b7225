"""Trains P-EAGLE's drafting model: `specbench train peagle pair=... [conversations=FILE] [out=FOLDER]`.

Of a text, pair t with j masks after it guesses token t + 2 + j. All are learnt in one pass (`methods.common.
masked_places`), against the target's own distribution over the draft vocabulary, each number of masks alike. What a
mask has in place of a state is learnt, too. Unlike in the authors' code the embedding stays the target's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from methods.common.losses import ALL, Goals, Loss, choices_ahead, teacher_of
from methods.common.masked_places import JUDGED, MASKED_SETTINGS, Places, places_by_masks, shares_of
from methods.common.training import (
    SETTINGS,
    check_length,
    held_out_figures,
    mask_to_fill,
    target_pair,
    train_part,
    trainer,
)
from methods.eagle3.train import VOCABULARY, TrainingTimeTest, begin
from specbench.config.compose import program
from specbench.system.settings import Count

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.eagle3.model import Eagle3Model
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


class MaskDistillation(TrainingTimeTest):
    """batch -> cross-entropy of guesses up to `ahead` tokens ahead against the frozen target.

    Args:
        model: is trained.
        target: frozen.
        ahead: K, tokens that a pass guesses.
        retention: share of the pairs that keep one more mask.
        least: share of the pairs that keep any mask, at least.
        loss: what of a batch is judged, for each number of masks.
    """

    def __init__(
        self,
        model: Eagle3Model,
        target: StagedModel,
        ahead: int,
        retention: float,
        least: float,
        loss: Loss = ALL,
    ):
        super().__init__(model, target, ahead, loss)
        self.shares = shares_of(ahead, retention, least)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The mean [] over all numbers of masks, scaled as a loss of one token ahead."""
        weight = batch["loss_weight"]
        by_masks = places_by_masks(weight.shape[1] - 1, self.shares, weight.device)
        outputs, finals = self.filled(batch, by_masks)
        teacher = teacher_of(batch, self.head, finals)
        total = torch.zeros((), device=finals.device)
        for j, (places, output) in enumerate(zip(by_masks, outputs)):
            weights = weight[:, places + 2 + j]
            rows, columns = weights.nonzero().unbind(1)
            goals = Goals(rows, places[columns] + 2 + j, weights[rows, columns]).drawn(self.loss.tokens)
            for chunk in goals.split():
                states = output[chunk.batch_index, torch.searchsorted(places, chunk.positions - 2 - j)]
                total = total + self.judged(teacher, chunk, [states]) / self.shares[j]
        return total / self.steps

    def filled(self, batch: Batch, by_masks: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Fills masks in one pass.

        Args:
            batch: of B rows of T tokens.
            by_masks: the pairs [n_j] that have j masks or more, for each j from 0 on.

        Returns:
            For each j the outputs [B, n_j, h] that guess token t + 2 + j; the target's states after its final norm.
        """
        model = self.model
        features, embeds, finals = self.pairs(batch)
        inputs = Places.of(by_masks)
        is_mask = (inputs.masks > 0).view(1, -1, 1)
        token = inputs.masks.new_full((1, 1), cast("int", model.config.mask_token_id))
        with torch.no_grad():
            embedded = model.embed(token, self.target).to(embeds.dtype)
        features = torch.where(is_mask, model.mask_features(), features[:, inputs.places])
        embeds = torch.where(is_mask, embedded, embeds[:, inputs.places])
        rope = model.rope((inputs.places + inputs.masks).unsqueeze(0), features)
        mask = inputs.attention(features.dtype).expand(len(features), 1, -1, -1)
        out = model(features, embeds, position_embeddings=rope, attention_mask=mask)
        return list(out.split([len(some) for some in by_masks], dim=1)), finals

    def agreed(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [K, n] of draft and target, at some pairs that K more assistant tokens follow."""
        length, k = batch["input_ids"].shape[1], self.steps
        places = torch.arange(length - 1, device=batch["input_ids"].device)
        some = places[: length - 1 - k : JUDGED]
        outputs, finals = self.filled(batch, [places, *[some] * (k - 1)])
        outputs[0] = outputs[0][:, some]
        rows, truth = choices_ahead(batch, outputs, [self.logits] * k, finals, self.head, some)
        return self.ids(rows), truth


@torch.no_grad()
def fresh_masks(model: Eagle3Model) -> None:
    """Makes the masks' learnt state begin at random, with the size of normed states."""
    assert model.mask_hidden is not None
    model.mask_hidden.normal_()


@trainer(SETTINGS | VOCABULARY | MASKED_SETTINGS | {"draft_layers": Count})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_peagle.yaml) and returns the folder of the finished drafting model."""
    check_length(cfg, "tokens_ahead", 3)
    pair = target_pair(cfg)
    mask = mask_to_fill(cfg, pair, pair.staged.embed_tokens.weight.shape[0])
    model, begins = begin(cfg, pair, num_hidden_layers=cfg.draft_layers, mask_token_id=mask)
    fresh_masks(model)
    from methods.eagle3.checkpoint import save_eagle3  # late: it takes seconds to import

    shares = cfg.retention, cfg.least_retention
    module = MaskDistillation(model, pair.staged, cfg.tokens_ahead, *shares, Loss.of(cfg))

    figures = held_out_figures(module.agreed, "token")
    return train_part(module, figures, partial(save_eagle3, model), cfg, pair, begins, model.taps)


main = program("train_peagle", train)
