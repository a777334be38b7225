"""Who may import whom. Arrows point one way: methods import the harness, never the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from specbench import ROOT

# The rooms of the harness: each imports those in front of it, and no other.
ROOMS = ("system", "decoding", "models", "data", "config", "measure", "engines", "report", "tiny", "commands")


def imported(path: Path) -> frozenset[str]:
    """Every module that a file imports, anywhere in it; of `from a import b` both `a` and `a.b`."""
    return imported_by(path.read_text())


@cache  # several tests ask for the same files
def imported_by(text: str) -> frozenset[str]:
    """As `imported`, of the text of a file."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def files_behind(paths: list[Path]) -> Iterator[Path]:
    """The files and those of `tests` that they import, directly or not."""
    waiting, seen = list(paths), set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in imported(path):
            file = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("tests.") and file.is_file():
                waiting.append(file)


@pytest.mark.parametrize("package", ["tests/decoding", "specbench"])
def test_no_method_is_imported(package):
    """A broken method must not break the harness, nor the tests of the decoding core."""
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    for path in files_behind(paths):
        wrong = {name for name in imported(path) if name.split(".")[0] == "methods"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_an_import_is_seen_wherever_it_stands(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    from methods.sps import SpeculativeSampling\n    import methods.pld as p\n"
    )
    assert {name.split(".")[0] for name in imported(path)} == {"methods"}
    helper = ROOT / "tests" / "support" / "methods.py"
    path.write_text("from tests.support import methods\n")
    assert helper in set(files_behind([path]))


def graph() -> dict[str, frozenset[str]]:
    """The modules of the program that each of them imports, also for types alone."""
    paths = [path for package in ("specbench", "methods") for path in (ROOT / package).rglob("*.py")]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    return {name: imported(path) & names.keys() - {name} for name, path in names.items()}


def room(module: str) -> str | None:
    """None for `specbench` itself, `specbench.__main__` and methods."""
    found = [*module.split("."), ""][1]
    return found if module.startswith("specbench.") and found in ROOMS else None


def test_rooms_import_those_in_front_of_them():
    order = {name: i for i, name in enumerate(ROOMS)}
    assert {path.name for path in (ROOT / "specbench").iterdir() if (path / "__init__.py").exists()} == {
        *ROOMS
    }
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if room(module) and room(other) and order[room(other)] > order[room(module)]
    ]
    assert not wrong


def test_no_circle_of_imports():
    """Packages import what lies in them, which imports its package by its mere name: those arrows count for nothing."""
    arrows = graph()
    arrows = {a: {b for b in others if not a.startswith(f"{b}.")} for a, others in arrows.items()}
    while leaves := {name for name, others in arrows.items() if not others}:
        arrows = {name: others - leaves for name, others in arrows.items() if name not in leaves}
    assert not arrows, f"in circles, or importing them: {', '.join(sorted(arrows))}"
