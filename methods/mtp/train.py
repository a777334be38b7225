"""Trains an MTP head: `specbench train mtp pair=... [conversations=FILE] [out=FOLDER]`.

Training on chained steps (`methods.common.step_distillation`), as FastMTP does it (arXiv 2509.18362): `draft_steps`
steps of one layer, step j weighed by decay^j. Unlike there the target's own distribution is what is learnt, not the
text, and the head begins as the best linear estimate of the next state, with a silent layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from methods.common.checkpoints import layer_sizes
from methods.common.initialisation import least_squares, silence, some_of
from methods.common.losses import Loss
from methods.common.step_distillation import StepDistillation
from methods.common.training import SETTINGS, batches_on, check_length, target_pair, train_part, trainer
from methods.eagle.train import pairs_of
from specbench.config.compose import program
from specbench.data.training_folder import saved
from specbench.system.settings import Count, Probability

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.mtp.model import MtpModel
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel

BEGINS = "a projection that fits the next state by least squares, and a silent layer"


@torch.no_grad()
def fresh_model(target: StagedModel) -> MtpModel:
    """A head to train, whose layer adds nothing yet."""
    from transformers import Qwen3Config  # late: it takes seconds to import

    from methods.mtp.model import MtpModel

    model = MtpModel(Qwen3Config(**layer_sizes(target))).to(target.device)
    silence(model.layers[0])
    return model


@torch.no_grad()
def fit(model: MtpModel, target: StagedModel, text: Iterable[Batch]) -> None:
    """Fits a fresh head's projection to the target's next state after its norm."""
    sizes: list[torch.Tensor] = []

    def joined(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        features, embeds, goals = pairs_of(target, batch)
        sizes.append(goals.pow(2).mean())
        return torch.cat([model.token_layernorm(embeds), model.hidden_layernorm(features)], -1), goals

    weight, _ = least_squares(map(joined, some_of(text)), bias=False)
    model.input_proj.weight.copy_(weight)
    # The final norm brings every estimate to the size that the target's states have.
    model.final_layernorm.weight.fill_(cast("float", torch.stack(sizes).mean().sqrt().item()))


@trainer(SETTINGS | {"draft_steps": Count, "decay": Probability})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_mtp.yaml) and returns the folder of the finished head."""
    check_length(cfg, "draft_steps")
    pair = target_pair(cfg)
    model = fresh_model(pair.staged)
    if saved(cfg) is None:
        fit(model, pair.staged, batches_on(cfg, pair))
    from methods.mtp.checkpoint import save_mtp  # late, as above

    module = StepDistillation(model, pair.staged, cfg.draft_steps, cfg.decay, Loss.of(cfg))
    return train_part(module, module.figures, partial(save_mtp, model), cfg, pair, BEGINS)


main = program("train_mtp", train)
