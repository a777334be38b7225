"""The command line as a user runs it, and something small for it to measure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.commands import run as bench
from specbench.measure import runner
from specbench.measure.records.run_folder import EXIT_CONTINUE
from specbench.system.errors import UserError
from specbench.system.files import lock_file
from tests.support.models import save_pair

TIMEOUT = 300  # s


def start(cwd: Path, *arguments: str, **env: str) -> subprocess.Popen:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "specbench", "run", *arguments],
        cwd=cwd,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cli(cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    """The same, once it has ended."""
    process = start(cwd, *arguments, **env)
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def left_alone_while_another_writes(file: Path, write: Callable[[], object]) -> None:
    """Asserts that a file is not written where another process holds it."""
    with (
        lock_file(file),
        pytest.raises(UserError, match=rf"{re.escape(file.name)} is being written by another process"),
    ):
        write()
    assert not file.exists()


def exit_code(main: Callable[[], int]) -> int:
    """What a process would end with whose main function this is."""
    try:
        return main()
    except SystemExit as leave:
        return leave.code


def run_main(monkeypatch, capfd, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    for name in ("HYDRA_FULL_ERROR", "SPECBENCH_SCRATCH"):  # set by main
        monkeypatch.setenv(name, "")
    return exit_code(bench.main), *capfd.readouterr()


def measure_here(monkeypatch) -> None:
    """Has the jobs of `run_main` measured in this process: one of its own takes seconds to import what it needs."""

    def measure(run_dir: Path, logged: bool = False) -> int:
        monkeypatch.setattr(sys, "argv", ["runner", str(run_dir)])
        code = EXIT_CONTINUE
        while code == EXIT_CONTINUE:
            code = exit_code(runner.main)
        return code

    monkeypatch.setattr(bench, "measure", measure)


def wait_for(condition) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def small_pair_and_questions(folder: Path) -> list[str]:
    """Saves a small pair and three questions; returns the arguments that name them."""
    pair = save_pair(folder / "pair")
    lines = [{"question_id": i, "category": "qa", "turns": [f"What is {i}?"]} for i in (1, 2, 3)]
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        f"pair.target={pair.target}", f"pair.draft={pair.draft}", "pair.tokenizer=null", "pair.device=cpu",
        "pair.parts.kangaroo=null", "data.path=q.jsonl", "data.warmup=q.jsonl", "decoding.max_new_tokens=12",
        "generate=false", "remeasure=0",
    ]  # fmt: skip
