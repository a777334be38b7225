"""EAGLE's drafters: one layer estimates the target's next state, and the target's head makes tokens of it.

The layer is fed with pairs of a state and the token after it. Pair j holds the target's state f_j and token j + 1; it
stands at entry and position j of the layer's own cache. Its output is an estimate of f_(j+1): the target's head makes
of it what may come as token j + 2, and together with such a token it is the next pair of a draft.

A round (EAGLE-1, section 4.1): a tree grows from the output of the last true pair, which ends with the pending token.
Each level is one pass over the nodes that get children: what is to be a leaf never goes through the layer. Once the
target has verified the tree, everything that is in the cache of it is given up, and the tokens that stay are fed anew,
now with the target's own states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from methods.common.dynamic_trees import Growth, most_nodes
from methods.common.heads import DraftHead, OwnHead, draft_head, target_ids
from methods.common.layer_cache import LayerCache
from methods.common.rank_trees import RankTrees, fill_tree, grown, likeliest_of
from specbench.decoding.device import on_device, span
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified
from specbench.decoding.tree import Tree
from specbench.models.pairs import Pair
from specbench.system.paths import packaged
from specbench.system.settings import Count

if TYPE_CHECKING:
    import torch

    from methods.common.heads import HasHead
    from methods.eagle.layer import DraftingModel
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots

# The tree of the authors' EAGLE-1, 25 nodes: children by path of ranks.
EAGLE_TREE = grown(
    4, {"0": 3, "1": 2, "2": 2, "3": 1, "00": 3, "01": 2, "02": 2, "10": 1, "000": 3, "0000": 2}
)


class EagleDrafter(Drafter):
    """Base of EAGLE's drafters: keeps the cache of a drafting model in step with the target; see the module.

    Args:
        pair: with the target.
        model: the drafting model, which says what `taps` of the target it reads.
        head: for its outputs; None: the model's own.

    Attributes:
        expanded: a bound on the nodes of a draft that go through the layer, where they may be more than `max_nodes`.
        outputs: of each sequence that a draft begins with: that of the last true pair, and of what follows it in the
            same pass (`_followed`).
    """

    deterministic = True
    expanded = 0
    outputs = 1

    def __init__(self, pair: Pair, model: DraftingModel, head: DraftHead | None = None):
        self.model = model.for_drafting(pair)
        self.head = OwnHead(cast("HasHead", self.model), target_ids(pair)) if head is None else head
        self.taps = model.taps
        self._bytes = weight_bytes(model) + self.head.bytes

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the layer's cache."""
        self.target = target
        self._layer = LayerCache(self.model, slots, target, self.expanded)
        width = self.model.config.hidden_size
        self._outputs = slots.tensor(self.outputs, width, dtype=target.dtype)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Feeds the prompt's pairs, the last of which ends with the pending token."""
        tokens = on_device([sequence.tokens[1:]], prefill.ids.device)
        pairs = self.model.features(prefill.hidden_states), self.model.embed(tokens, self.target)
        features, embeds = self._followed(*pairs)
        out = self.model(features, embeds, **self._layer.prompt(slot, features))
        self._outputs[slot] = out[0, -self.outputs :]

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Feeds the tokens that stay with the target's own states, over the entries of the draft."""
        if all(sequence.done for sequence in batch.sequences):
            return
        n = 1 + max(verified.counts)
        fed = n - 1 + self.outputs

        def feed(batch: Batch, count: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
            # A sequence that keeps fewer tokens than another is fed others after its end: the next round writes there.
            features = self.model.features(dict(zip(self.taps, states, strict=True)))
            embeds = self.model.embed(batch.window(batch.tokens, 0, n), self.target)
            features, embeds = self._followed(features, embeds, count)
            out = self.model(features, embeds, **self._layer.arguments(_pairs(batch), features, 1))
            wanted = span(count, self.outputs).unsqueeze(-1).expand(-1, -1, out.shape[-1])
            return [out.gather(1, wanted)]

        states = [verified.accepted_states(verified.hidden_states[tap])[:, :n] for tap in self.taps]
        (out,) = self._layer.run(batch, ("commit", n), feed, verified.count, *states, entries=fed)
        self._outputs[: batch.size] = out

    def _followed(
        self, features: torch.Tensor, embeds: torch.Tensor, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """True pairs, and `outputs` - 1 further ones after them, which differ from drafter to drafter.

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
            tree: of all that have; None: each follows the one before it.

        Returns:
            Outputs [b, n, h].
        """
        embeds = self.model.embed(tokens, self.target)
        return self.model(features, embeds, **self._layer.arguments(_pairs(batch), features, 1 + first, tree))


class Eagle(EagleDrafter):
    """EAGLE-1: a static tree of ranks, filled level by level; see the module.

    Not as published: with temperature the tree is verified by the target's own draws, and its tokens are the likeliest
    ones. The authors draw them.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        nodes: of the tree at most, the most frequently right ones first; None: all that config.json names. A checkpoint
            without a tree gets the authors' of 25 nodes.
        max_draft_tokens: levels of the tree at most, each of which costs a pass; None: all.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.common.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="eagle")

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count | None = 25,
        max_draft_tokens: Count | None = None,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        model, settings = _loaded(pair, weights)
        super().__init__(pair, model, draft_head(pair, pair.staged, vocab_map, vocab_size))
        deepest = max_draft_tokens or float("inf")
        paths = [tuple(path) for path in settings.get("tree") or EAGLE_TREE]
        paths = [path for path in paths if len(path) <= deepest and max(path) < self.head.rows]
        self.trees = RankTrees(paths[:nodes], leaves_last=True)
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth

    def draft(self, batch: Batch) -> Draft:
        """Fills the tree from the likeliest followers of each node."""
        tree, levels, nodes = self.trees.of(batch)

        def filled(batch: Batch, out: torch.Tensor) -> list[torch.Tensor]:
            def logits_of(depth: int, tokens: torch.Tensor | None) -> torch.Tensor:
                nonlocal out
                if tokens is not None:
                    above = levels[depth - 1]
                    features = out[:, above.parents[: above.inner]]
                    out = self._level(batch, features, tokens, above.start, tree)
                return self.head.logits(out)

            return [fill_tree(levels, logits_of, likeliest_of(levels, self.head.ids))[0]]

        key, outputs = ("draft", nodes, len(levels)), self._outputs[: batch.size]
        drafted = self._layer.run(batch, key, filled, outputs, entries=nodes)
        return Draft(*drafted, tree=tree, bytes_read=len(levels) * self._bytes)


class DynamicEagle(EagleDrafter):
    """Base of EAGLE-2 and of what drafts as it does: a tree that grows where the drafter is sure.

    Args:
        pair: as in `EagleDrafter`.
        model: likewise.
        head: likewise.
        nodes: of a tree, at most; the authors count the pending token, too.
        width: nodes of a level that get children, and children of each.
        max_draft_tokens: levels, of which each but the first costs a pass; the authors count these passes.
    """

    def __init__(
        self,
        pair: Pair,
        model: DraftingModel,
        head: DraftHead | None,
        nodes: int,
        width: int,
        max_draft_tokens: int,
    ):
        super().__init__(pair, model, head)
        self.width, self.max_draft_tokens = min(width, self.head.rows), max_draft_tokens
        self.max_nodes = min(nodes, most_nodes(self.width, max_draft_tokens))
        self.expanded = self.width * (max_draft_tokens - 1)

    def draft(self, batch: Batch) -> Draft:
        """Lets the tree grow level by level, and keeps its likeliest nodes."""
        width = min(self.width, self.head.rows)
        levels = min(batch.max_draft, batch.max_nodes)
        nodes = min(self.max_nodes, batch.max_nodes, most_nodes(width, levels))

        def grown(batch: Batch, out: torch.Tensor) -> list[torch.Tensor]:
            growth = Growth(width)
            growth.add(self.head.logits(out))
            for depth in range(levels - 1):
                rows, above = growth.expand()
                assert growth.expanded is not None  # `expand` has just made it
                features = out.gather(1, above.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
                out = self._level(batch, features, self.head.ids(rows), depth * width, growth.expanded)
                growth.add(self.head.logits(out))
            rows, tree = growth.best(nodes)
            return [self.head.ids(rows), *tree.tensors]

        key, outputs = ("draft", levels, nodes), self._outputs[: batch.size]
        tokens, *tree = self._layer.run(batch, key, grown, outputs, entries=width * (levels - 1))
        return Draft(tokens, tree=Tree(*tree), bytes_read=levels * self._bytes)


class Eagle2(DynamicEagle):
    """EAGLE-2: EAGLE-1's drafting model and a tree that grows where it is sure; see `methods.common.dynamic_trees`.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        nodes: as in `DynamicEagle`; the published 60 count the pending token.
        width: as in `DynamicEagle`.
        max_draft_tokens: as in `DynamicEagle`; the published depth of 5 is one of 6 levels.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.common.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="eagle")

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count = 59,
        width: Count = 10,
        max_draft_tokens: Count = 6,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        head = draft_head(pair, pair.staged, vocab_map, vocab_size)
        super().__init__(pair, _loaded(pair, weights)[0], head, nodes, width, max_draft_tokens)


def _loaded(pair: Pair, weights: str) -> tuple[DraftingModel, dict[str, Any]]:
    """The drafting model of a pair, and the content of its config.json."""
    from methods.eagle.checkpoint import load_eagle  # late: transformers' models take seconds to import

    return load_eagle(packaged(weights), pair.target, pair.device, pair.dtype, pair.expansion)


def _pairs(batch: Batch) -> Batch:
    """The batch as the layer's cache sees it: pairs in place of tokens, of which there is one less.

    The last true pair stands where a model of tokens has the pending one.
    """
    return replace(batch, lengths=[length - 1 for length in batch.lengths], _seq_lens=batch.seq_lens - 1)
