"""Makes the embedded family from nothing: `python -m methods.family [--out build/tiny] [--install]`.

First the targets learn the text of the world (`specbench.tiny.train`). Then both answer the same prompts, and every
drafter learns from these answers, for the same number of tokens over all its stages: a table then compares methods, not
training sets. The targets' answers are checked, too (`specbench.tiny.soundness`). Each step is a process of its own
with a log (`OUT/logs`); independent steps run together, with one thread each. A step whose result exists is skipped,
and a stopped one continues where it was stopped.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from methods.common.build import Step, run_all
from methods.common.stored_states import RECORD as STATES
from methods.parts import arguments
from methods.sps_tree.drafter import FILE as TREE
from specbench.data.conversations import HELD_OUT_EVERY
from specbench.data.training_folder import RECORD
from specbench.report.cells import console
from specbench.system.arguments import Parser
from specbench.system.errors import one_line_errors
from specbench.system.files import read_json
from specbench.tiny.soundness import RESULT, faults, table
from specbench.tiny.train import FULL, SHIPPED, SMOKE, Build, Stage, checksums, install

SEED = 20


@dataclass(frozen=True)
class Size:
    """How much the drafters learn from, and which layers of the targets they use.

    Attributes:
        conversations: number that each target answers.
        answer_tokens: most tokens of an answer.
        steps: of each training on the answers.
        first_steps: of the stage that the plain and the streaming draft model begin as; their training on answers has
            that many fewer steps.
        save_every: steps between two states.
        loss_tokens: tokens of a batch whose prediction is judged.
        layers: number of the shallow target's first layers that the sorted draft model is cut from.
        exits: of the sorted draft model.
        exit_layer: of both Kangaroo adapters.
        like: layer of the deep and of the shallow target that Kangaroo's adapter and EAGLE-3's layer attend like.
        taps: depths of the deep and of the shallow target whose states are kept for the trainers.
        held_out: tokens of answers on which the coverage of the vocabulary map is measured.
        stored: tokens of the answers that the datastore holds.
        ranked: tokens that each tree of the draft model is counted on.
        question_counts: per task, to check the targets' answers: the benchmark's questions, and others.
    """

    conversations: int
    answer_tokens: int
    steps: int
    first_steps: int
    save_every: int
    loss_tokens: int
    layers: int
    exits: str
    exit_layer: int
    like: tuple[int, int]
    taps: tuple[str, str]
    held_out: int
    stored: int
    ranked: int
    question_counts: tuple[int, int]


WHOLE = Size(
    2500, 200, 2000, 1500, 200, 400, 6, "[2,4,6]", 2, (4, 2), ("[2,12,21,-1]", "[2,6,9,-1]"), 10_000, 140_000, 20_000,
    (40, 200),
)  # fmt: skip
TOY = Size(
    60, 8, 4, 3, 2, 50, 2, "[1,2]", 1, (1, 1), ("[1,2,4,5,-1]", "[1,2,3,-1]"), 60, 400, 60, (1, 1)
)  # fmt: skip
BLOCKS = ("blocks=16",)  # whose tokens are as many as the others judge
DSPARK = (*BLOCKS, "head=markov", "rank=32", "block_size=7")
DFLASH2 = (*BLOCKS, "head=selector", "rank=8")
TEXT = ("prompt_weight=0.2", "length=512", "precision=bf16")  # of every drafter


def steps(build: Build, size: Size) -> list[list[Step]]:
    """Returns all steps; those of one list are independent."""
    out, weights, answers = build.out, build.weights, build.out / "answers"
    every = {"pair.tokenizer": weights / "tokenizer", "data.path": out / "questions.jsonl"}
    pairs = {
        name: arguments({"pair": pair, "pair.target": weights / target} | every)
        for name, pair, target in (("deep", "tiny", "target"), ("shallow", "tiny_shallow", "target_shallow"))
    }
    both = answers / "both.jsonl"
    text = (*TEXT, *arguments({"conversations": both, "seed": SEED}))
    states = {name: out / "states" / name for name in pairs}
    common = (
        *text,
        *("batch_size=4", "threads=1"),
        f"save_every={size.save_every}",
    )

    def model(stage: Stage) -> Step:
        command = ("specbench.tiny.train", "--out", f"{out}", "--stage", stage.name)
        toy = ("--smoke",) if build.recipe is SMOKE else ()
        return Step(stage.name, stage.minutes, build.folder(stage) / RECORD, (*command, *toy))

    def answer(name: str, minutes: float) -> Step:
        path = answers / f"{name}.jsonl"
        numbers = {"count": size.conversations, "max_new_tokens": size.answer_tokens, "seed": SEED}
        done = path.with_suffix(".done")  # the file of answers exists from the first one on
        args = arguments(numbers | {"out": path})
        return Step(f"answers, {name}", minutes, done, ("methods.answer", *pairs[name], *args))

    def part(
        name: str,
        minutes: float,
        method: str,
        pair: str,
        *args: str,
        steps: int = size.steps,
        judged: int | None = size.loss_tokens,
    ) -> Step:
        folder = weights / name
        alike = {"loss_tokens": judged, "steps": steps, "states": states[pair], "out": folder}
        words = (*pairs[pair], *common, *args, *arguments(alike))
        return Step(name, minutes, folder / RECORD, (f"methods.{method}.train", *words))

    def keep(name: str, taps: str) -> Step:
        args = (f"taps={taps}", *arguments({"out": states[name]}))
        return Step(
            f"states, {name}", 5, states[name] / STATES, ("methods.states", *pairs[name], *text, *args)
        )

    (start,) = arguments({"draft": out / "checkpoints" / "draft"})
    exit_layer = f"exit_layer={size.exit_layer}"
    taps = f"taps={size.taps[0].replace(',-1', '')}"
    second = size.steps - size.first_steps
    several = size.loss_tokens // 2  # of those that judge several guesses of each token
    counted = {"conversations": both, "source": "raw_text", "tokens": None, "temperature": 0}
    counted |= {"held_out_tokens": size.held_out, "out": weights / "vocab_map"}

    def tree(name: str, pair: str) -> Step:
        folder = weights / name
        args = arguments({"pair.draft": weights / "draft", "tokens": size.ranked, "out": folder})
        return Step(name, 3, folder / TREE, ("methods.sps_tree.train", *pairs[pair], *args))

    calibrate = ("methods.vocab_trim.calibrate", *pairs["deep"], *arguments(counted))
    stored = {"conversations": both, "tokens": size.stored, "out": weights / "rest"}
    datastore = ("methods.rest.train", *pairs["deep"], *arguments(stored))
    numbers = zip(("--per-task", "--others", "--max-new-tokens"), (*size.question_counts, size.answer_tokens))
    look = ("specbench.tiny.soundness", "--weights", f"{weights}", *(f"{name}={n}" for name, n in numbers))
    *chain, shallow, deep, draft = (model(stage) for stage in build.recipe.stages)
    return [
        *([step] for step in chain),
        [deep, shallow, draft],
        [answer("deep", 6), answer("shallow", 3)],
        [Step("answers of both", 0.1, both, partial(shuffle, answers))],
        [keep(name, taps) for name, taps in zip(pairs, size.taps)],
        [
            part("eagle3", 35, "eagle3", "deep", f"like_layer={size.like[0]}"),
            part("eagle3_shallow", 35, "eagle3", "shallow", f"like_layer={size.like[1]}"),
            part(
                "peagle", 40, "peagle", "deep", "draft_layers=1", f"like_layer={size.like[0]}", judged=several
            ),
            part("mtp", 25, "mtp", "deep", judged=several),
            part("eagle", 15, "eagle", "deep"),
            part("eagle_shallow", 15, "eagle", "shallow"),
            part("hydra_heads", 20, "hydra_heads", "deep"),
            part("hydra_heads_shallow", 20, "hydra_heads", "shallow"),
            part("medusa", 15, "medusa", "deep"),
            part("medusa_shallow", 15, "medusa", "shallow"),
            part("s2d", 20, "s2d", "shallow", f"layers={size.layers}", f"exits={size.exits}"),
            part("kangaroo", 8, "kangaroo", "deep", exit_layer, f"like_layer={size.like[0]}"),
            part("kangaroo_shallow", 8, "kangaroo", "shallow", exit_layer, f"like_layer={size.like[1]}"),
            part("streaming", 8, "mirror_sd", "deep", start, steps=second),
            part("draft", 4, "sps", "deep", start, steps=second),
            part("pard", 25, "pard", "deep", start, steps=second),
            part("dflash", 25, "dflash", "deep", taps, *BLOCKS, judged=None),
            part("dspark", 35, "dflash", "deep", taps, *DSPARK, judged=None),
            part("dflash2", 35, "dflash", "deep", taps, *DFLASH2, judged=None),
            Step("datastore", 0.2, weights / "rest" / "datastore.json", datastore),
            Step("soundness", 20, weights / RESULT, look),
            Step("vocabulary map", 2, weights / "vocab_map" / "vocab_map.json", calibrate),
        ],
        [tree("sps_tree", "deep"), tree("sps_tree_shallow", "shallow")],
    ]


def shuffle(answers: Path) -> None:
    """Writes the answers of both targets as one file, in random order.

    Those to one prompt are all held out, or none is: one would give away the other.
    """
    by_prompt: dict[str, list[str]] = {}
    for name in ("shallow", "deep"):
        for line in (answers / f"{name}.jsonl").open(encoding="utf-8"):
            by_prompt.setdefault(json.loads(line)["messages"][0]["content"], []).append(line)
    rng, groups = random.Random(SEED), [*by_prompt.values()]
    rng.shuffle(groups)
    size = -(-sum(map(len, groups)) // HELD_OUT_EVERY)
    held_out: list[str] = []
    learnt: list[str] = []
    for group in groups:
        (held_out if len(held_out) < size else learnt).extend(group)
    rng.shuffle(learnt)
    lines: list[str] = []
    while learnt:  # then a line or two that would be held out may be left
        lines.append((learnt if len(lines) % HELD_OUT_EVERY else held_out).pop())
    partial = answers / "both.partial"
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(answers / "both.jsonl")


def same_text(weights: Path) -> bool:
    """Whether all parts trained on answers learnt from the same ones, for as many tokens over all stages."""
    records = [read_json(path) for path in weights.glob(f"*/{RECORD}")]
    learnt = [record for record in records if record["data"].startswith("sha256:")]
    return len({(record["data"], record["tokens_in_all"]) for record in learnt}) <= 1


@one_line_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m methods.family", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--cores",
        type=int,
        default=2,
        help="steps that run at a time (default: %(default)s)",
    )
    parser.add_argument("--install", action="store_true", help="replace the shipped files at the end")
    parser.add_argument("--smoke", action="store_true", help="every step at toy scale, in minutes")
    options = parser.parse_args(arguments)
    build = Build(options.out, SMOKE if options.smoke else FULL)
    for stage in ("tokenizer", "questions"):
        build.make(stage)
    groups = steps(build, TOY if options.smoke else WHOLE)
    run_all(groups, options.out / "logs", options.cores, "family")
    if not same_text(build.weights):
        print(
            "the drafters were not trained alike (training.json): remove those that differ to train them again",
            file=sys.stderr,
        )
        return 1
    sound = read_json(build.weights / RESULT)
    console().print(table(sound))
    print("\n".join(faults(sound)) or "no figure is below its floor")
    build.sums()
    print(f"{len(checksums(build.weights))} files in {build.weights}")
    if options.install:
        install(options.out, SHIPPED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
