"""Lets the target answer prompts, as text to train on: `specbench answer pair=... conversations=FILE`.

A draft model learns to agree with a target best from the target's own answers (DistillSpec, Zhou et al. 2023), habits
and faults included. Every turn of a conversation is answered anew, after the target's own earlier answers. The result
is a JSON Lines file that each trainer takes as `conversations=`; a stopped run continues after its last line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specbench.config.compose import program
from specbench.data.conversations import Messages, check_conversations, conversations
from specbench.data.training_folder import data_of, questions_of
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams, answer_seed
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.models.pairs import Pair, load_pair
from specbench.models.weight_files import answer_facts
from specbench.system.errors import UserError, file_errors, stoppable
from specbench.system.files import (
    check_settings,
    file_named,
    lock_file,
    make_folder,
    refuse_foreign,
    whole_lines,
    write_json,
)
from specbench.system.paths import packaged
from specbench.system.settings import Count, Natural, Seed, Temperature, TopP, check_all, check_truncation

if TYPE_CHECKING:
    from omegaconf import DictConfig

SETTINGS = {
    "count": Count,
    "batch_size": Count,
    "max_new_tokens": Count,
    "temperature": Temperature,
    "top_k": Natural,
    "top_p": TopP,
    "seed": Seed,
    "out": str,
}
# What answers depend on: a resumed file must have the same.
SAME = ("conversations", "split", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
POOL = 8  # batches that are answered together, so that few slots are empty at the end


def answered(
    pair: Pair, engine: Engine, originals: list[Messages], decoding: SamplingParams, seed: int, first: int = 0
) -> list[Messages]:
    """The conversations with the target's own answers; what does not fit the context is cut off.

    Args:
        pair: with the target.
        engine: answers.
        originals: conversations whose user turns are answered.
        decoding: how tokens are chosen.
        seed: of the draws, with each answer's conversation and turn.
        first: the number of the first conversation.
    """
    dialogues: list[Messages] = [[m for m in messages[:1] if m["role"] == "system"] for messages in originals]
    users = [[m for m in messages if m["role"] == "user"] for messages in originals]
    for turn in range(max(map(len, users))):
        requests, indices = [], []
        for index, questions in enumerate(users):
            if len(questions) <= turn or len(dialogues[index]) // 2 < turn:
                continue
            prompt = pair.prompt_ids([*dialogues[index], questions[turn]])
            room = min(decoding.max_new_tokens, pair.context_length - len(prompt))
            if room > 0:
                number = answer_seed(seed, first + index, turn)
                requests.append(Request(prompt, replace(decoding, max_new_tokens=room), number))
                indices.append(index)
        for index, answer in zip(indices, engine.generate(requests) if requests else []):
            message: dict[str, Any] = {"role": "assistant", "content": pair.decode(answer.tokens)}
            if answer.finish != "stop":
                message["complete"] = False  # trainers learn no stop token from it
            dialogues[index] += [users[index][turn], message]
    return dialogues


def answer(cfg: DictConfig) -> Path:
    """Writes conversations with answers as configured (conf/answer.yaml) and returns the file.

    Raises:
        UserError: a setting is wrong, or the file holds other answers or the prompts.
    """
    check_all(cfg, SETTINGS)
    check_truncation(cfg)
    check_conversations(cfg)
    out = file_named(cfg.out)
    begun = out.with_name(f"{out.stem}.settings.json")
    if cfg.conversations is not None and out.resolve() == packaged(cfg.conversations).resolve():
        raise UserError(f"out={out} is the file of the prompts: give another out=FILE")
    make_folder(out.parent)
    with lock_file(out):
        if not begun.exists():
            refuse_foreign(out, begun, "what its answers are of")
        settings = {name: cfg[name] for name in SAME} | answer_facts(cfg.pair)
        settings |= {"data": data_of(cfg), "questions": questions_of(cfg)}
        if done := whole_lines(out):
            check_settings(begun, settings, f"'{out}'")
        else:
            write_json(begun, settings)
        if done < cfg.count:
            with stoppable(lambda: f"conversation {count}" if (count := whole_lines(out)) else None):
                write(cfg, out, done)
    print(out)
    return out


def write(cfg: DictConfig, out: Path, done: int) -> None:
    """Appends answered conversations to a file that holds `done`, up to `cfg.count` or the end of the source."""
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False)
    scheduler = Scheduler(cfg.batch_size)
    engine = Engine(pair.staged, Drafter(), pair.stop_ids, scheduler, pair.context_length)
    decoding = SamplingParams.from_settings(cfg)
    # Once: a second epoch would repeat greedy answers, including those that trainers hold out.
    texts = islice(conversations(cfg, epochs=1, needs_answers=False), done, None)
    with (
        file_errors(writing=out),
        out.open("a", encoding="utf-8") as file,
        tqdm(total=cfg.count, initial=done, unit="conversation") as bar,
    ):
        while done < cfg.count:
            originals = list(islice(texts, min(POOL * cfg.batch_size, cfg.count - done)))
            if not originals:
                bar.write(
                    f"{done} conversations are answered, not {cfg.count}: all but those that are held out and those "
                    "with a benchmark's text"
                )
                break
            for messages in answered(pair, engine, originals, decoding, cfg.seed, done):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            file.flush()
            done += len(originals)
            bar.update(len(originals))


main = program("answer", answer)
