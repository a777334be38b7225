"""Plots of finished runs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context

from specbench.config.spec import QUESTION
from specbench.measure.metrics.acceptance import STRETCHES
from specbench.report import verdicts
from specbench.report.drawing import (
    LOOK,
    MAX_SERIES,
    OF_ROUNDS,
    OF_ROUNDS_LABEL,
    PALETTE,
    PlottedRun,
    draw_points,
    look_of,
    new_axes,
    with_legend,
    wrapped,
)
from specbench.report.labels import task_names
from specbench.report.remarks import baseline_rate, cores_label
from specbench.report.runs import latest
from specbench.report.sweep_plots import break_even, engines, heat_maps, regimes, throughput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from specbench.report.runs import Run

MOST_POINTS = 24  # runs, if each of them is one point
LEAST_JUDGED = 20  # rounds: the share of fewer is too noisy
STRETCH_NAMES = {
    "place": "new tokens before the round",
    "context": "tokens of prompt and answer before the round",
}
UNKNOWN_PARTS = "not told apart"  # of the time of a token
PARTS = {  # colour and hatch
    "draft": (PALETTE[1], "//"),
    "verify": (PALETTE[5], ""),
    "alignment": (PALETTE[3], "xx"),
    "prefill": (PALETTE[4], ".."),
    "other": ("#DDDDDD", "\\\\"),
    UNKNOWN_PARTS: ("#FFFFFF", "++"),
}
# The names of plots.
NAMES = re.compile(
    r"speedup_by_task|acceptance_\w+|time|throughput|mbsu_and_speedup|engines|break_even|regimes|heat_map_\d+"
)
ROUND_COSTS = (1, 1.25, 1.5, 2, 3)


def figures(runs: Iterable[Run]) -> dict[str, Figure]:
    """Every plot that the runs have data for, by its name.

    Of runs that share a label the last is shown, and of many the fastest; the title names those that are left out.
    """
    labelled = latest(runs)
    of_one = [(label, run) for label, run in labelled if run.unit == QUESTION]
    single, cut_single = chosen(of_one)
    points, cut_points = chosen(of_one, MOST_POINTS)
    shown, cut = chosen(labelled)
    summaries = [run.summary for _, run in labelled]
    with rc_context(LOOK):
        plots = {
            "speedup_by_task": (speedup_by_task(single), cut_single),
            "acceptance_and_speedup": (acceptance_and_speedup(points), cut_points),
            "time": (time_by_part(shown), cut),
            "acceptance_by_position": (acceptance_by_position(single), cut_single),
            **{f"acceptance_by_{name}": (acceptance_over(single, name), cut_single) for name in STRETCHES},
            "throughput": (throughput(summaries), ""),
            "mbsu_and_speedup": (mbsu_and_speedup(single), cut_single),
            "engines": (engines(summaries), ""),
            "break_even": (break_even(summaries), ""),
            "regimes": (regimes(summaries), ""),
        }
        plots |= {f"heat_map_{i}": (figure, "") for i, figure in enumerate(heat_maps(summaries), start=1)}
        drawn = {name: figure for name, (figure, _) in plots.items() if figure is not None}
        for name, figure in drawn.items():
            if plots[name][1]:
                figure.suptitle(plots[name][1], fontsize=8)
            figure.draw_without_rendering()
            # Laid out once, and not again for each output format.
            figure.set_layout_engine("none")
    return drawn


def save(drawn: dict[str, Figure], folder: Path) -> dict[str, bytes]:
    """Writes each figure as PNG and SVG, and removes those of an earlier report; returns the SVGs."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if NAMES.fullmatch(old.stem) and old.suffix in (".png", ".svg"):
            old.unlink()
    images = {name: svg(figure) for name, figure in drawn.items()}
    for name, image in images.items():
        drawn[name].savefig(folder / f"{name}.png", dpi=150)
        (folder / f"{name}.svg").write_bytes(image)
    return images


