"""Trains the heads of Hydra and Hydra++: `specbench train hydra_heads pair=... [conversations=FILE]`.

Cross-entropy of each head against the target's own distribution of the token that it guesses, given the true tokens in
between; all heads weigh the same (the authors' recipe for Hydra++). Unlike in the authors' script the loss counts the
tokens that the assistant says by the token that is guessed, nothing is dropped out, every head begins as the best
linear estimate of the state that its token comes from, and the prefix layer as the target's last one, if that has its
form. Heads share the target's output matrix, unless `own_output` gives each one of its own. At the end a tree is made
of the ranks at which the heads, given the true tokens in between, had the right ones: the most frequent paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from methods.common.checkpoints import layer_sizes
from methods.common.head_training import HeadDistillation, train_heads
from methods.common.initialisation import begin_like, least_squares, scale_of, silence, some_of
from methods.common.losses import ALL, Head, Loss
from methods.common.training import SETTINGS, batches_on, check_length, finals_of, target_pair, trainer
from specbench.config.compose import program
from specbench.data.training_folder import saved
from specbench.system.settings import Count

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.hydra_heads.heads import Heads, PrefixLayer
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


@torch.no_grad()
def fresh_heads(
    target: StagedModel,
    heads: int,
    layers: int,
    prefix: bool,
    own_output: bool,
) -> tuple[Heads, str]:
    """Heads to train; each one predicts at first what the target's head does from the state in front.

    Args:
        target: to draft for.
        heads: how many.
        layers: blocks of each.
        prefix: whether there is a prefix layer.
        own_output: whether each head has an output matrix.

    Returns:
        The heads, and what their prefix layer begins as.
    """
    from transformers import LlamaConfig  # late: it takes seconds to import

    from methods.hydra_heads.heads import Heads

    config = LlamaConfig(**layer_sizes(target)) if prefix else None
    hidden, vocab = target.hidden_size, target.lm_head.out_features
    fresh = Heads(heads, layers, hidden, vocab if own_output else None, config).to(target.device)
    for layer in cast("list[torch.nn.Linear]", [*fresh.wide, *fresh.square]):
        layer.weight.zero_()
        layer.bias.zero_()
    for layer in cast("list[torch.nn.Linear]", fresh.wide):
        layer.weight[:hidden, :hidden].fill_diagonal_(1.0)
    for output in cast("list[torch.nn.Linear]", fresh.output or []):
        output.weight.copy_(target.lm_head.weight)
        output.bias.zero_() if target.lm_head.bias is None else output.bias.copy_(target.lm_head.bias)
    return fresh, "" if fresh.prefix is None else _begin(fresh.prefix, target)


@torch.no_grad()
def fit(heads: Heads, target: StagedModel, text: Iterator[Batch]) -> None:
    """Fits each fresh head, by least squares, to the state that its token comes from."""
    fitted = []
    for batch in some_of(text):
        finals = finals_of(target, batch).float()
        fitted.append((batch, finals, heads.seen(finals)))
    for i, layer in enumerate(cast("list[torch.nn.Linear]", heads.wide)):
        weight, bias = least_squares(
            (inputs_of(target, batch, seen, i), finals[:, 1 + i :]) for batch, finals, seen in fitted
        )
        layer.weight[: heads.hidden] = weight
        layer.bias[: heads.hidden] = bias


def inputs_of(target: StagedModel, batch: Batch, states: torch.Tensor, i: int) -> torch.Tensor:
    """Inputs [B, T - 1 - i, (2 + i) d] of head i, from states [B, T, d] and the tokens of a batch."""
    n = states.shape[1] - 1 - i
    with torch.no_grad():
        embedded = target.embed(batch["input_ids"]).to(states.dtype)
    return torch.cat([states[:, :n], *(embedded[:, 1 + j : 1 + j + n] for j in range(1 + i))], dim=-1)


def _begin(prefix: PrefixLayer, target: StagedModel) -> str:
    """Makes the prefix layer begin as the target's last layer, if it has its form; returns how it begins.

    It adds nothing yet, and its norm keeps the target's states but for their lengths, which become their mean one.
    """
    layer, last = cast("Any", prefix.layers[0]), cast("Any", target.layers[-1])
    is_like = begin_like(layer, last)
    silence(layer)
    weight = scale_of(target.norm)
    prefix.norm.weight.fill_(weight.float().square().mean().sqrt().item())
    return "a silent copy of the target's last layer" if is_like else "a silent layer of random weights"


class Distillation(HeadDistillation):
    """batch -> cross-entropy of the heads against the frozen target."""

    def __init__(self, heads: Heads, target: StagedModel, loss: Loss = ALL):
        super().__init__(heads.heads, target, loss=loss)
        self.heads = heads

    def states(self, batch: Batch, finals: torch.Tensor) -> list[torch.Tensor]:
        """States [B, T - 1 - i, d] of each head i, given the tokens of the batch."""
        states = self.heads.seen(finals.float())
        return [self.heads(i, inputs_of(self.target, batch, states, i)) for i in range(self.count)]

    def output(self, i: int) -> Head:
        """As in `HeadDistillation`."""
        if self.heads.output is None:
            return self.head
        layer = cast("torch.nn.Linear", self.heads.output[i])
        return Head(layer.weight, layer.bias)


@trainer(SETTINGS | {"heads": Count, "layers": Count, "nodes": Count, "prefix": bool, "own_output": bool})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_hydra_heads.yaml) and returns the folder of the finished heads."""
    check_length(cfg, "heads")
    from methods.hydra_heads.checkpoint import save_heads

    pair = target_pair(cfg)
    target = pair.staged
    heads, prefix = fresh_heads(target, cfg.heads, cfg.layers, cfg.prefix, cfg.own_output)
    if saved(cfg) is None:
        fit(heads, target, batches_on(cfg, pair))
    module = Distillation(heads, target, Loss.of(cfg))
    begins = "heads that fit the state of their token by least squares" + cfg.prefix * f", {prefix}"
    return train_heads(module, cfg, pair, partial(save_heads, heads), begins)


main = program("train_hydra_heads", train)
