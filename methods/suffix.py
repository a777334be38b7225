"""Suffix Decoding (Oliaro et al. 2024, arXiv 2411.04975): a tree of what followed the text's suffixes, by frequency.

Two automata count what followed: one for this sequence's prompt and answer, one for earlier answers. Every suffix of
the text that occurs there proposes a tree of its likeliest successors; the longer the suffix, the larger the tree may
be. The tree with the largest score is drafted: the number of its tokens that would be accepted if they followed as
often as before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from methods.common.counted_trees import Counted, likeliest
from methods.common.suffix_automaton import Match, SuffixAutomaton
from specbench.data.warm_start import warm_answers
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.state import Batch, Draft, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.settings import Count, Probability, Range

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill


class SuffixDecoding(Drafter):
    """Drafts the tree with the largest score among those of all suffixes; see the module.

    Args:
        pair: with the tokenizer for `warm`; else not used.
        shape: "tree"; "chain": only the most frequent successor of every token.
        max_draft_tokens: most tokens of a draft.
        factor: a match of n tokens drafts factor * n.
        max_match: longest match that is looked up.
        min_probability: least product of shares of a draft token.
        memory: "answer": earlier answers are not used, so the order of questions does not matter; "run": all of them
            since the beginning of the run are, as published.
        warm: a file of conversations whose answers are known from the beginning.
    """

    needs = Needs(text_alone=True)
    deterministic = True

    def __init__(
        self,
        pair: Pair,
        shape: Literal["tree", "chain"] = "tree",
        max_draft_tokens: Count = 32,
        factor: Annotated[float, Range(1)] = 1.0,
        max_match: Count = 32,
        min_probability: Probability = 0.1,
        memory: Literal["answer", "run"] = "answer",
        warm: str | None = None,
    ):
        self.max_draft_tokens, self.factor, self.max_match = max_draft_tokens, factor, max_match
        self.min_probability, self.chain, self.shared = min_probability, shape == "chain", memory == "run"
        self.max_nodes = 0 if self.chain else max_draft_tokens
        self.looks_up = self.shared or warm is not None
        self._start = self._automaton()
        for answer in () if warm is None else warm_answers(warm, pair):
            self._start.add(answer)
        self.forget()

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for the state of each sequence."""
        self._sequences: list[SequenceState | None] = slots.values(lambda: None)
        self._texts = slots.values(self._automaton)
        self._matches = slots.values(lambda: Match(self._answers, self.max_match))

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Counts the prompt and the first token, and looks them up among earlier answers."""
        self._sequences[slot] = sequence
        self._texts[slot] = self._automaton()
        self._texts[slot].extend(sequence.tokens)
        self._matches[slot] = Match(self._answers, self.max_match)
        if self.looks_up:
            self._matches[slot].extend(sequence.tokens[-self.max_match :])

    def draft(self, batch: Batch) -> Draft:
        """The tree with the largest score, of each sequence."""
        trees = [
            self._best(slot, min(self.max_draft_tokens, batch.max_nodes), limit)
            for slot, limit in enumerate(batch.limits)
        ]
        parents = None if self.chain else [tree.parents for tree in trees]
        return Draft.of([tree.tokens for tree in trees], batch.tokens.device, parents)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Counts the new tokens."""
        for slot, new in enumerate(verified.tokens):
            self._texts[slot].extend(new)
            if self.looks_up:
                self._matches[slot].extend(new)

    def end(self, slot: int) -> float:
        """Adds the answer to the earlier ones."""
        sequence = self._sequences[slot]
        if self.shared and sequence is not None and sequence.done:
            self._learn(sequence.new_tokens)
        self._sequences[slot] = None
        return 0

    def forget(self) -> None:
        """Drops the earlier answers, but for those of the file."""
        self.restore([])

    def snapshot(self) -> list[list[int]]:
        """The earlier answers, without those of the file."""
        return [*self._learnt]

    def restore(self, state: list[list[int]]) -> None:
        """Restores the answers of the file and of a snapshot, no others."""
        self._learnt: list[list[int]] = []
        # A copy, as building it anew would take long after a large file.
        self._answers = self._start.copy() if self.shared else self._start
        for answer in state:
            self._learn(answer)

    def _learn(self, answer: list[int]) -> None:
        self._learnt.append(answer)
        self._answers.add(answer)

    def _automaton(self) -> SuffixAutomaton:
        return SuffixAutomaton(self.max_match + self.max_draft_tokens)

    def _best(self, slot: int, nodes: int, depth: int) -> Counted:
        """Returns the best tree of at most `nodes` nodes; ties: the longer match first, then the sequence's own."""
        best = Counted()
        for automaton, state, length in self._ends(slot):
            most = min(int(self.factor * length), nodes)
            if most <= best.score:  # no node counts more than 1, and further ends are no longer
                break
            tree = likeliest(state, self._followers(automaton), most, depth, self.min_probability)
            if tree.score > best.score:
                best = tree
        return best

    def _ends(self, slot: int) -> Iterator[tuple[SuffixAutomaton, int, int]]:
        """Suffixes of the text that occurred before: automaton, state and length, the longest ones first."""
        in_text = ((self._texts[slot], *end) for end in self._texts[slot].earlier(self.max_match))
        in_answers = ((self._answers, *end) for end in self._matches[slot].stretches())
        return heapq.merge(in_text, in_answers, key=lambda end: -end[2])

    def _followers(self, automaton: SuffixAutomaton) -> Callable[[int, int], list[tuple[int, int, float]]]:
        """Returns the callback for `likeliest`."""

        def followers(state: int, _: int) -> list[tuple[int, int, float]]:
            continuations = automaton.followers(state)
            total = sum(count for _, _, count in continuations)
            shares = [(token, state_after, count / total) for token, state_after, count in continuations]
            return [max(shares, key=lambda one: one[2])] if self.chain and shares else shares

        return followers
