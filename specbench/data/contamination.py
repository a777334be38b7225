"""Contamination: detects training or memory text that contains benchmark questions."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from specbench.data.ngrams import ngrams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from specbench.data.questions import Question

# A text of fewer words says little: it is found as a whole message alone, and as an answer not at all.
WORDS = 8


class MeasuredTexts:
    """Texts that a drafter must not know.

    Args:
        questions: whose turns and reference answers they are.
    """

    def __init__(self, questions: Iterable[Question]):
        self._turns: set[tuple[str, ...]] = set()
        self._by_start: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for question in questions:
            for turn in question.turns:
                self._turns.add(words_of(turn))
            for text in (*question.turns, *(question.reference or ())):
                words = words_of(text) if isinstance(text, str) else ()
                if len(words) >= WORDS:
                    self._by_start[words[:WORDS]].append(words)

    def in_text(self, text: str) -> bool:
        """Whether a message is one of them, or holds one; case, punctuation and spaces do not count."""
        words = words_of(text)
        return words in self._turns or any(
            words[i : i + len(passage)] == passage
            for i in range(len(words) - WORDS + 1)
            for passage in self._by_start.get(words[i : i + WORDS], ())
        )

    def in_messages(self, messages: Iterable[dict]) -> bool:
        """Whether a conversation has such a message."""
        return any(self.in_text(message["content"]) for message in messages)


class BenchmarkNgrams:
    """Runs of `WORDS` words of a benchmark's turns, for text that was written anew and must share none with them.

    This is stricter than `MeasuredTexts`: one such run is enough. Turns of fewer words are found as a whole message
    alone.

    Args:
        questions: whose turns they are.
    """

    def __init__(self, questions: Iterable[Question]):
        turns = [words_of(turn) for question in questions for turn in question.turns]
        self._ngrams = {ngram for words in turns for ngram in ngrams(words, WORDS)}
        self._short = {words for words in turns if len(words) < WORDS}

    def in_text(self, text: str) -> bool:
        """Whether a message is a short turn, or shares a run of words with a longer one."""
        words = words_of(text)
        return words in self._short or any(ngram in self._ngrams for ngram in ngrams(words, WORDS))


def uncleared_lines(training: Mapping[str, Mapping], questions: str | None) -> list[str]:
    """A line about each part whose text was cleared of other questions than those that were measured.

    Args:
        training: records of what the parts saw; `questions` is the sha256 of the file that their text was cleared of.
        questions: of the measured file; None: an older run does not tell.
    """
    return [
        f"text of {name} was cleared of other questions than these: it may hold them"
        for name, record in training.items()
        if questions is not None and record.get("questions", questions) not in (questions, None)
    ]


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without punctuation."""
    return tuple(re.findall(r"\w+", text.lower()))
