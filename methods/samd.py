"""SAM-Decoding (Hu et al. 2024, arXiv 2411.10666): copies what followed the longest suffix that occurred before.

A suffix automaton of the prompt and the answer maintains the longest match in amortised O(1) per token. The longer the
match, the longer the draft. A corpus, whose suffix array is on disk, can be looked up, too: the longer match drafts.
If both are short, an auxiliary drafter can draft, such as EAGLE-2, the authors' best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import pad

from methods.ar import Autoregressive
from methods.common.counted_trees import Counted
from methods.common.suffix_array import SORTED
from methods.common.suffix_automaton import SuffixAutomaton
from methods.rest.datastore import FOLLOWERS, load_datastore, tree_after
from specbench.config.spec import make_drafter
from specbench.data.warm_start import WARM
from specbench.decoding.device import on_device
from specbench.decoding.drafter import Needs
from specbench.decoding.state import Batch, Draft, SequenceState, Verified
from specbench.decoding.tree import Tree
from specbench.decoding.wrapped import WrappedDrafter
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import MEMORY, Count

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Prefill


# Drafters that need no state of their draft, so that another one may be verified instead.
Auxiliary = Literal["none", "recycling", "sps", "eagle", "eagle2", "eagle3", "medusa", "hydra_heads", "mtp"]
DRAWN = ("sps", "mtp")  # auxiliary drafters that draw their tokens when sampling


class SAMDecoding(WrappedDrafter):
    """Drafts what followed the longest match; see the module.

    Not as in the authors' code: if the continuation reaches the end of the text, the draft repeats it from its
    beginning, as the text repeats itself there; a draft from a corpus ends where that text ends, and is not padded.

    Args:
        pair: with the tokenizer that a corpus must have been made with, and what the auxiliary drafter needs.
        drafter: configuration of the auxiliary drafter; None: none.
        auxiliary: its name.
        threshold: with an auxiliary drafter, the shortest match that is copied, and by how much one in the corpus must
            be longer than that.
        max_draft_tokens: most tokens of a copied draft.
        growth: without an auxiliary drafter a match of n tokens drafts growth * n; with one, always `max_draft_tokens`.
        corpus: folder of a datastore (`specbench train rest`); None: the text alone.
        max_match: longest match that is looked up in the corpus. A draft from there has at most 32 - `max_match`
            levels, as a datastore is sorted by 32 tokens.
        memory: of the auxiliary drafter, which must have one if this is "run".
        warm: file of conversations that its memory begins with.

    Raises:
        UserError: the corpus is missing, or of another tokenizer, or is not sorted by enough tokens; no match in it
            could be long enough; or the auxiliary drafter is not the named one.
    """

    needs = Needs(text_alone=True)
    fixes = (MEMORY, WARM)

    def __init__(
        self,
        pair: Pair,
        drafter: dict | None = None,
        auxiliary: Auxiliary = "none",
        threshold: Count = 5,
        max_draft_tokens: Count = 39,
        growth: Count = 4,
        corpus: str | None = None,
        max_match: Count = 16,
        memory: Literal["answer", "run"] = "answer",
        warm: str | None = None,
    ):
        if drafter is not None and drafter["name"] != auxiliary:
            raise UserError(f"auxiliary={auxiliary}, but its drafter is {drafter['name']}")
        shared: dict[str, Any] = {} if memory == "answer" else {"memory": memory}
        shared |= {} if warm is None else {WARM: warm}
        inner = Autoregressive(pair) if drafter is None else make_drafter(drafter, pair=pair, **shared)
        super().__init__(inner)
        self.alone = auxiliary == "none"
        self.threshold, self.bias = (1, 0) if self.alone else (threshold, threshold)
        self.longest, self.growth, self.max_match = max_draft_tokens, growth, max_match
        self.corpus = None if corpus is None else load_datastore(corpus, pair)
        # A datastore is sorted by `SORTED` tokens, match and draft together.
        self.levels = min(max_draft_tokens, SORTED - max_match)
        if corpus is not None:
            if self.levels < 1:
                raise UserError(
                    f"max_match={max_match} leaves no draft of a corpus: set at most {SORTED - 1}"
                )
            if self.threshold + self.bias > max_match:
                raise UserError(
                    f"beside an auxiliary drafter a match in the corpus needs twice threshold={threshold} tokens, and "
                    f"max_match={max_match} are looked up: set a threshold of at most {max_match // 2}"
                )
        self.max_draft_tokens = max(max_draft_tokens, inner.max_draft_tokens)
        if corpus is not None and not inner.deterministic:  # a batch may have its trees and drawn tokens
            self.siblings = max(inner.siblings, FOLLOWERS)
        self.trees = corpus is not None or inner.max_nodes > 0
        self.max_nodes = max(max_draft_tokens, inner.max_nodes) if self.trees else 0

    @staticmethod
    def draws_trees(settings: Mapping[str, Any]) -> bool:
        """Whether a batch may have trees of a corpus and drawn tokens."""
        return settings.get("corpus") is not None and settings.get("auxiliary") in DRAWN

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for an automaton of each sequence."""
        self._texts = slots.values(SuffixAutomaton)
        self._vocab = 0 if self.alone else target.vocab_size
        super().open(slots, target)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Makes the automaton of the prompt and the first token."""
        self._texts[slot] = SuffixAutomaton()
        self._texts[slot].extend(sequence.tokens)
        super().begin(slot, sequence, prefill)

    def draft(self, batch: Batch) -> Draft:
        """Drafts what followed the longest match or, if it is short, as the auxiliary drafter."""
        most = min(self.longest, batch.max_nodes)
        copied = [self._copied(text, most, limit) for text, limit in zip(self._texts, batch.limits)]
        self._copies = [bool(tree.tokens) for tree in copied]
        parents = [tree.parents for tree in copied] if self.corpus is not None else None
        draft = Draft.of([tree.tokens for tree in copied], batch.tokens.device, parents)
        draft.bytes_read = self.inner.upkeep_bytes
        # Sequences that copy need no draft of the auxiliary drafter.
        limits = [0 if copies else limit for copies, limit in zip(self._copies, batch.limits)]
        if not self.alone and any(limits):
            limits = [min(limit, self.inner.max_draft_tokens) for limit in limits]
            inner_draft = self.inner.draft(replace(batch, limits=limits))
            draft = merged(draft, inner_draft, self._copies) if any(self._copies) else inner_draft
        elif not self.deterministic and not batch.decoding.greedy:
            # As with drawn drafts: the rule that accepts a token must not depend on the rest of the batch.
            draft.probs = surely(draft.tokens, draft.tokens.new_zeros(1, 1, self._vocab, dtype=torch.float32))
        if draft.tree is not None and not self.deterministic:
            # Padding, which may be more, is no candidate and comes last.
            draft.tree = replace(draft.tree, max_children=self.siblings)
        draft.stats["copied"] = [int(copies) for copies in self._copies]
        return draft

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Adds the new tokens."""
        for text, new in zip(self._texts, verified.tokens):
            text.extend(new)
        own_counts = [0 if copies else count for copies, count in zip(self._copies, verified.counts)]
        super().commit(batch, replace(verified, own_counts=own_counts))

    def _copied(self, text: SuffixAutomaton, nodes: int, depth: int) -> Counted:
        """Returns the copied tree, of at most `nodes` nodes and `depth` levels; empty if the match is too short."""
        length, end = text.earlier_match()
        if self.corpus is not None:
            least = max(length + 1, self.threshold) + self.bias
            interval = self.corpus.longest(text.tokens, self.max_match, least)
            if interval is not None:
                nodes = min(nodes, self._size(interval.length))
                return tree_after(self.corpus, interval, nodes, min(depth, self.levels))
        if length < self.threshold:
            return Counted()
        tokens = repeated(text.tokens, end, min(nodes, depth, self._size(length)))
        return Counted(tokens, list(range(-1, len(tokens) - 1)))

    def _size(self, match: int) -> int:
        """The tokens of a draft after a match."""
        return self.growth * match if self.alone else self.longest


