"""Files of answers of any engine: token ids, a line for each answer."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.models.pairs import Pair

KEYS = {"id", "prompt", "messages", "tokens", "logprobs", "max_new_tokens"}


@dataclass(frozen=True)
class Answered:
    """One line of a file of answers: token ids of the prompt and of the answer, and what else the engine reported."""

    name: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float] | None
    max_new_tokens: int | None


def read_answers(path: Path, pair: Pair) -> list[Answered]:
    """The answers in a JSON Lines file; see docs/audit.md for its keys.

    Raises:
        UserError: a line of it is no answer, or it has none.
    """
    answers = []
    # Not splitlines, which would split at U+2028 inside a text, too.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                answers.append(_read(json.loads(line), number, pair))
            # Also bytes that are no UTF-8, half a surrogate pair, numbers beyond a float, and no end of brackets.
            except (ValueError, TypeError, OverflowError, RecursionError, TemplateError, UserError) as error:
                raise UserError(f"{path}, line {number}: {error}") from error
    if not answers:
        raise UserError(f"'{path}' holds no answers")
    _warn_of_lacking_begin(path, [answer.prompt for answer in answers], pair)
    return answers


def _warn_of_lacking_begin(path: Path, prompts: list[list[int]], pair: Pair) -> None:
    """Warns if prompts lack the token that the tokenizer puts before a text: most engines add it to texts."""
    tokenizer: Any = pair.tokenizer
    added = tokenizer("").input_ids[:1]
    lacking = sum(prompt[:1] != added for prompt in prompts) if added == [tokenizer.bos_token_id] else 0
    if lacking:
        print(
            f"{path}: {lacking} of {len(prompts)} prompts do not begin with {tokenizer.bos_token}, which many engines "
            "add to a text: answers to other prompts would count as violations; give token ids, or a text that has it",
            file=sys.stderr,
        )


def _read(line: Any, number: int, pair: Pair) -> Answered:
    """Parses one line. Raises UserError, without the line number."""
    if not isinstance(line, dict) or "tokens" not in line or ("prompt" in line) == ("messages" in line):
        raise UserError("lines need `tokens` and either `prompt` or `messages`")
    if unknown := line.keys() - KEYS:
        raise UserError(f"unknown key '{min(unknown)}': keys are {', '.join(sorted(KEYS))}")
    prompt, tokens = _prompt_of(line, pair), line["tokens"]
    for name, ids in (("prompt", prompt), ("tokens", tokens)):
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < pair.vocab_size for i in ids):
            raise UserError(f"{name} must be token ids from 0 to {pair.vocab_size - 1}")
    if not prompt:
        raise UserError("the prompt is empty")
    if len(prompt) + len(tokens) > pair.context_length:
        raise UserError(f"prompt and answer do not fit into a context of {pair.context_length}")
    logprobs, cap = line.get("logprobs"), line.get("max_new_tokens")
    if logprobs is not None:
        check_logprobs(logprobs, len(tokens))
    if cap is not None and (type(cap) is not int or cap < 1):
        raise UserError("max_new_tokens must be a whole number of at least 1")
    return Answered(str(line.get("id", number)), prompt, tokens, logprobs, cap)


def check_logprobs(logprobs: Any, count: int) -> None:
    """Raises UserError unless they are `count` finite numbers."""
    if not isinstance(logprobs, list) or not all(
        type(p) in (int, float) and math.isfinite(p) for p in logprobs
    ):
        raise UserError("logprobs must be finite numbers, one for each token")
    if len(logprobs) != count:
        raise UserError(f"{len(logprobs)} logprobs for {count} tokens")


def _prompt_of(line: dict, pair: Pair) -> Any:
    if "messages" not in line:
        return pair.encode(line["prompt"]) if isinstance(line["prompt"], str) else line["prompt"]
    if not _are_messages(line["messages"]):
        raise UserError("messages must be a list of objects with the texts `role` and `content`")
    return pair.prompt_ids(line["messages"])


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
        for one in value
    )
