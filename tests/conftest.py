"""Set-up of every test: no network but a test's own, reproducible draws, few threads. The tiers:

- fast (`make test-fast`): all that no marker below names; the heart of every part, in two to four minutes.
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

import copy
import gc
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from zlib import crc32

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client
os.environ["WANDB_MODE"] = "offline"
# Also of the processes that tests start: for models this small threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "SPECBENCH_COMPILE", "0"
)  # where a test is not about it: seconds for each kind of layer

import specbench  # noqa: F401, I001 - before torch, for how its threads wait
import hypothesis
import pytest
import torch
import yaml

from specbench.decoding.cpu import compiled_layers, native
from specbench.measure.machine import provenance
from specbench.measure.machine import speed
from specbench.measure.records import run_folder
from specbench.measure.records.source import source_sha256
from specbench.system.files import make_folder
from specbench.system.paths import cache_folder
from tests.support.synthetic import QUIET

TURN = os.environ.get("SPECBENCH_TURN", "0")
ALL = "all"  # as TURN: no test waits for its turn
SLOW, SHARE = ("slow", "process", "cluster", "browser", "model"), 12
USERS_CACHE = cache_folder()  # no test writes there but those of `model`, and what compiles the kernels

hypothesis.settings.register_profile("specbench", deadline=None, derandomize=True)
hypothesis.settings.load_profile("specbench")


_parsed: dict[tuple[str | bytes, str], object] = {}
_parse = yaml.load


def _load_yaml(stream, Loader):  # noqa: N803 - as in the package
    """As `yaml.load`; a text that was parsed before comes from memory.

    Hydra parses the files of conf/ again for every configuration, which takes half of its time.
    """
    if Loader.__module__.partition(".")[0] not in ("yaml", "omegaconf"):
        return _parse(stream, Loader)
    text = stream if isinstance(stream, str | bytes) else stream.read()
    key = (text, Loader.__qualname__)
    if key not in _parsed:
        if text is not stream:
            stream.seek(0)  # an error names the file
        _parsed[key] = _parse(stream, Loader)
    return copy.deepcopy(_parsed[key])


yaml.load = _load_yaml  # at once: tests are collected by what is in the files of conf/


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the further cases of `first_fast` and `one_in`, and skips what needs a GPU where there is none."""
    cases: Counter[str] = Counter()
    turns = TURN != ALL and not config.option.keyword
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("first_fast") and cases[function]:
            item.add_marker("slow")
        # Another start for each function: those of one case do not all have the same turn.
        number = crc32(function.encode()) + cases[function]
        if turns and (number - int(TURN)) % one_in(item):
            item.add_marker("nightly")
        cases[function] += 1
    if torch.cuda.is_available():
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


@pytest.fixture(autouse=True, scope="session")
def _known_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What every run finds out about this machine and its code anew: here from a small buffer, and once for all runs.

    Probes of its speed always find the same. The best of them, also those of processes that tests start, is kept in a
    folder of the tests' own.
    """
    with pytest.MonkeyPatch.context() as patch:
        cache_of_tests = tmp_path_factory.mktemp("cache")
        for folder in (native.KERNELS, compiled_layers.COMPILED):
            (cache_of_tests / folder).symlink_to(make_folder(USERS_CACHE / folder))
        if (USERS_CACHE / "engines").is_dir():  # environments, which tests use and do not make
            (cache_of_tests / "engines").symlink_to(USERS_CACHE / "engines")
        patch.setenv("SPECBENCH_CACHE", str(cache_of_tests))
        patch.setattr(speed, "probe", lambda device: dict(QUIET))
        of_gpu = partial(provenance.buffer_bytes, "cuda")
        patch.setattr(provenance, "buffer_bytes", lambda kind: of_gpu() if kind == "cuda" else 2**20)
        patch.setattr(provenance, "versions", cache(provenance.versions))
        once = cache(source_sha256)
        for module in (run_folder, provenance):
            patch.setattr(module, "source_sha256", once)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # for devices that there are not, torch notes each seed with the whole stack: milliseconds
        torch.default_generator.manual_seed(0)
