"""How fast the memory can be read: the ceiling of work that is bound by it. torch is imported where it is needed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.system.errors import memory_permitting
from specbench.system.processes import free_memory

if TYPE_CHECKING:
    import torch

LEAST_BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}  # makes the start of a pass negligible
# Sums between two timestamps. On a GPU one takes as little as 0.2 ms, its launch on an idle stream up to a tenth of
# that: the other launches overlap with it.
SUMS = {"cpu": 1, "cuda": 16}
UNKNOWN_CACHE_BYTES = 2**30  # if the system does not report it: no processor of one socket has much more
COLUMNS = 1024  # of the matrix that a product reads to measure the bandwidth
PASSES = 7


def bandwidth_if_possible(device: torch.device) -> float | None:
    """As `bandwidth`; None, with a warning, where there is no memory for its buffer."""
    with memory_permitting("the memory's bandwidth was not measured"):
        return bandwidth(device)
    return None


def bandwidth(device: torch.device) -> float:
    """Bytes per second at which the memory of `device` is read: the ceiling of work that is bound by it.

    The median over passes that each read a large buffer of float32 numbers, once or several times, after a warm-up,
    with torch's current threads. A sum reads every byte once, writes nothing, and of torch's operations comes closest
    to the memory's limit. On a CPU a product by our own kernel reads several streams in parallel: the faster of the two
    counts. The dtype of the weights does not matter. Weights that fit into a cache can be read faster.
    """
    import torch

    from specbench.decoding.cpu.native import has_kernel
    from specbench.decoding.cpu.packed_linear import Panels

    sums, size = SUMS[device.type], buffer_bytes(device.type)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def median(read: Callable[[], object]) -> float:
        seconds_of(device, read, sums)
        return statistics.median(seconds_of(device, read, sums) for _ in range(PASSES))

    fastest = median(buffer.sum)
    if has_kernel(device, torch.float32):
        panels, state = Panels(buffer.view(-1, COLUMNS)), torch.ones(1, COLUMNS)
        del buffer
        fastest = min(fastest, median(lambda: panels.times(state, None)))
    return sums * size / fastest


def seconds_of(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Seconds that a device takes for some work, done `times` times in a row."""
    from specbench.decoding.trace import Clock

    clock = Clock(device)
    clock.synchronize()
    start = clock.mark()
    for _ in range(times):
        work()
    end = clock.mark()
    clock.synchronize()
    return clock.seconds(start, end)


def buffer_bytes(kind: str) -> int:
    """Bytes that are read to measure the bandwidth of a "cpu" or "cuda".

    On a CPU twice what its caches hold, if its copy in panels then leaves half of the free memory.
    """
    least = LEAST_BUFFER_BYTES[kind]
    if kind != "cpu":
        return least
    wanted, free, row = max(least, 2 * last_level_cache_bytes()), free_memory(), 4 * COLUMNS
    return wanted if free is None else min(wanted, max(1, free // 4 // row) * row)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all level 3 caches of this machine together; a safe guess if the system does not report them."""
    sizes = {}
    for cache in folder.glob("cpu[0-9]*/cache/index3"):
        match = re.fullmatch(r"(\d+)([KM])", (cache / "size").read_text().strip())
        if match:
            shared_by = (cache / "shared_cpu_list").read_text().strip()
            sizes[shared_by] = int(match[1]) * {"K": 2**10, "M": 2**20}[match[2]]
    return sum(sizes.values()) or UNKNOWN_CACHE_BYTES
