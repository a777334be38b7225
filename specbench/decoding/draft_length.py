"""How long to draft: rules that choose the length of each draft from how the last ones fared, for any drafter.

A rule looks at what was accepted and at nothing else, so the text stays that of the target. In a batch every sequence
has a length of its own, and a round has the greatest of them. Of trees the length is the number of levels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specbench.decoding.wrapped import WrappedDrafter
from specbench.system.errors import UserError
from specbench.system.settings import ADAPTIVE, GOODPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.decoding.drafter import Drafter
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified

BEGIN = 5  # length of the first draft of an answer
STEP = 2  # more tokens after a draft that was accepted whole
MEMORY = 0.9  # what a round counts for when the next one is over
EXPECTED, WEIGHT = (
    0.7,
    2.0,
)  # acceptance of a token before any was judged, and for how many judged ones that counts


class Rule(Protocol):
    """Chooses draft lengths; `first` is that of the first draft of an answer."""

    first: int

    def following(self, last: int, accepted: int, memory: np.ndarray) -> int:
        """The length after a draft of `last` tokens, of which `accepted` were accepted.

        Args:
            last: at least 1.
            accepted: at most `last`.
            memory: [2] of the rule's own for the sequence, which it may change; zeros at the beginning of an answer.
        """


class Constant:
    """Drafts of one length."""

    def __init__(self, length: int):
        self.first = length

    def following(self, last: int, accepted: int, memory: np.ndarray) -> int:
        """The same as before."""
        return self.first


class Adaptive:
    """As transformers' assisted generation adapts its length: two more after a whole draft, else one less.

    Args:
        longest: length at most.
    """

    def __init__(self, longest: int):
        self.longest, self.first = longest, min(BEGIN, longest)

    def following(self, last: int, accepted: int, memory: np.ndarray) -> int:
        """Looks at the last draft alone."""
        return min(last + STEP, self.longest) if accepted >= last else max(last - 1, 1)


class Goodput:
    """The length with the most expected tokens for the cost of a round.

    Tokens are taken to be accepted independently, with the share of a sequence's last rounds (Leviathan et al. 2023):
    a round over k draft tokens then gives (1 - a^(k+1)) / (1 - a) tokens.

    Args:
        longest: length at most.
        costs: of a round by its number of draft tokens, from none on, in any unit, such as `specbench replay` prints
            them. Further lengths cost as the last two tell.
    """

    def __init__(self, longest: int, costs: Sequence[float]):
        listed = np.array(costs[: longest + 1], dtype=float)
        slope = listed[-1] - listed[-2]
        further = listed[-1] + slope * np.arange(1, longest + 2 - len(listed))
        self._costs = np.concatenate([listed, further])[1:]
        self._powers = np.arange(longest + 1)
        self.first = self._best(EXPECTED)

    def following(self, last: int, accepted: int, memory: np.ndarray) -> int:
        """Looks at the last rounds, each counting less than the one after it."""
        memory *= MEMORY
        memory += accepted, min(accepted + 1, last)
        accepted_so_far, judged = memory
        return self._best((accepted_so_far + EXPECTED * WEIGHT) / (judged + WEIGHT))

    def _best(self, acceptance: float) -> int:
        tokens = np.cumsum(acceptance**self._powers)[1:]
        return 1 + int(np.argmax(tokens / self._costs))


def rule_of(name: str, longest: int, costs: Sequence[float] | None) -> Rule:
    """The rule of `decoding.draft_length`.

    Args:
        name: of the rule.
        longest: draft length at most.
        costs: as in `Goodput`.

    Raises:
        UserError: the drafter's drafts have no length, or costs are missing or not positive.
    """
    if not longest:
        raise UserError(f"decoding.draft_length={name} is for methods that draft: set it to null")
    if name == ADAPTIVE:
        return Adaptive(longest)
    if costs is None or len(costs) < 2 or min(costs) <= 0:
        raise UserError(
            f"decoding.draft_length={GOODPUT} needs decoding.round_costs: what a round costs with no draft token, with "
            "one, ..., as `specbench replay RUN` prints it"
        )
    return Goodput(longest, costs)


class RuledDrafter(WrappedDrafter):
    """A drafter whose drafts are as long as a rule says.

    Args:
        inner: the drafter; its own length is the greatest.
        rule: chooses lengths.
    """

    def __init__(self, inner: Drafter, rule: Rule):
        super().__init__(inner)
        self.rule = rule
        self._length = 0

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for each sequence's length."""
        super().open(slots, target)
        self._lengths, self._memory = slots.array(), slots.array(2, dtype=float)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Begins with the rule's first length."""
        self._lengths[slot], self._memory[slot] = self.rule.first, 0.0
        super().begin(slot, sequence, prefill)

    def draft(self, batch: Batch) -> Draft:
        """Drafts as many tokens as the rule says, for the sequence that gets most."""
        self._length = min(batch.max_draft, int(self._lengths[: batch.size].max()))
        limits = [min(limit, self._length) for limit in batch.limits]
        return super().draft(replace(batch, limits=limits, max_draft=self._length))

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Tells the rule what was accepted."""
        draft = verified.draft
        # A drafter may have been unsure, and have stopped before.
        longest = self._length if draft.tree is not None else min(self._length, draft.tokens.shape[1])
        for slot, (limit, count) in enumerate(zip(batch.limits, verified.counts)):
            drafted = min(limit, longest)
            if drafted:  # else nothing was learnt, or this was the last token of the answer
                memory = self._memory[slot]
                self._lengths[slot] = self.rule.following(drafted, min(count, drafted), memory)
        super().commit(batch, verified)
