"""A build of many steps: each is a process of its own with a log, and is left out where its result is there already."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from tqdm import tqdm

from specbench.system.errors import UserError
from specbench.system.files import read_json, write_json

# Steps are processes forked from one that has imported what takes seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["methods.common.training", "transformers.models.llama.modeling_llama"])
POLL_SECONDS = 0.1  # between checks that terminated steps have ended


@dataclass(frozen=True)
class Step:
    """A step of the build.

    Attributes:
        name: for the progress bar.
        minutes: duration times number of cores.
        result: the file whose presence means that it is done; the command that made it is stored beside it.
        command: module and arguments, or a function that is called in this process.
    """

    name: str
    minutes: float
    result: Path
    command: tuple[str, ...] | Callable[[], None]

    @property
    def made_by(self) -> Path:
        """The file with the command that made the result."""
        return self.result.with_name(f"{self.result.stem}.command.json")


def is_done(step: Step) -> bool:
    """Whether the result of a step exists. Raises UserError if another command made it."""
    if not step.result.exists():
        return False
    if callable(step.command) or not step.made_by.exists():  # older builds lack it
        return True
    then, now = read_json(step.made_by)["command"], step.command
    before, after = (
        " ".join(word for word in one if word not in other) for one, other in ((then, now), (now, then))
    )
    if before or after:
        raise UserError(
            f"{step.name} is there, made with '{before}', not '{after}': give the same settings, or delete "
            f"{step.result} and what was made from it"
        )
    return True


def _as_a_program(command: Sequence[str], log: Path, threads: int) -> None:
    """Calls the `main` of a module in this process, with arguments and with all output in a log."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(threads)
    module, *arguments = command
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


def _end_with_parent() -> None:
    """Ends this process when the build is gone; the fork server, its parent process, stays."""
    build = multiprocessing.parent_process()
    if build is not None:
        build.join()
        os._exit(1)


def run(step: Step, logs: Path, threads: int, running: dict[str, BaseProcess]) -> None:
    """Does one step, with its output in a log.

    Args:
        step: what is done.
        logs: folder of the logs.
        threads: of torch.
        running: holds the process of each step while it runs, by the step's name.

    Raises:
        SystemExit: it failed; the message has the log's last line.
    """
    if callable(step.command):
        step.command()
        return
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{step.name.replace(', ', '_').replace(' ', '_')}.log"
    process = CONTEXT.Process(target=_as_a_program, args=(step.command, path, threads))
    process.start()
    running[step.name] = process
    process.join()
    del running[step.name]
    if process.exitcode:
        *_, last = ["nothing was printed", *path.read_text(encoding="utf-8").strip().splitlines()]
        raise SystemExit(f"{step.name} failed ({path}): {last}")
    if step.result.suffix == ".done":
        step.result.touch()
    if not step.result.exists():
        raise SystemExit(f"{step.name} left no {step.result} ({path}): does its module run as a program?")
    write_json(step.made_by, {"command": list(step.command)})


def run_all(groups: list[list[Step]], logs: Path, cores: int, label: str) -> None:
    """Runs every step that is left: the only step of a group on all cores, others on one core each.

    If this process is interrupted, it terminates the running steps.

    Args:
        groups: steps; steps of a group are independent, and need all earlier groups.
        logs: folder of a log for each step.
        cores: steps that run at a time.
        label: of the progress bar.

    Raises:
        UserError: a result was made by another command.
        SystemExit: a step failed; running steps finish first, and no new one starts.
    """
    remaining = [[step for step in group if not is_done(step)] for group in groups]
    minutes = sum(step.minutes for group in remaining for step in group)
    running: dict[str, BaseProcess] = {}
    with (
        tqdm(total=minutes, desc=label, bar_format="{desc} {bar} {n:.0f} of {total:.0f} core minutes") as bar,
        ThreadPoolExecutor(cores) as pool,
    ):
        for all_steps, group in zip(groups, remaining, strict=True):
            # The last one left of several also has one: it continues as it began.
            threads = cores if len(all_steps) == 1 else 1
            steps = {pool.submit(run, step, logs, threads, running): step for step in group}
            try:
                for future in as_completed(steps):
                    future.result()
                    bar.write(f"{steps[future].name}: done")
                    bar.update(steps[future].minutes)
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                while not isinstance(error, SystemExit) and not all(future.done() for future in steps):
                    for process in [*running.values()]:  # one may start only now
                        process.terminate()
                    time.sleep(POLL_SECONDS)
                raise
