"""What rounding can change where top_k and top_p leave tokens out: which tokens can be drawn at all.

Far from that edge a change of logits by d changes odds by a factor of exp(d / temperature). At the edge it also lets
tokens in or leaves them out, with all of their probability. The functions here bound both. Of tokens that are equally
likely, programs leave out different ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specbench.decoding.sampling import SamplingParams

LEAST_NOISE = 1e-3  # logits: more than rounding in float32
LARGEST_MARGIN = 64.0  # logits that rounding never moves
LARGEST_EXPONENT = 700.0  # whose power of e a float holds


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
    likelier = _mass_before(in_order, rivals)
    count = (rivals & (likelier < _moved_share(decoding.top_p, by))).sum(-1, keepdim=True)
    return scaled >= in_order.gather(-1, count - 1) - by


def is_always_drawn(logits: torch.Tensor, decoding: SamplingParams, moved: float) -> torch.Tensor:
    """Which tokens top_k and top_p do not leave out, whatever moves logits; as `may_be_drawn`."""
    scaled, by = _scaled(logits, decoding, moved)
    if not decoding.truncation:
        return torch.ones_like(scaled, dtype=torch.bool)
    in_order = scaled.sort(dim=-1, descending=True).values
    ranked = torch.arange(scaled.shape[-1], device=scaled.device) < _ranks(decoding, scaled)
    likelier = _mass_before(in_order, ranked)
    count = (ranked & (likelier < _moved_share(decoding.top_p, -by))).sum(-1, keepdim=True)
    first_left_out = torch.nn.functional.pad(in_order, (0, 1), value=-torch.inf).gather(-1, count)
    return scaled > first_left_out + by


def _scaled(logits: torch.Tensor, decoding: SamplingParams, moved: float) -> tuple[torch.Tensor, float]:
    """Logits and their change, both divided by the temperature."""
    temperature = decoding.temperature or 1.0
    return logits.float() / temperature, min(moved / temperature, LARGEST_EXPONENT)


def _ranks(decoding: SamplingParams, scaled: torch.Tensor) -> int:
    return min(decoding.top_k or scaled.shape[-1], scaled.shape[-1])


def _mass_before(in_order: torch.Tensor, left_in: torch.Tensor) -> torch.Tensor:
    """For each logit [..., vocab], in descending order, the probability of those before it, given `left_in`."""
    probs = in_order.masked_fill(~left_in, -torch.inf).softmax(-1)
    return probs.cumsum(-1) - probs


def _moved_share(share: float, by: float) -> float:
    """A probability whose odds change by a factor of exp(by)."""
    return 1.0 if share == 1.0 else 1.0 / (1.0 + (1.0 - share) / share * math.exp(-by))


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


def truncated_margin(logits: torch.Tensor, other: int, decoding: SamplingParams, uniform: float) -> float:
    """As `numeric_noise.drawn_margin`: the least change of logits [vocab] with which `uniform` draws `other`.

    It is found by bisection. A token's interval is widest if the tokens before it are left out, as far as the change
    allows, and those after it are not, or the other way round.
    """
    probs = replace(decoding, top_k=0, top_p=1.0).probs(logits).double()
    drawn = torch.logit(probs.new_tensor(uniform))

    def is_possible(moved: float) -> bool:
        most = probs * may_be_drawn(logits, decoding, moved)
        least = probs * is_always_drawn(logits, decoding, moved)
        before, after = least[:other].sum(), least[other + 1 :].sum()
        low = before / (before + most[other:].sum())
        high = most[: other + 1].sum() / (most[: other + 1].sum() + after)
        by = moved / decoding.temperature
        return bool((most[other] > 0) & (torch.logit(low) - by <= drawn) & (drawn <= torch.logit(high) + by))

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
