"""Run folders as reports see them: the finished ones, what to call each, and why others are left out."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pandas as pd

from specbench.config.spec import OWN, POOL, QUESTION
from specbench.config.tuned import PUBLISHED, TUNED
from specbench.data.question_files import TASKS
from specbench.measure.machine import provenance
from specbench.measure.metrics import summary as metrics
from specbench.measure.metrics.metrics import METRICS
from specbench.measure.records import run_folder as store
from specbench.measure.records.migrate import migrated, migrated_facts, migrated_summary
from specbench.system.errors import UserError
from specbench.system.files import finite, read_json
from specbench.system.settings import CONSTANT, TRIMMING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

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
        *("max_new_tokens", "limit", "seed", "processor"),
    )
) | {"settings": {}, "overall": NUMBERS, "tasks": {}, "equivalence": COUNTS, "baseline": BASELINE}
# What a summary is made of beside the records.
FACTS = dict.fromkeys((*metrics.OF_FACTS, "bandwidth_bytes_per_second"))
CONFIG = dict.fromkeys(("batch_size", "experiment", "protocol", "seed")) | {
    **{group: {"name": None} for group in ("method", "pair", "data", "task")},
    "decoding": dict.fromkeys(("temperature", "max_new_tokens")),
}
RECORD = dict.fromkeys(("question_id", "task", "category", "pool", "error", "turns"))
TURN = dict.fromkeys(("turn", "prompt_sha256", "arms", "equivalence"))
GENERATION = dict.fromkeys(("tokens", "prefill_seconds", "seconds", "steps"))
PROVENANCE = dict.fromkeys(
    ("time", "command", "config", "versions", "load_average", "threads", "source_sha256", "git", "questions")
) | {"machine": dict.fromkeys(("cpu", "cores", "usable_cores", "gpus"))}
NAMED = 3
DRAFT = "draft"  # the draft model of a pair, as a setting
VOCAB_MAP, VOCAB_SIZE = TRIMMING  # the one tells of the other
# What else than method and settings runs can differ in, and how a label says it.
DIFFERING = {
    "pair": "{}",
    "batch_size": "batch {}",
    "pool": "pool={}",
    "data": "{}",
    "split": "split={}",
    "turns": "turns={}",
    "questions_sha256": "questions {:.8}",
    "task": "{}",
    "limit": "limit={}",
    "temperature": "T={:g}",
    "max_new_tokens": "max_new_tokens={}",
    "seed": "seed={}",
    "threads": "threads={}",
    "verification": "{} verification",
    "dtype": "{}",
    "engine_target": "{}",
    "device": "{}",
    "processor": "{}",
    "protocol": "protocol {}",
    "weights": "{} weights",
    "anatomy": "{}",
    "verify_width": "width {}",
    "compiled": "compiled={}",
    "quoted_against": "against {}",
    "engine_plain": "{}",
    "experiment": "{}",
}
# What comes with others of these: a difference only between runs that agree in them.
COMES_WITH = {
    "compiled": ("pair",),
    "questions_sha256": ("data", "split"),
    "pool": ("unit",),
    "engine_plain": ("engine_name",),
}
# No differences: what older runs do not tell, and that another engine is its own baseline.
UNTOLD: dict[str, set] = {"pool": {None}, "quoted_against": {None}, "engine_plain": {None}}
QUOTED = {"engine": "our loop", "hf_generate": "transformers generate"}  # what speedups are against


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the content of its summary.json."""

    folder: Path
    summary: dict

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def unit(self) -> str:
        """What has times of its own: "question" or "pool"."""
        return self.summary["unit"]

    @cached_property
    def provenance(self) -> dict | None:
        """What provenance.json holds; None where it is missing or damaged."""
        try:
            content = read_json(self.folder / store.PROVENANCE)
        except (OSError, ValueError):
            return None
        return None if any(_lacking(content, PROVENANCE)) else content

    @cached_property
    def records(self) -> list[dict]:
        """Every question of the journal. Raises UserError, without the folder's name, when it is damaged."""
        return _records(self.folder)

    def parts(self, what: str) -> pd.DataFrame:
        """The parts of a number, as `metrics.parts` gives them."""
        return metrics.parts(self.records, what, self.unit, self.summary.get("target_pass_bytes"))

    def parts_by_process(self, what: str) -> list[pd.DataFrame]:
        """Likewise by process, as `metrics.parts_by_process` gives them."""
        return metrics.parts_by_process(self.records, what, self.unit)


@dataclass(frozen=True)
class SkippedRun:
    """A run folder that no number is taken from, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.reason}"


def read_runs(paths: Iterable[Path], with_records: bool = False) -> tuple[list[Run], list[SkippedRun]]:
    """The finished runs among the paths, and those that are left out; a run that is named twice is read once.

    Args:
        paths: run folders, or folders of run folders.
        with_records: read every journal too, and leave out those that are damaged.

    Raises:
        UserError: a path is not there.
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


def _summary(folder: Path) -> dict:
    """The content of summary.json. Raises UserError, without the folder's name, as `read_run` says."""
    path = folder / store.SUMMARY
    if not is_run(folder):
        raise UserError("there is no run in it")
    try:
        summary = migrated_summary(read_json(path))
    except FileNotFoundError:
        raise UserError("unfinished: the command that began it resumes it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"damaged: {path.name} cannot be read ({error})") from error
    if not isinstance(summary, dict) or "schema" not in summary:
        raise UserError(f"damaged: {path.name} is no summary")
    if summary["schema"] != metrics.SCHEMA:
        raise UserError(f"{path.name} has schema {summary['schema']}; this version reads {metrics.SCHEMA}")
    tasks = summary.get("tasks")
    shape = SUMMARY | ({"tasks": dict.fromkeys(tasks, NUMBERS)} if isinstance(tasks, dict) else {})
    lacking, written = list(_lacking(summary, shape)), _lines(folder / store.RECORDS)
    measured = summary.get("records")
    if measured is None:  # older folders hold one record for each question, whatever the repeats
        with suppress(KeyError, TypeError):
            measured = summary["overall"]["questions"] + summary["failed"]
    if lacking:  # written before a number was added: it is made of the records, unless they are lacking, too
        with suppress(UserError):
            if measured == written:
                return _derived(folder)
        raise UserError(f"damaged: {path.name} lacks {named(lacking)}")
    if measured != written:
        raise UserError(f"damaged: {store.RECORDS} has {written} of the {measured} records of {path.name}")
    return _with_questions(summary, folder)


def _with_questions(summary: dict, folder: Path) -> dict:
    """A summary with the checksum of its questions, which of an older one the provenance tells."""
    if "questions_sha256" in summary or (origin := Run(folder, {}).provenance) is None:
        return summary
    return summary | {"questions_sha256": origin["questions"]["sha256"]}


def _derived(folder: Path) -> dict:
    """The summary of a folder that an earlier version measured, as this version makes it of the records.

    That version had no number of pools, and other intervals and another share of hidden drafting.
    """
    try:
        facts, config = read_json(folder / store.FACTS), store.read_config(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"damaged: {store.SUMMARY} cannot be derived ({error})") from error
    if lacking := [*_lacking(facts, FACTS), *_lacking(config, CONFIG)]:
        raise UserError(f"damaged: {store.FACTS} and {store.CONFIG} lack {named(lacking)}")
    facts = migrated_facts(facts)
    if origin := Run(folder, {}).provenance:
        machine = origin["machine"]
        on_gpu = facts["device"].startswith("cuda") and machine["gpus"]
        processor = machine["gpus"][0]["name"] if on_gpu else machine["cpu"]
        facts = {"processor": processor, "questions": origin["questions"]["sha256"]} | facts
    return finite(metrics.summary(_records(folder), facts, config))


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
    """How many whole lines a file has; 0 where there is none. Reading them as JSON would take long for many runs."""
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
    """The run folders that a path names: itself, or those in it; itself too where there is none, to be left out."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    inside = [] if is_run(path) else sorted(filter(is_run, path.iterdir()))
    return inside or [path]


# -- names


def method_label(summary: Mapping) -> str:
    """The method, what drafts for it where that is another choice, its rule for draft lengths, and another engine."""
    drafter, engine = summary["drafter"], summary.get("engine")
    if engine is not None:  # which schedules by itself
        return f"{drafter or summary['method']} by {engine['name']}"
    label = summary["method"] if drafter in (None, "none") else f"{summary['method']} + {drafter}"
    rule = summary["draft_length"]
    return label if rule == CONSTANT else f"{label}, {rule} draft length"


def beside_engines(summaries: Iterable[dict]) -> list[dict]:
    """The runs of other engines, and this project's own of a method and pair that another engine was measured with."""
    of_questions = [summary for summary in summaries if summary["unit"] == QUESTION]
    others = {_question(summary) for summary in of_questions if summary.get("engine") is not None}
    return [summary for summary in of_questions if _question(summary) in others]


def _question(summary: Mapping) -> tuple:
    """What is the same for engines that are set side by side."""
    return tuple(
        summary.get(key)
        for key in ("method", "pair", "data", "split", "turns", "questions_sha256", "temperature")
    )


def as_text(settings: Mapping) -> list[str]:
    """Each setting as it stands on the command line."""
    return [f"{name}={value}" for name, value in settings.items()]


def task_names(summaries: Iterable[Mapping]) -> list[str]:
    """The tasks that any of the runs measured: Spec-Bench's six in its order, then others as they come."""
    seen = dict.fromkeys(task for summary in summaries for task in summary["tasks"])
    return [*(task for task in TASKS if task in seen), *(task for task in seen if task not in TASKS)]


def varied_settings(summaries: Iterable[Mapping]) -> list[dict]:
    """For each summary the settings that were varied for its method: in which two of its runs on one pair differ."""
    summaries = list(summaries)
    every = [chosen_settings(summary) for summary in summaries]
    first: dict[tuple[str, str], dict] = {}
    varied: dict[str, set] = {}
    for summary, settings, pair in zip(summaries, every, pair_names(summaries)):
        method = method_label(summary)
        base = first.setdefault((method, pair), settings)
        differing = {k for k in base.keys() | settings.keys() if base.get(k) != settings.get(k)}
        if not {DRAFT} <= base.keys() & settings.keys():
            differing.discard(DRAFT)  # which older runs do not tell
        if VOCAB_SIZE in differing:
            differing.discard(VOCAB_MAP)
        varied.setdefault(method, set()).update(differing)
    return [
        {key: value for key, value in settings.items() if key in varied[method_label(summary)]}
        for summary, settings in zip(summaries, every)
    ]


def chosen_settings(summary: Mapping) -> dict:
    """The settings of a run, and its draft model, which the pair names."""
    draft = summary.get("draft")
    return summary["settings"] | ({} if draft is None else {DRAFT: draft})


def pair_names(summaries: Iterable[Mapping]) -> list[str]:
    """The pair of each, and its target where pairs of one name, such as `local`, have several."""
    summaries = list(summaries)
    targets: dict[str, set] = {}
    for summary in summaries:
        targets.setdefault(summary["pair"], set()).add(summary.get("target"))
    return [
        # Older runs do not tell their target.
        f"{pair} ({target})" if target is not None and len(targets[pair] - {None}) > 1 else pair
        for pair, target in ((summary["pair"], summary.get("target")) for summary in summaries)
    ]


def labels(summaries: Iterable[Mapping], without: Collection[str] = ()) -> list[str]:
    """A short name for each: the method, the settings that were varied, and what else the runs differ in.

    The keys `without` are left out.
    """
    summaries = list(summaries)
    rest = _differing(summaries, without)
    return [
        ", ".join([method_label(summary), *words, *more])
        for summary, words, more in zip(summaries, _settings_words(summaries), rest)
    ]


def _settings_words(summaries: Sequence[Mapping]) -> list[list[str]]:
    """What tells the settings of a method's runs apart: "published" or "tuned" where that names one, else those varied.

    A method with tuned settings alone is "tuned" where another one has published ones.
    """
    every = [as_text(varied) for varied in varied_settings(summaries)]
    sources = [summary.get("settings_source") for summary in summaries]
    by_source: dict[str, dict[str | None, set[tuple[str, ...]]]] = {}
    for summary, source, words in zip(summaries, sources, every):
        by_source.setdefault(method_label(summary), {}).setdefault(source, set()).add(tuple(words))
    named = {
        (method, source)
        for method, of_source in by_source.items()
        for source, settings in of_source.items()
        if source in (PUBLISHED, TUNED) and len(of_source) > 1 and len(settings) == 1
    }
    tuned = [TUNED] if PUBLISHED in sources else []
    return [
        [str(source)]
        if words and (method_label(summary), source) in named
        else words + (tuned if by_source[method_label(summary)].keys() == {TUNED} else [])
        for summary, source, words in zip(summaries, sources, every)
    ]


def _differing(summaries: list[Mapping], without: Collection[str]) -> list[list[str]]:
    """What the runs differ in beside method and settings, as labels say it; the size of a batch only of batches.

    What comes with others is a difference only between runs that agree in those: see `COMES_WITH`.
    """
    summaries = [
        dict(summary) | {"pair": pair, "quoted_against": _quoted(summary)} | _of_engine(summary)
        for summary, pair in zip(summaries, pair_names(summaries))
    ]
    several = [key for key in DIFFERING if key not in without and _differs(key, summaries)]
    return [
        [
            DIFFERING[key].format(summary[key])
            for key in several
            if summary.get(key) is not None and (key != "batch_size" or summary["unit"] == POOL)
        ]
        for summary in summaries
    ]


def _differs(key: str, summaries: Iterable[Mapping]) -> bool:
    """Whether summaries differ in a key, of those that agree in what it comes with."""
    values: dict[tuple, set] = {}
    for summary in summaries:
        alike = tuple(summary.get(other) for other in COMES_WITH.get(key, ()))
        values.setdefault(alike, set()).add(summary.get(key))
    return any(len(of_alike - UNTOLD.get(key, set())) > 1 for of_alike in values.values())


def _quoted(summary: Mapping) -> str | None:
    """What a speedup is against; None of another engine, which is its own baseline."""
    return None if summary.get("engine") else QUOTED[summary["baseline"]["quoted_against"]]


def _of_engine(summary: Mapping) -> dict[str, str | None]:
    """The name of another engine, its version and how its plain arm was told to decode; None of our own."""
    engine = summary.get("engine")
    if not engine:
        return {"engine_name": None, "engine_plain": None}
    return {
        "engine_name": engine["name"],
        "engine_plain": ", ".join([engine["version"], *as_text(engine["plain"])]),
    }


def row_names(runs: list[Run]) -> list[str]:
    """The label of each run; the folder's name where two runs share one."""
    names = labels(run.summary for run in runs)
    return [label if names.count(label) == 1 else run.name for label, run in zip(names, runs)]


def latest(runs: Iterable[Run]) -> list[tuple[str, Run]]:
    """Runs by their label; of those that share one, the last."""
    runs = list(runs)
    return list(dict(zip(labels(run.summary for run in runs), runs)).items())


@dataclass(frozen=True)
class Grid:
    """Overall speedups of a method on a pair by the values of the two settings that were varied."""

    label: str
    pair: str
    down: str
    across: str
    cells: dict[tuple, float | None]

    @property
    def rows(self) -> list:
        """Values of the first setting, in the order of the cells."""
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def columns(self) -> list:
        """Values of the second setting, in the order of the cells."""
        return list(dict.fromkeys(column for _, column in self.cells))


def grids(summaries: Iterable[Mapping]) -> list[Grid]:
    """A grid for each method and pair of whose settings just two were varied, and each of these more than once.

    Runs that differ in anything else are not of one grid. A cell that was run several times stands with its last run.
    """
    summaries = list(summaries)
    cells: dict[tuple[str, str, str, str], dict[tuple, float | None]] = {}
    rest = zip(pair_names(summaries), _differing(summaries, ("pair",)))
    for summary, varied, (pair, more) in zip(summaries, varied_settings(summaries), rest):
        if len(varied) == 2:
            down, across = varied
            key = (", ".join([method_label(summary), *more]), pair, down, across)
            coordinates = tuple(
                str(value) if isinstance(value, list | dict) else value for value in varied.values()
            )
            cells.setdefault(key, {})[coordinates] = summary["overall"]["speedup"]
    all_grids = [Grid(*key, of_key) for key, of_key in cells.items()]
    return [grid for grid in all_grids if len(grid.rows) > 1 and len(grid.columns) > 1]


# -- all of them together


def summary_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """One row per run and task, and one with task "overall": the numbers of summary.json, flat.

    Numbers of a method's own are left out. Verdict counts stand under their names (exact,
    tie, violation), numbers of the baseline under `baseline_<name>`, parameters of the method as one text in
    `settings`.
    """
    rows = []
    for run in runs:
        summary = run.summary
        nested = ("overall", "tasks", "equivalence", "baseline", "settings", "task")
        head = {"run": run.name} | {k: v for k, v in summary.items() if k not in nested}
        head["settings"] = ", ".join(as_text(summary["settings"]))
        head["engine"] = (summary.get("engine") or {}).get("name", OWN)
        baseline = {f"baseline_{k}": v for k, v in summary["baseline"].items() if k != "equivalence"}
        for task, numbers in [*summary["tasks"].items(), ("overall", summary["overall"])]:
            flat = {k: v for k, v in numbers.items() if k not in NESTED} | numbers["equivalence"]
            rows.append(head | {"task": task} | flat | baseline)
    return pd.DataFrame(rows)


def not_comparable(runs: Iterable[Run]) -> list[str]:
    """One line for all runs that should not be set beside the first for the same reasons."""
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
    means: dict[str, object] = {"engine.version": (summary.get("engine") or {}).get("version")}
    if "kernels" in summary:
        ours = "our own, on AMX" if summary.get("tiles") else "our own"
        means["kernels"] = f"torch's ({reason})" if (reason := summary["kernels"]) else ours
    if str(summary.get("device")).startswith("cuda"):  # one of several in a machine
        means["machine.processor"] = summary.get("processor")
    if "compiled" in summary:
        means["compiled"] = summary["compiled"]
    if summary.get("temperature") or summary.get("weights") == "random":
        means["seed"] = summary.get("seed")
    return means


def named(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def differing_by_pair(runs: Iterable[Run]) -> list[str]:
    """As `not_comparable`, among the runs of one pair, batch size and engine: that others differ is no surprise."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        engine = (run.summary.get("engine") or {}).get("name")
        groups.setdefault((run.summary["pair"], run.summary["batch_size"], engine), []).append(run)
    return [line for alike in groups.values() for line in not_comparable(alike)]
