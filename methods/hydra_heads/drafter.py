"""Hydra's drafter: a static tree of ranks, filled level by level by heads that see the tokens of each path.

Head i drafts the children of the nodes of depth i, from a state of the target and the tokens that lead to each node
(Ankner et al. 2024, sections 3 and 4). In Hydra the state is the one in front of the pending token; in Hydra++ it is
what the prefix layer makes of the states of all tokens in front of it. The layer is given the target's own states of
the tokens that were kept, at the end of the round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from methods.common.heads import draft_head
from methods.common.layer_cache import LayerCache
from methods.common.rank_trees import RankTrees, chosen_paths, fill_tree, likeliest_of
from specbench.decoding.cpu.lean_modules import lean_copy
from specbench.decoding.cpu.packed_linear import packed_linear
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.state import NORMED, Batch, Draft, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.paths import packaged
from specbench.system.settings import Count

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill


class HydraHeads(Drafter):
    """Drafts with heads on the target's states and on the drafted tokens; see the module.

    Not as published: with temperature the tree is verified by the target's own draws, which keeps its distribution; the
    authors' "typical acceptance" does not.

    Args:
        pair: with the target.
        weights: folder of the heads' checkpoint, with a prefix layer (Hydra++) or without (Hydra).
        nodes: of the tree, the most frequently right ones first; None: all that config.json names. Heads without a tree
            get the authors' of 63 nodes.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.common.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.

    Raises:
        UserError: the heads cannot be read, do not fit the target, or have no tree of so many nodes.
    """

    needs = Needs(part="hydra_heads")
    deterministic = True
    taps = (NORMED,)

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count | None = None,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        # Late: transformers' models take seconds to import.
        from methods.hydra_heads.checkpoint import load_heads

        target = pair.staged
        loaded, settings = load_heads(packaged(weights), target, pair)
        self.heads = lean_copy(loaded)
        self.head = draft_head(pair, target, vocab_map, vocab_size)
        paths = chosen_paths(settings.get("tree"), loaded.heads, nodes, self.head.rows)
        self.trees = RankTrees(paths, leaves_last=True)
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth
        self._prefix_bytes = 0 if loaded.prefix is None else weight_bytes(loaded.prefix)
        self._outputs = [self._own_output(i) for i in range(loaded.heads)]
        squares = [weight_bytes(layer) for layer in loaded.square] or [0] * loaded.heads
        outputs = [self.head.bytes if output is None else weight_bytes(output) for output in self._outputs]
        self._level_bytes = [sum(parts) for parts in zip(map(weight_bytes, loaded.wide), squares, outputs)]

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for the state that each sequence drafts from, and for the prefix layer's keys and values."""
        self._target = target
        self._states = slots.tensor(target.hidden_size, dtype=target.dtype)
        if (prefix := self.heads.prefix) is not None:
            self._layer = LayerCache(prefix, slots, target)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Notes the state to draft from, in front of the first pending token."""
        states = prefill.hidden_states[NORMED]
        if (prefix := self.heads.prefix) is not None:
            states = states.to(self._states.device)  # of a target that is spread over several
            states = prefix(states, **self._layer.prompt(slot, states))
        self._states[slot] = states[0, -1]

    def draft(self, batch: Batch) -> Draft:
        """Fills the tree level by level, each level in one product."""
        tree, levels, nodes = self.trees.of(batch)

        def filled(batch: Batch, states: torch.Tensor) -> list[torch.Tensor]:
            # Of each node with children: the state, and the embeddings of the tokens from the pending one to its own.
            read = torch.cat([states.unsqueeze(1), self._target.embed(batch.last_tokens(1))], dim=-1)

            def logits_of(depth: int, tokens: torch.Tensor | None) -> torch.Tensor:
                nonlocal read
                if tokens is not None:
                    before = levels[depth - 1]
                    path = read[:, before.parents[: before.inner]]
                    read = torch.cat([path, self._target.embed(tokens)], dim=-1)
                return self._logits(self.heads(depth, read), depth)

            return [fill_tree(levels, logits_of, likeliest_of(levels, self.head.ids))[0]]

        key = ("draft", nodes, len(levels))
        drafted = self._target.run_batch(batch, self.heads, key, filled, self._states[: batch.size])
        read = self._prefix_bytes + sum(self._level_bytes[: len(levels)])
        return Draft(*drafted, tree=tree, bytes_read=read)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes the state to draft from next, in front of the token that is pending now."""
        states = verified.hidden_states[NORMED]
        prefix = self.heads.prefix
        if prefix is None:
            self._states[: batch.size] = verified.last(states)
            return
        # Where fewer tokens were kept than elsewhere, what follows is written over in the next round.
        n = 1 + max(verified.counts)

        def feed(batch: Batch, count: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
            states = states.to(self._states.device)  # as above
            seen = prefix(states, **self._layer.arguments(batch, states))
            return [seen[torch.arange(batch.size, device=seen.device), count]]

        inputs = verified.count, verified.accepted_states(states)[:, :n]
        (seen,) = self._layer.run(batch, ("commit", n), feed, *inputs, entries=n)
        self._states[: batch.size] = seen

    def _own_output(self, i: int) -> torch.nn.Module | None:
        """Head i's own output matrix, trimmed like the target's head; None where that is used."""
        if self.heads.output is None:
            return None
        output = cast("torch.nn.Linear", self.heads.output[i])
        ids = self.head.token_ids
        return output if ids is None else packed_linear(output.weight[ids], output.bias[ids])

    def _logits(self, states: torch.Tensor, i: int) -> torch.Tensor:
        """States [b, n, d] of head i -> logits [b, n, rows]."""
        output = self._outputs[i]
        return self.head.logits(states) if output is None else output(states)
