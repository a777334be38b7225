"""Tables of finished runs, for a terminal; `formats` makes Markdown, LaTeX and HTML of the same ones."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.config.spec import POOL, QUESTION
from specbench.data.question_files import TASKS
from specbench.data.warm_start import WARM, warmed_with
from specbench.measure.metrics.engine import SURPRISE
from specbench.measure.metrics.statistics import verdict
from specbench.report.phases import FEW, different_phases, slow_machine, slow_machines, spread
from specbench.report.runs import (
    Run,
    SkippedRun,
    as_text,
    beside_engines,
    differing_by_pair,
    grids,
    labels,
    method_label,
    named,
    task_names,
)
from specbench.system.settings import TOKEN, TYPICAL

if TYPE_CHECKING:
    from collections.abc import Iterable

PIPED_WIDTH = 112
UNKNOWN = "–"  # not measured
NUMBER: dict[str, Any] = {"justify": "right", "no_wrap": True}  # a column of numbers
WRONG = "bold red"  # the style of what warns
NOTES_SHOWN = 10
ROWS_SHOWN = 200  # a longer table is for a file
SHORT = {  # column heads
    "mt_bench": "multi\nturn",
    "translation": "transla-\ntion",
    "summarization": "summa-\nrization",
    "math_reasoning": "math",
}
RANDOM = "random weights: times and sizes are real, acceptance is not"
EXPANDED = "text and acceptance are those of the embedded family, times and sizes those of the dimensions"
QUOTED = {"engine": "our loop", "hf_generate": "transformers generate"}
DISTURBED = "others were busy on this machine for {} of the time that counts"
WORST_DISTURBED = 0.1  # of the time that counts, above which a run warns of it first
STOLEN_SHOWN = 0.001
ONE_POOL = "interval over repeats of one pool: timing noise only"


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


def run_table(summary: dict) -> Table:
    """The numbers of one run: a row per task, those with a violation first, then all questions together."""
    engine = summary.get("engine")
    caption = baseline_line(summary["baseline"]) if engine is None else engine_line(summary)
    for line in (
        batch_line(summary),
        *summary.get("notes", ()),
        acceptance_line(summary["overall"]),
        passes_line(summary),
        machine_line(summary),
        layouts_line(summary),
        repetition_line(summary),
    ):
        caption.append(f"\n{line}" if line else "")
    table = PlainTable(_title(summary), caption)
    _add_columns(table, "task")
    tasks = sorted(summary["tasks"].items(), key=lambda item: not item[1]["equivalence"]["violation"])
    for name, numbers in tasks:
        table.add_row(name, *_cells(numbers))
    table.add_section()
    table.add_row("overall", *_cells(summary["overall"]), style="bold")
    return table


def spec_bench_table(summaries: Iterable[dict]) -> Table | None:
    """Speedups by task in Spec-Bench's own form, a row per run, with mean accepted tokens and the overall speedup.

    Ours are ratios of summed seconds; the overall speedup as its speed.py defines it stands beside. None without a
    task: the runs of batch methods have no times by task.
    """
    summaries = [summary for summary in summaries if summary["unit"] == QUESTION]
    if not summaries:
        return None
    title = "speedups by task, in Spec-Bench's form; its def.: overall as Spec-Bench itself defines it"
    table = PlainTable(title, "\n".join(settings_lines(summaries)), padding=0)
    table.add_columns("run", overflow="fold", min_width=12)
    measured = task_names(summaries)
    # Spec-Bench's own table has all its tasks; other benchmarks have tasks of their own.
    shown = list(TASKS) if {*measured} <= {*TASKS} else measured
    last = ("accept.\nlength", "overall", "its\ndef.", "MBSU", "exact/\ntie/viol.")
    table.add_columns(*(SHORT.get(task, task) for task in shown), *last, **NUMBER)
    for label, summary in zip(labels(summaries), summaries):
        label += _cores(summary)
        numbers, tasks = summary["overall"], summary["tasks"]
        speedups = [speedup_text(tasks[task], narrow=True) if task in tasks else UNKNOWN for task in shown]
        accepted, overall = number_text(numbers["acceptance_length"], 2), speedup_text(numbers, narrow=True)
        table.add_row(
            label,
            *speedups,
            accepted,
            overall,
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
        baseline = number_text(baseline_rate(summary["baseline"]), 1)
        table.add_row(label + _cores(summary), questions, rate, baseline, *rest)
    return table


def engines_table(summaries: Iterable[dict]) -> Table | None:
    """Other engines beside this project's own decoding: a row per run, with what each engine does plainly.

    Of this project's runs there are those of a method and pair that another engine was measured with. None without one.
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
        engine, baseline = summary.get("engine"), summary["baseline"]
        fraction = baseline["bandwidth_fraction"]
        table.add_row(
            label,
            number_text(baseline_rate(baseline), 1),
            UNKNOWN if fraction is None else f"{fraction:.0%}",
            UNKNOWN if engine is None else _speedup_of_itself(engine),
            speedup_text(summary["overall"]),
            number_text(summary["overall"]["acceptance_length"], 2),
            equivalence_text(summary["equivalence"]),
            equivalence_text(baseline["equivalence"]),
        )
    return table


