"""Trains Medusa-1's heads: `python -m methods.medusa.train pair=... [conversations=FILE] [out=FOLDER]`.

Cross-entropy of each head against the target's own distribution of the token that it guesses; head i weighs 0.8^i (Cai
et al. 2024, section 2.2.1). Unlike in the authors' script the loss counts the tokens that the assistant says by the
token that is guessed. Heads share the target's output matrix, unless `own_output` gives each one of its own. At the end
a tree is made of the ranks at which the heads had the right tokens: the most frequent paths.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import torch

from methods.medusa.heads import MedusaHeads, save_heads
from methods.rank_trees import best_tree, counted_paths
from methods.training import (
    SETTINGS,
    agreement,
    batches,
    held_out_batches,
    soft_cross_entropy,
    training_pair,
)
from specbench import training
from specbench.compose import with_hydra
from specbench.decoding.target import StagedModel
from specbench.errors import one_line_errors
from specbench.pairs import load_pair
from specbench.values import Count, check_all

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

    from specbench.training import Batch

DECAY = 0.8
RANKS, COUNTED_BATCHES = 10, 40  # of a tree: the lowest ranks, and batches that they are counted on


class Distillation(torch.nn.Module):
    """batch -> cross-entropy of the heads against the target, which stays as it is."""

    def __init__(self, heads: MedusaHeads, target: StagedModel):
        super().__init__()
        self.heads, self.target = heads, target

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the cross-entropies of a batch."""
        finals = self.finals(batch)
        states = self.heads(finals.to(self.heads.weight.dtype))
        total = torch.zeros((), device=finals.device)
        for i in range(self.heads.heads):
            student, teacher, own = self.shifted(states[:, :, i], finals, batch, i)
            loss = soft_cross_entropy(student, lambda s, i=i: self.logits(s, i), teacher, self.head, own)
            total = total + DECAY**i * loss
        return total

    def finals(self, batch: Batch) -> torch.Tensor:
        """The target's states [B, T, d] behind its final norm."""
        with torch.no_grad():
            return self.target.model.model(batch["input_ids"], use_cache=False).last_hidden_state

    def shifted(
        self, student: torch.Tensor, finals: torch.Tensor, batch: Batch, i: int
    ) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """Head i's states beside those of the target that say the same token, 1 + i places on, and its weights."""
        n = student.shape[1] - 1 - i
        return student[:, :n], finals[:, 1 + i :], {"loss_weight": batch["loss_weight"][:, 1 + i :]}

    def logits(self, states: torch.Tensor, i: int) -> torch.Tensor:
        """States [n, d] of head i -> logits [n, vocab]."""
        if self.heads.output is None:
            return self.head(states)
        return states @ self.heads.output[i].T

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """The target's head; the heads are trained in float32, whatever the target's dtype."""
        return self.target.unembed(states.to(self.target.dtype))

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [K, n] of the heads and of the target, behind the places that K more said tokens follow."""
        finals, k = self.finals(batch), self.heads.heads
        states = self.heads(finals.to(self.heads.weight.dtype))
        said = batch["loss_weight"] == 1.0
        n = said.shape[1] - 1 - k
        among = torch.stack([said[:, 2 + i : 2 + i + n] for i in range(k)]).all(0)
        student = [self.logits(states[:, :n, i][among], i).argmax(-1) for i in range(k)]
        teacher = [self.head(finals[:, 1 + i : 1 + i + n][among]).argmax(-1) for i in range(k)]
        return torch.stack(student), torch.stack(teacher)

    @torch.no_grad()
    def rank_paths(self, batch: Batch) -> Counter[tuple[int, ...]]:
        """How often each path of ranks, and each beginning of one, was that of the tokens that the assistant said."""
        ids, finals = batch["input_ids"], self.finals(batch)
        states = self.heads(finals.to(self.heads.weight.dtype))
        k, (b, t) = self.heads.heads, ids.shape
        ranks = torch.full((b, t, k), RANKS, device=ids.device)
        for i in range(k):
            n = t - 2 - i
            for row in range(b):
                logits = self.logits(states[row, :n, i], i)
                own = logits.gather(1, ids[row, 2 + i :].unsqueeze(1))
                ranks[row, :n, i] = (logits > own).sum(1).clamp(max=RANKS)
        # The pending token and all behind it are the assistant's.
        said = batch["loss_weight"] == 1.0
        for i in range(k):
            ranks[:, : t - 2 - i, i].masked_fill_(~said[:, 2 + i :], RANKS)
        places = said[:, 1 : t - k].nonzero().unbind(1)
        return counted_paths(ranks[places].tolist(), RANKS)


def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_medusa.yaml) and returns the folder of the finished heads."""
    check_all(cfg, SETTINGS | {"heads": Count, "nodes": Count, "own_output": bool})
    pair = load_pair(training_pair(cfg.pair), cfg.seed, with_draft=False)
    target = StagedModel(pair.target)
    torch.manual_seed(cfg.seed)
    vocab = target.lm_head.weight.shape[0] if cfg.own_output else None
    heads = MedusaHeads(cfg.heads, target.hidden_size, vocab).to(target.device)
    if heads.output is not None:
        with torch.no_grad():
            heads.output.copy_(target.lm_head.weight.expand_as(heads.output))
    module, held_out = Distillation(heads, target), held_out_batches(cfg, pair)

    def evaluate() -> dict[str, float]:
        agreements = agreement(module.choices, held_out)
        return {"held_out_agreement": agreements[0]} | {
            f"head_{i + 1}_agreement": value for i, value in enumerate(agreements)
        }

    def save(out: Path, figures: dict[str, float]) -> None:
        found: Counter[tuple[int, ...]] = Counter()
        for batch in islice(batches(cfg, pair), COUNTED_BATCHES):
            found += module.rank_paths({name: tensor.to(pair.device) for name, tensor in batch.items()})
        tree = best_tree(found, cfg.nodes)
        counts = [found[path] for path in tree]
        dtype = getattr(torch, cfg.save_dtype)
        save_heads(heads, out, dtype, tree=tree, tree_counts=counts, **figures)

    return training.train(module, batches(cfg, pair), evaluate, save, cfg)


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    return with_hydra("train_medusa", one_line_errors()(train))


if __name__ == "__main__":
    sys.exit(main())
