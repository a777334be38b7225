"""Runs side by side: why they may not be compared, and how much faster each is than the first."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rich.text import Text

from specbench.config.spec import POOL, QUESTION
from specbench.measure.metrics.relative import COUNTED, Relative, ratio_of_runs
from specbench.report import cells, remarks, tables, verdicts
from specbench.report.labels import task_names
from specbench.report.runs import Run, differences, not_comparable, row_names
from specbench.report.training_data import differing_training

if TYPE_CHECKING:
    from rich.table import Table

SPEEDUP = "speedup"
METRICS = (SPEEDUP, *COUNTED)


def print_comparison(runs: list[Run], metric: str = SPEEDUP) -> None:
    """Prints what hinders the comparison, the runs' own numbers, and the paired ratios to the first run in a metric."""
    hindrances = [*faulty(runs), *not_comparable(runs), *differing_questions(runs), *without_difference(runs)]
    apart = differing_turns(runs) + differing_training(run.summary for run in runs)
    tables.print_notes(hindrances + apart + remarks.machine_warnings(runs))
    out = cells.console()
    out.print(tables.overview_table(run.summary for run in runs))
    out.print(difference_table(runs, metric))


def differing_questions(runs: list[Run]) -> list[str]:
    """One line for each run that did not ask what the first asked: other questions, or other prompts."""
    first, *others = runs
    first_prompts = _prompts(first)
    lines = []
    for run in others:
        prompts = _prompts(run)
        shared = first_prompts.keys() & prompts.keys()
        if len(shared) < max(len(first_prompts), len(prompts)):
            lines.append(
                f"{run.name} answered {len(prompts)} turns, {first.name} {len(first_prompts)}: "
                f"only the {len(shared)} in both count"
            )
        differing = sum(_unlike(first_prompts[turn], prompts[turn]) for turn in shared)
        if differing:
            lines.append(
                f"{run.name} had other prompts than {first.name} in {differing} of {len(shared)} turns"
            )
    return lines


def differing_conditions(first: Run, run: Run, allow: Collection[str] = ()) -> list[str]:
    """Why two runs may not be compared, by their provenance, means and questions, a line each.

    Args:
        first: one of them.
        run: the other.
        allow: beginnings of provenance keys that may differ, such as "machine".
    """
    if first.provenance is None or run.provenance is None:
        lines = ["a run has no provenance that can be read"]
    else:
        lines = [line for line in differences(first, run) if not line.startswith(tuple(allow))]
    return lines + differing_questions([first, run])


def faulty(runs: list[Run], with_speed: bool = True) -> list[str]:
    """The faults of each run, a line each; `with_speed` includes those of its speed."""
    return [
        f"{run.name}: {line}" for run in runs for line in verdicts.faults(run.summary, with_speed=with_speed)
    ]


def warnings(runs: list[Run]) -> list[str]:
    """What a reader of several runs must know: what is wrong with each, and what to be careful about."""
    return [*faulty(runs), *remarks.notes(runs)]


def differing_turns(runs: list[Run]) -> list[str]:
    """One line for each run whose arms took turns in another way than those of the first."""
    first, *others = runs
    usual = remarks.turns(first.summary)
    return [
        f"arms took turns by {way} in {run.name}, by {usual} in {first.name}"
        for run in others
        if (way := remarks.turns(run.summary)) != usual
    ]


def without_difference(runs: list[Run]) -> list[str]:
    """One line for each run that has no number against the first, as it was measured in another way."""
    first, *others = runs
    return [f"no difference for {run.name}: {why}" for run in others if (why := hindrance(first, run))]


def difference_table(runs: list[Run], metric: str = SPEEDUP) -> Table:
    """The ratio of a metric of each other run to that of the first; a row per task.

    A speedup is against autoregressive decoding in the run's own measurement; for batches, at batch size 1.
    `without_difference` explains empty cells.
    """
    first, *others = runs
    names = row_names(runs)
    title = "times as fast as" if metric == SPEEDUP else f"{metric} / that of"
    by_run = [relative(first, run, metric) for run in others]
    ratios = [difference.ratio for of_run in by_run if (difference := of_run.get("overall"))]
    has_interval = any(ratio.low is not None for ratio in ratios)
    in_one = metric == SPEEDUP and has_interval and remarks.in_one_process(runs)
    table = cells.PlainTable(f"{title} {names[0]}", remarks.ONE_PROCESS if in_one else "")
    table.add_columns("task", no_wrap=True)
    table.add_columns(*names[1:], justify="right", overflow="fold")
    tasks = task_names(run.summary for run in runs)
    rows = [task for task in (*tasks, "overall") if any(task in of_run for of_run in by_run)]
    for task in rows:
        table.add_row(task, *(_difference(of_run.get(task)) for of_run in by_run))
    return table


def relative(first: Run, second: Run, metric: str = SPEEDUP) -> dict[str, Relative]:
    """A metric of the second run / that of the first, by task and "overall".

    Batches have no times by task. {} if only one decodes batches, or their pools differ.
    """
    if hindrance(first, second):
        return {}
    what = "throughput" if first.unit == POOL and metric == SPEEDUP else metric
    one, other = (run.parts(what) for run in (first, second))
    processes = [run.parts_by_process(what) for run in (first, second)]
    tasks: dict[str, list[int]] = {}
    for record in first.records if first.unit == QUESTION else ():
        tasks.setdefault(record["task"], []).append(record["question_id"])
    by_task = {
        task: ratio_of_runs([one[one.index.isin(ids)]], [other], processes) for task, ids in tasks.items()
    }
    overall = ratio_of_runs([one], [other], processes, what in COUNTED)
    return by_task | {"overall": overall}


def hindrance(first: Run, run: Run) -> str:
    """Why a run has no number against the first; empty if it has."""
    if first.unit != run.unit:
        return f"one of it and {first.name} decodes batches"
    return "" if _pools(first) == _pools(run) else f"its pools are not those of {first.name}"


def _pools(run: Run) -> dict[int, int]:
    """The pool of each question; empty if each is decoded by itself."""
    return {record["question_id"]: record["pool"] for record in run.records if run.unit == POOL}


def _prompts(run: Run) -> dict[tuple[int, int], dict[int, str]]:
    """The digests of each turn's prompt by repeat: a drawn answer is part of the next turn's prompt."""
    prompts: dict[tuple[int, int], dict[int, str]] = {}
    for record in run.records:
        for turn in record["turns"]:
            of_turn = prompts.setdefault((record["question_id"], turn["turn"]), {})
            of_turn[record["repeat"]] = turn["prompt_sha256"]
    return prompts


def _unlike(first: dict[int, str], second: dict[int, str]) -> bool:
    """Whether a turn had another prompt in any repeat that both have."""
    return any(first[repeat] != second[repeat] for repeat in first.keys() & second.keys())


def _difference(difference: Relative | None) -> Text:
    if difference is None or difference.ratio.value is None:
        return Text(cells.UNKNOWN)
    ratio, count, unit = difference
    return cells.ratio_text(ratio.value, ratio.low, ratio.high).append(
        f", {remarks.paired_over(count, unit)}"
    )
