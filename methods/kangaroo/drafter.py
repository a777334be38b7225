"""Kangaroo's drafter: the target's first layers and an adapter draft; verification resumes where they stopped.

A round (paper, sections 4.1 and 4.3): layers [0, exit_layer) run on the newest token. Unless the previous draft token
had a low confidence or the draft is full, the adapter and the target's head turn the exit state into the next draft
token. The token that ends the draft is verified, too, so its exit state is computed. Verification runs all exit states
through layers [exit_layer, N), so no layer runs twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from methods.common.heads import StopTracker, draft_head
from methods.common.layer_cache import LayerCache
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.state import Batch, Draft, Prefill, Resume, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count, Probability

if TYPE_CHECKING:
    from methods.kangaroo.adapter import Adapter
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.tree import Tree


class Kangaroo(Drafter):
    """Drafts with the target's first layers and an adapter; see the module.

    Args:
        pair: with the target.
        weights: folder of the adapter's checkpoint.
        exit_layer: layers of the drafting part; None: what the adapter's config.json names (the authors' names none: 2
            for their 7B, 3 for their 13B adapter).
        max_draft_tokens: gamma.
        confidence_threshold: eta, compared with the top-1 probability at temperature 1 (paper, table 3), with a strict
            <, so that 0 gives a constant draft length and 1 in practice a single draft token.

    Raises:
        UserError: the adapter cannot be read, or does not fit the target or the exit layer.
    """

    needs = Needs(part="kangaroo", trims=True)

    def __init__(
        self,
        pair: Pair,
        weights: str,
        exit_layer: Count | None = None,
        max_draft_tokens: Count = 6,
        confidence_threshold: Probability = 0.6,
    ):
        from methods.kangaroo.adapter import load_adapter  # late: transformers' models take seconds to import

        self.adapter = load_adapter(weights, pair.staged, pair.expansion).for_drafting(pair)
        exit_layer = _exit_layer(exit_layer, self.adapter, len(pair.staged.layers))
        self.exit_layer = exit_layer
        self.taps = (exit_layer,)
        self.max_draft_tokens = max_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.head = draft_head(pair, pair.staged, layers=self.adapter)
        # The target's final norm is not read on the draft path, but it is some hundred numbers beside the head.
        self._draft_bytes = self.adapter.pass_bytes() + self.head.bytes

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the adapter's cache."""
        self.target = target
        self._layer_cache = LayerCache(self.adapter, slots, target)
        # The exit state in front of each sequence's pending token, which the adapter may not have seen.
        self._before = slots.tensor(1, target.hidden_size, dtype=target.dtype)
        # Known tokens of each sequence whose exit states the adapter has seen.
        self._adapted = slots.values(int)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Fills a slot of the adapter's cache with the prompt's exit states."""
        states = prefill.hidden_states[self.exit_layer]
        self.adapter(states, **self._layer_cache.prompt(slot, states))
        self._before[slot] = states[0, -1:]
        self._adapted[slot] = prefill.ids.shape[1]

    def draft(self, batch: Batch) -> Draft:
        """Drafts until tokens of low confidence or `max_draft_tokens`; verification resumes after the exit layer."""
        feed, offset = self._begun(batch)
        states = [feed[:, -1:]]
        tokens, probs = [], []
        stop = StopTracker(self.confidence_threshold)
        for j in range(batch.max_draft):
            logits = self._logits(batch, feed, offset)
            token, q = self.head.choose(logits, batch, j)
            tokens.append(token)
            probs.append(q)
            feed, offset = self._shallow(batch, token.unsqueeze(1), 1 + j), 1 + j
            states.append(feed)
            if not stop.continues(logits, 1 + j == batch.max_draft):
                break
        self._states, self._depth = torch.cat(states, dim=1), len(tokens)
        shallow = self._shallow_bytes(batch.size)
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            probs=self.head.spread(probs),
            candidates=stop.counts,
            resume=Resume(self.exit_layer, self._states),
            bytes_read=len(tokens) * self._draft_bytes + len(states) * shallow,
        )

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Moves the adapter's entries of an accepted path, and keeps the exit state of its last token."""
        self._layer_cache.layout.commit(batch, verified.count, verified.counts, verified.path)
        for slot, (length, count) in enumerate(zip(batch.lengths, verified.counts)):
            self._adapted[slot] = length + min(self._depth - 1, count)  # all but the last token of a path
        self._before[: batch.size, 0] = verified.last(self._states)

    def _begun(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Begins a draft: exit states [b, n, d] for the adapter, up to the pending token's, and the first's offset.

        After a full acceptance the last draft token went through the shallow layers but not through the adapter.
        """
        state = self._shallow(batch, batch.last_tokens(1), 0)
        missing = max(length - 1 - adapted for length, adapted in zip(batch.lengths, self._adapted))
        return (torch.cat([self._before[: batch.size], state], dim=1) if missing else state), -missing

    def _shallow_bytes(self, tokens: int) -> float:
        """Bytes of weights that a pass of `tokens` tokens through the first layers reads."""
        return self.target.pass_bytes(0, self.exit_layer, head=False, tokens=tokens)

    def _shallow(
        self, batch: Batch, ids: torch.Tensor, offset: int, tree: Tree | None = None
    ) -> torch.Tensor:
        """Token ids [b, n], the first `offset` after the pending one -> exit states [b, n, d], in the target's cache.

        Args:
            batch: the running sequences.
            ids: of tokens that follow one another, or of nodes of a tree.
            offset: of the first of them, as in `RaggedLayout.place`.
            tree: of these nodes.
        """
        layout = batch.layout
        ctx = layout.place(batch, ids.shape[1], offset, tree)
        return self.target.run_layers(ids, layout.cache, ctx, 0, self.exit_layer)

    def _logits(self, batch: Batch, feed: torch.Tensor, offset: int) -> torch.Tensor:
        """Exit states [b, n, d], the first `offset` after the pending token's -> logits [b, rows] after the last."""
        n = feed.shape[1]

        def adapted(batch: Batch, feed: torch.Tensor) -> list[torch.Tensor]:
            states = self.adapter(feed, **self._layer_cache.arguments(batch, feed, offset))
            return [self.head.logits(states[:, -1])]

        return self._layer_cache.run(batch, ("draft", n, offset), adapted, feed, entries=offset + n)[0]


def _exit_layer(requested: int | None, adapter: Adapter, layers: int) -> int:
    """The exit layer to use.

    Raises:
        UserError: none is named, the adapter was trained for another, or the target does not have it.
    """
    trained = getattr(adapter.config, "exit_layer", None)
    chosen = trained if requested is None else requested
    if chosen is None:
        raise UserError("the adapter does not say which layer it was trained for: set exit_layer")
    if trained not in (None, chosen):
        raise UserError(f"the adapter was trained for exit layer {trained}, not {chosen}")
    from methods.kangaroo.adapter import check_exit_layer

    return check_exit_layer(chosen, layers)
