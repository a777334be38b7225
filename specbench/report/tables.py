"""Tables of finished runs, for a terminal; `formats` makes Markdown, LaTeX and HTML of the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from specbench.config.spec import POOL, QUESTION
from specbench.config.tuned import CHANGED
from specbench.data.question_files import TASKS
from specbench.report import remarks, verdicts
from specbench.report.cells import (
    NUMBER,
    UNKNOWN,
    PlainTable,
    console,
    equivalence_text,
    number_text,
    questions_text,
    share_text,
    speedup_text,
)
from specbench.report.labels import as_text, beside_engines, grids, labels, pair_names, task_names
from specbench.report.phases import FEW
from specbench.report.runs import Run, SkippedRun, finished_runs, oldest_first
from specbench.system.arguments import Parser

if TYPE_CHECKING:
    from rich.table import Table

NOTES_SHOWN = 10
ROWS_SHOWN = 200  # a longer table is for a file
SHORT = {  # column heads
    "mt_bench": "multi\nturn",
    "translation": "transla-\ntion",
    "summarization": "summa-\nrization",
    "math_reasoning": "math",
}


def run_table(summary: dict) -> Table:
    """The numbers of one run: a row per task, those with a violation first, then all questions together."""
    engine = summary["engine"]
    caption = remarks.baseline_line(summary["baseline"]) if engine is None else remarks.engine_line(summary)
    for line in (
        remarks.likelihood_line(summary),
        verdicts.ties_line(summary),
        remarks.batch_line(summary),
        *summary["notes"],
        remarks.acceptance_line(summary["overall"]),
        remarks.prefill_line(summary["overall"]),
        remarks.changed_drafts_line(summary),
        remarks.passes_line(summary),
        remarks.machine_line(summary),
        remarks.kernels_line(summary),
        remarks.repetition_line(summary),
    ):
        caption.append(f"\n{line}" if line else "")
    table = PlainTable(remarks.title_text(summary), caption)
    _add_columns(table, "task")
    tasks = sorted(summary["tasks"].items(), key=lambda item: not item[1]["equivalence"]["violation"])
    for name, numbers in tasks:
        table.add_row(name, *_cells(numbers))
    table.add_section()
    table.add_row("overall", *_cells(summary["overall"]), style="bold")
    return table


def spec_bench_table(summaries: Iterable[dict]) -> Table | None:
    """Speedups by task in Spec-Bench's own form, a row per run, with mean accepted tokens and the overall speedup.

    Ours are ratios of summed seconds; another column has the overall speedup as its speed.py defines it. None without
    a task: the runs of batch methods have no times by task.
    """
    summaries = [summary for summary in summaries if summary["unit"] == QUESTION]
    if not summaries:
        return None
    title = "speedups by task, in Spec-Bench's form; its def.: overall as Spec-Bench itself defines it"
    table = PlainTable(title, "\n".join(remarks.settings_lines(summaries)), padding=0)
    table.add_columns("run", overflow="fold", min_width=12)
    measured = task_names(summaries)
    # Spec-Bench's own table has all its tasks; other benchmarks have tasks of their own.
    shown = list(TASKS) if {*measured} <= {*TASKS} else measured
    last = ("accept.\nlength", "overall", "its\ndef.", "MBSU", "exact/\ntie/viol.")
    table.add_columns(*(SHORT.get(task, task) for task in shown), *last, **NUMBER)
    for label, summary in zip(labels(summaries), summaries):
        numbers, tasks = summary["overall"], summary["tasks"]
        speedups = [speedup_text(tasks[task], narrow=True) if task in tasks else UNKNOWN for task in shown]
        table.add_row(
            label + remarks.cores_label(summary),
            *speedups,
            number_text(numbers["acceptance_length"], 2),
            speedup_text(numbers, narrow=True),
            number_text(numbers["spec_bench_speedup"], 2),
            number_text(numbers["mbsu"], 2),
            equivalence_text(numbers["equivalence"]),
        )
    return table


def overview_table(summaries: Iterable[dict]) -> Table:
    """One row per run, over all its questions; of a method's parameters those that its runs differ in."""
    summaries = list(summaries)
    table = PlainTable("all runs, over all their questions", _caption(summaries))
    _add_columns(table, "run", with_baseline=True)
    for label, summary in zip(labels(summaries), summaries):
        questions, rate, *rest = _cells(summary["overall"])
        baseline = number_text(remarks.baseline_rate(summary["baseline"]), 1)
        table.add_row(label + remarks.cores_label(summary), questions, rate, baseline, *rest)
    return table


