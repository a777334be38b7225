"""The commands `specbench report`, `compare` and `claims`.

`python -m specbench.report [RUNS ...]`: tables and plots of finished runs.
`python -m specbench.report compare A B ...`: runs side by side, whether they may be compared, and a gate for CI.
`python -m specbench.report claims [RUNS ...]`: the same as the first, and what the papers claim, checked; `--markdown`
prints that table alone, `--write PAGE` writes it into a page.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from specbench.report import (
    cells,
    claims,
    compare,
    decision,
    formats,
    gate,
    page,
    plots,
    remarks,
    tables,
    verdicts,
)
from specbench.report.published_tables import published_tables
from specbench.report.runs import (
    Run,
    SkippedRun,
    ending_in_its_name,
    finished_runs,
    is_run,
    oldest_first,
    summary_frame,
)
from specbench.report.training_data import training_table
from specbench.system.arguments import Parser
from specbench.system.errors import UserError, file_errors, one_line_errors, suggest
from specbench.system.files import make_folder

if TYPE_CHECKING:
    from rich.table import Table

MAX_SINGLE_TABLES = 6  # most runs that are also shown one by one


def report(runs: list[Run], left_out: list[SkippedRun], out: Path, first: list[Table]) -> Path:
    """Writes tables (Markdown, LaTeX, CSV), plots and the page into a folder.

    Args:
        runs: The finished runs.
        left_out: Folders that are named and left out.
        out: The folder, made if it is missing.
        first: Tables before those that every report has.

    Returns:
        The page.
    """
    trained = training_table(run.summary for run in runs)
    side_by_side = [*first, *tables.overview(run.summary for run in runs), *([trained] if trained else [])]
    drawn = plots.figures(runs)
    make_folder(out)
    published = published_tables(dict.fromkeys(run.summary["method"] for run in runs))
    decided = decision.decisions(runs)
    every = [*map(decision.decision_table, decided), *side_by_side, *published]
    notes = remarks.notes(runs)
    warnings = [*compare.faulty(runs), *notes]
    for file, mark, form in (("tables.md", ">", formats.markdown), ("tables.tex", "%", formats.latex)):
        parts = [*(f"{mark} {line}\n" for line in warnings), *map(form, every)]
        (out / file).write_text("\n".join(parts), encoding="utf-8")
    summary_frame(runs).to_csv(out / "runs.csv", index=False)
    images = plots.save(drawn, out / "plots")
    html = page.page(runs, left_out, decided, side_by_side, images, notes, published)
    (out / "index.html").write_text(html, encoding="utf-8")
    return out / "index.html"


def print_report(runs: list[Run]) -> None:
    """Prints runs with faults (if there are few runs, all) one by one, and then all runs side by side."""
    out = cells.console()
    for run in sorted(runs, key=lambda run: not verdicts.faults(run.summary)):
        if len(runs) <= MAX_SINGLE_TABLES or verdicts.faults(run.summary):
            out.print(tables.run_table(run.summary))
            out.print(Text(f"{run.folder}\n", style="dim"))
    if len(runs) > 1:
        tables.print_overview(runs)
        if trained := training_table(run.summary for run in runs):
            out.print(trained)
        for one in decision.decisions(runs):
            out.print(decision.decision_table(one))


@one_line_errors()
@file_errors()
def main() -> int:
    """Runs the command line; returns the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["compare"]:
        return compare_runs(arguments[1:])
    if arguments[:1] == ["claims"]:
        return write_report(arguments[1:], with_claims=True)
    return write_report(arguments)


