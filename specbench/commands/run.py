"""Entry point: `python -m specbench run key=value ...`, with `-m` for a sweep.

Hydra composes the configuration, all that needs no weights is checked, and each job is measured in a process
of its own; `hydra/launcher=` says on which machine those of a sweep are. Exit code: 0 measured; 1 a run or some of
its questions failed, or an answer is a violation; 2 the command asks for what is not there or cannot work; 130 or
143 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from specbench.commands.log import track
from specbench.commands.sweep import (
    LEFT_OUT,
    OK,
    RUNNING,
    WAITING,
    Executor,
    Job,
    open_sweep,
    print_failures,
    runs_root,
    threads_of_first,
)
from specbench.config.checks import check
from specbench.config.compose import with_hydra
from specbench.config.overrides import check_no_run_dir
from specbench.measure.records import run_folder as store
from specbench.system.errors import LackingError, UserError, one_line_errors, print_error
from specbench.system.processes import end_with_parent, heeding_sigterm

if TYPE_CHECKING:
    from omegaconf import DictConfig


# Modules that read run folders need pandas: they are imported late, so that bad input is reported without delay.


# -- jobs


def run(jobs: list[Job], executor: Executor, logs: Path, changed: Callable[[], None] = lambda: None) -> None:
    """Checks all jobs, then measures them; a failure does not affect the other jobs.

    Args:
        jobs: The outcome of each is stored in it.
        executor: Measures run folders, on this machine or another.
        logs: A folder for them.
        changed: Called whenever something happened to a job.
    """
    for job in jobs:
        with report_user_error(job):
            check(job.cfg)
            resume_state(job)
    changed()
    by_folder: dict[Path, Job] = {}

    def folders() -> Iterator[Path]:
        for job in jobs:
            if job.state != WAITING:
                continue
            with report_user_error(job):
                if job.cfg.threads is None and not store.is_begun(job.run_dir):
                    job.cfg.threads = threads_of_first(job, jobs)
                job.run_dir = store.find_or_create(job.cfg, by_folder)
                job.state = RUNNING
                if store.is_complete(job.run_dir):  # possible only with `run_dir`
                    print(f"already measured: {job.run_dir}", flush=True)
            changed()
            if job.state == RUNNING:
                by_folder[job.run_dir] = job
                yield job.run_dir

    with closing(executor(folders(), logs)) as measured:  # closed at once even if this process is stopped
        for run_dir, code, reason in measured:
            end(by_folder[run_dir], code, reason)
            changed()


@contextmanager
def report_user_error(job: Job) -> Iterator[None]:
    """Turns a UserError into one line and the failure of this job only, or into the reason to leave the job out."""
    try:
        yield
    except UserError as error:
        if isinstance(error, LackingError) and job.cfg.get("leave_out"):
            print(f"left out: {error}", file=sys.stderr)
            job.state, job.code, job.reason = LEFT_OUT, 0, str(error)
        else:
            print_error(error)
            job.ended(2, str(error))


def resume_state(job: Job) -> None:
    """Keeps a job that an earlier process of the sweep has measured; any other is set to waiting."""
    if job.run_dir is None or not store.is_measured(job.run_dir, job.cfg):
        if job.state == OK and job.run_dir is not None and store.is_complete(job.run_dir):
            changed = store.changed_since(job.run_dir, job.cfg)
            if changed:
                print(f"measured again ({'; '.join(changed)}): {job.run_dir}", flush=True)
        job.state = WAITING
    elif job.state == OK:
        print(f"already measured: {job.run_dir}", flush=True)
        job.ended(0)
        certify(job)
    else:  # measured on another machine after the process that requested it had ended
        end(job, 0)


def end(job: Job, code: int, reason: str | None = None) -> None:
    """Prints a job's table and the path of its run folder, and tracks it."""
    job.ended(code, reason)
    if job.run_dir is None:
        return
    if code == 2 and not (job.run_dir / store.LOG).exists():
        # The runner has already printed here, in one line, what the user must correct.
        if store.discard_unused(job.run_dir):  # the corrected command may have the same `run_dir`
            job.run_dir = None
        return
    if store.is_complete(job.run_dir):
        from specbench.report import tables
        from specbench.report.runs import read_run

        tables.print_run(read_run(job.run_dir))
        track(job.run_dir, job.cfg.tracker)
        certify(job)
    if job.code != 0:
        print(f"error: {job.reason}; see {job.run_dir}", file=sys.stderr)
    print(job.run_dir, flush=True)


