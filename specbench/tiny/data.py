"""The world's examples as conversations, and as packed batches of token ids with a loss weight per token."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from specbench.data.conversations import Messages, Tokens, batched, packed_rows
from specbench.tiny.tokenizer import ASSISTANT, BOS, END, USER
from specbench.tiny.world import Example, training_examples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

PROMPT_WEIGHT = 0.2
SPANS, TIMES = (1, 1, 1, 2, 2, 3, 5, 8, 12, 16, 20, 25), (1, 1, 2, 3)  # tokens said again, and how often
METHODS_SEED = 1000  # what methods train on follows other seeds than what the models were trained on


def encode_example(tokenizer: PreTrainedTokenizerFast, example: Example) -> Tokens:
    """Token ids of the whole conversation as the chat template writes it, and the loss weight of each."""
    bos, user, assistant, end = tokenizer.convert_tokens_to_ids([BOS, USER, ASSISTANT, END])
    ids, weights = [bos], [0.0]
    for turn, answer in zip(example.turns, example.answers, strict=True):
        asked = [user, *tokenizer.encode(turn, add_special_tokens=False), assistant]
        said = [*tokenizer.encode(answer, add_special_tokens=False), end]
        ids += asked + said
        weights += [PROMPT_WEIGHT] * len(asked) + [1.0] * len(said)
    return ids, weights


def stutter(ids: list[int], weights: list[float], rng: random.Random, chance: float) -> Tokens:
    """The example with, at `chance` of its answer tokens, what was just said said again, with weight 0.

    A small model that decodes greedily falls into loops, because a repetition makes itself likelier. Text never shows
    how to go on after one; these do, and the repetitions themselves are not learnt.
    """
    out_ids: list[int] = []
    out_weights: list[float] = []
    said = 0  # answer tokens in a row
    for i, weight in zip(ids, weights):
        out_ids.append(i)
        out_weights.append(weight)
        said = said + 1 if weight == 1.0 else 0
        if said and i != ids[-1] and rng.random() < chance:
            span = min(said, rng.choice(SPANS))
            again = out_ids[-span:] * rng.choice(TIMES)
            out_ids += again
            out_weights += [0.0] * len(again)
    return out_ids, out_weights


def packed_batches(
    tokenizer: PreTrainedTokenizerFast,
    batch_size: int,
    length: int,
    seed: int,
    examples: Iterable[Example] | None = None,
    drills: Mapping[str, float] | None = None,
    stuttering: float = 0.0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches {"input_ids": [B, T] int64, "loss_weight": [B, T] float32}, endless for the training stream.

    `loss_weight[b, t]` weighs the prediction of token t from the tokens before it: 1 for answers and their
    end token, `PROMPT_WEIGHT` for prompts, 0 for padding and the first token. stuttering: see `stutter`.
    """
    chosen = training_examples(seed, drills) if examples is None else examples
    rows: Iterable[Tokens] = (encode_example(tokenizer, example) for example in chosen)
    if stuttering:
        rng = random.Random(seed)
        rows = (stutter(*row, rng, stuttering) for row in rows)
    return batched(packed_rows(rows, length, tokenizer.pad_token_id), batch_size)


def conversations(seed: int) -> Iterator[Messages]:
    """Endless conversations of the world, for the training of methods' parts."""
    for example in training_examples(METHODS_SEED + seed):
        turns = zip(example.turns, example.answers, strict=True)
        yield [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn)
        ]
