"""A small seeded world: one lexicon, one set of facts, and an endless stream of examples of the six tasks.

Everything follows from `WORLD_SEED` and the seed of the stream; no file and no network is read. Training
streams and benchmark streams have different seeds, and share the words and the facts of the world. A question about
one fact has few forms, so that different seeds ask some of the same questions: training streams leave these out. The
shipped weights are older than this and saw some of them; `make tiny` now trains others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from specbench.tiny import tasks
from specbench.tiny.conversation import CATEGORIES
from specbench.tiny.drills import DRILLS
from specbench.tiny.facts import Facts
from specbench.tiny.lexicon import Lexicon, mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WORLD_SEED = 20240607
TRAIN_SEED, HELD_OUT_SEED, BENCHMARK_SEED, WARMUP_SEED = 1, 900_001, 900_002, 900_003

MT_BENCH = tuple(CATEGORIES)
TASKS = {
    "translation": tasks.translation, "summarization": tasks.summarization, "qa": tasks.qa,
    "math_reasoning": tasks.math_reasoning, "rag": tasks.rag,
}  # fmt: skip
TASK_NAMES = ("mt_bench", *TASKS)


@dataclass(frozen=True)
class Example:
    """One conversation: a Spec-Bench category, the user's turns, and one answer per turn."""

    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def task(self) -> str:
        """The Spec-Bench task that the category belongs to."""
        return "mt_bench" if self.category in CATEGORIES else self.category


@cache
def the_world(seed: int = WORLD_SEED) -> tuple[Lexicon, Facts]:
    """Lexicon and facts of the world (made once per process, about a second)."""
    lexicon = Lexicon(seed)
    return lexicon, Facts(lexicon)


def make_example(category: str, seed: int, index: int) -> Example:
    """Example number `index` of the stream `seed` in `category`; KeyError for an unknown category."""
    lexicon, facts = the_world()
    rng = random.Random(mix(WORLD_SEED, seed, index, *category.encode()))
    maker = CATEGORIES.get(category) or TASKS.get(category) or DRILLS[category]
    turns, answers = maker(tasks.Setting(lexicon, facts, rng))
    return Example("drill" if category in DRILLS else category, tuple(turns), tuple(answers))


def training_examples(seed: int = TRAIN_SEED, drills: Mapping[str, float] | None = None) -> Iterator[Example]:
    """An endless stream of examples; a quarter are conversations, the rest spread over five tasks.

    `drills` gives the share of each kind of exercise of `DRILLS` (category "drill") between them. An example that
    begins with a measured question is left out; all others are what they would be without this rule.
    """
    measured = measured_questions()
    rng = random.Random(mix(WORLD_SEED, 5, seed))
    weights = {name: 3 for name in TASKS} | {"translation": 5} | dict.fromkeys(MT_BENCH, 0.8)
    if drills:
        whole = sum(weights.values()) / (1 - sum(drills.values()))
        weights |= {name: share * whole for name, share in drills.items()}
    names = list(weights)
    index = 0
    while True:
        category = rng.choices(names, weights=list(weights.values()))[0]
        example = make_example(category, seed, index)
        if example.turns[0] not in measured:
            yield example
        index += 1


def benchmark_examples(seed: int = BENCHMARK_SEED, per_task: int = 40) -> list[Example]:
    """`per_task` examples of each task, grouped by category; conversations are spread over the eight."""
    found = []
    for category in MT_BENCH:
        count = max(1, per_task // len(MT_BENCH))
        found += [make_example(category, seed, index) for index in range(count)]
    for category in TASKS:
        found += [make_example(category, seed, index) for index in range(per_task)]
    return found


def warmup_examples() -> list[Example]:
    """One example of each task, for the warm-up."""
    return list({example.task: example for example in benchmark_examples(WARMUP_SEED, 1)}.values())


@cache
def measured_questions() -> frozenset[str]:
    """The first turn of every benchmark and warm-up question.

    Later turns ("Shorten it.") are no questions by themselves.
    """
    return frozenset(example.turns[0] for example in [*benchmark_examples(), *warmup_examples()])
