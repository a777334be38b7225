"""Trains a Kangaroo adapter: `specbench train kangaroo pair=... [conversations=FILE] [out=FOLDER]`.

Soft cross-entropy against the target's own next-token distribution, adapter parameters only (paper, section 4.1).
Three things differ from the authors' script, where they are faults: the loss counts position t when token t + 1 is the
assistant's (not token t), position 0 stays in (the adapter's cache holds it at inference), and positions are the true
ones.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from methods.common.checkpoints import attention_sizes
from methods.common.initialisation import begin_like, scale_of
from methods.common.losses import ALL, Head, Loss
from methods.common.training import (
    SETTINGS,
    NextToken,
    check_like_layer,
    held_out_figures,
    target_pair,
    target_states,
    train_part,
    trainer,
)
from specbench.config.compose import program
from specbench.decoding.state import NORMED
from specbench.system.errors import UserError
from specbench.system.settings import Count, Natural

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.kangaroo.adapter import Adapter, AdapterLayer
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


@torch.no_grad()
def fresh_adapter(target: StagedModel, like_layer: int) -> tuple[Adapter, bool]:
    """An adapter to train: the attention of one of the target's own layers, if it has that form, and its final norm.

    The authors begin with norms of 1 and random attention; from here far fewer steps are needed. If the layer's
    attention has another form (shared key heads, biases, norms), the adapter begins as a plain early exit instead: an
    attention that adds nothing yet.

    Returns:
        The adapter, and whether its attention is the layer's.
    """
    from transformers import LlamaConfig  # late: it takes seconds to import

    from methods.kangaroo.adapter import Adapter

    sizes = attention_sizes(target)
    # As published, each query head has keys and values of its own.
    config = LlamaConfig(**sizes | {"num_key_value_heads": sizes["num_attention_heads"]})
    adapter = Adapter(config).to(target.device)
    adapter.norm.weight.copy_(scale_of(target.norm))
    block, layer = cast("AdapterLayer", adapter.layers[0]), cast("Any", target.layers[like_layer])
    attention: Any = getattr(layer, "self_attn", None)
    norm: Any = getattr(layer, "input_layernorm", None)
    has_bias = getattr(norm, "bias", None) is not None
    is_like = bool(attention and norm) and not has_bias and begin_like(block.self_attn, attention)
    if is_like:
        block.input_layernorm.weight.copy_(scale_of(norm))
    else:
        block.self_attn.o_proj.weight.zero_()
    return adapter, is_like


class Distillation(NextToken):
    """batch -> cross-entropy of an adapter against the frozen target."""

    def __init__(self, adapter: Adapter, target: StagedModel, exit_layer: int, loss: Loss = ALL):
        super().__init__(Head.of(target.model), target, loss)
        self.adapter, self.exit_layer = adapter, exit_layer

    def finals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `NextToken`; the adapter's states are for the target's head, too."""
        states_by_tap = target_states(self.target, batch, (self.exit_layer, NORMED))
        exits = states_by_tap[self.exit_layer].to(self.adapter.norm.weight.dtype)
        positions = torch.arange(exits.shape[1], device=exits.device).unsqueeze(0)
        with torch.no_grad():
            rope = self.adapter.rope(positions, exits)
        return self.adapter(exits, position_embeddings=rope), states_by_tap[NORMED]


@trainer(SETTINGS | {"exit_layer": Count, "like_layer": Natural | None})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_kangaroo.yaml) and returns the folder of the finished adapter."""
    from methods.kangaroo.adapter import check_exit_layer, save_adapter

    pair = target_pair(cfg)
    target = pair.staged
    exit_layer = check_exit_layer(cfg.exit_layer, len(target.layers))
    check_like_layer(cfg.like_layer, target)
    like_layer = exit_layer if cfg.like_layer is None else cfg.like_layer
    adapter, is_like = fresh_adapter(target, like_layer)
    if cfg.like_layer is not None and not is_like:
        raise UserError(
            "this target's attention has another form than an adapter's (shared key heads, biases or norms): "
            "set like_layer=null"
        )
    module = Distillation(adapter, target, exit_layer, Loss.of(cfg))

    begins = "random attention that adds nothing yet, the target's final norm"
    if is_like:
        begins = f"attention of the target's layer {like_layer}, its final norm"
    save = partial(save_adapter, adapter, exit_layer=exit_layer)
    return train_part(module, held_out_figures(module.choices), save, cfg, pair, begins, (exit_layer,))


main = program("train_kangaroo", train)
