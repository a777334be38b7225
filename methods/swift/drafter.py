"""SWIFT's drafter: the target drafts without some of its own sublayers, in its own cache.

A round (paper, section 4): while the search lasts, another set of sublayers is scored on the first new tokens of an
answer. Then a chain is drafted with the best set until a token is uncertain; beside each of its tokens are the next
likeliest ones, the more the less certain it was. The whole target verifies this tree, and overwrites what drafting left
in the cache.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch

from methods.common.rank_trees import likeliest_ids
from methods.swift.search import LayerSearch, Skipped
from methods.swift.sublayers import Sublayers, check_parts
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.kv_cache import EMPTY, ForwardContext
from specbench.decoding.state import Batch, Draft, SequenceState, Verified
from specbench.measure.metrics.acceptance import stat
from specbench.models.pairs import Pair
from specbench.system.settings import Count, Probability

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill

# Number of likeliest tokens at a depth, by the top-1 probability there: above 0.95, above 0.8 ...
WIDTHS = ((0.95, 3), (0.8, 5), (0.5, 8))
WIDEST = 10


class Swift(Drafter):
    """Drafts with the target without some of its sublayers; see the module.

    Args:
        pair: with the target.
        max_draft_tokens: the longest chain.
        confidence_threshold: a chain ends with a token whose probability (top-1, temperature 1) is below this.
        skip_ratio: share of the sublayers that is skipped: attention and feed-forward part of each layer except the
            first and the last.
        context_window: tokens on which a set is scored.
        bayes_interval: Bayesian optimisation suggests every n-th set, the others are random; None: all are random.
        max_steps: most sets that are scored.
        patience: sets in a row without a gain after which the search ends.
        enough: the search ends above this score.
        memory: "run": the search continues through all answers, as published; "answer": each answer restarts it, which
            takes one sequence at a time.

    Raises:
        UserError: the layers have no parts that can be skipped.
    """

    needs = Needs(one_memory=True)
    deterministic = True

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 25,
        confidence_threshold: Probability = 0.8,
        skip_ratio: Probability = 0.45,
        context_window: Count = 32,
        bayes_interval: Count | None = 25,
        max_steps: Count = 1000,
        patience: Count = 300,
        enough: Probability = 0.95,
        memory: Literal["answer", "run"] = "run",
    ):
        self.max_draft_tokens, self.confidence_threshold = max_draft_tokens, confidence_threshold
        self.context_window, self.shared = context_window, memory == "run"
        sure = next((width for above, width in WIDTHS if confidence_threshold >= above), WIDEST)
        # Every token of a chain but the last one is sure. The search needs room after a sequence, too.
        self.max_nodes = max((max_draft_tokens - 1) * sure + WIDEST, context_window)
        self._begin_search = lambda layers: LayerSearch(
            layers, skip_ratio, bayes_interval, max_steps, patience, enough
        )
        decoder: Any = pair.target.get_decoder()
        for layer in decoder.layers:
            check_parts(layer)
        self._layers = len(decoder.layers)
        self._search = self._begin_search(self._layers)
        self._sublayers: Sublayers | None = None

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes the drafting model."""
        if self._sublayers is None or self._sublayers.target is not target:
            self._sublayers = Sublayers(target)
        self._take_best()

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Restarts the search unless it is shared."""
        if not self.shared:
            self.forget()

    def draft(self, batch: Batch) -> Draft:
        """Scores a set while the search lasts, then drafts with the best one."""
        searched = self._score_one(batch)
        b, cache = batch.size, batch.layout.cache
        tokens: list[list[int]] = [[] for _ in range(b)]
        parents: list[list[int]] = [[] for _ in range(b)]
        ends, going = [-1] * b, [True] * b  # the chain's last node, and whether it grows
        ids, passes = batch.last_tokens(1), 0
        while any(going) and passes < batch.max_draft:
            ctx = batch.layout.place(batch, 1, passes)
            logits = self.model.head(self.model.run_layers(ids, cache, ctx)[:, -1])
            ids, sequences = _look(logits)
            passes += 1
            for i, (sure, *likeliest) in enumerate(sequences):
                if not going[i]:
                    continue
                width = next((width for above, width in WIDTHS if sure > above), WIDEST)
                chosen = [int(token) for token in likeliest[:width]]
                parents[i] += [ends[i]] * len(chosen)
                ends[i] = len(tokens[i])
                tokens[i] += chosen
                going[i] = sure >= self.confidence_threshold and len(tokens[i]) < batch.max_nodes
        limit = batch.max_nodes
        draft = Draft.of(
            [nodes[:limit] for nodes in tokens], batch.tokens.device, [nodes[:limit] for nodes in parents]
        )
        draft.bytes_read = searched + passes * self.model.pass_bytes(tokens=b)
        draft.stats = {"matchness": self._search.score, "sets_scored": self._search.steps}
        return draft

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Nothing is kept of a draft."""

    # -- the search

    @torch.inference_mode()
    def _score_one(self, batch: Batch) -> float:
        """Scores a set on the first sequence that is long enough, unless the search has ended; returns bytes read."""
        window = self.context_window
        # The scored tokens and one after them must be known, and none of them pending.
        long = (i for i, one in enumerate(batch.sequences) if one.emitted > window + 2)
        i = None if self._search.done else next(long, None)
        if i is None:
            return 0.0
        skipped = self._search.propose()
        model = self._without(skipped)
        sequence = batch.sequences[i]
        start = len(sequence.request.prompt)
        ids = batch.tokens[i : i + 1, start : start + window + 1]
        cache, ctx = replay(batch, i, start, window)
        states = model.run_layers(ids[:, :-1], cache, ctx)
        agreed = model.head(states).argmax(-1) == ids[:, 1:]
        self._search.tell(agreed.float().mean().item())
        if self._search.best is skipped:
            self.model = model
        return model.pass_bytes(tokens=window)

    def _take_best(self) -> None:
        """Makes the model that drafts."""
        self.model = self._without(self._search.best)

    def _without(self, skipped: Skipped) -> StagedModel:
        """The target without some sublayers."""
        assert self._sublayers is not None  # made by `open`
        return self._sublayers.without(skipped.attention, skipped.mlp)

    # -- state that outlives an answer

    def forget(self) -> None:
        """Restarts the search."""
        self.restore(self._begin_search(self._layers))

    def snapshot(self) -> LayerSearch:
        """The search as it is."""
        return copy.deepcopy(self._search)

    def restore(self, state: LayerSearch) -> None:
        """Continues a search that was saved."""
        self._search = copy.deepcopy(state)
        if self._sublayers is not None:
            self._take_best()

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """The last matchness, and how many sets were scored for it."""
        # The last is the one after the most sets: rounds are in the order of their questions, not of their time.
        searched = stat(rounds, "sets_scored").dropna().sort_values(kind="stable")
        matchness = stat(rounds, "matchness")
        last = {"matchness": matchness.get, "sets_scored": searched.get}
        return {name: None if searched.empty else float(of(searched.index[-1])) for name, of in last.items()}

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """The search's result."""
        if stats.get("sets_scored") is None:
            return []
        return [
            f"layers left out: matchness {stats['matchness']:.2f} after {stats['sets_scored']:.0f} sets were scored"
        ]


