"""What a table shows as text, and what a message must say without the English around it."""

from __future__ import annotations

import io

from rich.console import Console


def shown(renderable, width=100, color=False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=color).print(renderable)
    return out.getvalue()


def says(text: str, parts: str) -> bool:
    """Whether the parts, which " ... " separates, all stand in the text, in this order."""
    at = 0
    for part in parts.split(" ... "):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True
