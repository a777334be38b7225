"""What tables are made of: tables that show text as it is, and how numbers and verdicts are written."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.measure.metrics.statistics import verdict

PIPED_WIDTH = 112
UNKNOWN = "–"  # not measured
NUMBER: dict[str, Any] = {"justify": "right", "no_wrap": True}  # a column of numbers
WRONG = "bold red"  # the style of what warns


class PlainTable(Table):
    """A table whose strings are shown as they are: rich alone takes square brackets in a label or path for markup."""

    def __init__(self, title: str | Text, caption: str | Text = "", **options: Any):
        title = Text(title, style="bold") if isinstance(title, str) else title
        super().__init__(
            title=title,
            caption=Text(caption) if isinstance(caption, str) else caption,
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            title_justify="left",
            title_style="",
            caption_justify="left",
            caption_style="",
            **options,
        )

    def add_columns(self, *headers: str, **options: Any) -> None:
        """Adds columns whose headers are no markup."""
        for header in headers:
            self.add_column(Text(header), **options)

    def add_row(self, *cells: str | Text, **options: Any) -> None:  # type: ignore[override] # no markup
        """Adds a row whose texts are no markup."""
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def console() -> Console:
    """Standard output: as wide as the terminal, and PIPED_WIDTH columns when it goes elsewhere.

    Signs that its encoding lacks are replaced: a dash must not end a report. Square brackets are no markup.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=width, markup=False)


def speedup_text(numbers: dict, narrow: bool = False) -> Text:
    """The speedup of a block of numbers as `ratio_text`."""
    return ratio_text(numbers["speedup"], numbers["speedup_low"], numbers["speedup_high"], narrow)


def questions_text(numbers: dict) -> str:
    """Number of questions in a block of numbers, such as "6 of 36" if the others have no speedup."""
    every, timed = numbers["questions"], numbers["speedup_questions"]
    return str(every) if timed in (every, None) or numbers["pools"] else f"{timed} of {every}"


def ratio_text(value: float | None, low: float | None, high: float | None, narrow: bool = False) -> Text:
    """A ratio and its interval; without colour if the interval contains 1. narrow: in two lines."""
    outcome = verdict(low, high)
    if outcome is None:
        return Text(number_text(value, 2))
    style = {"faster": "green", "slower": "red", "no difference": ""}[outcome]
    interval = f"\n{low:.2f}–{high:.2f}" if narrow else f" [{low:.2f}, {high:.2f}]"
    return Text(f"{value:.2f}{interval}", style=style)


def equivalence_text(counts: dict) -> Text:
    """Answers that are exact, ties and violations."""
    if not counts["answers"]:
        return Text(UNKNOWN)
    text = f"{counts['exact']}/{counts['tie']}/{counts['violation']}"
    return Text(text, style=WRONG if counts["violation"] else "")


def number_text(value: float | None, digits: int) -> str:
    """A number with `digits` decimals, or a dash."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def share_text(value: float | None) -> str:
    """A share in per cent, or a dash."""
    return UNKNOWN if value is None else f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"
