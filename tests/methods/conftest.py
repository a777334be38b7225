"""Fixtures of the tests of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from methods.common import initialisation
from tests.support.decoding import random_pair
from tests.support.methods import saved_adapter
from tests.support.training import training_workplace


@pytest.fixture(scope="session")
def adapter(tmp_path_factory) -> Callable[[str], str]:
    """The folder of an adapter for the random pair of an architecture, made when it is first asked for."""
    return cache(lambda arch: saved_adapter(random_pair(arch), tmp_path_factory.mktemp(arch)))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A small pair with a few conversations to train on."""
    return training_workplace(tmp_path_factory.mktemp("train"))


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _small_fits(monkeypatch):
    """A fit of a fresh part by least squares needs few places where the vocabulary is a toy's."""
    monkeypatch.setattr(initialisation, "FITTED_PLACES", 2000)
