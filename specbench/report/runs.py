"""Run folders as reports see them: the finished ones, and why others are left out or not comparable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import pandas as pd

from specbench.config.spec import OWN, POOL
from specbench.measure.machine import provenance
from specbench.measure.metrics.metrics import METRICS
from specbench.measure.metrics.relative import parts, parts_by_process
from specbench.measure.metrics.summary import OF_FACTS, SCHEMA, summarise
from specbench.measure.records import run_folder as store
from specbench.measure.records.migrate import migrated, migrated_config, migrated_facts, migrated_summary
from specbench.report.labels import as_text, labels, named
from specbench.system.errors import UserError
from specbench.system.files import finite, read_json

NESTED = ("equivalence", "stats")
# What reports read of a summary: a run that lacks any of it is damaged, or was written by another version.
COUNTS = dict.fromkeys(("answers", "exact", "tie", "violation"))
NUMBERS = dict.fromkeys(METRICS) | {"equivalence": COUNTS}
BASELINE = dict.fromkeys(
    (
        *("tokens_per_second", "hf_generate_tokens_per_second", "single_tokens_per_second"),
        *("quoted_against", "bandwidth_fraction", "ceiling_tokens_per_second"),
    )
) | {"equivalence": COUNTS}
SUMMARY = dict.fromkeys(
    (
        *("failed", "method", "drafter", "pair", "data", "task", "temperature", "batch_size", "protocol"),
        *("dtype", "device", "weights", "peak_memory_bytes", "unit"),
        *("max_new_tokens", "limit", "seed", "processor", "machine"),
    )
) | {"settings": {}, "overall": NUMBERS, "tasks": {}, "equivalence": COUNTS, "baseline": BASELINE}
# What a summary is made of beside the records.
FACTS = dict.fromkeys((*OF_FACTS, "unit", "bandwidth_bytes_per_second"))
CONFIG = dict.fromkeys(("batch_size", "experiment", "protocol", "seed")) | {
    **{group: {"name": None} for group in ("method", "pair", "data", "task")},
    "decoding": dict.fromkeys(("temperature", "max_new_tokens")),
}
RECORD = dict.fromkeys(("question_id", "task", "category", "pool", "repeat", "process", "error", "turns"))
TURN = dict.fromkeys(("turn", "prompt_sha256", "arms", "equivalence"))
GENERATION = dict.fromkeys(("tokens", "prefill_seconds", "seconds", "steps"))
PROVENANCE = dict.fromkeys(
    ("time", "command", "config", "versions", "load_average", "threads", "source_sha256", "git", "questions")
) | {"machine": dict.fromkeys(("cpu", "cores", "usable_cores", "gpus"))}


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the content of its summary.json."""

    folder: Path
    summary: dict

    @property
    def name(self) -> str:
        """The folder's name."""
        return ending_in_its_name(self.folder).name

    @property
    def unit(self) -> str:
        """What is timed: "question" or "pool"."""
        return self.summary["unit"]

    @cached_property
    def provenance(self) -> dict | None:
        """What provenance.json holds; None if it is missing or damaged."""
        try:
            content = read_json(self.folder / store.PROVENANCE)
        except (OSError, ValueError):
            return None
        if any(_lacking(content, PROVENANCE)):
            return None
        return content | {"config": migrated_config(content["config"])}

    @property
    def begun(self) -> datetime:
        """When it began; the earliest time if that is unknown."""
        if self.provenance is None:
            return datetime.min.replace(tzinfo=UTC)
        return datetime.fromisoformat(self.provenance["time"])

    @cached_property
    def records(self) -> list[dict]:
        """Every question of the journal. Raises UserError, without the folder's name, when it is damaged."""
        return _records(self.folder)

    def parts(self, what: str) -> pd.DataFrame:
        """The parts of a number, as returned by `metrics.relative.parts`."""
        return parts(self.records, what, self.unit, self.summary["target_pass_bytes"])

    def parts_by_process(self, what: str) -> list[pd.DataFrame]:
        """Likewise by process, as returned by `metrics.relative.parts_by_process`."""
        return parts_by_process(self.records, what, self.unit)


