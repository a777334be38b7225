"""Writes the list of modules into docs/design.md, from their docstrings: `python docs/modules.py`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from specbench.report import formats

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/design.md")
MARKERS = "modules"


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, without its last full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".").replace("|", "\\|")


def rooms(root: Path = ROOT) -> list[Path]:
    """The packages of the harness, those within a room after it."""
    return sorted(path.parent for path in (root / "specbench").rglob("__init__.py"))


def content(root: Path = ROOT) -> str:
    """What stands between the markers: a row for each package, with its purpose and its modules."""
    rows = ["| folder | holds | modules |", "|---|---|---|"]
    for folder in rooms(root):
        modules = [path.stem for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
        named = ", ".join(f"`{name}`" for name in modules)
        rows.append(f"| `{folder.relative_to(root)}/` | {purpose(folder / '__init__.py')} | {named} |")
    return "\n".join(rows)


def main() -> int:
    """Writes the page; returns the exit code."""
    path = ROOT / PAGE
    written = formats.between(path.read_text(encoding="utf-8"), MARKERS, content())
    if written is None:
        print(f"error: {PAGE} has no markers of {MARKERS}", file=sys.stderr)
        return 2
    path.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
