"""The world's examples as conversations, and as packed batches of token ids with a loss weight per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from transformers import PreTrainedTokenizerFast

from specbench.conversations import Messages, Tokens, batched, packed_rows, stuttering_rows
from specbench.tiny.tokenizer import ASSISTANT, BOS, END, USER
from specbench.tiny.world import Example, training_examples

PROMPT_WEIGHT = 0.2
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
    end token, `PROMPT_WEIGHT` for prompts, 0 for padding and the first token. stuttering: see `stuttering_rows`.
    """
    chosen = training_examples(seed, drills) if examples is None else examples
    rows: Iterable[Tokens] = (encode_example(tokenizer, example) for example in chosen)
    rows = stuttering_rows(rows, seed, stuttering)
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
