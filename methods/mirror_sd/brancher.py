"""The draft model's side of Mirror-SD: drafts for every likely decision of the target before it is known.

All branches grow together, in one pass at a time, as nodes after the tokens that are being verified; they share the
keys and values of common prefixes. When the decision is known, the entries of its branch are compacted; the others are
overwritten later.

With speculative streaming (Bhendawade et al. 2024) a pass also guesses tokens further on, from stream states that
attend to what their token attends to. The next pass verifies them: a guess is kept if it equals the draft model's own
token, so that streams change the number of passes of a draft and nothing about the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from methods.common.heads import drawable
from methods.mirror_sd.branches import Branches, likely_decisions, mixture, prefix_products
from methods.mirror_sd.growth import Growth, Written, joined
from specbench.decoding.device import on_device
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.sampling import argmax_token

if TYPE_CHECKING:
    from methods.common.heads import DraftHead
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.decoding.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drafted ahead of the target's decision.

    Attributes:
        depth: tokens of a draft.
        kappa: decisions guessed for each number of accepted tokens.
        most: number of guesses to keep, the likeliest; None: all.
        roots_only: guess only for no accepted token.
        guesses: from the target's "exit", from the "draft" model's own distributions, from the mean of "both", or
            "none" at all: then every draft is made after the decision, as in plain speculative sampling.
        floor: decisions less likely than this are not drafted for.
    """

    depth: int
    kappa: int
    most: int | None = None
    roots_only: bool = False
    guesses: str = "exit"
    floor: float = 0.0

    @property
    def widest(self) -> int:
        """Largest number of branches."""
        every = self.kappa if self.roots_only else self.kappa * (self.depth + 1)
        return max(1, every if self.most is None else min(self.most, every))


