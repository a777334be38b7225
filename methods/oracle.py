"""An oracle: real draft passes at a chosen acceptance, to find the acceptance at which speculation pays off.

It wraps another drafter, whose passes take their real time. The tokens that come out of them are the oracle's: the
target's own next token with the chosen probability, else another one. The probability may depend on the token's
position in the draft, so that a published acceptance can be timed without its drafter. If the drafter has a head, the
oracle's tokens replace the head's choices, and the drafter continues from them: its cache, and the states that it may
hand to the verification, belong to the tokens that are verified. The target's own answers are known beforehand
(`Drafter.set_reference_answers`); the oracle's are verified and certified like those of any method.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from specbench.config.spec import make_drafter
from specbench.decoding.device import on_device
from specbench.decoding.drafter import Needs
from specbench.decoding.wrapped import WrappedDrafter
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count, Positive, Probability, Seed

if TYPE_CHECKING:
    from methods.common.heads import Chosen
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.slots import Slots
    from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified

UNKNOWN = -1  # in place of a token: the wrapped drafter's own is proposed


class Foretold:
    """What may be proposed for a known answer, drawn once for each of its positions.

    Args:
        prompt: token ids.
        answer: the target's own new token ids.
        vocab_size: ids among which a wrong token is chosen.
        seed: of the draws, with the prompt: the same for every repeat, draft length and scheduler.
        spare: arbitrary tokens after the end of the answer, so that the last draft is as long as the others.

    Attributes:
        right: [n] the target's own token at each position.
        wrong: [n] another one.
        draws: [n] numbers in [0, 1): the right one is proposed if the acceptance at its place in the draft is higher.
    """

    def __init__(self, prompt: list[int], answer: list[int], vocab_size: int, seed: int, spare: int):
        draws = np.random.default_rng([seed, *prompt]).random((len(answer) + spare, 2))
        self.answer = answer
        self.right = np.array([*answer, *[0] * spare], dtype=np.int64)
        self.wrong = (self.right + 1 + (draws[:, 1] * (vocab_size - 1)).astype(np.int64)) % vocab_size
        self.draws = draws[:, 0]


class OracleHead:
    """The head of a drafter whose choices the oracle replaces. Everything else is the head's own.

    Args:
        head: the head.
        instead: (batch, place in the draft, chosen tokens [b]) -> tokens [b] to propose instead.
    """

    def __init__(self, head: Any, instead: Callable[[Batch, int, torch.Tensor], torch.Tensor]):
        self._head, self._instead = head, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def choose(
        self, logits: torch.Tensor, batch: Batch, place: int, candidates: torch.Tensor | None = None
    ) -> Chosen:
        """Lets the head choose, which takes its time; returns the oracle's tokens."""
        tokens, probs = self._head.choose(logits, batch, place, candidates)
        return self._instead(batch, place, tokens), probs


