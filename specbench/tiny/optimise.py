"""What the models of the family learn and how: the loss on text, and Muon with a rate that rises, stays and falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from specbench.tiny.muon import Muon

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import LlamaForCausalLM

    from specbench.data.training import Batch

CHUNK = 512  # rows of the head's matrix at a time: faster on a CPU than one big matrix
LIGHT = 0.34  # share of the prompt tokens that go through the head


@dataclass(frozen=True)
class Schedule:
    """Steps of a stage: linear warm-up, stable, and linear decay to zero over the last `decay` steps."""

    steps: int
    warmup: int
    decay: int
    muon_lr: float = 0.02
    embedding_lr: float = 0.03

    def factor(self, step: int, steps: int) -> float:
        """Learning-rate multiplier of step `step` (counted from 0) of `steps`."""
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        falling = min(1.0, (steps - step) / self.decay) if self.decay else 1.0
        return rising * falling

    def optimizers(self, module: Text, cfg: DictConfig) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside the layers, AdamW for the embedding (also the head) and the norms."""
        model = module.model
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        norms = [p for p in model.parameters() if p.ndim == 1]
        embedding = [model.model.embed_tokens.weight]
        return [
            torch.optim.AdamW(
                embedding, lr=self.embedding_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
            torch.optim.AdamW(norms, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
            # The decay bounds every matrix near 1 / 0.1, and so what the layers add to the embedding.
            Muon(matrices, lr=self.muon_lr, weight_decay=0.1, momentum=0.95),
        ]


class Text(torch.nn.Module):
    """batch -> weighted sum of a model's cross-entropies in nats.

    In training a share `LIGHT` of the prompt tokens (weight below 1), drawn at random, goes through the head and counts
    more in return: the same expected gradient for less work.

    Args:
        model: to train.
        repeats: weight of the unlikelihood (Welleck et al. 2020) of saying the token at hand once more where the text
            does not: with a head tied to the embedding a small model tends to, and greedy decoding then never gets out
            of it.
    """

    def __init__(self, model: LlamaForCausalLM, repeats: float = 0.0):
        super().__init__()
        self.model, self.repeats = model, repeats

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of a batch."""
        ids, weights = batch["input_ids"], batch["loss_weight"][:, 1:]
        if self.training:
            lucky = torch.rand(weights.shape, device=weights.device) < LIGHT
            weights = torch.where(weights >= 1.0, weights, weights / LIGHT * lucky)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = weights > 0
        parts = (hidden[wanted], ids[:, 1:][wanted], ids[:, :-1][wanted], weights[wanted])
        total = hidden.new_zeros(())
        for states, targets, at_hand, weight in zip(*(part.split(CHUNK) for part in parts)):
            logits = self.model.lm_head(states).float()
            losses = cross_entropy(logits, targets, reduction="none")
            if self.repeats:
                again = logits.gather(1, at_hand[:, None])[:, 0] - logits.logsumexp(1)
                unlikely = -torch.log1p(-again.exp().clamp(max=0.999))
                losses = losses + self.repeats * unlikely * (at_hand != targets)
            total = total + (losses * weight).sum()
        return total


@torch.no_grad()
def answer_loss(model: LlamaForCausalLM, batches: list[Batch]) -> float:
    """Mean cross-entropy (nats) on the answer tokens of `batches`."""
    module = Text(model).eval()
    total = weight = 0.0
    for batch in batches:
        answers = {"input_ids": batch["input_ids"], "loss_weight": (batch["loss_weight"] >= 1.0).float()}
        total += float(module(answers))
        weight += float(answers["loss_weight"][:, 1:].sum())
    return total / weight
