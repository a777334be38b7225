"""The run folder: found or made, locked, written line by line, finished at once.

Two processes use it one after the other: the command finds or makes the folder (`find_or_create`), the measuring
process holds it (`open_journal`) and completes it (`finalise`).
The source of truth is `records.jsonl`, one line per finished question; all that `finalise` writes is derived from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import yaml

from specbench.config.spec import BASELINE, METHOD, RunSpec, other_engine
from specbench.data.questions import questions_sha256
from specbench.measure.records.source import method_sha256, source_sha256
from specbench.system.errors import UserError, file_errors, one_line
from specbench.system.files import (
    finite,
    lock_folder,
    make_folder,
    new_folder,
    read_json,
    write_atomic,
    write_json,
)
from specbench.system.settings import plain

CONFIG, CODE, FACTS, PROVENANCE = "config.yaml", "code.json", "facts.json", "provenance.json"
RECORDS, SUMMARY, STEPS = "records.jsonl", "summary.json", "steps.parquet"
# Exit code of a process that has measured its share: another one must continue (EX_TEMPFAIL).
EXIT_CONTINUE = 75
LOG = "log.txt"  # of a job that another machine measures: its output
FAILURE = "failure.json"  # why the last attempt ended early
GIVEN_UP = "given_up.json"  # why commands ignore the folder
ANSWERS = {METHOD: "answers.jsonl", BASELINE: "answers_baseline.jsonl"}
# Configuration that does not change what is measured.
NOT_MEASURED = ("run_dir", "runs_root", "tracker", "rerun", "leave_out", "settings_source")


# -- finding and making a folder


@file_errors()
def find_or_create(config: Mapping, taken: Collection[Path] = ()) -> Path:
    """The folder to measure `config` in: its `run_dir`, or else the newest that can be resumed, or a new one.

    A folder can be resumed while it has no summary, was not given up, and was made for the same configuration and
    questions by the same code.

    Args:
        config: of the run.
        taken: folders that other jobs have, whatever their state.

    Raises:
        UserError: `run_dir` is a folder that cannot be resumed, or holds other things, or no folder can be made or
            read.
    """
    config = plain(config)
    code = _code(config)
    if config["run_dir"] is not None:
        return _given_folder(Path(config["run_dir"]), config, code)
    root = Path(config["runs_root"])
    for run_dir in sorted(root.glob(f"*_{config_hash(config)}"), reverse=True):  # names begin with the date
        if run_dir not in taken and is_begun(run_dir) and _difference(run_dir, config, code) is None:
            return run_dir
    return _start(new_folder(root, _label(config)), config, code)


def is_begun(run_dir: Path | None) -> bool:
    """Whether a folder holds a part of a run that can be resumed, with the settings that it began with."""
    if run_dir is None or not run_dir.exists():
        return False
    return not is_complete(run_dir) and not (run_dir / GIVEN_UP).exists()


def is_measured(run_dir: Path, config: Mapping) -> bool:
    """Whether a folder holds all of `config`, these questions by this very code and these weights, with no failure.

    One measured here must have been measured with these versions of packages, on this machine, in this environment.
    """
    if not is_complete(run_dir) or read_json(run_dir / SUMMARY)["status"] != "complete":
        return False
    config = plain(config)
    return _hindrance(run_dir, config, _code(config)) is None


def changed_since(run_dir: Path, config: Mapping) -> list[str]:
    """What has changed since a finished run, in its weights and, if it was measured here, around it; [] if nothing."""
    from specbench.measure.machine import provenance  # late: the hub's client takes a second

    config = plain(config)
    spec = RunSpec.of(config, read_json(run_dir / FACTS)["unit"])
    now = {"weights": provenance.weights(config["pair"], spec.drafting, spec.engine)}
    if not (run_dir / LOG).exists():  # which one from another machine has
        now |= provenance.around()
    return provenance.differences(read_json(run_dir / PROVENANCE), now, [*now])


def give_up(run_dir: Path, why: str) -> None:
    """Makes the next command with the same configuration use another folder: this one cannot be resumed."""
    write_json(run_dir / GIVEN_UP, {"reason": why})


def discard_unused(run_dir: Path) -> bool:
    """Removes a run folder in which nothing was measured, unless another process holds it; returns whether it did."""
    if (run_dir / RECORDS).exists():
        return False
    with suppress(UserError), lock_folder(run_dir, "removed"):
        shutil.rmtree(run_dir)
    return not run_dir.exists()


def note_failure(run_dir: Path, why: str) -> None:
    """Leaves a note of what ended an attempt, for whoever asked for the run."""
    if run_dir.is_dir():
        write_json(run_dir / FAILURE, {"reason": " ".join(why.split())})


def why_failed(run_dir: Path) -> str | None:
    """One line: what ended the last attempt at a run, or which questions failed; None if neither is known."""
    if (run_dir / FAILURE).exists():
        return read_json(run_dir / FAILURE)["reason"]
    records = read_records(run_dir)
    failed = [record for record in records if record["error"] is not None]
    if not failed:
        return None
    first = failed[0]
    bad, every = ({record["question_id"] for record in some} for some in (failed, records))
    share = f"{len(bad)} of {len(every)} questions failed"
    return f"{share}, the first, {first['question_id']}, with {first['error']}"


def config_hash(config: Mapping) -> str:
    """8 hex digits of a configuration's checksum, without `NOT_MEASURED`."""
    return hashlib.sha256(_canonical(plain(config)).encode()).hexdigest()[:8]


