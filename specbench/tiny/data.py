"""Examples as token ids, packed into rows of equal length with a loss weight per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from transformers import PreTrainedTokenizerFast

from specbench.tiny.tokenizer import ASSISTANT, BOS, END, USER
from specbench.tiny.world import Example, training_examples

PROMPT_WEIGHT = 0.2
_WAITING = 48  # examples to choose from when a row is filled: about 3 % of a row stays empty


def encode_example(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[float]]:
    """Token ids of the whole conversation as the chat template writes it, and the loss weight of each."""
    bos, user, assistant, end = tokenizer.convert_tokens_to_ids([BOS, USER, ASSISTANT, END])
    ids, weights = [bos], [0.0]
    for turn, answer in zip(example.turns, example.answers, strict=True):
        asked = [user, *tokenizer.encode(turn, add_special_tokens=False), assistant]
        said = [*tokenizer.encode(answer, add_special_tokens=False), end]
        ids += asked + said
        weights += [PROMPT_WEIGHT] * len(asked) + [1.0] * len(said)
    return ids, weights


def packed_rows(
    tokenizer: PreTrainedTokenizerFast, examples: Iterable[Example], length: int
) -> Iterator[tuple]:
    """Rows (ids, weights) of exactly `length` made of whole examples; longer examples are left out."""
    stream = iter(examples)
    waiting: list[tuple[list[int], list[float]]] = []
    exhausted = False
    while True:
        while len(waiting) < _WAITING and not exhausted:
            example = next(stream, None)
            exhausted = example is None
            if example is not None:
                encoded = encode_example(tokenizer, example)
                if len(encoded[0]) <= length:
                    waiting.append(encoded)
        if not waiting:
            return
        ids, weights = waiting.pop(0)
        ids, weights = list(ids), list(weights)
        while True:  # best fit: the longest waiting example that still has room
            fitting = [i for i, (more, _) in enumerate(waiting) if len(ids) + len(more) <= length]
            if not fitting:
                break
            more_ids, more_weights = waiting.pop(max(fitting, key=lambda i: len(waiting[i][0])))
            ids += more_ids
            weights += more_weights
        empty = length - len(ids)
        yield ids + [tokenizer.pad_token_id] * empty, weights + [0.0] * empty


def packed_batches(
    tokenizer: PreTrainedTokenizerFast,
    batch_size: int,
    length: int,
    seed: int,
    examples: Iterable[Example] | None = None,
    drills: Mapping[str, float] | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of {"input_ids": [B, T] int64, "loss_weight": [B, T] float32}, endless for the training stream.

    `loss_weight[b, t]` weighs the prediction of token t from the tokens before it: 1 for answers and their
    end token, `PROMPT_WEIGHT` for prompts, 0 for padding and the first token.
    """
    rows = packed_rows(tokenizer, training_examples(seed, drills) if examples is None else examples, length)
    while batch := [row for _, row in zip(range(batch_size), rows, strict=False)]:
        yield {
            "input_ids": torch.tensor([ids for ids, _ in batch]),
            "loss_weight": torch.tensor([weights for _, weights in batch]),
        }
