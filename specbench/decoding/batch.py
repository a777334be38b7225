"""The draft-verify-commit loop for many sequences at once.

The sequences of a batch have different lengths, caps and stop tokens; they join when there is room and leave when they
are done. Two components can be swapped: the drafter, which proposes tokens for every sequence, and the scheduler, which
chooses the sequences of each round and their layout in memory. Batched autoregressive decoding is this loop with a
drafter that drafts nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specbench.decoding.acceptance import Accepted, accept_rows
from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.engine import CACHE_STEP, check_fits, that_count
from specbench.decoding.rows import Ragged, span
from specbench.decoding.sampling import DRAFT, TARGET, Decoding, all_drawn, position_draws
from specbench.decoding.trace import Clock, Generation, Mark, Step
from specbench.decoding.turns import between_rounds
from specbench.errors import UserError, at_least
from specbench.values import Count

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import RowCache
    from specbench.decoding.target import Target


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode; as the arguments of `Engine.generate`.

    Attributes:
        prompt: token ids.
        decoding: how tokens are chosen, and how many at most.
        seed: of the sampling.
        stop_ids: in place of the engine's; None for those.
    """

    prompt: list[int]
    decoding: Decoding
    seed: int = 0
    stop_ids: frozenset[int] | None = None


@dataclass(slots=True)
class Row:
    """A sequence of the batch, on the host.

    Attributes:
        place: its index in the input.
        request: what to decode.
        stop_ids: token ids that end it.
        length: known tokens, the pending one included.
        out: new tokens.
        waited: rounds in a row in which a younger sequence ran and it did not.
        rounds: (round, slot in the batch, drafted, accepted, emitted) for each round that it took part in.
        prefill: marks in time around its prefill.
    """

    place: int
    request: Request
    stop_ids: frozenset[int]
    length: int
    out: list[int] = field(default_factory=list)
    waited: int = 0
    rounds: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    prefill: tuple[Mark, ...] = ()

    @property
    def left(self) -> int:
        """New tokens that it may still get."""
        return self.request.decoding.max_new_tokens - len(self.out)

    @property
    def done(self) -> bool:
        """Whether it has ended, by a stop token or at its cap."""
        return self.out[-1] in self.stop_ids or self.left == 0


@dataclass(slots=True)
class Rows:
    """A drafter's input in one round: the b running sequences, which are the first of every buffer.

    Attributes:
        tokens: [rows, capacity] on the device.
        known: [b] lengths, the pending token included.
        limits: [b] the longest draft that each can still use.
        max_draft: the largest of them.
        reach: the largest length.
        decoding: how tokens are chosen.
        layout: of the target's cache.
        uniforms: [rows, capacity, 3] the numbers of `position_draws` by sequence and position; None when greedy. A
            sequence's samples depend on its seed alone, and not on batch composition or scheduling.
    """

    tokens: torch.Tensor
    known: torch.Tensor
    limits: torch.Tensor
    max_draft: int
    reach: int
    decoding: Decoding
    layout: Ragged
    uniforms: torch.Tensor | None = None

    def newest(self, n: int) -> torch.Tensor:
        """[b, n] the last n known tokens of each sequence, a shorter one padded with its first token in front."""
        return self.tokens[: self.known.shape[0]].gather(1, span(self.known - n, n).clamp(min=0))

    def draws(self, offset: int) -> torch.Tensor | None:
        """[b] numbers to draft the token `offset` positions behind the pending one with; None when greedy."""
        if self.uniforms is None:
            return None
        b = self.known.shape[0]
        return self.uniforms[torch.arange(b, device=self.known.device), self.known + offset, DRAFT]


@dataclass(slots=True)
class Round:
    """What the steps of a round have in common: as in `Step`.

    exits: [rows, k] on the device. marks: in time, around aligning, drafting, verification and the rest.
    """

    rows: int
    grouped: bool | None
    draft_bytes: int
    target_bytes: int
    exits: torch.Tensor | None
    marks: tuple[Mark, ...]


