"""Makes a datastore of conversations: `specbench train rest pair=... conversations=FILE [out=FOLDER]`.

Nothing is trained. Conversations that hold a question of the data set which is to be measured, or a reference answer of
it, are left out: a datastore that knows the answers measures nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from tqdm import tqdm

from methods.rest.datastore import save_datastore
from specbench.compose import with_hydra
from specbench.conversations import conversations, read, tokenizer_of
from specbench.errors import UserError, one_line_errors
from specbench.measure.files import file_sha256
from specbench.pairs import load_pair
from specbench.questions import find_questions_file, read_questions
from specbench.training import data_of
from specbench.values import Count, Seed, check_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from omegaconf import DictConfig

    from specbench.conversations import Messages
    from specbench.questions import Question

SETTINGS = {"tokens": Count | None, "seed": Seed}
WORDS = (
    8  # a text of fewer words says little: it is found as a whole message alone, and as an answer not at all
)


class Measured:
    """Texts that a datastore must not know.

    Args:
        questions: whose turns and reference answers they are.
    """

    def __init__(self, questions: Iterable[Question]):
        self._whole: set[tuple[str, ...]] = set()
        self._by_start: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for question in questions:
            for turn in question.turns:
                self._whole.add(tuple(turn.split()))
            for text in (*question.turns, *(question.reference or ())):
                words = tuple(text.split()) if isinstance(text, str) else ()
                if len(words) >= WORDS:
                    self._by_start[words[:WORDS]].append(words)

    def in_text(self, text: str) -> bool:
        """Whether a message is one of them, or holds one; line breaks and spaces do not count."""
        words = tuple(text.split())
        return words in self._whole or any(
            words[i : i + len(known)] == known
            for i in range(len(words) - WORDS + 1)
            for known in self._by_start.get(words[i : i + WORDS], ())
        )


def train(cfg: DictConfig) -> Path:
    """Makes a datastore as configured (conf/train_rest.yaml) and returns its folder."""
    check_all(cfg, SETTINGS)
    if cfg.conversations is None and cfg.tokens is None:
        raise UserError("the pair's own text has no end: say how many tokens=, or give conversations=FILE")
    questions = find_questions_file(cfg.data)
    measured = Measured(read_questions(questions, cfg.task.tasks))
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False, weights=False)
    tokenize, left_out = tokenizer_of(pair), 0

    def rows() -> Iterator[list[int]]:
        nonlocal left_out
        held = 0
        with tqdm(total=cfg.tokens, unit="token", unit_scale=True) as bar:
            for messages in told(cfg):
                if any(measured.in_text(message["content"]) for message in messages):
                    left_out += 1
                    continue
                for ids, _ in tokenize(messages):
                    ids = ids if cfg.tokens is None else ids[: cfg.tokens - held]
                    held += len(ids)
                    bar.update(len(ids))
                    yield ids
                if held == cfg.tokens:
                    return

    whole = list(rows())
    facts = {"data": data_of(cfg), "seed": cfg.seed, "left_out": left_out}
    folder = save_datastore(cfg.out, whole, pair, **facts, questions=file_sha256(questions))
    print(f"{sum(map(len, whole)):,} tokens; {left_out} conversations with a measured text were left out")
    print(folder)
    return folder


def told(cfg: DictConfig) -> Iterator[Messages]:
    """The conversations: all of a file or data set, once and in its order; else the pair's own, without end."""
    if cfg.conversations is None:
        return conversations(None, cfg.pair, cfg.seed)
    return read(cfg.conversations, cfg.split)


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    return with_hydra("train_rest", one_line_errors()(train))


if __name__ == "__main__":
    sys.exit(main())
