"""REST's drafter: looks up the longest suffix of the text in a datastore, and drafts the tree of what follows there."""

from __future__ import annotations

from methods.common.counted_trees import Counted
from methods.common.suffix_array import check_sorted
from methods.rest.datastore import load_datastore, tree_after
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.state import Batch, Draft
from specbench.models.pairs import Pair
from specbench.system.errors import require_at_least
from specbench.system.settings import Count


class REST(Drafter):
    """Drafts what followed in a datastore.

    Not as in the authors' code: every occurrence counts, not only the first 5000 in alphabetical order; the tree has
    the most frequent nodes; nothing is drafted if nothing is found.

    Args:
        pair: with the tokenizer that the datastore must have been made with.
        weights: folder of the datastore (`specbench train rest` makes one).
        nodes: most nodes of the tree.
        max_draft_tokens: longest path.
        max_match: longest suffix of the text that is looked up.
        min_match: shortest one.

    Raises:
        UserError: the datastore is missing, or of another tokenizer, or is not sorted by enough tokens.
    """

    needs = Needs(part="rest", text_alone=True)
    deterministic = True

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count = 64,
        max_draft_tokens: Count = 10,
        max_match: Count = 16,
        min_match: Count = 2,
    ):
        require_at_least(min_match, max_match=max_match)
        check_sorted(max_match, max_draft_tokens)
        self.max_nodes, self.max_draft_tokens = nodes, max_draft_tokens
        self.max_match, self.min_match = max_match, min_match
        self.datastore = load_datastore(weights, pair)

    def draft(self, batch: Batch) -> Draft:
        """The tree after the longest match; none without a match."""
        trees = [
            self._tree(sequence.tokens, min(self.max_nodes, batch.max_nodes), limit)
            for sequence, limit in zip(batch.sequences, batch.limits)
        ]
        device, parents = batch.tokens.device, [tree.parents for tree in trees]
        return Draft.of([tree.tokens for tree in trees], device, parents)

    def _tree(self, tokens: list[int], nodes: int, depth: int) -> Counted:
        interval = self.datastore.longest(tokens, self.max_match, self.min_match)
        return Counted() if interval is None else tree_after(self.datastore, interval, nodes, depth)
