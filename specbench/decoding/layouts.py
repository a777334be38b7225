"""How the weights of linear layers lie in memory, chosen by measuring.

A product with a few tokens takes as long as its weight takes to be read, if the weight lies in memory in the order in
which the kernel wants it. Which order that is depends on the shape, the type, the number of tokens and of threads, and
the processor. So `choose_layouts` measures; before it was called, or where it was not, weights have default layouts.
Values never change, only their order, and with it the order in which products are summed.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Times = dict[str, dict[int, float]]  # seconds by layout and number of tokens
DRAFT = 6  # tokens of a verification that is measured: the pending one and five drafted ones
ROUNDS, FEWEST_ROUNDS = 9, 3  # of measuring, each over all layouts
SECONDS = 0.25  # for the rounds of one shape, once there are `FEWEST_ROUNDS`
WORTH = 0.95  # share of the default layout's time that another one must stay below
LEAST_BYTES = 2**18  # of a matrix that is measured: a product with a smaller one is mostly the call of it
SAMPLE_BYTES = 2**24  # at most so much of one matrix is measured
SWEEP_BYTES = 2**24  # read of other matrices before one is read again: weights do not stay in a core's cache
SHARE = 0.5  # of the free memory that copies of weights may take
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a matrix.

    Attributes:
        one_token: for a product with one token.
        several: for a product with more.
    """

    one_token: str
    several: str


def by_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] row after row, as torch makes it."""
    return _plain(weight).contiguous()


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] column after column.

    Columns that begin a whole number of pages apart compete for the same lines of the CPU's caches; a gap of two cache
    lines between them takes off a tenth.
    """
    if weight.stride(0) == 1:
        return weight
    rows, columns = weight.shape
    gap = 32 if rows % 1024 == 0 else 0
    with torch.inference_mode(False), torch.no_grad():  # gradients may pass through a frozen weight
        return weight.new_empty(columns, rows + gap)[:, :rows].copy_(weight.detach().t()).t()


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] in the blocks that oneDNN's kernels read, for `product` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(_plain(weight), DRAFT)


LAYOUTS = {"rows": by_rows, "columns": by_columns, "packed": packed}
_PACKED_PRODUCT = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """States [..., in] times a weight [out, in] in any layout, without gradients -> [..., out]."""
    if weight.is_mkldnn:
        return _PACKED_PRODUCT(states, weight, bias, "none", [], "")  # type: ignore[misc] # there is no such weight without
    return linear(states, weight, bias)


class Laid:
    """A frozen weight and the copies of it in other layouts, which all layers that share the weight have in common.

    Args:
        weight: [out, in].
        fixed: the weight stays row by row, since an embedding reads it, too.
    """

    def __init__(self, weight: torch.Tensor, fixed: bool):
        self.weight, self.fixed = weight, fixed
        self.layouts: Layouts | None = None  # none chosen yet
        # None: no copies, products are with the weight itself. Those of an embedding are made when they are first used.
        self.one_token: torch.Tensor | None = weight if fixed else None
        self.several: torch.Tensor | None = self.one_token
        self.version: int | None = -1
        if not fixed:
            self.lay()
        _LAID.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Laid, (self.weight, self.fixed)  # a copy, or another process, chooses for itself

    def lay(self) -> None:
        """Lays the weight out, and makes the copies that are needed."""
        layouts = self.layouts or default(self.weight)
        named = (layouts.one_token, layouts.several)
        home = "rows"
        if not self.fixed:
            home = next((name for name in named if name != "packed"), default(self.weight).one_token)
            self.weight.data = LAYOUTS[home](self.weight)
        copies = {name: LAYOUTS[name](self.weight) for name in set(named) - {home}}
        self.one_token, self.several = (
            (copies.get(name, self.weight) for name in named) if copies else (None, None)
        )
        self.version = None if self.weight.is_inference() else self.weight._version

    def choose(self, layouts: Layouts) -> None:
        """Changes to these layouts."""
        if layouts != self.layouts:
            self.layouts = layouts
            self.lay()