class Scheduler:
    """Chooses the sequences of each round.

    This one runs every sequence until it ends, and a new one takes its slot at once. Each has an end of its own in
    memory (`Ragged`).

    Args:
        batch_size: sequences in a round.
        token_budget: the most tokens of a verification pass, all sequences together; None: no limit. Drafts are cut to
            it by the batch size, not by how many sequences happen to run, so that a draft does not depend on others.
    """

    def __init__(self, batch_size: Count, token_budget: Count | None = None):
        self.batch_size = batch_size
        self.rows = batch_size  # sequences that are held at once
        self.longest_draft: int | None = None
        if token_budget is not None:
            at_least(batch_size, token_budget=token_budget)  # every row has its pending token verified
            self.longest_draft = token_budget // batch_size - 1
        # For a scheduler that groups: whether the sequences that it has chosen are of one length.
        self.grouped: bool | None = None

    def layout(self, cache: RowCache) -> Ragged:
        """The layout of the sequences in a new cache."""
        return Ragged(cache)

    def joining(self, held: int) -> int:
        """How many waiting sequences may be prefilled now, when `held` are in memory."""
        return self.rows - held

    def choose(self, held: list[Row]) -> list[int]:
        """Indices of the held sequences that run in this round, `batch_size` at most.

        held: in memory, those that ran in the last round first.
        """
        return list(range(min(self.batch_size, len(held))))


