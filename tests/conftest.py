"""Set-up of every test: no network but a test's own, reproducible draws, few threads. The tiers:

- fast: all that no marker below names; the heart of every part.
- `make test-fast`: of the fast ones those whose cases take less than a fifth of a second, in a minute.
- `longer`: the others, which `tests/longer.txt` lists (`tests/support/longer.py` writes it).
- `first_fast`: of its cases, the first is fast and the others are slow.
- `nightly` (`make test-nightly`): what tests a stored artefact, a compiler or a simulation, not a change.
- all markers below: of these tests every twelfth runs each time, and the others are nightly. $SPECBENCH_TURN, a number,
  says which: CI takes other ones each hour, so that all have their turn. SPECBENCH_TURN=all runs all of
  them, and so does `-k`, which asks for certain ones.
- `one_in(k)`: of its cases every k-th runs each time, where twelve are not few enough, or where the test is fast.
- `slow`: training, long statistics, further architectures, and what takes half a second where finer tests are fast.
- `process`, `cluster`, `browser`: start other processes; Ray, submitit or several processes that train; a browser.
- `model`: needs a real model, and is skipped where it was not fetched; SPECBENCH_MODELS=1 fetches it.
- `cuda`: needs a GPU and is skipped without one; `make test ARGS="-m cuda"` runs these alone.
- `make test`: all of them but `nightly`, in four to nine minutes.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from zlib import crc32

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client
os.environ["WANDB_MODE"] = "offline"
# Also of the processes that tests start: for models this small threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "SPECBENCH_COMPILE", "0"
)  # where a test is not about it: seconds for each kind of layer

import specbench  # noqa: F401, I001 - before torch, for how its threads wait
import pytest

TURN = os.environ.get("SPECBENCH_TURN", "0")
ALL = "all"  # as TURN: no test waits for its turn
LONGER = frozenset((Path(__file__).parent / "longer.txt").read_text(encoding="utf-8").split())
SLOW, SHARE = ("slow", "process", "cluster", "browser", "model"), 12


def pytest_configure(config: pytest.Config) -> None:
    """Imports the set-up of every test, except in the process that only hands them out: workers would wait for it."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.support.setup")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what takes longer, further cases of `first_fast` and `one_in`; skips what needs a GPU without one."""
    cases: Counter[str] = Counter()
    turns = TURN != ALL and not config.option.keyword
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in LONGER:
            item.add_marker("longer")
        if item.get_closest_marker("first_fast") and cases[function]:
            item.add_marker("slow")
        # Another start for each function: those of one case do not all have the same turn.
        number = crc32(function.encode()) + cases[function]
        if turns and (number - int(TURN)) % one_in(item):
            item.add_marker("nightly")
        cases[function] += 1
    from torch import cuda  # not above: the process that hands out the tests does without torch

    if cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def one_in(item: pytest.Item) -> int:
    """Of how many cases, or tests, of its kind one runs each time."""
    sampled = item.get_closest_marker("one_in")
    share = SHARE if any(item.get_closest_marker(name) for name in SLOW) else 1
    return max(share, sampled.args[0] if sampled else 1)


def pytest_collection_finish() -> None:
    """Takes what is imported out of the garbage collector's way: each full collection would walk through all of it."""
    gc.collect()
    gc.freeze()
