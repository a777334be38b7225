"""Measures a published acceptance again: `specbench check-published NAME [key=value ...]`.

The settings of each check lie in conf/published_checks.yaml: MT-bench's questions, which Spec-Bench has, the drafter's
checkpoint, and the form of draft. The command is a run like any other, whose acceptance is then set beside the
published one. Acceptance needs neither repeats nor a quiet machine. Exit code: 1 where ours is further away than the
tolerance, or the run failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from specbench import CONF
from specbench.commands.run import Command, with_hydra
from specbench.config.overrides import overridden_key
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError, one_line_errors, suggest

if TYPE_CHECKING:
    from rich.table import Table

FILE = CONF / "published_checks.yaml"
# Settings of all checks: MT-bench's 80 questions in Spec-Bench, first turns; only acceptance is measured.
COMMON = (
    *("settings=published", "data=spec_bench", "task=mt_bench", "data.limit=null", "data.turns=1"),
    *("generate=false", "repeats=1", "remeasure=0"),
)


@dataclass(frozen=True)
class Check:
    """A published acceptance, and the run that measures it again.

    Attributes:
        overrides: of `specbench run`.
        acceptance_length: as published.
        by_place: share of drafts whose token at each position is accepted; None if not published.
        tolerance: largest difference between our figure and the published one, as a share of the latter.
        source: of the figures.
        note: known differences that no setting removes.
    """

    overrides: tuple[str, ...]
    acceptance_length: float
    by_place: tuple[float, ...] | None
    tolerance: float
    source: str
    note: str | None = None


def checks(path: Path = FILE) -> dict[str, Check]:
    """The checks of a file, by name."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return {
        str(name): Check(
            overrides=last_of_each(*COMMON, *check.pop("run"), *check.pop("more", ())),
            by_place=None if (shares := check.pop("by_place")) is None else tuple(shares),
            **check,
        )
        for name, check in content.items()
    }


def last_of_each(*overrides: str) -> tuple[str, ...]:
    """The overrides, with only the last one of each key."""
    return tuple({overridden_key(override): override for override in overrides}.values())


def compared(check: Check, overall: dict) -> list[tuple[str, float, float | None, bool | None]]:
    """Rows of name, published figure, our figure, and whether it is within the tolerance; None if not measured."""
    ours = overall["acceptance_by_position"] or []
    rows = [("acceptance length", check.acceptance_length, overall["acceptance_length"])]
    rows += [
        (f"accepted at place {place + 1}", share, ours[place] if place < len(ours) else None)
        for place, share in enumerate(check.by_place or ())
    ]
    return [
        (
            name,
            theirs,
            measured,
            None if measured is None else abs(measured - theirs) <= check.tolerance * theirs,
        )
        for name, theirs, measured in rows
    ]


def check_table(
    name: str, check: Check, rows: Sequence[tuple[str, float, float | None, bool | None]]
) -> Table:
    """Table of our figures beside the published ones."""
    from specbench.report.cells import NUMBER, PlainTable, number_text

    table = PlainTable(f"{name}: {check.source}")
    table.add_columns("")
    table.add_columns("published", "ours", "ours /\npublished", **NUMBER)
    table.add_columns(f"within\n{check.tolerance:.0%}")
    words = {True: "yes", False: "no", None: "not measured"}
    for what, theirs, measured, within in rows:
        ratio = None if measured is None else measured / theirs
        numbers = (number_text(theirs, 3), number_text(measured, 3), number_text(ratio, 2))
        table.add_row(what, *numbers, words[within])
    table.caption = check.note
    return table


def overview(all_checks: dict[str, Check]) -> str:
    """One line for each check, and how to run one."""
    width, heading = max(map(len, all_checks)), "published acceptance length"
    rows = [("name", heading, "source")]
    rows += [(name, f"{one.acceptance_length:.2f}", one.source) for name, one in all_checks.items()]
    lines = [f"{name:<{width}}  {length:>{len(heading)}}  {source}" for name, length, source in rows]
    return "\n".join([*lines, "", "measure one again: specbench check-published NAME [key=value ...]"])


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    from specbench.report.cells import console
    from specbench.report.runs import read_run

    all_checks = checks()
    name, *more = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(overview(all_checks))
        return 0
    if name not in all_checks:
        raise UserError(f"unknown check '{name}': {suggest(name, all_checks)}")
    check = all_checks[name]
    sys.argv[1:] = last_of_each(*check.overrides, *more)
    command = Command()
    code = with_hydra("bench", command, resumes=True) or command.report()
    run_dir = command.jobs[-1].run_dir if command.jobs else None
    if run_dir is None or not store.is_complete(run_dir):
        return code or 1
    rows = compared(check, read_run(run_dir).summary["overall"])
    console().print(check_table(name, check, rows))
    return code or int(not all(within for *_, within in rows))


if __name__ == "__main__":
    sys.exit(main())