def engines_table(summaries: Iterable[dict]) -> Table | None:
    """Other engines compared with this project's own decoding: a row per run, with each engine's plain decoding.

    This project's runs are those of a method and pair that another engine was measured with. None without one.
    """
    shown = beside_engines(summaries)
    if not shown:
        return None
    title = "one pair, several engines: speedups are over autoregressive decoding by the same engine"
    table = PlainTable(title)
    table.add_columns("run", overflow="fold")
    rates = ("plain\ntokens/s", "of the\nceiling", "against\nitself", "speedup\n[95 % interval]")
    table.add_columns(*rates, "accept.\nlength", "exact/tie/\nviolation", "plain as\nthe target's", **NUMBER)
    for label, summary in zip(labels(shown), shown):
        engine, baseline = summary["engine"], summary["baseline"]
        fraction = baseline["bandwidth_fraction"]
        table.add_row(
            label,
            number_text(remarks.baseline_rate(baseline), 1),
            UNKNOWN if fraction is None else f"{fraction:.0%}",
            UNKNOWN if engine is None else verdicts.itself_text(engine),
            speedup_text(summary["overall"]),
            number_text(summary["overall"]["acceptance_length"], 2),
            equivalence_text(summary["equivalence"]),
            equivalence_text(baseline["equivalence"]),
        )
    return table


def pairs_table(summaries: Iterable[dict]) -> Table | None:
    """Overall speedups, a row per method (and its settings), a column per pair, and the mean over the pairs.

    None unless a method was run on several pairs; the others are left out, and so are runs with a fault. A method that
    was run several times on a pair shows its last run with the most questions; runs that differ in more than the
    pair (the size of a batch) have separate rows. Each pair has its own number of questions of a task.
    """
    summaries = verdicts.sound(summaries)
    cells: dict[str, dict[str, dict]] = {}
    names = labels(summaries, without=("pair", "limit"))
    changes = [_changes(summary) for summary in summaries]
    of_name: dict[str, set[str]] = {}
    for name, changed in zip(names, changes):
        of_name.setdefault(name, set()).add(changed)
    # Settings that differ from pair to pair are in no label.
    names = [f"{n}, {words}" if words and len(of_name[n]) > 1 else n for n, words in zip(names, changes)]
    for label, pair, summary in zip(names, pair_names(summaries), summaries):
        overall, row = summary["overall"], cells.setdefault(label, {})
        if pair not in row or overall["questions"] >= row[pair]["questions"]:
            row[pair] = overall
    cells = {label: by_pair for label, by_pair in cells.items() if len(by_pair) > 1}
    pairs = sorted({pair for by_pair in cells.values() for pair in by_pair})
    if not pairs:
        return None
    table = PlainTable("speedups by pair", _caption(summaries))
    table.add_columns("method", overflow="fold")
    table.add_columns(*pairs, "mean", **NUMBER)
    for label, by_pair in cells.items():
        values = [by_pair[pair]["speedup"] for pair in pairs if pair in by_pair]
        mean = sum(values) / len(values) if len(values) == len(pairs) and None not in values else None
        shown = [speedup_text(by_pair[pair]) if pair in by_pair else Text(UNKNOWN) for pair in pairs]
        table.add_row(label, *shown, number_text(mean, 3))
    return table


def _changes(summary: dict) -> str:
    """The settings that a command line changed, in its form; empty if it changed none."""
    if summary["settings_source"] != CHANGED:
        return ""
    chosen = summary["settings"] | remarks.beside_settings(summary)
    return ", ".join(as_text({key: chosen.get(key) for key in summary["settings_published"]}))


def grid_tables(summaries: Iterable[dict]) -> list[Table]:
    """A heat map for each grid of settings: the darkest cell is the fastest run. Runs with a fault have none."""
    tables: list[Table] = []
    for grid in grids(verdicts.sound(summaries)):
        speedups = [value for value in grid.cells.values() if value is not None]
        title = f"speedup of {grid.label} on {grid.pair}: {grid.down} down, {grid.across} across"
        table = PlainTable(title)
        table.add_columns(grid.down)
        table.add_columns(*map(str, grid.columns), **NUMBER)
        for row in grid.rows:
            shown = [_shaded(grid.cells.get((row, column)), speedups) for column in grid.columns]
            table.add_row(str(row), *shown)
        tables.append(table)
    return tables


def _shaded(value: float | None, among: list[float]) -> Text:
    """A number on a ground the darker the larger it is."""
    if value is None:
        return Text(UNKNOWN)
    low, high = min(among), max(among)
    share = (value - low) / (high - low) if high > low else 1.0
    grey = round(255 - 170 * share)
    return Text(f" {value:.2f} ", style=f"{'black' if grey > 140 else 'white'} on rgb({grey},{grey},{grey})")


