"""Kangaroo's drafter: the target's first layers and an adapter draft; verification resumes where they stopped.

A round (paper, sections 4.1 and 4.3): run layers [0, exit_layer) on the newest token; unless the previous draft token
was one of low confidence or the draft is full, the adapter and the target's head turn its exit state into the next
draft token. The token that ends the draft is verified too: its exit state was computed for that. Verification takes
all exit states through layers [exit_layer, N), so that no layer runs twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from methods.heads import Going, draft_head, unsure
from specbench.decoding.draft import Context, Draft, Drafter, Needs, Resume
from specbench.decoding.layers import quick, weight_bytes
from specbench.decoding.rows import Ragged
from specbench.decoding.target import Prefill, Target, attention_mask, rows_mask
from specbench.errors import UserError
from specbench.pairs import Pair
from specbench.questions import packaged
from specbench.values import Count, Probability

if TYPE_CHECKING:
    from methods.kangaroo.adapter import Adapter
    from specbench.decoding.batch import Rows
    from specbench.decoding.kv_cache import KVCache, RowCache


class Kangaroo(Drafter):
    """Drafts with the target's first layers and an adapter; see the module.

    Args:
        pair: with the target.
        adapter: folder of the adapter's checkpoint.
        exit_layer: layers of the drafting part; None takes the one that the adapter's config.json names (the authors'
            does not: 2 for their 7B, 3 for their 13B adapter).
        max_draft_tokens: gamma.
        confidence_threshold: eta, compared with the top-1 probability at temperature 1 (paper, table 3), with a strict
            <, so that 0 gives a constant draft length and 1 in practice a single draft token.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.

    Raises:
        UserError: the adapter cannot be read, or does not fit the target or the exit layer.
    """

    needs = Needs(part="kangaroo", batching=True)

    def __init__(
        self,
        pair: Pair,
        adapter: str,
        exit_layer: Count | None = None,
        max_draft_tokens: Count = 6,
        confidence_threshold: Probability = 0.6,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        from methods.kangaroo.adapter import load_adapter  # late: transformers' models take seconds to import

        loaded = load_adapter(packaged(adapter), pair.target.config, pair.device, pair.dtype, pair.expansion)
        self.adapter = quick(loaded)
        exit_layer = _exit_layer(exit_layer, self.adapter, pair.target.config.num_hidden_layers)
        self.exit_layer = exit_layer
        self.taps = (exit_layer,)
        self.max_draft_tokens = max_draft_tokens
        self.confidence_threshold = confidence_threshold
        target = Target(pair.target)
        self.head = draft_head(pair, target, vocab_map, vocab_size)
        # The target's final norm is not read on the draft path, but it is some hundred numbers beside the head.
        self._draft_bytes = weight_bytes(self.adapter) + self.head.bytes
        self._shallow_bytes = target.pass_bytes(0, exit_layer, head=False)
        self._cache = self.adapter.new_cache(0)  # until it is known how long the sequences are
        # Exit states that the target has kept but the adapter has not seen.
        self._unadapted: torch.Tensor | None = None

    def begin(self, context: Context, prefill: Prefill, target: Target, cache: KVCache) -> None:
        """Fills the adapter's cache with the prompt's exit states."""
        self.target, self.cache = target, cache
        if self._cache.capacity < cache.capacity:
            self._cache = self.adapter.new_cache(cache.capacity)
            positions = torch.arange(cache.capacity, device=target.device).unsqueeze(0)
            self._rope = self.adapter.rope(positions, prefill.logits.to(target.dtype))
        self._cache.truncate(0)
        self._adapt(prefill.hidden[self.exit_layer])  # fills the adapter's cache with the prompt
        self._unadapted = None

    def draft(self, context: Context) -> Draft:
        """Drafts until a token of low confidence or `max_draft_tokens`; verification resumes behind the exit layer."""
        decoding = context.decoding
        limit = min(self.max_draft_tokens, context.max_draft)
        states = [self._shallow(context.pending())]
        feed = states[0] if self._unadapted is None else torch.cat([self._unadapted, states[0]], dim=1)
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor | None] = []
        while True:
            logits = self.head.logits(self._adapt(feed)[:, -1])
            token, q = self.head.choose(logits, decoding, context.draws(len(tokens)))
            tokens.append(token)
            probs.append(q)
            feed = self._shallow(token.unsqueeze(0))
            states.append(feed)
            if len(tokens) == limit or unsure(logits, self.confidence_threshold):
                break
        self._states = torch.cat(states, dim=1)
        return Draft(
            tokens=torch.cat(tokens),
            probs=self.head.spread(probs),
            resume=Resume(self.exit_layer, self._states),
            bytes_read=len(tokens) * self._draft_bytes + len(states) * self._shallow_bytes,
        )

    def commit(self, context: Context, accepted: int) -> None:
        """Drops the tokens that were not accepted from the adapter's cache."""
        known = context.length - 1  # positions that the target's caches hold
        self._cache.truncate(known)
        # After a full acceptance the last draft token went through the shallow layers but not through the adapter.
        missing = known - self._cache.lengths[0]
        self._unadapted = self._states[:, accepted : accepted + 1] if missing else None

    def _shallow(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [1, n] -> exit states [1, n, d], appended to the target's own cache."""
        return self.target.run_layers(self.target.embed(ids), self.cache, 0, self.exit_layer)

    def _adapt(self, states: torch.Tensor) -> torch.Tensor:
        """Exit states [1, n, d] that follow what the adapter's cache holds -> states [1, n, d] for the head."""
        n, start = states.shape[1], self._cache.lengths[0]
        cos, sin = self._rope
        mask = attention_mask(n, start, states)
        return self.adapter(states, (cos.narrow(1, start, n), sin.narrow(1, start, n)), mask, self._cache)

    # -- many sequences

    def open_rows(self, rows: int, capacity: int, target: Target, cache: RowCache) -> None:
        """Allocates the adapter's cache for a batch."""
        self._places = Ragged(self.adapter.new_rows(rows, capacity))
        positions = torch.arange(capacity, device=target.device).unsqueeze(0)
        self._rows_rope = self.adapter.rope(
            positions, torch.empty(1, dtype=target.dtype, device=target.device)
        )
        shape = (rows, 1, target.hidden_size)
        # The exit state in front of each row's pending token.
        self._before = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.target, self.rows_cache = target, cache

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        """Fills a slot of the adapter's cache with a prompt's exit states."""
        states, n = prefill.hidden[self.exit_layer], prompt.shape[1]
        cos, sin = self._rows_rope
        rope = (cos.narrow(1, 0, n), sin.narrow(1, 0, n))
        self.adapter(states, rope, attention_mask(n, 0, states), self._places.entering(row, n))
        self._before[row] = states[0, -1:]

    def draft_rows(self, rows: Rows) -> Draft:
        """Drafts for the running sequences, as many tokens for each; `counts` holds what each has really drafted."""
        b = rows.known.shape[0]
        states = [self._shallow_rows(rows, rows.newest(1), 0)]
        # Two states for every row: the adapter may not have seen the one before the pending token's.
        feed, starts = torch.cat([self._before[:b], states[0]], dim=1), rows.known - 2
        tokens, probs = [], []
        going = Going(self.confidence_threshold)
        for j in range(min(self.max_draft_tokens, rows.max_draft)):
            adapted = self._adapt_rows(feed, starts, rows.reach + j)
            logits = self.head.logits(adapted[:, -1])
            token, q = self.head.choose(logits, rows.decoding, rows.draws(j))
            tokens.append(token)
            probs.append(q)
            feed, starts = self._shallow_rows(rows, token.unsqueeze(1), 1 + j), rows.known + j
            states.append(feed)
            if not going.drafted(logits):
                break
        self._states = torch.cat(states, dim=1)
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            probs=self.head.spread_rows(probs),
            resume=Resume(self.exit_layer, self._states),
            bytes_read=len(tokens) * self._draft_bytes + len(states) * self._shallow_bytes,
            counts=going.counts,
        )

    def commit_rows(self, rows: Rows, accepted: torch.Tensor) -> None:
        """Keeps the exit state in front of each sequence's new pending token."""
        b = accepted.shape[0]
        if rows.max_draft:
            self._before[:b, 0] = self._states[torch.arange(b, device=accepted.device), accepted]

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies slots of the adapter's cache."""
        self._places.move(sources, destinations, reach)
        self._before[destinations] = self._before[sources]

    def _shallow_rows(self, rows: Rows, ids: torch.Tensor, offset: int) -> torch.Tensor:
        """Token ids [b, 1], `offset` behind the pending ones -> exit states [b, 1, d], in the target's own cache."""
        places = rows.layout.places(rows.known - 1 + offset, 1, rows.reach + offset, offset)
        return self.target.run_rows(self.target.embed(ids), self.rows_cache, places, 0, self.exit_layer)

    def _adapt_rows(self, states: torch.Tensor, starts: torch.Tensor, reach: int) -> torch.Tensor:
        """Exit states [b, n, d] at the positions from `starts` on -> states [b, n, d] for the head."""
        places = self._places.places(starts, states.shape[1], reach)
        self._places.cache.open(0, 1, places)
        cos, sin = self._rows_rope
        rope = (cos[0][places.positions], sin[0][places.positions])
        return self.adapter(states, rope, rows_mask(places, states), self._places.cache)


def _exit_layer(asked: int | None, adapter: Adapter, layers: int) -> int:
    """The exit layer to use.

    Raises:
        UserError: none is named, the adapter was trained for another, or the target does not have it.
    """
    trained = getattr(adapter.config, "exit_layer", None)
    chosen = trained if asked is None else asked
    if chosen is None:
        raise UserError("the adapter does not say which layer it was trained for: set method.exit_layer")
    if trained not in (None, chosen):
        raise UserError(f"the adapter was trained for exit layer {trained}, not {chosen}")
    from methods.kangaroo.adapter import check_exit_layer

    return check_exit_layer(chosen, layers)
