"""The acceptance at which speculation pays off, by interpolation between runs whose acceptance was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from specbench.config.spec import POOL
from specbench.report.decision import draft_length
from specbench.report.labels import line_names, pair_names

# Settings of the method, or of the drafter in a batch.
ACCEPTANCE, LENGTH, COST = "acceptance", "max_draft_tokens", "cost_of"
LENGTH_GIVEN = "acceptance_length"  # in place of an acceptance


@dataclass(frozen=True)
class BreakEven:
    """Where the speedup is 1, for one draft length and batch size.

    Attributes:
        acceptance: from which on speculation pays off; -inf: at every measured acceptance, inf: at none.
        low: the same for the upper ends of the speedups' intervals; None if a run has none.
        high: the same for their lower ends.
        measured: the lowest and the highest acceptance that was measured.
    """

    acceptance: float
    low: float | None
    high: float | None
    measured: tuple[float, float]


Curve = dict[tuple[int, int], BreakEven]  # by draft length and batch size


def break_evens(summaries: Iterable[Mapping]) -> dict[str, Curve]:
    """Curves of runs with a chosen acceptance, by what they share besides acceptance, draft length and batch size.

    Of identical runs the last counts. A draft length and batch size with a single acceptance has no entry.
    """
    chosen = [summary for summary in summaries if _has_acceptance(summary)]
    places = [
        (cast("int", draft_length(one)), one["batch_size"], _settings(one)[ACCEPTANCE]) for one in chosen
    ]
    names = line_names([*map(_reduced, chosen)], places, without=("pair", "limit"))
    speedups: dict[str, dict[tuple[int, int], dict[float, Mapping]]] = {}
    for label, pair, place, summary in zip(names, pair_names(chosen), places, chosen):
        length, batch_size, acceptance = place
        cost = _settings(summary).get(COST)
        name = f"{label}{f' at the cost of {cost}' if cost else ''}, {pair}"
        of_name = speedups.setdefault(name, {})
        of_name.setdefault((length, batch_size), {})[acceptance] = summary["overall"]
    curves = {
        name: {at: _of_runs(of_name[at], at[0]) for at in sorted(of_name) if len(of_name[at]) > 1}
        for name, of_name in speedups.items()
    }
    return {name: curve for name, curve in curves.items() if curve}


def expected_length(acceptance: float, drafted: int) -> float:
    """Tokens that a round emits if each draft token is accepted independently (Leviathan et al. 2023, eq. 1)."""
    return sum(acceptance**i for i in range(drafted + 1))


def crossing(points: Mapping[float, float], drafted: int) -> float:
    """The acceptance from which on the speedup stays at 1 or above.

    Between two points it is interpolated: speedup = expected tokens of a round / cost of a round, and the logarithm of
    the cost is taken as linear.

    Args:
        points: speedup by acceptance.
        drafted: draft tokens of a round, in all of them.

    Returns:
        -inf if every speedup is 1 or above; inf if the last is below.
    """
    from scipy.optimize import bisect  # late: few reports need it

    curve = sorted(points.items())
    below = [index for index, (_, speedup) in enumerate(curve) if speedup < 1]
    if not below:
        return -math.inf
    if below[-1] == len(curve) - 1:
        return math.inf
    ends = curve[below[-1] : below[-1] + 2]
    acceptances = [acceptance for acceptance, _ in ends]
    costs = [math.log(expected_length(acceptance, drafted) / speedup) for acceptance, speedup in ends]

    def log_speedup(acceptance: float) -> float:
        cost = float(np.interp(acceptance, acceptances, costs))
        return math.log(expected_length(acceptance, drafted)) - cost

    return bisect(log_speedup, *acceptances)


def _of_runs(overall: Mapping[float, Mapping], drafted: int) -> BreakEven:
    def at(key: str) -> float | None:
        speedups = {acceptance: numbers[key] for acceptance, numbers in overall.items()}
        return None if None in speedups.values() else crossing(speedups, drafted)

    value = cast("float", at("speedup"))  # every run has one
    return BreakEven(value, at("speedup_high"), at("speedup_low"), (min(overall), max(overall)))


def _settings(summary: Mapping) -> dict:
    """The settings of the method, or of the drafter in a batch."""
    settings, group = summary["settings"], _group(summary)
    of_drafter = {k.removeprefix(group): v for k, v in settings.items() if k.startswith(group)}
    return of_drafter or settings


def _group(summary: Mapping) -> str:
    """What the names of these settings begin with; alone, "drafter." is that of a drafter which the method wraps."""
    return "drafter." if summary["unit"] == POOL else ""


def _has_acceptance(summary: Mapping) -> bool:
    """Whether a run has a chosen acceptance, a draft length and a speedup."""
    settings = _settings(summary)
    numbers = all(type(settings.get(name)) in (int, float) for name in (ACCEPTANCE, LENGTH))
    return numbers and settings.get(LENGTH_GIVEN) is None and summary["overall"]["speedup"] is not None


def _reduced(summary: Mapping) -> dict:
    """The summary without the settings that make up a curve's axes or name, and without their source."""
    left_out = (ACCEPTANCE, LENGTH, COST)
    group = _group(summary)
    settings = {k: v for k, v in summary["settings"].items() if k.removeprefix(group) not in left_out}
    return dict(summary) | {"settings": settings, "settings_source": None}
