"""What parts of the check are given and say, and how they time some work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from specbench.data.questions import warmup_questions
from specbench.decoding.trace import Clock
from specbench.models.pairs import Pair
from tests.benchmarks.gpu.settings import Settings, pair_settings

GB, MS = 1e9, 1e3
REPEATS = 20
COMPILING = 150  # seconds that a pass takes to be compiled, at most
# On a CPU, to try the script itself: narrow models, few tokens.
SMALL_TARGET = {
    "model_type": "llama",
    "hidden_size": 160,
    "intermediate_size": 400,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 40,
    "vocab_size": 16400,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SMALL_DRAFT = SMALL_TARGET | {"num_hidden_layers": 4}


class TimeUp(Exception):
    """There is no time for what it names."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Attributes:
        name: what was measured.
        value: the figure; None where it could not be measured.
        unit: of it.
        low: at least as much is expected; None: no expectation.
        high: at most so much is expected.
        note: what else was seen.
    """

    name: str
    value: float | int | str | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """What a part is given.

    Attributes:
        device: to measure.
        small: whether only the script is tried.
        say: takes each figure as soon as it is there.
        end: when its time is up, by `time.monotonic`.
        methods: of all methods only these; None: all.
        measured: methods that were measured before, the last one at the end.
    """

    device: torch.device
    small: bool
    say: Callable[[Figure], None]
    end: float = math.inf
    methods: Collection[str] | None = None
    measured: Sequence[str] = ()

    def go_on(self, step: str, takes: float = 0.0) -> None:
        """Called in front of each step of a part: raises TimeUp where there is no time for it.

        Args:
            step: what would be measured next.
            takes: seconds of it, if they are many.
        """
        if time.monotonic() + takes >= self.end:
            raise TimeUp(step)

    def chosen(self, methods: Iterable[str]) -> list[str]:
        """Those of some methods that are asked for: never measured ones first, then what was measured longest ago."""
        asked = [name for name in methods if self.methods is None or name in self.methods]
        return sorted(asked, key=lambda name: self.measured.index(name) if name in self.measured else -1)

    @property
    def tokens(self) -> int:
        """New tokens of an answer."""
        return 6 if self.small else 64

    def settings(self, name: str, **changes: Any) -> Settings:
        """A pair's configuration on this device; small where the script is tried."""
        if self.small and name != "tiny":
            changes |= {"target_shape": SMALL_TARGET, "draft_shape": SMALL_DRAFT}
        return pair_settings(name, device=str(self.device), **changes)

    def prompts(self, pair: Pair, count: int) -> list[list[int]]:
        """Prompts that nothing else is measured on."""
        questions = warmup_questions({"warmup": None})[:count]
        return [pair.prompt_ids([{"role": "user", "content": q.turns[0]}]) for q in questions]


def seconds(check: Check, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of some work, after three calls to warm up, by marks between which nothing waits."""
    repeats = 3 if check.small else repeats
    clock = Clock(check.device)
    for _ in range(1 if check.small else 3):
        work()
    clock.synchronize()
    marks = [clock.mark()]
    for _ in range(repeats):
        work()
        marks.append(clock.mark())
    clock.synchronize()
    return median(clock.seconds(a, z) for a, z in pairwise(marks))
