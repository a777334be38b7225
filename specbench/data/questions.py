"""Questions: where the file comes from, what a line must hold, which of them a run asks.

A file has one JSON object per line, in Spec-Bench's format (Xia et al. 2024):
{"question_id": int, "category": str, "turns": [str, ...], "reference": [...] (optional)}.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from specbench import CONF
from specbench.system.errors import UserError, suggest
from specbench.system.files import file_sha256, write_atomic
from specbench.system.paths import cache_folder, packaged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DOWNLOAD_TIMEOUT_SECONDS = 30
WARMUP = "specbench/tiny/warmup.jsonl"

# Spec-Bench's tasks and the categories that each pools, in the order of its tables.
TASKS: dict[str, list[str]] = yaml.safe_load((CONF / "task" / "all.yaml").read_text(encoding="utf-8"))[
    "tasks"
]


@dataclass(frozen=True)
class Question:
    """One conversation: the user's turns, in order. `task` is the task that its category belongs to."""

    question_id: int
    category: str
    turns: tuple[str, ...]
    reference: list | None
    task: str


def load_questions(data: Mapping, task: Mapping) -> list[Question]:
    """The questions of a run in the order of the file: those of the task, at most `data.limit` per task.

    `task.tasks` maps each task to its categories; where it holds `task.name`, that one alone is asked, and
    all of them otherwise ("all"). A limit takes from the categories of a task in turn, so that each counts.
    Raises UserError for a file that is missing or malformed, and when no question is left.
    """
    named = {task["name"]: task["tasks"][task["name"]]} if task["name"] in task["tasks"] else task["tasks"]
    path = find_questions_file(data)
    questions = [q for q in read_questions(path, task["tasks"]) if q.task in named]
    if data["limit"] is not None:
        chosen = {q.question_id for name in named for q in _stratified(questions, name, data["limit"])}
        questions = [q for q in questions if q.question_id in chosen]
    if not questions:
        raise UserError(
            f"no questions for task={task['name']} with data.limit={data['limit']} in {path}: "
            "choose a task that the file has, and a limit of at least 1"
        )
    return questions


def warmup_questions(data: Mapping) -> list[Question]:
    """Questions to warm up with, outside the measured set: those of `data.warmup`, else the embedded ones."""
    return read_questions(_existing(data["warmup"] or WARMUP, "data.warmup"), TASKS)


def find_questions_file(data: Mapping) -> Path:
    """The file of `data`: its path, else the environment's, else the cached download (fetched when missing).

    The variable is <NAME>_QUESTIONS, so SPEC_BENCH_QUESTIONS for data=spec_bench. Wherever the file comes
    from, it must have the checksum `data.sha256` unless that is null. Raises UserError.
    """
    variable = f"{data['name'].upper()}_QUESTIONS"
    if data["path"]:
        path = _existing(data["path"], "data.path")
    elif os.environ.get(variable):
        path = _existing(os.environ[variable], variable)
    else:
        path = cache_folder() / data["name"] / "question.jsonl"
        if not path.exists():
            _download(data, path, variable)
    _check_sha256(path, file_sha256(path), data["sha256"])
    return path


def read_questions(path: Path, tasks: Mapping) -> list[Question]:
    """Every question of a file. Raises UserError with file and line number for a line that is not one."""
    task_of = {category: name for group in (TASKS, tasks) for name in group for category in group[name]}
    questions: list[Question] = []
    seen: dict[int, int] = {}
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        question = _parse(line, task_of, where)
        if question.question_id in seen:
            first = seen[question.question_id]
            raise UserError(f"{where}: question_id {question.question_id} is a duplicate of line {first}")
        seen[question.question_id] = number
        questions.append(question)
    return questions


def _parse(line: bytes, task_of: Mapping[str, str], where: str) -> Question:
    try:
        fields = json.loads(line)
    except ValueError as error:  # bad JSON, or bytes that are not UTF-8
        raise UserError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(fields).__name__}")
    for name, kind in (("question_id", int), ("category", str), ("turns", list)):
        if name not in fields:
            raise UserError(f"{where}: the field {name!r} is missing")
        if type(fields[name]) is not kind:  # exact: True is an int too
            raise UserError(f"{where}: {name!r} must be {kind.__name__}, not {type(fields[name]).__name__}")
    category, turns, reference = fields["category"], fields["turns"], fields.get("reference")
    if category not in task_of:
        raise UserError(f"{where}: unknown category {category!r}: {suggest(category, task_of)}")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f"{where}: 'turns' must hold at least one text, and no empty one")
    if not isinstance(reference, list | None):
        raise UserError(f"{where}: 'reference' must be a list, not {type(reference).__name__}")
    return Question(fields["question_id"], category, tuple(turns), reference, task_of[category])


def _stratified(questions: list[Question], task: str, limit: int) -> list[Question]:
    """At most `limit` questions of a task: the first of each category, then the second of each, and so on."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        if question.task == task:
            by_category.setdefault(question.category, []).append(question)
    ranked = [(rank, q) for of_category in by_category.values() for rank, q in enumerate(of_category)]
    return [q for _, q in sorted(ranked, key=lambda pair: pair[0])][: max(limit, 0)]


def _existing(path: str | Path, source: str) -> Path:
    file = packaged(path)
    if not file.is_file():
        raise UserError(f"{source}: there is no file {file}")
    return file


def _check_sha256(source: Path | str, actual: str, expected: str | None) -> None:
    if expected is not None and actual != expected:
        raise UserError(
            f"{source} has the sha256 {actual}, but {expected} was expected: it is another version; "
            "replace or delete the file, or set data.sha256=null to use it all the same"
        )


def _download(data: Mapping, path: Path, variable: str) -> None:
    """Fetches `data.url` to `path`; the file appears there complete and checked, or not at all."""
    ways = f"set {variable}=FILE or data.path=FILE"
    if not data["url"]:
        raise UserError(f"data={data['name']} has neither a path nor a url: {ways}")
    try:
        with urllib.request.urlopen(data["url"], timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
            content = response.read()
        _check_sha256(data["url"], hashlib.sha256(content).hexdigest(), data["sha256"])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"cannot download {data['url']} ({error}): fetch it by hand, then {ways}") from error
