"""Questions: where the file comes from, and which of them a run asks."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from specbench.data.question_files import PARQUET, Question, read_questions, read_turns
from specbench.system.errors import UserError, suggest
from specbench.system.files import file_sha256, write_atomic
from specbench.system.paths import cache_folder, existing_file, packaged

DOWNLOAD_TIMEOUT_SECONDS = 30
WARMUP = "specbench/tiny/warmup.jsonl"
SPEC_BENCH, TURNS = SCHEMAS = ("spec_bench", "turns")  # see question_files
SUFFIXES = (".jsonl", PARQUET)
EVERY = "all"  # the task that selects all tasks of the file


class MissingQuestionsError(UserError):
    """The questions are not on this machine, and cannot be fetched."""


def load_questions(data: Mapping, task: Mapping) -> list[Question]:
    """The questions of a run in the order of the file: those of the task, at most `data.limit` per task.

    `task.tasks` maps each task to its categories. `task.name` is the only one of them to ask, or "all". In the schema
    `turns` the file's own categories are the tasks. A limit takes from the categories of a task in turn, so that all
    are represented. `data.turns` leaves out later turns. Raises UserError if the file is missing or malformed, the task
    does not exist, or no question is left.
    """
    path = find_questions_file(data)
    questions = file_questions(data, task, path)
    named = _tasks(questions, data, task)
    questions = [q for q in questions if q.task in named]
    if data["limit"] is not None:
        chosen = {q.question_id for name in named for q in _stratified(questions, name, data["limit"])}
        questions = [q for q in questions if q.question_id in chosen]
    if not questions:
        raise UserError(
            f"no questions for task={task['name']} with data.limit={data['limit']} in {path}: "
            "choose a task that the file has, and a limit of at least 1"
        )
    turns = data.get("turns")
    return [replace(question, turns=question.turns[:turns]) for question in questions]


def file_questions(data: Mapping, task: Mapping, path: Path | None = None) -> list[Question]:
    """Every question of the file of `data`, in its order: of all tasks, without a limit. Raises UserError."""
    path = find_questions_file(data) if path is None else path
    schema = data.get("schema", SPEC_BENCH)
    if schema == TURNS:
        return read_turns(path, data.get("placeholder"))
    if schema != SPEC_BENCH:
        raise UserError(f"data.schema={schema}: {suggest(schema, SCHEMAS)}")
    return read_questions(path, task["tasks"])


def warmup_questions(data: Mapping, task: Mapping | None = None) -> list[Question]:
    """Questions to warm up with, outside the measured set: those of `data.warmup`, else the embedded ones.

    Args:
        data: whose file has the schema of the measured questions.
        task: whose categories it may have beside Spec-Bench's; None: these alone.
    """
    path = existing_file(data["warmup"] or WARMUP, "data.warmup")
    if not (questions := file_questions(data, task or {"tasks": {}}, path)):
        raise UserError(f"data.warmup: {path} holds no question")
    return questions


def find_questions_file(data: Mapping) -> Path:
    """The file of `data`: its path, else the environment's, else the cached download (fetched when missing).

    The variable is <NAME>_QUESTIONS, so SPEC_BENCH_QUESTIONS for data=spec_bench. In a folder it is the file of
    `data.split`: <split>.jsonl, <split>.parquet or the one file in <split>/. Wherever the file comes
    from, it must have the checksum `data.sha256` unless that is null. Raises UserError.
    """
    variable = f"{data['name'].upper()}_QUESTIONS"
    source = "data.path" if data["path"] else variable
    if place := data["path"] or os.environ.get(variable):
        folder = packaged(place)
        path = _of_split(folder, data, source) if folder.is_dir() else existing_file(place, source)
        split = data.get("split")
        if split not in (None, path.stem, path.parent.name):
            raise UserError(
                f"{source}: {path} is a file, not a folder with a split {split}: set data.split=null"
            )
    else:
        path = cache_folder() / data["name"] / "question.jsonl"
        if data["url"] and not data["sha256"]:  # no checksum tells versions apart, so the address must
            path = path.with_stem(f"question-{hashlib.sha256(data['url'].encode()).hexdigest()[:8]}")
        if data.get("split") is not None and (data["url"] or path.exists()):
            raise UserError(
                f"data.split={data['split']} is part of a folder: set data.path or {variable} to it, or data.split=null"
            )
        if not path.exists():
            _download(data, path, variable)
    _check_sha256(path, file_sha256(path), data["sha256"])
    return path


def questions_sha256(data: Mapping) -> str:
    """Hex digest of the file of `data`, which identifies the benchmark. Raises UserError."""
    return file_sha256(find_questions_file(data))


def _tasks(questions: list[Question], data: Mapping, task: Mapping) -> list[str]:
    """Names of the tasks to ask."""
    name = task["name"]
    tasks = task["tasks"]
    if data.get("schema") == TURNS:
        tasks = dict.fromkeys(q.task for q in questions)
    if name not in (EVERY, *tasks):
        raise UserError(
            f"task.name={name}: data={data['name']} has the tasks {', '.join(tasks)}; task=all: all"
        )
    return list(tasks) if name == EVERY else [name]  # a category may be called "all"


def _stratified(questions: list[Question], task: str, limit: int) -> list[Question]:
    """At most `limit` questions of a task: the first of each category, then the second of each, and so on."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        if question.task == task:
            by_category.setdefault(question.category, []).append(question)
    ranked = [(rank, q) for of_category in by_category.values() for rank, q in enumerate(of_category)]
    return [q for _, q in sorted(ranked, key=lambda pair: pair[0])][: max(limit, 0)]


def _of_split(folder: Path, data: Mapping, source: str) -> Path:
    """The file of `data.split` in a folder."""
    files: dict[str, list[Path]] = {}
    for file in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        if file.suffix in SUFFIXES:
            files.setdefault(file.parent.name if file.parent != folder else file.stem, []).append(file)
    split = data.get("split")
    if split not in files:
        lacks = f"has no split {split}" if split else "is a folder"
        there = (
            f"set data.split to one of {', '.join(files)}"
            if files
            else f"it holds no {' or '.join(SUFFIXES)}"
        )
        raise UserError(f"{source}: {folder} {lacks}: {there}")
    if len(files[split]) > 1:
        raise UserError(
            f"{source}: split {split} of {folder} is {len(files[split])} files: join them, or name one as {source}"
        )
    return files[split][0]


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
        if data.get("placeholder"):  # the benchmark's script must prepare its texts
            raise UserError(
                f"data={data['name']} has no folder of questions: set {variable}=FOLDER or data.path=FOLDER, which the "
                "benchmark's own script prepares (docs/questions.md)"
            )
        raise UserError(f"data={data['name']} has neither a path nor a url: {ways}")
    try:
        with urllib.request.urlopen(data["url"], timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
            content = response.read()
        _check_sha256(data["url"], hashlib.sha256(content).hexdigest(), data["sha256"])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MissingQuestionsError(
            f"cannot download {data['url']} ({error}): fetch it by hand, then {ways}"
        ) from error
