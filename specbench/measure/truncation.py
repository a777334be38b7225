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


def may_be_drawn(logits: torch.Tensor, decoding: SamplingParams, moved: float = 0.0) -> torch.Tensor:
    """Which tokens top_k and top_p do not leave out, or not if rounding moves logits.

    Args:
        logits: [..., vocab] of the target.
        decoding: how tokens are chosen; temperature 0 counts as 1.
        moved: the largest change of a distance between two logits.

    Returns:
        [..., vocab].
    """
    scaled, by = _scaled(logits, decoding, moved)
    if not decoding.truncation:
        return torch.ones_like(scaled, dtype=torch.bool)
    in_order = scaled.sort(dim=-1, descending=True).values
    rivals = in_order >= in_order[..., _ranks(decoding, scaled) - 1].unsqueeze(-1) - by
    count = (rivals & (_odds_before(in_order, rivals) < _odds(decoding.top_p) + by)).sum(-1, keepdim=True)
    return scaled >= in_order.gather(-1, count - 1) - by


def is_always_drawn(logits: torch.Tensor, decoding: SamplingParams, moved: float) -> torch.Tensor:
    """Which tokens top_k and top_p do not leave out, whatever moves logits; as `may_be_drawn`."""
    scaled, by = _scaled(logits, decoding, moved)
    if not decoding.truncation:
        return torch.ones_like(scaled, dtype=torch.bool)
    in_order = scaled.sort(dim=-1, descending=True).values
    ranked = torch.arange(scaled.shape[-1], device=scaled.device) < _ranks(decoding, scaled)
    count = (ranked & (_odds_before(in_order, ranked) < _odds(decoding.top_p) - by)).sum(-1, keepdim=True)
    first_left_out = torch.nn.functional.pad(in_order, (0, 1), value=-torch.inf).gather(-1, count)
    return scaled > first_left_out + by


def _scaled(logits: torch.Tensor, decoding: SamplingParams, moved: float) -> tuple[torch.Tensor, float]:
    """Logits and their change, both divided by the temperature."""
    temperature = decoding.temperature or 1.0
    return logits.double() / temperature, moved / temperature


def _ranks(decoding: SamplingParams, scaled: torch.Tensor) -> int:
    return min(decoding.top_k or scaled.shape[-1], scaled.shape[-1])


def _odds_before(in_order: torch.Tensor, left_in: torch.Tensor) -> torch.Tensor:
    """For each logit [..., vocab], in descending order, the log odds of those before it, given `left_in`.

    Not from probabilities: at a low temperature the second token's may be too small for a float.
    """
    of_these = in_order.masked_fill(~left_in, -torch.inf)
    before = torch.nn.functional.pad(of_these.logcumsumexp(-1)[..., :-1], (1, 0), value=-torch.inf)
    return before - of_these.flip(-1).logcumsumexp(-1).flip(-1)


def _odds(share: float) -> float:
    """The log odds of a probability above 0."""
    return math.log(share / (1.0 - share)) if share < 1.0 else math.inf


def truncated(probs: torch.Tensor, logits: torch.Tensor, decoding: SamplingParams) -> torch.Tensor:
    """The distributions [n, vocab] that tokens are drawn from.

    Args:
        probs: [n, vocab] the whole ones.
        logits: [n, vocab] of the target.
        decoding: how tokens are chosen.
    """
    if not decoding.truncation:
        return probs
    probs = probs * may_be_drawn(logits, decoding)
    return probs / probs.sum(-1, keepdim=True)


def highest_probs(
    probs: torch.Tensor, logits: torch.Tensor, decoding: SamplingParams, noise: float
) -> torch.Tensor:
    """As `truncated`, but no lower than with any edge to which rounding, of `noise` logits, can lead."""
    if not decoding.truncation:
        return probs
    noise = max(noise, LEAST_NOISE)
    always = (probs * is_always_drawn(logits, decoding, noise)).sum(-1, keepdim=True)
    # One token is always drawn, if not always the same one.
    return probs * may_be_drawn(logits, decoding, noise) / always.maximum(probs.amax(-1, keepdim=True))


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
        most = scaled.masked_fill(~may_be_drawn(logits, decoding, moved), -torch.inf)
        least = scaled.masked_fill(~is_always_drawn(logits, decoding, moved), -torch.inf)
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