def pairs_table(summaries: Iterable[dict]) -> Table | None:
    """Overall speedups, a row per method (and its settings), a column per pair, and the mean over the pairs.

    None unless a method was run on several pairs; the others are left out. A method that was run several times on a
    pair stands with its last run; runs that differ in more than the pair (the size of a batch) have rows of their own.
    """
    summaries = list(summaries)
    cells: dict[str, dict[str, dict]] = {}
    for label, summary in zip(labels(summaries, without=("pair",)), summaries):
        cells.setdefault(label, {})[summary["pair"]] = summary["overall"]
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


def grid_tables(summaries: Iterable[dict]) -> list[Table]:
    """A heat map for each grid of settings: the darkest cell is the fastest run."""
    tables: list[Table] = []
    for grid in grids(summaries):
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
            number_text(gain(summary), 2),
            speedup_text(overall),
            _share(overall["occupancy"]),
            _share(overall["alignment_share"]),
            number_text(memory and memory / 1e9, 2),
        )
    return table


def batch_line(summary: dict) -> str:
    """One line on a run of pools: occupancy, time, gain over batch size 1, and what its interval does not cover."""
    if summary["unit"] != POOL:
        return ""
    overall = summary["overall"]
    return (
        f"batch of {summary['batch_size']}: occupancy {_share(overall['occupancy'])}, "
        f"{_share(overall['alignment_share'])} of the time spent on alignment, "
        f"{number_text(gain(summary), 2)} times the tokens/s of autoregressive decoding at batch size 1"
    ) + (f"; {ONE_POOL}" if _of_one_pool(summary) else "")


def passes_line(summary: dict) -> str:
    """How far the overall speedup moves when the same questions are measured again; nothing of a single pass."""
    overall, passes, processes = summary["overall"], summary["repeats"], summary.get("processes", 1)
    if overall.get("passes_low") is None:
        return ""
    over = f"{passes} passes" if processes == 1 else f"{passes} passes in {processes} processes"
    return (
        f"over {over} the speedup of the same questions lies in "
        f"[{overall['passes_low']:.3f}, {overall['passes_high']:.3f}]"
    )


def acceptance_line(numbers: dict) -> str:
    """Acceptance as other tools count it, beside the table's own; nothing for a method that does not draft."""
    by_answer, verified = numbers["acceptance_length_by_answer"], numbers["accepted_per_verified"]
    if by_answer is None or numbers["acceptance_rate"] is None:
        return ""
    return f"acceptance length as a mean over answers {by_answer:.2f}; accepted per verified token {verified:.2f}"


def machine_line(summary: dict) -> str:
    """What others did on the machine during a run; nothing where it was not watched, as in older runs."""
    machine = summary.get("machine") or {}
    if machine.get("disturbed_share") is None:
        return ""
    text = f"others disturbed {_share(machine['disturbed_share'])} of the time"
    if machine["measured_again"]:
        text += f" ({_share(machine['still_disturbed_share'])} after measuring {machine['measured_again']} turns again)"
    if machine["others_cores"] is not None:
        text += f" and used {max(machine['others_cores'], 0.0):.2f} cores on average"
    stolen = machine["stolen_share"]
    return text + (f"; {_share(stolen)} was stolen" if stolen and stolen > STOLEN_SHOWN else "")