def certify(job: Job) -> None:
    """Sets the exit code of a measured job to 1 if answers are violations; the job is not measured again."""
    from specbench.report import verdicts
    from specbench.report.runs import read_run

    if job.code == 0 and job.run_dir is not None and verdicts.violates(read_run(job.run_dir).summary):
        job.code, job.reason = 1, "answers are violations"


def run_locally(run_dirs: Iterable[Path], _logs: Path) -> Generator[tuple[Path, int, str | None], None, None]:
    """Measures one run folder after the other on this machine: a device that is timed is not shared."""
    for run_dir in run_dirs:
        yield run_dir, measure(run_dir), None


class Command:
    """Hydra's callback: gets the configuration of a single run or, through a launcher, all jobs of a sweep."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    @one_line_errors(stops=False)  # inside Hydra, which would print more lines
    def __call__(self, cfg: DictConfig) -> None:
        """Measures a single run."""
        self.jobs.append(Job([], cfg))
        run(self.jobs[-1:], run_locally, runs_root(cfg))

    def sweep(self, jobs: list[Job], executor: Executor) -> None:
        """Measures all jobs of a sweep; resumes an unfinished one."""
        if not jobs:
            raise UserError("the sweep has no job: no choice fits its glob, or its range is empty")
        for job in jobs:
            check_no_run_dir(job.cfg.get("run_dir"), "job of a sweep")  # a preset may be a sweep, too
        self.jobs += jobs
        with open_sweep(jobs) as sweep:
            for job in jobs:
                if "group" in (job.cfg.get("tracker") or {}) and job.cfg.tracker.group is None:
                    job.cfg.tracker.group = sweep.folder.name
            run(jobs, executor, sweep.folder, sweep.save)

    def __getstate__(self) -> NoReturn:
        raise UserError(
            "this launcher loses the jobs' outcomes: choose another, such as hydra/launcher=local"
        )

    def report(self) -> int:
        """Prints an overview of several jobs and which failed; returns the highest exit code."""
        finished = [job.run_dir for job in self.jobs if job.run_dir and store.is_complete(job.run_dir)]
        if len(finished) > 1:
            from specbench.report import tables
            from specbench.report.runs import read_run

            tables.print_overview([read_run(run_dir) for run_dir in finished])
        if len(self.jobs) > 1:
            print_failures(self.jobs)
            if finished:
                print(finished[-1])  # the last line is a run folder, of a sweep the last one
        return max((job.code or 0 for job in self.jobs), default=0)


# -- measuring


def queue(run_dir: Path) -> None:
    """Makes the log in the folder of a job that waits for another machine: a failing local command then leaves it."""
    (run_dir / store.LOG).touch()


def measure(run_dir: Path, logged: bool = False) -> int:
    """Measures a run folder in child processes that do not outlive this one; returns the exit code of the last.

    logged: whether the child's output goes to `store.LOG` in the run folder instead of this process's own output.
    """
    (run_dir / store.FAILURE).unlink(missing_ok=True)
    code = store.EXIT_CONTINUE
    with heeding_sigterm(), open(run_dir / store.LOG, "ab") if logged else nullcontext() as log:
        while code == store.EXIT_CONTINUE:
            code = _child([sys.executable, "-m", "specbench.measure.runner", str(run_dir)], log)
    if code < 0:
        store.note_failure(run_dir, f"killed by {signal.Signals(-code).name}")
    return code if code >= 0 else 1


def _child(command: list[str], log: IO[bytes] | None) -> int:
    """Runs a command until it or this process ends; returns its exit code."""
    child = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


# -- the command


@one_line_errors()
def main() -> int:
    """Runs every job of the command line; returns the exit code, for a sweep the highest of its jobs."""
    command = Command()
    return with_hydra("bench", command, resumes=True) or command.report()


if __name__ == "__main__":
    sys.exit(main())
