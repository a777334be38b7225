"""Where files lie: those that the project brings, and those that it keeps."""

from __future__ import annotations

import os
from pathlib import Path

from specbench import ROOT
from specbench.system.errors import UserError


def packaged(path: str | Path) -> Path:
    """A path from a configuration: `specbench/...` is inside this repository, any other is unchanged."""
    path = Path(path).expanduser()
    return ROOT / path if path.parts[:1] == ("specbench",) else path


def existing_file(path: str | Path, setting: str | None = None) -> Path:
    """The file that a configuration names. Raises UserError if it does not exist.

    A symbolic link is not followed: that in a cache of the hub has the file's name, what it points to has another.

    Args:
        path: as the configuration has it.
        setting: that names it, for the message.
    """
    file = packaged(path)
    if not file.is_file():
        raise UserError(f"{setting}: there is no file '{path}'" if setting else f"there is no file '{path}'")
    return file.absolute()


def cache_folder() -> Path:
    """This project's cache: $SPECBENCH_CACHE, or the folder specbench of $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("SPECBENCH_CACHE"):
        return Path(configured)
    if configured := os.environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "specbench"
    try:
        return Path.home() / ".cache" / "specbench"
    except RuntimeError as error:  # of a user that the system does not know, as in a container
        raise UserError("there is no home folder for the cache: set SPECBENCH_CACHE=FOLDER") from error