def layouts_line(summary: dict) -> str:
    """How the weights lie in memory, by whose they are; nothing on a GPU and for older runs."""
    lying: dict[str, dict[str, list[str]]] = {}  # shapes, by whose and by how they lie
    for name, choices in ((summary.get("layouts") or {}).get("groups") or {}).items():
        whose, shape, _ = name.split()
        lying.setdefault(whose, {}).setdefault(_lying(choices), []).append(shape)
    parts = []
    for whose, shapes in lying.items():
        alone = len(shapes) == 1
        parts += [
            f"{whose} {how}" if alone else f"{whose} {', '.join(of)} {how}" for how, of in shapes.items()
        ]
    if not parts:
        return ""
    layers = "; layers compiled" if summary.get("compiled") else ""
    kernels = f"; torch's kernels: {summary['kernels']}" if summary.get("kernels") else ""
    return f"weights: {'; '.join(parts)}{layers}{kernels}"


def _lying(choices: dict[str, dict]) -> str:
    """Layouts in words, such as "columns (1 token), packed (6, 17)"; without numbers where there is one layout."""
    numbers: dict[str, list[str]] = {}
    for n, choice in sorted(choices.items(), key=lambda item: int(item[0])):
        numbers.setdefault(choice["layout"], []).append("1 token" if n == "1" else n)
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{layout} ({', '.join(of)})" for layout, of in numbers.items())


def repetition_line(summary: dict) -> str:
    """How much the answers repeat themselves, by task; nothing for older runs."""
    shares = {name: numbers.get("distinct_4grams") for name, numbers in summary["tasks"].items()}
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
    return (
        f"4-grams of the answers that do not occur earlier in the answer: {', '.join(parts)}" if parts else ""
    )


def disturbed(summary: dict) -> str:
    """A warning of a run that stayed disturbed; nothing for others."""
    share = _disturbed_share(summary)
    return f"DISTURBED: {DISTURBED.format(f'{share:.0%}')}" if share else ""


def _disturbed_share(summary: dict) -> float:
    """The share of the time that counts in which others were busy; 0 where it is too small for a warning."""
    share = (summary.get("machine") or {}).get("still_disturbed_share")
    return 0.0 if share is None or share <= WORST_DISTURBED else share


def disturbances(runs: Iterable[Run]) -> list[str]:
    """A line for each run that stayed disturbed; where they are many, one for all of them."""
    runs = list(runs)
    lines = [f"{run.name}: {line}" for run in runs if (line := disturbed(run.summary))]
    if len(lines) <= FEW:
        return lines
    shares = spread([share for run in runs if (share := _disturbed_share(run.summary))])
    return [f"DISTURBED in {len(lines)} of {len(runs)} runs: {DISTURBED.format(shares)}"]


def paired_over(count: int, unit: str) -> str:
    """On how many pairs of times a ratio rests; unit: as in `metrics.Relative`."""
    text = f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    if unit != "repeat":
        return text
    return f"{text} of one pool" if count == 1 else f"{text} of one pool: timing noise only"


def settings_line(summary: dict) -> str:
    """What the settings of a run are; nothing where it is not known, as of older runs, or there are none."""
    source, published = summary.get("settings_source"), summary.get("settings_published") or {}
    if source == "changed":
        changes = [
            f"{key}={_plain(summary['settings'].get(key))} (published {_plain(value)})"
            for key, value in published.items()
        ]
        return f"settings changed: {', '.join(changes)}"
    if source == "tuned":
        return f"settings tuned on {summary['settings_tuned_on']}"
    return "published settings" if source == "published" else ""


def settings_lines(summaries: Iterable[dict]) -> list[str]:
    """What the settings of several runs are, a line for each kind, with the methods that have it."""
    methods: dict[str, list[str]] = {}
    for summary in summaries:
        line = settings_line(summary).partition(":")[0]
        if line and method_label(summary) not in methods.setdefault(line, []):
            methods[line].append(method_label(summary))
    return [f"{line}: {', '.join(names)}" for line, names in sorted(methods.items())]


def _plain(value: object) -> str:
    """A setting as a command line takes it."""
    return "null" if value is None else str(value)


def turns(summary: dict) -> str:
    """How arms took turns, in words; older runs, which do not tell, did so by whole answers."""
    seconds = summary.get("slice_seconds")
    return "whole answers" if seconds is None else f"slices of {seconds * 1000:.0f} ms"