def compare_runs(arguments: list[str]) -> int:
    """Compares the runs of the command line with the first of them."""
    parser = Parser(prog="python -m specbench.report compare", description=compare.__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders; the first is what the others are compared with"
    )
    parser.add_argument("--metric", type=_metric, metavar="NAME", default=compare.SPEEDUP)
    parser.add_argument(
        "--fail-below",
        type=_limit,
        metavar="RATIO",
        help="exit code 1 if the whole interval of the ratio to the first run lies below, or something is wrong with a "
        "run; 2 if the runs may not be compared",
    )
    parser.add_argument(
        "--allow",
        action="append",
        type=_key,
        default=[],
        metavar="KEY",
        help="what else may differ, such as machine or versions.torch; the code may always differ",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options = parser.parse_args(arguments)
    runs, left_out = finished_runs(options.runs, with_records=True)
    if left_out and (options.json or options.fail_below is not None):
        # Else the next run would be judged in its place, or become the reference.
        raise UserError(f"a gate needs every run: {'; '.join(map(str, left_out))}")
    tables.print_left_out(left_out)
    if len(runs) < 2:
        raise UserError("a comparison needs two finished runs")
    if not options.json:
        compare.print_comparison(runs, options.metric)
        if options.fail_below is None:
            return 0
    judged = gate.judge(runs, options.metric, options.fail_below, options.allow)
    print(
        json.dumps([asdict(one) for one in judged], indent=2) if options.json else "\n".join(map(str, judged))
    )
    return gate.exit_code(judged)


def _metric(text: str) -> str:
    """A metric to compare runs by. Raises UserError for any other."""
    if text not in compare.METRICS:
        raise UserError(f"unknown metric '{text}': {suggest(text, compare.METRICS)}")
    return text


def _limit(text: str) -> float:
    """A ratio above 0. Raises UserError for anything else."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UserError(f"--fail-below must be a number above 0, such as 0.97, not '{text}'")


def _key(text: str) -> str:
    """A key that may differ: a name in `gate.NAMES`, the beginning of one, or a part of it.

    Raises UserError for any other, and for an empty one (an unset variable of CI), with which every name begins.
    """
    if not text or not any(name.startswith(text) or text.startswith(f"{name}.") for name in gate.NAMES):
        raise UserError(f"--allow: unknown key '{text}': {suggest(text, gate.NAMES)}")
    return text


def write_report(arguments: list[str], with_claims: bool = False) -> int:
    """Prints and writes the report of the runs of the command line.

    Args:
        arguments: Of the command line.
        with_claims: Whether the papers' claims are checked, too.

    Returns:
        The exit code: 1 when a claim has no run to check it with.
    """
    parser = Parser(
        prog="python -m specbench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of them"
    )
    parser.add_argument(
        "--out", type=Path, help="where the report goes, by default into report/ beside the runs"
    )
    parser.set_defaults(markdown=False, write=[])
    if with_claims:
        parser.add_argument(
            "--markdown", action="store_true", help="print the claims' table in Markdown and nothing else"
        )
        parser.add_argument(
            "--write",
            type=Path,
            action="append",
            metavar="PAGE",
            help="a Markdown file to write the table into, between <!-- claims:begin --> and <!-- claims:end -->, or "
            "how many claims came to each verdict, between <!-- claims-counts:begin --> and its end",
        )
    options = parser.parse_args(arguments)
    runs, left_out = finished_runs(options.runs, with_records=with_claims)
    runs, first = oldest_first(runs), next(filter(Path.is_dir, options.runs))
    out = options.out or (beside(first) if is_run(first) else first) / "report"
    checked = claims.check_claims(runs) if with_claims else []
    first_tables = [claims.claims_table(checked)] if checked else []
    for path in options.write:
        claims.renew(path, checked, runs)
    if options.markdown:
        for one in left_out:
            print(f"left out: {one}", file=sys.stderr)
        print(claims.markdown(checked, runs))
    else:
        print_report(runs)
        for table in first_tables:
            cells.console().print(table)
        tables.print_left_out(left_out)
        print(report(runs, left_out, out, first_tables))
    return int(any(one.fitting.verdict == "not measured" for one in checked))


def beside(run: Path) -> Path:
    """The folder that holds a run's, also where that is named "." or ".."."""
    return ending_in_its_name(run).parent


if __name__ == "__main__":
    sys.exit(main())
