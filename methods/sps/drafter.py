"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from methods.common.heads import Chosen, StopTracker, draft_head, target_ids
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.graphs import uncaptured
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified
from specbench.models.pairs import Pair, draft_of
from specbench.system.settings import Count, Probability

if TYPE_CHECKING:
    from specbench.decoding.slots import Slots


class SpeculativeSampling(Drafter):
    """A draft model drafts token by token.

    Args:
        pair: with a draft model.
        max_draft_tokens: draft length.
        confidence_threshold: drafting stops after a token whose probability under the draft model (top-1, temperature
            1) is below it; 0 keeps the length constant and never waits for the device.
    """

    needs = Needs(draft_model=True, trims=True)

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 5,
        confidence_threshold: Probability = 0.0,
    ):
        # Rows of its head beyond the tokenizer's ids are padding; ids that only the target has are fed to it, too.
        self.model = StagedModel(draft_of(pair), pair.vocab_size, target_ids(pair))
        self.head = draft_head(pair, self.model)
        self.max_draft_tokens = max_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.layers = len(self.model.layers)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the draft model's cache."""
        self._layout = slots.cache(self.model.new_cache(slots.capacity, slots.count))
        self._drafted = 0
        self._fed = slots.values(int)  # known tokens of each sequence that the draft model has been given

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Prefills the draft model with the prompt. The first draft pass feeds the pending token."""
        n = prefill.ids.shape[1]
        cache = self._layout.prefill_view(slot, n)
        self.model.run_layers(prefill.ids, cache, 0, 0, self.layers)
        self._fed[slot] = n

    def draft(self, batch: Batch) -> Draft:
        """Drafts token by token, up to `max_draft_tokens`, equally many for every sequence of the batch."""
        n, k = self._lacking(batch), batch.max_draft
        caught_up = 0.0
        if n > 1 + self.max_draft_tokens and self.model.fixed_shapes:
            # Another drafter replaced it for several rounds: each such number would need its own graph.
            caught_up, n = self._catch_up(batch, n - 1), 1
        if self.looks:
            draft = self._steps(batch, n, k)
            self._drafted = draft.tokens.shape[1]
            return draft

        def steps(batch: Batch) -> Chosen:
            draft = self._steps(batch, n, k)
            return draft.tokens, draft.probs

        drafted = self.model.run_batch(batch, self._layout.cache, ("draft", n, k), steps, entries=k)
        self._drafted = k
        return Draft(*drafted, bytes_read=caught_up + self._draft_bytes(batch, n, k))

    @uncaptured()
    def _catch_up(self, batch: Batch, n: int) -> float:
        """Feeds the n newest tokens but the pending one; returns the bytes of weights that were read."""
        ids = batch.last_tokens(n + 1)[:, :n]
        ctx = self._layout.place(batch, n, -n)
        self.model.run_layers(ids, self._layout.cache, ctx, 0, self.layers)
        return self.model.pass_bytes(0, self.layers, head=False, tokens=ids.numel())

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes how many of the known tokens the draft model has seen: as before if it did not draft."""
        if not self._drafted:
            return
        for slot, (length, count) in enumerate(zip(batch.lengths, verified.own_counts)):
            self._fed[slot] = length + min(self._drafted - 1, count)
        self._drafted = 0

    @property
    def looks(self) -> bool:
        """Whether the host checks each step of a draft, so that it cannot be captured as a whole."""
        return self.confidence_threshold > 0

    def _lacking(self, batch: Batch) -> int:
        """The number of newest tokens that the first draft pass feeds.

        After a full acceptance the last draft token has not been through the draft model either. If another sequence
        lacks it, the same keys and values are written again.
        """
        return max(length - fed for length, fed in zip(batch.lengths, self._fed))

    def _steps(self, batch: Batch, n: int, k: int) -> Draft:
        """Drafts up to k tokens; the first pass feeds the n newest ones."""
        feed, offset = batch.last_tokens(n), 1 - n
        tokens, probs, passes = [], [], []
        stop = StopTracker(self.confidence_threshold)
        for j in range(k):
            logits, layers, read = self._next(batch, feed, offset)
            token, q = self.head.choose(logits, batch, j)
            tokens.append(token)
            probs.append(q)
            passes.append((layers, read))
            if not stop.continues(logits, 1 + j == k):
                break
            feed, offset = token.unsqueeze(1), 1 + j
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            probs=self.head.spread(probs),
            candidates=stop.counts,
            bytes_read=sum(read for _, read in passes),
            stats=self._stats([layers for layers, _ in passes]),
        )

    def _next(self, batch: Batch, ids: torch.Tensor, offset: int) -> tuple[torch.Tensor, Any, float]:
        """One pass over token ids [b, n], the first of them `offset` after the pending token.

        Returns:
            Logits [b, rows] after the last of them, the entry for `_stats`, and the bytes of weights that were read.
        """
        ctx = self._layout.place(batch, ids.shape[1], offset)
        hidden = self.model.run_layers(ids, self._layout.cache, ctx)[:, -1]
        return self.head.logits(self.model.norm(hidden)), None, self._pass_bytes(ids.numel())

    def _draft_bytes(self, batch: Batch, n: int, k: int) -> float:
        """Bytes of weights that the passes of a draft of k tokens read, the first of which feeds the n newest ones."""
        return self._pass_bytes(batch.size * n) + (k - 1) * self._pass_bytes(batch.size)

    def _pass_bytes(self, tokens: int) -> float:
        """Bytes of weights that a pass over `tokens` tokens reads."""
        return self.model.pass_bytes(head=False, tokens=tokens) + self.head.bytes

    def _stats(self, passes: list[Any]) -> dict[str, Any]:
        """The statistics of a draft, from the entries of `_next`."""
        return {}
