"""Hydra's drafter: a static tree of ranks, filled level by level by heads that see the tokens of each path.

Head i drafts the children of the nodes of depth i, from a state of the target and the tokens that lead to each node
(Ankner et al. 2024, sections 3 and 4). In Hydra the state is the one before the pending token. In Hydra++ a prefix
layer computes it from the states of all tokens before the pending one; at the end of a round this layer reads the
target's own states of the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from methods.common.heads import draft_head
from methods.common.layer_cache import LayerCache
from methods.common.rank_trees import fill_with_likeliest
from methods.common.state_heads import StateHeads
from specbench.decoding.cpu.lean_modules import lean_copy
from specbench.decoding.cpu.packed_linear import packed_linear
from specbench.decoding.drafter import Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.state import NORMED, Batch, Prefill, SequenceState, Verified

if TYPE_CHECKING:
    from methods.common.rank_trees import Level
    from methods.hydra_heads.heads import Heads
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.models.pairs import Pair


class HydraHeads(StateHeads):
    """Drafts with heads on the target's states and on the drafted tokens; see the module.

    The folder holds heads with a prefix layer (Hydra++) or without (Hydra).
    """

    needs = Needs(part="hydra_heads", trims=True)
    leaves_last = True
    heads: Heads

    def load(self, pair: Pair, weights: str) -> tuple[int, Sequence[tuple[int, ...]] | None]:
        """Loads the heads, and trims their own output matrices as the target's head."""
        # Late: transformers' models take seconds to import.
        from methods.hydra_heads.checkpoint import load_heads

        loaded, settings = load_heads(weights, self.target, pair.expansion)
        self.heads = lean_copy(loaded)
        self.head = draft_head(pair, self.target)
        self.prefix = None if loaded.prefix is None else loaded.prefix.for_drafting(pair)
        self.upkeep_bytes = 0 if self.prefix is None else self.prefix.pass_bytes()
        self._outputs = [self._own_output(i) for i in range(loaded.heads)]
        squares = [(loaded.layers - 1) * weight_bytes(layer) for layer in loaded.square] or [0] * loaded.heads
        outputs = [self.head.bytes if output is None else weight_bytes(output) for output in self._outputs]
        self._level_bytes = [sum(parts) for parts in zip(map(weight_bytes, loaded.wide), squares, outputs)]
        return loaded.heads, settings.get("tree")

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for the state that each sequence drafts from, and for the prefix layer's keys and values."""
        super().open(slots, target)
        if (prefix := self.prefix) is not None:
            self._layer_cache = LayerCache(prefix, slots, target)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Notes the state to draft from, in front of the first pending token."""
        if (prefix := self.prefix) is None:
            super().begin(slot, sequence, prefill)
            return
        states = prefill.hidden_states[NORMED]
        self._states[slot] = prefix(states, **self._layer_cache.prompt(slot, states))[0, -1]

    def fill(self, batch: Batch, states: torch.Tensor, levels: Sequence[Level]) -> torch.Tensor:
        """Tokens [b, k], each level in one product."""
        # Of each node with children: the state, and the embeddings of the tokens from the pending one to its own.
        read = torch.cat([states.unsqueeze(1), self.target.embed(batch.last_tokens(1))], dim=-1)

        def logits_of(depth: int, tokens: torch.Tensor | None) -> torch.Tensor:
            nonlocal read
            if tokens is not None:
                before = levels[depth - 1]
                path = read[:, before.parents[: before.inner]]
                read = torch.cat([path, self.target.embed(tokens)], dim=-1)
            return self._logits(self.heads(depth, read), depth)

        return fill_with_likeliest(levels, logits_of, self.head.ids)

    def draft_bytes(self, levels: int) -> float:
        """Bytes of the heads of these levels, and of the prefix layer, which runs once a round."""
        return self.upkeep_bytes + sum(self._level_bytes[:levels])

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes the state to draft from next, in front of the token that is pending now."""
        prefix = self.prefix
        if prefix is None:
            super().commit(batch, verified)
            return
        if batch.is_over:
            return

        def feed(batch: Batch, count: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
            seen = prefix(states, **self._layer_cache.arguments(batch, states))
            return [seen[torch.arange(batch.size, device=seen.device), count]]

        (seen,) = self._layer_cache.feed(batch, verified, feed, longest=self.max_draft_tokens)
        self._states[: batch.size] = seen

    def _own_output(self, i: int) -> torch.nn.Module | None:
        """Head i's own output matrix, trimmed like the target's head, or None if that is used."""
        if self.heads.output is None:
            return None
        output = cast("torch.nn.Linear", self.heads.output[i])
        ids = self.head.token_ids
        return output if ids is None else packed_linear(output.weight[ids], output.bias[ids])

    def _logits(self, states: torch.Tensor, i: int) -> torch.Tensor:
        """States [b, n, d] of head i -> logits [b, n, rows]."""
        output = self._outputs[i]
        return self.head.logits(states) if output is None else output(states)
