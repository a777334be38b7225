"""Fixtures of the tests of the decoding core."""

from __future__ import annotations

from weakref import WeakSet

import pytest

from specbench.decoding.cpu import autotune as layouts
from specbench.decoding.cpu import packed_linear as linear


@pytest.fixture
def nothing_known(monkeypatch):
    """No weights and decisions of other tests; small matrices are measured, too."""
    monkeypatch.setattr(linear, "PACKED", WeakSet())
    monkeypatch.setattr(layouts, "PACKED", linear.PACKED)
    monkeypatch.setattr(layouts, "_FASTEST", {})
    monkeypatch.setattr(layouts, "LEAST", 0)
