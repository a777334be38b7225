"""Files of questions: what a row must hold, in Spec-Bench's own schema and in the open one.

`spec_bench` (Xia et al. 2024) is strict: {"question_id": int, "category": str, "turns": [str, ...], "reference": [...]
(optional)}, and a task pools categories. `turns` takes what other benchmarks and applications write, as JSON Lines or
Parquet: a row needs `turns` or `messages` alone, and each category is a task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specbench import CONF
from specbench.system.errors import UserError, suggest

# Spec-Bench's tasks and the categories that each pools, in the order of its tables.
TASKS: dict[str, list[str]] = yaml.safe_load((CONF / "task" / "all.yaml").read_text(encoding="utf-8"))[
    "tasks"
]
PARQUET = ".parquet"
LARGEST_ID = 2**63 - 1
SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")
OVERALL = "overall"  # what summaries and tables call all tasks together


@dataclass(frozen=True)
class Question:
    """One conversation.

    Attributes:
        question_id: its number.
        category: of the question.
        turns: what the user says, in order; each is answered.
        reference: answers that drafters must not have seen.
        task: that the category belongs to.
        history: messages before the first turn, as they were: a system message, earlier turns with their answers.
    """

    question_id: int
    category: str
    turns: tuple[str, ...]
    reference: list | None
    task: str
    history: tuple[dict[str, str], ...] = ()

    @property
    def texts(self) -> list[str]:
        """What the user says, and has said. A system message is no question: many conversations share it."""
        return [message["content"] for message in self.history if message["role"] == USER] + [*self.turns]


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
    """Every question of a file whose rows need `turns`, or `messages`, alone.

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
    history: list[dict[str, str]] = []
    answers = fields.get("reference")  # in any form: it is not asked, but drafters must not have seen it
    answers = [answers] if isinstance(answers, str) else answers if isinstance(answers, list) else []
    if "turns" in fields:
        turns = _texts(fields["turns"], "turns", where)
    elif "messages" in fields:
        history, turns, answered = _conversation(fields["messages"], where)
        answers = [*answers, *answered]
    else:
        raise UserError(
            f"{where}: has neither 'turns' nor 'messages', but {', '.join(sorted(fields)) or 'nothing'}"
        )
    if placeholder and any(turn.startswith(placeholder) for turn in turns):
        raise UserError(
            f"{where}: a placeholder instead of the question: its text may not be passed on; let the benchmark's own "
            "script prepare the file, then give its folder as data.path"
        )
    return Question(identifier, category, turns, answers or None, category, tuple(history))


def _is_id(value: object) -> bool:
    """Whether a value is valid as a question's number: seeds are made of it, and tables hold 64 bits."""
    return type(value) is int and 0 <= value <= LARGEST_ID


def _conversation(messages: Any, where: str) -> tuple[list[dict[str, str]], tuple[str, ...], list[str]]:
    """Splits messages into those before what is asked, the user's last ones, which are asked, and the final answer."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    roles = [message.get("role") for message in messages]
    for role in roles:
        if role not in ROLES:
            raise UserError(f"{where}: a message with role {role!r}: roles are {', '.join(ROLES)}")
    texts = _texts([message.get("content") for message in messages], "messages", where)
    end = len(roles) - (roles[-1] == ASSISTANT)
    start = end
    while start > 0 and roles[start - 1] == USER:
        start -= 1
    if start == end:
        raise UserError(f"{where}: 'messages' must end with one of the user, or with the answer to it")
    history = [{"role": role, "content": text} for role, text in zip(roles[:start], texts[:start])]
    return history, texts[start:end], list(texts[end:])


def _texts(turns: Any, name: str, where: str) -> tuple[str, ...]:
    if (
        not turns
        or not isinstance(turns, list)
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise UserError(f"{where}: {name!r} must hold at least one text, and no empty one")
    return tuple(turns)
