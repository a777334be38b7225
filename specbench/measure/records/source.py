"""Checksum of the code that measures: a run resumes only with the code that began it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from specbench import METHODS, ROOT

# Code that may change while a run is interrupted: folders, and files that make what is measured or choose its settings.
NOT_MEASURING = ("specbench/report", "specbench/tiny")
MAKING = (
    *("methods/*/train.py", "methods/*/calibrate.py", "methods/common/training.py"),
    *("methods/common/head_training.py", "methods/common/losses.py", "methods/common/build.py"),
    *("methods/common/initialisation.py", "methods/common/masked_places.py"),
    *("methods/common/step_distillation.py", "methods/common/chained_steps.py"),
    "methods/common/stored_states.py",
    *("methods/family.py", "methods/answer.py", "methods/states.py", "methods/parts.py"),
    *("specbench/commands/audit.py", "specbench/engines/audit.py", "specbench/engines/answer_files.py"),
    *("specbench/commands/tune.py", "specbench/commands/converse.py", "specbench/data/synthesis.py"),
)
KERNELS = ROOT / "specbench" / "decoding" / "cpu" / "kernels"  # in C++
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_sha256() -> str:
    """Hex digest of the code that measures: the Python files of harness and methods, known to git or not, and kernels.

    Comments, docstrings and the layout of lines of Python files are no part of it: they change no measurement.
    """
    digest = hashlib.sha256()
    for path in measuring_files():
        digest.update(f"{_name(path)}\0{_code_sha256(path.read_bytes())}\0".encode())
    for path in sorted(KERNELS.iterdir()):
        digest.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


def method_sha256(config: Mapping) -> str | None:
    """Hex digest of methods that are not a part of this project: of their packages, or of the modules in their folder.

    Args:
        config: of a run, with `_target_`s.

    Returns:
        None if there are none.
    """
    modules = {target.partition(".")[0] for target in _targets(config)}
    files: set[Path] = set()
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        if spec.origin is None:  # a folder without __init__.py
            folders = spec.submodule_search_locations or ()
            files.update(path for folder in folders for path in Path(folder).resolve().rglob("*.py"))
            continue
        file = Path(spec.origin).resolve()
        if not file.is_relative_to(ROOT / "specbench") and not file.is_relative_to(METHODS):
            files.update(
                file.parent.rglob("*.py") if file.name == "__init__.py" else file.parent.glob("*.py")
            )
    digests = [f"{path.name}\0{_code_sha256(path.read_bytes())}\0" for path in sorted(files)]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None


def _targets(node: Any) -> Iterator[str]:
    """The classes that a configuration names."""
    if isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            yield target
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _targets(item)


def measuring_files() -> list[Path]:
    """The Python files that a run may import: neither reports nor what trains, calibrates or tunes."""
    files = {path for folder in (ROOT / "specbench", METHODS) for path in folder.rglob("*.py")}
    return sorted((path for path in files if _measures(_name(path))), key=_name)


def _name(path: Path) -> Path:
    """The path of a file in a checkout, also for a file of a wheel."""
    return path.relative_to(METHODS.parent if path.is_relative_to(METHODS) else ROOT)


def _measures(file: Path) -> bool:
    within = any(file.is_relative_to(folder) for folder in NOT_MEASURING)
    return not within and not any(file.match(pattern) for pattern in MAKING)


@lru_cache(maxsize=1024)
def _code_sha256(source: bytes) -> str:
    """Hex digest of the syntax tree of a file, without docstrings."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # in a file that this run need not import
        return hashlib.sha256(source).hexdigest()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