class BatchEngine:
    """Decodes many sequences with a target, a drafter and a scheduler; buffers are kept between calls.

    Args:
        target: the model that verifies.
        drafter: proposes tokens; the base class for autoregressive decoding.
        scheduler: chooses the sequences of each round.
        stop_ids: token ids that end an answer.
        context_length: positions that a sequence may take; None for the target's.

    Raises:
        UserError: the drafter cannot batch.
    """

    _layout: Ragged
    _tokens: torch.Tensor
    _uniforms: torch.Tensor | None

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        scheduler: Scheduler,
        stop_ids: frozenset[int],
        context_length: int | None = None,
    ):
        if not drafter.needs.batching and type(drafter) is not Drafter:
            raise UserError(f"drafter {type(drafter).__name__} cannot batch")
        self.target, self.drafter, self.scheduler = target, drafter, scheduler
        self.stop_ids = stop_ids
        self.context_length = context_length or target.config.max_position_embeddings
        self.clock = Clock(target.device)
        self._cache: RowCache | None = None

    @torch.inference_mode()
    def generate(self, requests: list[Request]) -> list[Generation]:
        """Decodes every request to its end.

        The seconds of a sequence are its prefill and an equal share of every round that it took part in: so the seconds
        of all sequences add up to the time of the call, but for some bookkeeping in between.

        Args:
            requests: sequences to decode, at one temperature.

        Returns:
            The answers in the order of the requests.

        Raises:
            UserError: the context cannot hold a request, their temperatures differ, or a token cannot be drawn because
                logits are not finite.
        """
        if not requests:
            return []
        self._check(requests)
        self.clock.synchronize()
        begun = self.clock.mark()
        self._open(requests)
        opened = self.clock.mark()
        waiting = deque(
            Row(place, request, self.stop_ids if request.stop_ids is None else request.stop_ids, 0)
            for place, request in enumerate(requests)
        )
        rows = [*waiting]
        held: list[Row] = []
        rounds: list[Round] = []
        while waiting or held:
            self._admit(waiting, held)
            if all(row.done for row in held):
                held.clear()
            else:
                rounds.append(self._round(held, len(rounds)))
                between_rounds(self.clock, sum(len(row.out) for row in rows))
        self.clock.synchronize()
        opening = self.clock.seconds(begun, opened) / len(rows)
        timed = [self._timed(r) for r in rounds]
        return [self._generation(row, rounds, timed, opening) for row in rows]

    # -- a round

    def _round(self, held: list[Row], number: int) -> Round:
        """Runs one round; returns what its steps have in common."""
        clock, scheduler, layout = self.clock, self.scheduler, self._layout
        begun = clock.mark()
        self._close_gaps(held)
        b = self._seat(held)
        running = held[:b]
        youngest = max(row.place for row in running)
        for row in held[b:]:
            row.waited += row.place < youngest
        limits = [self._limit(row) for row in running]
        layout.begin([row.length for row in running], 1 + max(limits))
        grouped = scheduler.grouped
        arranged = clock.mark()
        numbers = torch.tensor([[row.length for row in running], limits]).to(self.target.device)
        known, longest = numbers.unbind(0)
        reach = max(row.length for row in running)
        decoding = running[0].request.decoding
        rows = Rows(self._tokens, known, longest, max(limits), reach, decoding, layout, self._uniforms)
        draft = self.drafter.draft_rows(rows) if max(limits) else Draft(self._tokens[:b, :0])
        drafted = clock.mark()
        k = draft.tokens.shape[1]
        counts = longest.clamp(max=k) if draft.counts is None else draft.counts.minimum(longest)
        places = layout.places(known - 1, 1 + k, reach + k)
        logits = self.target.verify_rows(rows.newest(1), draft, layout.cache, places)
        verified = clock.mark()
        verdict = accept_rows(logits, draft, counts, rows.decoding, self._draws(rows, k))
        self._settle(running, rows, draft, counts, verdict, number)
        self.drafter.commit_rows(rows, verdict.count)
        # Not the draft itself: its probabilities and states would pile up until the last row is done.
        layer = draft.resume.layer if draft.resume is not None else 0
        exits = draft.exits if isinstance(draft.exits, torch.Tensor) else None
        marks = (begun, arranged, drafted, verified, clock.mark())
        return Round(b, grouped, draft.bytes_read, self.target.pass_bytes(layer), exits, marks)

    def _seat(self, held: list[Row]) -> int:
        """Brings the rows that run to the front of every buffer; returns their number."""
        chosen = self.scheduler.choose(held)
        b = len(chosen)
        inside = [slot for slot in range(b) if slot not in chosen]
        outside = [slot for slot in chosen if slot >= b]
        if inside:
            self._move(inside + outside, outside + inside, max(row.length for row in held))
            for i, j in zip(inside, outside):
                held[i], held[j] = held[j], held[i]
        for row in held[:b]:
            row.waited = 0
        return b

    def _limit(self, row: Row) -> int:
        """The longest draft that a row can use: the last place belongs to the target alone."""
        limit = min(row.left - 1, self.drafter.max_draft_tokens)
        longest = self.scheduler.longest_draft
        return limit if longest is None else min(limit, longest)

    def _settle(
        self,
        running: list[Row],
        rows: Rows,
        draft: Draft,
        counts: torch.Tensor,
        verdict: Accepted,
        number: int,
    ) -> None:
        """Brings rows, buffers and layout up to what was accepted."""
        b, k = draft.tokens.shape
        steps = torch.arange(1 + k, device=counts.device)
        kept, following = verdict.count.unsqueeze(1), verdict.next.unsqueeze(1)
        new = torch.where(steps == kept, following, torch.cat([draft.tokens, following], dim=1))
        # What is written behind a row's new end is no token: the next round writes there again.
        self._tokens[:b].scatter_(1, span(rows.known, 1 + k), new)
        # The one time in a round that the host waits.
        facts = torch.cat([kept, counts.unsqueeze(1), new], dim=1).tolist()
        self._layout.settle(verdict.count, [count for count, *_ in facts])
        for slot, (row, (count, drafted, *tokens)) in enumerate(zip(running, facts)):
            emitted = that_count(all_drawn(tokens[: count + 1]), row.stop_ids)
            row.out += tokens[:emitted]
            row.length += count + 1
            row.rounds.append((number, slot, drafted, min(count, emitted), emitted))

    def _close_gaps(self, held: list[Row]) -> None:
        """Takes out the rows that are done and were not replaced; the last row takes the place of each."""
        for slot in reversed([slot for slot, row in enumerate(held) if row.done]):
            last = held.pop()
            if slot < len(held):
                self._move([len(held)], [slot], max(last.length, *(row.length for row in held)))
                held[slot] = last

    def _move(self, sources: list[int], destinations: list[int], reach: int) -> None:
        """Copies everything that belongs to some rows to the places of others, all at once."""
        self._layout.move(sources, destinations, reach)
        self.drafter.move_rows(sources, destinations, reach)
        for buffer in (self._tokens, self._uniforms):
            if buffer is not None:
                buffer[destinations] = buffer[sources]

    # -- the start of a row

    def _admit(self, waiting: deque[Row], held: list[Row]) -> None:
        """Lets waiting rows join, first of all in the places of rows that are done."""
        room = self.scheduler.joining(sum(not row.done for row in held))
        while room > 0 and waiting:
            slot = next((slot for slot, row in enumerate(held) if row.done), len(held))
            row = waiting.popleft()
            self._join(row, slot)
            if not row.done:  # one that ends with its first token leaves the place to the next
                held[slot : slot + 1] = [row]
                room -= 1

    def _join(self, row: Row, slot: int) -> None:
        """Prefills a row on its own."""
        begun = self.clock.mark()
        request, device = row.request, self.target.device
        n = len(request.prompt)
        prompt = torch.tensor([request.prompt], device=device)
        self._tokens[slot, :n] = prompt[0]
        if self._uniforms is not None:
            positions = request.decoding.max_new_tokens
            self._uniforms[slot, n : n + positions] = position_draws(request.seed, positions, 1, device)
        prefill = self.target.prefill(prompt, self._layout.entering(slot, n), self.drafter.taps)
        draw = None if self._uniforms is None else self._uniforms[slot, n : n + 1, TARGET]
        first, _ = request.decoding.select(prefill.logits, draw)
        self._tokens[slot, n : n + 1] = first
        row.length = n + 1
        self.drafter.begin_row(slot, prompt, prefill, self.target)
        row.out += all_drawn(first.tolist())
        row.prefill = (begun, self.clock.mark())

    def _open(self, requests: list[Request]) -> None:
        """Makes what holds these requests, or takes what the last call has left."""
        spare = self.drafter.max_draft_tokens + 1  # rows near their end take part in the drafts of others
        capacity = max(len(r.prompt) + r.decoding.max_new_tokens for r in requests) + spare
        rows = min(self.scheduler.rows, len(requests))
        if self._cache is None or self._cache.capacity < capacity or self._cache.rows < rows:
            if self._cache is not None:
                # What has grown once does not shrink, or two kinds of calls would take turns.
                capacity, rows = max(capacity, self._cache.capacity), max(rows, self._cache.rows)
                self._cache = None  # given back before what is larger is asked for; the layout holds it, too
                del self._layout
            capacity = -(-capacity // CACHE_STEP) * CACHE_STEP
            cache = self.target.new_rows(rows, capacity)
            self._tokens = torch.zeros(rows, capacity, dtype=torch.int64, device=self.target.device)
            self.drafter.open_rows(rows, capacity, self.target, cache)
            self._cache = cache  # last: only now does everything have this size
        self._layout = self.scheduler.layout(self._cache)
        self._uniforms = None
        if not requests[0].decoding.greedy:
            shape = (*self._tokens.shape, 3)
            self._uniforms = torch.zeros(shape, dtype=torch.float64, device=self.target.device)

    def _draws(self, rows: Rows, k: int) -> torch.Tensor | None:
        """[b, 1 + k, 3] numbers of the positions behind the known tokens."""
        if self._uniforms is None:
            return None
        at = span(rows.known, 1 + k)
        b = at.shape[0]
        return self._uniforms[torch.arange(b, device=at.device).unsqueeze(1), at]

    def _check(self, requests: list[Request]) -> None:
        if len({request.decoding.temperature for request in requests}) > 1:
            raise UserError("the requests of a batch must have one temperature")
        for request in requests:
            check_fits(request.prompt, request.decoding, self.context_length)

    # -- the trace

    def _timed(self, done: Round) -> tuple[tuple[float, float, float, float], list | None]:
        """Each row's seconds of drafting, verification, the rest and lining up; and the exits on the host."""
        align, drafting, verify, other = (
            self.clock.seconds(a, z) / done.rows for a, z in zip(done.marks, done.marks[1:])
        )
        if not self._layout.aligns:
            align, other = 0.0, align + other
        return (drafting, verify, other, align), None if done.exits is None else done.exits.tolist()

    def _generation(self, row: Row, rounds: list[Round], timed: list[tuple], opening: float) -> Generation:
        steps = []
        for number, slot, drafted, accepted, emitted in row.rounds:
            done, ((drafting, verify, other, align), exits) = rounds[number], timed[number]
            steps.append(
                Step(
                    drafted,
                    accepted,
                    emitted,
                    drafted,
                    drafting,
                    verify,
                    other,
                    done.draft_bytes,
                    done.target_bytes,
                    tuple(exits[slot][:drafted]) if exits else (),
                    rows=done.rows,
                    align_seconds=align,
                    grouped=done.grouped,
                )
            )
        prefill = opening + self.clock.seconds(*row.prefill)
        spent = sum(s.draft_seconds + s.verify_seconds + s.other_seconds + s.align_seconds for s in steps)
        finish = "stop" if row.out[-1] in row.stop_ids else "length"
        return Generation(row.out, prefill, prefill + spent, finish, steps)
