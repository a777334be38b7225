"""Installs another engine into an environment of its own: `specbench engine install NAME`."""

from __future__ import annotations

import sys

from specbench.config.compose import compose_arguments
from specbench.engines.environments import make_environment
from specbench.system.errors import UserError, one_line_errors
from specbench.system.settings import plain

USAGE = "usage: specbench engine install NAME [engine.install.requirements=[...]]"


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    if len(sys.argv) < 3 or sys.argv[1] != "install":
        raise UserError(USAGE)
    _, _, name, *overrides = sys.argv
    try:
        print(make_environment(name, content_of(name, overrides)))
    except KeyboardInterrupt:
        print("stopped: the same command continues", file=sys.stderr)
        return 130
    return 0


def content_of(name: str, overrides: list[str] | None = None) -> dict:
    """The contents of an engine's environment under these overrides. Raises UserError if it has no environment."""
    engine = compose_arguments("bench", [f"engine={name}", *(overrides or [])]).engine
    if not engine or not engine.get("install"):
        raise UserError(f"engine {name} has no environment of its own: there is nothing to install")
    return plain(engine.install)


if __name__ == "__main__":
    sys.exit(main())
