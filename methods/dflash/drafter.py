"""Drafters that fill a block in one pass over masks: DFlash, trees of its guesses (DDTree), DSpark, and DFlash2.

The drafting model's cache holds keys and values made from the target's states of all known tokens except the pending
one. One pass over the pending token and masks gives the logits of every draft token. After the verification the
target's states of the accepted tokens enter that cache, and overwrite what the block left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from methods.common.dynamic_trees import candidate_children, tree_of_marginals
from methods.common.heads import Chosen, chosen_at_once, chosen_in_turn, draft_head
from methods.common.layer_cache import LayerCache
from methods.common.rank_trees import likeliest_ids
from methods.dflash.kinds import INDEPENDENT, MARKOV, METHODS, SELECTOR
from specbench.decoding.cpu.packed_linear import packed_linear
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified
from specbench.decoding.tree import Tree
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count, Probability

if TYPE_CHECKING:
    from methods.dflash.model import CandidateSelector, MarkovHead
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots


class BlockDrafter(Drafter):
    """Base of the drafters that fill a block in one pass; see the module.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        max_draft_tokens: draft length; None: what the drafting model was trained to guess.

    Raises:
        UserError: the checkpoint cannot be read, does not fit the target, or is of another method.
    """

    joins: ClassVar[str] = INDEPENDENT  # the head that it drafts with

    def __init__(
        self,
        pair: Pair,
        weights: str,
        max_draft_tokens: Count | None = None,
    ):
        from methods.dflash.checkpoint import load_blocks  # late: transformers' models take seconds to import

        model = load_blocks(weights, pair.staged, pair.expansion)
        if (head := model.config.head) != self.joins:
            raise UserError(
                f"the drafting model in '{weights}' has head={head}: it is drafted with by {METHODS[head]}"
            )
        self.model = model.for_drafting(pair)
        self.taps = model.taps
        self.head = draft_head(pair, pair.staged, layers=self.model)
        self.max_draft_tokens = max_draft_tokens or model.config.most_guesses
        self._bytes = model.pass_bytes() + model.context_bytes + self.head.bytes
        self._places = self.max_draft_tokens + model.config.fills_in

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the layers' cache; a block may reach further than the longest sequence."""
        self.target = target
        self._layer_cache = LayerCache(self.model, slots, target, extra=self._places)
        self._block = all_see_all(self._places, slots.device)
        masks = torch.full((1, self._places - 1), self.model.config.mask_token_id, device=slots.device)
        self._masks = target.embed(masks)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Fills a slot of the cache with the prompt's states."""
        features = self.model.features(prefill.hidden_states)
        self.model.inject(features, **self._layer_cache.prompt(slot, features, masked=False))

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Writes the target's states of the pending token and the accepted ones over the entries of the block."""
        if batch.is_over:
            return

        def inject(batch: Batch, _count: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
            self.model.inject(features, **self._layer_cache.arguments(batch, features, masked=False))
            return []

        self._layer_cache.feed(batch, verified, inject)

    def _states(self, batch: Batch, k: int) -> torch.Tensor:
        """Normed states [b, k, d] of the places that guess the first k draft tokens.

        The block is never shortened: the guess of a place depends on the block's length.
        """
        config = self.model.config
        pending = self.target.embed(batch.last_tokens(1))
        hidden = torch.cat([pending, self._masks.expand(batch.size, -1, -1)], dim=1)
        states = self.model(hidden, **self._layer_cache.arguments(batch, hidden, tree=self._block))
        return states[:, config.fills_in : config.fills_in + k]


class DFlash(BlockDrafter):
    """DFlash: a chain of the tokens that the positions guess, each independently.

    When sampling, each token is drawn from the distribution of its position, with which it is verified.
    """

    needs = Needs(part="dflash", trims=True)

    def draft(self, batch: Batch) -> Draft:
        """Drafts all tokens in one pass."""
        k = batch.max_draft

        def filled(batch: Batch) -> Chosen:
            return chosen_at_once(self.head, self.head.logits(self._states(batch, k)), batch)

        drafted = self._layer_cache.run(batch, ("draft", k), filled, entries=self._places)
        return Draft(*drafted, bytes_read=self._bytes)


class DDTree(BlockDrafter):
    """DDTree: the tree of the likeliest paths of DFlash's guesses, without training (arXiv 2604.12989).

    Args:
        pair: as in `BlockDrafter`.
        weights: as in `BlockDrafter`.
        nodes: of the tree.
        max_draft_tokens: levels of the tree; else as in `BlockDrafter`.
    """

    needs = Needs(part="dflash", trims=True)
    deterministic = True

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count = 32,
        max_draft_tokens: Count | None = None,
    ):
        super().__init__(pair, weights, max_draft_tokens)
        self.max_nodes = min(nodes, self.head.rows)
        # A path has no more nodes than the tree; the block stays a whole one.
        self.max_draft_tokens = min(self.max_draft_tokens, self.max_nodes)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Allocates the layers' cache, and notes which paths are looked at."""
        super().open(slots, target)
        self._children = candidate_children(self.max_nodes, slots.device)

    def draft(self, batch: Batch) -> Draft:
        """Drafts the likeliest paths, all from one pass."""
        levels = batch.max_draft
        nodes = min(self.max_nodes, batch.max_nodes)

        def filled(batch: Batch) -> list[torch.Tensor]:
            logits = self.head.logits(self._states(batch, levels))
            rows, tree = tree_of_marginals(logits, self._children, self.max_nodes, nodes)
            return [self.head.ids(rows), *tree.tensors]

        key = ("draft", levels, nodes)
        tokens, *tree = self._layer_cache.run(batch, key, filled, entries=self._places)
        return Draft(tokens, tree=Tree(*tree), bytes_read=self._bytes)


