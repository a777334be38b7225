"""Choosing the layouts of weights by measuring.

Which layout a kernel reads fastest depends on the shape, the type, the number of tokens and of threads, the processor,
and on what lies in its caches. So a target's layouts are tried in place: in passes of the whole target as a run makes
them, of one token and of as many as a verification has. Weights of drafters are tried one shape at a time. Before
`choose_layouts` was called, or where it was not, weights have the default layouts.

**What is in the caches.** The baseline reads nothing but the target between two of its passes: a target that fits into
the last cache (the embedded one has 29 MB in fp32, and there are CPUs with 32 MB and more) stays there, as far as it
does. So before a pass of one token is timed, another one is made with the same layouts: it drives out what was tried
before, and leaves behind what a pass of the loop leaves. Between verifications a drafter reads weights of its own, so
other memory is read in front of the timed pass, too. Of a target larger than all caches it makes no difference.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbench.decoding.cpu.native import has_kernel
from specbench.decoding.cpu.packed_linear import (
    DRAFT,
    LAYOUTS,
    ONE_TOKEN,
    PACKED,
    PANELS,
    default,
    packed_weights,
    product,
)
from specbench.decoding.state import Draft, Resume
from specbench.system.processes import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from specbench.decoding.cpu.packed_linear import PackedWeight, Product
    from specbench.decoding.model.staged_model import StagedModel

    Times = dict[str, list[float]]  # seconds by layout, of each round of measuring
    Made = torch.Tensor | Product

ROUNDS, FEWEST_ROUNDS = 15, 3  # of measuring, each over all layouts
SECONDS = 2.0  # for the rounds of one number of tokens, once there are `FEWEST_ROUNDS`
CHECK_SECONDS = 0.6  # for those that compare whole passes
DRAFTER_SECONDS = 0.25  # for those of one shape of a drafter's weights
WORTH = 0.95  # share of the default layout's time that another one must stay below
WORTH_BITS = 0.85  # the same where the default layout has the same bits for any number of tokens, and the other has not
HOPELESS = 1.25  # times the default layout's least time: not tried any more
CLEAR = 0.75  # share of all comparisons of two times that it must win; half of them are won by chance
LEAST = 2**16  # numbers of a matrix that is measured: a product with a smaller one is mostly the call of it
SAMPLE_BYTES = 2**24  # at most so much of a drafter's matrix is measured
SWEEP_BYTES = 2**24  # of other memory, read in between: about what a drafter of the embedded family reads
PART_BYTES = 2**27  # more than caches hold: of a larger target its last layers are measured, which read that
PROMPT = 128  # entries of the cache in front of a measured pass
SHARE = 0.5  # of the free memory that copies of weights may take
OWNERS = HEAD, LAYERS, DRAFTER = "head", "layers", "drafter"  # whose weights a group holds
DEFAULT, TRIED = "default", "tried"  # layouts of whole passes
PASS, PRODUCTS = "pass", "products"  # what is measured
clock = time.perf_counter
_FASTEST: dict[tuple, Any] = {}  # what was measured in this process


class PassShape(NamedTuple):
    """The shape of a pass: sequences of a batch, and tokens of each."""

    batch: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, and what was measured.

    Attributes:
        layout: that was chosen.
        ms: milliseconds of the group's products in a pass by layout (of a drafter: of products with some of its
            weights), medians; empty where nothing was measured.
    """

    layout: str
    ms: dict[str, float] = field(default_factory=dict)


Choices = dict[int, Choice]  # by number of tokens of a product


