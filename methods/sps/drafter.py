"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from methods.heads import Going, draft_head, target_ids, unsure
from specbench.decoding.draft import Context, Draft, Drafter, Needs
from specbench.decoding.rows import Ragged
from specbench.decoding.target import Prefill, Target
from specbench.pairs import Pair, draft_of
from specbench.values import Count, Probability

if TYPE_CHECKING:
    from specbench.decoding.batch import Rows
    from specbench.decoding.kv_cache import KVCache, RowCache


class SpeculativeSampling(Drafter):
    """A small model drafts token by token.

    Args:
        pair: with a draft model.
        max_draft_tokens: draft length.
        confidence_threshold: drafting stops after a token whose probability under the draft model (top-1, temperature
            1) lies below it; 0 keeps the length constant and never waits for the device.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.
    """

    needs = Needs(draft_model=True, batching=True)

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 5,
        confidence_threshold: Probability = 0.0,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        # Rows of its head beyond the tokenizer's ids are padding; ids that only the target has are fed to it, too.
        self.model = Target(draft_of(pair), pair.vocab_size, target_ids(pair))
        self.head = draft_head(pair, self.model, vocab_map, vocab_size)
        self.max_draft_tokens = max_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.layers = len(self.model.layers)
        self._bytes = {self.layers: self.model.pass_bytes(head=False) + self.head.bytes}
        self._cache = self.model.new_cache(0)  # until it is known how long the sequences are

    def begin(self, context: Context, prefill: Prefill, target: Target, cache: KVCache) -> None:
        """Prefills the draft model with the prompt."""
        if self._cache.capacity < cache.capacity:
            self._allocate(cache.capacity)
        self._cache.truncate(0)
        # The pending token stays out: the first draft pass feeds it. The prompt needs no head.
        prompt = context.known()[:-1].unsqueeze(0)
        self.model.run_layers(self.model.embed(prompt), self._cache, 0, self.layers)

    def draft(self, context: Context) -> Draft:
        """Drafts token by token, up to `max_draft_tokens`."""
        # After a full acceptance the last draft token has not been through the draft model either.
        feed = context.known()[self._cache.lengths[0] :].unsqueeze(0)
        tokens, probs, exits = [], [], []
        for j in range(min(self.max_draft_tokens, context.max_draft)):
            logits, layers = self._next(feed)
            token, q = self.head.choose(logits, context.decoding, context.draws(j))
            tokens.append(token)
            probs.append(q)
            exits.append(layers)
            if unsure(logits, self.confidence_threshold):
                break
            feed = token.unsqueeze(0)
        read = sum(self._bytes[layers] for layers in exits)
        return Draft(torch.cat(tokens), self.head.spread(probs), bytes_read=read, exits=tuple(exits))

    def commit(self, context: Context, accepted: int) -> None:
        """Drops the tokens that were not accepted from the draft model's cache."""
        self._cache.truncate(context.length - 1)

    def _allocate(self, capacity: int) -> None:
        """Allocates what holds `capacity` positions."""
        self._cache = self.model.new_cache(capacity)

    def _next(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """One pass over token ids [1, n] that follow what the cache holds.

        Returns:
            Logits [1, rows] after the last of them, and the number of layers that it went through.
        """
        hidden = self.model.run_layers(self.model.embed(ids), self._cache)[:, -1]
        return self.head.logits(self.model.norm(hidden)), self.layers

    # -- many sequences

    def open_rows(self, rows: int, capacity: int, target: Target, cache: RowCache) -> None:
        """Allocates the draft model's cache for a batch."""
        self._places = Ragged(self.model.new_rows(rows, capacity))

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        """Prefills the draft model with a prompt [1, n]."""
        entering = self._places.entering(row, prompt.shape[1])
        self.model.run_layers(self.model.embed(prompt), entering, 0, self.layers)

    def draft_rows(self, rows: Rows) -> Draft:
        """Drafts for the running sequences, as many tokens for each; `counts` holds what each has really drafted."""
        # Two tokens for every row: where all were accepted the model has not seen the last draft token. Where it has,
        # the same keys and values are written again.
        feed, starts = rows.newest(2), rows.known - 2
        tokens, probs, exits, read = [], [], [], 0
        going = Going(self.confidence_threshold)
        for j in range(min(self.max_draft_tokens, rows.max_draft)):
            logits, layers, bytes_read = self._next_rows(feed, starts, rows.reach + j)
            token, q = self.head.choose(logits, rows.decoding, rows.draws(j))
            tokens.append(token)
            probs.append(q)
            exits.append(layers)
            read += bytes_read
            feed, starts = token.unsqueeze(1), rows.known + j
            if not going.drafted(logits):
                break
        return Draft(
            torch.stack(tokens, dim=1),
            self.head.spread_rows(probs),
            bytes_read=read,
            exits=torch.stack(exits, dim=1),
            counts=going.counts,
        )

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies slots of the draft model's cache."""
        self._places.move(sources, destinations, reach)

    def _next_rows(
        self, ids: torch.Tensor, starts: torch.Tensor, reach: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """One pass over token ids [b, n] at the positions from `starts` [b] on; reach: a bound on all positions.

        Returns:
            Logits [b, rows] after the last of them, the number of layers [b] that each went through, and the bytes of
            weights that were read.
        """
        hidden = self._run_rows(self.model.embed(ids), starts, reach, 0, self.layers)[:, -1]
        layers = torch.full_like(starts, self.layers)
        return self.head.logits(self.model.norm(hidden)), layers, self._bytes[self.layers]

    def _run_rows(
        self, hidden: torch.Tensor, starts: torch.Tensor, reach: int, lo: int, hi: int
    ) -> torch.Tensor:
        places = self._places.places(starts, hidden.shape[1], reach)
        return self.model.run_rows(hidden, self._places.cache, places, lo, hi)