def batches_table(summaries: Iterable[dict]) -> Table | None:
    """What batches gain: one row per run of a batch method. None if there is none."""
    of_pools = [summary for summary in summaries if summary["unit"] == POOL]
    if not of_pools:
        return None
    table = PlainTable("batches", _caption(of_pools))
    table.add_columns("run", overflow="fold")
    rates = ("batch\nsize", "tokens\nper s", "times AR\nat batch 1", "times AR\nbatches")
    table.add_columns(*rates, "occu-\npancy", "align-\nment", "peak\nGB", **NUMBER)
    for label, summary in zip(labels(of_pools, without=("batch_size",)), of_pools):
        overall, memory = summary["overall"], summary["peak_memory_bytes"]
        table.add_row(
            label,
            str(summary["batch_size"]),
            number_text(overall["tokens_per_second"], 1),
            number_text(remarks.gain(summary), 2),
            speedup_text(overall),
            share_text(overall["occupancy"]),
            share_text(overall["alignment_share"]),
            number_text(memory and memory / 1e9, 2),
        )
    return table


def overview(summaries: Iterable[dict]) -> list[Table]:
    """The tables that set several runs side by side."""
    summaries = list(summaries)
    tables = [spec_bench_table(summaries), overview_table(summaries)]
    tables += [engines_table(summaries), pairs_table(summaries)]
    return [table for table in (*tables, *grid_tables(summaries), batches_table(summaries)) if table]


def print_run(run: Run) -> None:
    """Prints the table of one finished run."""
    console().print(run_table(run.summary))


def print_overview(runs: list[Run]) -> None:
    """Prints several finished runs side by side: a row each, speedups by pair, and what does not compare.

    Of a very long table only the title is printed: a report has it in its files.
    """
    out = console()
    for table in overview(run.summary for run in runs):
        if table.row_count <= ROWS_SHOWN:
            out.print(table)
        else:
            print_notes([f"{table.title}: {table.row_count} rows, which python -m specbench.report writes"])
    print_notes(remarks.notes(runs))


def runs_of_command(program: str, description: str | None, with_records: bool = False) -> list[Run]:
    """The finished runs that the command line names, else all in runs/; prints those that are left out."""
    parser = Parser(prog=program, description=description)
    help_text = "run folders, or folders of them"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")], help=help_text)
    runs, left_out = finished_runs(parser.parse_args().runs, with_records)
    print_left_out(left_out)
    return oldest_first(runs)


def print_left_out(left_out: Iterable[SkippedRun]) -> None:
    """Prints every run that is left out; of unfinished ones, if there are many, only their number."""
    left_out = list(left_out)
    unfinished = [item for item in left_out if item.reason.startswith("unfinished")]
    if len(unfinished) > FEW:
        left_out = [item for item in left_out if item not in unfinished]
        print_notes(
            [
                f"left out {len(unfinished)} runs without results (failed or unfinished); give the same command again "
                "to finish one, or delete its folder"
            ]
        )
    for item in left_out:
        print_notes([f"left out: {item}"])


def print_notes(lines: list[str]) -> None:
    """Prints warnings; of many lines, the first ones and how many more."""
    more = len(lines) - NOTES_SHOWN
    for line in [*lines[:NOTES_SHOWN], *([f"and {more} more"] if more > 0 else [])]:
        console().print(Text(line, style="yellow"))


def _caption(summaries: list[dict]) -> str:
    """The caption of a table of runs: their kinds of settings, and whether intervals are over repeats of one pool."""
    alone = [remarks.is_one_pool(summary) for summary in summaries]
    lines = remarks.settings_lines(summaries)
    if any(alone):
        lines.append(remarks.ONE_POOL if all(alone) else f"batches: {remarks.ONE_POOL}")
    return "\n".join(lines)


def _add_columns(table: PlainTable, first: str, with_baseline: bool = False) -> None:
    table.add_columns(first, no_wrap=first == "task", overflow="fold")
    counts = ("ques-\ntions", "tokens\nper s", *(("base-\nline",) if with_baseline else ()))
    ratios = ("accept.\nlength", "accept.\nrate", "\nMBSU")
    table.add_columns(*counts, "speedup\n[95 % interval]", *ratios, "exact/tie/\nviolation", **NUMBER)


def _cells(numbers: dict) -> list[str | Text]:
    return [
        questions_text(numbers),
        number_text(numbers["tokens_per_second"], 1),
        speedup_text(numbers),
        number_text(numbers["acceptance_length"], 2),
        number_text(numbers["acceptance_rate"], 2),
        number_text(numbers["mbsu"], 2),
        equivalence_text(numbers["equivalence"]),
    ]
