"""The parts of the check, each a function that prints figures as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.benchmarks.gpu.answers import batches, embedded, expanded, generate, oracle, overlap
from tests.benchmarks.gpu.figures import COMPILING, Check
from tests.benchmarks.gpu.passes import attention, bandwidth, environment, graphs, passes, profile


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check, which runs in a process of its own.

    Attributes:
        work: measures.
        share: of the time that there is, among the parts that are chosen.
        least: seconds without which it is not begun.
    """

    work: Callable[[Check], None]
    share: int
    least: int = 10


# What would invalidate the rest comes first. In nine minutes a share is two thirds of a second.
PARTS: dict[str, Part] = {
    "environment": Part(environment, 25),
    "bandwidth": Part(bandwidth, 25),
    "embedded-float32": Part(partial(embedded, dtype="float32"), 80),
    "passes": Part(passes, 40),
    "graphs": Part(graphs, 40),
    "profile": Part(profile, 25),
    "attention": Part(attention, 20),
    "oracle": Part(oracle, 45),
    "expanded-llama-3.1-8b": Part(partial(expanded, name="llama-3.1-8b", every=True), 160),
    "overlap": Part(overlap, 60),
    "batches": Part(batches, 50),
    "compiled": Part(partial(graphs, compiles=True), 80, least=COMPILING + 30),
    "generate": Part(generate, 40),
    "embedded-bfloat16": Part(partial(embedded, dtype="bfloat16"), 80),
    "expanded-vicuna-7b": Part(partial(expanded, name="vicuna-7b"), 30),
    "expanded-qwen3-8b": Part(partial(expanded, name="qwen3-8b"), 30),
}
