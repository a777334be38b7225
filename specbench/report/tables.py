"""Tables of finished runs: `python -m specbench.report.tables [RUN_DIR ...]`, by default of all in runs/."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.errors import UserError, one_line_errors
from specbench.measure import metrics, provenance, store
from specbench.measure.statistics import verdict

PIPED_WIDTH = 100
UNKNOWN = "–"  # not measured
DIFFERENCES_SHOWN = 3
NESTED = ("equivalence", "exit_shares", "overlap")
QUOTED = {"engine": "our loop", "hf_generate": "transformers generate"}


def run_table(summary: dict) -> Table:
    """The numbers of one run: a row per task, those with a violation first, then all questions together."""
    caption = baseline_line(summary["baseline"])
    shares = summary["overall"]["exit_shares"] or {}
    if len(shares) > 1:
        left = ", ".join(f"{layers} layers {share:.0%}" for layers, share in shares.items())
        caption.append(f"\ndraft tokens left the draft model after: {left}")
    if summary["drafter"]:
        caption.append(f"\n{batch_line(summary)}")
    if summary["overall"]["overlap"]:
        caption.append(f"\n{overlap_line(summary['overall']['overlap'])}")
    table = Table(title=_title(summary), caption=caption, **_STYLE)
    _add_columns(table, "task")
    tasks = sorted(summary["tasks"].items(), key=lambda item: not item[1]["equivalence"]["violation"])
    for name, numbers in tasks:
        table.add_row(name, *_cells(numbers))
    table.add_section()
    table.add_row("overall", *_cells(summary["overall"]), style="bold")
    return table


def overview_table(summaries: Iterable[dict]) -> Table:
    """One row per run, over all its questions; of a method's parameters those that its runs differ in."""
    summaries = list(summaries)
    table = Table(title=Text("all runs, over all their questions", style="bold"), **_STYLE)
    _add_columns(table, "run")
    for summary in summaries:
        lines = [f"{method_label(summary)}, {summary['pair']}", *_settings(_varied(summary, summaries))]
        table.add_row("\n".join(lines), *_cells(summary["overall"]))
    return table


