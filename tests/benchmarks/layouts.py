"""Layouts of weights: `python -m tests.benchmarks.layouts`.

First a product with one matrix, by shape, layout and number of tokens, least of several rounds. Then passes of a whole
target with random weights: the embedded target's anatomy, `--width` wide (128: its own), with default layouts, with
those that are chosen by products with one weight read again and again, and with those that are chosen in place; all
against a plain read of as many bytes. Everything compared takes turns.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import asdict
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.decoding.cpu import autotune as layouts
from specbench.decoding.cpu.autotune import Choice, PassShape, choose_layouts
from specbench.decoding.cpu.packed_linear import default
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.model.staged_model import StagedModel
from specbench.report.remarks import layouts_line
from specbench.system.paths import packaged

SHAPES = ["128x128", "16384x128", "512x512", "1536x512", "512x1536", "1024x3072", "3072x1024"]
TOKENS = [1, 2, 6, 16, 64]
CHOSEN_FOR = [1, 6, 16]
PROMPT, CAPACITY = 100, 256
PASSES = 5  # of one number of tokens in a row
ANATOMY = "specbench/tiny/weights/target"


def wide_target(width: int, dtype: torch.dtype) -> StagedModel:
    """The embedded target with other widths and random weights; its heads stay as wide as they are."""
    config = AutoConfig.from_pretrained(packaged(ANATOMY))
    factor = width / config.hidden_size
    config.num_attention_heads = config.num_key_value_heads = int(config.num_attention_heads * factor)
    config.hidden_size, config.intermediate_size = width, int(config.intermediate_size * factor)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return StagedModel(model.eval().requires_grad_(False))


@torch.inference_mode()
def pass_seconds(target: StagedModel, cache: KVCache, tokens: int) -> float:
    """Seconds of a pass over some tokens after the prompt."""
    ids = torch.arange(tokens).view(1, -1)
    start = time.perf_counter()
    target.head(target.run_layers(target.embed(ids), cache, PROMPT))
    return time.perf_counter() - start


def print_products(shapes: list[str], dtype: torch.dtype) -> None:
    """A table of the products with single matrices."""
    print("product, us" + "".join(f"{n:>9}" for n in TOKENS) + "  tokens;  6 to 1")
    for shape in shapes:
        rows, columns = map(int, shape.split("x"))
        count = max(2, layouts.SWEEP_BYTES // (rows * columns * dtype.itemsize))
        weights = [torch.randn(rows, columns, dtype=dtype) for _ in range(count)]
        found = layouts.measure(weights, TOKENS)
        for name in found[1]:
            least = {n: min(found[n][name]) / count for n in TOKENS if name in found[n]}
            line = "".join(f"{1e6 * least[n]:9.1f}" if n in least else f"{'':9}" for n in TOKENS)
            print(f"{shape:>10} {name:10}{line}" + (f"   {least[6] / least[1]:6.2f}" if 6 in least else ""))


def chosen_alone(target: StagedModel) -> dict[str, Any]:
    """Choices by products with weights of one shape that are read again and again, with nothing in between."""
    with patch.object(layouts, "sweep", lambda size: None):
        found = {
            name: layouts._alone([laid.weight for laid in group], [1, 6])
            for name, group in layouts._groups(target).items()
            if layouts._is_large(group)
        }
    return {
        "groups": {
            name: {str(n): asdict(choice) for n, choice in choices.items()} for name, choices in found.items()
        }
    }


def all_default(target: StagedModel) -> dict[str, Any]:
    """Choices of the default layouts."""
    groups = layouts._groups(target)
    return {"groups": {name: {"1": asdict(Choice(default(of[0].weight)))} for name, of in groups.items()}}


def print_passes(width: int, dtype: torch.dtype, repeats: int) -> None:
    """Passes of a target by layout and number of tokens, and how near to a plain read they come."""
    target = wide_target(width, dtype)
    buffer = torch.ones(target.pass_bytes() // 4)
    cache = target.new_cache(CAPACITY)
    with torch.inference_mode():
        target.prefill(torch.arange(PROMPT).unsqueeze(0), cache)
    ways = {"default": all_default(target), "alone": chosen_alone(target)}
    start = time.perf_counter()
    ways["in place"] = choose_layouts(target, [PassShape(1, n) for n in CHOSEN_FOR])
    print(f"target {width} wide, {target.pass_bytes() / 1e6:.0f} MB a pass; chosen in place in ", end="")
    print(f"{time.perf_counter() - start:.1f} s")
    for name, way in ways.items():
        print(f"{name}: {layouts_line({'layouts': way})}")
    # Seconds of passes by way and number of tokens, those of one repeat together.
    seconds: dict[str, dict[int, list[list[float]]]] = {name: defaultdict(list) for name in ways}
    reads = []
    for repeat in tqdm(range(repeats), unit="repeat"):
        names = [*ways]
        for name in names[repeat % 3 :] + names[: repeat % 3]:
            choose_layouts(target, earlier=ways[name])
            for tokens in TOKENS:
                pass_seconds(target, cache, tokens)  # the first one fills the caches
                own = [pass_seconds(target, cache, tokens) for _ in range(PASSES)]
                seconds[name][tokens].append(own)
            start = time.perf_counter()
            buffer.sum()
            reads.append(time.perf_counter() - start)
    print(f"plain read of as many bytes: {1e3 * min(reads):.1f} ms")
    print("pass, ms" + " " * 16 + "".join(f"{n:>9}" for n in TOKENS) + "  tokens")
    for name, by_tokens in seconds.items():
        typical = {n: [median(own) for own in of] for n, of in by_tokens.items()}
        least = {n: min(min(own) for own in of) for n, of in by_tokens.items()}
        usual = {n: [median(own) for own in of] for n, of in seconds["default"].items()}
        ratios = {n: median(a / b for a, b in zip(typical[n], usual[n])) for n in TOKENS}
        for what, line in (
            ("median", "".join(f"{1e3 * median(typical[n]):9.2f}" for n in TOKENS)),
            ("least", "".join(f"{1e3 * least[n]:9.2f}" for n in TOKENS)),
            ("of default", "".join(f"{ratios[n]:9.3f}" for n in TOKENS)),
        ):
            print(f"{name:>9} {what:14}{line}")
        speed = f"1 token: {min(reads) / least[1]:.2f} of the read's speed"
        print(f"{name:>9} 6 tokens to 1: {least[6] / least[1]:.2f}, {speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--width", type=int, default=512, help="of the target; 0: no target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layouts.DRAFTER_SECONDS = 2.0
    dtype = getattr(torch, options.dtype)
    print(f"{options.dtype}, {torch.get_num_threads()} threads")
    print_products(options.shapes, dtype)
    if options.width:
        print_passes(options.width, dtype, options.repeats)


if __name__ == "__main__":
    main()
