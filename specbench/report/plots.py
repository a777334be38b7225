"""Plots of finished runs.

Every run keeps its colour, marker and hatch, so that a plot can be read without colours; the palette is Okabe and Ito's
(2008), which the colour-blind can tell apart.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from specbench.config.spec import POOL, QUESTION
from specbench.measure.metrics.acceptance import STRETCHES
from specbench.report.break_even import BreakEven, break_evens
from specbench.report.cells import equivalence_text
from specbench.report.labels import beside_engines, grids, labels, task_names
from specbench.report.model_scaling import baseline_fractions, by_size, of_other_models
from specbench.report.remarks import baseline_rate, cores_label
from specbench.report.runs import latest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from specbench.report.runs import Run

MAX_SERIES = 10  # runs in a plot: more cannot be told apart
MOST_POINTS = 24  # where each of them is one point
LEGEND = 7  # points
NARROWEST = 3.5  # inches of a plot beside its legend
LEAST_JUDGED = 20  # rounds: the share of fewer says little
STRETCH_NAMES = {
    "place": "new tokens before the round",
    "context": "tokens of prompt and answer before the round",
}
HEAT_MAPS = 6
PANELS = 3
WIDEST = 44  # characters in a line of a label
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "osD^vP*X<>"
UNKNOWN_PARTS = "not told apart"  # of the time of a token
PARTS = {  # colour and hatch
    "draft": (PALETTE[1], "//"),
    "verify": (PALETTE[5], ""),
    "alignment": (PALETTE[3], "xx"),
    "prefill": (PALETTE[4], ".."),
    "other": ("#DDDDDD", "\\\\"),
    UNKNOWN_PARTS: ("#FFFFFF", "++"),
}
# What plots are called.
NAMES = re.compile(
    r"speedup_by_task|acceptance_\w+|time|throughput|mbsu_and_speedup|engines|break_even|regimes|heat_map_\d+"
)
ROUND_COSTS = (1, 1.25, 1.5, 2, 3)
# What is counted in rounds is held against the speedup of the rounds alone.
OF_ROUNDS, OF_ROUNDS_LABEL = "decode_speedup", "speedup without prefill (95 % interval)"
LOOK: Any = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "legend.frameon": False, "hatch.linewidth": 0.5,
        "text.parse_math": False}  # fmt: skip


@dataclass(frozen=True)
class PlottedRun:
    """A run in the plots: what it is called, and how it is drawn."""

    label: str
    summary: dict
    look: dict[str, Any]

    @property
    def overall(self) -> dict:
        """The numbers over all questions."""
        return self.summary["overall"]


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
            # Laid out once, and not again for each form that it is written in.
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
    """The runs to draw, which look alike however many they are, and a title where some are left out."""
    fastest = sorted(named, key=lambda pair: -(pair[1].summary["overall"]["speedup"] or 0))
    fastest_labels = [label for label, _ in fastest[: max(most, MOST_POINTS)]]
    looks = enumerate(pair for pair in named if pair[0] in fastest_labels)
    shown = [
        PlottedRun(label + cores_label(run.summary), run.summary, _look(index))
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
    axes = _axes(8, 1.2 + 0.12 * len(rows) * max(4, len(runs)))
    for index, run in enumerate(runs):
        blocks = [run.summary["tasks"].get(task) for task in tasks] + [run.overall]
        at = [row + 0.8 * ((index + 0.5) / len(runs) - 0.5) for row in range(len(rows))]
        _points(axes, run, [(block, y) for block, y in zip(blocks, at) if block], across=True)
    axes.axvline(1, color="black", linewidth=1)
    for row in range(1, len(rows)):
        axes.axhline(row - 0.5, color="black", linewidth=0.5, alpha=0.3)
    axes.set(xlabel="speedup (95 % interval)", yticks=range(len(rows)), yticklabels=rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    return _legend(axes)


def acceptance_and_speedup(runs: list[PlottedRun]) -> Figure | None:
    """Acceptance length against speedup without prefill. On a line rounds cost the same: speedup = length / cost."""
    runs = [run for run in runs if run.overall["acceptance_length"] and run.overall[OF_ROUNDS]]
    if not runs:
        return None
    axes = _axes(6.5, 4.5)
    for run in runs:
        _points(axes, run, [(run.overall, run.overall["acceptance_length"])], what=OF_ROUNDS)
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
    return _legend(axes)


def mbsu_and_speedup(runs: list[PlottedRun]) -> Figure | None:
    """What reading weights alone would allow against what was measured without prefill."""
    runs = [run for run in runs if run.overall["mbsu"] and run.overall[OF_ROUNDS]]
    if not runs:
        return None
    axes = _axes(5.5, 4.5)
    for run in runs:
        _points(axes, run, [(run.overall, run.overall["mbsu"])], what=OF_ROUNDS)
    keys = ("mbsu", OF_ROUNDS, f"{OF_ROUNDS}_low", f"{OF_ROUNDS}_high")
    ends = [run.overall[key] for run in runs for key in keys]
    low, high = 0.9 * min(filter(None, ends)), 1.1 * max(filter(None, ends))
    axes.plot([low, high], [low, high], color="grey", linestyle="--", linewidth=1)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="memory-bound speedup (MBSU)")
    axes.set_ylabel(OF_ROUNDS_LABEL)
    title = "below the line: passes cost more than reading their weights; above it: less"
    axes.set_title(title, fontsize=8, loc="left")
    return _legend(axes)


def time_by_part(runs: list[PlottedRun]) -> Figure | None:
    """Where the time of a token goes; the bar of the baseline is a line across."""
    runs = [run for run in runs if run.overall["tokens"] and run.overall["seconds"]]
    if not runs:
        return None
    axes = _axes(7, 1.4 + 0.35 * len(runs))
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
    names = [_wrapped(run.label) for run in runs]
    axes.set(yticks=range(len(runs)), xlabel="milliseconds per token")
    axes.set_yticklabels(names, fontsize=6 if any("\n" in name for name in names) else None)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return _legend(axes)


def acceptance_by_position(runs: list[PlottedRun]) -> Figure | None:
    """How often a draft token is accepted where all before it were, by its position in the draft.

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
        axes = axes or _axes(6.5, 4)
        axes.plot(range(1, len(rates) + 1), rates, label=run.label, **run.look)
    if axes is None:
        return None
    axes.set(ylim=(0, 1.02), xlabel="position in the draft", ylabel="accepted, if all before it were")
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg] # a MaxNLocator
    return _legend(axes)


