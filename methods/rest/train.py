"""Makes a datastore of conversations: `specbench train rest pair=... conversations=FILE [out=FOLDER]`.

Nothing is trained. Conversations that hold a question of the data set which is to be measured, or a reference answer of
it, are left out: a datastore that knows the answers measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from methods.rest.datastore import save_datastore
from specbench.config.compose import program
from specbench.data.contamination import MeasuredTexts
from specbench.data.conversations import check_source, own_text, read, tokenizer_of, whole_ids
from specbench.data.questions import file_questions, find_questions_file
from specbench.data.training_folder import data_of
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError, stoppable
from specbench.system.files import file_sha256
from specbench.system.settings import Count, Seed, check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

SETTINGS = {"tokens": Count | None, "seed": Seed}


@stoppable(lambda: None)
def train(cfg: DictConfig) -> Path:
    """Makes a datastore as configured (conf/train_rest.yaml) and returns its folder."""
    check_all(cfg, SETTINGS)
    if cfg.conversations is None and cfg.tokens is None:
        raise UserError("the pair's own text never ends: set tokens=NUMBER or give conversations=FILE")
    check_source(cfg.conversations, cfg.pair)
    questions = find_questions_file(cfg.data)
    measured = MeasuredTexts(file_questions(cfg.data, cfg.task, questions))
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False, weights=False)
    tokenize, left_out = tokenizer_of(pair), 0
    without_end = cfg.conversations is None  # a file or data set is read once, in its order
    source = own_text(cfg.pair, cfg.seed) if without_end else read(cfg.conversations, cfg.split)

    def rows() -> Iterator[list[int]]:
        nonlocal left_out
        count = 0
        with tqdm(total=cfg.tokens, unit="token", unit_scale=True) as bar:
            for messages in source:
                if measured.in_messages(messages):
                    left_out += 1
                    continue
                ids = whole_ids(tokenize(messages))
                ids = ids if cfg.tokens is None else ids[: cfg.tokens - count]
                count += len(ids)
                bar.update(len(ids))
                if ids:
                    yield ids
                if count == cfg.tokens:
                    return

    texts = list(rows())
    facts = {"data": data_of(cfg), "seed": cfg.seed, "left_out": left_out}
    folder = save_datastore(cfg.out, texts, pair, **facts, questions=file_sha256(questions))
    print(f"{sum(map(len, texts)):,} tokens; {left_out} conversations with a measured text were left out")
    print(folder)
    return folder


main = program("train_rest", train)
