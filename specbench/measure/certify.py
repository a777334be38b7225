"""Is the answer of a method the answer of the target? Judged on token ids, never on text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from specbench.decoding.stop import truncate_at_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on one answer (None: not judged, as under sampling), and what it rests on.

    first_divergence: index of the first difference, counted from the first new token; None when exact.
    margin: the target's logit of the reference's token less that of the answer's, at that place; None when
    there are no two tokens to compare. noise: the rounding noise that the margin was held against, in logits; None
    without a margin.
    """

    verdict: str | None
    first_divergence: int | None
    margin: float | None
    noise: float | None


def certify(
    reference: Sequence[int],
    answer: Sequence[int],
    stop_ids: Collection[int],
    margin_at: Callable[[int, int, int], float],
    noise: Callable[[], float],
) -> Certificate:
    """Compares an answer with the reference: new token ids of both, cut after the first stop token.

    Where they first differ in a token, `margin_at(index, reference_token, answer_token)` is asked for the
    target's margin between the two after the common prefix: within `noise()` it is a tie, a choice that
    rounding alone makes differently. Everything else is a violation, also an answer that ends before or goes
    on after the reference without a differing token: the token that ends an answer is a token, so no near-tie
    explains a missing one. So is an equal answer that goes on after its stop token.
    """
    ours, theirs = truncate_at_stop(answer, stop_ids), truncate_at_stop(reference, stop_ids)
    for index, (expected, found) in enumerate(zip_longest(theirs, ours)):
        if expected == found:
            continue
        if expected is None or found is None:
            return Certificate("violation", index, None, None)
        margin, limit = margin_at(index, expected, found), noise()
        return Certificate("tie" if abs(margin) <= limit else "violation", index, margin, limit)
    if len(answer) > len(ours):
        return Certificate("violation", len(ours), None, None)
    return Certificate("exact", None, None, None)