@dataclass(frozen=True)
class SkippedRun:
    """A run folder that is left out, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{ending_in_its_name(self.folder).name}: {self.reason}"


def ending_in_its_name(folder: Path) -> Path:
    """The path of a folder, also where it is given as "." or ".."."""
    return folder.resolve() if folder.name in ("", "..") else folder


def read_runs(paths: Iterable[Path], with_records: bool = False) -> tuple[list[Run], list[SkippedRun]]:
    """The finished runs among the paths, and those that are left out; a run that is named twice is read once.

    Args:
        paths: run folders, or folders of run folders.
        with_records: read every journal too, and leave out those that are damaged.

    Raises:
        UserError: a path does not exist.
    """
    runs, left_out = [], []
    for folder in {folder.resolve(): folder for path in paths for folder in _run_folders(path)}.values():
        try:
            run = Run(folder, _summary(folder))
            if with_records:
                _ = run.records
            runs.append(run)
        except UserError as error:
            left_out.append(SkippedRun(folder, str(error)))
    return runs, left_out


def oldest_first(runs: Iterable[Run]) -> list[Run]:
    """The runs by the time when they began: of several of one kind the newest counts, whatever its folder is called."""
    return sorted(runs, key=lambda run: run.begun)


def finished_runs(paths: Iterable[Path], with_records: bool = False) -> tuple[list[Run], list[SkippedRun]]:
    """As `read_runs`. Raises UserError when no run among them is finished."""
    paths = list(paths)
    runs, left_out = read_runs(paths, with_records)
    if not runs:
        why = f" ({left_out[-1]})" if left_out else ""
        raise UserError(
            f"no finished run in {', '.join(map(str, paths))}{why}: "
            f"a run folder holds {store.SUMMARY} once it is complete"
        )
    return runs, left_out


def read_run(folder: Path) -> Run:
    """A finished run. Raises UserError for one that is unfinished, damaged, or written by another version."""
    try:
        return Run(folder, _summary(folder))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, finished or not."""
    return any((folder / name).exists() for name in (store.SUMMARY, store.CODE, store.RECORDS))


def _why_unfinished(folder: Path) -> str:
    if (folder / store.GIVEN_UP).exists():
        return f"given up: {read_json(folder / store.GIVEN_UP)['reason']}"
    return "unfinished: the command that began it resumes it"


def _summary(folder: Path) -> dict:
    """The content of summary.json. Raises UserError, without the folder's name, as `read_run` says."""
    path = folder / store.SUMMARY
    if not is_run(folder):
        raise UserError("there is no run in it")
    try:
        summary = migrated_summary(read_json(path))
    except FileNotFoundError:
        raise UserError(_why_unfinished(folder)) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"damaged: {path.name} cannot be read ({error})") from error
    if not isinstance(summary, dict) or "schema" not in summary:
        raise UserError(f"damaged: {path.name} is no summary")
    if summary["schema"] != SCHEMA:
        raise UserError(f"{path.name} has schema {summary['schema']}; this version reads {SCHEMA}")
    if "overall" in summary and "records" not in summary:
        raise UserError(f"{path.name} was made by specbench 0.2: measure it again")
    tasks = summary.get("tasks")
    shape = SUMMARY | ({"tasks": dict.fromkeys(tasks, NUMBERS)} if isinstance(tasks, dict) else {})
    lacking, written = list(_lacking(summary, shape)), _lines(folder / store.RECORDS)
    measured = summary.get("records")
    if lacking:  # written before a number was added: it is made of the records, unless they are lacking, too
        with suppress(UserError):
            if measured == written:
                return _derived(folder)
        raise UserError(f"damaged: {path.name} lacks {named(lacking)}")
    if measured != written:
        raise UserError(f"damaged: {store.RECORDS} has {written} of the {measured} records of {path.name}")
    return _with_questions(summary, folder)


def _with_questions(summary: dict, folder: Path) -> dict:
    """A summary with the checksum of its questions; for an older one, from the provenance."""
    if summary["questions_sha256"] is not None or (origin := Run(folder, {}).provenance) is None:
        return summary
    return summary | {"questions_sha256": origin["questions"]["sha256"]}


def _derived(folder: Path) -> dict:
    """The summary of a folder that an earlier version measured, recomputed from the records.

    That version had no number of pools, and other intervals and another share of hidden drafting.
    """
    try:
        facts, config = read_json(folder / store.FACTS), store.read_config(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"damaged: {store.SUMMARY} cannot be derived ({error})") from error
    if lacking := [*_lacking(facts, FACTS), *_lacking(config, CONFIG)]:
        raise UserError(f"damaged: {store.FACTS} and {store.CONFIG} lack {named(lacking)}")
    if origin := Run(folder, {}).provenance:
        machine = origin["machine"]
        on_gpu = facts["device"].startswith("cuda") and machine["gpus"]
        processor = machine["gpus"][0]["name"] if on_gpu else machine["cpu"]
        facts = {"processor": processor, "questions": origin["questions"]["sha256"]} | facts
    return finite(summarise(_records(folder), migrated_facts(facts), migrated_config(config)))


def _records(folder: Path) -> list[dict]:
    """The content of the journal. Raises UserError as `Run.records` says."""
    records = store.read_records(folder)
    for number, record in enumerate(records, start=1):
        lacking = [*_lacking(record, RECORD)]
        if not lacking:
            for turn in record["turns"]:
                lacking += _lacking(turn, TURN)
                for generations in () if lacking else turn["arms"].values():
                    lacking += [name for one in generations for name in _lacking(one, GENERATION)]
        if lacking:
            raise UserError(f"damaged: {store.RECORDS}, line {number}, lacks {named(lacking)}")
    return migrated(records)


