"""Writes the results table and the plots of README and documentation: `make readme-figures [RUNS="FOLDER ..."]`.

Given run folders, it takes those. Without any it measures the methods of METHODS first, each with
`python -m specbench.bench method=NAME`. Tables and plots are those of `specbench.report`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import UserError, one_line_errors
from specbench.report import formats, plots, tables
from specbench.report.runs import Run, finished_runs
from specbench.report.trained import SAME, differing_training, training_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
METHODS = (
    *("pld", "lookahead", "recycling", "rest", "samd", "suffix"),
    *("sps", "sps_tree", "kangaroo", "kangaroo_tree", "medusa", "hydra_heads", "eagle", "eagle2", "eagle3"),
    *("vocabtrim", "s2d", "ssd", "mirror_sd"),
)
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PLOTS = {
    "speedup_by_task": "Speedup by task, with 95 % intervals",
    "acceptance_and_speedup": "Speedup over acceptance length: on a grey line rounds cost the same",
    "time": "Milliseconds per token by part, and the baseline",
}


@dataclass(frozen=True)
class Page:
    """A page with markers, where its plots lie as seen from it, and what stands between its markers."""

    path: Path
    figures: str
    plots: tuple[str, ...]
    by_task: bool


PAGES = (
    Page(Path("README.md"), "docs/figures", ("acceptance_and_speedup",), by_task=False),
    Page(
        Path("docs/results/methods.md"),
        "../figures",
        ("acceptance_and_speedup", "speedup_by_task", "time"),
        by_task=True,
    ),
)


def block(runs: list[Run], page: Page, drawn: Iterable[str]) -> str:
    """What stands between the markers of a page, in Markdown.

    Args:
        runs: Finished runs, in the order of the table.
        page: The page.
        drawn: Names of the plots that the runs have data for.
    """
    summaries = [run.summary for run in runs]
    by_task = tables.spec_bench_table(summaries) if page.by_task else None
    parts = [measured_on(runs), body(tables.overview_table(summaries))]
    if by_task is not None:
        parts += ["Speedups by task, with intervals; *its def.* is Spec-Bench's own.", body(by_task)]
    parts += [f"**{note}**" for note in (*tables.notes(runs), *differing_training(summaries))]
    trained = training_table(summaries)
    if trained is not None and not differing_training(summaries):
        parts.append(f"Training: {SAME}.")
    parts += [f"![{PLOTS[name]}]({page.figures}/{name}.png)" for name in page.plots if name in drawn]
    return "\n\n".join(parts)


def measured_on(runs: list[Run]) -> str:
    """When, where and how the runs were measured, in a sentence or two.

    Raises:
        UserError: A run has no provenance, or the runs were measured on several machines.
    """
    known = [run.provenance for run in runs if run.provenance is not None]
    machines = {(one["machine"]["cpu"], one["machine"]["usable_cores"]) for one in known}
    if len(known) < len(runs) or len(machines) > 1:
        raise UserError("a table needs runs of one machine, each with its provenance")
    (cpu, cores) = machines.pop()
    days = sorted({one["time"][:10] for one in known})
    summary = runs[0].summary
    answers = {run.summary["equivalence"]["answers"] for run in runs}
    threads = {run.summary.get("threads") or "unknown" for run in runs}
    facts = [
        f"`make bench METHOD=...` for each, {' to '.join(dict.fromkeys((days[0], days[-1])))}",
        f"{cpu}, {cores} cores" + (f", threads of torch: {threads.pop()}" if len(threads) == 1 else ""),
        f"pair `{summary['pair']}`, {summary['dtype']}, "
        + ("greedy" if summary["temperature"] == 0 else f"temperature {summary['temperature']:g}"),
        f"{summary['overall']['questions']} questions"
        + (f", {answers.pop()} answers a method" if len(answers) == 1 else ""),
    ]
    return "; ".join(facts) + "."


def body(table: Table) -> str:
    """A table in Markdown without the title above it."""
    return formats.markdown(table).partition("\n\n")[2].strip()


def between_markers(text: str, content: str) -> str:
    """The text with other content between its markers.

    Raises:
        UserError: It does not have both markers, in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the page has no lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{content}\n\n{END}{tail}"


def write(runs: list[Run], root: Path = ROOT) -> None:
    """Writes the plots into docs/figures/ and the tables into every page, below `root`."""
    drawn = {name: figure for name, figure in plots.figures(runs).items() if name in PLOTS}
    changed = {}
    for page in PAGES:
        path = root / page.path
        changed[path] = between_markers(path.read_text(encoding="utf-8"), block(runs, page, drawn))
    folder = root / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=120)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")


def measure(method: str) -> Path:
    """Runs a method with nothing else given; returns its run folder, the last line that the command prints.

    Raises:
        UserError: The run failed.
    """
    command = [sys.executable, "-m", "specbench.bench", f"method={method}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise UserError(f"{method} ended with exit code {done.returncode}")
    return ROOT / done.stdout.splitlines()[-1]


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="finished run folders, in the order of the table")
    given = parser.parse_args().runs
    runs, left_out = finished_runs(given or [measure(method) for method in METHODS])
    tables.print_left_out(left_out)
    write(runs)
    for page in PAGES:
        print(page.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
