"""Speculative sampling with a draft model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from specbench.decoding.draft import Context, Draft, Drafter, Needs
from specbench.decoding.target import Prefill, Target


class SpeculativeSampling(Drafter):
    """A small model drafts token by token.

    max_draft_tokens: draft length. confidence_threshold: drafting stops after a token whose probability under the
    draft model (top-1, temperature 1) lies below it; 0 keeps the length constant and never waits for the device.
    """

    needs = Needs(draft_model=True)

    def __init__(self, pair, max_draft_tokens: int = 5, confidence_threshold: float = 0.0):
        target_vocab = pair.target.get_output_embeddings().weight.shape[0]
        draft_vocab = pair.draft.get_output_embeddings().weight.shape[0]
        self.model = Target(pair.draft, vocab_size=min(draft_vocab, target_vocab))
        self.missing_ids = target_vocab - self.model.vocab_size  # the target's alone: the draft's q is 0
        self.max_draft_tokens = max_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.pass_bytes = self.model.pass_bytes()
        self._cache = None

    def begin(self, context: Context, prefill: Prefill, target: Target, cache) -> None:
        if self._cache is None or self._cache.capacity < cache.capacity:
            self._cache = self.model.new_cache(cache.capacity)
        self._cache.truncate(0)
        # The pending token stays out: the first draft pass feeds it. The prompt needs no head.
        self.model.run_layers(self.model.embed(context.known()[:-1].unsqueeze(0)), self._cache)

    def draft(self, context: Context) -> Draft:
        model, cache, decoding = self.model, self._cache, context.decoding
        # After a full acceptance the last draft token has not been through the draft model either.
        feed = context.known()[cache.lengths[0] :].unsqueeze(0)
        tokens, probs = [], []
        for _ in range(min(self.max_draft_tokens, context.max_draft)):
            logits = model.head(model.run_layers(model.embed(feed), cache)[:, -1])
            token, q = decoding.select(logits, context.generator)
            tokens.append(token)
            probs.append(q)
            if self.confidence_threshold > 0 and confidence(logits) < self.confidence_threshold:
                break
            feed = token.unsqueeze(0)
        return Draft(
            tokens=torch.cat(tokens),
            probs=None if decoding.greedy else pad(torch.cat(probs), (0, self.missing_ids)),
            bytes_read=len(tokens) * self.pass_bytes,
        )

    def commit(self, context: Context, accepted: int) -> None:
        self._cache.truncate(context.length - 1)


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 probability [] of logits [1, vocab] at temperature 1, whatever the temperature of the draw."""
    return torch.softmax(logits.float(), dim=-1).max()