def svg(figure: Figure) -> bytes:
    """A figure as SVG; the same figure gives the same bytes."""
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "specbench"}):
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def chosen(named: list[tuple[str, Run]], most: int = MAX_SERIES) -> tuple[list[PlottedRun], str]:
    """The runs to draw, each with its own look in every plot, and a title if some are left out.

    Labels name the fault of a run, and of many the sound ones come first: an engine that says something else is fast.
    """
    faulty = {
        label: faults[0].partition(":")[0] for label, run in named if (faults := verdicts.faults(run.summary))
    }
    fastest = sorted(
        named, key=lambda pair: (pair[0] in faulty, -(pair[1].summary["overall"]["speedup"] or 0))
    )
    fastest_labels = [label for label, _ in fastest[: max(most, MOST_POINTS)]]
    looks = enumerate(pair for pair in named if pair[0] in fastest_labels)
    shown = [
        PlottedRun(
            ", ".join(filter(None, (label + cores_label(run.summary), faulty.get(label)))),
            run.summary,
            look_of(index),
        )
        for index, (label, run) in looks
        if label in fastest_labels[:most]
    ]
    return shown, f"the {most} fastest of {len(named)} runs" if len(named) > most else ""


# -- the plots


def speedup_by_task(runs: list[PlottedRun]) -> Figure | None:
    """A point for each run on each task, with its 95 % interval."""
    runs = [run for run in runs if run.overall["speedup"] is not None]
    tasks = task_names(run.summary for run in runs)
    rows = [*tasks, "overall"]
    if not runs:
        return None
    axes = new_axes(8, 1.2 + 0.12 * len(rows) * max(4, len(runs)))
    for index, run in enumerate(runs):
        blocks = [run.summary["tasks"].get(task) for task in tasks] + [run.overall]
        at = [row + 0.8 * ((index + 0.5) / len(runs) - 0.5) for row in range(len(rows))]
        draw_points(axes, run, [(block, y) for block, y in zip(blocks, at) if block], across=True)
    axes.axvline(1, color="black", linewidth=1)
    for row in range(1, len(rows)):
        axes.axhline(row - 0.5, color="black", linewidth=0.5, alpha=0.3)
    axes.set(xlabel="speedup (95 % interval)", yticks=range(len(rows)), yticklabels=rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    return with_legend(axes)


def acceptance_and_speedup(runs: list[PlottedRun]) -> Figure | None:
    """Acceptance length against speedup without prefill. On a line rounds cost the same: speedup = length / cost."""
    runs = [run for run in runs if run.overall["acceptance_length"] and run.overall[OF_ROUNDS]]
    if not runs:
        return None
    axes = new_axes(6.5, 4.5)
    for run in runs:
        draw_points(axes, run, [(run.overall, run.overall["acceptance_length"])], what=OF_ROUNDS)
    right = 1.15 * max(run.overall["acceptance_length"] for run in runs)
    top = 1.15 * max(run.overall[f"{OF_ROUNDS}_high"] or run.overall[OF_ROUNDS] for run in runs)
    for cost in ROUND_COSTS:  # a line through the origin, named where it leaves the plot
        axes.plot([0, right], [0, right / cost], color="grey", linewidth=0.7, linestyle="--", zorder=0)
        x = min(right, top * cost)
        axes.annotate(f"{cost:g}", (x, x / cost), fontsize=9, color="black", ha="right", va="top")
    axes.axhline(1, color="black", linewidth=1)
    axes.set(
        xlim=(min(0.9, right), right), ylim=(0, top), xlabel="acceptance length (tokens per target pass)"
    )
    axes.set_ylabel(OF_ROUNDS_LABEL)
    axes.set_title("grey lines: what a round costs, in autoregressive steps", fontsize=8, loc="left")
    return with_legend(axes)


def mbsu_and_speedup(runs: list[PlottedRun]) -> Figure | None:
    """Memory-bound speedup against the speedup measured without prefill."""
    runs = [run for run in runs if run.overall["mbsu"] and run.overall[OF_ROUNDS]]
    if not runs:
        return None
    axes = new_axes(5.5, 4.5)
    for run in runs:
        draw_points(axes, run, [(run.overall, run.overall["mbsu"])], what=OF_ROUNDS)
    keys = ("mbsu", OF_ROUNDS, f"{OF_ROUNDS}_low", f"{OF_ROUNDS}_high")
    ends = [run.overall[key] for run in runs for key in keys]
    low, high = 0.9 * min(filter(None, ends)), 1.1 * max(filter(None, ends))
    axes.plot([low, high], [low, high], color="grey", linestyle="--", linewidth=1)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="memory-bound speedup (MBSU)")
    axes.set_ylabel(OF_ROUNDS_LABEL)
    title = "below the line: passes cost more than reading their weights; above it: less"
    axes.set_title(title, fontsize=8, loc="left")
    return with_legend(axes)


