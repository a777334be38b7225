"""Fixtures of the tests of methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.decoding import random_pair
from tests.support.methods import saved_adapter


@pytest.fixture(scope="session")
def adapter(tmp_path_factory) -> Callable[[str], str]:
    """The folder of an adapter for the random pair of an architecture, made when it is first asked for."""
    return cache(lambda arch: saved_adapter(random_pair(arch), tmp_path_factory.mktemp(arch)))
