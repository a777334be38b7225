"""The draft model's side of Mirror-SD: drafts for every likely decision of the target before it has decided.

All branches grow together, in one pass at a time, as nodes behind the tokens that are being verified; they share the
keys and values of what they have in common. The branch that the target decides for is moved to where its tokens belong,
the others are forgotten by being overwritten.

With speculative streaming (Bhendawade et al. 2024) a pass also guesses the tokens further on, from stream states that
see what the token sees which they belong to. The next pass vets them: a guess stays if it is what the draft model says
itself, so that streams change how many passes a draft takes and nothing about the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from methods.mirror_sd.branches import Branches, likely_decisions, mixture, prefix_products
from methods.mirror_sd.growth import Growth, Written, joined
from specbench.decoding.sampling import Decoding, likeliest
from specbench.decoding.target import Nodes, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from methods.heads import DraftHead


@dataclass(frozen=True, slots=True)
class Plan:
    """depth: tokens of a draft. kappa: decisions guessed for each number of accepted tokens; most: of all; roots_only:
    for none accepted alone. guesses: from the target's "exit", from the "draft" model's own distributions, from the
    mean of "both", or "none" at all: then every draft is made behind the decision, as in plain speculative sampling.
    floor: decisions less likely than this are not drafted behind.
    """

    depth: int
    kappa: int
    most: int | None = None
    roots_only: bool = False
    guesses: str = "exit"
    floor: float = 0.0

    @property
    def widest(self) -> int:
        """The most branches there can be."""
        every = self.kappa if self.roots_only else self.kappa * (self.depth + 1)
        return max(1, every if self.most is None else min(self.most, every))


@dataclass(frozen=True, slots=True)
class Found:
    """A draft behind the target's decision: tokens [n]; probs: [n, rows] that they were drawn from, None when greedy.

    hit: whether it had been begun before the decision was known, None when nothing had. passes: of the draft model,
    those that drafted all branches together and those that drafted this one alone.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    hit: bool | None
    passes: tuple[int, int]


def never() -> bool:
    return False


