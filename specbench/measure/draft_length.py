"""How long to draft: rules that choose the length of each draft from how the last ones fared, for any drafter.

A rule depends only on what was accepted, so the text stays that of the target. Each sequence of a batch has its own
draft length and its own accepted length: its text does not depend on the others. The length of a tree is its number of
levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.decoding.wrapped import WrappedDrafter
from specbench.system.settings import ADAPTIVE, CONSTANT

if TYPE_CHECKING:
    from specbench.decoding.drafter import Drafter
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Prefill, SequenceState, Verified

INITIAL = 5  # length of the first draft of an answer
STEP = 2  # more tokens after a draft that was accepted whole
DECAY = 0.9  # of a round's weight, per later round
PRIOR_ACCEPTANCE = 0.7  # of a token before any was judged
PRIOR_WEIGHT = 2.0  # of that prior, in judged tokens


class Constant:
    """Drafts of one length, and the base of the rules that choose another length after each draft.

    Args:
        longest: length at most.

    Attributes:
        initial: length of the first draft of an answer.
    """

    def __init__(self, longest: int):
        self.initial = self.longest = longest

    def next_length(self, length: int, last: int, accepted: int, counts: np.ndarray) -> int:
        """The length after a draft of `last` tokens, of which `accepted` were accepted.

        Args:
            length: that the rule chose for it; a draft is shorter if the drafter stops by itself or the answer ends.
            last: at least 1.
            accepted: at most `last`.
            counts: [2] the rule's state for the sequence, changed in place; zeros at the beginning of an answer.
        """
        return self.initial


class Adaptive(Constant):
    """As transformers' `heuristic` schedule: two tokens more after a draft that was accepted whole, else one less.

    Args:
        longest: length at most; transformers has no bound.
    """

    def __init__(self, longest: int):
        super().__init__(longest)
        self.initial = min(INITIAL, longest)

    def next_length(self, length: int, last: int, accepted: int, counts: np.ndarray) -> int:
        """Uses the last draft alone, and changes its own length, as the draft may have been shorter."""
        return min(length + STEP, self.longest) if accepted >= last else max(length - 1, 1)


class Goodput(Constant):
    """The length, at least 1, with the most expected tokens for the cost of a round.

    Tokens are assumed to be accepted independently, at the rate of a sequence's last rounds (Leviathan et al. 2023):
    a round over k draft tokens then emits (1 - a^(k+1)) / (1 - a) tokens.

    Args:
        longest: length at most.
        costs: as in `costs_by_length`.
    """

    def __init__(self, longest: int, costs: Sequence[float]):
        super().__init__(longest)
        self._costs = costs_by_length(costs, longest)[1:]
        self._powers = np.arange(longest + 1)
        self.initial = self._best(PRIOR_ACCEPTANCE)

    def next_length(self, length: int, last: int, accepted: int, counts: np.ndarray) -> int:
        """Uses the last rounds, each with less weight than the one after it."""
        counts *= DECAY
        counts += accepted, min(accepted + 1, last)
        accepted_so_far, judged = counts
        return self._best((accepted_so_far + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (judged + PRIOR_WEIGHT))

    def _best(self, acceptance: float) -> int:
        tokens = np.cumsum(acceptance**self._powers)[1:]
        return 1 + int(np.argmax(tokens / self._costs))


def costs_by_length(costs: Sequence[float], longest: int) -> np.ndarray:
    """The costs [longest + 1] of rounds by their number of draft tokens; a longer draft never costs less.

    Args:
        costs: of a round with no draft token, with one, ..., in any unit; at least two. Longer ones are extrapolated
            from the last two.
        longest: draft length.
    """
    rising = np.maximum.accumulate(np.array(costs[: longest + 1], dtype=float))
    further = np.arange(1, longest + 2 - len(rising))
    return np.concatenate([rising, rising[-1] + (rising[-1] - rising[-2]) * further])


def listed_costs(costs: Mapping[int, float]) -> list[float] | None:
    """Costs by draft tokens -> costs of 0, 1, ... up to the most that were measured; None if just one was."""
    if len(costs) < 2:
        return None
    lengths = sorted(costs)
    return np.interp(range(lengths[-1] + 1), lengths, [costs[length] for length in lengths]).tolist()


def make_rule(name: str, longest: int, costs: Sequence[float] | None) -> Constant:
    """The rule of `decoding.draft_length`; a constant length in place of goodput until there are costs.

    Args:
        name: of the rule.
        longest: draft length at most.
        costs: as in `costs_by_length`.
    """
    if name == ADAPTIVE:
        return Adaptive(longest)
    return Constant(longest) if name == CONSTANT or costs is None else Goodput(longest, costs)


class VariableLength(WrappedDrafter):
    """A drafter whose draft length a rule chooses.

    A tree that grows has as many levels as the sequence of the batch with most room, and shares its nodes among these.

    Args:
        inner: the drafter; its own length is the maximum.
        rule: chooses lengths.
    """

    def __init__(self, inner: Drafter, rule: Constant):
        super().__init__(inner)
        self.rule = rule

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for each sequence's length."""
        super().open(slots, target)
        self._lengths, self._counts = slots.array(), slots.array(2, dtype=float)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Begins with the rule's initial length."""
        self._lengths[slot], self._counts[slot] = self.rule.initial, 0.0
        super().begin(slot, sequence, prefill)

    def draft_limit(self, slot: int) -> int:
        """The length that the rule chose."""
        return int(self._lengths[slot])

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Updates the length of each sequence that drafted, by what was accepted."""
        for slot, sequence in enumerate(batch.sequences):
            last = sequence.steps[-1]
            if last.depth:
                facts = last.depth, last.accepted, self._counts[slot]
                self._lengths[slot] = self.rule.next_length(self.draft_limit(slot), *facts)
        super().commit(batch, verified)
