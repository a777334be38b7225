"""Which continuations are drafted while the target is still busy: a branch for each of its likely decisions.

A decision is a pair (accepted, token): how many of the k draft tokens the target keeps, and its own token after them.
Mirror-SD (Bhendawade et al. 2025, eq. 6 to 8) guesses the token from the target's own head at an early layer, SSD
(Kumar et al. 2026) from the draft model's distributions. The draft model knows best how far the target follows
the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from methods.common.rank_trees import likeliest_ids


@dataclass(frozen=True, slots=True)
class Branches:
    """Decisions, the likeliest first.

    Attributes:
        accepted: [m] numbers of accepted tokens.
        tokens: [m] the target's tokens after them.
        scores: [m] how likely they are.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor

    def likely(self, floor: float) -> tuple[Branches, dict[tuple[int, int], int]]:
        """Returns those that are at least as likely as `floor`, or else only the likeliest.

        Waits for the device; this side does so only here in a round.

        Returns:
            These, and (accepted, token) -> index of the branch.
        """
        enough = self.scores >= self.scores[:1].clamp(max=floor)
        accepted, tokens, are_enough = torch.stack([self.accepted, self.tokens, enough]).tolist()
        m = sum(are_enough)
        index = {pair: i for i, pair in enumerate(zip(accepted[:m], tokens[:m]))}
        return Branches(self.accepted[:m], self.tokens[:m], self.scores[:m]), index


def likely_decisions(
    probs: torch.Tensor,
    path: torch.Tensor,
    reaching: torch.Tensor,
    kappa: int,
    most: int | None = None,
    roots_only: bool = False,
) -> Branches:
    """The `kappa` likeliest decisions for each number of accepted tokens.

    Args:
        probs: [1 + k, n] guesses of the target's token after the pending token and each draft token; overwritten.
        path: [k] columns of the draft tokens; none is a candidate at its own position: accepting it would be another
            decision.
        reaching: [1 + k] probability that the target accepts that far.
        kappa: decisions for each number of accepted tokens.
        most: number of them to keep, by the product of both probabilities; None: all.
        roots_only: guess only for 0 accepted tokens (the narrow reading of the paper's eq. 7).

    Returns:
        Decisions whose tokens are columns.
    """
    # Indexed assignment would copy the number to a GPU, and wait for it.
    probs[: path.shape[0]].scatter_(1, path.unsqueeze(1), -1.0)
    if roots_only:
        probs, reaching = probs[:1], reaching[:1]
    kappa = min(kappa, probs.shape[-1] - 1)
    columns = likeliest_ids(probs, kappa)
    scores = (probs.gather(1, columns) * reaching.unsqueeze(1)).flatten()
    scores, chosen = scores.topk(scores.numel() if most is None else min(most, scores.numel()))
    return Branches(chosen // kappa, columns.flatten()[chosen], scores)


def prefix_products(probs: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """[1 + k] probability of the first 0 to k tokens of a path, [k] columns, under probs [1 + k, n]."""
    path_probs = probs[:-1].gather(1, path.unsqueeze(1)).squeeze(1)
    return torch.cat([path_probs.new_ones(1), path_probs.cumprod(0)])


def mixture(exit_probs: torch.Tensor, probs: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
    """The mean [n, vocab] of two distributions; with logarithms it would take several times as long.

    Args:
        exit_probs: [n, vocab], overwritten.
        probs: [n, k] over the tokens `token_ids`.
        token_ids: [k] token ids; None for the first k.
    """
    if token_ids is None:
        exit_probs[:, : probs.shape[1]] += probs
    else:
        exit_probs.index_add_(1, token_ids, probs)
    return exit_probs.mul_(0.5)
