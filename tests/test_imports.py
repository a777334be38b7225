"""Who may import whom. Arrows point one way: methods import the harness, never the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbench import ROOT


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; of `from a import b` both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


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
