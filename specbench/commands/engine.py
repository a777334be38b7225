"""Installs another engine into an environment of its own: `specbench engine install NAME`."""

from __future__ import annotations

import sys

import yaml

from specbench import CONF
from specbench.engines.environments import make_environment
from specbench.system.errors import UserError, one_line_errors, suggest

USAGE = "usage: specbench engine install NAME"


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    if len(sys.argv) != 3 or sys.argv[1] != "install":
        raise UserError(USAGE)
    print(make_environment(sys.argv[2], content_of(sys.argv[2])))
    return 0


def content_of(name: str) -> dict:
    """What an engine's environment holds. Raises UserError for an engine that has none."""
    groups = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted((CONF / "engine").glob("*.yaml"))
    }
    installable = {key: group["install"] for key, group in groups.items() if "install" in group}
    if name not in installable:
        raise UserError(f"unknown engine '{name}': {suggest(name, installable)}")
    return installable[name]


if __name__ == "__main__":
    sys.exit(main())
