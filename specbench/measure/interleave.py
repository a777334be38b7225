"""Arms that take turns by slices of rounds: a burst of other load then slows all of them alike.

An arm is a generator that yields after each of its rounds, such as `Engine.rounds`. All run in one thread, so that
nothing runs at the same time, and each arm's time on the clock is its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from specbench.decoding.trace import Clock

T = TypeVar("T")


class Interleaver:
    """Runs several arms to their ends, slice by slice; the next slice goes to the arm that has the fewest tokens.

    Arms that write the same text thus stay at the same place in it, however fast each of them is.

    Args:
        clock: of the device that the arms run on.
        seconds: length of a slice; it ends with the round that exceeds it. Infinite: each arm runs to its end at once.
        around: called with the number of an arm, returns a context manager for a slice of that arm.

    Attributes:
        tokens: of each arm, over all its answers.
    """

    def __init__(
        self,
        clock: Clock,
        seconds: float,
        around: Callable[[int], AbstractContextManager] = lambda _: nullcontext(),
    ):
        self.clock, self.seconds, self.around = clock, seconds, around
        self.tokens: list[int] = []

    def run(self, arms: Sequence[Generator[int, None, T]]) -> list[T]:
        """Runs all arms.

        Args:
            arms: in the order of their first slices, which also breaks ties between equal numbers of tokens. Each
                yields the number of tokens of a round.

        Returns:
            What each arm returned.

        Raises:
            Exception: what an arm raised; the others are then closed.
        """
        results: dict[int, T] = {}
        self.tokens = [0] * len(arms)
        waiting = [*range(len(arms))]
        try:
            while waiting:
                number = min(waiting, key=self.tokens.__getitem__)
                with self.around(number):
                    try:
                        self._run_slice(number, arms[number])
                    except StopIteration as end:
                        results[number] = end.value
                        waiting.remove(number)
        finally:
            for arm in arms:
                arm.close()
        return [results[number] for number in range(len(arms))]

    def _run_slice(self, number: int, arm: Generator[int, None, T]) -> None:
        """Runs one slice; raises StopIteration when the arm ends."""
        begun = time.perf_counter()
        self.tokens[number] += next(arm)
        while time.perf_counter() - begun < self.seconds:
            self.tokens[number] += next(arm)
        self.clock.synchronize()
