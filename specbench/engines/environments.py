"""Separate environments for engines, whose requirements conflict with those of this project."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench.system.errors import UserError
from specbench.system.files import lock_folder, make_folder
from specbench.system.paths import cache_folder
from specbench.system.settings import check

COMPLETE = "installed"  # a file that marks an environment as complete
# Prints what a distribution requires, its extras included.
REQUIRES = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1]) or []))"
# Prints the distribution that has a module, with its version.
VERSION = (
    "import importlib.metadata as m, sys; d = m.packages_distributions()[sys.argv[1]][0]; "
    "print(f'{d}=={m.version(d)}')"
)


def check_install(install: Mapping) -> None:
    """Raises UserError if the contents of an environment are not lists: a text would be read as a list of letters."""
    check("engine.install.requirements", install.get("requirements"), list[str])
    check("engine.install.without", install.get("without"), list[str] | None)
    if not install["requirements"]:
        raise UserError("engine.install.requirements is empty: name what pip installs")


def environment(install: Mapping) -> Path:
    """The folder of an engine's environment: one for each content of `install` in `conf/engine/NAME.yaml`.

    Python version and kind of processor count, too: machines may share a home, and an update may replace Python.
    """
    content = dict(install), sys.version_info[:2], platform.machine()
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    return cache_folder() / "engines" / f"{_name(install['requirements'][-1])}-{digest}"


def is_complete(folder: Path) -> bool:
    """Whether an environment was made, and the Python that it was made with is still there."""
    return (folder / COMPLETE).exists() and (folder / "bin" / "python").exists()


def interpreter(name: str, install: Mapping) -> Path:
    """The Python of an engine's environment. Raises UserError if it was not installed."""
    folder = environment(install)
    if not is_complete(folder):
        named = ", ".join(install["requirements"])
        raise UserError(
            f"engine {name} ({named}) is not installed: run `specbench engine install {name}`, with the run's "
            "engine.install.* settings, if any"
        )
    return folder / "bin" / "python"


def program(name: str, install: Mapping, python: str | None, module: str) -> tuple[Path, str]:
    """The Python that runs an engine, and the engine with its version.

    Args:
        name: of the engine.
        install: as in `make_environment`.
        python: an interpreter that has the engine; None: that of its environment.
        module: of the engine, as one imports it.

    Raises:
        UserError: The engine is not installed, or the interpreter does not have it.
    """
    path = interpreter(name, install) if python is None else Path(python)
    try:
        return path, _version(path, module, python)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"engine {name}: {path} is not a Python interpreter with {module}") from error


@functools.cache
def _version(path: Path, module: str, python: str | None) -> str:
    """The distribution that has a module, with its version: cached, since a run's check and its engine both need it."""
    done = subprocess.run(
        [path, "-c", VERSION, module],
        env=os.environ | variables(python),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def variables(python: str | None) -> dict[str, str]:
    """Environment variables for an engine's interpreter, beside those of this process.

    Our own environments must not find packages outside, which pip would count as installed. An interpreter that is
    named with engine.python may need them.
    """
    return {"PYTHONPATH": "", "PYTHONHOME": ""} if python is None else {}


def make_environment(name: str, install: Mapping) -> Path:
    """Makes the environment of an engine unless it exists; an incomplete one is resumed.

    Args:
        name: of the engine.
        install: `requirements`, as pip takes them; `without`: packages that the last of them requires and that are left
            out.

    Returns:
        Its Python.

    Raises:
        UserError: `install` is malformed, Python has no pip for it, or pip cannot install what it requires.
    """
    check_install(install)
    folder = make_folder(environment(install))
    *first, last = install["requirements"]
    without = set(install.get("without") or ())
    with lock_folder(folder, "installed", wait=True):
        if not is_complete(folder):
            print(f"installing {', '.join([*first, last])} into {folder}", file=sys.stderr, flush=True)
            try:
                venv.create(folder, symlinks=os.name != "nt", with_pip=True)
            except subprocess.CalledProcessError as error:
                raise UserError(
                    f"cannot make an environment with pip for engine {name}: install python3-venv, or name an "
                    "interpreter that has it with engine.python"
                ) from error
            python = folder / "bin" / "python"
            _pip(name, python, first)
            _pip(name, python, [*(["--no-deps"] if without else []), last])
            if without:
                _pip(name, python, _requirements_of(name, python, last, without))
            (folder / COMPLETE).touch()
    return interpreter(name, install)


def _pip(name: str, python: Path, arguments: Sequence[str]) -> None:
    if not arguments:
        return
    _printed(name, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def _requirements_of(name: str, python: Path, requirement: str, without: set[str]) -> list[str]:
    """The requirements of an installed distribution, without those of its extras and those in `without`."""
    listed = json.loads(_printed(name, python, "-c", REQUIRES, _name(requirement)))
    return [one for one in listed if "extra ==" not in one and _name(one) not in without]


def _printed(name: str, python: Path, *arguments: str) -> str:
    """The output of a command of an engine's Python. Raises UserError with the last line of its errors."""
    done = subprocess.run(
        [str(python), *arguments],
        env=os.environ | variables(None),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise UserError(f"cannot install engine {name}: {lines[-1].strip()}")
    return done.stdout


def _name(requirement: str) -> str:
    """The distribution that a requirement is of."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
