"""Where files are that the configuration does not name."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench.system.errors import UserError
from specbench.system.paths import cache_folder


def test_the_cache_of_a_user_without_a_home_folder(monkeypatch):
    """As in a container that runs as a number that its system does not know."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SPECBENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(UserError, match="no home folder for the cache: set SPECBENCH_CACHE=FOLDER"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/specbench")
    monkeypatch.setenv("SPECBENCH_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
