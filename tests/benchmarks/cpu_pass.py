"""Where the time of a pass goes on a CPU: `python -m tests.benchmarks.cpu_pass [OVERRIDE ...]`.

The passes of a pair's target after a prompt, run four ways that take turns: transformers' own forward, and ours with
torch's kernels, with kernels of our own, and with compiled layers, too. Then, for each of ours, milliseconds of the
products by shape beside what their bytes take to be read, of attention, and of all the rest.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import DynamicCache

from specbench.decoding.cpu import grouped_attention, native, packed_linear
from specbench.decoding.cpu.compiled_layers import CompiledLayer
from specbench.decoding.cpu.packed_linear import packed_weights
from specbench.decoding.model.graphs import Options, set_options
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import Draft
from specbench.measure.machine.bandwidth import bandwidth
from specbench.measure.runner import prepare
from tests.support.conf import composed

PROMPT = 200
EVERY = 4  # turns after which the speed of reading is measured again
MODEL, TORCH, KERNELS, COMPILED = "transformers", "torch's kernels", "kernels of our own", "compiled layers"
OURS = (TORCH, KERNELS, COMPILED)


class Way:
    """One way to run a target, which is its own."""

    def __init__(self, name: str, target: StagedModel):
        self.name, self.target = name, target
        self.cache = target.new_cache(PROMPT + 64)

    def kernels(self) -> Any:
        """A context with torch's kernels alone, where the way has those."""
        return patch.object(native, "_available", lambda: False) if self.name == TORCH else nullcontext()

    def run(self, ids: torch.Tensor) -> float:
        """Seconds of a pass over ids [1, n]."""
        draft = Draft(ids[:, 1:])
        with self.kernels():
            begun = time.perf_counter()
            self.target.verify(ids[:, :1], draft, self.cache, PROMPT)
            return time.perf_counter() - begun


def model_seconds(target: StagedModel, cache: DynamicCache, ids: torch.Tensor) -> float:
    """Seconds of a pass of transformers' own forward."""
    if surplus := cache.get_seq_length() - PROMPT:
        cache.crop(-surplus)
    begun = time.perf_counter()
    target.model(ids, past_key_values=cache, use_cache=True)
    return time.perf_counter() - begun


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up what products, by shape, and attention take inside, where all of them are called from Python."""

    def clocked(function: Callable[..., Any], label: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            output = function(*args, **kwargs)
            seconds[label(*args)] += time.perf_counter() - begun
            return output

        return call

    def shape(weight: Any, *_: Any) -> str:
        return "x".join(map(str, weight.weight.shape))

    def of_python(layer: CompiledLayer, *_: Any) -> tuple[list[None], tuple[()], None]:
        return [None] * len(layer.products), (), None

    times = packed_linear.PackedWeight.times
    kernel, sdpa = torch.ops.specbench.attend.default, grouped_attention.scaled_dot_product_attention
    with (
        patch.object(CompiledLayer, "_of_kernels", of_python),
        patch.object(packed_linear.PackedWeight, "times", clocked(times, shape)),
        patch.object(torch.ops.specbench.attend, "default", clocked(kernel, lambda *_: "attention")),
        patch.object(
            grouped_attention, "scaled_dot_product_attention", clocked(sdpa, lambda *_: "attention")
        ),
    ):
        yield


@torch.inference_mode()
def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 6, 16])
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode(False):
        cfg = composed("bench", "method=ar", "generate=false", "pair.compile=false", *args.overrides)
        model = prepare(cfg).setup.pair.target
        targets = {}
        for name in OURS:
            with patch.object(native, "_available", lambda: False) if name == TORCH else nullcontext():
                twin = copy.deepcopy(model)  # whose weights have copies of their own
                set_options(twin, Options(compile=name == COMPILED))
                targets[name] = StagedModel(twin)
    ways = [Way(name, target) for name, target in targets.items()]
    ids = torch.randint(4, 4000, (1, PROMPT + 64))
    own_cache = DynamicCache(config=model.config)
    targets[TORCH].model(ids[:, :PROMPT], past_key_values=own_cache, use_cache=True)
    for way in ways:
        way.target.prefill(ids[:, :PROMPT], way.cache)
    print(f"\n{'ms a pass':>22}" + "".join(f"{name:>22}" for name in (MODEL, *OURS)))
    single: dict[str, float] = {}
    speeds: list[float] = []
    for n in args.tokens:
        seconds: dict[str, list[float]] = defaultdict(list)
        tokens = ids[:, PROMPT : PROMPT + n]
        for turn in tqdm(range(args.repeats), f"{n} tokens", leave=False):
            if n == args.tokens[0] and turn % EVERY == 0:
                speeds.append(bandwidth(model.device))
            for way in ways:
                way.run(tokens)  # what lies in the caches is what a pass of this way leaves
                seconds[way.name].append(way.run(tokens))
                if way.name == TORCH:  # transformers' forward reads its copies of the weights
                    model_seconds(way.target, own_cache, tokens)
                    seconds[MODEL].append(model_seconds(way.target, own_cache, tokens))
        medians = {name: 1e3 * median(of) for name, of in seconds.items()}
        single = single or medians
        cells = (f"{medians[name]:.1f} ({medians[name] / single[name]:.2f})" for name in (MODEL, *OURS))
        print(f"{f'{n} tokens (to one)':>22}" + "".join(f"{cell:>22}" for cell in cells))
    size, speed = targets[TORCH].pass_bytes(), median(speeds)
    share = 1e3 * size / speed / single[COMPILED]
    print(
        f"reading {size / 1e6:.0f} MB at {speed / 1e9:.1f} GB/s, as measured between these passes, takes "
        f"{1e3 * size / speed:.1f} ms: compiled layers run at {share:.2f} of the ceiling"
    )
    for n in args.tokens:
        print_parts(ways, ids[:, PROMPT : PROMPT + n], speed, args.repeats)


def print_parts(ways: list[Way], tokens: torch.Tensor, speed: float, repeats: int) -> None:
    """A table of what is in a pass over these tokens [1, n]."""
    parts: dict[str, dict[str, list[float]]] = {way.name: defaultdict(list) for way in ways}
    for _ in range(repeats):
        for way in ways:
            way.run(tokens)
            total = way.run(tokens)
            seconds: dict[str, float] = defaultdict(float)
            with timed(seconds):
                way.run(tokens)
            seconds["norms, rotation, activation, cache, starting all of it"] = total - sum(seconds.values())
            for label, of in seconds.items():
                parts[way.name][label].append(of)
    reading: dict[str, float] = defaultdict(float)
    for packed in packed_weights([*ways[0].target.layers, ways[0].target.lm_head]):
        reading["x".join(map(str, packed.weight.shape))] += packed.weight.nbytes / speed
    title = f"ms of a pass of {tokens.shape[1]} tokens"
    print(f"\n{title:>58}{'reading':>9}" + "".join(f"{way.name:>20}" for way in ways))
    for label in parts[KERNELS]:
        cells = (1e3 * median(parts[way.name].get(label, [float("nan")])) for way in ways)
        read = f"{1e3 * reading[label]:.2f}" if label in reading else ""
        print(f"{label:>58}{read:>9}" + "".join(f"{cell:20.2f}" for cell in cells))


if __name__ == "__main__":
    main()
