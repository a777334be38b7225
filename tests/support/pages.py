"""The pages of the documentation: their code, prose and links; and the scripts beside them, which are no package."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from specbench import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


@cache
def load_script(name: str) -> ModuleType:
    """The module docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ids(path: Path) -> str:
    """The path of a page from the root, as the id of a test."""
    return str(path.relative_to(ROOT))


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every code block, fenced or indented; an indented one has no language."""
    found, lines, fence, before = [], [], None, ""
    for line in [*text.splitlines(), ""]:
        if fence is not None:
            if line.startswith("```"):
                found.append((fence, "\n".join(lines)))
                fence, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("    ") and (lines or before == ""):
            lines.append(line[4:])
        else:
            if lines:
                found.append(("", "\n".join(lines)))
                lines = []
            if line.startswith("```"):
                fence = line[3:].strip()
        before = line
    return found


def prose(text: str) -> str:
    """The text without its code blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=\n\n)(    .*\n)+", "", text)


def spans(text: str) -> list[str]:
    """The inline code of a text, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def anchors(text: str) -> set[str]:
    """Anchors of all headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ +(.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links(text: str) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found
