"""An oracle: real draft passes at a chosen acceptance, to find the acceptance at which speculation pays off.

It wraps another drafter. The passes of that one take their real time, but the tokens that come out of them are the
oracle's: the target's own next token with the chosen probability, else another one. A drafter with a head gets its
tokens there, so that it goes on from them: its cache, and the states that it may hand to the verification, belong to
the tokens that are verified. The target's own answers are known beforehand (`Drafter.set_reference_answers`); they are
verified and certified like those of any method.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from specbench.decoding.device import span
from specbench.decoding.drafter import Needs, make_drafter
from specbench.decoding.wrapped import WrappedDrafter
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count, Probability, Seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified

UNKNOWN = -1  # in place of a token: the wrapped drafter's own is proposed


class Foretold:
    """What is proposed for an answer that is known: one token for each of its positions, drawn once.

    Args:
        prompt: token ids.
        answer: the target's own new token ids.
        acceptance: probability of the target's own token, independent at each position.
        vocab_size: ids of which a wrong token is one.
        seed: with the prompt, of the draws: every repeat, draft length and scheduler gets the same ones.
        spare: arbitrary tokens after the end of the answer, so that the last draft is as long as the others.
    """

    def __init__(
        self,
        prompt: list[int],
        answer: list[int],
        acceptance: float,
        vocab_size: int,
        seed: int,
        spare: int,
    ):
        draws = np.random.default_rng([seed, *prompt]).random((len(answer) + spare, 2))
        right_tokens = np.array([*answer, *[0] * spare], dtype=np.int64)
        others = (right_tokens + 1 + (draws[:, 1] * (vocab_size - 1)).astype(np.int64)) % vocab_size
        self.answer = answer
        self.right = (draws[:, 0] < acceptance).tolist()
        self.tokens = np.where(self.right, right_tokens, others)


class OracleHead:
    """The head of a drafter, whose choices give way to the oracle's. Everything else is the head's own.

    Args:
        head: the head.
        begin: called in front of each draft.
        instead: the tokens [n] to propose in place of the chosen ones [n].
    """

    def __init__(
        self, head: Any, begin: Callable[[Batch], None], instead: Callable[[torch.Tensor], torch.Tensor]
    ):
        self._head, self.begin, self._instead = head, begin, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def choose(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the head chooses, which takes its time; then the oracle's tokens."""
        tokens, probs = self._head.choose(*args, **kwargs)
        return self._instead(tokens), probs


