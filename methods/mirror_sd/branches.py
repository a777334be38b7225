"""Which continuations are drafted while the target is still busy: a branch for each of its likely decisions.

A decision is a pair (accepted, token): how many of the k draft tokens the target keeps, and its own token behind them.
Mirror-SD (Bhendawade et al. 2025, eq. 6 to 8) guesses the token from the target's own head at an early layer, SSD
(Kumar et al. 2026) from the draft model's distributions. How far the target follows the draft, the draft model knows
best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Branches:
    """accepted, tokens: [m] the decisions, the likeliest first."""

    accepted: torch.Tensor
    tokens: torch.Tensor

    def index(self) -> dict[tuple[int, int], int]:
        """(accepted, token) -> which branch it is."""
        pairs = torch.stack([self.accepted, self.tokens]).tolist()
        return {pair: i for i, pair in enumerate(zip(*pairs))}


def likely_decisions(
    log_probs: torch.Tensor,
    path: torch.Tensor,
    reaching: torch.Tensor,
    kappa: int,
    most: int | None = None,
    roots_only: bool = False,
) -> Branches:
    """The `kappa` likeliest decisions for each number of accepted tokens.

    log_probs: [1 + k, n] guesses of the target's token behind the pending token and each draft token; path: [k] columns
    of the draft tokens, each of which is no candidate at its own place: accepting it would be another decision.
    reaching: [1 + k] log-probability that the target gets as far as there. most: keep only so many of all, by the
    product of both. roots_only: nothing is guessed for more than 0 accepted tokens (the narrow reading of the paper's
    eq. 7). The result's tokens are columns.
    """
    k = path.shape[0]
    log_probs = log_probs.clone()
    log_probs[torch.arange(k, device=path.device), path] = float("-inf")
    if roots_only:
        log_probs, reaching = log_probs[:1], reaching[:1]
    kappa = min(kappa, log_probs.shape[-1] - 1)
    scores, columns = log_probs.topk(kappa, dim=-1)
    scores = scores + reaching.unsqueeze(1)
    n = scores.numel() if most is None else min(most, scores.numel())
    chosen = scores.flatten().topk(n).indices
    return Branches(chosen // kappa, columns.flatten()[chosen])


def prefix_sums(log_probs: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """[1 + k] log-probability of the first 0 to k tokens of a path, [k] columns, under log_probs [1 + k, n]."""
    own = log_probs[:-1].gather(1, path.unsqueeze(1)).squeeze(1)
    return torch.cat([own.new_zeros(1), own.cumsum(0)])


def mixture(exit_log_probs: torch.Tensor, own: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """The mean of two distributions, as log-probabilities [n, vocab]: one over the vocabulary, and one over its tokens
    `kept` (None: its first ones)."""
    whole = torch.full_like(exit_log_probs, float("-inf"))
    if kept is None:
        whole[:, : own.shape[1]] = own
    else:
        whole[:, kept] = own
    return torch.logaddexp(exit_log_probs, whole) - math.log(2)
