"""What all plots share: how runs look in them, points with intervals, and legends.

Every run keeps its colour, marker and hatch, so that a plot can be read without colours; the palette is Okabe and Ito's
(2008), which the colour-blind can tell apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES = 10  # runs in a plot: more cannot be told apart
LEGEND = 7  # points
NARROWEST = 3.5  # inches of a plot beside its legend
WIDEST = 44  # characters in a line of a label
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "osD^vP*X<>"
# Numbers of rounds are compared with the speedup of the rounds alone.
OF_ROUNDS, OF_ROUNDS_LABEL = "decode_speedup", "speedup without prefill (95 % interval)"
LOOK: Any = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "legend.frameon": False, "hatch.linewidth": 0.5,
        "text.parse_math": False}  # fmt: skip


@dataclass(frozen=True)
class PlottedRun:
    """A run in the plots: its label, and how it is drawn."""

    label: str
    summary: dict
    look: dict[str, Any]

    @property
    def overall(self) -> dict:
        """The numbers over all questions."""
        return self.summary["overall"]


def look_of(index: int) -> dict[str, Any]:
    """The colour and marker of the run or line at an index."""
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def new_axes(width: float, height: float) -> Axes:
    """Axes of a new figure, sized in inches; not pyplot's, which keeps every figure."""
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def draw_points(
    axes: Axes,
    run: PlottedRun,
    blocks: list[tuple[dict, float]],
    across: bool = False,
    what: str = "speedup",
) -> None:
    """A number in some blocks of a run, with its interval if it has one: upwards at x, or (across) rightwards at y."""
    blocks = [(numbers, at) for numbers, at in blocks if numbers[what] is not None]
    values, at = [numbers[what] for numbers, _ in blocks], [position for _, position in blocks]
    errors = error_bars([numbers for numbers, _ in blocks], what)
    style = run.look | {"linestyle": "", "label": run.label, "capsize": 2, "markersize": 5}
    if across:
        axes.errorbar(values, at, xerr=errors, **style)
    else:
        axes.errorbar(at, values, yerr=errors, **style)


def error_bars(blocks: Collection[dict], what: str) -> list[list[float]]:
    """How far the interval of a number reaches below it, and above it, in each block; 0 if there is no interval."""
    return [
        [one[what] - (one[f"{what}_low"] or one[what]) for one in blocks],
        [(one[f"{what}_high"] or one[what]) - one[what] for one in blocks],
    ]


def with_legend(axes: Axes) -> Figure:
    """Adds a legend beside the plot, if a line has a label, and enlarges the figure for both; returns the figure."""
    figure = cast("Figure", axes.figure)
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return figure
    names = [wrapped(name) for name in names]
    axes.legend(handles, names, fontsize=LEGEND, loc="upper left", bbox_to_anchor=(1.01, 1))
    lines = [line for name in names for line in name.split("\n")]
    em = LEGEND / 72  # inches
    beside, tall = 0.6 * em * max(map(len, lines)) + 4 * em, em * (1.25 * len(lines) + 0.5 * len(names))
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, NARROWEST + beside), max(height, 1 + tall))
    return figure


def wrapped(label: str) -> str:
    """A long label in several lines, so that it leaves room for the plot."""
    return textwrap.fill(label, WIDEST, break_long_words=False, break_on_hyphens=False)