@dataclass(frozen=True, slots=True)
class SettledDraft:
    """A draft after the target's decision.

    Attributes:
        tokens: [n].
        probs: [n, rows] that they were drawn from; None when greedy.
        hit: whether it was begun before the decision was known; None when no draft was.
        bytes_read: bytes of weights that were read since the draft before, those of other branches included; NaN if
            unknown.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    hit: bool | None
    bytes_read: float


def never() -> bool:
    """False: nothing stops a draft early."""
    return False


class Brancher:
    """Keeps the draft model's cache of one sequence at a time.

    Everything before `_base` is settled; `_path` are the tokens after it that the target verifies, of which the cache
    may lack the last.

    Args:
        model: the draft model.
        head: its head, trimmed or not.
        exit_head: the target's norm and head, [n, d] -> logits [n, vocab]; None when nothing is guessed from an exit.
        plan: what is drafted ahead of the target's decision.
        streams: [s, d] embeddings of stream states; None for none.
        exit_bytes: of the weights that `exit_head` reads.
    """

    _path: torch.Tensor  # [k] draft tokens as ids
    _rows: torch.Tensor  # [k] the same as rows of the head
    # [at least k, rows] logits that they were chosen from, and after the last one where it was fed
    _path_logits: torch.Tensor
    _growth: Growth | None
    _index: dict[tuple[int, int], int]
    _uniforms: torch.Tensor | None
    _generator: torch.Generator | None
    _read: float = 0.0  # bytes of weights, since the last draft

    def __init__(
        self,
        model: StagedModel,
        head: DraftHead,
        exit_head: Callable[[torch.Tensor], torch.Tensor] | None,
        plan: Plan,
        streams: torch.Tensor | None = None,
        exit_bytes: int = 0,
    ):
        self.model, self.head, self.exit_head, self.plan = model, head, exit_head, plan
        self.exit_bytes = exit_bytes
        self.device = model.device
        # Streams were trained in the model's own forward, which scales embeddings and streams alike.
        self.streams = (
            torch.empty(0, model.hidden_size, device=self.device)
            if streams is None
            else streams * model.embedding_scale
        )
        # Numbers to draw with: for the longest draft, the token after it, guesses, and one to spare.
        self._width = plan.depth + 2 + self.streams.shape[0]
        self._cache = model.new_cache(0)  # until it is known how long the sequences are
        self._fed = 0  # its entries that are in use
        self._forget()

    @torch.inference_mode()
    def begin(self, prompt: torch.Tensor, room: int, decoding: SamplingParams, seed: int) -> None:
        """Starts a sequence.

        Args:
            prompt: [n], without the pending token, which is the first to settle.
            room: tokens of the sequence at most.
            decoding: how draft tokens are chosen.
            seed: of the draws.
        """
        s = self.streams.shape[0]
        needed = room + 2 * (self.plan.depth + 2 + s) * (1 + s) * (self.plan.widest + 1)
        if self._cache.capacity < needed:
            self._cache = self.model.new_cache(needed)
        self._fed = 0
        self._decoding = decoding
        self._generator = None if self._decoding.greedy else torch.Generator(self.device).manual_seed(seed)
        self._base, self._path, self._rows = prompt.shape[0], prompt[:0], prompt[:0]
        self._path_logits = torch.empty(0, 0, device=self.device)
        self._forget()
        self._draw()
        self._run(self.model.embed(prompt.unsqueeze(0)))
        self._read = 0.0  # a prompt is no part of a draft

    @torch.inference_mode()
    def foresee(self) -> None:
        """Feeds the last draft token, so that the draft model's logits are known after every one.

        The draft's side has time for it while the target's pass is on its way to the exit.
        """
        unfed = self._path[self._fed - self._base :]
        if unfed.shape[0] and self.plan.guesses != "none":
            hidden = self._run(self.model.embed(unfed.unsqueeze(0)))
            logits = self._logits(hidden[0, -1:])
            self._path_logits = torch.cat([self._path_logits[: self._path.shape[0]], logits])

    @torch.inference_mode()
    def expand(self, k: int, depth: int, states: torch.Tensor, decided: Callable[[], bool] = never) -> None:
        """Drafts after each likely decision about the draft that is being verified.

        Args:
            k: tokens of the draft that are verified.
            depth: tokens to draft after each decision.
            states: [1 + k, d] of the target at its exit; not used for guesses of the draft model's own.
            decided: called before every pass: whether the decision is known by now, which makes branches useless.
        """
        self.foresee()
        self._path, self._rows = self._path[:k], self._rows[:k]
        branches, index = self._guess(self._path_logits[: k + 1], states).likely(self.plan.floor)
        self._fed = min(self._fed, self._base + k)
        columns = torch.arange(k, device=self.device)
        seen = columns < branches.accepted.unsqueeze(1)
        growth = self._growth = self._sprout(
            self._base, branches.tokens, branches.accepted, seen, columns, columns[:0]
        )
        while not self._grown(growth, depth) and not decided():
            self._grow(growth)
        self._index = index

    def end(self) -> float:
        """Ends the sequence; returns the bytes of weights that were read after its last draft, NaN if unknown."""
        self._forget()
        return self._take_read()

    @torch.inference_mode()
    def settle(
        self, accepted: int, following: int, limit: int, unwanted: Callable[[], bool] = never
    ) -> SettledDraft:
        """The next draft, after the target's decision.

        Args:
            accepted: draft tokens that the target kept.
            following: the target's own token after them.
            limit: tokens of the next draft at most.
            unwanted: called before every pass; if true, the draft is abandoned, an empty one is returned, and the next
                call must be `begin`.
        """
        at, limit = self._base + accepted, min(limit, self.plan.depth)
        branch = self._index.get((accepted, following))
        expanded = self._growth
        hit = None if expanded is None else False
        # If there was no time for a pass, nothing is written.
        if expanded is not None and branch is not None and (written := expanded.of(branch)):
            hit, growth = True, self._pick(expanded, branch, written, accepted, at)
        else:
            fed = self._fed = min(self._fed, at)
            ahead = self._path[fed - self._base : accepted]
            columns = torch.arange(ahead.shape[0], device=self.device)
            root = on_device([following], self.device)
            seen = (columns >= 0).unsqueeze(0) if self.streams.shape[0] else None
            growth = self._sprout(fed, root, root * 0 + ahead.shape[0], seen, columns, ahead)
        while not self._grown(growth, limit):
            if unwanted():
                return SettledDraft(self._path[:0], None, hit, 0.0)  # `end` counts what was read
            self._grow(growth)
        if growth.seen is not None:  # remove the entries of wrong guesses
            self._keep(growth.base, growth.seen[0].nonzero().squeeze(1))
        self._base = at + 1
        tokens, rows, self._path_logits = joined(growth.written)
        self._path, self._rows = tokens[:limit], rows[:limit]
        probs = None if self._decoding.greedy else self._decoding.probs(self._path_logits[:limit])
        self._forget()
        self._draw()
        return SettledDraft(self._path, probs, hit, self._take_read())

    # -- growing

    def _sprout(
        self,
        base: int,
        roots: torch.Tensor,
        offsets: torch.Tensor,
        seen: torch.Tensor | None,
        columns: torch.Tensor,
        ahead: torch.Tensor,
    ) -> Growth:
        """Continuations after the tokens `roots` [m]; the rest as in `Growth`."""
        return Growth(base, roots, offsets, roots.unsqueeze(1)[:, :0], seen, columns, ahead, [], offsets * 0)

    def _grown(self, growth: Growth, depth: int) -> bool:
        """Whether every continuation has `depth` tokens."""
        if not self.streams.shape[0]:
            return growth.passes >= depth  # known without a look at the device
        return int(growth.counts.min()) >= depth

    def _grow(self, growth: Growth) -> None:
        """One pass: each continuation gets the draft model's next token, and one more for each guess that is right."""
        growth.passes += 1
        if not self.streams.shape[0]:
            self._grow_by_one(growth)
            return
        model, s = self.model, self.streams.shape[0]
        (m, w), n = growth.guesses.shape, growth.ahead.shape[0]
        v = 1 + w  # tokens of each continuation that are fed: the newest and the guesses
        before: torch.Tensor = growth.seen  # type: ignore[assignment] # with streams there always is one
        fed = torch.cat([growth.last_tokens.unsqueeze(1), growth.guesses], dim=1)
        steps = torch.arange(v, device=self.device)
        offsets = growth.offsets.unsqueeze(1) + steps
        identity = torch.eye(m, dtype=torch.bool, device=self.device)
        among = steps <= steps.unsqueeze(1)  # [v, v]: a token sees those fed in front of it, and itself
        columns = torch.cat([growth.columns, offsets.flatten()])
        seen = torch.cat(
            [
                before.repeat_interleave(v, 0),
                (identity[:, None, :, None] & among[None, :, None, :]).reshape(m * v, m * v),
            ],
            dim=1,
        )
        hidden = model.embed(torch.cat([growth.ahead, fed.flatten()]).unsqueeze(0))
        rows_seen = seen
        if n:
            own_path = growth.columns[-n:].unsqueeze(1) >= growth.columns
            rows_seen = torch.cat([torch.cat([own_path, identity.new_zeros(n, m * v)], dim=1), seen])
        hidden, rows_seen, all_columns = self._with_streams(hidden, n, offsets, seen, rows_seen, columns)
        start = self._fed
        hidden = self._run(hidden, all_columns, rows_seen)[0]
        self._fed = start + n + m * v  # streams leave no entries
        logits = self._logits(hidden[n : n + m * v]).view(m, v, -1)
        rows, tokens = self._choose(growth, logits)
        right = (growth.guesses == tokens[:, :w]).long().cumprod(1).sum(1)  # [m] guesses that came true
        came_true = identity.unsqueeze(2) & (steps <= right.unsqueeze(1)).unsqueeze(1)
        growth.seen = torch.cat([before, came_true.reshape(m, m * v)], dim=1)
        growth.columns, growth.ahead = columns, growth.ahead[:0]
        growth.last_tokens = tokens.gather(1, right.unsqueeze(1)).squeeze(1)
        last = torch.arange(m, device=self.device) * v + right
        states = hidden[n + m * v :].view(m * v, s, -1)[last]
        growth.guesses = self.head.ids(argmax_token(self._logits(states)))
        growth.written.append(Written(tokens, rows, logits, right + 1))
        growth.counts = growth.counts + right + 1
        growth.offsets = growth.offsets + right + 1

    def _grow_by_one(self, growth: Growth) -> None:
        """The same without streams: one token each."""
        feed, m = torch.cat([growth.ahead, growth.last_tokens]), growth.last_tokens.shape[0]
        if growth.seen is not None:  # several: `foresee` has fed what was missing
            identity = torch.eye(m, dtype=torch.bool, device=self.device)
            growth.seen = torch.cat([growth.seen, identity], dim=1)
            growth.columns = torch.cat([growth.columns, growth.offsets])
        seen = growth.seen
        hidden = self._run(self.model.embed(feed.unsqueeze(0)), growth.columns, seen)[0, -m:]
        logits = self._logits(hidden).unsqueeze(1)
        rows, tokens = self._choose(growth, logits)
        growth.written.append(Written(tokens, rows, logits, None))
        growth.last_tokens, growth.ahead = tokens[:, 0], growth.ahead[:0]
        growth.counts, growth.offsets = growth.counts + 1, growth.offsets + 1

    def _run(
        self, hidden: torch.Tensor, columns: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the draft model over states [1, n, d] after what its cache holds.

        Args:
            hidden: [1, n, d].
            columns: [m] offsets of the last m entries, these n the last, if they are no sequence.
            seen: [n, m] which of them each token attends to; None where they are a sequence.
        """
        n, ctx = hidden.shape[1], None
        if columns is not None and seen is not None:
            ctx = ForwardContext.nodes(self._fed + n - columns.shape[0], columns, seen)
        out = self.model.run_layers(hidden, self._cache, self._fed if ctx is None else ctx)
        self._fed += n
        self._read += self.model.pass_bytes(head=False, tokens=n)
        return out

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """The draft model's logits [n, rows] of the states [n, d] of its last layer."""
        self._read += self.head.bytes
        return self.head.logits(self.model.norm(states))

    def _take_read(self) -> float:
        read, self._read = self._read, 0.0
        return read

    def _keep(self, start: int, path: torch.Tensor) -> None:
        """Of the entries from `start` on keeps only start + path[i], path [n], and moves them to start + i."""
        destinations = torch.arange(start, start + path.shape[0], device=self.device)
        self._cache.move_entries((path + start).unsqueeze(0), destinations.unsqueeze(0))
        self._fed = start + path.shape[0]

    def _with_streams(
        self,
        hidden: torch.Tensor,
        n: int,
        offsets: torch.Tensor,
        seen: torch.Tensor,
        rows_seen: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds s stream states for each of the m * v tokens.

        Stream j of a token starts as its embedding plus that of the stream, is j positions after it, and attends
        to what the token attends to and the streams 1 to j of the same token (eq. 2).

        Returns:
            hidden [1, n + m v (1 + s), d], the visibility and the columns with the streams.
        """
        s, count = self.streams.shape[0], seen.shape[0]
        streams = (hidden[0, n:].unsqueeze(1) + self.streams).flatten(0, 1)
        steps = torch.arange(s, device=self.device)
        among = torch.eye(count, dtype=torch.bool, device=self.device)[:, None, :, None]
        among = (among & (steps <= steps.unsqueeze(1))[None, :, None, :]).reshape(count * s, count * s)
        below = torch.cat([seen.repeat_interleave(s, 0), among], dim=1)
        above = torch.cat([rows_seen, among.new_zeros(rows_seen.shape[0], count * s)], dim=1)
        stream_columns = (offsets.flatten().unsqueeze(1) + steps + 1).flatten()
        return (
            torch.cat([hidden, streams.unsqueeze(0)], dim=1),
            torch.cat([above, below]),
            torch.cat([columns, stream_columns]),
        )

    def _pick(self, growth: Growth, branch: int, written: list[Written], accepted: int, at: int) -> Growth:
        """Returns the branch of the target's decision as its own growth; compacts its cache entries."""
        seen: torch.Tensor = growth.seen  # type: ignore[assignment] # of branches there always is one
        if self.streams.shape[0]:
            nodes = seen[branch].nonzero().squeeze(1)[accepted:]
        else:  # every pass has added a column for each branch, after those of the path
            m, added = growth.counts.shape[0], torch.arange(growth.passes, device=self.device)
            nodes = growth.columns.shape[0] - m * growth.passes + branch + m * added
        self._keep(at, nodes - accepted)
        chosen = slice(branch, branch + 1)
        none = growth.columns[:0]
        return Growth(
            at + nodes.shape[0],
            growth.last_tokens[chosen],
            none.new_zeros(1),
            growth.guesses[chosen],
            seen[chosen, :0] if self.streams.shape[0] else None,
            none,
            none,
            written,
            growth.counts[chosen],
            growth.passes,
        )

    def _choose(self, growth: Growth, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From logits [m, v, rows] the next v tokens of each continuation, [m, v], as rows and as ids."""
        m, v, _ = logits.shape
        uniforms = None
        if self._uniforms is not None:
            positions = growth.counts.unsqueeze(1) + torch.arange(v, device=self.device)
            # Tokens after the longest draft are not used.
            uniforms = self._uniforms[positions.clamp(max=self._width - 1)].flatten()
        rows, _ = self._decoding.select(logits.flatten(0, 1), uniforms)
        rows = (rows if uniforms is None else drawable(rows)).view(m, v)
        return rows, self.head.ids(rows)

    # -- the decisions and numbers of a round

    def _guess(self, logits: torch.Tensor, states: torch.Tensor) -> Branches:
        """The target's likely decisions about the path.

        Args:
            logits: the draft model's [1 + k, rows].
            states: as in `expand`.
        """
        plan = self.plan
        draft_probs = torch.softmax(logits.float(), dim=-1)
        limits = plan.kappa, plan.most, plan.roots_only
        reaching = prefix_products(draft_probs, self._rows)
        if plan.guesses == "draft":
            branches = likely_decisions(draft_probs, self._rows, reaching, *limits)
            return replace(branches, tokens=self.head.ids(branches.tokens))
        assert self.exit_head is not None  # there is one for all other guesses
        self._read += self.exit_bytes
        probs = torch.softmax(self.exit_head(states).float(), dim=-1)
        if plan.guesses == "both":
            probs = mixture(probs, draft_probs, self.head.token_ids)
        return likely_decisions(probs, self._path, reaching, *limits)

    def _forget(self) -> None:
        self._growth, self._index = None, {}

    def _draw(self) -> None:
        """Draws the numbers for the next draft, one for each of its tokens.

        All branches share them: only one is used, and which one does not depend on them.
        """
        self._uniforms = None
        if self._generator is not None:
            self._uniforms = torch.rand(
                self._width, generator=self._generator, device=self.device, dtype=torch.float64
            )
