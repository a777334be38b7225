"""Whether the targets answer soundly: `python -m specbench.tiny.soundness [--weights DIR] [--others N]`.

A target that repeats itself flatters every drafter, for nothing is guessed more easily than a loop. Per task, over
greedy answers to the benchmark's questions and to others like them:

    distinct  share of the 4-grams of tokens that are different, over the same share of the reference answers
    sums      share of the stated sums that are right; of sums that the reference states, share that the answer states
    fact      share of the answers that state the fact that was asked for (QA), or a sentence of a passage that was
              asked for, word by word (RAG)
    words     share of the words of the reference that the answer has, each as often as it stands there (translation)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from tqdm import tqdm

from specbench.data.ngrams import distinct_share
from specbench.report.cells import NUMBER, PlainTable, console
from specbench.system.errors import one_line_errors
from specbench.tiny import models, world
from specbench.tiny.tokenizer import load_tokenizer
from specbench.tiny.train import MODELS, SHIPPED

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from specbench.tiny.world import Example

MEASURES = ("distinct", "sums right", "sums found", "fact", "words")
FLOORS = {"distinct": 0.9, "sums right": 0.6, "fact": 0.6, "words": 0.6}
RESULT = "soundness.json"
READ = 10  # answers of each task on the page
BATCH = 40  # conversations that are answered together
Found = dict[str, dict[str, dict[str, dict[str, float]]]]  # by target, questions, task and measure
_SUM = re.compile(r"(\d+) ([*+-]) (\d+) = (\d+)")
_APPLY = {"*": int.__mul__, "+": int.__add__, "-": int.__sub__}
_PASSAGE = re.compile(r"^\[\d+\] (.*)$", re.MULTILINE)


def distinct(tokens: Sequence[int]) -> float | None:
    """Share of the 4-grams of `tokens` that are different; None where there are none."""
    return distinct_share(tokens, 4) if len(tokens) >= 4 else None


def sums(text: str) -> list[tuple[str, bool]]:
    """The sums that a text states, and whether each is right."""
    stated = _SUM.finditer(text)
    return [(one[0], _APPLY[one[2]](int(one[1]), int(one[3])) == int(one[4])) for one in stated]


def word_share(answer: str, reference: str) -> float:
    """Share of the words of `reference` that `answer` has, each as often as it stands there."""
    wanted, told = (Counter(text.lower().replace(".", "").split()) for text in (reference, answer))
    return (wanted & told).total() / wanted.total()


def states_fact(question: str, answer: str) -> bool:
    """Whether an answer states the asked fact of the world in one of its wordings; KeyError for another question."""
    _, facts = world.the_world()
    entity, number = facts.asked(question.rpartition(": ")[2])
    return any(wording in answer for wording in entity.facts[number][1])


def quotes_passage(question: str, answer: str) -> bool:
    """Whether an answer has a sentence of a passage about somebody that the question names."""
    asked = question.rpartition("\nQuestion: ")[2]
    passages = [passage.rstrip(".").split(". ") for passage in _PASSAGE.findall(question)]
    about = [passage for passage in passages if re.search(rf"\b{passage[0].split()[0]}\b", asked)]
    return any(sentence in answer for passage in about for sentence in passage)


def judged(task: str, question: str, answer: str, reference: str) -> dict[str, list[float]]:
    """What is looked at in one answer but for its 4-grams: each measure's values, none where it does not apply."""
    told, wanted = sums(answer), [one for one, _ in sums(reference)]
    found: dict[str, list[float]] = {}
    if wanted:
        found["sums right"] = [float(right) for _, right in told]
        found["sums found"] = [float(one in [text for text, _ in told]) for one in wanted]
    if task == "translation":
        found["words"] = [word_share(answer, reference)]
    if task in ("qa", "rag"):
        found["fact"] = [float((states_fact if task == "qa" else quotes_passage)(question, answer))]
    return found


def soundness(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    max_new_tokens: int = 300,
) -> dict[str, dict[str, float]]:
    """Per task, and per measure that applies to it, the mean over the greedy answers to `examples`."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    batches = [examples[at : at + BATCH] for at in range(0, len(examples), BATCH)]
    for batch in tqdm(batches, desc="answers", unit="batch"):
        for example, told in zip(batch, answers_to(target, tokenizer, batch, max_new_tokens), strict=True):
            of = values[example.task]
            for question, ids, reference in zip(example.turns, told, example.answers, strict=True):
                answer = tokenizer.decode(ids, skip_special_tokens=True)
                shares = distinct(ids), distinct(tokenizer.encode(reference, add_special_tokens=False))
                of["own"].append(shares[0] or 0.0)
                of["reference"].append(shares[1] or 0.0)
                for name, found in judged(example.task, question, answer, reference).items():
                    of[name] += found
    return {task: _means(values[task]) for task in world.TASK_NAMES if task in values}


def _means(values: Mapping[str, list[float]]) -> dict[str, float]:
    """The means of a task's measures; a measure without any value (no sum was stated) counts as zero."""
    means = {name: fmean(found) if found else 0.0 for name, found in values.items()}
    return {"distinct": means.pop("own") / means.pop("reference"), **means}


