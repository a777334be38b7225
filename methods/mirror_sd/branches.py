"""Which continuations are drafted while the target is still busy: a branch for each of its likely decisions.

A decision is a pair (accepted, token): how many of the k draft tokens the target keeps, and its own token behind them.
Mirror-SD (Bhendawade et al. 2025, eq. 6 to 8) guesses the token from the target's own head at an early layer, SSD
(Kumar et al. 2026) from the draft model's distributions. How far the target follows the draft, the draft model knows
best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Branches:
    """Decisions, the likeliest first.

    Attributes:
        accepted: [m] numbers of accepted tokens.
        tokens: [m] the target's tokens behind them.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor

    def index(self) -> dict[tuple[int, int], int]:
        """(accepted, token) -> index of the branch."""
        pairs = torch.stack([self.accepted, self.tokens]).tolist()
        return {pair: i for i, pair in enumerate(zip(*pairs))}


def likely_decisions(
    probs: torch.Tensor,
    path: torch.Tensor,
    reaching: torch.Tensor,
    kappa: int,
    most: int | None = None,
    floor: float = 0.0,
    roots_only: bool = False,
) -> Branches:
    """The `kappa` likeliest decisions for each number of accepted tokens.

    Args:
        probs: [1 + k, n] guesses of the target's token behind the pending token and each draft token; overwritten.
        path: [k] columns of the draft tokens, each of which is no candidate at its own place: accepting it would be
            another decision.
        reaching: [1 + k] probability that the target accepts as far as there.
        kappa: decisions for each number of accepted tokens.
        most: keep only so many of all, by the product of both probabilities; None: all.
        floor: and only those for which that product is as high, or else the likeliest alone.
        roots_only: guess for 0 accepted tokens alone (the narrow reading of the paper's eq. 7).

    Returns:
        Decisions whose tokens are columns.
    """
    probs[torch.arange(path.shape[0], device=path.device), path] = -1.0
    if roots_only:
        probs, reaching = probs[:1], reaching[:1]
    kappa = min(kappa, probs.shape[-1] - 1)
    if floor > 0:  # the likeliest of the few tokens that are likely anywhere are found in half the time
        highest = (probs * reaching.unsqueeze(1)).amax(0)
        least = highest.amax().clamp(max=floor)
        likely = (highest >= least).nonzero().squeeze(1)
        probs, kappa = probs[:, likely], min(kappa, likely.shape[0])
    scores, columns = probs.topk(kappa, dim=-1)
    scores = (scores * reaching.unsqueeze(1)).flatten()
    scores, chosen = scores.topk(scores.numel() if most is None else min(most, scores.numel()))
    columns = columns.flatten()
    if floor > 0:
        chosen, columns = chosen[scores >= least], likely[columns]
    return Branches(chosen // kappa, columns[chosen])


def prefix_products(probs: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """[1 + k] probability of the first 0 to k tokens of a path, [k] columns, under probs [1 + k, n]."""
    own = probs[:-1].gather(1, path.unsqueeze(1)).squeeze(1)
    return torch.cat([own.new_ones(1), own.cumprod(0)])


def mixture(exit_probs: torch.Tensor, own: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """The mean [n, vocab] of two distributions; of logarithms it would take several times as long.

    Args:
        exit_probs: [n, vocab], overwritten.
        own: [n, k] over the tokens `kept`.
        kept: [k] token ids; None for the first k.
    """
    if kept is None:
        exit_probs[:, : own.shape[1]] += own
    else:
        exit_probs.index_add_(1, kept, own)
    return exit_probs.mul_(0.5)
