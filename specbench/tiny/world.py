"""A small seeded world: one lexicon, one set of facts, and an endless stream of examples of the six tasks.

Everything follows from `WORLD_SEED` and the seed of the stream; no file and no network is read. Training and
measurement share the words and the facts of the world, but no text of a user's turn: one text in eight, by its hash, is
only measured with (`is_measured`). What is measured has only such turns; what models are trained on has none.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count

from specbench.tiny import tasks
from specbench.tiny.conversation import CATEGORIES
from specbench.tiny.drills import DRILLS
from specbench.tiny.facts import Facts
from specbench.tiny.lexicon import Lexicon, mix

WORLD_SEED = 20261123
TRAIN_SEED, HELD_OUT_SEED, BENCHMARK_SEED, WARMUP_SEED = 1, 900_001, 900_002, 900_003
MEASURED_SHARE = 8  # one text in so many
MOST_TRIES = 40_000

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
def the_world() -> tuple[Lexicon, Facts]:
    """Lexicon and facts of the world (made once per process, about a second)."""
    lexicon = Lexicon(WORLD_SEED)
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

    `drills` gives the share of each kind of exercise of `DRILLS` (category "drill") between them, and of tasks that are
    to be seen more often. An example with a turn that is measured with is left out.
    """
    rng = random.Random(mix(WORLD_SEED, 5, seed))
    weights = {name: 3 for name in TASKS} | {"translation": 5} | dict.fromkeys(MT_BENCH, 0.8)
    if drills:
        rest = sum(weight for name, weight in weights.items() if name not in drills)
        whole = rest / (1 - sum(drills.values()))
        weights |= {name: share * whole for name, share in drills.items()}
    names = list(weights)
    for index in count():
        category = rng.choices(names, weights=list(weights.values()))[0]
        example = make_example(category, seed, index)
        if not any(is_measured(turn) for turn in example.turns):
            yield example


def is_measured(text: str) -> bool:
    """Whether a user's turn is only measured with, never trained on."""
    return mix(WORLD_SEED, *text.encode()) % MEASURED_SHARE == 0


def measured_examples(
    category: str, seed: int, number: int, avoid: Collection[Example] = ()
) -> list[Example]:
    """`number` different examples of a category to measure with, none of which asks what one of `avoid` asks.

    Raises:
        ValueError: the world has too few of them.
    """
    taken = {example.turns for example in avoid}
    found: list[Example] = []
    for index in range(MOST_TRIES):
        if len(found) == number:
            return found
        example = make_example(category, seed, index)
        if example.turns not in taken and all(is_measured(turn) for turn in example.turns):
            taken.add(example.turns)
            found.append(example)
    raise ValueError(f"{category}: {len(found)} examples to measure with among {MOST_TRIES}, not {number}")


def benchmark_examples(
    seed: int = BENCHMARK_SEED, per_task: int = 40, avoid: Collection[Example] = ()
) -> list[Example]:
    """`per_task` examples of each task, grouped by category; conversations are spread over the eight."""
    numbers = dict.fromkeys(MT_BENCH, max(1, per_task // len(MT_BENCH))) | dict.fromkeys(TASKS, per_task)
    return [
        example
        for category, number in numbers.items()
        for example in measured_examples(category, seed, number, avoid)
    ]


def warmup_examples() -> list[Example]:
    """One example of each task, for the warm-up; none of them is measured."""
    examples = benchmark_examples(WARMUP_SEED, 1, avoid=benchmark_examples())
    return list({example.task: example for example in examples}.values())
