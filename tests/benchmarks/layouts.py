"""Layouts of weights: `python -m tests.benchmarks.layouts`.

First a product with one matrix, by shape, layout and number of tokens, least of several rounds. Then passes of a whole
target with random weights: the embedded target's anatomy, `--width` wide, with default layouts and with those that are
chosen, and both against a plain read of as many bytes. Everything compared takes turns.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import asdict

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.decoding import layouts
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.layouts import choose_layouts
from specbench.decoding.linear import default
from specbench.decoding.target import StagedModel
from specbench.questions import packaged

SHAPES = ["128x128", "16384x128", "512x512", "1536x512", "512x1536", "1024x3072", "3072x1024"]
TOKENS = [1, 2, 6, 16, 64]
PROMPT, CAPACITY = 100, 256
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
    """Seconds of a pass over some tokens behind the prompt."""
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
        for name in found[0]:
            least = {n: min(times[name][n] for times in found) / count for n in TOKENS}
            line = "".join(f"{1e6 * least[n]:9.1f}" for n in TOKENS)
            print(f"{shape:>10} {name:8}{line}   {least[6] / least[1]:6.2f}")


def print_passes(width: int, dtype: torch.dtype, repeats: int) -> None:
    """Passes of a target by layout and number of tokens, and how near to a plain read they come."""
    target = wide_target(width, dtype)
    buffer = torch.ones(target.pass_bytes() // 4)
    cache = target.new_cache(CAPACITY)
    with torch.inference_mode():
        target.prefill(torch.arange(PROMPT).unsqueeze(0), cache)
    start = time.perf_counter()
    chosen = choose_layouts()
    print(f"target {width} wide, {target.pass_bytes() / 1e6:.0f} MB a pass; chosen in ", end="")
    print(f"{time.perf_counter() - start:.1f} s: {chosen}")
    usual = asdict(default(torch.empty(0, dtype=dtype)))
    ways = {"default": dict.fromkeys(chosen, usual), "chosen": chosen}
    seconds: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in ways}
    reads = []
    for _ in range(repeats):
        for name, known in ways.items():
            choose_layouts(known=known)
            for tokens in TOKENS * 5:
                seconds[name][tokens].append(pass_seconds(target, cache, tokens))
            for _ in range(5):
                start = time.perf_counter()
                buffer.sum()
                reads.append(time.perf_counter() - start)
    print(f"plain read of as many bytes: {1e3 * min(reads):.1f} ms")
    for name, by_tokens in seconds.items():
        least = {n: min(of) for n, of in by_tokens.items()}
        line = "".join(f"{1e3 * least[n]:9.2f}" for n in TOKENS)
        print(
            f"pass, ms {name:8}{line}   6 tokens to 1: {least[6] / least[1]:.2f}, 1 token: "
            f"{min(reads) / least[1]:.2f} of the read's speed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--width", type=int, default=512, help="of the target; 0: no target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layouts.ROUNDS, layouts.SECONDS = 15, 2.0
    dtype = getattr(torch, options.dtype)
    print(f"{options.dtype}, {torch.get_num_threads()} threads")
    print_products(options.shapes, dtype)
    if options.width:
        print_passes(options.width, dtype, options.repeats)


if __name__ == "__main__":
    main()