def repeated(tokens: list[int], start: int, n: int) -> list[int]:
    """The n tokens from `start` on; after the last token it repeats from `start`."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(n)]


def surely(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One-hot distributions [b, k, vocab] of tokens [b, k], with vocabulary and dtype of `like` [..., vocab]."""
    probs = like.new_zeros(*tokens.shape, like.shape[-1])
    return probs.scatter_(2, tokens.unsqueeze(2), 1.0)


def merged(first: Draft, second: Draft, chosen: list[bool]) -> Draft:
    """Merges two drafts: `chosen` sequences take the first, the others the second.

    Args:
        first: a deterministic draft.
        second: any draft, but for one that resumes the target's pass.
        chosen: of each sequence.
    """
    k, device = max(first.tokens.shape[1], second.tokens.shape[1]), first.tokens.device
    from_first = on_device([[one] for one in chosen], device).bool()

    def wide(draft: Draft) -> torch.Tensor:
        return pad(draft.tokens, (0, k - draft.tokens.shape[1]))

    def live(draft: Draft) -> torch.Tensor | int:
        return draft.tokens.shape[1] if draft.candidates is None else draft.candidates.unsqueeze(1)

    def parents(draft: Draft) -> torch.Tensor:
        if draft.tree is None:
            return torch.arange(-1, k - 1, device=device).unsqueeze(0)
        return pad(draft.tree.parents, (0, k - draft.tokens.shape[1]), value=-1)

    tokens = torch.where(from_first, wide(first), wide(second))
    tree, probs = None, None
    if first.tree is not None or second.tree is not None:
        tree = Tree.of(torch.where(from_first, parents(first), parents(second)))
    if second.probs is not None:  # a deterministic token has a one-hot distribution
        drawn = pad(second.probs, (0, 0, 0, k - second.tokens.shape[1]))
        probs = torch.where(from_first.unsqueeze(2), surely(tokens, drawn), drawn)
    candidates = torch.where(from_first, live(first), live(second)).squeeze(1)
    return replace(second, tokens=tokens, probs=probs, tree=tree, candidates=candidates)
