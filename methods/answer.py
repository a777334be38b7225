"""Lets the target answer prompts, as text to train on: `python -m methods.answer pair=... conversations=FILE`.

A draft model that has to agree with a target learns it best from what that target says (DistillSpec, Zhou et al. 2023),
its habits and its faults included. Every turn of a conversation is answered anew, after the target's own earlier
answers. The result is a JSON Lines file that each trainer takes as `conversations=`; a run that was stopped goes on
after its last line.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specbench.config.compose import with_hydra
from specbench.data.conversations import Messages, conversations
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.models.pairs import Pair, load_pair
from specbench.system.errors import one_line_errors
from specbench.system.files import check_settings, whole_lines, write_json
from specbench.system.settings import Count, Seed, Temperature, check_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

SETTINGS = {
    "count": Count,
    "batch_size": Count,
    "max_new_tokens": Count,
    "temperature": Temperature,
    "seed": Seed,
}
# What answers depend on: a file that goes on must have the same.
SAME = ("conversations", "split", "max_new_tokens", "temperature", "seed")
POOL = 8  # batches that are answered together, so that few places are empty at the end


def answered(
    pair: Pair, engine: Engine, originals: list[Messages], decoding: SamplingParams, seed: int
) -> list[Messages]:
    """The conversations with the target's own answers; what does not fit the context is cut off."""
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
                requests.append(Request(prompt, SamplingParams(room, decoding.temperature), seed + index))
                indices.append(index)
        for index, answer in zip(indices, engine.generate(requests) if requests else []):
            message: dict[str, Any] = {"role": "assistant", "content": pair.decode(answer.tokens)}
            if answer.finish != "stop":
                message["complete"] = False  # trainers learn no stop token from it
            dialogues[index] += [users[index][turn], message]
    return dialogues


def answer(cfg: DictConfig) -> Path:
    """Writes conversations with answers as configured (conf/answer.yaml) and returns the file."""
    check_all(cfg, SETTINGS)
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False)
    scheduler = Scheduler(cfg.batch_size)
    engine = Engine(pair.staged, Drafter(), pair.stop_ids, scheduler, pair.context_length)
    decoding = SamplingParams(cfg.max_new_tokens, cfg.temperature)
    out = Path(cfg.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: cfg[name] for name in SAME} | {"target": cfg.pair.target}
    begun = out.with_name(f"{out.stem}.settings.json")
    if done := whole_lines(out):
        check_settings(begun, settings, f"'{out}'")
    else:
        write_json(begun, settings)
    # Once: in a second epoch, greedy answers would come again, among them those that trainers hold out.
    texts: Iterator[Messages] = conversations(
        cfg.conversations, cfg.pair, cfg.seed, split=cfg.split, epochs=1, needs_answers=False
    )
    texts = islice(texts, done, None)
    with (
        out.open("a", encoding="utf-8") as file,
        tqdm(total=cfg.count, initial=done, unit="conversation") as bar,
    ):
        while done < cfg.count:
            originals = list(islice(texts, min(POOL * cfg.batch_size, cfg.count - done)))
            if not originals:
                bar.write(f"there are {done} conversations, not {cfg.count}: all of them are answered")
                break
            for messages in answered(pair, engine, originals, decoding, cfg.seed + done):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            file.flush()
            done += len(originals)
            bar.update(len(originals))
    print(out)
    return out


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    return with_hydra("answer", one_line_errors()(answer))


if __name__ == "__main__":
    sys.exit(main())
