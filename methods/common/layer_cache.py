"""Arguments for calling a drafter's own layers: a cache of their keys and values, and the angles of positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.graphs import uncaptured
from specbench.decoding.model.layer_stack import attention_mask, rope_of

if TYPE_CHECKING:
    from methods.common.draft_layer import CachedLayer
    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Verified
    from specbench.decoding.tree import Tree


class LayerCache:
    """Keys and values of drafting layers for every sequence, and the angles of their positions.

    Args:
        layers: the layers.
        slots: of the sequences.
        target: the model that verifies; its runner runs the passes.
        extra: entries of each slot beyond the capacity of `slots`.
        lag: number of tokens of a sequence minus that of its entries: 1 if an entry is a pair of a state and the next
            token. The last known entry then takes the place of the pending token.

    Attributes:
        layout: of the sequences in the cache.
    """

    def __init__(self, layers: CachedLayer, slots: Slots, target: StagedModel, extra: int = 0, lag: int = 0):
        self._layers, self._target, self._lag = layers, target, lag
        capacity = slots.capacity + extra
        self.layout = slots.cache(layers.new_cache(capacity, slots.count))
        positions = torch.arange(capacity, device=slots.device).unsqueeze(0)
        self._rope = layers.rope(positions, torch.empty(1, dtype=target.dtype, device=slots.device))

    def run(
        self,
        batch: Batch,
        key: Hashable,
        function: Callable[..., Sequence[Any]],
        *inputs: torch.Tensor,
        entries: int,
    ) -> Sequence[Any]:
        """Runs a function that calls the layers, as `StagedModel.run_batch` with the cache as owner."""
        return self._target.run_batch(batch, self.layout.cache, key, function, *inputs, entries=entries)

    def feed(
        self,
        batch: Batch,
        verified: Verified,
        function: Callable[..., Sequence[Any]],
        further: int = 0,
        longest: int | None = None,
    ) -> Sequence[Any]:
        """Runs a function as `run` does, to feed the accepted tokens over the draft's entries.

        A sequence that keeps fewer tokens than another is fed others after its end; the next round overwrites them.

        Args:
            batch: that was drafted for.
            verified: the outcome.
            function: of the batch, the numbers [b] of accepted draft tokens, and the features [b, n, h] of the pending
                token and the accepted ones, n being the most that any sequence has.
            further: entries after these that the function reads or writes.
            longest: the longest path of the drafter's own drafts. If more of another's is accepted, no pass is
                captured: each such number would need a graph. None: there are no such drafts.
        """
        n, layers = 1 + max(verified.counts), self._layers
        states = [verified.accepted_states(verified.hidden_states[tap]) for tap in layers.taps]

        def fed(batch: Batch, count: torch.Tensor, *states: torch.Tensor) -> Sequence[Any]:
            return function(batch, count, layers.features(dict(zip(layers.taps, states, strict=True))))

        is_rare = longest is not None and n > 1 + longest
        with uncaptured() if is_rare else nullcontext():
            return self.run(batch, ("commit", n), fed, verified.count, *states, entries=n + further)

    def arguments(
        self,
        batch: Batch,
        states: torch.Tensor,
        offset: int = 0,
        tree: Tree | None = None,
        masked: bool = True,
    ) -> dict[str, Any]:
        """Returns the layers' keyword arguments for a pass over states [b, n, d].

        Args:
            batch: the running sequences.
            states: give size, dtype and device.
            offset: of the first of them after the pending token, as in `RaggedLayout.place`.
            tree: whose nodes they are, likewise.
            masked: whether they attend; if not, keys and values are only written, and there is no mask.
        """
        if lag := self._lag:
            lengths, seq_lens = [length - lag for length in batch.lengths], batch.seq_lens - lag
            batch = replace(batch, lengths=lengths, _seq_lens=seq_lens)
        ctx = self.layout.place(batch, states.shape[1], offset, tree)
        return self._arguments(ctx, states, self.layout.cache, masked)

    def prompt(self, slot: int, states: torch.Tensor, masked: bool = True) -> dict[str, Any]:
        """The same for a prompt with states [1, n, d], whose keys and values fill a slot."""
        n = states.shape[1]
        cache = self.layout.prefill_view(slot, n)
        return self._arguments(ForwardContext.consecutive(0, n), states, cache, masked)

    def _arguments(
        self, ctx: ForwardContext, states: torch.Tensor, cache: KVCache, masked: bool
    ) -> dict[str, Any]:
        b, n = states.shape[:2]
        cache.begin_pass(0, cache.layers, ctx, b, n)
        mask = {"attention_mask": attention_mask(ctx, n, states)} if masked else {}
        return {"position_embeddings": rope_of(self._rope, ctx, n), "past_key_values": cache, **mask}