def _look(logits: torch.Tensor) -> tuple[torch.Tensor, list[list[float]]]:
    """The likeliest tokens after logits [b, vocab].

    Returns:
        [b, 1] the likeliest, on the device; and on the host, of each sequence, its probability, then the ids of the
        WIDEST likeliest.
    """
    logits = logits.float()
    best = likeliest_ids(logits, min(WIDEST, logits.shape[-1]))
    sure = (logits.gather(1, best[:, :1]) - logits.logsumexp(-1, keepdim=True)).exp()
    # One copy for both; a double holds every id.
    return best[:, :1], torch.cat([sure.double(), best.double()], dim=1).tolist()


def replay(batch: Batch, i: int, start: int, n: int) -> tuple[KVCache, ForwardContext]:
    """Returns the pass that recomputes known tokens of a sequence before a draft is placed, without changing them.

    It writes to the entries after the sequence's end. Its tokens attend to those before the first of them, and to each
    other.

    Args:
        batch: the running sequences.
        i: which of them.
        start: position of the first token.
        n: tokens, at most one more than a draft of this round may have.

    Returns:
        A cache of that sequence alone, and the pass.
    """
    held = batch.layout.held_by(batch, i)
    end, positions = held.shape[0], torch.arange(start, start + n, device=held.device)
    seen = torch.cat([held.masked_fill(held >= start, EMPTY), positions])
    return batch.layout.cache.slot(i), ForwardContext(end + n, end, None, positions[None], seen[None])
