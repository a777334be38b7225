"""A drafter's memory that is warmed elsewhere: it begins with what a file of conversations teaches it, not empty.

The setting is `warm` of a drafter, or of one that it wraps. The file is read at set-up, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.data.contamination import WARM, MeasuredTexts
from specbench.data.conversations import read, tokenizer_of, watched, whole_ids
from specbench.data.questions import file_questions
from specbench.system.errors import UserError
from specbench.system.files import file_sha256
from specbench.system.paths import existing_file, packaged
from specbench.system.settings import WRAPPED

if TYPE_CHECKING:
    from specbench.data.conversations import Tokens
    from specbench.models.pairs import Pair


def warm_file(drafting: Mapping) -> str | None:
    """The file that a drafter's configuration names for its memory, or for that of the drafter that it wraps."""
    return drafting.get(WARM) or (drafting.get(WRAPPED) or {}).get(WARM)


def check_warm(drafting: Mapping, data: Mapping, task: Mapping) -> None:
    """Checks the file of a drafter's memory, if it has one.

    Args:
        drafting: configuration of the drafter.
        data: the questions that are measured.
        task: their tasks.

    Raises:
        UserError: it is missing, holds no conversations, or holds a question or a reference answer of the data.
    """
    named = warm_file(drafting)
    if named is None:
        return
    path = existing_file(named, WARM)
    measured = MeasuredTexts(file_questions(data, task))
    for number, messages in enumerate(read(str(path)), 1):
        if measured.in_messages(messages):
            raise UserError(
                f"{WARM}: conversation {number} of {path} holds a measured question or answer: warm with other text"
            )


def warm_rows(file: str, pair: Pair) -> Iterator[list[Tokens]]:
    """The conversations of a file as the pair prompts them, each in rows: ids, and weights that mark the answers.

    Args:
        file: path in the setting.
        pair: with tokenizer and template.

    Raises:
        UserError: it is no file of conversations.
    """
    tokenize = tokenizer_of(pair)
    for messages in watched(read(str(packaged(file))), WARM):
        yield tokenize(messages)


def warm_answers(file: str, pair: Pair) -> Iterator[list[int]]:
    """Yields the assistant's answers in a file, each with its stop token; see `warm_rows`."""
    for ids, weights in chain.from_iterable(warm_rows(file, pair)):
        for by_assistant, part in groupby(zip(ids, weights), key=lambda one: one[1] > 0):
            if by_assistant:
                yield [token for token, _ in part]


def warm_texts(file: str, pair: Pair) -> Iterator[list[int]]:
    """Yields the conversations of a file as the pair prompts them, as ids, each text once; see `warm_rows`."""
    for rows in warm_rows(file, pair):
        if ids := whole_ids(rows):  # a conversation without an answer has none
            yield ids


def warm_record(drafting: Mapping, pair: Pair) -> dict[str, dict[str, Any]]:
    """Describes the file of a drafter's memory, for the run's record; {} if there is none.

    Returns:
        By `WARM`: its source, its checksum as `data`, and its tokens.
    """
    file = warm_file(drafting)
    if file is None:
        return {}
    tokens = sum(map(len, warm_texts(file, pair)))
    return {WARM: {"source": file, "data": f"sha256:{file_sha256(packaged(file))}", "tokens": tokens}}


def warm_lines(training: Mapping[str, Mapping]) -> list[str]:
    """A line about a warmed memory, for the foot of a run's table.

    Args:
        training: records of what the drafter saw.
    """
    record = training.get(WARM)
    return [] if record is None else [f"memory {warmed_with(record)} ({record['tokens']:,} tokens)"]


def warmed_with(record: Mapping) -> str:
    """Names the file, in words."""
    return f"warmed with {Path(record['source']).name}"
