"""What EAGLE's drafters have in common: the cache of a drafting model, kept in step with the target.

A drafting model is fed with pairs of a state and the token after it. Pair j holds the target's state f_j and token
j + 1; it has entry and position j in the model's own cache. Its output is an estimate of f_(j+1): the head predicts
token j + 2 from it, and together with that token it is the next pair of a draft.

A draft begins with the output of the last true pair, which ends with the pending token. Once the target has verified
the draft, its cache entries are discarded, and the accepted tokens are fed again with the target's own states
(EAGLE-1, section 4.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from methods.common.heads import draft_head
from methods.common.layer_cache import LayerCache
from specbench.decoding.device import on_device, span
from specbench.decoding.drafter import Drafter
from specbench.models.pairs import Pair

if TYPE_CHECKING:
    import torch

    from methods.common.draft_layer import CachedLayer
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Prefill, SequenceState, Verified
    from specbench.decoding.tree import Tree


class EagleDrafter(Drafter):
    """Base of EAGLE's drafters; see the module. A subclass drafts: it begins with `_outputs`, and calls `_level`.

    Args:
        pair: with the target.
        model: the drafting model, called with pairs: features [b, n, h] and embedded tokens [b, n, e] -> the features
            [b, n, h] of the next pairs.

    Attributes:
        model: as it drafts, see `CachedLayer.for_drafting`.
        head: for its outputs.
        expanded: a bound on the nodes of a draft that go through the layer, if they may be more than `max_nodes`.
        outputs: number of outputs of each sequence that a draft begins with: that of the last true pair, and those
            after it in the same pass (`_followed`).
    """

    deterministic = True
    expanded = 0
    outputs = 1
    _once = 0  # bytes of weights that a round reads once

    def __init__(self, pair: Pair, model: CachedLayer):
        self.model = model.for_drafting(pair)
        self.head = draft_head(pair, pair.staged, layers=self.model)
        self.taps = model.taps
        self.upkeep_bytes = model.pass_bytes()
        self._bytes = self.upkeep_bytes + self.head.bytes

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the layer's cache."""
        self.target = target
        self._layer_cache = LayerCache(self.model, slots, target, self.expanded, lag=1)
        width = self.model.config.hidden_size
        self._outputs = slots.tensor(self.outputs, width, dtype=target.dtype)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Feeds the prompt's pairs, the last of which ends with the pending token."""
        tokens = on_device([sequence.tokens[1:]], prefill.ids.device)
        pairs = self.model.features(prefill.hidden_states), self.model.embed(tokens, self.target)
        features, embeds = self._followed(*pairs)
        out = self.model(features, embeds, **self._layer_cache.prompt(slot, features))
        self._outputs[slot] = out[0, -self.outputs :]

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Feeds the accepted tokens with the target's own states, over the entries of the draft."""
        if batch.is_over:
            return

        def feed(batch: Batch, count: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
            embeds = self.model.embed(batch.window(batch.tokens, 0, features.shape[1]), self.target)
            features, embeds = self._followed(features, embeds, count)
            out = self.model(features, embeds, **self._layer_cache.arguments(batch, features, 1))
            wanted = span(count, self.outputs).unsqueeze(-1).expand(-1, -1, out.shape[-1])
            return [out.gather(1, wanted)]

        (out,) = self._layer_cache.feed(batch, verified, feed, self.outputs - 1, self.max_draft_tokens)
        self._outputs[: batch.size] = out

    def _followed(
        self, features: torch.Tensor, embeds: torch.Tensor, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns true pairs and `outputs` - 1 more after them, which depend on the drafter.

        Args:
            features: [b, n, h].
            embeds: [b, n, e].
            count: [b] pairs of each sequence in front of its last true one; None: n - 1.

        Returns:
            Features and embedded tokens of n - 1 + `outputs` pairs.
        """
        return features, embeds

    def _level(
        self, batch: Batch, features: torch.Tensor, tokens: torch.Tensor, first: int, tree: Tree | None = None
    ) -> torch.Tensor:
        """One pass over nodes of a level.

        Args:
            batch: the running sequences.
            features: [b, n, h] the outputs of the nodes' parents.
            tokens: [b, n] of the nodes.
            first: how many nodes went through the layer before them.
            tree: of all nodes fed so far; None: a chain.

        Returns:
            Outputs [b, n, h].
        """
        embeds = self.model.embed(tokens, self.target)
        return self.model(features, embeds, **self._layer_cache.arguments(batch, features, 1 + first, tree))