def pairs_table(summaries: Iterable[dict]) -> Table | None:
    """Overall speedups, a row per method (and its settings), a column per pair, and the mean over the pairs.

    None unless there are several pairs. A method that was run several times on a pair stands with its last run.
    """
    summaries = list(summaries)
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for summary in summaries:
        row = (method_label(summary), ", ".join(_settings(_varied(summary, summaries))))
        cells.setdefault(row, {})[summary["pair"]] = summary["overall"]
    pairs = sorted({pair for found in cells.values() for pair in found})
    if len(pairs) < 2:
        return None
    table = Table(title=Text("speedups by pair", style="bold"), **_STYLE)
    table.add_column("method", overflow="fold")
    for pair in pairs:
        table.add_column(pair, justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    for (method, settings), found in cells.items():
        values = [found[pair]["speedup"] if pair in found else None for pair in pairs]
        mean = None if None in values else sum(values) / len(values)
        shown = [_speedup(found[pair]) if pair in found else Text(UNKNOWN) for pair in pairs]
        table.add_row("\n".join(filter(None, (method, settings))), *shown, _number(mean, 3))
    return table


def grid_tables(summaries: Iterable[dict]) -> list[Table]:
    """A heat map of overall speedups for each method and pair of whose settings just two were varied: rows and columns
    are their values, the darkest cell is the fastest run. A setting that was run several times stands with its last."""
    summaries = list(summaries)
    grids: dict[tuple, list[tuple[dict, dict]]] = {}
    for summary in summaries:
        varied = _varied(summary, summaries)
        if len(varied) == 2:
            key = (method_label(summary), summary["pair"], *varied)
            grids.setdefault(key, []).append((varied, summary["overall"]))
    tables = []
    for (label, pair, down, across), runs in grids.items():
        cells = {(varied[down], varied[across]): overall["speedup"] for varied, overall in runs}
        rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
        if len(rows) < 2 or len(columns) < 2:
            continue
        known = [value for value in cells.values() if value is not None]
        title = Text(f"speedup of {label} on {pair}: {down} down, {across} across", style="bold")
        table = Table(title=title, **_STYLE)
        table.add_column(down)
        for column in columns:
            table.add_column(str(column), justify="right", no_wrap=True)
        for row in rows:
            shown = [_shaded(cells.get((row, column)), known) for column in columns]
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
    batched = [summary for summary in summaries if summary["drafter"]]
    if not batched:
        return None
    table = Table(title=Text("batches", style="bold"), **_STYLE)
    several = len({summary["pair"] for summary in batched}) > 1
    table.add_column("run", overflow="fold")
    for name in (
        *("rows", "tokens\nper s", "times one\nby one", "times plain\nbatches"),
        *("places\nin use", "lining\nup", "of one\nlength", "peak\nGB"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in batched:
        overall, memory = summary["overall"], summary["peak_memory_bytes"]
        table.add_row(
            method_label(summary) + (f", {summary['pair']}" if several else ""),
            str(summary["batch_size"]),
            _number(overall["tokens_per_second"], 1),
            _number(gain(summary), 2),
            _speedup(overall),
            _share(overall["occupancy"]),
            _share(overall["alignment_share"]),
            _share(overall["group_rate"]),
            _number(memory and memory / 1e9, 2),
        )
    return table


def batch_line(summary: dict) -> str:
    """How well a batch method used its places, its time, and what it gains over decoding one by one."""
    overall = summary["overall"]
    parts = [
        f"batch of {summary['batch_size']}: {_share(overall['occupancy'])} of the places in use",
        f"{_share(overall['alignment_share'])} of the time spent on lining rows up",
    ]
    if overall["group_rate"] is not None:
        parts.append(f"rows of one length in {_share(overall['group_rate'])} of the rounds")
    parts.append(f"{_number(gain(summary), 2)} times the tokens/s of plain decoding one by one")
    return ", ".join(parts)


def overlap_line(overlap: dict) -> str:
    """How much of the drafting was hidden beside the target, and where the time of a round went."""

    def ms(name: str) -> str:
        return UNKNOWN if overlap[name] is None else f"{1e3 * overlap[name]:.1f}"

    return (
        f"drafted beside the target: {_share(overlap['hidden_share'])} of the draft's time hidden, "
        f"{_share(overlap['fall_back_rate'])} of the decisions not guessed; a round took {ms('round_seconds')} ms: "
        f"{ms('exit_seconds')} to the exit and {ms('rest_seconds')} behind it (drafting meanwhile "
        f"{ms('early_seconds')} and {ms('beside_seconds')}), "
        f"{ms('waited_seconds')} waiting; the latency model says {ms('model_seconds')} ms"
    )


def gain(summary: dict) -> float | None:
    """Tokens per second of a batch method / those of plain decoding of one sequence at a time, in the same run."""
    rate, single = summary["overall"]["tokens_per_second"], summary["baseline"]["single_tokens_per_second"]
    return rate / single if rate and single else None


def method_label(summary: dict) -> str:
    """The method, and what drafts for it where that is another choice."""
    drafter = summary["drafter"]
    return summary["method"] if drafter in (None, "none") else f"{summary['method']} + {drafter}"


def baseline_line(baseline: dict) -> Text:
    """What the speedups are quoted against, how fast it is, and how close to what the memory allows."""
    engine, generate = baseline["tokens_per_second"], baseline["hf_generate_tokens_per_second"]
    text = Text(
        f"baseline: our loop {_number(engine, 1)} tokens/s, transformers generate {_number(generate, 1)}; "
    )
    text.append(f"speedups are against {QUOTED[baseline['quoted_against']]}")
    if baseline["bandwidth_fraction"] is not None:
        text.append(f", at {baseline['bandwidth_fraction']:.0%} of the memory-bandwidth ceiling")
    if baseline["equivalence"]["violation"]:
        text.append(
            f"\nVIOLATION: the two differ in {baseline['equivalence']['violation']} answers", style="bold red"
        )
    return text


def summary_frame(run_folders: Iterable[Path]) -> pd.DataFrame:
    """One row per run and task, and one with task "overall": the numbers of summary.json, flat.

    Folders without a summary are left out, and so are exit shares. Verdict counts stand under their names (exact,
    tie, violation), numbers of the baseline under `baseline_<name>`, parameters of the method as one text in
    `settings`.
    """
    rows = []
    for run_dir in run_folders:
        if not store.is_complete(run_dir):
            continue
        summary = read_summary(run_dir)
        nested = ("overall", "tasks", "equivalence", "baseline", "settings", "task")
        run = {"run": run_dir.name} | {k: v for k, v in summary.items() if k not in nested}
        run["settings"] = ", ".join(_settings(summary["settings"]))
        baseline = {f"baseline_{k}": v for k, v in summary["baseline"].items() if k != "equivalence"}
        for task, numbers in [*summary["tasks"].items(), ("overall", summary["overall"])]:
            flat = {k: v for k, v in numbers.items() if k not in NESTED} | numbers["equivalence"]
            rows.append(run | {"task": task} | flat | baseline)
    return pd.DataFrame(rows)


def read_summary(run_dir: Path) -> dict:
    """The summary of a finished run. Raises UserError for one that another version wrote."""
    summary = store.read_json(run_dir / store.SUMMARY)
    if summary["schema"] != metrics.SCHEMA:
        raise UserError(
            f"{run_dir / store.SUMMARY} has schema {summary['schema']}; this version reads {metrics.SCHEMA}"
        )
    return summary


def finished_runs(paths: Iterable[Path]) -> list[Path]:
    """The finished run folders among the paths; a path may also be a folder of run folders."""
    found = []
    for path in paths:
        inside = (
            [path] if store.is_complete(path) else sorted(p.parent for p in path.glob(f"*/{store.SUMMARY}"))
        )
        if not inside:
            raise UserError(
                f"no finished run in {path}: a run folder holds {store.SUMMARY} once it is complete"
            )
        found += inside
    return found


def not_comparable(run_folders: list[Path]) -> list[str]:
    """One line for each run that should not be set beside the first, with the reasons."""
    paths = [run_dir / store.PROVENANCE for run_dir in run_folders]
    found = {path.parent: store.read_json(path) for path in paths if path.exists()}
    lines = [
        f"{path.parent.name} may not be comparable: it has no {path.name}"
        for path in paths
        if not path.exists()
    ]
    for run_dir in list(found)[1:]:
        first = next(iter(found))
        reasons = provenance.differences(found[first], found[run_dir])
        if reasons:
            more = len(reasons) - DIFFERENCES_SHOWN
            shown = "; ".join(reasons[:DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"{run_dir.name} is not comparable with {first.name}: {shown}")
    return lines


def print_run(run_dir: Path) -> None:
    """Prints the table of one finished run."""
    console().print(run_table(read_summary(run_dir)))


def print_overview(run_folders: list[Path]) -> None:
    """Prints what several finished runs have in common: a row each, speedups by pair, and what does not compare."""
    summaries = [read_summary(run_dir) for run_dir in run_folders]
    out = console()
    out.print(overview_table(summaries))
    by_pair = pairs_table(summaries)
    if by_pair:
        out.print(by_pair)
    for grid in grid_tables(summaries):
        out.print(grid)
    batches = batches_table(summaries)
    if batches:
        out.print(batches)
    for pair in dict.fromkeys(summary["pair"] for summary in summaries):  # other models are no surprise
        alike = [run for run, summary in zip(run_folders, summaries) if summary["pair"] == pair]
        for line in not_comparable(alike):
            out.print(Text(line, style="yellow"))


def console() -> Console:
    """Standard output: as wide as the terminal, and 100 columns when it goes elsewhere."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)


@one_line_errors()
def main() -> None:
    """Prints the table of each run, runs with a violation first, and an overview of several."""
    parser = argparse.ArgumentParser(prog="python -m specbench.report.tables", description=__doc__)
    parser.add_argument(
        "run_dir", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of them"
    )
    summaries = {run_dir: read_summary(run_dir) for run_dir in finished_runs(parser.parse_args().run_dir)}
    ordered = dict(sorted(summaries.items(), key=lambda item: not item[1]["equivalence"]["violation"]))
    out = console()
    for run_dir, summary in ordered.items():
        out.print(run_table(summary))
        out.print(Text(f"{run_dir}\n", style="dim"))
    if len(ordered) > 1:
        print_overview(list(summaries))


_STYLE = {
    "box": box.SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "title_justify": "left",
    "title_style": "",
    "caption_justify": "left",
    "caption_style": "",
}


def _add_columns(table: Table, first: str) -> None:
    table.add_column(first, no_wrap=first == "task", overflow="fold")
    counts, ratios = ("ques-\ntions", "tokens\nper s"), ("accept.\nlength", "accept.\nrate", "\nMBSU")
    for name in (*counts, "speedup\n[95 % interval]", *ratios, "exact/tie/\nviolation"):
        table.add_column(name, justify="right", no_wrap=True)


def _cells(numbers: dict) -> list[str | Text]:
    return [
        str(numbers["questions"]),
        _number(numbers["tokens_per_second"], 1),
        _speedup(numbers),
        _number(numbers["acceptance_length"], 2),
        _number(numbers["acceptance_rate"], 2),
        _number(numbers["mbsu"], 2),
        _equivalence(numbers["equivalence"]),
    ]


def _speedup(numbers: dict) -> Text:
    """The speedup and its interval; words in place of a number that could as well be 1."""
    low, high = numbers["speedup_low"], numbers["speedup_high"]
    said = verdict(low, high)
    if said is None:
        return Text(_number(numbers["speedup"], 2))
    shown = said if said == "no difference" else f"{numbers['speedup']:.2f}"
    style = {"faster": "green", "slower": "red", "no difference": ""}[said]
    return Text(f"{shown} [{low:.2f}, {high:.2f}]", style=style)


def _equivalence(counts: dict) -> Text:
    if not counts["answers"]:
        return Text(UNKNOWN)
    text = f"{counts['exact']}/{counts['tie']}/{counts['violation']}"
    return Text(text, style="bold red" if counts["violation"] else "")


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"


def _varied(summary: dict, summaries: Iterable[dict]) -> dict:
    """The settings that were varied for the method of `summary`: in which two of its runs on one pair differ."""
    first: dict[str, dict] = {}
    varied = set()
    for other in summaries:
        if other["method"] == summary["method"]:
            settings = other["settings"]
            base = first.setdefault(other["pair"], settings)
            varied |= {k for k in base.keys() | settings.keys() if base.get(k) != settings.get(k)}
    return {k: v for k, v in summary["settings"].items() if k in varied}


def _settings(settings: dict) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def _title(summary: dict) -> Text:
    text = Text()
    equivalence = summary["equivalence"]
    if equivalence["violation"]:
        judged = f"{equivalence['violation']} of {equivalence['answers']} answers are not the target's own"
        text.append(f"VIOLATION: {judged}\n", style="bold red")
    if summary["failed"]:
        text.append(f"FAILED: {summary['failed']} questions, left out of every number\n", style="bold red")
    settings = f" ({', '.join(_settings(summary['settings']))})" if summary["settings"] else ""
    text.append(f"{method_label(summary)}{settings}", style="bold").append(
        f" on {summary['pair']}: {summary['data']}, {summary['task']}, temperature {summary['temperature']}, "
        f"batch {summary['batch_size']}, {summary['dtype']}, {summary['device']}"
    )
    if summary["weights"] == "random":
        text.append("\nrandom weights: times and sizes are real, acceptance is not", style="yellow")
    return text


if __name__ == "__main__":
    main()
