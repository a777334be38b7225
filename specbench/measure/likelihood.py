"""How likely drawn tokens are: are they drawn from the target's distributions?

For a token x that is drawn from probabilities p, log p(x) plus the entropy of p is 0 on average, and its variance is
known. Summed over many tokens it exposes answers that are not the target's, without equal random numbers. A sum hides a
single token that is never drawn, so the least likely tokens are also judged separately.

The logits that they were drawn from come from passes of other shapes, which round differently; in half precision this
matters at low temperatures. The expected sum is therefore also computed for distributions blurred by that noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench.measure.numeric_noise import forced_logits, forced_rows
from specbench.measure.truncation import highest_probs

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.sampling import SamplingParams

BLOCK = 32  # tokens per block
LARGEST_EXPONENT = 700.0  # whose power of e a float holds
LEAST = -1e3  # log p of a token that is never drawn, whose share of a moment is 0
RAREST = 4  # tokens of an answer that are judged separately
BLURS = 8  # random perturbations whose distributions are averaged
# Standard deviation of a logit / the rounding noise, which is twice the largest of some hundred changes of a distance
# of two logits: at least as much as is observed.
DEVIATION = 0.25


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely the tokens of an answer are.

    Attributes:
        tokens: how many.
        logprob: sum of log p.
        surprise: sum of log p and of the entropy: 0 on average, if they are drawn.
        variance: of that sum.
        third: its third central moment, below 0: unlikely tokens are far off.
        blurred_surprise: mean of that sum, if they are drawn from distributions blurred by rounding.
        blurred_variance: of the sum in that case.
        blurred_third: likewise.
        rarest: for its least likely tokens, the chances [up to `RAREST`], rising, of a token that is as unlikely.
    """

    tokens: int
    logprob: float
    surprise: float
    variance: float
    third: float
    blurred_surprise: float
    blurred_variance: float
    blurred_third: float
    rarest: list[float]


def likelihood(
    target: StagedModel,
    prompt: list[int],
    tokens: list[int],
    decoding: SamplingParams,
    stop_ids: Collection[int],
    noise: float = 0.0,
    edge_noise: float = 0.0,
) -> Likelihood:
    """The likelihood of an answer under the target, its end included.

    Args:
        target: the referee.
        prompt: token ids.
        tokens: of the answer, with its stop token or without.
        decoding: how it was drawn.
        stop_ids: that end an answer.
        noise: as in `of_logits`.
        edge_noise: likewise.
    """
    logits = judging_logits(target, prompt, [*tokens, 0])
    drawn = with_stop(tokens, decoding.max_new_tokens, stop_ids, logits[-1])
    return of_logits(logits[: len(drawn)], drawn, decoding, noise, edge_noise)


def is_blurred(dtype: torch.dtype, decoding: SamplingParams) -> bool:
    """Whether rounding changes distributions by something that counts.

    In float32 it is negligible beside a temperature, but not at the edge of top_k and top_p.
    """
    return dtype != torch.float32 or bool(decoding.truncation)


def judging_logits(target: StagedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits [len(answer), vocab] by the model's own forward, so that no fault of our passes judges itself.

    Where that would take too long, our passes of one token are used, as in AR decoding.
    """
    if is_judged_by_ours(target):
        return forced_logits(target, prompt, answer, block=1)
    return forced_rows(target, prompt, answer, BLOCK, 1)[0]


def is_judged_by_ours(target: StagedModel) -> bool:
    """Whether our own passes judge: on a CPU in half precision, where one of the model's forward may take seconds."""
    return target.device.type == "cpu" and target.dtype != torch.float32


def with_stop(tokens: list[int], limit: int, stop_ids: Collection[int], logits: torch.Tensor) -> list[int]:
    """The drawn tokens of an answer, with the stop token that some engines leave out.

    Args:
        tokens: of the answer.
        limit: tokens that it may have.
        stop_ids: that end an answer; the likeliest counts.
        logits: [vocab] after the answer.
    """
    if not stop_ids or len(tokens) >= limit or (tokens and tokens[-1] in stop_ids):
        return tokens
    return [*tokens, max(stop_ids, key=lambda token: float(logits[token]))]


def of_logits(
    logits: torch.Tensor,
    tokens: list[int],
    decoding: SamplingParams,
    noise: float = 0.0,
    edge_noise: float = 0.0,
) -> Likelihood:
    """As `likelihood`, from the target's logits [n, vocab] at the places of n tokens.

    With top_k or top_p, log p is that of the whole distribution: it is finite for every token. Its mean and variance
    are those of tokens drawn from the truncated one.

    Args:
        logits: of the target.
        tokens: drawn ones.
        decoding: how they were drawn.
        noise: rounding noise of the logits that tokens were drawn from, as `numeric_noise` measures it, for
            probabilities.
        edge_noise: the same where it matters for which tokens top_k and top_p leave out, which is in float32, too.
    """
    logprob = surprise = 0.0
    rarest: list[float] = []
    sharp, blurred = torch.zeros(3, dtype=torch.double), torch.zeros(3, dtype=torch.double)
    generator = torch.Generator(logits.device).manual_seed(sum(tokens))
    ids = torch.tensor(tokens, dtype=torch.long, device=logits.device)
    # In parts: all at once would take several times the memory of the logits.
    for block, drawn in zip(logits.split(BLOCK), ids.split(BLOCK)):
        logp = token_logprobs(block, decoding.temperature)
        probs, floored = logp.exp(), logp.clamp(min=LEAST)
        p = decoding.probs(block).double() if decoding.truncation else probs
        entropy = -(p * floored).sum(-1)
        chosen = logp.gather(1, drawn[:, None]).squeeze(1)
        logprob += chosen.sum().item()
        surprise += (chosen + entropy).sum().item()
        highest = highest_probs(probs, block, decoding, max(noise, edge_noise))
        tails = torch.where(logp <= chosen[:, None], highest, 0.0).sum(-1)
        if not decoding.truncation:  # only a token that is left out has no chance at all
            tails = tails.clamp(min=torch.finfo(tails.dtype).tiny)
        rarest = sorted([*rarest, *tails.tolist()])[:RAREST]
        apart = floored + entropy[:, None]
        sharp += moments(p, apart)
        if noise > 0.0:
            p = torch.zeros_like(p)
            for _ in range(BLURS):
                moved = torch.randn(block.shape, generator=generator, device=block.device)
                p += decoding.probs(block + DEVIATION * noise * moved) / BLURS
            blurred += moments(p, apart)
    _, variance, third = sharp.tolist()
    expected, blurred_variance, blurred_third = blurred.tolist() if noise > 0.0 else (0.0, variance, third)
    most = most_changed(noise, decoding.temperature)
    rarest = [min(tail * most, 1.0) for tail in rarest]
    return Likelihood(
        len(tokens), logprob, surprise, variance, third, expected, blurred_variance, blurred_third, rarest
    )


def most_changed(noise: float, temperature: float) -> float:
    """The most by which logits that differ by no more than the noise change a probability, or odds, as a factor."""
    return math.exp(min(noise / (temperature or 1.0), LARGEST_EXPONENT))


def moments(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean, variance and third central moment [3] of a sum of one value from each row; p, values: [n, vocab]."""
    mean = (p * values).sum(-1, keepdim=True)
    apart = values - mean
    return torch.stack([mean.sum(), (p * apart.square()).sum(), (p * apart.pow(3)).sum()]).cpu()


def token_logprobs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [n, vocab] at a temperature, in 64 bits; temperature 0 counts as 1."""
    return (logits / (temperature or 1.0)).log_softmax(-1).double()
