"""A build of many steps: each is a process of its own with a log, and is left out where its result is there already."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# Steps are processes forked from one that has imported what takes seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["methods.common.training", "transformers.models.llama.modeling_llama"])


@dataclass(frozen=True)
class Step:
    """A step of the build.

    Attributes:
        name: for the progress bar.
        minutes: that it takes, times the cores that it takes.
        result: the file whose presence means that it is done.
        command: module and arguments; or what is called in this very process.
    """

    name: str
    minutes: float
    result: Path
    command: tuple[str, ...] | Callable[[], None]


def _as_a_program(command: Sequence[str], log: Path, threads: int) -> None:
    """Runs a module with arguments as `python -m` does, in this process, with all output in a log."""
    with log.open("a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(threads)
    module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(step: Step, logs: Path, threads: int) -> None:
    """Does one step, with its output in a log. Raises SystemExit with the log's last line where it fails."""
    if callable(step.command):
        step.command()
        return
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{step.name.replace(', ', '_').replace(' ', '_')}.log"
    process = CONTEXT.Process(target=_as_a_program, args=(step.command, path, threads))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(
            f"{step.name} failed ({path}): {path.read_text(encoding='utf-8').strip().splitlines()[-1]}"
        )
    if step.result.suffix == ".done":
        step.result.touch()


def run_all(groups: list[list[Step]], logs: Path, cores: int, label: str) -> None:
    """Does every step that is left: one that is alone on all cores, several on a core each.

    Args:
        groups: steps; those of one group do not need each other, and need all of the groups before.
        logs: folder of a log for each step.
        cores: steps that run at a time.
        label: of the progress bar.

    Raises:
        SystemExit: a step failed; those that run are ended first, none is begun.
    """
    remaining = [[step for step in group if not step.result.exists()] for group in groups]
    minutes = sum(step.minutes for group in remaining for step in group)
    with (
        tqdm(total=minutes, desc=label, bar_format="{desc} {bar} {n:.0f} of {total:.0f} core minutes") as bar,
        ThreadPoolExecutor(cores) as pool,
    ):
        for all_steps, group in zip(groups, remaining, strict=True):
            # One of several that is left alone has one, too: it continues as it began.
            threads = cores if len(all_steps) == 1 else 1
            running = {pool.submit(run, step, logs, threads): step for step in group}
            try:
                for future in as_completed(running):
                    future.result()
                    bar.write(f"{running[future].name}: done")
                    bar.update(running[future].minutes)
            except SystemExit:
                pool.shutdown(cancel_futures=True)
                raise
