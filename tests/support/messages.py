"""What a message must say, without the English around it."""

from __future__ import annotations


def says(text: str, parts: str) -> bool:
    """Whether the parts, which " ... " separates, all stand in the text, in this order."""
    at = 0
    for part in parts.split(" ... "):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True