_LAID: WeakSet[Laid] = WeakSet()  # all that there are
_FASTEST: dict[tuple, Layouts] = {}  # what was measured in this process


class LaidLinear(torch.nn.Linear):
    """A linear layer whose weight may have copies in other layouts; `weight` itself is always a plain tensor."""

    _laid: Laid

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        laid, weight = self._laid, self.weight
        if laid.one_token is None or torch.is_grad_enabled() or laid.weight is not weight:
            return linear(input, weight, self.bias)
        if laid.version != weight._version:
            laid.lay()  # the weight was changed: a copy must not stay what it was
        matrix = laid.one_token if input.numel() == self.in_features else laid.several
        return product(input, weight if matrix is None else matrix, self.bias)


def lay_out(module: torch.nn.Module, fixed: bool = False) -> None:
    """Gives the frozen linear layers of a module, in place, layouts for decoding: to begin with the default ones.

    Args:
        module: with the layers; copies of it that share weights must be made after this.
        fixed: the weights stay row by row, since embeddings read them, too; other layouts are copies.
    """
    for part in module.modules():
        if type(part) is torch.nn.Linear and not (part.weight.requires_grad or part.weight.is_inference()):
            part.__class__ = LaidLinear
            part.__dict__["_laid"] = Laid(part.weight, fixed)


def laid_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A frozen linear layer of a weight [out, in] and a bias [out], laid out; the weight given stays as it is."""
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=bias is not None, device="meta")
    with torch.inference_mode(False):
        layer.weight = torch.nn.Parameter(_plain(weight), requires_grad=False)
        if bias is not None:
            layer.bias = torch.nn.Parameter(_plain(bias), requires_grad=False)
    lay_out(layer)
    return layer.eval()


def default(weight: torch.Tensor) -> Layouts:
    """The layouts before anything is measured.

    In fp32 on a CPU columns: for one token a head of 16384 x 128 then takes a third of the time, and six tokens through
    the layers of the embedded target a fifth less.
    """
    columns = weight.device.type == "cpu" and weight.dtype == torch.float32
    return Layouts("columns", "columns") if columns else Layouts("rows", "rows")


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
    for laid in _LAID:
        if laid.weight.device.type == "cpu" and not laid.weight.requires_grad:
            shapes[_name(laid.weight)].append(laid)
    room = _fits(sum(laid.weight.nbytes for group in shapes.values() for laid in group))
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
    for matrices in laid.values():  # kernels are made when they are first called
        for n in tokens:
            _seconds(states[n], matrices[:1])
    found: list[Times] = []
    begun = time.perf_counter()
    while len(found) < FEWEST_ROUNDS or (len(found) < ROUNDS and time.perf_counter() - begun < SECONDS):
        times: Times = {name: {} for name in laid}
        for n in tokens:
            for name, matrices in laid.items():
                times[name][n] = _seconds(states[n], matrices)
        found.append(times)
    return found


def _seconds(states: torch.Tensor, matrices: Sequence[torch.Tensor]) -> float:
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
    lay: Callable[[torch.Tensor], torch.Tensor], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """The weights laid out; None where this torch or this processor has no such layout for them."""
    try:
        made = [lay(weight) for weight in weights]
        product(_states(weights[0], 1), made[0], None)
    except (RuntimeError, AttributeError, TypeError):
        return None
    return made


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, as a tensor that is no inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        return weight.clone() if weight.is_inference() else weight.detach()


def _name(weight: torch.Tensor) -> str:
    rows, columns = weight.shape
    return f"{rows}x{columns} {str(weight.dtype).removeprefix('torch.')}"


def _fits(size: int) -> bool:
    """Whether the free memory has room for copies of so many bytes; yes where the system does not tell."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.exists() else None
    return found is None or size < SHARE * 1024 * int(found[1])
