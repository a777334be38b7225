"""An oracle: real draft passes at a chosen acceptance, to find the acceptance at which speculation pays off.

It wraps another drafter. The passes of that one take their real time, but the tokens that come out of them are the
oracle's: the target's own next token with the chosen probability, else another one. A drafter with a head gets its
tokens there, so that it goes on from them: its cache, and the states that it may hand to the verification, belong to
the tokens that are verified. The target's own answers are known beforehand (`Drafter.foretell`); they are verified and
certified like those of any method.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
import torch
from torch.nn.functional import pad

from specbench.decoding.draft import Context, Draft, Drafter, Needs
from specbench.decoding.rows import span
from specbench.errors import UserError
from specbench.pairs import Pair
from specbench.values import Count, Probability, Seed, parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specbench.decoding.batch import Rows
    from specbench.decoding.kv_cache import KVCache, RowCache
    from specbench.decoding.target import Prefill, Target

UNKNOWN = -1  # in place of a token: the wrapped drafter's own is proposed


class Foretold:
    """What is proposed for an answer that is known: one token for each of its positions, drawn once.

    Args:
        prompt: token ids.
        answer: the target's own new token ids.
        acceptance: probability of the target's own token, independent at each position.
        vocab_size: ids of which a wrong token is one.
        seed: with the prompt, of the draws: every repeat, draft length and scheduler gets the same ones.
        spare: arbitrary tokens behind the end of the answer, so that the last draft is as long as the others.
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
        own = np.array([*answer, *[0] * spare], dtype=np.int64)
        others = (own + 1 + (draws[:, 1] * (vocab_size - 1)).astype(np.int64)) % vocab_size
        self.answer = answer
        self.right = (draws[:, 0] < acceptance).tolist()
        self.tokens = np.where(self.right, own, others)


