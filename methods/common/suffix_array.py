"""A suffix array: all places of a text, sorted by the tokens from there on, so that equal stretches are adjacent.

Only the first `SORTED` tokens at a place count, which is all that a look-up needs; so five sorts build it for any
text. Look-ups compare the bytes of the tokens (most significant first) in memory-mapped files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specbench.system.errors import UserError

SORTED = 32  # tokens that places are sorted by: a power of 2
READ = 1024  # places up to which an interval is read whole; of longer ones
LOOKED_AT = 64  # this many are read, evenly spaced


def check_sorted(match: int, draft: int) -> None:
    """Raises UserError if a match and the draft after it may be longer than `SORTED` tokens together."""
    if match + draft > SORTED:
        raise UserError(f"max_match={match} and max_draft_tokens={draft} exceed {SORTED} together")


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """The places [n] of a text of tokens [n], sorted by the `SORTED` tokens there; equal ones in the text's order."""
    n = len(tokens)
    order = np.argsort(tokens, kind="stable")
    ranks, width = _ranks(tokens.astype(np.int64), order), 1
    while width < SORTED:  # doubling (Manber and Myers 1990): two ranks of w tokens are one of 2w tokens
        following = np.pad(ranks[width:] + 1, (0, min(width, n)))  # 0 after the end
        both = ranks * (n + 1) + following
        order = np.argsort(both, kind="stable")
        ranks, width = _ranks(both, order), 2 * width
    return order.astype(np.uint32 if n < 2**32 else np.uint64)


def _ranks(keys: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The rank [n] of each key among all different ones, from 0."""
    ordered = keys[order]
    ranks = np.empty(len(keys), dtype=np.int64)
    ranks[order] = np.cumsum(np.concatenate([[0], ordered[1:] != ordered[:-1]])) if len(keys) else 0
    return ranks


class Interval(NamedTuple):
    """Places of a suffix array, in its order, at which a text has the same tokens.

    Attributes:
        first: the first one.
        after: after the last one.
        length: how many tokens are the same.
    """

    first: int
    after: int
    length: int

    @property
    def occurrences(self) -> int:
        """How often these tokens occur."""
        return self.after - self.first


class Index:
    """Look-ups in a text.

    Args:
        tokens: [n], unsigned, the most significant byte first; they may be mapped from a file.
        positions: [n], as `suffix_array` makes them.
        separator: the token that ends each part of the text, the last one too; nothing is found across it.

    Raises:
        ValueError: the tokens are not big-endian.
    """

    def __init__(self, tokens: np.ndarray, positions: np.ndarray, separator: int):
        if tokens.dtype.byteorder != ">":
            raise ValueError(f"tokens of type {tokens.dtype.str} are not in the order of their bytes")
        # Plain arrays and views: slices and elements of a memmap cost more.
        self.tokens, self.positions, self.separator = np.asarray(tokens), np.asarray(positions), separator
        self.type = tokens.dtype
        self._bytes, self._positions = tokens.view(np.uint8).data, positions.data

    def longest(self, tokens: Sequence[int], most: int, least: int = 1) -> Interval | None:
        """Returns where the longest suffix of some tokens occurs, of `least` to `most` tokens, or None."""
        newest = tokens[-most:]
        match, low, high = None, least, len(newest)
        while low <= high:  # if a suffix occurs, every shorter one does
            middle = (low + high + 1) // 2
            first = self._first(newest[-middle:])
            if first is None:
                high = middle - 1
            else:
                match, low = (first, middle), middle + 1
        return None if match is None else self._from(match[0], newest[-match[1] :])

    def tokens_after(self, interval: Interval, n: int) -> np.ndarray:
        """The n tokens [n, occurrences] after those of an interval; some beyond a separator, which mean nothing."""
        positions = self.positions[interval.first : interval.after].astype(np.int64) + interval.length
        read = np.minimum(positions + np.arange(n)[:, None], len(self.tokens) - 1)
        return self.tokens[read].astype(np.int64)

    def followers(self, interval: Interval, most: int) -> list[tuple[int, Interval]]:
        """Returns the most frequent tokens after those of an interval and their intervals; ties are in order of id.

        The intervals are exact. If not all of an interval is read, the tokens are those at the places that are: as
        tokens are sorted, each with a share of at least 1 / `LOOKED_AT` is seen.

        Args:
            interval: of a text that ends with the separator.
            most: most tokens to return.
        """
        first, after, length = interval
        if after - first == 1:
            token = int(self.tokens[self._positions[first] + length])
            return [] if token == self.separator else [(token, Interval(first, after, length + 1))]
        step = 1 if after - first <= READ else (after - first) // LOOKED_AT
        tokens = self.tokens[self.positions[first:after:step] + length].tolist()
        continuations = []
        for token, seen in Counter(tokens).most_common(most + 1):  # one of them may be the separator
            if token == self.separator:
                continue
            begin = bisect_left(tokens, token)
            end = begin + seen
            stretch = Interval(first + begin, first + end, length + 1)
            if step > 1:  # it begins after the place before, and ends before the one after
                near = max(first, first + (begin - 1) * step), min(after, first + end * step)
                stretch = self._exactly(token, length, *near)
            continuations.append((token, stretch))
            if len(continuations) == most:
                break
        return sorted(continuations, key=lambda follower: (-follower[1].occurrences, follower[0]))

    def _exactly(self, token: int, length: int, low: int, high: int) -> Interval:
        """Returns where, between two places, a token follows `length` equal ones."""
        key, at = self._bytes_of([token]), self._reading(length, 1)
        first = bisect_left(self._positions, key, low, high, key=at)
        return Interval(first, bisect_right(self._positions, key, first, high, key=at), length + 1)

    def _first(self, tokens: Sequence[int]) -> int | None:
        """Returns the first place, in the array's order, at which some tokens occur, or None."""
        key = self._key(tokens)
        if key is None:
            return None
        at = self._reading(0, len(tokens))
        first = bisect_left(self._positions, key, key=at)
        return first if first < len(self._positions) and at(self._positions[first]) == key else None

    def _from(self, first: int, tokens: Sequence[int]) -> Interval:
        """Returns the interval of some tokens that begins at a place; a galloping search finds its end."""
        key, at, step = self._bytes_of(tokens), self._reading(0, len(tokens)), 1
        while first + step < len(self._positions) and at(self._positions[first + step]) == key:
            step *= 2
        after = bisect_right(
            self._positions, key, first + step // 2, min(first + step, len(self._positions)), key=at
        )
        return Interval(first, after, len(tokens))

    def _key(self, tokens: Sequence[int]) -> bytes | None:
        """Returns the bytes of tokens, or None if one cannot occur."""
        return None if max(tokens) >= self.separator else self._bytes_of(tokens)

    def _bytes_of(self, tokens: Sequence[int]) -> bytes:
        return np.array(tokens, dtype=self.type).tobytes()

    def _reading(self, offset: int, n: int) -> Callable[[int], bytes]:
        """Returns a function that reads the n tokens `offset` after a place."""
        data, size, begin, width = (
            self._bytes,
            self.type.itemsize,
            offset * self.type.itemsize,
            n * self.type.itemsize,
        )

        def at(position: int) -> bytes:
            start = position * size + begin
            return bytes(data[start : start + width])

        return at