def gain(summary: dict) -> float | None:
    """Tokens per second of a batch method / those of autoregressive decoding at batch size 1 in the same run."""
    rate, single = summary["overall"]["tokens_per_second"], summary["baseline"]["single_tokens_per_second"]
    return rate / single if rate and single else None


def baseline_line(baseline: dict) -> Text:
    """What the speedups are quoted against, how fast it is, and how close to what the memory allows."""
    engine, generate = baseline["tokens_per_second"], baseline["hf_generate_tokens_per_second"]
    beside = "not timed" if generate is None else number_text(generate, 1)
    text = Text(f"baseline: our loop {number_text(engine, 1)} tokens/s, transformers generate {beside}; ")
    text.append(f"speedups are against {QUOTED[baseline['quoted_against']]}")
    if baseline["bandwidth_fraction"] is not None:
        text.append(f", at {baseline['bandwidth_fraction']:.0%} of the memory-bandwidth ceiling")
    if baseline["equivalence"]["violation"]:
        text.append(f"\n{_baseline_fault(baseline)}", style=WRONG)
    return text


def engine_line(summary: dict) -> Text:
    """As `baseline_line`, of another engine: its plain arm, the same once more, and our own loop beside it."""
    engine, baseline = summary["engine"], summary["baseline"]
    name, loop = engine["name"], engine["own_tokens_per_second"]
    text = Text(
        f"baseline: plain {name} {number_text(baseline['tokens_per_second'], 1)} tokens/s, against itself "
    )
    text.append(_speedup_of_itself(engine))
    text.append(f"; our loop {number_text(loop, 1)} tokens/s; speedups are against plain {name}")
    if baseline["bandwidth_fraction"] is not None:
        text.append(f", at {baseline['bandwidth_fraction']:.0%} of the memory-bandwidth ceiling")
    settings = "".join(f", {setting}" for setting in as_text(engine["plain"]))
    text.append(f"\n{engine['version']}{settings}; plain answers beside our loop's: ")
    text.append(equivalence_text(baseline["equivalence"]))
    again = "alone" if summary["unit"] == POOL else "again"
    text.append(f", beside its own {again}: ").append(equivalence_text(engine["again_equivalence"]))
    if likely := likelihood_line(engine):
        text.append(f"\n{likely}")
    if summary.get("processes", 1) == 1:
        text.append("\none start of its servers: another one may differ (processes=2 has two)")
    return text


def likelihood_line(engine: dict) -> str:
    """How likely the target finds what another engine drew; nothing of greedy answers."""
    parts = [
        f"{'plain' if arm == 'baseline' else arm} {one['logprob']:.3f}, "
        f"{one['standard_errors']:+.1f} standard errors off"
        for arm, one in (engine.get("likelihood") or {}).items()
        if one is not None
    ]
    return f"mean log p of drawn tokens: {'; '.join(parts)}" if parts else ""


def _tells_speeds_apart(again: dict, overall: dict) -> bool:
    """Whether an engine has one speed against itself, and a method that is faster or slower has another."""
    clear = ("faster", "slower")
    if verdict(again["low"], again["high"]) in clear:
        return False
    judged = verdict(overall["speedup_low"], overall["speedup_high"]) in clear
    return not (judged and again["low"] is not None and again["low"] <= overall["speedup"] <= again["high"])


def _speedup_of_itself(engine: dict) -> Text:
    """What an engine's plain arm gains over itself."""
    again = engine["again"]
    return ratio_text(again["speedup"], again["low"], again["high"])


def baseline_rate(baseline: dict) -> float | None:
    """Tokens per second of what the speedups are quoted against."""
    rates = {
        "engine": baseline["tokens_per_second"],
        "hf_generate": baseline["hf_generate_tokens_per_second"],
    }
    return rates[baseline["quoted_against"]]


def faults(summary: dict, with_baseline: bool = True) -> list[str]:
    """What is wrong with a run, a line each; of its baseline too, unless that is told elsewhere."""
    lines, counts, baseline = engine_faults(summary), summary["equivalence"], summary["baseline"]
    if counts["violation"]:
        whose = "the target's own" if summary.get("engine") is None else "those of its plain arm"
        lines.append(f"VIOLATION: {counts['violation']} of {counts['answers']} answers are not {whose}")
    if summary["verification"] == TYPICAL:
        lines.append("LOSSY: typical acceptance does not keep the target's answers; it is here as a control")
    if summary["failed"]:
        lines.append(f"FAILED: {summary['failed']} questions, left out of every number")
    if with_baseline and summary.get("engine") is None and baseline["equivalence"]["violation"]:
        lines.append(_baseline_fault(baseline))
    return lines


