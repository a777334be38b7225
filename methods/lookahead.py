"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target generates n-grams alongside the text.

A window of W columns follows the pending token. A column holds N - 1 successive tokens of a guessed future; the
first tokens of all columns are a chain that begins with the pending token, in place of the first column's own. Each
verification appends the target's choice to every column: N tokens, an n-gram. The n-gram enters a pool, and the column
drops its first token. The pool's n-grams that begin with the pending token are the draft, which is verified in the same
pass. No model, no training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from specbench.decoding.device import on_device
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import argmax_token
from specbench.decoding.state import Batch, Draft, SequenceState, Verified
from specbench.measure.metrics.acceptance import ratio, stat
from specbench.models.pairs import Pair
from specbench.system.settings import Count, Range

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill

PENDING = -1  # as a parent


@dataclass(slots=True)
class Pool:
    """N-grams by their first token.

    Attributes:
        size: the most n-grams with one first token; a new one replaces the one added longest ago.
        after: for each first token the other tokens of its n-grams, the latest one last.
    """

    size: int
    after: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def add(self, first: int, others: tuple[int, ...]) -> None:
        """Adds an n-gram; a known one becomes the newest again."""
        ngrams = self.after.setdefault(first, {})
        ngrams.pop(others, None)
        ngrams[others] = None
        if len(ngrams) > self.size:
            del ngrams[next(iter(ngrams))]

    def guesses(self, first: int) -> Iterator[tuple[int, ...]]:
        """What may follow a token, the latest first."""
        return reversed(self.after.get(first, {}))


@dataclass(slots=True)
class Search:
    """The state of one sequence.

    Attributes:
        columns: W of N - 1 tokens. The pending token takes the place of the first column's first one.
        pool: the n-grams.
        advanced: number of steps of each column.
    """

    columns: list[tuple[int, ...]]
    pool: Pool
    advanced: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.advanced = [0] * len(self.columns)

    def go_on(self, pending: int, chosen: list[int]) -> None:
        """Advances the first columns by one token each.

        Args:
            pending: the token that was in front of the window.
            chosen: the target's choice after each column.
        """
        firsts = [pending, *(column[0] for column in self.columns[1:])]
        for i, (first, token) in enumerate(zip(firsts, chosen)):
            column = (*self.columns[i][1:], token)
            # At first columns hold random tokens; only the first of an n-gram may be one, as in the authors' code.
            if self.advanced[i] >= len(column) - 1:
                self.pool.add(first, column)
            self.columns[i] = column
            self.advanced[i] += 1