def acceptance_over(runs: list[PlottedRun], name: str) -> Figure | None:
    """Acceptance length over the new tokens ("place"), or all tokens ("context"), that there were before a round.

    Stretches of fewer than `LEAST_JUDGED` rounds are left out. None where no run went through two of them.
    """
    edges = STRETCHES[name]
    lines = [(run, _stretches(run.overall, name)) for run in runs]
    if all(len(line) < 2 for _, line in lines):
        return None
    axes = _axes(6.5, 4)
    for run, line in lines:
        if line:
            axes.plot(list(line), list(line.values()), label=run.label, **run.look)
    shown = sorted(set().union(*(line for _, line in lines)))
    ends = [f"\u2013{end - 1}" for end in edges[1:]] + ["+"]
    axes.set(xticks=shown, xticklabels=[f"{edges[i]}{ends[i]}" for i in shown], xlabel=STRETCH_NAMES[name])
    axes.set_ylabel("acceptance length")
    axes.set_ylim(bottom=0)
    return _legend(axes)


def _stretches(numbers: dict, name: str) -> dict[int, float]:
    """By the number of a stretch, the acceptance length there, where enough rounds began."""
    judged = zip(numbers[f"acceptance_by_{name}"] or (), numbers[f"rounds_by_{name}"] or ())
    return {i: length for i, (length, count) in enumerate(judged) if count >= LEAST_JUDGED}


