"""Prompt lookup decoding (Saxena 2023): the draft is what followed the same n-gram earlier in the text. No model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.state import Batch, Draft, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.errors import require_at_least
from specbench.system.settings import Count

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill


class PromptLookup(Drafter):
    """Looks up the newest tokens earlier in the text, the longest n-gram first.

    Args:
        pair: not used.
        max_draft_tokens: longest draft.
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest n-gram that is looked up.
        match: "earliest": the n-gram's first occurrence; if fewer than `max_draft_tokens` tokens follow it, a shorter
            n-gram is looked up, as in the author's code. "latest": its last earlier occurrence.

    Raises:
        UserError: `min_ngram` is above `max_ngram`.
    """

    needs = Needs(text_alone=True)
    deterministic = True

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 10,
        max_ngram: Count = 3,
        min_ngram: Count = 1,
        match: Literal["earliest", "latest"] = "earliest",
    ):
        require_at_least(min_ngram, max_ngram=max_ngram)
        self.max_draft_tokens, self.earliest = max_draft_tokens, match == "earliest"
        self.ngrams = range(max_ngram, min_ngram - 1, -1)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for the known tokens, on the host: a look-up there waits for nothing."""
        self._tokens = slots.array(slots.capacity)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Notes the prompt and the first token."""
        self._tokens[slot, : sequence.length] = sequence.tokens

    def draft(self, batch: Batch) -> Draft:
        """The tokens that followed the same n-gram earlier; none if it is new."""
        drafts = [
            self._look_up(self._tokens[slot, :length])[:limit]
            for slot, (length, limit) in enumerate(zip(batch.lengths, batch.limits))
        ]
        return Draft.of([draft.tolist() for draft in drafts], batch.tokens.device)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes the new tokens."""
        for slot, (length, new) in enumerate(zip(batch.lengths, verified.tokens)):
            self._tokens[slot, length : length + len(new)] = new

    def _look_up(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens to draft after `tokens` [n]."""
        # Earlier occurrences of the newest token; then those that have more of the newest tokens in front.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        ends_by_length: dict[int, np.ndarray] = {}
        for n in range(1, self.ngrams[0] + 1):
            if n > 1:
                ends = ends[ends >= n - 1]
                ends = ends[tokens[ends - n + 1] == tokens[-n]] if len(tokens) >= n else ends[:0]
            if not len(ends):
                break
            ends_by_length[n] = ends
        for n in self.ngrams:
            if n not in ends_by_length:
                continue
            start = ends_by_length[n][0 if self.earliest else -1] + 1
            # The author's code also requires the draft to start in front of the newest n-gram. If the first occurrence
            # fails, all later ones do.
            if not self.earliest or start <= len(tokens) - max(self.max_draft_tokens, n + 1):
                return tokens[start : start + self.max_draft_tokens]
        return tokens[:0]
