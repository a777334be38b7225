"""Arms that take turns by slices of rounds: a burst of other load then slows all of them alike.

An arm is ordinary code that calls `checkpoint` after each of its rounds. While `Interleaver.run` is active that call
may switch to another arm and return when it is this arm's turn again. Arms are greenlets of one thread, so that nothing
runs at the same time, and each arm's time on the clock is its own. They are imported where arms do take turns.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from specbench.decoding.trace import Clock, Timestamp

T = TypeVar("T")

_active: Interleaver | None = None


def checkpoint(clock: Clock, tokens: int) -> tuple[Timestamp, Timestamp] | None:
    """Lets other arms run, if they take turns and this one's slice is over.

    Args:
        clock: of the arm that calls.
        tokens: of the current answer so far; of a batch, of all its answers.

    Returns:
        Marks of the clock between which others ran, to be left out of this arm's time; None if none did.
    """
    if _active is None or not _active.is_over(tokens):
        return None
    from greenlet import getcurrent

    left = clock.mark()
    clock.synchronize()
    getcurrent().parent.switch()
    return left, clock.mark()


class Interleaver:
    """Runs several arms to their ends, slice by slice; the next slice goes to the arm that has the fewest tokens.

    Arms that write the same text so stay at the same place in it, however fast each of them is.

    Args:
        seconds: length of a slice; it ends with the round that exceeds it. Infinite: each arm runs to its end at once.
        around: called with the number of an arm, gives a context that each slice of that arm runs in.
    """

    def __init__(
        self, seconds: float, around: Callable[[int], AbstractContextManager] = lambda _: nullcontext()
    ):
        self.seconds = seconds
        self.around = around
        self.tokens: list[int] = []  # of each arm, over all its answers

    def run(self, arms: Sequence[Callable[[], T]]) -> list[T]:
        """Runs all arms.

        Args:
            arms: in the order of their first slices, which decides between equal numbers of tokens later, too.

        Returns:
            What each arm returned.

        Raises:
            Exception: what an arm raised; the others are then given up.
        """
        global _active
        from greenlet import GreenletExit, greenlet

        results: dict[int, T] = {}

        def running(number: int) -> None:
            results[number] = arms[number]()

        self.tokens = [0] * len(arms)
        self._answer = [0] * len(arms)
        waiting = {number: greenlet(lambda number=number: running(number)) for number in range(len(arms))}
        _active = self
        try:
            # Arms enter and leave inference mode in turns: it is held open, so that one arm's exit ends no other's.
            with torch.inference_mode():
                while waiting:
                    self._current = min(waiting, key=lambda number: self.tokens[number])
                    with self.around(self._current):
                        self._begun = time.perf_counter()
                        waiting[self._current].switch()
                    if waiting[self._current].dead:
                        del waiting[self._current]
        finally:
            _active = None
            for one in waiting.values():
                one.throw(GreenletExit)
        return [results[number] for number in range(len(arms))]

    def is_over(self, tokens: int) -> bool:
        """Notes the tokens of the current arm's answer; returns whether its slice is over."""
        before = self._answer[self._current]
        new = tokens - before if tokens >= before else tokens  # fewer: of the next answer
        self.tokens[self._current] += new
        self._answer[self._current] = tokens
        return time.perf_counter() - self._begun >= self.seconds