def throughput(summaries: Iterable[dict]) -> Figure | None:
    """Tokens per second over the batch size, of many methods the fastest. None without a batch of two or more."""
    lines: dict[str, dict[int, float]] = {}
    of_pools = [s for s in summaries if s["unit"] == POOL and s["overall"]["tokens_per_second"]]
    for name, summary in zip(labels(of_pools, without=("batch_size",)), of_pools):
        lines.setdefault(name, {})[summary["batch_size"]] = summary["overall"]["tokens_per_second"]
    fastest = sorted(lines, key=lambda name: -max(lines[name].values()))[:MAX_SERIES]
    shown = {name: line for name, line in lines.items() if name in fastest}
    sizes = sorted({size for line in shown.values() for size in line})
    if not sizes or sizes[-1] == 1:
        return None
    axes = _axes(6.5, 4)
    if len(lines) > MAX_SERIES:
        axes.set_title(f"the {MAX_SERIES} fastest of {len(lines)} lines", fontsize=8)
    for index, (name, line) in enumerate(shown.items()):
        line_sizes = sorted(line)
        axes.plot(line_sizes, [line[size] for size in line_sizes], label=name, **_look(index))
    axes.set_xscale("log", base=2)
    axes.set(xticks=sizes, xticklabels=sizes, xlabel="batch size", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    return _legend(axes)


def engines(summaries: Iterable[dict]) -> Figure | None:
    """Other engines beside this project: how fast each decodes without drafts, what a method gains there; or None.

    A line at the end of a bar is where reading the weights alone would end, where that is known.
    """
    shown = beside_engines(summaries)
    names = labels(shown)
    if not shown:
        return None
    height = 0.9 + 0.45 * len(shown)
    figure = Figure(figsize=(9, height), layout="constrained")
    plain, gain = figure.subplots(1, 2, sharey=True)
    for row, (name, summary) in enumerate(zip(names, shown)):
        colour = PALETTE[0] if summary.get("engine") is None else PALETTE[1]
        rate, ceiling = baseline_rate(summary["baseline"]), summary["baseline"]["ceiling_tokens_per_second"]
        if rate:
            plain.barh(row, rate, height=0.55, color=colour)
        if ceiling:
            plain.plot([ceiling] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
        run = PlottedRun(name, summary, {"color": colour, "marker": MARKERS[0]})
        _points(gain, run, [(summary["overall"], row)], across=True)
        verdicts = equivalence_text(summary["equivalence"]).plain
        gain.annotate(verdicts, (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=LEGEND)  # fmt: skip
    gain.axvline(1, color="black", linewidth=1)
    plain.set(
        xlabel="autoregressive decoding, tokens per second; line: memory ceiling", yticks=range(len(shown))
    )
    plain.set_yticklabels([_wrapped(name) for name in names], fontsize=LEGEND)
    gain.set(xlabel="speedup over it (95 % interval); exact/tie/violation")
    plain.set_ylim(len(shown) - 0.5, -0.5)
    for axes in (plain, gain):
        axes.grid(axis="y", visible=False)
    return figure


def break_even(summaries: Iterable[dict]) -> Figure | None:
    """The acceptance at which the speedup is 1, over the batch size, a line per draft length; a panel per drafter."""
    curves = break_evens(summaries)
    if not curves:
        return None
    shown = dict(list(curves.items())[:PANELS])
    figure = Figure(figsize=(2.2 + 3.6 * len(shown), 4), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    cut = f" ({PANELS} of {len(curves)} are drawn)" if len(curves) > PANELS else ""
    lengths = sorted({length for curve in shown.values() for length, _ in curve})
    sizes = sorted({size for curve in shown.values() for _, size in curve})
    ends = [end for curve in shown.values() for point in curve.values() for end in point.measured]
    low, high = min(ends), max(ends)
    edge = 0.08 * (high - low)
    for axes, (name, curve) in zip(panels, shown.items()):
        for index, length in enumerate(lengths):
            points = {size: curve[length, size] for size in sizes if (length, size) in curve}
            apart = 2 ** (0.12 * (index - (len(lengths) - 1) / 2))  # side by side, on an axis that doubles
            _break_even_line(axes, points, index, f"{length} draft tokens", apart, (low - edge, high + edge))
        axes.axhspan(low - edge, low, color="#EEEEEE", zorder=0)
        axes.axhspan(high, high + edge, color="#EEEEEE", zorder=0)
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set(xticks=sizes, xticklabels=sizes, xlabel="batch size", ylim=(low - edge, high + edge))
        axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
        axes.set_title(name + cut, fontsize=8, loc="left")
    panels[0].set_ylabel("acceptance per draft token\nat which speedup = 1 (95 % interval)")
    panels[-1].plot([], [], "^", color="grey", fillstyle="none", label="not reached at any measured")
    panels[-1].plot([], [], "v", color="grey", fillstyle="none", label="reached at all measured")
    _legend(panels[-1])
    return figure


def regimes(summaries: Iterable[dict]) -> Figure | None:
    """Over the size of a target that computes the same at every size: bandwidth, speedup with MBSU, and their ratio.

    Models that were not expanded are single points, with their names beside them.
    """
    summaries = list(summaries)
    lines = by_size(summaries)
    if not lines:
        return None
    by_label = dict(list(lines.items())[:MAX_SERIES])
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    bandwidth, speedups, reached = figure.subplots(1, 3)
    if len(lines) > MAX_SERIES:
        figure.suptitle(f"{MAX_SERIES} of {len(lines)} lines are drawn", fontsize=8)
    fractions = baseline_fractions(by_label)
    bandwidth.plot([size / 1e6 for size in fractions], list(fractions.values()), "o-", color=PALETTE[6])
    bandwidth.set(ylabel="baseline / memory-bandwidth ceiling", ylim=(0, None))
    drafting = {name: sizes for name, sizes in by_label.items() if _drafts(sizes)}
    for index, (name, sizes) in enumerate(drafting.items()):
        style = _look(index) | {"markersize": 5}
        numbers = {size / 1e6: summary["overall"] for size, summary in sizes.items()}
        # MBSU is of the rounds alone: so is the speedup that is held against it.
        comparable = {size: one for size, one in numbers.items() if one[OF_ROUNDS] and one["mbsu"]}
        values = [one[OF_ROUNDS] for one in comparable.values()]
        bars = _error_bars(comparable.values(), OF_ROUNDS)
        speedups.errorbar(list(comparable), values, yerr=bars, capsize=2, **style)
        mbsu = [one["mbsu"] for one in comparable.values()]
        speedups.plot(list(comparable), mbsu, "--", color=style["color"], linewidth=1)
        reached.plot(list(comparable), np.divide(values, mbsu), label=name, **style)
    more = _other_models(of_other_models(summaries, by_label), list(drafting), (bandwidth, speedups, reached))
    speedups.plot([], [], "--", color="grey", linewidth=1, label="MBSU")
    speedups.legend(fontsize=7, loc="upper left")
    speedups.axhline(1, color="grey", linewidth=0.7)
    speedups.set(ylabel=OF_ROUNDS_LABEL)
    reached.axhline(1, color="grey", linewidth=0.7)
    reached.set(ylabel="speedup without prefill / MBSU", ylim=(0, None))
    for axes in (bandwidth, speedups, reached):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        ticks = sorted([size / 1e6 for size in fractions] + more)
        axes.set(
            xticks=ticks,
            xticklabels=[f"{size:.0f}" for size in ticks],
            xlabel="MB of weights in a target pass",
        )
    _legend(reached)
    return figure


def _other_models(
    models: Mapping[str, Mapping[str, Mapping]], lines: list[str], panels: Sequence[Axes]
) -> list[float]:
    """Draws models that are no lines: the baseline's share, speedups, and what is reached of MBSU.

    Args:
        models: as `of_other_models` gives them.
        lines: labels, in the order of their colours.
        panels: the three axes.

    Returns:
        MB of weights that a pass of each reads.
    """
    bandwidth, speedups, reached = panels
    sizes = []
    for name, runs in models.items():
        size = next(iter(runs.values()))["target_pass_bytes"] / 1e6
        sizes.append(size)
        shares = [run["baseline"]["bandwidth_fraction"] for run in runs.values()]
        if measured_shares := [share for share in shares if share is not None]:
            at = size, median(measured_shares)
            bandwidth.plot(*at, "*", color=PALETTE[6], markersize=9)
            bandwidth.annotate(name, at, (0, 6), textcoords="offset points", ha="center", size=6)
        for label, run in runs.items():
            numbers = run["overall"]
            if label not in lines or not numbers[OF_ROUNDS]:
                continue
            style = _look(lines.index(label)) | {"marker": "*", "markersize": 9}
            bars = _error_bars([numbers], OF_ROUNDS)
            speedups.errorbar([size], [numbers[OF_ROUNDS]], yerr=bars, linestyle="", capsize=2, **style)
            if numbers["mbsu"]:
                reached.plot([size], [numbers[OF_ROUNDS] / numbers["mbsu"]], linestyle="", **style)
    return sizes


def _drafts(sizes: Mapping[int, Mapping]) -> bool:
    """Whether a method drafts at all: autoregressive decoding has no speedup to draw."""
    return any(summary["overall"]["acceptance_rate"] is not None for summary in sizes.values())


def heat_maps(summaries: Iterable[dict]) -> list[Figure]:
    """Overall speedups for each method and pair of whose settings just two were varied.

    Of many the largest are drawn, which the title mentions; all of them are among the tables.
    """
    drawn = []
    filled_grids = [grid for grid in grids(summaries) if any(grid.cells.values())]
    largest = sorted(filled_grids, key=lambda grid: -len(grid.cells))[:HEAT_MAPS]
    cut = f" ({HEAT_MAPS} of {len(filled_grids)} are drawn)" if len(filled_grids) > HEAT_MAPS else ""
    for grid in largest:
        rows, columns, cells = grid.rows, grid.columns, grid.cells
        values = np.array([[cells.get((r, c)) or math.nan for c in columns] for r in rows], dtype=float)
        axes = _axes(2.5 + 0.7 * len(columns), 1.5 + 0.5 * len(rows))
        image = axes.imshow(values, cmap="cividis", aspect="auto")
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (i, j), value in np.ndenumerate(values):
            cell_text = "–" if math.isnan(value) else f"{value:.2f}"
            axes.text(
                j, i, cell_text, ha="center", va="center", color="white" if value <= middle else "black"
            )
        axes.set(xticks=range(len(columns)), xticklabels=columns, yticks=range(len(rows)), yticklabels=rows)
        axes.set(xlabel=grid.across, ylabel=grid.down)
        axes.set_title(f"speedup of {grid.label} on {grid.pair}{cut}", fontsize=9)
        axes.grid(visible=False)
        figure = cast("Figure", axes.figure)
        figure.colorbar(image, ax=axes)
        drawn.append(figure)
    return drawn


# -- what they share


def _look(index: int) -> dict[str, Any]:
    """The colour and marker of the run or line of a number."""
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def _axes(width: float, height: float) -> Axes:
    """Axes of a new figure of so many inches; not pyplot's, which keeps every figure."""
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def _points(
    axes: Axes,
    run: PlottedRun,
    blocks: list[tuple[dict, float]],
    across: bool = False,
    what: str = "speedup",
) -> None:
    """A number in some blocks of a run, with its interval if it has one: upwards at x, or (across) rightwards at y."""
    blocks = [(numbers, at) for numbers, at in blocks if numbers[what] is not None]
    values, at = [numbers[what] for numbers, _ in blocks], [position for _, position in blocks]
    errors = _error_bars([numbers for numbers, _ in blocks], what)
    style = run.look | {"linestyle": "", "label": run.label, "capsize": 2, "markersize": 5}
    if across:
        axes.errorbar(values, at, xerr=errors, **style)
    else:
        axes.errorbar(at, values, yerr=errors, **style)


def _error_bars(blocks: Collection[dict], what: str) -> list[list[float]]:
    """How far the interval of a number reaches below it, and above it, in each block; 0 where there is no interval."""
    return [
        [one[what] - (one[f"{what}_low"] or one[what]) for one in blocks],
        [(one[f"{what}_high"] or one[what]) - one[what] for one in blocks],
    ]


def _break_even_line(
    axes: Axes,
    points: dict[int, BreakEven],
    index: int,
    label: str,
    apart: float,
    limits: tuple[float, float],
) -> None:
    """A line over the batch size; what lies outside of what was measured stands in the margin, as an open triangle."""
    look = _look(index)
    inside = {size * apart: one.acceptance for size, one in points.items() if math.isfinite(one.acceptance)}
    axes.plot(list(inside), list(inside.values()), markersize=5, label=label, **look)
    for size, one in points.items():
        x = size * apart
        if one.low is not None and one.high is not None:
            span = np.clip([one.low, one.high], *limits)
            axes.plot([x, x], span, color=look["color"], linewidth=1.2)
        if not math.isfinite(one.acceptance):
            side = int(one.acceptance > 0)  # below, or above
            y = (one.measured[side] + limits[side]) / 2
            shape = {"marker": "v^"[side], "fillstyle": "none", "linestyle": ""}
            axes.plot([x], [y], **look | shape, markersize=6)


def _legend(axes: Axes) -> Figure:
    """A legend beside the plot, if there is something to name; the figure, which is then large enough for both."""
    figure = cast("Figure", axes.figure)
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return figure
    names = [_wrapped(name) for name in names]
    axes.legend(handles, names, fontsize=LEGEND, loc="upper left", bbox_to_anchor=(1.01, 1))
    lines = [line for name in names for line in name.split("\n")]
    em = LEGEND / 72  # inches
    beside, tall = 0.6 * em * max(map(len, lines)) + 4 * em, em * (1.25 * len(lines) + 0.5 * len(names))
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, NARROWEST + beside), max(height, 1 + tall))
    return figure


def _wrapped(label: str) -> str:
    """A long label in several lines, so that it leaves room for the plot."""
    return textwrap.fill(label, WIDEST, break_long_words=False, break_on_hyphens=False)


def _milliseconds(overall: dict) -> dict[str, float]:
    """Milliseconds per token by part; what is in no part is other, or not told apart where a part is not known."""
    seconds = {part: overall[f"{part}_seconds"] for part in ("draft", "verify", "prefill")}
    rest = UNKNOWN_PARTS if None in seconds.values() else "other"
    parts = {part: value or 0.0 for part, value in seconds.items()}
    parts["alignment"] = overall["align_seconds"] or 0.0  # which single sequences do not have
    parts[rest] = max(0.0, overall["seconds"] - sum(parts.values()))
    return {part: 1e3 * value / overall["tokens"] for part, value in parts.items()}
