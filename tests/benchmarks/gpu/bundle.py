"""Fetches the wheels that a machine with torch and transformers alone lacks: `make gpu-bundle`, with a network.

They are what pyproject.toml names, and what that needs, at the versions of constraints.txt. There:
`pip install --no-index --no-deps --find-links build/gpu-bundle build/gpu-bundle/*.whl`. The check itself needs none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specbench import ROOT

THERE = frozenset({"torch", "transformers"})
# Any of these fits a machine with glibc 2.28 or newer; pip matches them literally.
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def needed(there: Collection[str] = THERE) -> dict[str, str]:
    """The packages that this project needs beside those that are there, with their versions, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, found = list(_names(project["dependencies"])), set()
    while waiting:
        name = waiting.pop()
        if name in found or name in there:
            continue
        found.add(name)
        waiting += _names(importlib.metadata.requires(name) or [])
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    return {name: versions[name] for name in sorted(found)}


def _names(requirements: Collection[str]) -> Iterator[str]:
    """The packages of requirements that hold here, without extras."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def have(file: Path) -> set[str]:
    """The packages of a `pip list` or `pip freeze`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(re.split(r"[\s=@]", line.strip())[0]) for line in lines if line.strip()}


def fetch(name: str, version: str, python: str, out: Path) -> None:
    """Downloads a wheel; one that there is only the source of is built."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    wheel = ["download", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    wanted = [f"{name}=={version}", "--dest", str(out)]
    if subprocess.run([*command, *wheel, *wanted], check=False, capture_output=True).returncode:
        subprocess.run([*command, "wheel", "--no-deps", wanted[0], "--wheel-dir", str(out)], check=True)


def main(arguments: list[str] | None = None) -> int:
    """Lists the wheels, and fetches them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu.bundle", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--have", type=Path, help="a `pip list` of the machine: what it has is left out")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument("--list", action="store_true", help="fetch nothing")
    options = parser.parse_args(arguments)
    there = THERE | (have(options.have) if options.have else set())
    for name, version in needed(there).items():
        print(f"{name}=={version}", flush=True)
        if not options.list:
            options.out.mkdir(parents=True, exist_ok=True)
            fetch(name, version, options.python, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
