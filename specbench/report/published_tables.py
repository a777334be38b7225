"""Tables of published results, kept apart from measured rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specbench.data.question_files import TASKS
from specbench.report.cells import UNKNOWN, PlainTable
from specbench.report.published import NUMBERS, OVERALL, Published, beside
from specbench.report.tables import SHORT

if TYPE_CHECKING:
    from rich.table import Table

# What the figures of one row of a table share.
ROW = ("method", "paper", "target", "draft", "hardware", "setting", "against", "hand")


def published_tables(methods: Iterable[str]) -> list[Table]:
    """Published figures of the methods: on Spec-Bench's tasks in Spec-Bench's form, then all others."""
    rows = beside(methods)
    by_task = [row for row in rows if row.data == "spec_bench" and row.task and row.speedup is not None]
    others = [row for row in rows if row not in by_task]
    return [make(group) for make, group in ((_by_task, by_task), (_others, others)) if group]


def _by_task(rows: list[Published]) -> Table:
    """A row per method, paper and setting; a column per task. In a cell: speedup, and acceptance length if given."""
    table_rows: dict[tuple, dict[str, Published]] = {}
    for row in rows:
        table_rows.setdefault(tuple(getattr(row, key) for key in ROW), {})[str(row.task)] = row
    table = PlainTable("published speedups on Spec-Bench (and acceptance lengths)")
    table.add_columns("method")
    table.add_columns(*(SHORT.get(task, task) for task in (*TASKS, OVERALL)), justify="right")
    table.add_columns("models", "measured on", "source")
    for of_row in table_rows.values():
        one = next(iter(of_row.values()))
        *origin, source = _origin(one)
        text = "; ".join(dict.fromkeys([source, *(row.note for row in of_row.values() if row.note)]))
        table.add_row(one.method, *(_cell(of_row.get(task)) for task in (*TASKS, OVERALL)), *origin, text)
    return table


def _others(rows: list[Published]) -> Table:
    """A row per figure."""
    table = PlainTable("other published figures")
    table.add_columns("method", "figures", "questions", "models", "measured on", "source")
    for row in rows:
        numbers = {name.replace("_", " "): getattr(row, name) for name in NUMBERS}
        figures = ", ".join(f"{name} {value:g}" for name, value in numbers.items() if value is not None)
        against = f" against {row.against}" if row.against else ""
        note = f" ({row.note})" if row.note else ""
        questions = ", ".join(filter(None, (row.data, row.task)))
        table.add_row(row.method, f"{figures}{against}{note}", questions or UNKNOWN, *_origin(row))
    return table


def _cell(row: Published | None) -> str:
    if row is None:
        return UNKNOWN
    return f"{row.speedup:g}" + (f"\n{row.acceptance_length:g}" if row.acceptance_length is not None else "")


def _origin(row: Published) -> tuple[str, str, str]:
    models = " + ".join(filter(None, (row.target, row.draft))) or UNKNOWN
    measured_on = ", ".join(filter(None, (row.hardware, row.setting))) or "not stated"
    return models, measured_on, f"{row.paper} (at {row.hand} hand)"
