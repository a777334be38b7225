"""A sweep: its jobs, what became of each, and the folder that remembers it, <runs_root>/sweeps/<date>_<time>_<hash>/.

`sweep.json` is written anew whenever something happens to a job. So a sweep that was killed, or in which jobs failed,
goes on when it is given again: what is measured stays, the rest is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.config.overrides import overridden_key
from specbench.measure.records import run_folder as store
from specbench.measure.records.source import source_sha256
from specbench.system import settings as values
from specbench.system.files import lock_folder, new_folder, read_json, write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

SWEEPS, SWEEP = "sweeps", "sweep.json"
WAITING, RUNNING, OK, FAILED, LEFT_OUT = "waiting", "running", "ok", "failed", "left out"
ENDED_WELL = (OK, LEFT_OUT)
WHETHER = ("rerun", "leave_out")  # settings that say what to do again, not what to measure

# Measures run folders on this machine or another, each in its own process. Accepts the folders, which are created on
# iteration, and a folder for logs; yields each finished run folder with its exit code and, if the folder does not
# record it, the reason of the failure.
Executor = Callable[[Iterable[Path], Path], Generator[tuple[Path, int, str | None], None, None]]


@dataclass
class Job:
    """One configuration to measure, and what became of it."""

    overrides: list[str]  # of the command line, as Hydra gives them to this job
    cfg: DictConfig
    state: str = WAITING
    run_dir: Path | None = None
    code: int | None = None  # exit code, once it ended
    reason: str | None = None  # why it failed, in one line

    def ended(self, code: int, reason: str | None = None) -> None:
        """Notes how the job ended; a failure without a reason is looked up in its run folder."""
        if code != 0 and reason is None:
            reason = (self.run_dir and store.why_failed(self.run_dir)) or f"exit code {code}"
        self.state = FAILED if code else OK
        self.code, self.reason = code, reason


@dataclass
class Sweep:
    """All jobs of one command, and the folder that remembers them."""

    folder: Path
    source_sha256: str
    jobs: list[Job]

    def save(self) -> None:
        """Writes the current state of all jobs."""
        runs = self.folder.parents[1]
        write_json(
            self.folder / SWEEP,
            {
                "source_sha256": self.source_sha256,
                "jobs": [
                    {
                        "overrides": job.overrides,
                        "state": job.state,
                        "run_dir": _relative(job.run_dir, runs),
                        "code": job.code,
                        "reason": job.reason,
                        "threads": job.cfg.get("threads"),
                    }
                    for job in self.jobs
                ],
            },
        )

    def load(self) -> None:
        """Restores the jobs' states from an earlier process."""
        for job, saved in zip(self.jobs, read_json(self.folder / SWEEP)["jobs"]):
            job.state = saved["state"]
            if saved["run_dir"] is not None:
                job.run_dir = self.folder.parents[1] / saved["run_dir"]
            if saved.get("threads") is not None:
                job.cfg.threads = saved["threads"]


@contextmanager
def open_sweep(jobs: list[Job]) -> Iterator[Sweep]:
    """Locks the sweep of these jobs for this process: the last one if it can be resumed, or a new one.

    It can be resumed if the code is unchanged and a job of it is not measured, or, with `rerun: false`, even if all
    are: then nothing is left to do.

    Raises:
        UserError: another process holds the sweep, or `runs_root` is no text.
    """
    overrides, code = [_measured(job.overrides) for job in jobs], source_sha256()
    digest = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]
    root = runs_root(jobs[0].cfg) / SWEEPS
    last = max(root.glob(f"*_{digest}"), default=None)  # names begin with the date
    resumes = last is not None and _can_go_on(last, overrides, code, jobs[0].cfg.get("rerun", True))
    folder = last if last and resumes else new_folder(root, digest)
    with lock_folder(folder, "run"):
        sweep = Sweep(folder, code, jobs)
        if resumes:
            sweep.load()
        sweep.save()
        yield sweep


def threads_of_first(job: Job, jobs: Iterable[Job]) -> int | None:
    """The threads that the first measured job on the same target chose, with which runs can be compared; None: none.

    Jobs whose number was given, with others that choose it, have chosen none.
    """
    for other in jobs:
        run_dir = other.run_dir
        if (
            run_dir is None
            or not store.is_complete(run_dir)
            or "threads" in map(overridden_key, other.overrides)
        ):
            continue
        if _threads_for(other.cfg) == _threads_for(job.cfg):
            return chosen_threads(run_dir)
    return None


def _threads_for(cfg: DictConfig) -> list:
    """What the number of threads depends on: the target, not what drafts for it."""
    pair = {key: value for key, value in cfg.pair.items() if key != "parts" and not key.startswith("draft")}
    return [pair, cfg.engine, cfg.batch_size]


def chosen_threads(run_dir: Path) -> int | None:
    """The number of threads that a run was measured with; None on a GPU."""
    from specbench.report.runs import read_run  # late: pandas takes a second

    summary = read_run(run_dir).summary
    return summary["threads"] if summary["device"] == "cpu" else None


def runs_root(cfg: DictConfig) -> Path:
    """The root of run folders in an unchecked configuration. Raises UserError if it is not text."""
    values.check("runs_root", cfg.runs_root, str)
    return Path(cfg.runs_root)


def print_failures(jobs: list[Job]) -> None:
    """Prints each job that failed or whose answers are wrong, by the overrides that not all jobs share, and why."""
    failed = [job for job in jobs if job.state not in ENDED_WELL]
    wrong = [job for job in jobs if job.state in ENDED_WELL and job.code]
    if not failed and not wrong:
        return
    from rich.text import Text

    from specbench.report import cells  # late, as in specbench.commands.run

    out = cells.console()
    for some, what in ((failed, "failed; the same command runs them again"), (wrong, "have wrong answers")):
        if not some:
            continue
        out.print(Text(f"{len(some)} of {len(jobs)} jobs {what}:", style=cells.WRONG))
        for job in some:
            where = f" ({job.run_dir})" if job.run_dir else ""
            out.print(Text(f"  {label(job, jobs)}: {job.reason}{where}", style="red"), soft_wrap=True)


def label(job: Job, jobs: list[Job]) -> str:
    """The overrides that distinguish a job from the others: those that not all of them have."""
    distinct = [o for o in job.overrides if not all(o in other.overrides for other in jobs)]
    return " ".join(distinct or job.overrides)


def _can_go_on(folder: Path, overrides: list[list[str]], code: str, rerun: bool) -> bool:
    if not (folder / SWEEP).exists():  # killed before it was written
        return False
    saved = read_json(folder / SWEEP)
    same = (
        saved["source_sha256"] == code and [_measured(job["overrides"]) for job in saved["jobs"]] == overrides
    )
    return same and (not rerun or any(job["state"] not in ENDED_WELL for job in saved["jobs"]))


def _measured(overrides: list[str]) -> list[str]:
    """The overrides that determine what a job measures."""
    return [override for override in overrides if overridden_key(override) not in WHETHER]


def _relative(run_dir: Path | None, runs: Path) -> str | None:
    """A run folder's path relative to `runs`; absolute if it is elsewhere."""
    if run_dir is None:
        return None
    return str(run_dir.relative_to(runs) if run_dir.is_relative_to(runs) else run_dir.absolute())