def _lines(path: Path) -> int:
    """Number of whole lines of a file; 0 if there is no file. Parsing them as JSON would take long for many runs."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def _lacking(value: object, shape: Mapping, prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys of `shape` that nested dictionaries lack.

    A key whose value in `shape` is not None must hold a dictionary with those keys.
    """
    if not isinstance(value, dict):
        yield prefix.removesuffix(".") or "everything"
        return
    for key, inside in shape.items():
        if key not in value:
            yield prefix + key
        elif inside is not None:
            yield from _lacking(value[key], inside, f"{prefix}{key}.")


def _run_folders(path: Path) -> list[Path]:
    """The run folders of a path: itself, or those in it; if there are none, itself, to be left out."""
    if not path.exists():
        raise UserError(f"there is no folder {path}")
    inside = sorted(filter(is_run, path.iterdir())) if path.is_dir() and not is_run(path) else []
    return inside or [path]


# -- all of them together


def summary_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """One row per run and task, and one with task "overall": the numbers of summary.json, flat.

    A method's own numbers are left out. Verdict counts have their names (exact, tie, violation), numbers of the
    baseline are `baseline_<name>`, parameters of the method are one text in `settings`.
    """
    rows = []
    for run in runs:
        summary = run.summary
        nested = ("overall", "tasks", "equivalence", "baseline", "settings", "task")
        head = {"run": run.name} | {k: v for k, v in summary.items() if k not in nested}
        head["settings"] = ", ".join(as_text(summary["settings"]))
        head["engine"] = (summary["engine"] or {}).get("name", OWN)
        baseline = {f"baseline_{k}": v for k, v in summary["baseline"].items() if k != "equivalence"}
        for task, numbers in [*summary["tasks"].items(), ("overall", summary["overall"])]:
            flat = {k: v for k, v in numbers.items() if k not in NESTED} | numbers["equivalence"]
            rows.append(head | {"task": task} | flat | baseline)
    return pd.DataFrame(rows)


def row_names(runs: list[Run]) -> list[str]:
    """The label of each run; the folder's name if two runs share one, and its path if folders share that."""
    names = labels(run.summary for run in runs)
    for name_of in (lambda run: run.name, lambda run: str(run.folder)):
        names = [name if names.count(name) == 1 else name_of(run) for name, run in zip(names, runs)]
    return names


def latest(runs: Iterable[Run]) -> list[tuple[str, Run]]:
    """Runs by their label; of those that share one, the last."""
    runs = list(runs)
    return list(dict(zip(labels(run.summary for run in runs), runs)).items())


def not_comparable(runs: Iterable[Run]) -> list[str]:
    """One line for all runs that are not comparable with the first for the same reasons."""
    runs = list(runs)
    first = next((run for run in runs if run.provenance is not None), None)
    name = "the others" if first is None else first.name
    names_by_reason: dict[str, list[str]] = {}
    for run in runs:
        reasons = [f"there is no {store.PROVENANCE} that can be read"]
        if first is not None and run.provenance is not None:
            reasons = differences(first, run)
        if reasons:
            names_by_reason.setdefault("; ".join(reasons), []).append(run.name)
    return [
        f"not comparable with {name}: {named(others)} ({reasons})"
        for reasons, others in names_by_reason.items()
    ]


def differences(first: Run, run: Run) -> list[str]:
    """Why two runs with provenance may not be compared, by it and by what they computed with; [] if they may."""
    ours, theirs = (_means(one.summary) for one in (first, run))
    shared = ours.keys() & theirs.keys()  # older summaries lack some
    means = [
        f"{name} {ours[name]} against {theirs[name]}" for name in sorted(shared) if ours[name] != theirs[name]
    ]
    return provenance.differences(first.provenance or {}, run.provenance or {}) + means


def _means(summary: Mapping) -> dict[str, object]:
    means: dict[str, object] = {"engine.version": (summary["engine"] or {}).get("version")}
    if summary["compiled"] is not None:  # unknown in older runs
        ours = "our own, on AMX" if summary["tiles"] else "our own"
        means["kernels"] = f"torch's ({reason})" if (reason := summary["kernels"]) else ours
        means["compiled"] = summary["compiled"]
    if str(summary["device"]).startswith("cuda"):  # one of several in a machine
        means["machine.processor"] = summary["processor"]
    # It draws tokens, makes weights, and orders the questions of a pool.
    if summary["temperature"] or summary["weights"] == "random" or summary["unit"] == POOL:
        means["seed"] = summary["seed"]
    return means


def differing_by_pair(runs: Iterable[Run]) -> list[str]:
    """As `not_comparable`, among the runs of one pair, batch size and engine: others are expected to differ."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        engine = (run.summary["engine"] or {}).get("name")
        groups.setdefault((run.summary["pair"], run.summary["batch_size"], engine), []).append(run)
    return [line for alike in groups.values() for line in not_comparable(alike)]
