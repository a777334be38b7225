"""Faults that the tests must find: `python -m tests.faults [NAME ...] [--jobs 2]`.

Each fault is one replacement in one file, planted in a copy of the project. The tests that should find it run first,
whatever the turn, then the fast ones, and the table says which test turned red. Exit code: 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from specbench import ROOT
from tests.faults import FAULTS
from tests.faults.fault import Fault, planted

# The tests of `make test` and of `make test-fast`.
EVERY, FAST = re.findall(r"^(?:EVERY|FAST) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
FAST = FAST.replace("$(EVERY)", EVERY).replace(" and not longer", "")  # all fast ones
SECONDS = 900.0  # for the tests of one fault: a fault may make them wait for ever
ENDLESS = f"(the tests did not end within {SECONDS:g} s)"
NONE_CHOSEN = 5  # pytest's exit code where no test has its turn


def copied(to: Path) -> None:
    """Copies the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def found_by(fault: Fault, most: int = 3) -> list[str]:
    """The tests that turn red with a fault, the first few of them; empty where none does."""
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        planted(fault, Path(folder))
        # Those of this turn, then all of them: most faults are found by a few.
        for turn, chosen in (
            ("0", [*fault.tests, "-m", EVERY]),
            ("all", [*fault.tests, "-m", EVERY]),
            ("0", ["-m", FAST]),
        ):
            red = failed(Path(folder), [*chosen, f"--maxfail={most}"], turn)
            if red := red and without_those_of_a_clean_copy(red, chosen, turn):
                return red
    return []


def without_those_of_a_clean_copy(red: list[str], chosen: list[str], turn: str) -> list[str]:
    """The tests of some that turned red, or did not end, which are green where no fault was planted.

    Args:
        red: as `failed` gives them.
        chosen: what pytest was told.
        turn: as of `failed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        if red == [ENDLESS]:
            return red if ENDLESS not in failed(Path(folder), chosen, turn) else []
        # Whole functions: a case may have a name with spaces.
        functions = {test: test.partition("[")[0] for test in red if "::" in test}
        always = {
            function
            for function in {*functions.values()}
            if failed(Path(folder), [function, "-m", EVERY], "all")
        }
        return [test for test in red if functions.get(test) not in always]


def failed(root: Path, arguments: list[str], turn: str) -> list[str]:
    """The ids of the tests that fail in a copy, of those whose `turn` it is; one line where the run hung.

    Raises RuntimeError where pytest could not run them: that would pass for a fault that was found.
    """
    # Not the test of this list: it misses the text that the fault has replaced, whatever the fault does.
    ignored = "--ignore=tests/test_faults.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", ignored, *arguments]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "SPECBENCH_TURN": turn}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return [ENDLESS]
    found = re.findall(r"^(?:FAILED|ERROR) (\S+::\S+)", done.stdout, re.MULTILINE)
    uncollected = re.search(
        r"^ERROR [^\s:]+( |$)", done.stdout, re.MULTILINE
    )  # a file that cannot be imported
    if uncollected or (not found and done.returncode not in (0, NONE_CHOSEN)):
        raise RuntimeError(
            f"pytest {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-2000:]}"
        )
    return found


def main() -> int:
    """Does what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="of faults; all without any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at once (%(default)s)")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if not given.names or fault.name in given.names]
    missed = 0
    print("| area | fault | found by |\n| --- | --- | --- |")
    with ThreadPoolExecutor(given.jobs) as pool:
        results = tqdm(pool.map(found_by, chosen), total=len(chosen), unit="fault")
        for fault, red in zip(chosen, results):
            tests = ", ".join(f"`{one}`" for one in red) or "**not found**"
            print(f"| {fault.area} | {fault.name} | {tests} |", flush=True)
            missed += not red
    print(f"\n{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)