class Lookahead(Drafter):
    """Drafts the n-grams of a pool, and fills the pool; see the module.

    Not as in the authors' code: the window begins full, as in the paper, with random tokens of the prompt, which enter
    the pool only as the first tokens of its first n-grams; n-grams with a common prefix share its nodes; a completely
    accepted n-gram yields N tokens, while theirs lacks the bonus token; when sampling, the draft is verified by the
    target's own draws, so the text is that of autoregressive decoding. The window takes the likeliest tokens at any
    temperature, as theirs does.

    Args:
        pair: with the target.
        window: columns (W).
        ngram: tokens of an n-gram (N).
        guesses: n-grams that the pool keeps for each first token (G).
        text: whether the n-grams of the prompt and of the answer so far enter the pool, too: the paper's variant with
            the prompt as reference.
    """

    deterministic = True

    def __init__(
        self,
        pair: Pair,
        window: Count = 15,
        ngram: Annotated[int, Range(2)] = 5,
        guesses: Count = 15,
        text: bool = False,
    ):
        self.window, self.ngram, self.guesses, self.text = window, ngram, guesses, text
        self.max_draft_tokens = ngram - 1
        self.max_nodes = (window + guesses) * (ngram - 1) - 1

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for a search of each sequence."""
        self._searches = slots.values(lambda: Search([], Pool(self.guesses)))

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Begins with a random window and an empty pool."""
        prompt, rng = sequence.request.prompt, random.Random(0)
        columns = [tuple(rng.choices(prompt, k=self.ngram - 1)) for _ in range(self.window)]
        self._searches[slot] = Search(columns, Pool(self.guesses))
        self._read(slot, sequence.tokens)

    def draft(self, batch: Batch) -> Draft:
        """Drafts a tree of the guesses, and the window, which is never accepted."""
        tokens, parents, candidates, ends = [], [], [], []
        room = self._room_for_guesses(batch.max_nodes)
        for slot, (sequence, limit) in enumerate(zip(batch.sequences, batch.limits)):
            search = self._searches[slot]
            guesses = search.pool.guesses(sequence.tokens[-1])
            nodes, above = merged(guesses, limit, room)
            candidates.append(len(nodes))
            # If a token budget has no room for all columns, the first ones advance.
            fitting = (batch.max_nodes - len(nodes) + 1) // (self.ngram - 1)
            ends.append(add_window(search.columns[:fitting], nodes, above))
            tokens.append(nodes)
            parents.append(above)
        self._columns = [len(columns) for columns in ends]
        device, widest = batch.tokens.device, max(self._columns)
        draft = Draft.of(tokens, device, parents)
        draft.candidates = on_device(candidates, device)
        padded = on_device([[*columns, *[0] * (widest - len(columns))] for columns in ends], device)
        slots = torch.arange(batch.size, device=device).unsqueeze(1)
        draft.report = lambda logits: argmax_token(logits[slots, padded])
        draft.stats = {"looked_at": [len(nodes) - n for nodes, n in zip(tokens, candidates)]}
        return draft

    def _room_for_guesses(self, nodes: int) -> int:
        """The nodes of a draft that guesses may take: if a token budget cuts the draft, the window keeps its share.

        A window without a column would leave the pool empty, so one is kept wherever there is room for it.
        """
        columns = max(1, self.window * (nodes + 1) // (self.max_nodes + 1))
        room = nodes + 1 - columns * (self.ngram - 1)
        return room if room >= 0 else nodes

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Moves the window by one token, however many were accepted."""
        assert verified.report is not None  # every draft asks for one
        for slot, (sequence, length) in enumerate(zip(batch.sequences, batch.lengths)):
            chosen = verified.report[slot][: self._columns[slot]]
            self._searches[slot].go_on(sequence.tokens[length - 1], chosen)
            self._read(slot, sequence.tokens[max(length - self.ngram + 1, 0) :])

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """`guess_rate`: share of the rounds with a guess; `looked_at`: mean tokens of the window in a round."""
        looked_at = stat(rounds, "looked_at")
        drafted, window_tokens = rounds["drafted"][looked_at.notna()], looked_at.dropna()
        return {
            "guess_rate": ratio((drafted > 0).sum(), len(window_tokens)),
            "looked_at": ratio(window_tokens.sum(), len(window_tokens)),
        }

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """Both numbers."""
        if stats.get("guess_rate") is None:
            return []
        return [
            f"guesses in {stats['guess_rate']:.0%} of the rounds; window: {stats['looked_at']:.1f} tokens a round"
        ]

    def _read(self, slot: int, tokens: list[int]) -> None:
        """Adds the n-grams of some successive tokens of the text."""
        if self.text:
            for i in range(len(tokens) - self.ngram + 1):
                self._searches[slot].pool.add(tokens[i], tuple(tokens[i + 1 : i + self.ngram]))


def merged(chains: Iterable[tuple[int, ...]], depth: int, nodes: int) -> tuple[list[int], list[int]]:
    """The tree of some chains of tokens, level by level, cut at a depth and at a number of nodes.

    Returns:
        Tokens and parents of the nodes, as in `Draft.of`.
    """
    chains = list(chains)
    tokens: list[int] = []
    parents: list[int] = []
    node_index: dict[tuple[int, ...], int] = {(): PENDING}
    for level in range(1, depth + 1):
        for path in dict.fromkeys(chain[:level] for chain in chains):
            if len(tokens) < nodes:
                node_index[path] = len(tokens)
                tokens.append(path[-1])
                parents.append(node_index[path[:-1]])
    return tokens, parents


def add_window(columns: list[tuple[int, ...]], tokens: list[int], parents: list[int]) -> list[int]:
    """Adds the nodes of columns to a tree: c columns of n tokens are c * n - 1 nodes.

    Args:
        columns: as in `Search`.
        tokens: of the nodes.
        parents: of the nodes.

    Returns:
        For each column the row of the verification after its last token.
    """

    def add(token: int, parent: int) -> int:
        tokens.append(token)
        parents.append(parent)
        return len(tokens) - 1

    ends, first = [], PENDING
    for i, column in enumerate(columns):
        if i > 0:
            first = add(column[0], first)
        last = first
        for token in column[1:]:
            last = add(token, last)
        ends.append(1 + last)
    return ends