def answers_to(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example], limit: int
) -> list[list[list[int]]]:
    """The greedy answers [turn][token] to each example; a second turn follows the target's own first answer."""
    answers: list[list[list[int]]] = [[] for _ in examples]
    chats: list[list[dict]] = [[] for _ in examples]
    for turn in range(max(len(example.turns) for example in examples)):
        active = [i for i, example in enumerate(examples) if turn < len(example.turns)]
        for i in active:
            chats[i].append({"role": "user", "content": examples[i].turns[turn]})
        for i, ids in zip(active, greedy(target, tokenizer, [chats[i] for i in active], limit), strict=True):
            answers[i].append(ids)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            chats[i].append({"role": "assistant", "content": text})
    return answers


def greedy(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: list[list[dict]], limit: int
) -> list[list[int]]:
    """The answer to each conversation, with its end token if it came; all are answered in one batch."""
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    out = target.generate(**batch, max_new_tokens=limit, do_sample=False)
    end = tokenizer.eos_token_id
    answers = out[:, batch["input_ids"].shape[1] :].tolist()
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]


def below_floors(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each task and measure that is below its floor."""
    return [
        f"{task}: {measure} {value:.2f}, below {FLOORS[measure]}"
        for task, measures in found.items()
        for measure, value in measures.items()
        if value < FLOORS.get(measure, 0.0)
    ]


def questions(per_task: int, others: int) -> dict[str, list[Example]]:
    """`per_task` of the benchmark's questions and `others` more of each task; models are trained on none of them."""
    benchmark = world.benchmark_examples(per_task=per_task)
    more = world.benchmark_examples(world.HELD_OUT_SEED, others, avoid=benchmark) if others else []
    return {"benchmark": benchmark} | ({"others": more} if more else {})


def measure(weights: Path, asked: Mapping[str, list[Example]], max_new_tokens: int) -> Found:
    """The soundness of both targets of a folder."""
    tokenizer = load_tokenizer(weights / "tokenizer")
    targets = {name: models.load(weights / name) for name in MODELS}
    return {
        name: {
            which: soundness(target, tokenizer, examples, max_new_tokens) for which, examples in asked.items()
        }
        for name, target in targets.items()
    }


def table(found: Found) -> Table:
    """All figures, a row for each target, set of questions and task."""
    shown = PlainTable("soundness of the targets' answers")
    shown.add_columns("target", "questions", "task", no_wrap=True)
    shown.add_columns(*(name.replace(" ", "\n") for name in MEASURES), **NUMBER)
    for target, by_set in found.items():
        for which, tasks in by_set.items():
            for task, measures in tasks.items():
                figures = [f"{measures[name]:.2f}" if name in measures else "" for name in MEASURES]
                shown.add_row(target, which, task, *figures)
    return shown


def faults(found: Found) -> list[str]:
    """A line for each figure that is below its floor."""
    return [
        f"{target}, {which}: {line}"
        for target, by_set in found.items()
        for which, tasks in by_set.items()
        for line in below_floors(tasks)
    ]


def answers_page(weights: Path, max_new_tokens: int) -> str:
    """Ten questions of each task with the answers of the deep target, as a Markdown page."""
    tokenizer, target = load_tokenizer(weights / "tokenizer"), models.load(weights / MODELS[0])
    examples = world.benchmark_examples()
    lines = [
        "# Answers of the embedded family",
        "",
        "Greedy answers of `pair=tiny`, ten questions of each task.",
    ]
    for task in world.TASK_NAMES:
        of_task = [example for example in examples if example.task == task]
        some = of_task[:: len(of_task) // READ][:READ]
        lines += ["", f"## {task}"]
        for number, (example, told) in enumerate(
            zip(some, answers_to(target, tokenizer, some, max_new_tokens)), 1
        ):
            lines += ["", f"### {number}. {example.category}"]
            for question, ids in zip(example.turns, told, strict=True):
                answer = tokenizer.decode(ids, skip_special_tokens=True)
                lines += ["", "Question:", "", *_quoted(question), "", "Answer:", "", *_quoted(answer)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> list[str]:
    """The lines of a text as preformatted Markdown, which keeps what looks like markup as it is."""
    return ["```text", *text.splitlines(), "```"]


@one_line_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m specbench.tiny.soundness", description=__doc__.splitlines()[0]
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--weights",
        type=Path,
        help=f"folder of a family, which gets {RESULT} (default: the shipped one, which does not)",
    )
    parser.add_argument("--per-task", **number, default=40, help="of the benchmark's questions (default: 40)")
    parser.add_argument(
        "--others", **number, default=200, help="questions of a task beside them (default: 200)"
    )
    parser.add_argument("--max-new-tokens", **number, default=300, help="of an answer (default: 300)")
    parser.add_argument(
        "--answers", type=Path, help="write ten answers per task into this file, and do no more"
    )
    options = parser.parse_args(arguments)
    weights = options.weights or SHIPPED / "weights"
    if options.answers:
        page = answers_page(weights, options.max_new_tokens)
        options.answers.write_text(page, encoding="utf-8")
        return 0
    asked = questions(options.per_task, options.others)
    found = measure(weights, asked, options.max_new_tokens)
    if options.weights:
        (weights / RESULT).write_text(json.dumps(found, indent=2) + "\n")
    console().print(table(found))
    print("\n".join(faults(found)) or "no figure is below its floor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
