"""Judges an engine's answers by its own plain server, if only the engine has the target's weights.

`engine.target` may name a quantised file. The logits of the pair are not those of the file, so margins and rounding
come from the log-probabilities that the plain server reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from specbench.decoding.sampling import SamplingParams, truncate_at_stop
from specbench.measure.numeric_noise import ENGINE_NOISE

if TYPE_CHECKING:
    from specbench.decoding.state import Request
    from specbench.measure.arms import Served

PLACES = 4  # of each sample, at which the rounding noise is measured


class NotReportedError(Exception):
    """The plain server reports no log-probabilities at a place, as llama.cpp where a token ends inside a character."""


@dataclass(frozen=True)
class EngineReferee:
    """An engine's plain server as the judge of its greedy answers.

    Args:
        served: the engine.
        samples: greedy requests on whose answers the rounding noise is measured.
        stop_ids: that end an answer.
    """

    served: Served
    samples: Sequence[Request]
    stop_ids: Collection[int]

    @cached_property
    def noise(self) -> float | None:
        """Twice the largest change of the distance of the engine's first two choices, at most `ENGINE_NOISE` logits.

        The change is that between an answer, which is decoded token by token, and a prompt that ends in front of the
        same place, which is read in one pass. None if the engine reports no log-probabilities.
        """
        changes = []
        for request in self.samples:
            tokens, tops = self.served.tops(request)
            for place in range(1, min(len(tokens), len(tops)), max(1, len(tokens) // PLACES)):
                alone, again = tops[place], self._likeliest(request, tokens[:place])
                best = sorted(alone, key=lambda token: -alone[token])[:2]
                if len(best) == 2 and again.keys() >= {*best}:
                    first, second = best
                    changes.append(abs(again[first] - again[second] - (alone[first] - alone[second])))
        return min(2 * max(changes), ENGINE_NOISE) if changes else None

    def margin_at(self, request: Request, answer: Sequence[int]) -> Callable[[int, int, int], float]:
        """The function `margin_at` of `certify`, for places of an answer; it may raise NotReportedError."""

        def margin(index: int, preferred: int, other: int) -> float:
            likeliest = self._likeliest(request, answer[:index])
            if not likeliest:
                raise NotReportedError
            if {preferred, other} <= likeliest.keys():
                apart = likeliest[preferred] - likeliest[other]
                # The reference may be what is wrong.
                return max(apart, max(likeliest.values()) - likeliest[preferred], key=abs)
            return math.inf  # one of them is far from the best

        return margin

    def worst_after(self, request: Request) -> Callable[[list[int], int], float]:
        """The function `worst_after` of `certify`: the plain server continues the answer after each difference.

        It may raise NotReportedError.
        """
        limit = request.decoding.max_new_tokens

        def worst(answer: list[int], index: int) -> float:
            if len(answer) > limit:
                return math.inf
            largest, margin_at = 0.0, self.margin_at(request, answer)
            while index + 1 < limit and answer[index] not in self.stop_ids and largest <= ENGINE_NOISE:
                plain, _ = self._ask(request, answer[: index + 1], limit - index - 1)
                plain, rest = truncate_at_stop(plain, self.stop_ids), answer[index + 1 :]
                differs = next((i for i, (a, b) in enumerate(zip(plain, rest)) if a != b), None)
                if differs is None:
                    return largest if len(plain) == len(rest) else math.inf
                index += 1 + differs
                largest = max(largest, abs(margin_at(index, plain[differs], answer[index])))
            return largest

        return worst

    def _likeliest(self, request: Request, answer: Sequence[int]) -> dict[int, float]:
        """Log-probabilities by id of the likeliest tokens after the beginning of an answer."""
        return next(iter(self._ask(request, answer, 1)[1]), {})

    def _ask(
        self, request: Request, answer: Sequence[int], n: int
    ) -> tuple[list[int], list[dict[int, float]]]:
        """The `n` tokens at most with which the plain server continues an answer; and as `Served.tops`."""
        prompt = [*request.prompt, *answer]
        return self.served.tops(replace(request, prompt=prompt, decoding=SamplingParams(n)))