def engine_faults(summary: dict) -> list[str]:
    """What is wrong with another engine; nothing of this project's own."""
    engine = summary.get("engine")
    if engine is None:
        return []
    name, lines = engine["name"], []
    differing, unlike = summary["baseline"]["equivalence"], engine["again_equivalence"]
    if differing["violation"]:
        lines.append(f"VIOLATION: {differing['violation']} plain answers of {name} are not the target's")
    if unlike["violation"]:
        lines.append(f"VIOLATION: {unlike['violation']} plain answers of {name} are not what it said before")
    for arm, one in (engine.get("likelihood") or {}).items():
        if one is not None and abs(one["standard_errors"]) > SURPRISE:
            whose = "plain" if arm == "baseline" else "speculative"
            lines.append(
                f"VIOLATION: {whose} answers of {name} are not drawn from the target's distributions"
            )
    if not _tells_speeds_apart(engine["again"], summary["overall"]):
        lines.append(f"NO VERDICT ON SPEED: plain {name} against itself has {_speedup_of_itself(engine)}")
    if faults_met := engine["faults"]:
        lines.append(f"FAULTS of {name}: {len(faults_met)}, the first: {faults_met[0]}")
    return lines


def notes(runs: list[Run]) -> list[str]:
    """What a reader of several runs should be warned of."""
    return [*cautions(runs), *differing_by_pair(runs)]


def cautions(runs: Iterable[Run]) -> list[str]:
    """What a reader of several runs would else see only in the tables of each."""
    runs = list(runs)
    made = {"random": RANDOM, "expanded": f"expanded weights: {EXPANDED}"}
    slower = [run.name for run in runs if run.summary["baseline"]["quoted_against"] == "hf_generate"]
    lines = []
    for weights, remark in made.items():
        if names := [run.name for run in runs if run.summary["weights"] == weights]:
            lines.append(f"{remark}: {named(names)}")
    lines += memories(runs)
    lines += [*different_phases(runs), *slow_machines(runs), *disturbances(runs)]
    if 0 < len(slower) < len(runs):
        lines.append(
            f"speedups against {QUOTED['hf_generate']}, which was the faster, those of the others against "
            f"{QUOTED['engine']}: {named(slower)}"
        )
    return lines


def memories(runs: Iterable[Run]) -> list[str]:
    """A line for each kind of state that was not empty when an answer began, with the runs that had it."""
    names_by_kind: dict[str, list[str]] = {}
    for run in runs:
        if run.summary.get("thirds"):
            names_by_kind.setdefault("goes on from answer to answer", []).append(run.name)
        if (record := run.summary.get("training", {}).get(WARM)) is not None:
            names_by_kind.setdefault(warmed_with(record), []).append(run.name)
    return [f"memory {kind}: {named(names)}" for kind, names in names_by_kind.items()]


def _baseline_fault(baseline: dict) -> str:
    differing = baseline["equivalence"]["violation"]
    return f"VIOLATION: our loop and transformers generate differ in {differing} answers"


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

    Of a table of very many rows only the name is printed: a report has it in its files.
    """
    out = console()
    for table in overview(run.summary for run in runs):
        if table.row_count <= ROWS_SHOWN:
            out.print(table)
        else:
            print_notes([f"{table.title}: {table.row_count} rows, which python -m specbench.report writes"])
    print_notes(notes(runs))


def print_left_out(left_out: Iterable[SkippedRun]) -> None:
    """Names the runs that no number is taken from, every one."""
    for item in left_out:
        print_notes([f"left out: {item.folder.name}: {item.reason}"])


def print_notes(lines: list[str]) -> None:
    """Prints what a reader should be warned of; of many lines the first."""
    more = len(lines) - NOTES_SHOWN
    for line in [*lines[:NOTES_SHOWN], *([f"and {more} more"] if more > 0 else [])]:
        console().print(Text(line, style="yellow"))


def console() -> Console:
    """Standard output: as wide as the terminal, and PIPED_WIDTH columns when it goes elsewhere."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)


