"""Contamination: detects training or memory text that contains benchmark questions."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from specbench.data.ngrams import ngrams

if TYPE_CHECKING:
    from specbench.data.questions import Question

# Texts of fewer words are too common: turns match only as a whole message, answers not at all.
WORDS = 8
# Words of what follows a turn's instruction, such as "Summarize: ": text may put that in other words, or cut the rest.
BODY = 32
# Characters of Chinese and Japanese, which are written without spaces.
SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{SIGNS}]|[^\W{SIGNS}]+")
# The setting that names the text of a drafter's memory, and the key of that text's record among a drafter's training
# records. A run refuses such a text if it holds a question, so no record of its clearing is needed.
WARM = "warm"


class MeasuredTexts:
    """Texts that a drafter must not know.

    Attributes:
        key: the same for the same texts.

    Args:
        questions: whose turns and reference answers they are.
    """

    def __init__(self, questions: Iterable[Question]):
        self._turns: set[tuple[str, ...]] = set()
        self._by_start: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for question in questions:
            for turn in question.texts:
                if words := words_of(turn):  # a question without any would match every such message
                    self._turns.add(words)
            for text in (*question.texts, *(question.reference or ())):
                words = words_of(text) if isinstance(text, str) else ()
                self._add(words)
                self._add(words_of(text.partition(": ")[2])[:BODY] if words else ())
        passages = frozenset(words for some in self._by_start.values() for words in some)
        self.key = frozenset(self._turns), passages

    def _add(self, words: tuple[str, ...]) -> None:
        """Adds a passage that no text may hold, unless it is too common."""
        if len(words) >= WORDS:
            self._by_start[words[:WORDS]].append(words)

    def in_text(self, text: str) -> bool:
        """Whether a message is one of them, or holds one or the beginning of what follows its instruction.

        Case, punctuation and spaces do not count.
        """
        words = words_of(text)
        return words in self._turns or any(
            words[i : i + len(passage)] == passage
            for i in range(len(words) - WORDS + 1)
            for passage in self._by_start.get(words[i : i + WORDS], ())
        )

    def in_messages(self, messages: Iterable[dict]) -> bool:
        """Whether a conversation has such a message."""
        return any(self.in_text(message["content"]) for message in messages)


class Screen:
    """Searches the conversations of a source for measured texts: once, however often the source is read.

    It stores only the numbers of conversations that hold one, so that a source may be larger than the memory.

    Attributes:
        left_out: numbers of the conversations read so far that hold one.
        is_complete: whether all were read.

    Args:
        measured: the texts.
    """

    def __init__(self, measured: MeasuredTexts):
        self._measured, self._count = measured, 0
        self.left_out: set[int] = set()
        self.is_complete = False

    def cleared(self, conversations: Iterable[list[dict]]) -> Iterator[tuple[int, list[dict]]]:
        """The conversations that hold none, each with its number.

        Args:
            conversations: all of the source, from its first one on.
        """
        for number, messages in enumerate(conversations):
            if number == self._count:  # nobody has read so far yet
                if self._measured.in_messages(messages):
                    self.left_out.add(number)
                self._count += 1
            if number not in self.left_out:
                yield number, messages
        self.is_complete = True


class BenchmarkNgrams:
    """Runs of `WORDS` words of a benchmark's turns, for text that was written anew and must share none with them.

    This is stricter than `MeasuredTexts`: one such run is enough. Turns of fewer words are found as a whole message
    alone.

    Args:
        questions: whose turns they are.
    """

    def __init__(self, questions: Iterable[Question]):
        turns = [words_of(turn) for question in questions for turn in question.texts]
        self._ngrams = {ngram for words in turns for ngram in ngrams(words, WORDS)}
        self._short = {words for words in turns if 0 < len(words) < WORDS}

    def in_text(self, text: str) -> bool:
        """Whether a message is a short turn, or shares a run of words with a longer one."""
        words = words_of(text)
        return words in self._short or any(ngram in self._ngrams for ngram in ngrams(words, WORDS))


def uncleared_lines(training: Mapping[str, Mapping], questions: str | None) -> list[str]:
    """A line about each part whose text may hold measured questions: it was cleared of others, or of unknown ones.

    Args:
        training: records of what the parts saw; `questions` of each stage is the sha256 of the file that its text was
            cleared of, null where that is not known.
        questions: of the measured file; None for an older run, which does not record it.
    """
    if questions is None:
        return []
    lines: list[str] = []
    unknown: list[str] = []
    for name, record in training.items():
        cleared = {stage.get("questions") for stage in stages(record)}
        if name == WARM or cleared == {questions}:
            continue
        if cleared - {questions, None}:
            lines.append(f"text of {name} was cleared of other questions than these: it may hold them")
        else:
            unknown.append(name)
    if unknown:
        lines.append(
            f"text of {', '.join(unknown)} may hold these questions: no record says that it was cleared of them"
        )
    return lines


def stages(record: Mapping) -> list[dict]:
    """The stages of a training, the first one first; older records hold only the last one."""
    return [*record.get("earlier", []), {name: value for name, value in record.items() if name != "earlier"}]


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without punctuation; each sign of a script without spaces is one."""
    return tuple(WORD.findall(unicodedata.normalize("NFKC", text).lower()))
