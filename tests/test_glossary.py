"""The names in the code are not those that docs/glossary.md retires."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from specbench import ROOT


@cache  # it is asked for each file
def retired() -> set[str]:
    """The names in the second column of its table."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|([^|]+)\|([^|]+)\|$", text.partition("## One word for one thing")[2], re.MULTILINE)
    return {word for _, column in rows for word in re.findall(r"`(\w+)`", column)}


def names(tree: ast.AST) -> Iterator[str]:
    """Names that code gives: of classes, functions, parameters, variables, attributes and keys of dictionaries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif isinstance(node, ast.Dict):
            keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
            yield from (key for key in keys if isinstance(key, str))


def retired_names(path: Path) -> set[str]:
    """The retired words among the names of a module, where a leading underscore hides none."""
    return {name.lstrip("_") for name in names(ast.parse(path.read_text(encoding="utf-8")))} & retired()


def test_no_retired_word_names_anything():
    paths = [path for package in ("specbench", "methods") for path in (ROOT / package).rglob("*.py")]
    paths = [path for path in paths if not path.is_relative_to(ROOT / "specbench" / "tiny")]
    wrong = {str(path.relative_to(ROOT)): words for path in paths if (words := retired_names(path))}
    assert len(retired()) > 30 and not wrong


def test_a_retired_word_is_found_wherever_it_names_something(tmp_path):
    path = tmp_path / "module.py"
    lines = (
        "class Pass: ...",
        "def f(reach): ...",
        "certain = 1",
        "self._wire = 1",
        "import x as Turns",
        "f({'thirds': 1})",
    )
    for line in lines:
        path.write_text(line)
        assert retired_names(path), line
    path.write_text("# Pass\nx.reach\n")
    assert not retired_names(path)
