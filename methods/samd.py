"""SAM-Decoding (Hu et al. 2024, arXiv 2411.10666): what followed the longest end of the text that stood there before.

A suffix automaton of the prompt and the answer has it at hand after every token, however long it is, in constant time
on average. The longer the match, the longer the draft. A corpus, whose suffix array lies on the disk, can be looked up,
too: the longer match drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from methods.counted_trees import Counted
from methods.heads import move_entries
from methods.rest.datastore import load_datastore, tree_behind
from methods.suffix_array import check_sorted
from methods.suffix_automaton import SuffixAutomaton
from specbench.decoding.draft import Batch, Draft, Drafter, Sequence, Verified
from specbench.pairs import Pair
from specbench.values import Count

if TYPE_CHECKING:
    from specbench.decoding.target import Prefill, StagedModel


class SAMDecoding(Drafter):
    """Drafts what followed the longest match; see the module.

    Not as in the authors' code: where what followed ends with the text, the draft goes on with its own beginning, as
    the text then repeats itself.

    Args:
        pair: with the tokenizer that a corpus must have been made with.
        max_draft_tokens: longest draft.
        growth: a match of n tokens drafts 1 + growth * n.
        corpus: folder of a datastore (`specbench train rest`); None: the text alone.
        max_match: longest match in the corpus that is looked for; with `max_draft_tokens` at most 32.

    Raises:
        UserError: the corpus is missing, or of another tokenizer, or is asked for more than it is sorted by.
    """

    certain = True

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 16,
        growth: Count = 4,
        corpus: str | None = None,
        max_match: Count = 16,
    ):
        self.max_draft_tokens, self.growth, self.max_match = max_draft_tokens, growth, max_match
        self.corpus = None if corpus is None else load_datastore(corpus, pair)
        if corpus is not None:
            self.max_nodes = max_draft_tokens  # trees
            check_sorted(max_match, max_draft_tokens)

    def open(self, slots: int, capacity: int, target: StagedModel) -> None:
        """Makes room for an automaton of each sequence."""
        self._texts = [SuffixAutomaton() for _ in range(slots)]

    def begin(self, slot: int, sequence: Sequence, prefill: Prefill) -> None:
        """Makes the automaton of the prompt and the first token."""
        self._texts[slot] = SuffixAutomaton()
        self._texts[slot].extend(sequence.tokens)

    def draft(self, batch: Batch) -> Draft:
        """What followed the longest match."""
        trees = [
            self._tree(text, min(limit, self.max_draft_tokens, batch.max_nodes))
            for text, limit in zip(self._texts, batch.limits)
        ]
        parents = None if self.corpus is None else [tree.parents for tree in trees]
        return Draft.of([tree.tokens for tree in trees], batch.tokens.device, parents)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Adds the new tokens."""
        for text, new in zip(self._texts, verified.tokens):
            text.extend(new)

    def move(self, sources: list[int], destinations: list[int], kv_len: int) -> None:
        """Moves the automata of slots."""
        move_entries(self._texts, sources, destinations)

    def _tree(self, text: SuffixAutomaton, limit: int) -> Counted:
        """The draft, of at most `limit` tokens."""
        length, end = text.earlier_match()
        if self.corpus is not None:
            where = self.corpus.longest(text.tokens, self.max_match, length + 1)
            if where is not None:
                return tree_behind(self.corpus, where, min(limit, 1 + self.growth * where.length), limit)
        tokens = repeated(text.tokens, end, min(limit, 1 + self.growth * length)) if length else []
        return Counted(tokens, list(range(-1, len(tokens) - 1)))


def repeated(tokens: list[int], start: int, n: int) -> list[int]:
    """The n tokens from `start` on; behind the last one those from `start` on once more."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(n)]