def time_by_part(runs: list[PlottedRun]) -> Figure | None:
    """The time of a token by part; a vertical line marks the baseline's."""
    runs = [run for run in runs if run.overall["tokens"] and run.overall["seconds"]]
    if not runs:
        return None
    axes = new_axes(7, 1.4 + 0.35 * len(runs))
    left, spent = np.zeros(len(runs)), [_milliseconds(run.overall) for run in runs]
    for part, (colour, hatch) in PARTS.items():
        widths = np.array([parts.get(part, 0.0) for parts in spent])
        if widths.any():
            axes.barh(range(len(runs)), widths, left=left, color=colour, hatch=hatch, label=part,
                      edgecolor="black", linewidth=0.5, height=0.6)  # fmt: skip
            left += widths
    rates = [baseline_rate(run.summary["baseline"]) for run in runs]
    baselines = [(1e3 / rate, index) for index, rate in enumerate(rates) if rate]
    for i, (at, index) in enumerate(baselines):
        axes.plot([at, at], [index - 0.4, index + 0.4], color="black", linewidth=2,
                  label=None if i else "baseline")  # fmt: skip
    names = [wrapped(run.label) for run in runs]
    axes.set(yticks=range(len(runs)), xlabel="milliseconds per token")
    axes.set_yticklabels(names, fontsize=6 if any("\n" in name for name in names) else None)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return with_legend(axes)


def acceptance_by_position(runs: list[PlottedRun]) -> Figure | None:
    """How often a draft token is accepted, if all before it were, by its position in the draft.

    Positions that fewer than `LEAST_JUDGED` rounds judged are left out.
    """
    axes = None
    for run in runs:
        rates = run.overall["acceptance_by_position_conditional"]
        rates = [
            rate for rate, count in zip(rates, run.overall["judged_by_position"]) if count >= LEAST_JUDGED
        ]
        if not rates:
            continue
        axes = axes or new_axes(6.5, 4)
        axes.plot(range(1, len(rates) + 1), rates, label=run.label, **run.look)
    if axes is None:
        return None
    axes.set(ylim=(0, 1.02), xlabel="position in the draft", ylabel="accepted, if all before it were")
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg] # a MaxNLocator
    return with_legend(axes)


def acceptance_over(runs: list[PlottedRun], name: str) -> Figure | None:
    """Acceptance length over the number of new tokens ("place"), or of all tokens ("context"), before a round.

    Stretches of fewer than `LEAST_JUDGED` rounds are left out. None if no run has two of them.
    """
    edges = STRETCHES[name]
    lines = [(run, _stretches(run.overall, name)) for run in runs]
    if all(len(line) < 2 for _, line in lines):
        return None
    axes = new_axes(6.5, 4)
    for run, line in lines:
        if line:
            axes.plot(list(line), list(line.values()), label=run.label, **run.look)
    shown = sorted(set().union(*(line for _, line in lines)))
    ends = [f"\u2013{end - 1}" for end in edges[1:]] + ["+"]
    axes.set(xticks=shown, xticklabels=[f"{edges[i]}{ends[i]}" for i in shown], xlabel=STRETCH_NAMES[name])
    axes.set_ylabel("acceptance length")
    axes.set_ylim(bottom=0)
    return with_legend(axes)


def _stretches(numbers: dict, name: str) -> dict[int, float]:
    """By the number of a stretch, the acceptance length there, if enough rounds began."""
    judged = zip(numbers[f"acceptance_by_{name}"] or (), numbers[f"rounds_by_{name}"] or ())
    return {i: length for i, (length, count) in enumerate(judged) if count >= LEAST_JUDGED}


def _milliseconds(overall: dict) -> dict[str, float]:
    """Milliseconds per token by part; the rest is "other", or "not told apart" if a part is unknown."""
    seconds = {part: overall[f"{part}_seconds"] for part in ("draft", "verify", "prefill")}
    rest = UNKNOWN_PARTS if None in seconds.values() else "other"
    parts = {part: value or 0.0 for part, value in seconds.items()}
    parts["alignment"] = overall["align_seconds"] or 0.0  # which single sequences do not have
    parts[rest] = max(0.0, overall["seconds"] - sum(parts.values()))
    return {part: 1e3 * value / overall["tokens"] for part, value in parts.items()}
