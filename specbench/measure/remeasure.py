"""Combines repeated measurements: each segment of text takes its time from the least disturbed attempt."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbench.measure.machine.watch import Counters, added

if TYPE_CHECKING:
    from specbench.decoding.trace import Generation

CAPTURED = math.inf  # the degree of a slice in which a pass was captured or compiled
STRETCH = 16  # tokens of an answer that are replaced together, in all arms


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of an arm.

    Attributes:
        tokens: of the arm at its end.
        counted: while it ran.
        degree: of its disturbance, see `Watch.disturbance`; above 1 it was disturbed. `CAPTURED`: by a capture.
    """

    tokens: int
    counted: Counters
    degree: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """The answers of all arms in one attempt, and their slices.

    Attributes:
        answers: of each arm, by name.
        slices: of each arm, by name.
    """

    answers: dict[str, list[Generation]]
    slices: dict[str, list[Slice]]

    def counted(self) -> Counters:
        """Counters over all slices, with `disturbed`: seconds of the disturbed ones."""
        readings = [
            one.counted | {"disturbed": one.counted["seconds"] * (1 < one.degree < CAPTURED)}
            for slices in self.slices.values()
            for one in slices
        ]
        return added(readings)

    def captured(self) -> float:
        """Seconds of the slices in which a pass was captured."""
        slices = (one for of_arm in self.slices.values() for one in of_arm)
        return sum(one.counted["seconds"] for one in slices if one.degree == CAPTURED)


def least_disturbed(attempts: Sequence[Attempt]) -> tuple[dict[str, list[Generation]], float, float]:
    """Combines several attempts at the same answers: each stretch of text takes its time from the least disturbed one.

    The times of all arms for a stretch come from one attempt, so that they stay paired. If an arm's rounds differ
    between attempts (it drafts by the clock), or a batch was decoded, the least disturbed attempt is used as a whole.

    Args:
        attempts: non-empty; ties go to the earliest.

    Returns:
        The answers of each arm; the share of their seconds in stretches that others still disturbed; and the share in
        stretches in which a pass was captured.
    """
    first = attempts[0]
    several = any(len(answers) > 1 for answers in first.answers.values())
    structure = _structure(first)
    if several or any(_structure(attempt) != structure for attempt in attempts[1:]):
        best = min(attempts, key=lambda attempt: attempt.captured() + attempt.counted()["disturbed"])
        counted = best.counted()
        return best.answers, counted["disturbed"] / counted["seconds"], best.captured() / counted["seconds"]
    pieces = [{arm: _pieces(attempt, arm) for arm in attempt.answers} for attempt in attempts]
    worst: list[dict[int, float]] = []  # by attempt: stretch -> the worst disturbance of any arm in it
    for of_attempt in pieces:
        worst.append({})
        for stretch, _, degree in (piece for of_arm in of_attempt.values() for piece in of_arm):
            worst[-1][stretch] = max(degree, worst[-1].get(stretch, 0.0))
    chosen = {
        stretch: min(
            range(len(attempts)), key=[max(1.0, of_attempt[stretch]) for of_attempt in worst].__getitem__
        )
        for stretch in worst[0]
    }
    # By arm: the attempt that each piece is taken from.
    sources = {arm: [chosen[stretch] for stretch, _, _ in pieces[0][arm]] for arm in first.answers}
    answers = {arm: [_joined(attempts, pieces, arm, sources[arm])] for arm in first.answers}
    chosen_pieces = [
        pieces[attempt][arm][number] for arm in sources for number, attempt in enumerate(sources[arm])
    ]
    disturbed = sum(seconds for _, seconds, degree in chosen_pieces if 1 < degree < CAPTURED)
    captured = sum(seconds for _, seconds, degree in chosen_pieces if degree == CAPTURED)
    seconds = sum(seconds for _, seconds, _ in chosen_pieces)
    return answers, disturbed / seconds, captured / seconds


Piece = tuple[int, float, float]  # stretch, seconds, disturbance of its slice


def _structure(attempt: Attempt) -> dict:
    """What must be equal for two attempts to be combined round by round."""
    return {
        arm: [(answer.tokens, [(step.drafted, step.emitted) for step in answer.steps]) for answer in answers]
        for arm, answers in attempt.answers.items()
    }


def _pieces(attempt: Attempt, arm: str) -> list[Piece]:
    """The prefill and each round of an arm's only answer; one piece if its parts were not timed."""
    answer, slices = attempt.answers[arm][0], attempt.slices[arm]
    ends = [one.tokens for one in slices]

    def piece(tokens: int, seconds: float) -> Piece:
        at = min(bisect_left(ends, tokens), len(slices) - 1)
        return (tokens - 1) // STRETCH, seconds, slices[at].degree

    if answer.prefill_seconds is None:
        return [(0, answer.seconds, max(one.degree for one in slices))]
    tokens = 1
    pieces = [piece(tokens, answer.prefill_seconds)]
    for step in answer.steps:
        tokens += step.emitted
        pieces.append(piece(tokens, step.seconds))
    return pieces


def _joined(
    attempts: Sequence[Attempt], pieces: list[dict[str, list[Piece]]], arm: str, sources: list[int]
) -> Generation:
    """An arm's answer with each piece of the attempt that `sources` names for it."""
    answer = attempts[0].answers[arm][0]
    if answer.prefill_seconds is None:
        return attempts[sources[0]].answers[arm][0]
    spent = sum(pieces[attempt][arm][number][1] for number, attempt in enumerate(sources))
    seconds = answer.seconds - sum(seconds for _, seconds, _ in pieces[0][arm]) + spent
    steps = [attempts[attempt].answers[arm][0].steps[number] for number, attempt in enumerate(sources[1:])]
    prefill = attempts[sources[0]].answers[arm][0].prefill_seconds
    return replace(answer, prefill_seconds=prefill, seconds=seconds, steps=steps)
