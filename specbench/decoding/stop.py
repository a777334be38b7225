"""Where an answer ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def truncate_at_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: i + 1])
    return list(tokens)
