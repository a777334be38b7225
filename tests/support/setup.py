"""The set-up of every test, which `tests/conftest.py` imports: what is known of the machine, and parsed, once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache, partial

import hypothesis
import pytest
import torch
import yaml

from specbench.decoding.cpu import compiled_layers, native
from specbench.measure.machine import bandwidth, provenance, speed
from specbench.measure.records import run_folder
from specbench.measure.records.source import source_sha256
from specbench.system.files import make_folder
from specbench.system.paths import cache_folder
from tests.support.synthetic import QUIET

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
        of_gpu = partial(bandwidth.buffer_bytes, "cuda")
        patch.setattr(bandwidth, "buffer_bytes", lambda kind: of_gpu() if kind == "cuda" else 2**20)
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