def read_config(run_dir: Path) -> dict:
    """The resolved configuration of a run folder. Raises UserError if it cannot be read."""
    path = run_dir / CONFIG
    with file_errors():
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"{path} is damaged: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it holds no configuration")
    return config


def is_complete(run_dir: Path) -> bool:
    """Whether every question was tried and the summary is there."""
    return (run_dir / SUMMARY).exists()


def _canonical(config: dict) -> str:
    return json.dumps({k: v for k, v in config.items() if k not in NOT_MEASURED}, sort_keys=True)


def _label(config: dict) -> str:
    parts = [config[group]["name"] for group in ("method", "pair", "task")]
    if (engine := other_engine(config)) is not None:
        parts.insert(1, engine["name"])
    return "_".join([*(re.sub(r"[^\w.-]+", "-", str(part)) for part in parts), config_hash(config)])


def _code(config: dict) -> dict[str, str | None]:
    """Checksums of a run's code and questions."""
    return {
        "source_sha256": source_sha256(),
        "method_sha256": method_sha256(config),
        "questions_sha256": questions_sha256(config["data"]),
    }


def _start(run_dir: Path, config: dict, code: dict) -> Path:
    write_json(run_dir / CODE, code)
    write_atomic(run_dir / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return run_dir


def _difference(run_dir: Path, config: dict, code: dict) -> str | None:
    """Why a folder cannot be resumed with this configuration and code; None if it can."""
    if not (run_dir / CONFIG).exists() or not (run_dir / CODE).exists():
        return "it is not a run folder"
    try:
        if _canonical(read_config(run_dir)) != _canonical(config):
            return "it was made for another configuration"
    except UserError as error:
        return str(error)
    try:
        before = read_json(run_dir / CODE)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        return f"its {CODE} is damaged"
    if any(before.get(key) != code[key] for key in ("source_sha256", "method_sha256")):
        return "the code has changed since"
    if before.get("questions_sha256") != code["questions_sha256"]:
        return "the questions have changed since"
    return None


def _hindrance(run_dir: Path, config: dict, code: dict) -> str | None:
    """As `_difference`; for a finished folder, also what has changed around it since."""
    difference = _difference(run_dir, config, code)
    if difference is None and is_complete(run_dir) and (changed := changed_since(run_dir, config)):
        return f"something has changed since it was measured ({'; '.join(changed)})"
    return difference


def _given_folder(run_dir: Path, config: dict, code: dict) -> Path:
    make_folder(run_dir)
    if not any(run_dir.iterdir()):
        return _start(run_dir, config, code)
    if (hindrance := _hindrance(run_dir, config, code)) is not None:
        raise UserError(f"cannot resume run_dir={run_dir}: {hindrance}; name another folder or none")
    return run_dir


# -- the journal


class Journal:
    """The records of a run folder that this process holds; `records` are those already on disk."""

    def __init__(self, path: Path, records: list[dict]):
        self.records = records
        self._path = path
        self._keys = {_key(record) for record in records}

    def append(self, *records: dict) -> None:
        """Adds finished questions and the time of day (`tstamp`, s); they are on the disk when this returns.

        Raises UserError when they cannot be written, and ValueError for a question that is there already; the journal
        is then unchanged.
        """
        for record in records:
            if _key(record) in self._keys:
                raise ValueError(f"question {record['question_id']} is already in {self._path}")
        stamped = [finite(record | {"tstamp": time.time()}) for record in records]
        lines = "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in stamped)
        with file_errors(writing=self._path):
            before = self._path.stat().st_size if self._path.exists() else 0
            try:
                with open(self._path, "ab") as file:
                    file.write(lines.encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                if self._path.exists():
                    os.truncate(self._path, before)  # what a full disk still took
                raise
        self.records += stamped
        self._keys |= {_key(record) for record in stamped}

    def keep_first(self, count: int) -> None:
        """Drops all records but the first `count`; cuts the file in place, since a full disk has no room for another.

        Raises UserError when the file cannot be written.
        """
        with file_errors(writing=self._path):
            with open(self._path, "rb") as file:
                length = sum(len(line) for line in islice(file, count))
            os.truncate(self._path, length)
        del self.records[count:]
        self._keys = {_key(record) for record in self.records}


def _key(record: dict) -> tuple[int, int]:
    """The key of a record: a question in a pass."""
    return record["question_id"], record["repeat"]


@contextmanager
def open_journal(run_dir: Path) -> Iterator[Journal]:
    """Holds a run folder for this process alone (a killed one frees it), and mends its journal after a crash.

    Raises UserError when another process holds it, when the journal is damaged elsewhere than at its end, or when the
    folder cannot be written.
    """
    path = run_dir / RECORDS
    with lock_folder(run_dir, "measured"):
        records, intact_bytes = _read(path)
        if path.exists() and intact_bytes < path.stat().st_size:
            with file_errors(writing=path):
                os.truncate(path, intact_bytes)
        yield Journal(path, records)


def read_records(run_dir: Path) -> list[dict]:
    """Every finished question of a run folder, which may be in use; a last line cut short is left out."""
    return _read(run_dir / RECORDS)[0]


def _read(path: Path) -> tuple[list[dict], int]:
    """The records of a journal, and the bytes of their lines: what follows is a last line that was cut short."""
    if not path.exists():
        return [], 0
    *lines, rest = path.read_bytes().split(b"\n")  # not splitlines(): texts may hold other line separators
    records, intact_bytes = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # bad JSON, or bytes that are not UTF-8
            if number < len(lines) or rest:
                raise UserError(f"{path}, line {number}: not valid JSON; the journal is damaged") from error
            break
        if not isinstance(record, dict) or not {"question_id", "repeat"} <= record.keys():
            raise UserError(f"{path}, line {number}: no record of a question; the journal is damaged")
        records.append(record)
        intact_bytes += len(line) + 1
    return records, intact_bytes


# -- the end of a run


def finalise(run_dir: Path) -> dict:
    """Writes what follows from the journal (answers, steps, last of all the summary); returns the summary.

    A folder that already has a summary stays as it is. Call it while the journal is open, so that no other
    process writes the same folder.
    """
    if is_complete(run_dir):
        return read_json(run_dir / SUMMARY)
    records, config = read_records(run_dir), read_config(run_dir)
    for arm, name in ANSWERS.items():
        answers = spec_bench_answers(records, arm, config)
        write_atomic(run_dir / name, "".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers))
    _write_steps(run_dir / STEPS, records)
    from specbench.measure.metrics.summary import summarise  # late: pandas takes a second to import

    summary = finite(summarise(records, read_json(run_dir / FACTS), config))
    write_json(run_dir / SUMMARY, summary)
    return summary


def spec_bench_answers(records: list[dict], arm: str, config: dict) -> list[dict]:
    """The answers of one arm in Spec-Bench's schema, sorted by question, without those that failed.

    choices[i] is repeat i, tstamp that of the last. accept_lengths runs over all turns, one entry per round: the tokens
    that it emitted, the bonus token included; the first token of a turn comes from the prefill and is in no round. Each
    choice has its own texts: with greedy decoding they are equal.
    """
    name = config["method"]["name"] if arm == METHOD else BASELINE
    model_id = f"{config['pair']['name']}-{name}"
    by_question: dict[int, list[dict]] = {}
    for record in records:
        by_question.setdefault(record["question_id"], []).append(record)
    answers = []
    for question_id, repeats in sorted(by_question.items()):
        if any(record["error"] is not None for record in repeats):
            continue
        last = repeats[-1]
        answers.append(
            {
                "question_id": question_id,
                "category": last["category"],
                "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{model_id} {last['tstamp']} {question_id}").hex,
                "model_id": model_id,
                "choices": [_choice(record["turns"], arm, index) for index, record in enumerate(repeats)],
                "tstamp": last["tstamp"],
            }
        )
    return answers


def _choice(turns: list[dict], arm: str, index: int) -> dict:
    generations = [turn["arms"][arm][0] for turn in turns]
    emitted = [generation["steps"]["emitted"] for generation in generations]
    return {
        "index": index,
        "turns": [turn["text"][arm] for turn in turns],
        "decoding_steps": [len(rounds) for rounds in emitted],
        "new_tokens": [len(generation["tokens"]) for generation in generations],
        "wall_time": [generation["seconds"] for generation in generations],
        "accept_lengths": [count for rounds in emitted for count in rounds],
    }


def _write_steps(path: Path, records: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from specbench.measure.metrics.dataframes import steps_frame
    from specbench.measure.metrics.summary import SCHEMA

    table = pa.Table.from_pandas(steps_frame(records), preserve_index=False)
    metadata = (table.schema.metadata or {}) | {b"specbench_schema": str(SCHEMA).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    write_atomic(path, sink.getvalue().to_pybytes())