class Brancher:
    """Keeps the draft model's cache of one sequence at a time.

    head: the draft model's, trimmed or not. exit_head: the target's norm and head, [n, d] -> [n, vocab]; None
    when nothing is guessed from an exit. streams: [s, d] embeddings of stream states; None for none.

    Everything before `_base` is settled; `_path` are the tokens behind it that the target verifies, of which the cache
    may lack the last.
    """

    def __init__(
        self,
        model: Target,
        head: DraftHead,
        exit_head: Callable | None,
        plan: Plan,
        streams: torch.Tensor | None = None,
    ):
        self.model, self.head, self.exit_head, self.plan = model, head, exit_head, plan
        self.device = model.device
        self.streams = torch.empty(0, model.hidden_size, device=self.device) if streams is None else streams
        # Numbers to draw with: for the longest draft, the token behind it, guesses, and one that nobody needs.
        self._width = plan.depth + 2 + self.streams.shape[0]
        self._cache = None

    @torch.inference_mode()
    def begin(self, prompt: torch.Tensor, room: int, temperature: float, seed: int) -> None:
        """A new sequence, of up to `room` tokens. prompt: [n], without the pending token, which is the first to settle.
        temperature, seed: of the draws; 0 takes the likeliest tokens.
        """
        s = self.streams.shape[0]
        needed = room + 2 * (self.plan.depth + 2 + s) * (1 + s) * (self.plan.widest + 1)
        if self._cache is None or self._cache.capacity < needed:
            self._cache = self.model.new_cache(needed)
        self._cache.truncate(0)
        self._decoding = Decoding(1, temperature)
        self._generator = None if self._decoding.greedy else torch.Generator(self.device).manual_seed(seed)
        self._base, self._path, self._rows, self._own = prompt.shape[0], prompt[:0], prompt[:0], None
        self._forget()
        self._draw()
        self.model.run_layers(self.model.embed(prompt.unsqueeze(0)), self._cache)

    @torch.inference_mode()
    def foresee(self) -> None:
        """Feeds the last draft token, so that the draft model's own logits are known behind every one. It is time that
        the draft's side has while the target is on its way to the exit.
        """
        behind = self._path[self._cache.lengths[0] - self._base :]
        if behind.shape[0] and self.plan.guesses != "none":
            hidden = self.model.run_layers(self.model.embed(behind.unsqueeze(0)), self._cache)
            logits = self.head.logits(self.model.norm(hidden[0, -1:]))
            self._own = torch.cat([self._own[: self._path.shape[0]], logits])

    @torch.inference_mode()
    def expand(self, k: int, depth: int, states: torch.Tensor, known: Callable[[], bool] = never) -> None:
        """The first `k` tokens of the draft are being verified: up to `depth` tokens behind each likely decision.

        states: [1 + k, d] of the target at its exit, which the draft model's own guesses do without. known: asked
        before every pass; once the decision is known there is no sense in going on with all branches.
        """
        self.foresee()
        self._path, self._rows = self._path[:k], self._rows[:k]
        found = self._guess(self._own[: k + 1], states)
        self._cache.truncate(self._base + k)
        columns = torch.arange(k, device=self.device)
        seen = columns < found.accepted.unsqueeze(1)
        growth = self._growth = self._sprout(
            self._base, found.tokens, found.accepted, seen, columns, columns[:0]
        )
        while not self._grown(growth, depth) and not known():
            self._grow(growth)
        self._index = found.index()

    @torch.inference_mode()
    def settle(
        self, accepted: int, following: int, limit: int, unwanted: Callable[[], bool] = never
    ) -> Found:
        """The target kept `accepted` tokens of the draft and says `following`: the next draft, of up to `limit` tokens.

        unwanted: asked before every pass; if true the draft is given up, nothing is returned, and the next that can be
        asked is `begin`.
        """
        at, limit = self._base + accepted, min(limit, self.plan.depth)
        branch = self._index.get((accepted, following))
        # Where there was no time for a pass nothing is written.
        written = [] if branch is None else self._growth.of(branch)
        hit, together = (None, 0) if self._growth is None else (bool(written), self._growth.passes)
        if written:
            growth = self._pick(branch, written, accepted, at)
        else:
            self._cache.truncate(at)
            fed = self._cache.lengths[0]
            ahead = self._path[fed - self._base : accepted]
            columns = torch.arange(ahead.shape[0], device=self.device)
            root = torch.tensor([following], device=self.device)
            seen = (columns >= 0).unsqueeze(0) if self.streams.shape[0] else None
            growth = self._sprout(fed, root, root * 0 + ahead.shape[0], seen, columns, ahead)
        begun = growth.passes
        while not self._grown(growth, limit):
            if unwanted():
                return Found(self._path[:0], None, hit, (together, growth.passes - begun))
            self._grow(growth)
        if growth.seen is not None:  # of the guesses that did not come true nothing may stay
            self._cache.keep(growth.base, growth.seen[0].nonzero().squeeze(1))
        self._base = at + 1
        tokens, rows, self._own = joined(growth.written)
        self._path, self._rows = tokens[:limit], rows[:limit]
        probs = None if self._decoding.greedy else self._decoding.probs(self._own[:limit])
        self._forget()
        self._draw()
        return Found(self._path, probs, hit, (together, growth.passes - begun))

    # -- growing

    def _sprout(self, base: int, roots: torch.Tensor, offsets, seen, columns, ahead) -> Growth:
        """Continuations behind the tokens `roots` [m]; the rest as in `Growth`."""
        return Growth(base, roots, offsets, roots.unsqueeze(1)[:, :0], seen, columns, ahead, [], offsets * 0)

    def _grown(self, growth: Growth, depth: int) -> bool:
        """Whether every continuation has `depth` tokens."""
        if not self.streams.shape[0]:
            return growth.passes >= depth  # known without a look at the device
        return int(growth.counts.min()) >= depth

    def _grow(self, growth: Growth) -> None:
        """One pass: each continuation gets the draft model's next token, and as many more as its guesses come true."""
        growth.passes += 1
        if not self.streams.shape[0]:
            self._grow_by_one(growth)
            return
        model, cache, s = self.model, self._cache, self.streams.shape[0]
        (m, w), n = growth.guesses.shape, growth.ahead.shape[0]
        v = 1 + w  # tokens of each continuation that are fed: the newest and the guesses
        fed = torch.cat([growth.newest.unsqueeze(1), growth.guesses], dim=1)
        steps = torch.arange(v, device=self.device)
        offsets = growth.offsets.unsqueeze(1) + steps
        own = torch.eye(m, dtype=torch.bool, device=self.device)
        among = steps <= steps.unsqueeze(1)  # [v, v]: a token sees those fed in front of it, and itself
        columns = torch.cat([growth.columns, offsets.flatten()])
        seen = torch.cat(
            [
                growth.seen.repeat_interleave(v, 0),
                (own[:, None, :, None] & among[None, :, None, :]).reshape(m * v, m * v),
            ],
            dim=1,
        )
        hidden = model.embed(torch.cat([growth.ahead, fed.flatten()]).unsqueeze(0))
        rows_seen = seen
        if n:
            before = growth.columns[-n:].unsqueeze(1) >= growth.columns
            rows_seen = torch.cat([torch.cat([before, own.new_zeros(n, m * v)], dim=1), seen])
        hidden, rows_seen, all_columns = self._with_streams(hidden, n, offsets, seen, rows_seen, columns)
        start = cache.lengths[0]
        hidden = model.run_layers(hidden, cache, nodes=Nodes(all_columns, rows_seen))[0]
        cache.truncate(start + n + m * v)  # streams leave nothing behind
        logits = self.head.logits(model.norm(hidden[n : n + m * v])).view(m, v, -1)
        rows, tokens = self._choose(growth, logits)
        right = (growth.guesses == tokens[:, :w]).long().cumprod(1).sum(1)  # [m] guesses that came true
        kept = own.unsqueeze(2) & (steps <= right.unsqueeze(1)).unsqueeze(1)
        growth.seen = torch.cat([growth.seen, kept.reshape(m, m * v)], dim=1)
        growth.columns, growth.ahead = columns, growth.ahead[:0]
        growth.newest = tokens.gather(1, right.unsqueeze(1)).squeeze(1)
        last = torch.arange(m, device=self.device) * v + right
        states = hidden[n + m * v :].view(m * v, s, -1)[last]
        growth.guesses = self.head.ids(likeliest(self.head.logits(model.norm(states))))
        growth.written.append(Written(tokens, rows, logits, right + 1))
        growth.counts = growth.counts + right + 1
        growth.offsets = growth.offsets + right + 1

    def _grow_by_one(self, growth: Growth) -> None:
        """The same without streams: one token each."""
        feed, nodes, m = torch.cat([growth.ahead, growth.newest]), None, growth.newest.shape[0]
        if growth.seen is not None:  # several: they have been looked ahead for, so that none is behind
            own = torch.eye(m, dtype=torch.bool, device=self.device)
            growth.seen = torch.cat([growth.seen, own], dim=1)
            growth.columns = torch.cat([growth.columns, growth.offsets])
            nodes = Nodes(growth.columns, growth.seen)
        hidden = self.model.run_layers(self.model.embed(feed.unsqueeze(0)), self._cache, nodes=nodes)[0, -m:]
        logits = self.head.logits(self.model.norm(hidden)).unsqueeze(1)
        rows, tokens = self._choose(growth, logits)
        growth.written.append(Written(tokens, rows, logits, None))
        growth.newest, growth.ahead = tokens[:, 0], growth.ahead[:0]
        growth.counts, growth.offsets = growth.counts + 1, growth.offsets + 1

    def _with_streams(self, hidden, n: int, offsets, seen, rows_seen, columns) -> tuple:
        """Adds s stream states for each of the m * v tokens: hidden [1, n + m v (1 + s), d], who sees whom, columns.

        Stream j of a token starts as its embedding plus that of the stream, stands j positions behind it, and sees what
        the token sees and the streams 1 to j of the same token (eq. 2).
        """
        s, count = self.streams.shape[0], seen.shape[0]
        streams = (hidden[0, n:].unsqueeze(1) + self.streams).flatten(0, 1)
        steps = torch.arange(s, device=self.device)
        among = torch.eye(count, dtype=torch.bool, device=self.device)[:, None, :, None]
        among = (among & (steps <= steps.unsqueeze(1))[None, :, None, :]).reshape(count * s, count * s)
        below = torch.cat([seen.repeat_interleave(s, 0), among], dim=1)
        above = torch.cat([rows_seen, among.new_zeros(rows_seen.shape[0], count * s)], dim=1)
        places = (offsets.flatten().unsqueeze(1) + steps + 1).flatten()
        return (
            torch.cat([hidden, streams.unsqueeze(0)], dim=1),
            torch.cat([above, below]),
            torch.cat([columns, places]),
        )

    def _pick(self, branch: int, written: list[Written], accepted: int, at: int) -> Growth:
        """The branch that came true, moved to where its tokens belong, as a growth of its own."""
        growth = self._growth
        nodes = growth.seen[branch].nonzero().squeeze(1)[accepted:]
        self._cache.keep(at, nodes - accepted)
        own = slice(branch, branch + 1)
        none = growth.columns[:0]
        return Growth(
            at + nodes.shape[0],
            growth.newest[own],
            none.new_zeros(1),
            growth.guesses[own],
            growth.seen[own, :0] if self.streams.shape[0] else None,
            none,
            none,
            written,
            growth.counts[own],
            growth.passes,
        )

    def _choose(self, growth: Growth, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From logits [m, v, rows] the next v tokens of each continuation, [m, v], as rows and as ids."""
        m, v, _ = logits.shape
        uniforms = None
        if self._uniforms is not None:
            place = growth.counts.unsqueeze(1) + torch.arange(v, device=self.device)
            # What lies behind the longest draft is of no use.
            uniforms = self._uniforms[place.clamp(max=self._width - 1)].flatten()
        rows, _ = self.head.draw(logits.flatten(0, 1), self._decoding, uniforms=uniforms)
        rows = rows.view(m, v)
        return rows, self.head.ids(rows)

    # -- what a round knows

    def _guess(self, own: torch.Tensor, states: torch.Tensor) -> Branches:
        """The target's likely decisions about the path. own: the draft model's logits [1 + k, rows]; states: as in
        `expand`.
        """
        plan = self.plan
        own = torch.softmax(own.float(), dim=-1)
        limits = plan.kappa, plan.most, plan.floor, plan.roots_only
        reaching = prefix_products(own, self._rows)
        if plan.guesses == "draft":
            found = likely_decisions(own, self._rows, reaching, *limits)
            return Branches(found.accepted, self.head.ids(found.tokens))
        probs = torch.softmax(self.exit_head(states).float(), dim=-1)
        if plan.guesses == "both":
            probs = mixture(probs, own, self.head.kept)
        return likely_decisions(probs, self._path, reaching, *limits)

    def _forget(self) -> None:
        self._growth, self._index = None, {}

    def _draw(self) -> None:
        """The numbers that the next draft is drawn with, one for each of its tokens. All branches share them: only one
        comes true, and which one does not depend on them.
        """
        self._uniforms = None
        if self._generator is not None:
            self._uniforms = torch.rand(self._width, generator=self._generator, device=self.device)
