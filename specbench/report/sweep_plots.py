"""Plots over what runs differ in: batch sizes, engines, models, and two settings of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, cast

import numpy as np
from matplotlib.figure import Figure

from specbench.config.spec import POOL
from specbench.report import verdicts
from specbench.report.break_even import BreakEven, break_evens
from specbench.report.cells import equivalence_text
from specbench.report.drawing import (
    LEGEND,
    MARKERS,
    MAX_SERIES,
    OF_ROUNDS,
    OF_ROUNDS_LABEL,
    PALETTE,
    PlottedRun,
    draw_points,
    error_bars,
    look_of,
    new_axes,
    with_legend,
    wrapped,
)
from specbench.report.labels import beside_engines, grids, labels, line_names
from specbench.report.model_scaling import baseline_fractions, by_size, of_other_models
from specbench.report.remarks import baseline_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAT_MAPS = 6
PANELS = 3


def throughput(summaries: Iterable[dict]) -> Figure | None:
    """Tokens per second over the batch size, of many methods the fastest; runs with a fault are left out.

    None without a batch of two or more.
    """
    lines: dict[str, dict[int, float]] = {}
    of_pools = [
        s for s in verdicts.sound(summaries) if s["unit"] == POOL and s["overall"]["tokens_per_second"]
    ]
    sizes_of_runs = [summary["batch_size"] for summary in of_pools]
    for name, summary in zip(line_names(of_pools, sizes_of_runs), of_pools):
        lines.setdefault(name, {})[summary["batch_size"]] = summary["overall"]["tokens_per_second"]
    fastest = sorted(lines, key=lambda name: -max(lines[name].values()))[:MAX_SERIES]
    shown = {name: line for name, line in lines.items() if name in fastest}
    sizes = sorted({size for line in shown.values() for size in line})
    if not sizes or sizes[-1] == 1:
        return None
    axes = new_axes(6.5, 4)
    if len(lines) > MAX_SERIES:
        axes.set_title(f"the {MAX_SERIES} fastest of {len(lines)} lines", fontsize=8)
    for index, (name, line) in enumerate(shown.items()):
        line_sizes = sorted(line)
        axes.plot(line_sizes, [line[size] for size in line_sizes], label=name, **look_of(index))
    axes.set_xscale("log", base=2)
    axes.set(xticks=sizes, xticklabels=sizes, xlabel="batch size", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    return with_legend(axes)


def engines(summaries: Iterable[dict]) -> Figure | None:
    """Other engines compared with this project: their plain speed, and what a method gains there; or None.

    A line at the end of a bar is where reading the weights alone would end, if that is known.
    """
    shown = beside_engines(summaries)
    names = labels(shown)
    if not shown:
        return None
    height = 0.9 + 0.45 * len(shown)
    figure = Figure(figsize=(9, height), layout="constrained")
    plain, gain = figure.subplots(1, 2, sharey=True)
    for row, (name, summary) in enumerate(zip(names, shown)):
        colour = PALETTE[0] if summary["engine"] is None else PALETTE[1]
        rate, ceiling = baseline_rate(summary["baseline"]), summary["baseline"]["ceiling_tokens_per_second"]
        if rate:
            plain.barh(row, rate, height=0.55, color=colour)
        if ceiling:
            plain.plot([ceiling] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
        run = PlottedRun(name, summary, {"color": colour, "marker": MARKERS[0]})
        draw_points(gain, run, [(summary["overall"], row)], across=True)
        verdicts = equivalence_text(summary["equivalence"]).plain
        gain.annotate(verdicts, (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=LEGEND)  # fmt: skip
    gain.axvline(1, color="black", linewidth=1)
    plain.set(
        xlabel="autoregressive decoding, tokens per second; line: memory ceiling", yticks=range(len(shown))
    )
    plain.set_yticklabels([wrapped(name) for name in names], fontsize=LEGEND)
    gain.set(xlabel="speedup over it (95 % interval); exact/tie/violation")
    plain.set_ylim(len(shown) - 0.5, -0.5)
    for axes in (plain, gain):
        axes.grid(axis="y", visible=False)
    return figure


def break_even(summaries: Iterable[dict]) -> Figure | None:
    """The acceptance at which the speedup is 1, over the batch size, a line per draft length; a panel per drafter."""
    curves = break_evens(verdicts.sound(summaries))
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
    with_legend(panels[-1])
    return figure


def _break_even_line(
    axes: Axes,
    points: dict[int, BreakEven],
    index: int,
    label: str,
    apart: float,
    limits: tuple[float, float],
) -> None:
    """A line over the batch size; values outside the measured range are open triangles in the margin."""
    look = look_of(index)
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


def regimes(summaries: Iterable[dict]) -> Figure | None:
    """Over the size of a target that computes the same at every size: bandwidth, speedup with MBSU, and their ratio.

    Models that were not expanded are single points, with their names beside them.
    """
    summaries = verdicts.sound(summaries)
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
        style = look_of(index) | {"markersize": 5}
        numbers = {size / 1e6: summary["overall"] for size, summary in sizes.items()}
        # MBSU is of the rounds alone: it is compared with their speedup.
        comparable = {size: one for size, one in numbers.items() if one[OF_ROUNDS] and one["mbsu"]}
        values = [one[OF_ROUNDS] for one in comparable.values()]
        bars = error_bars(comparable.values(), OF_ROUNDS)
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
    with_legend(reached)
    return figure


def _other_models(
    models: Mapping[str, Mapping[str, Mapping]], lines: list[str], panels: Sequence[Axes]
) -> list[float]:
    """Draws models that are no lines: the baseline's share, speedups, and what is reached of MBSU.

    Args:
        models: as returned by `of_other_models`.
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
            style = look_of(lines.index(label)) | {"marker": "*", "markersize": 9}
            bars = error_bars([numbers], OF_ROUNDS)
            speedups.errorbar([size], [numbers[OF_ROUNDS]], yerr=bars, linestyle="", capsize=2, **style)
            if numbers["mbsu"]:
                reached.plot([size], [numbers[OF_ROUNDS] / numbers["mbsu"]], linestyle="", **style)
    return sizes


def _drafts(sizes: Mapping[int, Mapping]) -> bool:
    """Whether a method drafts at all: autoregressive decoding has no speedup to draw."""
    return any(summary["overall"]["acceptance_rate"] is not None for summary in sizes.values())


def heat_maps(summaries: Iterable[dict]) -> list[Figure]:
    """Overall speedups for each method and pair with exactly two varied settings, of runs without a fault.

    If there are many, the largest are drawn, as the title mentions; the tables contain all.
    """
    drawn = []
    filled_grids = [grid for grid in grids(verdicts.sound(summaries)) if any(grid.cells.values())]
    largest = sorted(filled_grids, key=lambda grid: -len(grid.cells))[:HEAT_MAPS]
    cut = f" ({HEAT_MAPS} of {len(filled_grids)} are drawn)" if len(filled_grids) > HEAT_MAPS else ""
    for grid in largest:
        rows, columns, cells = grid.rows, grid.columns, grid.cells
        values = np.array([[cells.get((r, c)) or math.nan for c in columns] for r in rows], dtype=float)
        axes = new_axes(2.5 + 0.7 * len(columns), 1.5 + 0.5 * len(rows))
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
