"""Trains a Kangaroo adapter: `python -m methods.kangaroo.train pair=... [conversations=FILE] [out=FOLDER]`.

Soft cross-entropy against the target's own next-token distribution, adapter parameters only (paper, section 4.1).
The teacher is computed on the fly, so nothing is dumped to disk. Three things differ from the authors' script, which
the research sheet calls faults: the loss counts position t when token t + 1 is the assistant's (not token t), position
0 stays in (the adapter's cache holds it at inference), and positions are the true ones.
"""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from methods.kangaroo.adapter import Adapter, adapter_config, check_exit_layer, save_adapter
from methods.training import assistant_tokens, conversation_batches, train_part
from specbench.decoding.target import Target
from specbench.errors import UserError, one_line_errors
from specbench.pairs import Pair, load_pair

CHUNK = 512  # positions whose logits exist at a time


@torch.no_grad()
def fresh_adapter(target: Target, like_layer: int) -> Adapter:
    """An adapter to train: the attention of one of the target's own layers, if it has that form, and its final norm.

    The authors begin with norms of 1 and random attention; from here far fewer steps are needed. Where the layer's
    attention has another form (shared key heads, biases), the adapter begins as a plain early exit instead: an
    attention that adds nothing yet.
    """
    adapter = Adapter(adapter_config(target.config)).to(target.device)
    adapter.norm.weight.copy_(target.norm.weight)
    own, layer = adapter.layers[0], target.layers[like_layer]
    shapes, others = ({k: v.shape for k, v in m.self_attn.state_dict().items()} for m in (own, layer))
    if shapes == others:
        own.self_attn.load_state_dict(layer.self_attn.state_dict())
        own.input_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    else:
        own.self_attn.o_proj.weight.zero_()
    return adapter


def distillation(target: Target, exit_layer: int):
    """The loss for `train_part`: (adapter, batch) -> mean soft cross-entropy over the weighted positions."""

    def loss(adapter, batch) -> torch.Tensor:
        exits, finals, weights = _states(target, exit_layer, batch)
        adapted = _adapt(adapter, exits)[:, :-1][weights > 0]
        finals, weights = finals[:, :-1][weights > 0], weights[weights > 0]
        total = torch.zeros((), device=weights.device)
        for student, teacher, weight in zip(adapted.split(CHUNK), finals.split(CHUNK), weights.split(CHUNK)):
            with torch.no_grad():
                goal = torch.softmax(target.unembed(teacher).float(), dim=-1)
            student_logits = target.unembed(student).float()
            total = total + weight @ torch.nn.functional.cross_entropy(student_logits, goal, reduction="none")
        return total / weights.sum()

    return loss


@torch.no_grad()
def agreement(target: Target, exit_layer: int, adapter: Adapter, batches) -> float:
    """Share of the weighted positions of `batches` at which adapter and target have the same first choice."""
    same = counted = 0
    for batch in batches:
        exits, finals, weights = _states(target, exit_layer, batch)
        chosen = weights == 1.0
        adapted = _adapt(adapter, exits)[:, :-1][chosen]
        same += (
            (target.unembed(adapted).argmax(-1) == target.unembed(finals[:, :-1][chosen]).argmax(-1))
            .sum()
            .item()
        )
        counted += int(chosen.sum())
    return same / counted


@torch.no_grad()
def _states(target: Target, exit_layer: int, batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exit states and final (normed) states [B, T, d], and the weight [B, T - 1] of each position's prediction."""
    outputs = target.model.model(batch["input_ids"], use_cache=False, output_hidden_states=True)
    return outputs.hidden_states[exit_layer], outputs.last_hidden_state, batch["loss_weight"][:, 1:]


def _adapt(adapter, exits: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(exits.shape[1], device=exits.device).unsqueeze(0)
    rotary = getattr(adapter, "module", adapter).rope  # DistributedDataParallel wraps the module
    return adapter(exits, rotary(positions, exits))


def _batches(cfg: DictConfig, pair: Pair, seed: int):
    if cfg.conversations is not None:
        return conversation_batches(
            assistant_tokens(pair), cfg.conversations, cfg.batch_size, cfg.length, seed
        )
    if cfg.pair.get("training") is None:
        raise UserError(f"pair '{pair.name}' brings no training text: give conversations=FILE (JSON lines)")
    return hydra.utils.instantiate(
        cfg.pair.training, tokenizer=pair.tokenizer, batch_size=cfg.batch_size, length=cfg.length, seed=seed
    )


def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_kangaroo.yaml) and returns the folder of the finished adapter."""
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False)
    pair.target.requires_grad_(False)
    target = Target(pair.target)
    check_exit_layer(cfg.exit_layer, len(target.layers))
    torch.manual_seed(cfg.seed)
    adapter = fresh_adapter(target, cfg.exit_layer if cfg.like_layer is None else cfg.like_layer)
    out = Path(cfg.out)
    adapter = train_part(
        adapter,
        distillation(target, cfg.exit_layer),
        _batches(cfg, pair, cfg.seed),
        cfg.steps,
        cfg.learning_rate,
        out / "checkpoints",
        cfg.save_every,
    )
    held_out = agreement(target, cfg.exit_layer, adapter.eval(), islice(_batches(cfg, pair, cfg.seed + 1), 4))
    save_adapter(
        adapter, out, getattr(torch, cfg.save_dtype), exit_layer=cfg.exit_layer, held_out_agreement=held_out
    )
    shutil.rmtree(out / "checkpoints", ignore_errors=True)  # of no use once the adapter is there
    print(f"held-out agreement with the target: {held_out:.3f}")
    print(out)
    return out


@hydra.main(version_base=None, config_path="../../conf", config_name="train_kangaroo")
def main(cfg: DictConfig) -> None:
    with one_line_errors():
        train(cfg)


if __name__ == "__main__":
    main()
