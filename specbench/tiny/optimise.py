"""Training of one stage: Muon and AdamW, a warm-up / stable / decay schedule, resumable checkpoints."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from specbench.tiny.muon import Muon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import LlamaForCausalLM

CHUNK = 512  # rows of the head's matrix at a time: faster on a CPU than one big matrix


@dataclass(frozen=True)
class Schedule:
    """Steps of a stage: linear warm-up, stable, and linear decay to zero over the last `decay` steps."""

    steps: int
    warmup: int
    decay: int
    muon_lr: float = 0.02
    embedding_lr: float = 0.03
    norm_lr: float = 2e-3

    def factor(self, step: int) -> float:
        """Learning-rate multiplier of step `step` (counted from 0)."""
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        falling = min(1.0, (self.steps - step) / self.decay) if self.decay else 1.0
        return rising * falling


def optimizers(model: LlamaForCausalLM, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding (also the head) and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embedding = [model.model.embed_tokens.weight]
    return [
        torch.optim.AdamW(
            embedding, lr=schedule.embedding_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        ),
        torch.optim.AdamW(norms, lr=schedule.norm_lr, betas=(0.9, 0.98), weight_decay=0.0),
        # The decay bounds every matrix near 1 / 0.1, and so what the layers add to the embedding.
        Muon(matrices, lr=schedule.muon_lr, weight_decay=0.1, momentum=0.95),
    ]


def weighted_loss(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], light: float = 1.0,
                  generator: torch.Generator | None = None, repeats: float = 0.0
                  ) -> tuple[torch.Tensor, float]:  # fmt: skip
    """(summed weighted cross-entropy in nats, sum of weights) of one batch.

    `repeats` weighs the unlikelihood (Welleck et al. 2020) of saying the token at hand once more where the text does
    not: with a head tied to the embedding a small model tends to, and greedy decoding then never gets out of it.

    With `light` < 1 only that share of the prompt tokens (weight below 1), drawn at random, goes through the
    head, and counts more in return: the same expected gradient for less work.
    """
    targets, weights = batch["input_ids"][:, 1:], batch["loss_weight"][:, 1:]
    if light < 1.0:
        lucky = torch.rand(weights.shape, generator=generator) < light
        weights = torch.where(weights >= 1.0, weights, weights / light * lucky)
    at_hand = batch["input_ids"][:, :-1]
    hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state[:, :-1]
    wanted = weights > 0
    hidden, targets, weights, at_hand = hidden[wanted], targets[wanted], weights[wanted], at_hand[wanted]
    total = hidden.new_zeros(())
    for start in range(0, len(targets), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = model.lm_head(hidden[rows])
        losses = cross_entropy(logits, targets[rows], reduction="none")
        if repeats:
            again = logits.gather(1, at_hand[rows, None])[:, 0] - logits.logsumexp(1)
            unlikely = -torch.log1p(-again.exp().clamp(max=0.999))
            losses = losses + repeats * unlikely * (at_hand[rows] != targets[rows])
        total = total + (losses * weights[rows]).sum()
    return total, float(weights.sum())


@torch.no_grad()
def answer_loss(model: LlamaForCausalLM, batches: list[dict[str, torch.Tensor]]) -> float:
    """Mean cross-entropy (nats) on the answer tokens of `batches`."""
    model.eval()
    total = weight = 0.0
    for batch in batches:
        answers = {"input_ids": batch["input_ids"], "loss_weight": (batch["loss_weight"] >= 1.0).float()}
        loss, count = weighted_loss(model, answers)
        total, weight = total + float(loss), weight + count
    return total / weight


def save_checkpoint(path: Path, state: dict) -> None:
    """Write beside, then rename: a crash never leaves half a file."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train_stage(
    model: LlamaForCausalLM,
    batches: Iterator[dict[str, torch.Tensor]],
    schedule: Schedule,
    name: str,
    checkpoint: Path,
    seed: int,
    save_every_seconds: float = 180.0,
    light: float = 0.34,
    repeats: float = 0.0,
) -> float:
    """Train `model` in place for `schedule.steps` steps; returns the mean loss of the last tenth of them.

    A checkpoint of the same stage is taken up where it stopped, with the same batches as without the stop.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    optimisers = optimizers(model, schedule)
    step, recent = _resumed(model, optimisers, checkpoint), []
    for _ in range(step):
        next(batches)
    rates = [schedule.embedding_lr, schedule.norm_lr, schedule.muon_lr]
    model.train()
    tokens, saved_at = 0, time.monotonic()
    bar = tqdm(total=schedule.steps, initial=step, desc=name, unit="step", mininterval=5, dynamic_ncols=True)

    def save() -> None:
        saved = [optimiser.state_dict() for optimiser in optimisers]
        save_checkpoint(checkpoint, {"model": model.state_dict(), "optimisers": saved, "step": step})

    for current in range(step, schedule.steps):
        factor = schedule.factor(current)
        _set_rates(optimisers, [rate * factor for rate in rates])
        batch = next(batches)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + current)
        total, weight = weighted_loss(model, batch, light, generator, repeats)
        loss = total / weight
        if not torch.isfinite(loss):
            raise FloatingPointError(f"{name}: the loss is {loss.item()} at step {current}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        recent.append(loss.item())
        tokens += batch["input_ids"].numel()
        step = current + 1
        bar.update()
        if current % 10 == 0:
            mean = sum(recent[-20:]) / len(recent[-20:])
            bar.set_postfix(
                loss=f"{mean:.3f}", tokens_per_s=f"{tokens / bar.format_dict['elapsed']:.0f}", refresh=False
            )
        if time.monotonic() - saved_at > save_every_seconds:
            save()
            saved_at = time.monotonic()
    save()
    bar.close()
    tail = recent[-max(1, schedule.steps // 10) :]
    return sum(tail) / len(tail) if tail else float("nan")


def _resumed(model: LlamaForCausalLM, optimisers: list[torch.optim.Optimizer], checkpoint: Path) -> int:
    """Loads the checkpoint, if there is one; returns the steps that it has seen."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return state["step"]


def _set_rates(optimisers: list[torch.optim.Optimizer], rates: list[float]) -> None:
    """Sets the learning rate of each optimiser."""
    for optimiser, rate in zip(optimisers, rates, strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate
