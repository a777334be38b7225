"""Run folders as reports see them: the finished ones, what to call each, and why others are left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from specbench.errors import UserError
from specbench.measure import metrics, provenance, store

NESTED = ("equivalence", "exit_shares", "overlap")
KEYS = ("method", "settings", "pair", "batch_size", "overall", "tasks", "equivalence", "baseline")


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the content of its summary.json."""

    folder: Path
    summary: dict

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def provenance(self) -> dict | None:
        """What provenance.json holds; None where it is missing or damaged."""
        try:
            return store.read_json(self.folder / store.PROVENANCE)
        except (OSError, ValueError):
            return None

    @cached_property
    def records(self) -> list[dict]:
        """Every question of the journal. Raises UserError when it is damaged."""
        return store.read_records(self.folder)


@dataclass(frozen=True)
class LeftOut:
    """A run folder that no number is taken from, and why."""

    folder: Path
    reason: str


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], list[LeftOut]]:
    """The finished runs among the paths, and those that are left out. A path may also be a folder of run folders.

    Raises UserError for a path that is not there.
    """
    runs, left_out = [], []
    for folder in _run_folders(paths):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            left_out.append(LeftOut(folder, str(error)))
    return runs, left_out


def finished_runs(paths: Iterable[Path]) -> tuple[list[Run], list[LeftOut]]:
    """As `read_runs`. Raises UserError when no run among them is finished."""
    paths = list(paths)
    runs, left_out = read_runs(paths)
    if not runs:
        why = f" ({left_out[-1].folder.name}: {left_out[-1].reason})" if left_out else ""
        raise UserError(
            f"no finished run in {', '.join(map(str, paths))}{why}: "
            f"a run folder holds {store.SUMMARY} once it is complete"
        )
    return runs, left_out


def read_run(folder: Path) -> Run:
    """A finished run. Raises UserError for one that is unfinished, damaged, or written by another version."""
    path = folder / store.SUMMARY
    try:
        summary = store.read_json(path)
    except FileNotFoundError:
        raise UserError("unfinished: the command that began it goes on with it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"damaged: {path.name} cannot be read ({error})") from error
    if not isinstance(summary, dict) or "schema" not in summary:
        raise UserError(f"damaged: {path.name} is no summary")
    if summary["schema"] != metrics.SCHEMA:
        raise UserError(f"{path.name} has schema {summary['schema']}; this version reads {metrics.SCHEMA}")
    lacking = [key for key in KEYS if summary.get(key) is None]
    if lacking:
        raise UserError(f"damaged: {path.name} lacks {', '.join(lacking)}")
    return Run(folder, summary)


def _run_folders(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}")
        if _is_run(path):
            yield path
        else:
            yield from (folder for folder in sorted(path.iterdir()) if folder.is_dir() and _is_run(folder))


def _is_run(folder: Path) -> bool:
    return (folder / store.SUMMARY).exists() or (folder / store.CODE).exists()


# -- names


def method_label(summary: Mapping) -> str:
    """The method, and what drafts for it where that is another choice."""
    drafter = summary["drafter"]
    return summary["method"] if drafter in (None, "none") else f"{summary['method']} + {drafter}"


def as_text(settings: Mapping) -> list[str]:
    """Each setting as it stands on the command line."""
    return [f"{name}={value}" for name, value in settings.items()]


def varied_settings(summaries: Iterable[Mapping]) -> list[dict]:
    """For each summary the settings that were varied for its method: in which two of its runs on one pair differ."""
    summaries = list(summaries)
    first: dict[tuple[str, str], dict] = {}
    varied: dict[str, set] = {}
    for summary in summaries:
        settings, method = summary["settings"], summary["method"]
        base = first.setdefault((method, summary["pair"]), settings)
        differing = {k for k in base.keys() | settings.keys() if base.get(k) != settings.get(k)}
        varied.setdefault(method, set()).update(differing)
    return [{k: v for k, v in s["settings"].items() if k in varied[s["method"]]} for s in summaries]


def labels(summaries: Iterable[Mapping]) -> list[str]:
    """A short name for each: the method, the settings that were varied, and what else the runs differ in."""
    summaries = list(summaries)
    names = []
    several = {
        key: len({s[key] for s in summaries}) > 1 for key in ("pair", "batch_size", "data", "temperature")
    }
    for summary, varied in zip(summaries, varied_settings(summaries)):
        parts = [method_label(summary), *as_text(varied)]
        parts += [summary["pair"]] if several["pair"] else []
        parts += [f"batch {summary['batch_size']}"] if several["batch_size"] and summary["drafter"] else []
        parts += [summary["data"]] if several["data"] else []
        parts += [f"T={summary['temperature']:g}"] if several["temperature"] else []
        names.append(", ".join(parts))
    return names


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
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def columns(self) -> list:
        return list(dict.fromkeys(column for _, column in self.cells))


def grids(summaries: Iterable[Mapping]) -> list[Grid]:
    """A grid for each method and pair of whose settings just two were varied, and each of these more than once. A cell
    that was run several times stands with its last run."""
    summaries = list(summaries)
    cells: dict[tuple, dict[tuple, float | None]] = {}
    for summary, varied in zip(summaries, varied_settings(summaries)):
        if len(varied) == 2:
            key = (method_label(summary), summary["pair"], *varied)
            cells.setdefault(key, {})[tuple(varied.values())] = summary["overall"]["speedup"]
    found = [Grid(*key, of_key) for key, of_key in cells.items()]
    return [grid for grid in found if len(grid.rows) > 1 and len(grid.columns) > 1]


# -- all of them together


def summary_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """One row per run and task, and one with task "overall": the numbers of summary.json, flat.

    Exit shares and what drafting beside the target gained are left out. Verdict counts stand under their names (exact,
    tie, violation), numbers of the baseline under `baseline_<name>`, parameters of the method as one text in
    `settings`.
    """
    rows = []
    for run in runs:
        summary = run.summary
        nested = ("overall", "tasks", "equivalence", "baseline", "settings", "task")
        head = {"run": run.name} | {k: v for k, v in summary.items() if k not in nested}
        head["settings"] = ", ".join(as_text(summary["settings"]))
        baseline = {f"baseline_{k}": v for k, v in summary["baseline"].items() if k != "equivalence"}
        for task, numbers in [*summary["tasks"].items(), ("overall", summary["overall"])]:
            flat = {k: v for k, v in numbers.items() if k not in NESTED} | numbers["equivalence"]
            rows.append(head | {"task": task} | flat | baseline)
    return pd.DataFrame(rows)


def not_comparable(runs: Iterable[Run]) -> list[str]:
    """One line for all runs that should not be set beside the first for the same reasons."""
    found: dict[str, list[str]] = {}
    first = None
    for run in runs:
        if run.provenance is None:
            found.setdefault(f"there is no {store.PROVENANCE} that can be read", []).append(run.name)
            continue
        first = first or run
        reasons = provenance.differences(first.provenance, run.provenance)
        if reasons:
            found.setdefault("; ".join(reasons), []).append(run.name)
    name = "the others" if first is None else first.name
    return [
        f"not comparable with {name}: {names[0]}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        + f" ({reasons})"
        for reasons, names in found.items()
    ]


def differing_by_pair(runs: Iterable[Run]) -> list[str]:
    """As `not_comparable`, among the runs of one pair and batch size: that others differ is no surprise."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.summary["pair"], run.summary["batch_size"]), []).append(run)
    return [line for alike in groups.values() for line in not_comparable(alike)]