class OracleHead:
    """The head of a drafter, whose choices give way to the oracle's. Everything else is the head's own.

    Args:
        head: the head.
        instead: the tokens [n] to propose in place of the chosen ones [n].
    """

    def __init__(self, head: Any, instead: Callable[[torch.Tensor], torch.Tensor]):
        self._head, self._instead = head, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def choose(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the head chooses, which takes its time; then the oracle's tokens."""
        tokens, probs = self._head.choose(*args, **kwargs)
        return self._instead(tokens), probs


class Oracle(Drafter):
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

    needs = Needs(sampling=False, batching=True, continuation=True)

    def __init__(
        self,
        pair: Pair,
        drafter: dict,
        acceptance: Probability = 0.8,
        cost_of: str = "sps",
        max_draft_tokens: Count = 5,
        seed: Seed = 0,
    ):
        self.inner = _wrapped(pair, drafter, max_draft_tokens)
        if self.inner.tree_nodes or self.inner.launch_layer is not None:
            raise UserError(f"the oracle proposes chains in turn with the target, which {cost_of} does not")
        self.needs = self.needs.around(self.inner.needs)
        self.taps = self.inner.taps
        self.max_draft_tokens = max_draft_tokens
        self.acceptance, self.vocab_size, self.seed = acceptance, pair.vocab_size, seed
        self.device = pair.device
        self.feeds = hasattr(self.inner, "head")  # whether the wrapped drafter goes on from what is proposed
        if self.feeds:
            self.inner.head = OracleHead(self.inner.head, self._next)  # type: ignore[attr-defined]
        self._foretold: dict[tuple[int, ...], Foretold] = {}
        self._known: Foretold | None = (
            None  # of the sequence that is decoded alone, while it is what was foretold
        )

    def foretell(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Draws what will be proposed."""
        drawn = (self.acceptance, self.vocab_size, self.seed, self.max_draft_tokens)
        self._foretold = {
            tuple(prompt): Foretold(prompt, answer, *drawn) for prompt, answer in zip(prompts, answers)
        }

    # -- one sequence

    def begin(self, context: Context, prefill: Prefill, target: Target, cache: KVCache) -> None:
        """Looks the answer up, and begins the wrapped drafter's."""
        prompt = context.known()[:-1].tolist()
        self._prompt_length = len(prompt)
        self._known = self._foretold.get(tuple(prompt))
        if self._known is not None:
            self._tokens = torch.from_numpy(self._known.tokens).to(self.device)
        self._compare(0, 0, context.following)
        self.inner.begin(context, prefill, target, cache)

    def draft(self, context: Context) -> Draft:
        """The wrapped drafter's draft with the oracle's tokens."""
        self._at = context.length - self._prompt_length
        k = min(self.max_draft_tokens, context.max_draft)
        proposed = None if self._known is None else self._tokens[self._at : self._at + k]
        self._propose(proposed)
        draft = self.inner.draft(context)
        return draft if self.feeds or proposed is None else replace(draft, tokens=proposed)

    def commit(self, context: Context, accepted: int) -> None:
        """Notes whether the answer is still the known one."""
        self._compare(self._at, accepted, context.following)
        self.inner.commit(context, accepted)

    def end(self) -> None:
        """Ends the wrapped drafter's answer."""
        self.inner.end()

    def close(self) -> None:
        """Releases what the wrapped drafter keeps."""
        self.inner.close()

    def _compare(self, at: int, accepted: int, following: int) -> None:
        """Forgets the known answer unless the tokens from place `at` on, and the one that follows, are its own."""
        known, place = self._known, at + accepted
        if known is None or (known.answer[place : place + 1] == [following] and all(known.right[at:place])):
            return
        self._known = None

    # -- many sequences

    def open_rows(self, rows: int, capacity: int, target: Target, cache: RowCache) -> None:
        """Makes room for the known answers, by position in the sequence, and for what is proposed of them."""
        shape = (rows, capacity + self.max_draft_tokens)
        self._answers = torch.full(shape, UNKNOWN, dtype=torch.int64, device=self.device)
        self._table = self._answers.clone()
        self.inner.open_rows(rows, capacity, target, cache)

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target: Target) -> None:
        """Looks the answer up, and begins the wrapped drafter's."""
        ids, n = prompt[0].tolist(), prompt.shape[1]
        self._answers[row], self._table[row] = UNKNOWN, UNKNOWN
        if (known := self._foretold.get(tuple(ids))) is not None:
            self._answers[row, n : n + len(known.answer)] = torch.tensor(known.answer, device=self.device)
            self._table[row, n : n + len(known.tokens)] = torch.from_numpy(known.tokens).to(self.device)
        self.inner.begin_row(row, prompt, prefill, target)

    def draft_rows(self, rows: Rows) -> Draft:
        """The wrapped drafter's draft with the oracle's tokens."""
        k = min(self.max_draft_tokens, rows.max_draft)
        proposed = self._table[: rows.known.shape[0]].gather(1, span(rows.known, k))
        unknown = proposed == UNKNOWN
        self._propose(proposed, unknown)
        draft = self.inner.draft_rows(rows)
        if self.feeds:
            return draft
        own, missing = draft.tokens, k - draft.tokens.shape[1]
        counts = torch.full_like(rows.known, own.shape[1]) if draft.counts is None else draft.counts
        return replace(
            draft,
            tokens=torch.where(unknown, pad(own, (0, missing)), proposed),
            counts=torch.where(unknown[:, 0], counts, k),
        )

    def commit_rows(self, rows: Rows, accepted: torch.Tensor) -> None:
        """Forgets the answers that are no longer the known ones."""
        b, k = rows.known.shape[0], min(self.max_draft_tokens, rows.max_draft)
        # From the pending token of the round to the one that follows the draft.
        places = span(rows.known - 1, k + 2).clamp(max=rows.tokens.shape[1] - 1)
        said, known = rows.tokens[:b].gather(1, places), self._answers[:b].gather(1, places)
        new = places <= (rows.known + accepted).unsqueeze(1)
        left = (new & (known != UNKNOWN) & (said != known)).any(1, keepdim=True)
        self._table[:b].masked_fill_(left, UNKNOWN)
        self.inner.commit_rows(rows, accepted)

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Moves the answers and what belongs to the wrapped drafter's sequences."""
        self._answers[destinations] = self._answers[sources]
        self._table[destinations] = self._table[sources]
        self.inner.move_rows(sources, destinations, reach)

    # -- the tokens of a draft

    def _propose(self, tokens: torch.Tensor | None, unknown: torch.Tensor | None = None) -> None:
        """Sets the tokens of the next draft.

        Args:
            tokens: [k], in a batch [b, k]; None: the wrapped drafter's own.
            unknown: in a batch [b, k], where the wrapped drafter's own are proposed.
        """
        self._proposed, self._unknown, self._step = tokens, unknown, 0

    def _next(self, own: torch.Tensor) -> torch.Tensor:
        """The tokens [n] to propose in place of the wrapped drafter's own [n], each time at the next place."""
        if self._proposed is None:
            return own
        j, self._step = self._step, self._step + 1
        if self._unknown is None:
            return self._proposed[j : j + 1]
        return torch.where(self._unknown[:, j], own, self._proposed[:, j])


def _wrapped(pair: Pair, config: dict, max_draft_tokens: int) -> Drafter:
    """The drafter of a configuration, with this draft length and without a threshold at which it stops."""
    cls = hydra.utils.get_class(config["_target_"])
    takes = inspect.signature(cls).parameters
    fixed = {"max_draft_tokens": max_draft_tokens, "confidence_threshold": 0.0}
    given = parameters(config) | {key: value for key, value in fixed.items() if key in takes}
    return cls(pair=pair, **given)
