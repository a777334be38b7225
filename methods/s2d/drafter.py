"""S2D's drafter: a sorted draft model that leaves, token by token, at the shallowest exit that is sure enough.

Every exit (the first k layers) shares the final norm and the head, and was trained to be a draft model of its own
(Kavehzadeh et al. 2024). A token that left early has no keys and values in the deeper layers; they are computed when a
later token goes that deep, from the states that the token left with. Those states are kept by absolute position, so a
roll-back is nothing but shorter caches: what lies beyond their length is written anew before it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from methods.heads import confidence
from methods.sps import SpeculativeSampling
from specbench.decoding.draft import Needs
from specbench.decoding.rows import span
from specbench.errors import UserError
from specbench.pairs import Pair
from specbench.values import Count, Probability

if TYPE_CHECKING:
    from specbench.decoding.batch import Rows
    from specbench.decoding.kv_cache import RowCache
    from specbench.decoding.target import Prefill, Target


class SortedDraft(SpeculativeSampling):
    """The draft model is the pair's part `s2d`; its config.json names its `exits`.

    Not as in the paper, whose code follows the heuristic schedule of transformers' assisted generation: drafts of 5
    tokens, 2 more after one that was accepted whole and else 1 less. Here the draft length is constant. At temperature
    > 0 the authors draft the likeliest token and verify it as if it were drawn from the exit's distribution, which does
    not keep the target's; here tokens are drawn from the distribution that they are verified with.

    Args:
        pair: with a draft model.
        exits: those to use; None for all.
        only: the fixed-exit draft that the paper compares with: the first, second or further of these exits alone.
        thresholds: for each exit but the last, the top-1 probability (temperature 1) above which a token leaves there;
            the last exit takes every token. None: 0.5 everywhere.
        max_draft_tokens: as in `SpeculativeSampling`.
        confidence_threshold: as in `SpeculativeSampling`.
        vocab_map: as in `SpeculativeSampling`.
        vocab_size: as in `SpeculativeSampling`.

    Raises:
        UserError: the draft model does not have these exits, or the thresholds do not fit them.
    """

    needs = Needs(draft_model=True, part="s2d", batching=True)

    def __init__(
        self,
        pair: Pair,
        exits: list[Count] | None = None,
        only: Count | None = None,
        thresholds: list[Probability] | None = None,
        max_draft_tokens: Count = 5,
        confidence_threshold: Probability = 0.0,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        super().__init__(pair, max_draft_tokens, confidence_threshold, vocab_map, vocab_size)
        trained = getattr(self.model.config, "exits", None)
        if trained and pair.draft_expansion is not None:
            trained = [pair.draft_expansion.layers(exit) for exit in trained]
        self.exits = choose_exits(exits, only, trained)
        if not 1 <= self.exits[0] <= self.exits[-1] <= len(self.model.layers):
            raise UserError(
                f"exits must lie between 1 and the {len(self.model.layers)} layers of the draft model"
            )
        self.thresholds = choose_thresholds(thresholds, len(self.exits))
        self.layers = self.exits[-1]
        read, start = 0, 0
        for end in self.exits:  # every exit on the way costs a use of the head
            read += self.model.pass_bytes(start, end, head=False) + self.head.bytes
            self._bytes[end], start = read, end

    def _allocate(self, capacity: int) -> None:
        super()._allocate(capacity)
        # For each exit but the last: the states that tokens left it with, by absolute position.
        shape = (len(self.exits) - 1, 1, capacity, self.model.hidden_size)
        self._left = torch.empty(shape, device=self.model.device, dtype=self.model.dtype).unbind(0)

    def _next(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        model, cache = self.model, self._cache
        hidden, start = model.embed(ids), 0
        for end, left, threshold in zip(self.exits, [*self._left, None], self.thresholds):
            position = cache.lengths[start]
            hidden = model.run_layers(hidden, cache, start, end)
            logits = self.head.logits(model.norm(hidden[:, -1]))
            if left is None:
                break
            known = position + hidden.shape[1]
            left[:, position:known] = hidden
            if confidence(logits) > threshold:
                break
            hidden, start = left[:, cache.lengths[end] : known], end
        return logits, end

    # -- many sequences

    def open_rows(self, rows: int, capacity: int, target: Target, cache: RowCache) -> None:
        """Allocates the draft model's cache for a batch, and room for the states that tokens left the exits with."""
        super().open_rows(rows, capacity, target, cache)
        shape = (len(self.exits) - 1, rows, capacity, self.model.hidden_size)
        self._rows_left = torch.zeros(shape, device=self.model.device, dtype=self.model.dtype)
        # For each exit but the last, the tokens of each row that went deeper.
        self._deeper = torch.zeros(len(self.exits) - 1, rows, dtype=torch.int64, device=self.model.device)

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        """Prefills the draft model with a prompt [1, n], exit by exit."""
        hidden, start, n = self.model.embed(prompt), 0, prompt.shape[1]
        entering = self._places.entering(row, n)
        for i, end in enumerate(self.exits):
            hidden, start = self.model.run_layers(hidden, entering, start, end), end
            if i < len(self._rows_left):
                self._rows_left[i, row, :n] = hidden[0]
        self._deeper[:, row] = n

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies slots of the draft model's cache, with the states of their tokens."""
        super().move_rows(sources, destinations, reach)
        self._rows_left[:, destinations, :reach] = self._rows_left[:, sources, :reach]
        self._deeper[:, destinations] = self._deeper[:, sources]

    def commit_rows(self, rows: Rows, accepted: torch.Tensor) -> None:
        """Drops the tokens that were not accepted from what the deeper layers hold."""
        b = rows.known.shape[0]
        # Of what went deeper this round only the tokens that were kept count, the pending one of the round included.
        self._deeper[:, :b] = self._deeper[:, :b].minimum(rows.known + accepted)

    def _next_rows(
        self, ids: torch.Tensor, starts: torch.Tensor, reach: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """One pass; each sequence takes its first exit that is sure enough, and the batch goes to the deepest one."""
        model, (b, n) = self.model, ids.shape
        row = torch.arange(b, device=ids.device)
        known = starts + n  # tokens that the model has been given, these included
        hidden, lo = model.embed(ids), 0
        deciding: torch.Tensor | None = None
        for i, (end, threshold) in enumerate(zip(self.exits, self.thresholds)):
            hidden = self._run_rows(hidden, starts, max(reach, hidden.shape[1]), lo, end)
            logits = self.head.logits(model.norm(hidden[row, known - 1 - starts]))
            if deciding is None:
                chosen, layers = logits, torch.full_like(known, end)
            else:
                chosen = torch.where(deciding.unsqueeze(1), logits, chosen)
                layers = torch.where(deciding, end, layers)
            if i == len(self._rows_left):
                break
            self._rows_left[i, row.unsqueeze(1), span(starts, hidden.shape[1])] = hidden
            unsure = confidence(logits) <= threshold
            deciding = unsure if deciding is None else deciding & unsure
            missing = known - self._deeper[i, :b]
            deeper, width = torch.stack([deciding.any().long(), missing.amax()]).tolist()
            if not deeper:
                break
            # Every row is fed as many tokens as the one that lacks most: the others compute identical keys and values
            # again, and what is written behind a short row's end is overwritten before it is read.
            starts, lo = (known - width).clamp(min=0), end
            hidden = self._rows_left[i, row.unsqueeze(1), span(starts, width)]
            self._deeper[i, :b] = known
        return chosen, layers, self._bytes[end]


def choose_exits(asked: list[int] | None, only: int | None, trained: list[int] | None) -> list[int]:
    """The exits to use, ascending. Raises UserError for one that the draft model was not trained with."""
    asked, trained = asked or [], trained or []
    if not asked and not trained:
        raise UserError(
            "the config.json of the pair's part 's2d' names no `exits`: set method.exits, if it is sorted"
        )
    if unknown := sorted(set(asked) - set(trained or asked)):
        raise UserError(f"the sorted draft has no exit {unknown[0]}: it was trained with {sorted(trained)}")
    exits = sorted(set(asked or trained))
    if only is None:
        return exits
    if not 1 <= only <= len(exits):
        raise UserError(f"method.only must lie between 1 and {len(exits)}, the number of exits, not {only}")
    return [exits[only - 1]]


def choose_thresholds(asked: list[float] | None, exits: int) -> list[float]:
    """One threshold per exit, the last without effect. None: 0.5 everywhere, the authors' released setting."""
    given = [0.5] * exits if asked is None else list(asked)
    if len(given) == exits - 1:
        given.append(0.0)
    if len(given) != exits:
        raise UserError(f"{exits} exits take {exits} thresholds (the last has no effect), not {len(given)}")
    return given
