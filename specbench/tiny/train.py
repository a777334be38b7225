"""Make the embedded family from nothing: tokenizer, questions and models.

    python -m specbench.tiny.train [--out DIR] [--smoke] [--stage NAME]

`methods.family` goes on from here to the drafters, and is what `make tiny` runs.

Every model starts with a lookup circuit set by hand (`models.install_lookup`), without which a few million tokens
do not teach it to quote. The targets are grown in depth, because per token a shallow model learns the words faster:

    base            6 layers, most of the tokens, exercises in copying in between, constant learning rate
    stem            grown to 12 layers (every layer followed by a silent copy of itself), constant rate
    shallow         the stem with its learning rate decayed to zero
    target_shallow  that model trained on, mostly on what it found hard, and decayed again
    target          the same of that model grown to 24 layers
    draft           2 layers of less width, from scratch on the same kind of text, other seed; what the draft models
                    that learn from answers (`methods.family`) begin as

Every stage is seeded and keeps a checkpoint that it goes on from when it is started again. The same machine,
versions and number of threads give the same files; others sum floats in another order, so that the weights
differ a little.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import OmegaConf

from specbench.data import training
from specbench.data.training_folder import RECORD
from specbench.system.arguments import Parser
from specbench.system.errors import UserError, one_line_errors, suggest
from specbench.tiny import models, world
from specbench.tiny.data import PROMPT_WEIGHT, packed_batches
from specbench.tiny.optimise import Schedule, Text, answer_loss
from specbench.tiny.tokenizer import VOCAB_SIZE, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from omegaconf import DictConfig

SHIPPED = Path(__file__).parent
QUESTIONS, WARMUP, SUMS = "questions.jsonl", "warmup.jsonl", "SHA256SUMS"
MODELS = ("target", "target_shallow")
ROW = 512
SAVE_EVERY = 100  # steps
PRECISION = "bf16"  # of the products; weights and sums stay in fp32
HELD_OUT_BATCHES = 4  # of four rows
STREAM = "specbench.tiny.world.training_examples"


@dataclass(frozen=True)
class Stage:
    """One training stage. A step is `batch` rows of `ROW` tokens.

    It starts from the final state of stage `parent` (grown to twice the depth with `grow`), or from scratch in `shape`.
    `minutes` are core minutes that it takes. `drills` is the share of exercises, and of hard tasks, in its text,
    `stuttering` that of the repetitions in its answers, `repeats` what saying a token twice costs. With `ship` its
    model is one of the family.
    """

    name: str
    seed: int
    schedule: Schedule
    batch: int
    minutes: float = 0.0
    drills: Mapping[str, float] | None = None
    stuttering: float = 0.0
    repeats: float = 0.0
    parent: str = ""
    grow: bool = False
    shape: models.Shape | None = None
    ship: bool = False


@dataclass(frozen=True)
class Recipe:
    """Sizes of everything, and the training stages in their order."""

    vocab: int
    tokenizer_examples: int
    per_task: int
    stages: tuple[Stage, ...]


COPY = dict.fromkeys(("copy_words", "copy_sentences", "dictionary", "translate_clause"), 0.03) | {
    "sums": 0.04
}
WORDS = {"dictionary": 0.10, "phrasebook": 0.14, "translate_clause": 0.08, "sums": 0.04}
FEW = {"dictionary": 0.02, "phrasebook": 0.06, "translate_clause": 0.04, "sums": 0.08}
HARD = FEW | {"sums": 0.03, "summarization": 0.20, "roleplay": 0.06, "writing": 0.06}
STEADY = {"stuttering": 0.04, "repeats": 1.0}  # against loops in greedy answers
DEEP, SMALL, TOY = models.Shape(6, 128, 384), models.Shape(2, 96, 288), models.Shape(2, 64, 64)
FULL = Recipe(VOCAB_SIZE, 12_000, 40, (
    Stage("base", 1, Schedule(4000, 30, 0), batch=4, minutes=43, drills=COPY, shape=DEEP),
    Stage("stem", 3, Schedule(1600, 20, 0), batch=4, minutes=25, drills=WORDS, parent="base", grow=True),
    Stage("shallow", 4, Schedule(900, 10, 800), batch=4, minutes=18, drills=FEW, **STEADY, parent="stem"),
    Stage("target_shallow", 6, Schedule(1300, 10, 1000, 0.015, 3e-3), batch=4, minutes=19, drills=HARD, **STEADY,
          parent="shallow", ship=True),
    Stage("target", 5, Schedule(1300, 10, 1000, 0.015, 3e-3), batch=4, minutes=32, drills=HARD, **STEADY,
          parent="shallow", grow=True, ship=True),
    Stage("draft", 12, Schedule(1500, 30, 1000), batch=4, minutes=5, drills=FEW, shape=SMALL),
))  # fmt: skip
SMOKE = Recipe(2048, 200, 8, (
    Stage("base", 1, Schedule(3, 1, 0), batch=1, drills=COPY, shape=TOY),
    Stage("stem", 3, Schedule(2, 1, 0), batch=1, parent="base", grow=True),
    Stage("shallow", 4, Schedule(2, 1, 1), batch=1, parent="stem"),
    Stage("target_shallow", 6, Schedule(2, 1, 1), batch=1, parent="shallow", ship=True),
    Stage("target", 5, Schedule(2, 1, 1), batch=1, parent="shallow", grow=True, ship=True),
    Stage("draft", 12, Schedule(3, 1, 1), batch=4, shape=TOY),
))  # fmt: skip


class Build:
    """The stages; each reads what earlier stages left in `out` and writes its own files."""

    def __init__(self, out: Path, recipe: Recipe) -> None:
        self.out, self.recipe = out, recipe
        self.weights, self.checkpoints = out / "weights", out / "checkpoints"
        for folder in (self.weights, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def stages(self) -> dict[str, Callable[[], None]]:
        """All stages in their order."""
        trained = {stage.name: partial(self.train, stage) for stage in self.recipe.stages}
        return {"tokenizer": self.tokenizer, "questions": self.questions, **trained}

    def make(self, only: str | None = None) -> None:
        """Runs every stage that is not done yet, or just the one of a name."""
        if only is not None and only not in self.stages:
            raise UserError(f"unknown stage '{only}': {suggest(only, [*self.stages])}")
        torch.use_deterministic_algorithms(True)
        for name, stage in self.stages.items():
            if only in (None, name) and not self.is_done(name):
                stage()

    def is_done(self, name: str) -> bool:
        """Whether the result of a stage is there."""
        results = {"tokenizer": self.weights / "tokenizer" / "tokenizer.json", "questions": self.out / WARMUP}
        trained = {stage.name: self.folder(stage) / RECORD for stage in self.recipe.stages}
        return (results | trained)[name].exists()

    def folder(self, stage: Stage) -> Path:
        """Where a stage leaves its model."""
        return (self.weights if stage.ship else self.checkpoints) / stage.name

    def tokenizer(self) -> None:
        """Train and save the tokenizer."""
        tokenizer = train_tokenizer(self.recipe.tokenizer_examples, self.recipe.vocab)
        tokenizer.save_pretrained(self.weights / "tokenizer")

    def questions(self) -> None:
        """Write the benchmark questions, and one of each task for the warm-up."""
        benchmark = world.benchmark_examples(world.BENCHMARK_SEED, self.recipe.per_task)
        write_questions(self.out / QUESTIONS, benchmark)
        write_questions(self.out / WARMUP, world.warmup_examples(), first_id=9001)

    def train(self, stage: Stage) -> None:
        """Run one training stage and save its model."""
        tokenizer = load_tokenizer(self.weights / "tokenizer")
        if stage.parent:
            model = models.load(self.found(stage.parent))
            model = models.grow(model) if stage.grow else model
        else:
            model = models.build(stage.shape, tokenizer, stage.seed)
        text = {"drills": stage.drills, "stuttering": stage.stuttering}
        held_out = list(islice(packed_batches(tokenizer, 4, ROW, world.HELD_OUT_SEED), HELD_OUT_BATCHES))

        def batches(start: int, stride: int) -> Iterator[training.Batch]:
            every = packed_batches(tokenizer, stage.batch, ROW, stage.seed, **text)
            return islice(every, start, None, stride)

        def evaluate() -> dict[str, float]:
            return {"held_out_loss": answer_loss(model, held_out)}

        def save(out: Path, _figures: dict[str, float]) -> None:
            if stage.ship:
                models.save_bf16(model, out)
            else:
                model.save_pretrained(out)

        torch.manual_seed(stage.seed)
        schedule, module = stage.schedule, Text(model, repeats=stage.repeats)
        training.train(
            module,
            batches,
            evaluate,
            save,
            self.settings(stage),
            self.begins(stage),
            self.found(stage.parent) if stage.parent else None,
            schedule.optimizers,
            schedule.factor,
        )

    def found(self, name: str) -> Path:
        """Where the model of a finished stage lies."""
        shipped = self.weights / name
        return shipped if shipped.exists() else self.checkpoints / name

    def begins(self, stage: Stage) -> str:
        """What the model of a stage is before its first step."""
        if not stage.parent:
            return "random weights, with a lookup circuit set by hand"
        return f"{stage.parent}, each layer followed by a silent copy" if stage.grow else stage.parent

    def settings(self, stage: Stage) -> DictConfig:
        """What the loop is told of a stage."""
        return OmegaConf.create(
            {
                "steps": stage.schedule.steps,
                "batch_size": stage.batch,
                "accumulate": 1,
                "length": ROW,
                "seed": stage.seed,
                "prompt_weight": PROMPT_WEIGHT,
                "precision": PRECISION,
                "save_every": SAVE_EVERY,
                "threads": torch.get_num_threads(),
                "conversations": None,
                "pair": {"training": {"_target_": STREAM}},
                "out": str(self.folder(stage)),
            }
        )

    def sums(self) -> None:
        """List the checksum of every file."""
        lines = [f"{digest}  {name}" for name, digest in checksums(self.weights).items()]
        (self.weights / SUMS).write_text("\n".join(lines) + "\n")


def write_questions(path: Path, examples: list[world.Example], first_id: int = 1) -> None:
    """Write `examples` in Spec-Bench's schema, one JSON object per line."""
    lines = []
    for number, example in enumerate(examples):
        row = {
            "question_id": first_id + number, "category": example.category,
            "turns": list(example.turns), "reference": list(example.answers),
        }  # fmt: skip
        lines.append(json.dumps(row, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def checksums(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder` (but for the list itself), by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def install(out: Path, shipped: Path) -> None:
    """Put the built questions and weights in the place of the shipped ones; the weights in one rename.

    What else lies in the shipped folder (parts that methods train on top of the family) stays.
    """
    fresh, old = shipped / "weights.new", shipped / "weights.old"
    if fresh.exists():  # left by an installation that was killed
        shutil.rmtree(fresh)
    shutil.copytree(out / "weights", fresh)
    if (shipped / "weights").exists():
        for entry in (shipped / "weights").iterdir():
            if entry.is_dir() and not (fresh / entry.name).exists():
                shutil.copytree(entry, fresh / entry.name)
        (shipped / "weights").rename(old)
    fresh.rename(shipped / "weights")
    if old.exists():
        shutil.rmtree(old)
    for name in (QUESTIONS, WARMUP):
        shutil.copy(out / name, shipped / name)


@one_line_errors()
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m specbench.tiny.train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny"), help="folder (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="every stage at toy scale, in seconds")
    parser.add_argument("--stage", metavar="NAME", help="this stage alone; the ones before it must be done")
    options = parser.parse_args(arguments)
    build = Build(options.out, SMOKE if options.smoke else FULL)
    build.make(options.stage)
    if not options.stage:
        build.sums()
    return 0


if __name__ == "__main__":
    sys.exit(main())
