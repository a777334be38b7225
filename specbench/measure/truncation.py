"""What rounding can change where top_k and top_p leave tokens out: which tokens can be drawn at all.

Far from that edge a change of logits by d changes odds by a factor of exp(d / temperature). At the edge it also lets
tokens in or leaves them out, with all of their probability. The functions here bound both. Of tokens that are equally
likely, programs leave out different ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specbench.decoding.sampling import SamplingParams

LEAST_NOISE = 1e-3  # logits: more than rounding in float32
LARGEST_MARGIN = 64.0  # logits that rounding never moves
RANDOM_STEP = 2.0**-24  # between random numbers in float32: what is less likely is not drawn


def left_in(
    logits: torch.Tensor, decoding: SamplingParams, moved: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens top_k and top_p never leave out, and which they may not, if rounding moves logits.

    Args:
        logits: [..., vocab] of the target.
        decoding: how tokens are chosen; temperature 0 counts as 1.
        moved: the largest change of a distance between two logits.

    Returns:
        Two masks [..., vocab]; the second holds the first.
    """
    if not decoding.truncation:
        every = torch.ones_like(logits, dtype=torch.bool)
        return every, every
    temperature = decoding.temperature or 1.0
    scaled, by = logits.double() / temperature, moved / temperature
    in_order, odds = scaled.sort(dim=-1, descending=True).values, _odds(decoding.top_p)
    vocab = scaled.shape[-1]
    ranks = min(decoding.top_k or vocab, vocab)
    ranked = torch.arange(vocab, device=scaled.device) < ranks
    fewest = (ranked & (_odds_before(in_order, ranked) < odds - by)).sum(-1, keepdim=True)
    next_one = torch.nn.functional.pad(in_order, (0, 1), value=-torch.inf).gather(-1, fewest)
    rivals = in_order >= in_order[..., ranks - 1].unsqueeze(-1) - by
    most = (rivals & (_odds_before(in_order, rivals) < odds + by)).sum(-1, keepdim=True).clamp(min=1)
    return scaled > next_one + by, scaled >= in_order.gather(-1, most - 1) - by


def _odds_before(in_order: torch.Tensor, these: torch.Tensor) -> torch.Tensor:
    """For each logit [..., vocab], in descending order, the log odds of those before it, given `these`.

    Not from probabilities: at a low temperature the second token's may be too small for a float.
    """
    of_these = in_order.masked_fill(~these, -torch.inf)
    before = torch.nn.functional.pad(of_these.logcumsumexp(-1)[..., :-1], (1, 0), value=-torch.inf)
    return before - of_these.flip(-1).logcumsumexp(-1).flip(-1)


def _odds(share: float) -> float:
    """The log odds of a probability above 0."""
    return math.log(share / (1.0 - share)) if share < 1.0 else math.inf


def highest_probs(
    probs: torch.Tensor, logits: torch.Tensor, decoding: SamplingParams, noise: float
) -> torch.Tensor:
    """Probabilities [n, vocab], but no lower than with any cut to which rounding, of `noise` logits, can lead.

    Args:
        probs: [n, vocab] without a cut.
        logits: [n, vocab] of the target.
        decoding: how tokens are chosen.
        noise: of logits.
    """
    if not decoding.truncation:
        return probs
    always, ever = left_in(logits, decoding, max(noise, LEAST_NOISE))
    # One token is always drawn, if not always the same one.
    least_sum = (probs * always).sum(-1, keepdim=True).maximum(probs.amax(-1, keepdim=True))
    return probs * ever / least_sum


def odds_apart(least: torch.Tensor, most: torch.Tensor, other: int, uniform: float) -> float:
    """The least change of log odds with which a random number falls into a token's interval of any width.

    Args:
        least: [vocab] logits, divided by the temperature, of the tokens that are always drawn; -inf for others.
        most: the same of those that may be drawn.
        other: the token.
        uniform: the random number.
    """
    before, after = least[:other], least[other + 1 :]
    low = before.logsumexp(0) - most[other:].logsumexp(0)
    high = most[: other + 1].logsumexp(0) - after.logsumexp(0)
    width = most[other] - torch.cat([before, after]).logsumexp(0)
    drawn, least_width = torch.logit(low.new_tensor([uniform, RANDOM_STEP]), RANDOM_STEP)
    return float(torch.stack([low - drawn, drawn - high, least_width - width]).max().clamp(min=0.0))


def truncated_margin(logits: torch.Tensor, other: int, decoding: SamplingParams, uniform: float) -> float:
    """As `numeric_noise.drawn_margin`: the least change of logits [vocab] with which `uniform` draws `other`.

    It is found by bisection. A token's interval reaches furthest down if those before it are left out, as far as the
    change allows, and those after it are not; and furthest up the other way round.
    """
    scaled = logits.double() / decoding.temperature

    def is_possible(moved: float) -> bool:
        always, ever = left_in(logits, decoding, moved)
        least, most = (scaled.masked_fill(~mask, -torch.inf) for mask in (always, ever))
        return decoding.temperature * odds_apart(least, most, other, uniform) <= moved

    impossible, possible = 0.0, LARGEST_MARGIN
    if is_possible(impossible):
        return 0.0
    if not is_possible(possible):
        return math.inf
    while possible - impossible > LEAST_NOISE / 1000:
        middle = (impossible + possible) / 2
        if is_possible(middle):
            possible = middle
        else:
            impossible = middle
    return possible
