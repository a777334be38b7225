"""Contamination: detects training or memory text that contains benchmark questions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specbench.data.conversations import Messages
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
                self._turns.add(tuple(turn.split()))
            for text in (*question.turns, *(question.reference or ())):
                words = tuple(text.split()) if isinstance(text, str) else ()
                if len(words) >= WORDS:
                    self._by_start[words[:WORDS]].append(words)

    def in_text(self, text: str) -> bool:
        """Whether a message is one of them, or holds one; line breaks and spaces do not count."""
        words = tuple(text.split())
        return words in self._turns or any(
            words[i : i + len(passage)] == passage
            for i in range(len(words) - WORDS + 1)
            for passage in self._by_start.get(words[i : i + WORDS], ())
        )

    def in_messages(self, messages: Messages) -> bool:
        """Whether a conversation has such a message."""
        return any(self.in_text(message["content"]) for message in messages)
