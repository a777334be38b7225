"""Folders that are named after the second in which they are made."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from specbench.system import files


@pytest.fixture
def hurried(monkeypatch) -> None:
    """A second folder of one name takes the next second at once, instead of waiting for it."""
    ahead = 0.0

    def strftime(form: str) -> str:
        return time.strftime(form, time.localtime(time.time() + ahead))

    def sleep(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(files, "time", SimpleNamespace(strftime=strftime, sleep=sleep))
