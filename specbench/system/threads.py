"""How many threads torch computes with on a CPU, found by measuring the work at hand.

More threads are not always faster: the passes of a small model are too short to share, and on a machine with other load
a thread that was put to sleep holds up all the others. How idle threads wait is set in `specbench/__init__.py`.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbench.system.processes import cpu_quota, own_cores
from specbench.system.settings import WORTH

ROUNDS = 3
HOPELESS = 1.5  # times the best time so far: still fewer threads are not tried


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of torch's threads, and how it was chosen.

    Attributes:
        threads: number that torch computes with now.
        chosen_by: "threads=", "OMP_NUM_THREADS", "measuring", or "torch" where nothing was measured.
        seconds: median time of the work by number of threads, if measured.
    """

    threads: int
    chosen_by: str
    seconds: dict[int, float]


def use_threads(
    requested_threads: int | None,
    work: Callable[[], object] | None,
) -> Threads:
    """Sets the number of torch's threads for the rest of this process.

    Args:
        requested_threads: the number set by hand; None leaves it to $OMP_NUM_THREADS, and without that to measuring.
        work: a sample of the process's work, of some tenths of a second; called several times with each number. None:
            nothing to measure, as on a GPU.
    """
    if requested_threads is not None:
        torch.set_num_threads(requested_threads)
        return Threads(requested_threads, "threads=", {})
    if "OMP_NUM_THREADS" in os.environ:
        return Threads(torch.get_num_threads(), "OMP_NUM_THREADS", {})
    most = usable_cores()
    if work is None:
        torch.set_num_threads(most)
        return Threads(most, "torch", {})
    numbers = counts(most)
    if len(numbers) > 1:
        listed = ", ".join(map(str, numbers))
        print(f"choosing torch's threads: measuring {listed}", file=sys.stderr, flush=True)
    seconds = measure(work, numbers)
    chosen = fewest_worth(seconds)
    torch.set_num_threads(chosen)
    return Threads(chosen, "measuring", seconds)


def usable_cores() -> int:
    """Number of cores that this process may compute on, at most as many as torch uses by default."""
    return min(present_cores(), torch.get_num_threads())


def present_cores() -> int:
    """Number of cores that this process may compute on: its own, within its quota."""
    quota = cpu_quota()
    cores = len(own_cores())
    return cores if quota is None else min(cores, math.ceil(quota))


def counts(most: int) -> list[int]:
    """The numbers of threads to try, in descending order: `most` and every power of two below it."""
    return [most, *(2**i for i in reversed(range(most.bit_length())) if 2**i < most)]


def measure(work: Callable[[], object], numbers: list[int]) -> dict[int, float]:
    """Median seconds of `work` with each number of threads, in rounds over all of them, after one call as warm-up.

    numbers: in descending order. The lowest ones are left out once they are far slower than more threads: with a large
    model they would take minutes.
    """
    if len(numbers) == 1:
        return {}
    times: dict[int, list[float]] = {n: [] for n in numbers}
    work()
    for _ in range(ROUNDS):
        best = float("inf")
        for n in list(times):
            torch.set_num_threads(n)
            start = time.perf_counter()
            work()
            times[n].append(time.perf_counter() - start)
            best = min(best, times[n][-1])
            if times[n][-1] > HOPELESS * best:
                times = {m: of_m for m, of_m in times.items() if m >= n}
                break
    return {n: statistics.median(of_n) for n, of_n in times.items()}


def fewest_worth(seconds: dict[int, float]) -> int:
    """The number of threads to use; 1 if nothing was measured.

    In ascending order, each measured number that takes less than `WORTH` of the last choice's time is chosen.
    """
    chosen = min(seconds, default=1)
    for n in sorted(seconds):
        if seconds[n] < WORTH * seconds[chosen]:
            chosen = n
    return chosen
