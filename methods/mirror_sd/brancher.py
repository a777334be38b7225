"""The draft model's side of Mirror-SD: drafts for every likely decision of the target before it has decided.

All branches grow together, one token a pass, as nodes behind the tokens that are being verified; they share the keys
and values of what they have in common. The branch that the target decides for is moved to where its tokens belong,
the others are forgotten by being overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from methods.heads import DraftHead
from methods.mirror_sd.branches import Branches, likely_decisions
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Nodes, Target


@dataclass(frozen=True, slots=True)
class Plan:
    """depth: tokens of a draft. kappa: decisions guessed for each number of accepted tokens; most: of all; roots_only:
    for none accepted alone. from_draft: guess from the draft model's own distributions instead of the target's exit."""

    depth: int
    kappa: int
    most: int | None = None
    roots_only: bool = False
    from_draft: bool = False

    @property
    def widest(self) -> int:
        """The most branches there can be."""
        every = self.kappa if self.roots_only else self.kappa * (self.depth + 1)
        return every if self.most is None else min(self.most, every)


@dataclass(frozen=True, slots=True)
class Found:
    """A draft behind the target's decision: tokens [n]; probs: one [1, rows] for each, None when greedy.

    hit: whether it had been begun before the decision was known, None when nothing had. passes: of the draft model,
    those that drafted all branches together and those that drafted this one alone.
    """

    tokens: torch.Tensor
    probs: list[torch.Tensor | None]
    hit: bool | None
    passes: tuple[int, int]


def never() -> bool:
    return False


class Brancher:
    """Keeps the draft model's cache of one sequence at a time.

    head: the draft model's, trimmed or not. exit_head: the target's norm and head over the same rows, [n, d] ->
    [n, rows]; None when nothing is guessed from an exit.

    Everything before `_base` is settled; `_path` are the tokens behind it that the target verifies, of which the cache
    may lack the last.
    """

    def __init__(self, model: Target, head: DraftHead, exit_head: Callable | None, plan: Plan):
        self.model, self.head, self.exit_head, self.plan = model, head, exit_head, plan
        self.device = model.device
        self._cache = None

    @torch.inference_mode()
    def begin(self, prompt: torch.Tensor, room: int, temperature: float, seed: int) -> None:
        """A new sequence, of up to `room` tokens. prompt: [n], without the pending token, which is the first to settle.
        temperature, seed: of the draws; 0 takes the likeliest tokens."""
        plan = self.plan
        needed = room + (plan.depth + 1) * (plan.widest + 1)
        if self._cache is None or self._cache.capacity < needed:
            self._cache = self.model.new_cache(needed)
        self._cache.truncate(0)
        self._decoding = Decoding(1, temperature)
        self._generator = None if self._decoding.greedy else torch.Generator(self.device).manual_seed(seed)
        self._base, self._path = prompt.shape[0], prompt[:0]
        self._rows, self._logits = self._path, []  # of the path: rows of the head, logits before each token
        self._forget()
        self._draw()
        self.model.run_layers(self.model.embed(prompt.unsqueeze(0)), self._cache)

    @torch.inference_mode()
    def expand(
        self, k: int, depth: int, states: torch.Tensor | None, known: Callable[[], bool] = never
    ) -> None:
        """The first `k` tokens of the draft are being verified: up to `depth` tokens behind each likely decision.

        states: [1 + k, d] of the target at its exit. known: asked before every pass; once the decision is known there
        is no sense in going on with all branches.
        """
        base, device = self._base, self.device
        self._path, self._rows = self._path[:k], self._rows[:k]
        self._cache.truncate(base + k)
        fed = self._cache.lengths[0] - base
        tail = self._path[fed:]
        if self.plan.from_draft:
            tail_logits = self._guess_from_draft(fed, tail)
            logits, tail = torch.cat([*self._logits[: k + 1 - len(tail_logits)], *tail_logits]), tail[:0]
        else:
            logits = self.exit_head(states)
        found = likely_decisions(logits, self._rows, self.plan.kappa, self.plan.most, self.plan.roots_only)
        tokens = found.tokens if self.head.kept is None else self.head.kept[found.tokens]
        self._branches = Branches(found.accepted, tokens)
        m, n = tokens.shape[0], tail.shape[0]
        before = torch.arange(k, device=device)
        prefix = before < found.accepted.unsqueeze(1)
        own = torch.eye(m, dtype=torch.bool, device=device)
        # The first pass takes the last draft token along, if the draft model has not seen it yet.
        feed = torch.cat([tail, tokens])
        seen = torch.cat([prefix, own], dim=1)
        if n:
            first = torch.cat([before <= before[k - n :].unsqueeze(1), own.new_zeros(n, m)], dim=1)
            seen = torch.cat([first, seen])
        offsets = torch.cat([before, found.accepted])
        for step in range(depth):
            if known():
                break
            hidden = self.model.run_layers(
                self.model.embed(feed.unsqueeze(0)), self._cache, nodes=Nodes(offsets, seen)
            )
            logits = self.head.logits(self.model.norm(hidden[0, -m:]))
            self._grown.append(self._choose(logits, step))
            feed = self._grown[-1][0]
            offsets = torch.cat([offsets, found.accepted + (step + 1)])
            seen = torch.cat([prefix, *[own] * (step + 2)], dim=1)
        if self._grown:
            self._index = self._branches.index()

    @torch.inference_mode()
    def settle(
        self, accepted: int, following: int, limit: int, unwanted: Callable[[], bool] = never
    ) -> Found:
        """The target kept `accepted` tokens of the draft and says `following`: the next draft, of up to `limit` tokens.

        unwanted: asked before every pass; if true the draft is given up and what is returned is of no use.
        """
        k, at = self._path.shape[0], self._base + accepted
        branch = self._index.get((accepted, following))
        hit = None if self._branches is None else branch is not None
        tokens, probs, rows, logits = [], [], [], []
        if branch is not None:
            m, done = self._branches.tokens.shape[0], len(self._grown)
            steps = torch.arange(done, device=self.device)
            self._cache.keep(at, (k - accepted) + branch + m * steps)
            for token, row, q, logit in self._grown:
                tokens.append(token[branch : branch + 1])
                rows.append(row[branch : branch + 1])
                probs.append(None if q is None else q[branch : branch + 1])
                logits.append(logit[branch : branch + 1])
            feed = tokens[-1]
        else:
            self._cache.truncate(at)
            token = torch.tensor([following], device=self.device)
            feed = torch.cat([self._path[self._cache.lengths[0] - self._base : accepted], token])
        limit = min(limit, self.plan.depth)
        begun = len(tokens)
        while len(tokens) < limit and not unwanted():
            hidden = self.model.run_layers(self.model.embed(feed.unsqueeze(0)), self._cache)
            logit = self.head.logits(self.model.norm(hidden[0, -1:]))
            token, row, q, _ = self._choose(logit, len(tokens))
            tokens.append(token)
            rows.append(row)
            probs.append(q)
            logits.append(logit)
            feed = token
        self._base = at + 1
        self._path = torch.cat(tokens[:limit]) if tokens[:limit] else self._path[:0]
        self._rows = torch.cat(rows[:limit]) if rows[:limit] else self._rows[:0]
        self._logits = logits[: limit + 1]
        together = len(self._grown)
        self._forget()
        self._draw()
        return Found(self._path, probs[:limit], hit, (together, len(tokens) - begun))

    def _choose(self, logits: torch.Tensor, step: int) -> tuple:
        """Logits [n, rows] -> tokens [n], their rows [n], their distributions, and the logits themselves."""
        uniforms = None if self._uniforms is None else self._uniforms[step].expand(logits.shape[0])
        rows, probs = self._decoding.select(logits, uniforms=uniforms)
        tokens = rows if self.head.kept is None else self.head.kept[rows]
        return tokens, rows, probs, logits

    def _guess_from_draft(self, fed: int, tail: torch.Tensor) -> list[torch.Tensor]:
        """Logits [1, rows] behind the last draft token, which then is fed; none if it has been."""
        if not tail.shape[0]:
            return []
        hidden = self.model.run_layers(self.model.embed(tail.unsqueeze(0)), self._cache)
        return [self.head.logits(self.model.norm(hidden[0]))]

    def _forget(self) -> None:
        self._branches, self._index, self._grown = None, {}, []

    def _draw(self) -> None:
        """The numbers that the next draft is drawn with, one for each of its tokens. All branches share them: only one
        comes true, and which one does not depend on them."""
        self._uniforms = None
        if self._generator is not None:
            self._uniforms = torch.rand(self.plan.depth, generator=self._generator, device=self.device)