class Oracle(WrappedDrafter):
    """Drafts tokens of a chosen acceptance at the cost of another drafter.

    If an answer is not known, or has left the known one (after a near-tie), the wrapped drafter's own tokens are
    proposed.

    Args:
        pair: with what the wrapped drafter needs.
        drafter: configuration of the wrapped drafter. Its draft length becomes `max_draft_tokens`, and it never stops
            early.
        acceptance: probability that a draft token is accepted if all before it in the draft were. Or, for each position
            in a draft, the share of drafts whose token there is accepted, as engines print it; 0 at further positions.
        acceptance_length: the mean number of tokens per target pass, instead of `acceptance`; spread as evenly as
            possible: every draft has one of two neighbouring numbers of accepted tokens.
        cost_of: name of the wrapped drafter.
        max_draft_tokens: draft length, shorter only if the answer has less room.
        seed: of the draws.

    Raises:
        UserError: the wrapped drafter drafts trees, or works during verification; the shares by position increase; the
            length is more than a draft can give.
    """

    needs = Needs(sampling=False, reference_answer=True)
    fixes = ("max_draft_tokens", "confidence_threshold")

    def __init__(
        self,
        pair: Pair,
        drafter: dict,
        acceptance: Probability | list[Probability] = 0.8,
        acceptance_length: Positive | None = None,
        cost_of: str = "sps",
        max_draft_tokens: Count = 5,
        seed: Seed = 0,
    ):
        super().__init__(make_drafter(drafter, pair=pair, **_fixed(drafter, max_draft_tokens)))
        brings_its_own = not self.inner.needs.any_length  # such drafts are made out of the oracle's reach
        if self.inner.max_nodes or self.inner.overlaps_verification() or brings_its_own:
            raise UserError(f"the oracle proposes chains in turn with the target, which {cost_of} does not")
        self.max_draft_tokens = max_draft_tokens
        shares = acceptance if acceptance_length is None else evenly(acceptance_length, max_draft_tokens)
        self.rates = rates_by_place(shares, max_draft_tokens)
        self.vocab_size, self.seed, self.device = pair.vocab_size, seed, pair.device
        self.feeds = hasattr(self.inner, "head")  # whether the inner drafter continues from what is proposed
        if self.feeds:
            self.inner.head = OracleHead(self.inner.head, self._next)  # type: ignore[attr-defined]
        self._foretold: dict[tuple[int, ...], Foretold] = {}

    def set_reference_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Draws what will be proposed."""
        self._foretold = {
            tuple(prompt): Foretold(prompt, answer, self.vocab_size, self.seed, self.max_draft_tokens)
            for prompt, answer in zip(prompts, answers)
        }

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Makes room for what may be proposed, by position in the sequence."""
        size = slots.capacity + self.max_draft_tokens
        self._right, self._wrong = slots.tensor(size, fill=UNKNOWN), slots.tensor(size)
        self._draws = slots.tensor(size, dtype=torch.float64)
        self._rates = torch.tensor(self.rates, dtype=torch.float64, device=slots.device)
        # Of each sequence, until it leaves the known answer.
        self._current: list[Foretold | None] = slots.values(lambda: None)
        super().open(slots, target)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Looks up the answer, and begins the wrapped drafter's sequence."""
        prompt = sequence.request.prompt
        foretold = self._current[slot] = self._foretold.get(tuple(prompt))
        self._right[slot] = UNKNOWN
        if foretold is not None:
            places = slice(len(prompt), len(prompt) + len(foretold.right))
            for table, values in zip(self._tables, (foretold.right, foretold.wrong, foretold.draws)):
                table[slot, places] = on_device(values, self.device, table.dtype)
        self._compare(slot, 0, sequence.new_tokens)
        super().begin(slot, sequence, prefill)

    def draft(self, batch: Batch) -> Draft:
        """The wrapped drafter's draft with the oracle's tokens."""
        k = batch.max_draft
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
        """Forgets known answers that sequences have left."""
        for slot, (one, new) in enumerate(zip(batch.sequences, verified.tokens)):
            self._compare(slot, one.emitted - len(new), new)
        super().commit(batch, verified)

    def _compare(self, slot: int, at: int, new: list[int]) -> None:
        """Forgets the known answer unless the new tokens, from place `at` on, are its own."""
        foretold = self._current[slot]
        if foretold is not None and foretold.answer[at : at + len(new)] != new:
            self._current[slot] = None
            self._right[slot] = UNKNOWN

    @property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        """[slots, positions] of right tokens, wrong tokens and draws."""
        return self._right, self._wrong, self._draws

    # -- the tokens of a draft

    def _propose(self, batch: Batch) -> None:
        """Looks up the tokens [b, k] of a draft; where `_unknown` [b, k], the wrapped drafter's own are proposed."""
        right, wrong, draws = (batch.window(table, 0, self.max_draft_tokens) for table in self._tables)
        # A captured function must also cover an answer that leaves the reference later.
        surely = batch.kv_bucket is None and None not in self._current[: batch.size]
        self._proposed = torch.where(draws < self._rates, right, wrong)
        self._unknown = None if surely else right == UNKNOWN

    def _next(self, batch: Batch, place: int, inner_tokens: torch.Tensor) -> torch.Tensor:
        """The tokens [b] to propose at a place of the draft, in place of the wrapped drafter's own [b]."""
        if place == 0:
            self._propose(batch)
        if self._unknown is None:
            return self._proposed[:, place]
        return torch.where(self._unknown[:, place], inner_tokens, self._proposed[:, place])


def rates_by_place(acceptance: float | Sequence[float], places: int) -> list[float]:
    """Returns the probability, by place in a draft, that a token is accepted if all before it were.

    Args:
        acceptance: of every place; or the shares of drafts whose token at each place is accepted.
        places: of a draft.

    Raises:
        UserError: a share is larger than the one before it.
    """
    if isinstance(acceptance, int | float):
        return [float(acceptance)] * places
    shares = [1.0, *acceptance, *[0.0] * places]
    if any(after > before for before, after in pairwise(shares)):
        raise UserError(
            f"acceptance by place is the share of drafts that get so far: {[*acceptance]} may not rise"
        )
    return [after / before if before else 0.0 for before, after in pairwise(shares[: places + 1])]


def evenly(length: float, places: int) -> list[float]:
    """Shares by place of a given acceptance length, with least variance. Raises UserError if drafts cannot have it."""
    if not 1 <= length <= 1 + places:
        raise UserError(
            f"acceptance_length={length} must lie between 1 and {1 + places} for drafts of {places} tokens"
        )
    return [min(1.0, max(0.0, length - 1 - place)) for place in range(places)]


def _fixed(config: dict, max_draft_tokens: int) -> dict[str, Any]:
    """Returns parameters of a drafter that make each draft this long, without a threshold to stop at."""
    takes = inspect.signature(pkgutil.resolve_name(config["_target_"])).parameters
    fixed = {"max_draft_tokens": max_draft_tokens, "confidence_threshold": 0.0}
    return {key: value for key, value in fixed.items() if key in takes}
