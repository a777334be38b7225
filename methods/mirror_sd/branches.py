"""Which continuations are drafted while the target is still busy: a branch for each of its likely decisions.

A decision is a pair (accepted, token): how many of the k draft tokens the target keeps, and its own token behind them.
Mirror-SD (Bhendawade et al. 2025, eq. 6 to 8) guesses them from the target's own head at an early layer, SSD (Kumar et
al. 2026) from the draft model's distributions.
"""

from __future__ import annotations

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
    logits: torch.Tensor, path: torch.Tensor, kappa: int, most: int | None = None, roots_only: bool = False
) -> Branches:
    """The `kappa` likeliest decisions for each number of accepted tokens.

    logits: [1 + k, rows] after the pending token and each draft token; path: [k] rows of the draft tokens. A draft
    token is no candidate at its own place: accepting it would be another decision. most: keep only so many of all,
    by the probability of getting as far as there times that of the token, both under `logits`. roots_only: nothing is
    guessed for more than 0 accepted tokens (the narrow reading of the paper's eq. 7). tokens are rows.
    """
    k = path.shape[0]
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    at = torch.arange(k, device=logits.device)
    reaching = torch.zeros(k + 1, device=logits.device)
    reaching[1:] = log_probs[at, path].cumsum(0)
    log_probs[at, path] = float("-inf")
    if roots_only:
        log_probs, reaching = log_probs[:1], reaching[:1]
    kappa = min(kappa, logits.shape[-1] - 1)
    scores, rows = log_probs.topk(kappa, dim=-1)
    scores = scores + reaching[: scores.shape[0]].unsqueeze(1)
    n = scores.numel() if most is None else min(most, scores.numel())
    chosen = scores.flatten().topk(n).indices
    return Branches(chosen // kappa, rows.flatten()[chosen])
