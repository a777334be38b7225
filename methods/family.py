"""Makes the embedded family from nothing: `python -m methods.family [--out build/tiny] [--install]`.

First the targets learn the text of the world (`specbench.tiny.train`). Then both answer the same prompts, and every
drafter learns from these answers, for the same number of tokens: what a table compares is methods, not training sets.
Each step is a process of its own, is left out where its result is there already, and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from specbench.tiny.train import FULL, SHIPPED, SMOKE, Build, checksums, install
from specbench.training import RECORD

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = 20


@dataclass(frozen=True)
class Size:
    """How much the drafters see, and of which of the targets' layers they are made.

    Attributes:
        conversations: that each target answers.
        answer_tokens: of an answer at most.
        steps: of each training.
        save_every: steps between two states.
        layers: of the shallow target, for the sorted draft model.
        exits: of the sorted draft model.
        exit_layer: of both Kangaroo adapters.
        like: layer of the deep and of the shallow target whose attention an adapter begins with.
        counted: tokens that the vocabulary map counts.
    """

    conversations: int
    answer_tokens: int
    steps: int
    save_every: int
    layers: str
    exits: str
    exit_layer: int
    like: tuple[int, int]
    counted: int


WHOLE = Size(2500, 200, 500, 50, "[0,2,4,6,8,10]", "[2,4,6]", 2, (4, 2), 30_000)
TOY = Size(60, 8, 2, 2, "[0,1]", "[1,2]", 1, (1, 1), 200)
CURRICULUM = ("prompt_weight=0.2", "batch_size=4", "length=512")  # of every drafter


@dataclass(frozen=True)
class Step:
    """A step of the build.

    Attributes:
        name: for the progress bar.
        minutes: that it takes on two cores.
        result: the file whose presence means that it is done.
        command: module and arguments; empty: `shuffle` does it.
    """

    name: str
    minutes: float
    result: Path
    command: tuple[str, ...]


def steps(out: Path, size: Size) -> list[Step]:
    """The steps behind the targets, in their order."""
    weights, answers = out / "weights", out / "answers"
    tokenizer = f"pair.tokenizer={weights / 'tokenizer'}"
    pairs = {
        name: (f"pair={pair}", f"pair.target={weights / target}", tokenizer)
        for name, pair, target in (("deep", "tiny", "target"), ("shallow", "tiny_shallow", "target_shallow"))
    }
    both = answers / "both.jsonl"
    common = (
        *CURRICULUM,
        f"conversations={both}",
        f"steps={size.steps}",
        f"save_every={size.save_every}",
        f"seed={SEED}",
    )

    def answer(name: str, minutes: float) -> Step:
        path = answers / f"{name}.jsonl"
        settings = (f"count={size.conversations}", f"max_new_tokens={size.answer_tokens}", f"seed={SEED}")
        done = path.with_suffix(".done")  # a file of answers is there from the first one on
        return Step(
            f"answers, {name}", minutes, done, ("methods.answer", *pairs[name], *settings, f"out={path}")
        )

    def part(name: str, minutes: float, method: str, pair: str, *own: str) -> Step:
        folder = weights / name
        command = (f"methods.{method}.train", *pairs[pair], *common, *own, f"out={folder}")
        return Step(name, minutes, folder / RECORD, command)

    start, exit_layer = f"draft={out / 'checkpoints' / 'draft'}", f"exit_layer={size.exit_layer}"
    return [
        answer("shallow", 12),
        answer("deep", 20),
        Step("answers of both", 0.1, both, ()),
        part("draft", 25, "sps", "deep", start),
        part("s2d", 25, "s2d", "shallow", f"layers={size.layers}", f"exits={size.exits}"),
        part("streaming", 35, "mirror_sd", "deep", start),
        part("kangaroo", 20, "kangaroo", "deep", exit_layer, f"like_layer={size.like[0]}"),
        part("kangaroo_shallow", 15, "kangaroo", "shallow", exit_layer, f"like_layer={size.like[1]}"),
        Step(
            "vocabulary map",
            2,
            weights / "vocab_map" / "vocab_map.json",
            (
                "methods.vocab_trim.calibrate",
                *pairs["deep"],
                f"conversations={both}",
                f"tokens={size.counted}",
                f"held_out_tokens={size.counted // 3}",
                f"out={weights / 'vocab_map'}",
            ),
        ),
    ]


def shuffle(answers: Path) -> None:
    """Writes the answers of both targets as one file, in an order of their own."""
    lines = [
        line for name in ("shallow", "deep") for line in (answers / f"{name}.jsonl").open(encoding="utf-8")
    ]
    random.Random(SEED).shuffle(lines)
    partial = answers / "both.partial"
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(answers / "both.jsonl")


def run(step: Step, threads: int) -> None:
    """Does one step. Raises SystemExit with its exit code where it fails."""
    if not step.command:
        shuffle(step.result.parent)
        return
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    code = subprocess.run([sys.executable, "-m", *step.command], env=environment, check=False).returncode
    if code:
        raise SystemExit(code)
    if step.result.suffix == ".done":
        step.result.touch()


def same_text(weights: Path) -> bool:
    """Whether all that was trained on answers was trained on the same ones."""
    records = [json.loads(path.read_text()) for path in weights.glob(f"*/{RECORD}")]
    return len({record["data"] for record in records if record["data"].startswith("sha256:")}) <= 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m methods.family", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny"), help="folder (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--install", action="store_true", help="replace the shipped files at the end")
    parser.add_argument("--smoke", action="store_true", help="every step at toy scale, in minutes")
    options = parser.parse_args(arguments)
    build = Build(options.out, SMOKE if options.smoke else FULL)
    build.make(options.threads)
    left = [step for step in steps(options.out, TOY if options.smoke else WHOLE) if not step.result.exists()]
    minutes = sum(step.minutes for step in left)
    with tqdm(total=minutes, unit="min", bar_format="{desc} {bar} {n:.0f} of {total:.0f} min") as bar:
        for step in left:
            bar.set_description(step.name)
            run(step, options.threads)
            bar.update(step.minutes)
    if not same_text(build.weights):
        print(
            "the drafters were trained on different answers: remove them to train them again", file=sys.stderr
        )
        return 1
    build.sums()
    print(f"{len(checksums(build.weights))} files in {build.weights}")
    if options.install:
        install(options.out, SHIPPED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