class DSpark(BlockDrafter):
    """DSpark: a chain whose tokens correct each other, and which may end early where it is uncertain.

    Args:
        pair: as in `BlockDrafter`.
        weights: as in `BlockDrafter`.
        max_draft_tokens: as in `BlockDrafter`.
        confidence_threshold: the draft ends before the first token whose estimated acceptance is below this; 0
            drafts all, and never waits for the device. The estimate does not see the token itself, so sampling stays
            exact.

    Raises:
        UserError: as `BlockDrafter`; or there is a threshold, and the drafting model has no estimate.
    """

    needs = Needs(part="dspark", training="head=markov", trims=True)
    joins = MARKOV

    def __init__(
        self,
        pair: Pair,
        weights: str,
        max_draft_tokens: Count | None = None,
        confidence_threshold: Probability = 0.0,
    ):
        super().__init__(pair, weights, max_draft_tokens)
        if confidence_threshold and self.model.confidence_head is None:
            raise UserError(
                f"the drafting model in '{weights}' has no confidence head: set confidence_threshold=0"
            )
        self.threshold = confidence_threshold
        markov, ids = cast("MarkovHead", self.model.markov_head), self.head.token_ids
        output, self._before = markov.markov_w2, markov.markov_w1
        all_rows = ids is None or self.model.lm_head is not None
        self._after = output if all_rows else packed_linear(output.weight[ids], None)
        # The correction's outputs are read for each token.
        self._step_bytes = weight_bytes(self._after)
        self._bytes -= weight_bytes(output)

    def draft(self, batch: Batch) -> Draft:
        """Drafts all tokens in one pass, and corrects them one after the other."""
        k = batch.max_draft

        def filled(batch: Batch) -> Sequence[torch.Tensor | None]:
            states = self._states(batch, k)
            logits = self.head.logits(states)
            chosen = chosen_in_turn(
                self.head, batch, k, lambda j, before: logits[:, j] + self._after(self._before(before))
            )
            if not self.threshold:
                return chosen
            tokens, probs = chosen
            before = torch.cat([batch.last_tokens(1), tokens[:, :-1]], dim=1)
            return [tokens, probs, self.model.confidence(states, self._before(before))]

        chosen = self._layer_cache.run(batch, ("draft", k), filled, entries=self._places)
        read = self._bytes + k * self._step_bytes
        if not self.threshold:
            return Draft(*chosen, bytes_read=read)
        tokens, probs, estimates = chosen
        counts = (estimates.float().sigmoid() >= self.threshold).long().cumprod(dim=1).sum(dim=1)
        most = int(counts.max())
        candidates = counts if batch.size > 1 else None
        probs = None if probs is None else probs[:, :most]
        return Draft(tokens[:, :most], probs, candidates=candidates, bytes_read=read)


class DFlash2(BlockDrafter):
    """DFlash2: a chain of tokens, each chosen among the likeliest of its position, given the previous token."""

    needs = Needs(part="dflash2", training="head=selector", trims=True)
    joins = SELECTOR

    def draft(self, batch: Batch) -> Draft:
        """Drafts all tokens in one pass, and chooses them one after the other."""
        k = batch.max_draft
        selector = cast("CandidateSelector", self.model.candidate_selector)
        count = min(selector.count, self.head.rows)

        def filled(batch: Batch) -> Chosen:
            states = self._states(batch, k)
            logits = self.head.logits(states)
            rows = likeliest_ids(logits, count).sort(-1).values
            likeliest = logits.gather(-1, rows)
            projected = selector.hidden_projection(states)
            successors = selector.successor_codebook[self.head.ids(rows)]

            def among(j: int, before: torch.Tensor) -> torch.Tensor:
                scores = likeliest[:, j] + selector.scores(projected[:, j], before, successors[:, j])
                return scores.to(logits.dtype)

            return chosen_in_turn(self.head, batch, k, among, rows)

        drafted = self._layer_cache.run(batch, ("draft", k), filled, entries=self._places)
        return Draft(*drafted, bytes_read=self._bytes)


def all_see_all(places: int, device: torch.device) -> Tree:
    """Returns consecutive places that all see each other, as a tree for a layout.

    Args:
        places: their number, the pending token's included.
        device: of the batch.
    """
    depths = torch.arange(1, places, device=device).unsqueeze(0)
    seen = torch.ones(1, places, places, dtype=torch.bool, device=device)
    return Tree(depths - 2, depths, seen)
