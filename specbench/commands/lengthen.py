"""Writes questions with long prompts: `specbench lengthen pair=... conversations=FILE [lengths=[1024,2048]]`.

A prompt is a list of documents and the order to summarise one of them. The documents are answers out of
conversations, such as those that `specbench converse` lets a target write by itself. The result is read by
`data=jsonl`; each length is a task, so that every table has a row for it.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from specbench.config.checks import check_sources
from specbench.config.compose import program
from specbench.data.conversations import own_text, read
from specbench.system.errors import UserError
from specbench.system.files import file_named, make_folder, write_atomic
from specbench.system.paths import packaged
from specbench.system.settings import Count, Natural, Seed, check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.models.pairs import Pair

SETTINGS = {
    "conversations": str | None,
    "lengths": list[Count],
    "count": Count,
    "words": Natural,
    "room": Count,
    "seed": Seed,
    "out": str,
}
ORDER = "Summarize document {number} of the {total} documents above in a few sentences."
ENOUGH = 2  # tokens of documents to choose from, in multiples of the longest prompt, if the text has no end
TOO_MANY = 10_000  # conversations in a row without an answer that is long enough


def lengthen(cfg: DictConfig) -> Path:
    """Writes questions as configured (conf/lengthen.yaml) and returns the file.

    Raises:
        UserError: a setting is wrong, a prompt and its answer do not fit into the context, or there is too little text.
    """
    check_all(cfg, SETTINGS)
    out = file_named(cfg.out)
    if not cfg.lengths:
        raise UserError("lengths is empty: name the tokens of a prompt, such as lengths=[1024]")
    check_sources(cfg)
    from specbench.models.pairs import load_pair  # late: torch takes seconds

    pair = load_pair(cfg.pair, cfg.seed, with_draft=False, weights=False)
    if max(cfg.lengths) + cfg.room > pair.context_length:
        raise UserError(
            f"lengths={max(cfg.lengths)} and room={cfg.room} for an answer do not fit into the context of "
            f"{pair.context_length} tokens"
        )
    if cfg.conversations and packaged(cfg.conversations).resolve() == out.resolve():
        raise UserError(f"out={cfg.out} would replace the conversations: name another file")
    texts = documents(cfg, pair)
    rows: list[dict] = []
    for length in tqdm(cfg.lengths, unit="length"):
        for number in range(cfg.count):
            rng = random.Random(f"{cfg.seed} {length} {number}")
            rows.append(
                {
                    "question_id": len(rows) + 1,
                    "category": f"context_{length}",
                    "turns": [prompt(rng.sample(texts, len(texts)), length, rng, pair)],
                }
            )
    make_folder(out.parent)
    write_atomic(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    print(out)
    return out


def documents(cfg: DictConfig, pair: Pair) -> list[str]:
    """Distinct answers of at least `cfg.words` words; from a text without an end, only as many as are needed."""
    rows = read(cfg.conversations) if cfg.conversations else own_text(cfg.pair, cfg.seed)
    texts: dict[str, None] = {}
    tokens, wanted, vain = 0, ENOUGH * max(cfg.lengths), 0
    for messages in rows:
        vain += 1  # conversations since the last long enough answer
        for message in messages:
            text = message["content"].strip()
            if message["role"] == "assistant" and len(text.split()) >= cfg.words and text not in texts:
                texts[text] = None
                tokens += len(pair.encode(text))
                vain = 0
        if cfg.conversations is None and (tokens >= wanted or vain == TOO_MANY):
            break
    if tokens < max(cfg.lengths):
        raise UserError(
            f"the answers of at least {cfg.words} words have {tokens} tokens in all, fewer than a prompt of "
            f"{max(cfg.lengths)}: give more conversations, or shorter lengths"
        )
    return list(texts)


def prompt(texts: Sequence[str], length: int, rng: random.Random, pair: Pair) -> str:
    """A turn of the user whose prompt has `length` tokens, or a word's tokens less.

    Raises:
        UserError: not even the first word of a document fits.
    """

    def tokens(documents: Sequence[str]) -> int:
        return len(pair.prompt_ids([{"role": "user", "content": _turn(documents, len(documents))}]))

    most = 1  # doubled, so that only a few prompts are tokenised if there are many documents
    while most < len(texts) and tokens(texts[:most]) <= length:
        most *= 2
    texts = texts[:most]
    fitting = bisect_right(range(1, len(texts) + 1), length, key=lambda n: tokens(texts[:n]))
    chosen = list(texts[:fitting])
    if fitting < len(texts):  # as many words of the next one as fit
        words = texts[fitting].split()
        most = bisect_right(
            range(1, len(words)), length, key=lambda n: tokens([*chosen, " ".join(words[:n])])
        )
        chosen += [" ".join(words[:most])] if most else []
    if not chosen:
        raise UserError(f"lengths={length}: not even one document fits")
    return _turn(chosen, rng.randint(1, len(chosen)))


def _turn(texts: Sequence[str], number: int) -> str:
    listed = "\n\n".join(f"Document {i}: {text}" for i, text in enumerate(texts, 1))
    return f"{listed}\n\n{ORDER.format(number=number, total=len(texts))}"


main = program("lengthen", lengthen, resumes=False)
