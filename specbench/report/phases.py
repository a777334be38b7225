"""Warnings about the machine's phases: slow ones, changes within a run, and runs measured in different ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from specbench.measure.machine.speed import BANDWIDTH, NAMES, OPERATIONS, PRODUCT, Figures, below, slow
from specbench.report.runs import row_names

if TYPE_CHECKING:
    from specbench.report.runs import Run

WORDS = {BANDWIDTH: "reading memory", PRODUCT: "a matrix product", OPERATIONS: "starting operations"}
FEW = 3  # runs that are named one by one; more are counted, and each has its own lines in its own table


def shown(name: str, figures: Figures) -> str:
    """A figure in its usual unit."""
    value = figures[name]
    if name == OPERATIONS:
        return f"{1e6 / value:.2f} µs"
    unit = "GB/s" if name == BANDWIDTH else "GFLOP/s"
    return f"{value / 1e9:.1f} {unit}"


def lacking(figures: Figures, best: Figures) -> str:
    """How far the figures that make a machine slow are below the best; empty if none does."""
    return "; ".join(
        f"{WORDS[name]} {share:.0%} below the best that this machine has shown "
        f"({shown(name, figures)}, best {shown(name, best)})"
        for name, share in slow(below(figures, best)).items()
    )


def slow_machine(summary: Mapping) -> str:
    """A warning if a run was measured on a slow machine, and whether its speed changed; else empty."""
    speed = _speed(summary)
    if speed is None or not slow(speed["below"]):
        return ""
    text = f"SLOW MACHINE: {lacking(speed['worst'], speed['best'])}"
    if changed := slow(speed["changed"]):
        moved = ", ".join(f"{WORDS[name]} by {share:.0%}" for name, share in changed.items())
        text += f"; IT CHANGED during the run: {moved}"
    return text


def slow_machines(runs: Iterable[Run]) -> list[str]:
    """A line for each run on a slow machine; if there are many, one for all of them."""
    runs = list(runs)
    lines = [f"{run.name}: {line}" for run in runs if (line := slow_machine(run.summary))]
    if len(lines) <= FEW:
        return lines
    speeds = [speed for run in runs if (speed := _speed(run.summary)) and slow(speed["below"])]
    lacks = [slow(speed["below"]) for speed in speeds]
    shares = {name: [of_run[name] for of_run in lacks if name in of_run] for name in NAMES}
    figures = [
        f"{WORDS[name]} {spread(of_runs)} below the best that it has shown"
        for name, of_runs in shares.items()
        if of_runs
    ]
    changed = sum(bool(slow(speed["changed"])) for speed in speeds)
    moved = f"; IT CHANGED during {changed} of them" if changed else ""
    return [f"SLOW MACHINE in {len(speeds)} of {len(runs)} runs: {'; '.join(figures)}{moved}"]


def spread(shares: Collection[float]) -> str:
    """The least and the largest of some shares, in percent."""
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return high if low == high else f"{low.removesuffix('%')} to {high}"


def different_phases(runs: Iterable[Run]) -> list[str]:
    """A line for each figure in which the machine was slower for some rows than for others.

    It compares the medians of the runs' probes, among runs with the same processor, threads and torch; another warning
    covers runs that differ in these.
    """
    runs = list(runs)
    alike: dict[str, dict[str, Figures]] = {}
    for label, run in zip(row_names(runs), runs):
        if (speed := _speed(run.summary)) is not None:
            alike.setdefault(speed["machine"], {})[label] = speed["median"]
    lines = []
    for medians in alike.values():
        for name in NAMES:
            fastest = max(medians, key=lambda label: medians[label][name])
            best = medians[fastest]
            slower = {
                label: shares[name]
                for label, of_run in medians.items()
                if name in (shares := slow(below(of_run, best)))
            }
            if slower:
                rows = ", ".join(f"{label} ({share:.0%})" for label, share in slower.items())
                if len(slower) > FEW:
                    rows = f"{len(slower)} of {len(medians)} rows ({spread(slower.values())})"
                lines.append(
                    f"DIFFERENT PHASES of the machine: {WORDS[name]} was slower than for {fastest} in {rows}"
                )
    return lines


def _speed(summary: Mapping) -> dict | None:
    """The machine's speed in a summary; None without probes, as in older runs."""
    return summary["machine"].get("speed")
