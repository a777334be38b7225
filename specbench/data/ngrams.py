"""Runs of items in a row: of words that two texts share, of tokens that a text repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def ngrams(items: Sequence[T], n: int) -> Iterator[tuple[T, ...]]:
    """Every run of `n` items in a row."""
    return (tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def distinct_share(items: Sequence, n: int = 4) -> float:
    """The share of the n-grams of some items that do not occur earlier; 1 if there are none."""
    counted = list(ngrams(items, n))
    return len(set(counted)) / len(counted) if counted else 1.0
