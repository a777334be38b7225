"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import torch

from methods.heads import draft_head, unsure
from specbench.decoding.draft import Context, Draft, Drafter, Needs
from specbench.decoding.target import Prefill, Target
from specbench.errors import at_least


class SpeculativeSampling(Drafter):
    """A small model drafts token by token.

    max_draft_tokens: draft length. confidence_threshold: drafting stops after a token whose probability under the
    draft model (top-1, temperature 1) lies below it; 0 keeps the length constant and never waits for the device.
    vocab_map, vocab_size: a trimmed head, see `methods.heads`.
    """

    needs = Needs(draft_model=True)

    def __init__(
        self,
        pair,
        max_draft_tokens: int = 5,
        confidence_threshold: float = 0.0,
        vocab_map: str | None = None,
        vocab_size: int | None = None,
    ):
        at_least(1, max_draft_tokens=max_draft_tokens)
        self.model = Target(pair.draft, vocab_size=pair.vocab_size)  # rows beyond it only pad the head
        self.head = draft_head(pair, self.model, vocab_map, vocab_size)
        self.max_draft_tokens = max_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.layers = len(self.model.layers)
        self._bytes = {self.layers: self.model.pass_bytes(head=False) + self.head.bytes}
        self._cache = None

    def begin(self, context: Context, prefill: Prefill, target: Target, cache) -> None:
        if self._cache is None or self._cache.capacity < cache.capacity:
            self._allocate(cache.capacity)
        self._cache.truncate(0)
        # The pending token stays out: the first draft pass feeds it. The prompt needs no head.
        prompt = context.known()[:-1].unsqueeze(0)
        self.model.run_layers(self.model.embed(prompt), self._cache, 0, self.layers)

    def draft(self, context: Context) -> Draft:
        # After a full acceptance the last draft token has not been through the draft model either.
        feed = context.known()[self._cache.lengths[0] :].unsqueeze(0)
        tokens, probs, exits = [], [], []
        for _ in range(min(self.max_draft_tokens, context.max_draft)):
            logits, layers = self._next(feed)
            token, q = self.head.choose(logits, context.decoding, context.generator)
            tokens.append(token)
            probs.append(q)
            exits.append(layers)
            if unsure(logits, self.confidence_threshold):
                break
            feed = token.unsqueeze(0)
        read = sum(self._bytes[layers] for layers in exits)
        return Draft(torch.cat(tokens), self.head.spread(probs), bytes_read=read, exits=tuple(exits))

    def commit(self, context: Context, accepted: int) -> None:
        self._cache.truncate(context.length - 1)

    def _allocate(self, capacity: int) -> None:
        """Makes what holds `capacity` positions."""
        self._cache = self.model.new_cache(capacity)

    def _next(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Token ids [1, n] that follow what the cache holds -> logits [1, rows] after the last of them, and the number
        of layers that it went through."""
        hidden = self.model.run_layers(self.model.embed(ids), self._cache)[:, -1]
        return self.head.logits(self.model.norm(hidden)), self.layers
