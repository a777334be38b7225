"""Choosing the layouts of weights by measuring.

Which layout a kernel reads fastest depends on the shape, the type, the number of tokens and of threads, and the
processor. Before `choose_layouts` was called, or where it was not, weights have the default layouts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

import torch

from specbench.decoding.linear import DRAFT, LAID, LAYOUTS, ONE_TOKEN, Layouts, default, product
from specbench.processes import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specbench.decoding.linear import Bags, Laid

Times = dict[str, dict[int, float]]  # seconds by layout and number of tokens
ROUNDS, FEWEST_ROUNDS = 9, 3  # of measuring, each over all layouts
SECONDS = 0.25  # for the rounds of one shape, once there are `FEWEST_ROUNDS`
WORTH = 0.95  # share of the default layout's time that another one must stay below
LEAST_BYTES = 2**18  # of a matrix that is measured: a product with a smaller one is mostly the call of it
SAMPLE_BYTES = 2**24  # at most so much of one matrix is measured
SWEEP_BYTES = 2**24  # read of other matrices before one is read again: weights do not stay in a core's cache
COPIES = 2  # of a weight that there may be: for one token and for several
SHARE = 0.5  # of the free memory that copies of weights may take
_FASTEST: dict[tuple, Layouts] = {}  # what was measured in this process


def choose_layouts(
    batch_size: int | None = None, known: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, dict[str, str]]:
    """Gives every laid-out weight on the CPU the layouts that are fastest with the threads that torch has now.

    Args:
        batch_size: sequences that are decoded together.
        known: what was chosen before, as this returns it; nothing is measured for the shapes that are in it.

    Returns:
        The layouts by shape and type, such as "1024x3072 float32": {"one_token": "rows", "several": "packed"}.
    """
    shapes: dict[str, list[Laid]] = defaultdict(list)
    for laid in LAID:
        if laid.weight.device.type == "cpu" and not laid.weight.requires_grad:
            shapes[_name(laid.weight)].append(laid)
    room = _fits(COPIES * sum(laid.weight.nbytes for group in shapes.values() for laid in group))
    chosen = {}
    for name, group in sorted(shapes.items()):
        if known is not None and name in known:
            layouts = Layouts(**known[name])
        elif room:
            layouts = _fastest(name, [laid.weight for laid in group], batch_size or 1)
        else:
            layouts = default(group[0].weight)
        for laid in group:
            laid.choose(layouts)
        chosen[name] = asdict(layouts)
    return chosen


def _fastest(name: str, weights: Sequence[torch.Tensor], batch_size: int) -> Layouts:
    """The fastest layouts of weights of one shape, measured once in a process for each number of threads."""
    usual = default(weights[0])
    if weights[0].nbytes < LEAST_BYTES:
        return usual
    key = (name, torch.get_num_threads(), batch_size)
    if key not in _FASTEST:
        several = sorted({batch_size, DRAFT * batch_size} - {1})
        rounds = measure(weights, [1, *several])
        _FASTEST[key] = Layouts(
            fastest(rounds, [1], usual.one_token), fastest(rounds, several, usual.several)
        )
    return _FASTEST[key]


def fastest(rounds: Sequence[Times], tokens: Sequence[int], usual: str) -> str:
    """The layout with the least time over all these numbers of tokens, each counted alike, or `usual` if none is clear.

    What counts is the ratio to `usual`, the worse one of two: the median over the rounds, and that of the least times.
    """
    ratios = {}
    for name in rounds[0]:
        if any(n not in rounds[0][name] for n in tokens):
            continue  # a layout for one token alone
        typical = [median(times[name][n] / times[usual][n] for times in rounds) for n in tokens]
        least = [min(t[name][n] for t in rounds) / min(t[usual][n] for t in rounds) for n in tokens]
        ratios[name] = max(sum(typical), sum(least)) / len(tokens)
    best = min(ratios, key=lambda name: ratios[name])
    return best if ratios[best] < WORTH else usual


@torch.inference_mode()
def measure(weights: Sequence[torch.Tensor], tokens: Sequence[int]) -> list[Times]:
    """Seconds of a product with weights of one shape, in rounds, by layout and number of tokens.

    The layouts take turns, so that other load meets all of them; a product reads another weight than the one before,
    as a pass through a model does. Of a large matrix its first rows are measured.
    """
    row_bytes = weights[0].shape[1] * weights[0].element_size()
    rows = max(1, min(weights[0].shape[0], SAMPLE_BYTES // row_bytes))
    sample = [weight.detach()[:rows] for weight in weights[: -(-SWEEP_BYTES // (rows * row_bytes))]]
    laid = {name: made for name, lay in LAYOUTS.items() if (made := _made(lay, sample)) is not None}
    states = {n: _states(sample[0], n) for n in tokens}
    cases = [(n, name) for n in tokens for name in laid if n == 1 or name not in ONE_TOKEN]
    for n, name in cases:  # kernels are made when they are first called
        _seconds(states[n], laid[name][:1])
    found: list[Times] = []
    begun = time.perf_counter()
    while len(found) < FEWEST_ROUNDS or (len(found) < ROUNDS and time.perf_counter() - begun < SECONDS):
        times: Times = {name: {} for name in laid}
        for n, name in cases:
            times[name][n] = _seconds(states[n], laid[name])
        found.append(times)
    return found


def _seconds(states: torch.Tensor, matrices: Sequence[torch.Tensor | Bags]) -> float:
    """Seconds of a product with each of some matrices."""
    start = time.perf_counter()
    for matrix in matrices:
        product(states, matrix, None)
    return time.perf_counter() - start


def _states(weight: torch.Tensor, tokens: int) -> torch.Tensor:
    """States [1, tokens, in] for a weight [out, in]."""
    columns = weight.shape[1]
    return torch.linspace(-1, 1, tokens * columns, dtype=weight.dtype).view(1, tokens, columns)


def _made(
    lay: Callable[[torch.Tensor], torch.Tensor | Bags], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor | Bags] | None:
    """The weights laid out; None where this torch or this processor has no such layout for them."""
    try:
        made = [lay(weight) for weight in weights]
        product(_states(weights[0], 1), made[0], None)
    except (RuntimeError, AttributeError, TypeError):
        return None
    return made


def _name(weight: torch.Tensor) -> str:
    rows, columns = weight.shape
    return f"{rows}x{columns} {str(weight.dtype).removeprefix('torch.')}"


def _fits(size: int) -> bool:
    """Whether the free memory has room for copies of so many bytes; yes where the system does not tell."""
    free = free_memory()
    return free is None or size < SHARE * free
