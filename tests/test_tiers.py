"""The tiers of tests: what `make test-fast` leaves out is there, and found by how long it took."""

from __future__ import annotations

import ast

from specbench import ROOT
from tests.support.longer import FILE, longer


def functions(file: str) -> set[str]:
    """The test functions of a file, with the classes that they are in."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    inside = {f"{one.name}::{node.name}" for one in classes for node in one.body if hasattr(node, "name")}
    return inside | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_takes_longer_is_there():
    names = [name.split("::", 1) for name in FILE.read_text(encoding="utf-8").split()]
    defined = {file: functions(file) for file, _ in names}
    assert not [f"{file}::{function}" for file, function in names if function not in defined[file]]


def test_functions_with_a_case_that_takes_long_are_listed_once():
    log = """
0.15s setup    tests/a.py::test_one[a b]
0.10s call     tests/a.py::test_one[a b]
0.30s call     tests/a.py::test_one[c]
0.19s call     tests/b.py::Test::test_two
0.40s teardown tests/b.py::Test::test_three
"""
    assert longer(log) == ["tests/a.py::test_one"]
