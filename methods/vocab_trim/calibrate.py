"""Counts tokens for a trimmed draft head: `specbench calibrate pair=... source=target_generated`.

Three sources (VocabTrim, Goel et al. 2025; FR-Spec, Zhao et al. 2025): `raw_text`, what the assistant says in given
conversations; `draft_generated` and `target_generated`, what the pair's draft model or target answers to the same
prompts. Answers are sampled at `temperature`, so that tokens the greedy answers never touch are seen as well. At the
end stands how much of held-out text written by the target each size would cover.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tqdm import tqdm

from methods.common.training import answered
from methods.common.vocab_map import always_kept, rank, save_vocab_map
from specbench.config.compose import program
from specbench.data.conversations import check_conversations, conversations, count_left_out
from specbench.data.training_folder import questions_of
from specbench.decoding.model.staged_model import StagedModel
from specbench.models.pairs import Pair, draft_of, load_pair
from specbench.system.errors import UserError, stoppable
from specbench.system.settings import Count, Seed, Temperature, check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

SOURCES = ("raw_text", "draft_generated", "target_generated")
SETTINGS = {
    "source": Literal[SOURCES],
    "size": Count | None,
    "tokens": Count | None,
    "held_out_tokens": Count,
    "max_new_tokens": Count,
    "temperature": Temperature,
    "seed": Seed,
}
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def answers(cfg: DictConfig, pair: Pair, source: str, held_out: bool = False) -> Iterator[list[int]]:
    """Answers as token ids: those of the conversations, or those of a model of the pair.

    They are endless, except the answers of conversations if `tokens` is null: these come once.
    """
    if source == "raw_text":
        epochs = 1 if cfg.tokens is None else None
        texts = conversations(cfg, held_out, epochs)
        answer_texts = (m["content"] for c in texts for m in c if m["role"] == "assistant")
        yield from (pair.tokenizer.encode(text, add_special_tokens=False) for text in answer_texts)
        return
    model = draft_of(pair) if source == "draft_generated" else pair.target
    for _, answer in answered(cfg, pair, StagedModel(model, pair.vocab_size), held_out):
        yield answer


def count(stream: Iterator[list[int]], tokens: int | None, label: str) -> tuple[Counter, str]:
    """How often each id comes in the first `tokens` (None: in all) or a few more, and the checksum of these."""
    counts: Counter = Counter()
    digest = hashlib.sha256()
    with tqdm(total=tokens, desc=label, unit="token") as bar:
        for ids in stream:
            counts.update(ids)
            digest.update(json.dumps(ids).encode())
            bar.update(len(ids))
            if tokens is not None and counts.total() >= tokens:
                break
    return counts, digest.hexdigest()


def coverage(rows: list[list], seen: Counter, size: int) -> float:
    """Share of the tokens in `seen` that the first `size` rows hold."""
    covered_ids = {row[0] for row in rows[:size]}
    return sum(n for i, n in seen.items() if i in covered_ids) / seen.total()


@stoppable(lambda: None)
def calibrate(cfg: DictConfig) -> Path:
    """Counts as configured (conf/calibrate_vocab.yaml), writes the map and returns its folder."""
    check_all(cfg, SETTINGS)
    if cfg.tokens is None and (cfg.source != "raw_text" or cfg.conversations is None):
        raise UserError("generated text has no end: limit it, such as tokens=100000")
    check_conversations(cfg)
    pair = load_pair(cfg.pair, cfg.seed, with_draft=cfg.source == "draft_generated")
    forced = len(always_kept(pair.tokenizer, pair.stop_ids))
    if cfg.size is not None and cfg.size < forced:
        raise UserError(f"size={cfg.size} is too small: {forced} special tokens are always kept")
    counts, data = count(answers(cfg, pair, cfg.source), cfg.tokens, cfg.source)
    rows = rank(counts, pair.tokenizer, pair.stop_ids)[: cfg.size]
    facts = {"source": cfg.source, "pair": pair.name, "tokens": counts.total(), "data": data}
    facts |= {"questions": questions_of(cfg), "left_out": count_left_out(cfg)}
    path = save_vocab_map(cfg.out, rows, pair.tokenizer, **facts)
    seen, _ = count(answers(cfg, pair, "target_generated", held_out=True), cfg.held_out_tokens, "held out")
    print(
        f"{len(rows)} of {len(pair.tokenizer)} tokens came up among {counts.total():,}; a larger vocab.size is "
        "filled with arbitrary ones; coverage of held-out answers of the target:"
    )
    for size in (*(s for s in SIZES if s < len(rows)), len(rows)):
        print(f"  {size:6} tokens: {coverage(rows, seen, size):.4f}")
    print(path)
    return Path(cfg.out)


main = program("calibrate_vocab", calibrate)
