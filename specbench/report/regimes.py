"""How speedups change with the size of a target that computes the same at every size.

A small model's pass is mostly the starting of operations, a large one's the reading of weights. Memory-bound speedup
(MBSU) tells what a method would gain if there were nothing but reading; between the two lies what is measured.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from specbench.report.runs import labels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LEAST_SIZES = 2


def by_size(summaries: Iterable[Mapping]) -> dict[str, dict[int, Mapping]]:
    """The last run of each method at each size of an expanded target, of one sequence at a time.

    Returns:
        By label, then bytes of weights that a target's pass reads, rising; labels with one size alone are left out.
    """
    expanded = [
        summary
        for summary in summaries
        if summary["weights"] == "expanded" and not summary["drafter"] and summary.get("target_pass_bytes")
    ]
    found: dict[str, dict[int, Mapping]] = {}
    for label, summary in zip(labels(expanded, without=("anatomy",)), expanded):
        found.setdefault(label, {})[summary["target_pass_bytes"]] = summary
    return {label: dict(sorted(sizes.items())) for label, sizes in found.items() if len(sizes) >= LEAST_SIZES}


def baseline_fractions(found: Mapping[str, Mapping[int, Mapping]]) -> dict[int, float]:
    """The baseline's share of the memory-bandwidth ceiling by size: the median over the runs that measured it."""
    fractions: dict[int, list[float]] = {}
    for sizes in found.values():
        for size, summary in sizes.items():
            fraction = summary["baseline"]["bandwidth_fraction"]
            if fraction is not None:
                fractions.setdefault(size, []).append(fraction)
    return {size: median(of_size) for size, of_size in sorted(fractions.items())}
