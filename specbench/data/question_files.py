"""Files of questions: what a row must hold, in Spec-Bench's own schema and in the open one.

`spec_bench` (Xia et al. 2024) is strict: {"question_id": int, "category": str, "turns": [str, ...], "reference": [...]
(optional)}, and a task pools categories. `turns` takes what other benchmarks write, as JSON Lines or Parquet: a row
needs `turns` or `messages` alone, and each category is a task.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from specbench import CONF
from specbench.system.errors import UserError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# Spec-Bench's tasks and the categories that each pools, in the order of its tables.
TASKS: dict[str, list[str]] = yaml.safe_load((CONF / "task" / "all.yaml").read_text(encoding="utf-8"))[
    "tasks"
]
PARQUET = ".parquet"
LARGEST_ID = 2**63 - 1
OVERALL = "overall"  # what summaries and tables call all tasks together


@dataclass(frozen=True)
class Question:
    """One conversation: the user's turns, in order. `task` is the task that its category belongs to."""

    question_id: int
    category: str
    turns: tuple[str, ...]
    reference: list | None
    task: str


def read_questions(path: Path, tasks: Mapping) -> list[Question]:
    """Every question of a file in Spec-Bench's schema.

    Args:
        path: a JSON Lines file.
        tasks: from a task to its categories, beside Spec-Bench's.

    Returns:
        The questions, in the order of the file.

    Raises:
        UserError: a line is no question, with file and line number.
    """
    task_of = {category: name for group in (TASKS, tasks) for name in group for category in group[name]}
    return _without_duplicates((where, _strict(row, task_of, where)) for _, where, row in _json_lines(path))


def read_turns(path: Path, placeholder: str | None = None) -> list[Question]:
    """Every question of a file whose rows need `turns`, or the user's `messages`, alone.

    Args:
        path: a JSON Lines or Parquet file.
        placeholder: prefix of a turn whose text its benchmark may not redistribute; null: there are none.

    Returns:
        The questions, in the order of the file. An id that is missing, or no number from 0 to `LARGEST_ID`, becomes the
        number of the line, a missing category the name of the file; each category is a task.

    Raises:
        UserError: a row is no question, or a placeholder, with file and line number.
    """
    rows = _parquet_rows(path) if path.suffix == PARQUET else _json_lines(path)
    return _without_duplicates(
        (where, _open(row, number, path.stem, placeholder, where)) for number, where, row in rows
    )


def _json_lines(path: Path) -> Iterator[tuple[int, str, dict]]:
    """Yields (number, location, fields) of each line that is not blank."""
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
            json.dumps(fields, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, and no text
        except ValueError as error:  # bad JSON, or what UTF-8 cannot hold
            raise UserError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(fields, dict):
            raise UserError(f"{where}: expected a JSON object, found {type(fields).__name__}")
        yield number, where, _without_nulls(fields)


def _without_nulls(fields: dict) -> dict:
    """The fields without nulls, as which tables have what a row lacks."""
    return {name: value for name, value in fields.items() if value is not None}


def _parquet_rows(path: Path) -> Iterator[tuple[int, str, dict]]:
    import pyarrow  # late: takes a moment, and few files need it
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file ({error})") from error
    for number, fields in enumerate(rows, start=1):
        yield number, f"{path}, row {number}", _without_nulls(fields)


def _without_duplicates(questions: Iterator[tuple[str, Question]]) -> list[Question]:
    places: dict[int, str] = {}
    read = []
    for where, question in questions:
        first = places.setdefault(question.question_id, where)
        if first != where:
            number = first.rsplit(" ", 1)[-1]
            raise UserError(f"{where}: question_id {question.question_id} is a duplicate of line {number}")
        read.append(question)
    return read


def _strict(fields: dict, task_of: Mapping[str, str], where: str) -> Question:
    for name, kind in (("question_id", int), ("category", str), ("turns", list)):
        if name not in fields:
            raise UserError(f"{where}: the field {name!r} is missing")
        if type(fields[name]) is not kind:  # exact: True is an int too
            raise UserError(f"{where}: {name!r} must be {kind.__name__}, not {type(fields[name]).__name__}")
    if not _is_id(fields["question_id"]):
        raise UserError(f"{where}: 'question_id' must be from 0 to {LARGEST_ID}, not {fields['question_id']}")
    category, reference = fields["category"], fields.get("reference")
    if category not in task_of:
        raise UserError(f"{where}: unknown category {category!r}: {suggest(category, task_of)}")
    turns = _texts(fields["turns"], "turns", where)
    if not isinstance(reference, list | None):
        raise UserError(f"{where}: 'reference' must be a list, not {type(reference).__name__}")
    return Question(fields["question_id"], category, turns, reference, task_of[category])


def _open(fields: dict, number: int, file: str, placeholder: str | None, where: str) -> Question:
    category = fields.get("category", file)
    identifier = fields["question_id"] if _is_id(fields.get("question_id")) else number
    if not isinstance(category, str) or not category.strip():
        raise UserError(f"{where}: 'category' must be a name, not {category!r}")
    if category == OVERALL:
        raise UserError(
            f"{where}: tables call all tasks together '{OVERALL}': give the category another name"
        )
    if "turns" in fields:
        turns = _texts(fields["turns"], "turns", where)
    elif "messages" in fields:
        turns = _texts(_of_user(fields["messages"], where), "messages", where)
    else:
        raise UserError(
            f"{where}: has neither 'turns' nor 'messages', but {', '.join(sorted(fields)) or 'nothing'}"
        )
    if placeholder and any(turn.startswith(placeholder) for turn in turns):
        raise UserError(
            f"{where}: a placeholder instead of the question: its text may not be passed on; let the benchmark's own "
            "script prepare the file, then give its folder as data.path"
        )
    # Accepted in any form: it is not asked, but drafters must not have seen it.
    reference = fields.get("reference")
    answers = [reference] if isinstance(reference, str) else reference
    return Question(identifier, category, turns, answers if isinstance(answers, list) else None, category)


def _is_id(value: object) -> bool:
    """Whether a value is valid as a question's number: seeds are made of it, and tables hold 64 bits."""
    return type(value) is int and 0 <= value <= LARGEST_ID


def _of_user(messages: Any, where: str) -> list:
    """The texts of messages, all of which must be the user's."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    for message in messages:
        if message.get("role") != "user":
            raise UserError(
                f"{where}: a message with role {message.get('role')!r}: only user messages are asked"
            )
    return [message.get("content") for message in messages]


def _texts(turns: Any, name: str, where: str) -> tuple[str, ...]:
    if (
        not turns
        or not isinstance(turns, list)
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise UserError(f"{where}: {name!r} must hold at least one text, and no empty one")
    return tuple(turns)
