"""Token Recycling (Luo et al. 2025, arXiv 2408.08696): a tree of each token's most recent top-k successors.

A table holds, for every token, the target's latest likeliest successors, whatever the context was. A draft is a fixed
tree of ranks that is filled from the table level by level. Every verified token, accepted or not, then updates its
successors in the table. No model, no training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from methods.common.rank_trees import RankTrees, grown, likeliest_ids
from specbench.data.warm_start import warm_texts
from specbench.decoding.drafter import Drafter
from specbench.decoding.slots import Slots
from specbench.decoding.state import NORMED, Batch, Draft, SequenceState, Verified
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count

if TYPE_CHECKING:
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.state import Prefill

RANKS = 8  # followers kept for each token
CHUNK = 256  # positions of a prompt whose logits exist at a time
# The authors' tree, "2.2.2": children by path of ranks (appendix; their code).
TREE = grown(
    8,
    "0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1 "
    "00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1 "
    "000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1 "
    "0000:3 0001:1 0002:1 0010:1 0100:1 1000:1 "
    "00000:2 00010:1",
)


class TokenRecycling(Drafter):
    """Drafts a tree of ranks; see the module.

    Not as in the authors' code: it is defined which of several nodes with one token updates the table (an accepted one
    first, then a shallow one); the prompt's own logits can fill the table before the first draft; when sampling, the
    tree is verified by the target's own draws, so the text is that of autoregressive decoding.

    Args:
        pair: with the target.
        nodes: of the tree: the authors' 80, or this many of the likeliest of them.
        prompt: whether the prompt fills the table, too: one use of the head for each of its tokens.
        memory: "answer": every answer begins with an empty table, so the order of questions does not matter; "run": one
            table lasts through all answers, shared by all sequences of a batch, as published.
        warm: a file of conversations: tables begin with the target's successors of their tokens instead of empty.

    Raises:
        UserError: more nodes than the tree has.
    """

    deterministic = True

    def __init__(
        self,
        pair: Pair,
        nodes: Count = 80,
        prompt: bool = True,
        memory: Literal["answer", "run"] = "answer",
        warm: str | None = None,
    ):
        if nodes > len(TREE):
            raise UserError(f"nodes={nodes}: the tree has {len(TREE)}")
        rows = pair.staged.vocab_size
        self.trees, self.ranks = RankTrees(TREE[:nodes], rows=rows), min(RANKS, rows)
        self.max_nodes, self.max_draft_tokens = self.trees.max_nodes, self.trees.depth
        self.prompt, self.shared = prompt, memory == "run"
        self.taps = (NORMED,) if prompt else ()
        self.device = pair.device
        self._followers = torch.empty(0)
        # What a table begins with, for every token. -1: nothing is known.
        self._start = torch.full((self.ranks,), -1, dtype=torch.int32, device=self.device)
        if warm is not None:
            self._start = self._warmed(warm, pair)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes a table for each sequence, or one for all."""
        self.target = target
        tables, shape = 1 if self.shared else slots.count, (target.vocab_size, self.ranks)
        if not self.shared:
            self._followers = slots.tensor(*shape, dtype=torch.int32)
            self._followers.copy_(self._start)
        elif self._followers.shape != (1, *shape):
            self._followers = self._start.expand(1, *shape).clone()
        self._newest = torch.full((tables, target.vocab_size), -1, device=self.device)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Resets the sequence's table, and fills it from the prompt."""
        if not self.shared:
            self._followers[slot] = self._start
        if self.prompt:
            self._read(slot, prefill.ids[0], prefill.hidden_states[NORMED][0])

    def draft(self, batch: Batch) -> Draft:
        """Fills the tree, level by level."""
        tree, levels, _ = self.trees.of(batch)
        table = torch.arange(batch.size, device=self.device).unsqueeze(1) * (not self.shared)
        tokens = [batch.last_tokens(1)]
        for level in levels:
            # An unknown follower becomes token 0, which is verified like any other.
            followers = self._followers[table, tokens[-1][:, level.parents], level.ranks]
            tokens.append(followers.clamp(min=0).long())
        return Draft(torch.cat(tokens[1:], dim=1), tree=tree)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Updates the table with the followers of every verified token, whoever drafted it."""
        if batch.is_over and not self.shared:
            return
        draft, pending = verified.draft, batch.last_tokens(1)
        b, k = draft.tokens.shape
        if draft.tree is None:
            depths = torch.arange(1 + k, device=self.device).expand(b, -1)
        else:
            depths = draft.tree.offsets().expand(b, -1)
        deepest = 1 + k
        accepted = torch.zeros(b, 2 + k, dtype=torch.bool, device=self.device)
        accepted[:, 0] = True
        nodes = torch.arange(k, device=self.device).expand(b, -1)
        steps = nodes < verified.count.unsqueeze(1)
        path = nodes if verified.path is None else verified.path
        accepted.scatter_(1, (path + 1).masked_fill(~steps, 1 + k), True)
        priority = torch.where(accepted[:, : 1 + k], deepest + depths, deepest - depths)
        tokens, live = draft.tokens, draft.acceptable()
        if live is not None:  # the rest is padding: the pending token, which counts more, replaces it
            tokens = torch.where(live, tokens, pending)
            priority[:, 1:] *= live
        self._learn(slice(0, b), torch.cat([pending, tokens], dim=1), verified.logits, priority)

    @torch.inference_mode()  # as the tables were made
    def forget(self) -> None:
        """Resets the tables to their initial state."""
        for table in self._followers:
            table.copy_(self._start)

    @torch.inference_mode()
    def snapshot(self) -> torch.Tensor | None:
        """Returns the table that lasts through all answers, or None."""
        return self._followers.clone() if self.shared else None

    @torch.inference_mode()
    def restore(self, state: torch.Tensor | None) -> None:
        """Restores the table of a snapshot."""
        if state is not None:
            self._followers.copy_(state)

    @torch.inference_mode()
    def _warmed(self, file: str, pair: Pair) -> torch.Tensor:
        """The table [vocab, ranks] that a file of conversations leaves behind."""
        target = pair.staged
        self.open(Slots(1, 0, self.device), target)
        for tokens in warm_texts(file, pair):
            ids = torch.tensor(tokens[: pair.context_length], device=self.device)
            prefill = target.prefill(ids.unsqueeze(0), target.new_cache(len(ids)), (NORMED,))
            self._read(0, ids, prefill.hidden_states[NORMED][0])
        return self._followers[0].clone()

    def _read(self, slot: int, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Notes the followers of every token of a text.

        Args:
            slot: whose table.
            ids: [n].
            states: [n, d] after the final norm.
        """
        for chunk, tokens in zip(states.split(CHUNK), ids.split(CHUNK)):
            logits = self.target.unembed(chunk).unsqueeze(0)
            self._learn(slice(slot, slot + 1), tokens.unsqueeze(0), logits, torch.zeros_like(tokens)[None])

    def _learn(
        self, slots: slice, tokens: torch.Tensor, logits: torch.Tensor, priority: torch.Tensor
    ) -> None:
        """Notes the likeliest followers of some tokens.

        Args:
            slots: whose tables, b of them.
            tokens: [b, n].
            logits: [b, n, vocab] after each of them.
            priority: [b, n] whole numbers from 0: of equal tokens the highest counts, of those the last.
        """
        best = likeliest_ids(logits, self.ranks).int()
        if self.shared:
            slots, tokens, best = slice(0, 1), tokens.view(1, -1), best.view(1, -1, self.ranks)
            priority = priority.reshape(1, -1)
        n = tokens.shape[1]
        # A maximum finds the one that counts, and all equal tokens write its row: the table does not depend on the
        # order of a device's writes.
        order = priority * n + torch.arange(n, device=self.device)
        newest, tables = self._newest[slots], self._followers[slots]
        newest.scatter_reduce_(1, tokens, order, "amax")
        winner = newest.gather(1, tokens) % n
        newest.scatter_(1, tokens, -1)
        rows = best.gather(1, winner.unsqueeze(-1).expand(-1, -1, self.ranks))
        tables.scatter_(1, tokens.unsqueeze(-1).expand(-1, -1, self.ranks), rows)