class Oracle(WrappedDrafter):
    """Drafts tokens of a chosen acceptance at the cost of another drafter.

    Where an answer is not known, or has left the known one (after a near-tie), the wrapped drafter's own tokens are
    proposed.

    Args:
        pair: with what the wrapped drafter needs.
        drafter: configuration of the wrapped drafter. Its draft length becomes `max_draft_tokens`, and it never stops
            early.
        acceptance: probability that a draft token is accepted when all before it in the draft were.
        cost_of: name of the wrapped drafter.
        max_draft_tokens: draft length, shorter only where the answer has less room.
        seed: of the draws.

    Raises:
        UserError: the wrapped drafter drafts trees, or works during verification.
    """

    needs = Needs(sampling=False, reference_answer=True)

    def __init__(
        self,
        pair: Pair,
        drafter: dict,
        acceptance: Probability = 0.8,
        cost_of: str = "sps",
        max_draft_tokens: Count = 5,
        seed: Seed = 0,
    ):
        super().__init__(make_drafter(drafter, pair=pair, **_fixed(drafter, max_draft_tokens)))
        if self.inner.max_nodes or self.inner.overlaps_verification:
            raise UserError(f"the oracle proposes chains in turn with the target, which {cost_of} does not")
        self.max_draft_tokens = max_draft_tokens
        self.acceptance, self.vocab_size, self.seed = acceptance, pair.vocab_size, seed
        self.device = pair.device
        self.feeds = hasattr(self.inner, "head")  # whether the wrapped drafter goes on from what is proposed
        if self.feeds:
            self.inner.head = OracleHead(self.inner.head, self._propose, self._next)  # type: ignore[attr-defined]
        self._foretold: dict[tuple[int, ...], Foretold] = {}

    def set_reference_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Draws what will be proposed."""
        drawn = (self.acceptance, self.vocab_size, self.seed, self.max_draft_tokens)
        self._foretold = {
            tuple(prompt): Foretold(prompt, answer, *drawn) for prompt, answer in zip(prompts, answers)
        }

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for what is proposed, by position in the sequence."""
        self._table = slots.tensor(slots.capacity + self.max_draft_tokens, fill=UNKNOWN)
        # Of each sequence, while it is what was foretold.
        self._current: list[Foretold | None] = slots.values(lambda: None)
        super().open(slots, target)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Looks the answer up, and begins the wrapped drafter's."""
        prompt = sequence.request.prompt
        foretold = self._current[slot] = self._foretold.get(tuple(prompt))
        self._table[slot] = UNKNOWN
        if foretold is not None:
            proposed = torch.from_numpy(foretold.tokens).to(self.device)
            self._table[slot, len(prompt) : len(prompt) + len(proposed)] = proposed
        self._compare(slot, 0, sequence.new_tokens)
        super().begin(slot, sequence, prefill)

    def draft(self, batch: Batch) -> Draft:
        """The wrapped drafter's draft with the oracle's tokens."""
        k = min(self.max_draft_tokens, batch.max_draft)
        if self.feeds:
            return self.inner.draft(batch)
        self._propose(batch)
        proposed = self._proposed[:, :k]
        draft = self.inner.draft(batch)
        if self._unknown is None:
            return replace(draft, tokens=proposed, candidates=None)
        unknown = self._unknown[:, :k]
        inner_tokens, missing = draft.tokens, k - draft.tokens.shape[1]
        counts = inner_tokens.shape[1] if draft.candidates is None else draft.candidates
        return replace(
            draft,
            tokens=torch.where(unknown, pad(inner_tokens, (0, missing)), proposed),
            candidates=k + unknown[:, 0] * (counts - k),
        )

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Forgets the answers that are no longer the known ones."""
        for slot, (one, new) in enumerate(zip(batch.sequences, verified.tokens)):
            self._compare(slot, one.emitted - len(new), new)
        super().commit(batch, verified)

    def _compare(self, slot: int, at: int, new: list[int]) -> None:
        """Forgets the known answer unless the new tokens, from place `at` on, are its own."""
        foretold = self._current[slot]
        if foretold is not None and foretold.answer[at : at + len(new)] != new:
            self._current[slot] = None
            self._table[slot] = UNKNOWN

    # -- the tokens of a draft

    def _propose(self, batch: Batch) -> None:
        """Looks up the tokens [b, k] of a draft; where `_unknown` [b, k], the wrapped drafter's own are proposed."""
        b, k = batch.size, self.max_draft_tokens
        if b == 1 and batch.kv_bucket is None:
            proposed = self._table[:1, batch.lengths[0] : batch.lengths[0] + k]
        else:
            proposed = self._table[:b].gather(1, span(batch.seq_lens, k))
        # A captured function must also cover an answer that leaves the reference later.
        surely = batch.kv_bucket is None and None not in self._current[:b]
        self._proposed, self._unknown, self._step = proposed, None if surely else proposed == UNKNOWN, 0

    def _next(self, inner_tokens: torch.Tensor) -> torch.Tensor:
        """The tokens [b] to propose in place of the wrapped drafter's own [b], each time at the next place."""
        j, self._step = self._step, self._step + 1
        if self._unknown is None:
            return self._proposed[:, j]
        return torch.where(self._unknown[:, j], inner_tokens, self._proposed[:, j])


def _fixed(config: dict, max_draft_tokens: int) -> dict[str, Any]:
    """Of a drafter's parameters those that make each draft this long, without a threshold at which it stops."""
    takes = inspect.signature(pkgutil.resolve_name(config["_target_"])).parameters
    fixed = {"max_draft_tokens": max_draft_tokens, "confidence_threshold": 0.0}
    return {key: value for key, value in fixed.items() if key in takes}