def _of_one_pool(summary: dict) -> bool:
    """Whether the interval of a batch run rests on repeats of one pool."""
    overall = summary["overall"]
    return overall["pools"] == 1 and overall["speedup_low"] is not None


def _caption(summaries: list[dict]) -> str:
    """What stands below a table of runs: their kinds of settings, and whose intervals are over repeats of one pool."""
    alone = [_of_one_pool(summary) for summary in summaries]
    lines = settings_lines(summaries)
    if any(alone):
        lines.append(ONE_POOL if all(alone) else f"batches: {ONE_POOL}")
    return "\n".join(lines)


def _add_columns(table: PlainTable, first: str, with_baseline: bool = False) -> None:
    table.add_columns(first, no_wrap=first == "task", overflow="fold")
    counts = ("ques-\ntions", "tokens\nper s", *(("base-\nline",) if with_baseline else ()))
    ratios = ("accept.\nlength", "accept.\nrate", "\nMBSU")
    table.add_columns(*counts, "speedup\n[95 % interval]", *ratios, "exact/tie/\nviolation", **NUMBER)


def _cells(numbers: dict) -> list[str | Text]:
    return [
        str(numbers["questions"]),
        number_text(numbers["tokens_per_second"], 1),
        speedup_text(numbers),
        number_text(numbers["acceptance_length"], 2),
        number_text(numbers["acceptance_rate"], 2),
        number_text(numbers["mbsu"], 2),
        equivalence_text(numbers["equivalence"]),
    ]


def speedup_text(numbers: dict, narrow: bool = False) -> Text:
    """The speedup of a block of numbers as `ratio_text`."""
    return ratio_text(numbers["speedup"], numbers["speedup_low"], numbers["speedup_high"], narrow)


def ratio_text(value: float | None, low: float | None, high: float | None, narrow: bool = False) -> Text:
    """A ratio and its interval; without colour where it could as well be 1. narrow: in two lines."""
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
    """A number with so many digits after the point."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"


def _title(summary: dict) -> Text:
    text = Text()
    sliced = f", {turns(summary)}" if "slice_seconds" in summary else ""
    for line in faults(summary, with_baseline=False):
        text.append(f"{line}\n", style=WRONG)
    for warning in filter(None, (slow_machine(summary), disturbed(summary))):
        text.append(f"{warning}\n", style=WRONG)
    settings = f" ({', '.join(as_text(summary['settings']))})" if summary["settings"] else ""
    text.append(f"{method_label(summary)}{settings}", style="bold").append(
        f" on {summary['pair']}: {summary['data']}, {summary['task']}, temperature {summary['temperature']}, "
        f"{_verification(summary)}batch {summary['batch_size']}, {dtype_label(summary)}, "
        f"{summary['device']}{_threads(summary)}{sliced}"
    )
    if source := settings_line(summary):
        text.append(f"; {source}")
    if summary["weights"] == "random":
        text.append(f"\n{RANDOM}", style="yellow")
    if summary["weights"] == "expanded":
        built = f"expanded, {summary['anatomy']} at {summary['pair']}'s dimensions"
        text.append(f"\n{built}: {EXPANDED}", style="yellow")
    return text


def _verification(summary: dict) -> str:
    """How drafts were verified, where it is not token by token."""
    verification = summary["verification"]
    lossy = " (LOSSY)" if verification == TYPICAL else ""
    return "" if verification == TOKEN else f"{verification} verification{lossy}, "


def dtype_label(summary: dict) -> str:
    """The dtype of a run, and what its target's weights were made from where that is not their own form."""
    source = summary.get("weights_source")
    return f"{summary['dtype']} ({source})" if source else summary["dtype"]


def _threads(summary: dict) -> str:
    """The threads of a run on a CPU; nothing for an older run, which does not tell."""
    threads = summary.get("threads") if summary["device"] == "cpu" else None
    return "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}{_cores(summary)}"


def _cores(summary: dict) -> str:
    """How many cores a method takes that drafts on some of its own, beside those of torch's threads; else nothing."""
    extra, threads = summary.get("extra_cores"), summary.get("threads")
    return f" ({threads + extra} cores)" if extra and threads else ""
