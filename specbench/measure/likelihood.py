"""How likely drawn tokens are: are they drawn from the target's distributions?

For a token x that is drawn from probabilities p, log p(x) plus the entropy of p is 0 on average, and its variance is
known. Summed over many tokens it tells answers that are not the target's, without equal random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.measure.numeric_noise import forced_logits

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel

BLOCK = 32  # tokens that the target is fed at a time


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely the tokens of an answer are.

    Attributes:
        tokens: how many.
        logprob: sum of log p.
        surprise: sum of log p and of the entropy: 0 on average, if they are drawn.
        variance: of that sum.
    """

    tokens: int
    logprob: float
    surprise: float
    variance: float


def likelihood(target: StagedModel, prompt: list[int], tokens: list[int], temperature: float) -> Likelihood:
    """How likely the target finds an answer at a temperature."""
    return of_logits(forced_logits(target, prompt, tokens, BLOCK), tokens, temperature)


def of_logits(logits: torch.Tensor, tokens: list[int], temperature: float) -> Likelihood:
    """As `likelihood`, from the target's logits [n, vocab] at the places of n tokens."""
    logp = token_logprobs(logits, temperature)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    variance = (p * logp.square()).sum(-1) - entropy.square()
    chosen = logp.gather(1, torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]).squeeze(1)
    return Likelihood(
        len(tokens),
        chosen.sum().item(),
        (chosen + entropy).sum().item(),
        variance.clamp(min=0).sum().item(),
    )


def token_logprobs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [n, vocab] at a temperature, in 64 bits; 0 is taken for 1."""
    return (logits / (temperature or 1.0)).log_softmax(-1).double()