def choose_layouts(
    target: StagedModel | None = None,
    passes: Iterable[PassShape] = (PassShape(1, 1),),
    earlier: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Gives every laid-out weight on the CPU the layouts that are fastest with the threads that torch has now.

    Args:
        target: whose passes are measured; None: all weights are a drafter's.
        passes: that the run makes of it.
        earlier: what was chosen before, as this returns it; nothing is measured for the groups that are in it.

    Returns:
        "groups": by group of weights, such as "head 16384x128 float32", and by number of tokens, as text, a `Choice`;
        "pass_ms": by number of tokens milliseconds of whole passes with "default" layouts and with those "tried" whose
        products were the fastest, where these differ; these were chosen unless their passes were slower.
    """
    groups = _groups(target)
    before, pass_ms = earlier.get("groups", {}), earlier.get("pass_ms", {})
    chosen = {name: {int(n): Choice(**choice) for n, choice in of.items()} for name, of in before.items()}
    lacking = {name: group for name, group in groups.items() if name not in chosen}
    shapes = sorted(set(passes))
    tokens = sorted({1, *(shape.batch for shape in shapes), *(DRAFT * shape.batch for shape in shapes)})
    copies = max(len(shapes), len(tokens))  # of a weight at most, one for each number of tokens
    room = _fits(copies * sum(laid.weight.nbytes for group in lacking.values() for laid in group))
    target_groups = {name: group for name, group in lacking.items() if not name.startswith(DRAFTER)}
    if target_groups and target is not None and room:
        measured, pass_ms = _remembered(
            (*((name, len(group)) for name, group in target_groups.items()), target.width, *shapes),
            lambda: _in_place(target, target_groups, shapes),
        )
        chosen |= measured
    for name, group in lacking.items():
        if name not in target_groups and room and _is_large(group):
            weights = [laid.weight for laid in group]
            chosen[name] = _remembered((name, *tokens), lambda weights=weights: _alone(weights, tokens))  # type: ignore[misc]
    for name, group in groups.items():
        choices = chosen.setdefault(name, unmeasured(group[0].weight))
        for laid in group:
            laid.choose({n: choice.layout for n, choice in choices.items()})
    written = {name: {str(n): asdict(chosen[name][n]) for n in sorted(chosen[name])} for name in groups}
    return {"groups": written, "pass_ms": {str(n): ms for n, ms in pass_ms.items()}}


def unmeasured(weight: torch.Tensor) -> Choices:
    """The layouts of a weight that is too small to be measured, or for whose copies there is no room."""
    if weight.numel() < LEAST and has_kernel(weight.device, weight.dtype):
        return {1: Choice(PANELS), DRAFT: Choice(PANELS)}
    return {1: Choice(default(weight))}


def _remembered(key: tuple, measured: Callable[[], Any]) -> Any:
    """What is measured once in a process for each number of threads."""
    key = (torch.get_num_threads(), *key)
    if key not in _FASTEST:
        _FASTEST[key] = measured()
    return _FASTEST[key]


def fastest(times: Times, usual: str) -> Choice:
    """The layout with the least median time, or `usual` if none is clearly faster.

    Clearly: its median is below `WORTH` of that of `usual`, and it is faster beyond the noise, see `wins`. Panels are
    taken where no other layout is clearly faster: with them a token has the same bits whatever it is computed with, so
    that verification gives what decoding gives: another one must stay below `WORTH_BITS` of their time.
    """
    usual, worth = (PANELS, WORTH_BITS) if PANELS in times else (usual, WORTH)
    medians = {name: median(of) for name, of in times.items()}
    clear = [
        name
        for name, of in times.items()
        if medians[name] < worth * medians[usual] and wins(of, times[usual])
    ]
    best = min(clear, key=lambda name: medians[name], default=usual)
    return Choice(best, {name: 1e3 * seconds for name, seconds in medians.items()})


def wins(times: Sequence[float], others: Sequence[float]) -> bool:
    """Whether some times are less than others beyond the noise: in `CLEAR` of all comparisons of one with one.

    Where both are equally fast, chance brings that about in one of ten cases with five times each, and in one of a
    hundred with fifteen.
    """
    return sum(a < b for a in times for b in others) >= CLEAR * len(times) * len(others)


# -- in place ----------------------------------------------------------------------------------------------------


class Timed:
    """A matrix whose products are timed.

    Args:
        matrix: [out, in] in any layout.
    """

    def __init__(self, matrix: Made):
        self.matrix, self.seconds = matrix, 0.0

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        begun = clock()
        outputs = product(states, self.matrix, bias)
        self.seconds += clock() - begun
        return outputs


class TimedPasses:
    """Passes of a target after a filled cache; of a large one, of its last layers alone.

    Args:
        target: to run.
        shapes: of the passes.
    """

    def __init__(self, target: StagedModel, shapes: Sequence[PassShape]):
        self.target = target
        self.first = len(target.layers) - 1  # layer that is run
        while self.first > 0 and target.pass_bytes(self.first) < PART_BYTES:
            self.first -= 1
        longest = max(shape.tokens for shape in shapes) + target.padding
        self._cache = target.new_cache(PROMPT + longest, max(shape.batch for shape in shapes))
        for segment in self._cache.segments:
            segment.normal_()

    def products(self, shape: PassShape) -> int:
        """The tokens of a product in such a pass."""
        return shape.batch * max(shape.tokens, self.target.width or 1)

    def prepare(self, shape: PassShape) -> None:
        """Leaves in the caches what the loop leaves there before such a pass, see the head of this module."""
        if self.first == 0:
            self.run(shape)
        if self.first > 0 or shape.tokens > 1:
            sweep(SWEEP_BYTES)

    def run(self, shape: PassShape) -> float:
        """Seconds of a pass."""
        target, (b, n) = self.target, shape
        ids = torch.arange(b * n).remainder(target.vocab_size).view(b, n)
        hidden = torch.linspace(-1, 1, b * n * target.hidden_size, dtype=target.dtype).view(b, n, -1)
        resume = Resume(self.first, hidden) if self.first > 0 else None
        begun = clock()
        target.verify(ids[:, :1], Draft(ids[:, 1:], resume=resume), self._cache, PROMPT)
        return clock() - begun


@torch.inference_mode()
def _in_place(
    target: StagedModel, groups: Mapping[str, Sequence[PackedWeight]], shapes: Sequence[PassShape]
) -> tuple[dict[str, Choices], dict[int, dict[str, float]]]:
    """The choices for a target's groups of weights, and milliseconds of whole passes.

    All groups try a layout at once, each product is timed within its pass, and the layouts take turns. What is fastest
    for each group is compared once more, all of it against the default layouts, by whole passes: what gains in its
    products and costs as much elsewhere is not taken.
    """
    passes = TimedPasses(target, shapes)
    run = {id(laid) for laid in packed_weights([*target.layers[passes.first :], target.lm_head])}
    tried = {name: [laid for laid in group if id(laid) in run] for name, group in groups.items()}
    tried = {name: group for name, group in tried.items() if group and _is_large(group)}
    choices: dict[str, Choices] = {name: {} for name in tried}
    pass_ms: dict[int, dict[str, float]] = {}
    size = len(LAYOUTS) * sum(laid.weight.nbytes for group in tried.values() for laid in group)
    if not tried or not _fits(size):
        return {}, {}
    usual = {name: default(group[0].weight) for name, group in tried.items()}
    made = {name: _all_made([laid.weight for laid in group]) for name, group in tried.items()}
    try:
        for shape in {passes.products(shape): shape for shape in shapes}.values():
            tokens = passes.products(shape)
            times = _try_products(passes, shape, tried, made, usual)
            best = {name: fastest(times[name], usual[name]) for name in tried}
            if any(best[name].layout != usual[name] for name in tried):
                pass_ms[tokens], slower = _check(passes, shape, tried, made, usual, best)
                if slower:
                    best = {name: Choice(usual[name], choice.ms) for name, choice in best.items()}
            for name, choice in best.items():
                choices[name][tokens] = choice
    finally:
        for group in tried.values():
            for laid in group:
                laid.serve(None)
    return choices, pass_ms


def _try_products(
    passes: TimedPasses,
    shape: PassShape,
    groups: Mapping[str, Sequence[PackedWeight]],
    made: Mapping[str, Mapping[str, Sequence[Made]]],
    usual: Mapping[str, str],
) -> dict[str, Times]:
    """Seconds of the products of each group within a pass, by layout."""
    names = [name for name in LAYOUTS if passes.products(shape) == 1 or name not in ONE_TOKEN]
    names = [name for name in names if all(name in of for of in made.values())]
    timed = {
        (layout, name): [Timed(matrix) for matrix in made[name][layout]]
        for layout in names
        for name in groups
    }

    def turn(layout: str) -> dict[str, float]:
        _serve(groups, {name: timed[layout, name] for name in groups})
        passes.prepare(shape)
        for name in groups:
            for matrix in timed[layout, name]:
                matrix.seconds = 0.0
        passes.run(shape)
        return {name: sum(matrix.seconds for matrix in timed[layout, name]) for name in groups}

    # Kernels are made when they are first called: here, or in the pass in front of the timed one.
    if passes.first > 0:
        for layout in names:
            turn(layout)
    return _in_rounds(names, usual, turn, SECONDS)


def _check(
    passes: TimedPasses,
    shape: PassShape,
    groups: Mapping[str, Sequence[PackedWeight]],
    made: Mapping[str, Mapping[str, Sequence[Made]]],
    usual: Mapping[str, str],
    best: Mapping[str, Choice],
) -> tuple[dict[str, float], bool]:
    """Milliseconds of whole passes with the default layouts and with those that were best; whether these are slower."""
    ways = {DEFAULT: usual, TRIED: {name: choice.layout for name, choice in best.items()}}

    def turn(way: str) -> dict[str, float]:
        _serve(groups, {name: made[name][ways[way][name]] for name in groups})
        passes.prepare(shape)
        return {PASS: passes.run(shape)}

    times = _in_rounds(list(ways), {PASS: DEFAULT}, turn, CHECK_SECONDS)[PASS]
    return {way: 1e3 * median(times[way]) for way in ways}, wins(times[DEFAULT], times[TRIED])


def _serve(groups: Mapping[str, Sequence[PackedWeight]], matrices: Mapping[str, Sequence[Made]]) -> None:
    """Lets the weights of each group take their matrix of it in all products."""
    for name, group in groups.items():
        for laid, matrix in zip(group, matrices[name]):
            laid.serve(matrix)


def _in_rounds(
    names: Sequence[str],
    usual: Mapping[str, str],
    turn: Callable[[str], dict[str, float]],
    seconds: float,
) -> dict[str, Times]:
    """Measures in rounds over all names, so that other load meets all alike.

    Args:
        names: to measure; those that are hopeless after a few rounds are left out of further ones.
        usual: the default one, by what is measured.
        turn: gives, for a name, seconds by what is measured.
        seconds: after which no round begins.

    Returns:
        What `turn` gave, by what is measured and by name.
    """
    measured: dict[str, Times] = {what: {name: [] for name in names} for what in usual}
    begun, rounds = clock(), 0
    while rounds < FEWEST_ROUNDS or (rounds < ROUNDS and clock() - begun < seconds):
        for name in names:
            for what, spent in turn(name).items():
                measured[what][name].append(spent)
        rounds += 1
        if rounds >= FEWEST_ROUNDS:
            names = [name for name in names if not _is_hopeless(name, measured, usual)]
    return measured


def _is_hopeless(name: str, measured: Mapping[str, Times], usual: Mapping[str, str]) -> bool:
    return all(min(times[name]) > HOPELESS * min(times[usual[what]]) for what, times in measured.items())


def sweep(size: int) -> None:
    """Reads so many bytes of other memory, `SWEEP_BYTES` at most."""
    _other_memory()[: size // 4].sum()


@cache
def _other_memory() -> torch.Tensor:
    return torch.ones(SWEEP_BYTES // 4)


# -- one shape at a time -----------------------------------------------------------------------------------------


def _alone(weights: Sequence[torch.Tensor], tokens: Sequence[int]) -> Choices:
    """The choices for a drafter's weights of one shape."""
    usual = default(weights[0])
    return {n: fastest(times, usual) for n, times in measure(weights, tokens).items()}


@torch.inference_mode()
def measure(weights: Sequence[torch.Tensor], tokens: Sequence[int]) -> dict[int, Times]:
    """Seconds of products with weights of one shape, by number of tokens and layout.

    A product reads another weight than the one before, as a pass through a model does; where all weights are fewer
    than `SWEEP_BYTES`, as one that is alone of its shape, other memory is read in between. Of a large matrix its first
    rows are measured.
    """
    row_bytes = weights[0].shape[1] * weights[0].element_size()
    rows = max(1, min(weights[0].shape[0], SAMPLE_BYTES // row_bytes))
    sample = [weight.detach()[:rows] for weight in weights[: -(-SWEEP_BYTES // (rows * row_bytes))]]
    rest = SWEEP_BYTES - sum(weight.nbytes for weight in sample)
    made = _all_made(sample)
    times: dict[int, Times] = {}
    usual = {PRODUCTS: default(weights[0])}
    for n in tokens:
        states = _states(sample[0], n)

        def turn(layout: str, states: torch.Tensor = states) -> dict[str, float]:
            sweep(max(0, rest))
            start = clock()
            for matrix in made[layout]:
                product(states, matrix, None)
            return {PRODUCTS: clock() - start}

        names = [name for name in made if n == 1 or name not in ONE_TOKEN]
        for name in names:  # kernels are made when they are first called
            product(states, made[name][0], None)
        times[n] = _in_rounds(names, usual, turn, DRAFTER_SECONDS / len(tokens))[PRODUCTS]
    return times


def _states(weight: torch.Tensor, tokens: int) -> torch.Tensor:
    """States [1, tokens, in] for a weight [out, in]."""
    columns = weight.shape[1]
    return torch.linspace(-1, 1, tokens * columns, dtype=weight.dtype).view(1, tokens, columns)


# -- weights -----------------------------------------------------------------------------------------------------


def _groups(target: StagedModel | None) -> dict[str, list[PackedWeight]]:
    """The laid-out weights on the CPU: a target's head, its layers' and a drafter's by shape and type."""
    head: set[int] = set()
    layers: set[int] = set()
    if target is not None:
        head = {id(laid) for laid in packed_weights([target.lm_head])}
        layers = {id(laid) for laid in packed_weights(target.layers)}
    groups: dict[str, list[PackedWeight]] = defaultdict(list)
    for laid in PACKED:
        if laid.weight.device.type == "cpu" and not laid.weight.requires_grad:
            whose = HEAD if id(laid) in head else LAYERS if id(laid) in layers else DRAFTER
            groups[f"{whose} {_name(laid.weight)}"].append(laid)
    return {
        name: groups[name] for name in sorted(groups, key=lambda name: (OWNERS.index(name.split()[0]), name))
    }


def _is_large(group: Sequence[PackedWeight]) -> bool:
    return group[0].weight.numel() >= LEAST


def _all_made(weights: Sequence[torch.Tensor]) -> dict[str, list[Made]]:
    """Weights of one shape in every layout that there is for them."""
    return {name: made for name, lay in LAYOUTS.items() if (made := _made(lay, weights)) is not None}


def _made(lay: Callable[[torch.Tensor], Made], weights: Sequence[torch.Tensor]) -> list[Made] | None:
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
