"""The draft-verify-commit loop. Autoregressive decoding is this loop with empty drafts, one sequence is a batch of one.

The sequences of a batch have different lengths, caps and stop tokens; they join when there is room and leave when they
are done. Two components can be swapped: the drafter, which proposes tokens for every sequence, and the scheduler, which
chooses the sequences of each round and their layout in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbench.decoding.acceptance import Accepted, accept
from specbench.decoding.device import move_slots, on_device, span
from specbench.decoding.model.fixed_shape import rounded_up
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.sampling import (
    TARGET,
    SamplingParams,
    check_numbers,
    check_sampled,
    position_uniforms,
    truncate_at_stop,
)
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Draft, Request, SequenceState, Verified
from specbench.decoding.trace import Clock, Generation, Step, Timestamp, counted
from specbench.decoding.tree import Tree
from specbench.system.errors import UserError, require_at_least
from specbench.system.settings import BLOCK, TYPICAL

if TYPE_CHECKING:
    from specbench.decoding.drafter import Drafter
    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.model.staged_model import StagedModel

Rounds = Generator[int, None, list[Generation]]  # see `Engine.rounds`

CACHE_STEP = 256  # a cache that grows in steps is reused by most requests
FIXED_STEP = 1024  # larger if passes are captured: a new cache loses them


class HostFacts(NamedTuple):
    """The outcome of a verification for one sequence, on the host.

    Attributes:
        accepted: draft tokens.
        tokens: [1 + k] these, the bonus token, and unused entries.
        depth: of a tree, tokens of its longest path; else k.
        candidates: draft tokens of the sequence; k, unless the drafter sets their number.
        within: nodes of its tree that are no deeper than the sequence may still use; k unless limits differ between the
            trees of a batch.
        report: numbers that the drafter requested.
    """

    accepted: int
    tokens: list[int]
    depth: int
    candidates: int
    within: int
    report: list[int]


@dataclass(slots=True)
class Round:
    """A round until its times can be read: on a GPU, once the device is done.

    steps: of its sequences, by slot. stats: as in `Draft`. marks: timestamps around alignment, drafting, verification
    and the rest.
    """

    steps: list[Step]
    stats: dict[str, Any]
    marks: tuple[Timestamp, ...]


class Engine:
    """Decodes sequences with a target, a drafter and a scheduler; buffers are kept between calls.

    Args:
        target: the model that verifies.
        drafter: proposes tokens; the base class for autoregressive decoding.
        stop_ids: token ids that end an answer.
        scheduler: chooses the sequences of each round; None: one after the other.
        context_length: positions that a sequence may take; None for the target's.

    Attributes:
        observe: if set, called with each round's batch, draft, logits and accepted tokens: for certificates.

    Raises:
        UserError: the drafter cannot batch, or its drafts are longer than the target's passes are wide.
    """

    def __init__(
        self,
        target: StagedModel,
        drafter: Drafter,
        stop_ids: frozenset[int],
        scheduler: Scheduler | None = None,
        context_length: int | None = None,
    ):
        self.scheduler = Scheduler(1) if scheduler is None else scheduler
        if not drafter.needs.batching and self.scheduler.slots > 1:
            raise UserError(f"drafter {type(drafter).__name__} cannot batch")
        self.target, self.drafter = target, drafter
        self.stop_ids = stop_ids
        self.context_length = context_length or target.config.max_position_embeddings
        self.clock = Clock(target.device)
        self._nodes = max(drafter.max_nodes, drafter.max_draft_tokens)
        # After the known tokens: the pending one and a draft, and what passes write after them.
        self._spare = 1 + self._nodes + target.padding
        if not drafter.needs.any_length and self.scheduler.longest_draft < self._nodes:
            raise UserError(
                f"drafter {type(drafter).__name__} has drafts of one length: give a larger token_budget"
            )
        # Tokens of a verification of one sequence.
        self.verify_tokens = 1 + min(self._nodes, self.scheduler.longest_draft)
        if target.width is not None and self.verify_tokens > target.width:
            raise UserError(
                f"decoding.verify_width is {target.width}, but a draft and its pending token take up to "
                f"{self.verify_tokens}: set decoding.verify_width={self.verify_tokens} or more, or null"
            )
        self.observe: Callable[[Batch, Draft, torch.Tensor, Accepted], None] | None = None
        self._cache: KVCache | None = None
        self._size = 0, 0  # slots and capacity of the largest so far

    def answer(self, prompt: list[int], decoding: SamplingParams, seed: int = 0) -> Generation:
        """Decodes one sequence; the arguments are those of `Request`, all else is as in `generate`."""
        return self.generate([Request(prompt, decoding, seed)])[0]

    def generate(self, requests: list[Request]) -> list[Generation]:
        """Decodes every request to its end at once: `rounds` without a pause."""
        return exhaust(self.rounds(requests))

    @torch.inference_mode()  # of a generator: torch enters the mode for each step, and leaves it for the caller
    def rounds(self, requests: list[Request]) -> Rounds:
        """Decodes every request to its end: a stop token, or exactly `max_new_tokens` new tokens.

        The seconds of a sequence are its prefill and an equal share of every round that it took part in: so the seconds
        of all sequences add up to the time of the rounds.

        Args:
            requests: sequences to decode, with one temperature, top_k and top_p.

        Yields:
            After each round, the tokens that it has added to all answers. Time that the caller spends until the next
            round is not counted.

        Returns:
            The answers in the order of the requests.

        Raises:
            UserError: the context cannot hold a request, they differ in one of these, or a token cannot be drawn
                because logits are not finite.
        """
        if not requests:
            return []
        self._check(requests)
        held: list[SequenceState] = []
        try:
            self.clock.synchronize()
            begun = self._last = self.clock.mark()
            self.reserve(requests)
            opened = self._last = self.clock.mark()
            sequences = [
                SequenceState(i, request, self.stop_ids if request.stop_ids is None else request.stop_ids)
                for i, request in enumerate(requests)
            ]
            waiting, emitted = deque(sequences), 0
            self._are_nan: list[torch.Tensor] = []
            rounds: list[Round] = []
            while True:
                if waiting:
                    self._admit(waiting, held)
                self._remove_finished(held)
                if not held:
                    break
                rounds.append(self._round(held))
                before, emitted = emitted, sum(one.emitted for one in sequences)
                yield emitted - before
                self._last = self.clock.mark()
            self.clock.synchronize()
            check_numbers(self._are_nan)
        except BaseException:  # also if it is closed early
            self._cache = None  # it may hold NaN or infinities, which a mask does not remove (0 * inf = NaN)
            raise
        finally:
            for slot, one in enumerate(held):
                if not one.ended:  # given up, or complete in a round that raised
                    self.drafter.end(slot)
        opening = self.clock.seconds(begun, opened) / len(sequences)
        for done in rounds:
            self._complete(done)
        return [self._generation(one, opening) for one in sequences]

    # -- a round

    def _round(self, held: list[SequenceState]) -> Round:
        """Runs one round."""
        clock, scheduler, layout, drafter = self.clock, self.scheduler, self._layout, self.drafter
        begun = self._last
        running = held[: self._compact_running(held)]
        batch = self._batch(running)
        layout.begin_round(batch.lengths, self._spare)
        stats = scheduler.stats
        arranged = clock.mark()
        draft = drafter.draft(batch) if batch.max_draft else Draft(self._tokens[: batch.size, :0])
        drafted = clock.mark()
        ctx = layout.place(batch, 1 + draft.tokens.shape[1], tree=draft.tree)
        taps = drafter.taps
        states: dict[int, torch.Tensor] = {}

        def on_hidden(layer: int, hidden: torch.Tensor) -> None:
            states[layer] = hidden
            if batch.max_draft:
                drafter.on_hidden(layer, hidden)

        logits = self.target.verify(
            batch.last_tokens(1), draft, layout.cache, ctx, taps, on_hidden, drafter.overlaps_verification()
        )
        verified_at = clock.mark()
        verified = self._commit_round(batch, draft, logits, states)
        if batch.max_draft:
            drafter.commit(batch, verified)
        for slot, one in enumerate(running):
            if one.done:
                self._end(slot, one, logits[slot, 0])
        self._last = clock.mark()
        # Not the draft itself: its probabilities and states would pile up until the last sequence is done.
        steps, marks = [one.steps[-1] for one in running], (begun, arranged, drafted, verified_at, self._last)
        return Round(steps, stats | draft.stats, marks)

    def _batch(self, running: list[SequenceState]) -> Batch:
        most = min(self.drafter.max_draft_tokens, self.scheduler.longest_draft)
        # The last new token is always the target's own.
        wished = self.drafter.draft_limit
        limits = [min(one.remaining - 1, most, wished(slot)) for slot, one in enumerate(running)]
        lengths, nodes = [one.length for one in running], self.verify_tokens - 1
        decoding = running[0].request.decoding
        return Batch(running, lengths, limits, nodes, self._tokens, decoding, self._layout, self._uniforms)

    def _compact_running(self, held: list[SequenceState]) -> int:
        """Moves the running sequences to the first slots of every buffer; returns their number."""
        chosen = self.scheduler.choose(held)
        b = len(chosen)
        inside = [slot for slot in range(b) if slot not in chosen]
        outside = [slot for slot in chosen if slot >= b]
        if inside:
            moved = inside + outside
            self._move(moved, outside + inside, max(held[slot].length for slot in moved))
            for i, j in zip(inside, outside):
                held[i], held[j] = held[j], held[i]
        return b

    def _commit_round(
        self, batch: Batch, draft: Draft, logits: torch.Tensor, states: dict[int, torch.Tensor]
    ) -> Verified:
        """Updates sequences, buffers and layout with the accepted tokens."""
        b, k = draft.tokens.shape
        accepted = self._accept(batch, draft, logits)
        if self.observe is not None:
            self.observe(batch, draft, logits, accepted)
        if b == 1:
            # Entries after a sequence's new end are no tokens: the next round overwrites them.
            self._tokens[0, batch.lengths[0] : batch.lengths[0] + 1 + k] = accepted.tokens[0]
        else:
            self._tokens[:b].scatter_(1, span(batch.seq_lens, 1 + k), accepted.tokens)
        # Nodes beyond its own limit, for which another sequence has room, are not part of a sequence's draft.
        uneven = draft.tree is not None and min(batch.limits) < batch.max_draft
        facts = self._on_host(draft, logits, accepted, batch.limits if uneven else None)
        counts = [of_one.accepted for of_one in facts]
        self._layout.commit(batch, accepted.count, counts, accepted.path)
        lo = 0 if draft.resume is None else draft.resume.layer
        read = counted(draft.bytes_read), counted(self.target.pass_bytes(lo, tokens=b * (1 + k)))
        tokens = []
        for one, limit, of_one in zip(batch.sequences, batch.limits, facts):
            new_tokens = truncate_at_stop(check_sampled(of_one.tokens[: of_one.accepted + 1]), one.stop_ids)
            drafted = min(of_one.candidates, limit if draft.tree is None else of_one.within)
            depth, emitted = min(of_one.depth, limit, drafted), len(new_tokens)
            step = Step(drafted, min(of_one.accepted, emitted), emitted, depth, 0.0, 0.0, 0.0, *read, b)
            one.tokens += new_tokens
            one.steps.append(step)
            tokens.append(new_tokens)
        reported = None if draft.report is None else [of_one.report for of_one in facts]
        return Verified(logits, states, accepted.count, accepted.path, counts, tokens, draft, reported)

    def _accept(self, batch: Batch, draft: Draft, logits: torch.Tensor) -> Accepted:
        """Accepts tokens of a draft, within the limits of its sequences.

        With graphs this is a captured pass, which starts its operations, up to some two hundred, at once. A greedy
        chain, and a round without a draft, take only a few operations and are not captured.
        """
        k, tree, decoding, limits = draft.tokens.shape[1], draft.tree, batch.decoding, None
        # A bound on the longest path that needs no data from the device.
        longest = k if tree is None else min(k, self.drafter.max_draft_tokens)
        if min(batch.limits) < longest:
            limits = on_device(batch.limits, logits.device)
        uniforms = None if batch.uniforms is None else batch.window(batch.uniforms, 0, 1 + k)
        runner = self.target.runner
        if not isinstance(runner, GraphRunner) or not k or (uniforms is None and tree is None):
            return accept(logits, draft, decoding, uniforms, limits)
        most = None if tree is None else tree.max_children

        def on_tensors(
            logits: torch.Tensor,
            tokens: torch.Tensor,
            probs: torch.Tensor | None,
            uniforms: torch.Tensor | None,
            limits: torch.Tensor | None,
            candidates: torch.Tensor | None,
            *shape: torch.Tensor,
        ) -> Sequence[Any]:
            tree = Tree(*shape, max_children=most) if shape else None
            rebuilt = Draft(tokens, probs, tree=tree, candidates=candidates)
            accepted = accept(logits, rebuilt, decoding, uniforms, limits)
            return accepted.count, accepted.tokens, accepted.path

        inputs = logits, draft.tokens, draft.probs, uniforms, limits, draft.candidates
        shape = () if tree is None else tree.tensors
        key = "accept", decoding.distribution, decoding.verification, most
        return Accepted(*runner.run(self._layout.cache, key, on_tensors, *inputs, *shape))

    def _on_host(
        self, draft: Draft, logits: torch.Tensor, accepted: Accepted, limits: list[int] | None
    ) -> list[HostFacts]:
        """Copies the outcome of each sequence to the host, which waits only here in a round.

        limits: most tokens of a path of each sequence, if they differ between trees; else None.
        """
        new, k = accepted.tokens, draft.tokens.shape[1]
        parts = [accepted.count.unsqueeze(1), new]
        if draft.tree is not None:
            depths, candidates = draft.tree.depths, draft.acceptable()
            depths = depths if candidates is None else depths * candidates
            parts.append(depths.amax(-1, keepdim=True).expand(new.shape[0], 1))
        if draft.candidates is not None:
            parts.append(draft.candidates.unsqueeze(1))
        if limits is not None:
            allowed = depths <= on_device(limits, new.device).unsqueeze(1)
            parts.append(((depths > 0) & allowed).sum(-1, keepdim=True))
        if draft.report is not None:
            parts.append(draft.report(logits))
        if len(parts) == 2 and not k:  # nothing was drafted
            return [HostFacts(0, tokens, 0, 0, 0, []) for tokens in new.tolist()]
        facts = []
        for numbers in torch.cat(parts, dim=1).tolist():
            rest = iter(numbers)
            count, tokens = next(rest), [*islice(rest, 1 + k)]
            depth = k if draft.tree is None else next(rest)
            drafted = k if draft.candidates is None else next(rest)
            within = k if limits is None else next(rest)
            facts.append(HostFacts(count, tokens, depth, drafted, within, [*rest]))
        return facts

    def _remove_finished(self, held: list[SequenceState]) -> None:
        """Removes finished sequences that were not replaced; the last sequence moves into the slot of each."""
        for slot in reversed([slot for slot, one in enumerate(held) if one.done]):
            last = held.pop()
            if slot < len(held):
                self._move([len(held)], [slot], last.length)
                held[slot] = last

    def _move(self, sources: list[int], destinations: list[int], kv_len: int) -> None:
        """Copies everything that belongs to some sequences to the slots of others, all at once."""
        self._layout.move(sources, destinations, kv_len)
        self._slots.move(sources, destinations, kv_len)
        if self._uniforms is not None:
            move_slots(self._uniforms, sources, destinations)

    # -- the start of a sequence

    def _admit(self, waiting: deque[SequenceState], held: list[SequenceState]) -> None:
        """Admits waiting sequences, reusing finished slots first."""
        room = self.scheduler.joining(sum(not one.done for one in held))
        while room > 0 and waiting:
            slot = next((slot for slot, one in enumerate(held) if one.done), len(held))
            one = waiting.popleft()
            self._prefill(one, slot)
            if not one.done:  # one that ends with its first token leaves the slot to the next
                held[slot : slot + 1] = [one]
                room -= 1

    def _prefill(self, one: SequenceState, slot: int) -> None:
        """Prefills a sequence on its own."""
        begun = self._last
        request, device = one.request, self.target.device
        n = len(request.prompt)
        one.tokens = [*request.prompt]
        prompt = on_device([request.prompt], device)
        self._tokens[slot, :n] = prompt[0]
        if self._uniforms is not None:
            positions = request.decoding.max_new_tokens
            numbers = position_uniforms(request.seed, positions, self._uniforms.shape[2] // 2, device)
            self._uniforms[slot, n : n + positions] = numbers
        prefill = self.target.prefill(prompt, self._layout.prefill_view(slot, n), self.drafter.taps)
        draw = None if self._uniforms is None else self._uniforms[slot, n : n + 1, TARGET]
        first, _ = request.decoding.select(prefill.logits, draw)
        self._tokens[slot, n : n + 1] = first
        one.tokens += check_sampled(first.tolist())
        try:
            self.drafter.begin(slot, one, prefill)
        except BaseException:  # on any error, the sequence is abandoned
            self.drafter.end(slot)
            raise
        if one.done:
            self._end(slot, one, prefill.logits)
        self._last = self.clock.mark()
        one.prefill = (begun, self._last)

    def _end(self, slot: int, one: SequenceState, logits: torch.Tensor) -> None:
        """Notifies the drafter that a sequence is complete, and checks its last logits for NaN.

        NaN stay in the cache, so that all later logits of a sequence hold them. The host reads the flags at the end.
        """
        one.ended = True
        self._are_nan.append(logits.isnan().any())
        read = self.drafter.end(slot)
        last = one.steps[-1] if one.steps else None
        if read and last is not None and last.draft_bytes is not None:  # unknown bytes stay unknown
            last.draft_bytes = counted(last.draft_bytes + read)

    @torch.inference_mode()
    def reserve(self, requests: list[Request]) -> None:
        """Allocates the buffers for these requests, or reuses those of the last call."""
        # Sequences near their end have drafts as long as those of others.
        capacity = max(len(r.prompt) + r.decoding.max_new_tokens for r in requests) + self._spare
        slots = min(self.scheduler.slots, len(requests))
        if self._cache is None or self._cache.capacity < capacity or self._cache.slots < slots:
            # Never shrink: alternating request sizes would reallocate in every call.
            slots, capacity = max(slots, self._size[0]), max(capacity, self._size[1])
            self._cache = None
            # They hold the cache, which is freed before a larger one is allocated.
            self.__dict__.pop("_layout", None)
            self.__dict__.pop("_slots", None)
            captured = self.target.fixed_shapes or self.drafter.captures_passes()
            step = FIXED_STEP if captured else CACHE_STEP
            capacity = rounded_up(capacity, step)
            cache = self.target.new_cache(capacity, slots)
            self._slots = Slots(slots, capacity, self.target.device)
            self._tokens = self._slots.tensor(capacity)
            self.drafter.open(self._slots, self.target)
            # Last: only now does everything have this size.
            self._cache, self._size = cache, (slots, cache.capacity)
        self._layout = self.scheduler.layout(self._cache)
        self._uniforms: torch.Tensor | None = None
        decoding = requests[0].decoding
        if not decoding.greedy:
            block = decoding.verification == BLOCK
            columns = self.drafter.max_draft_tokens if block else self.drafter.siblings
            shape = (*self._tokens.shape, 1 + 2 * columns)
            self._uniforms = torch.zeros(shape, dtype=torch.float64, device=self.target.device)

    def _check(self, requests: list[Request]) -> None:
        if len({replace(request.decoding, max_new_tokens=1) for request in requests}) > 1:
            raise UserError("the requests of a batch must have one temperature, top_k and top_p")
        drawn = self.drafter.max_nodes and not self.drafter.deterministic
        if requests[0].decoding.verification == BLOCK and drawn:
            raise UserError(
                "decoding.verification=block is for chains; this drafter samples trees: set it to token"
            )
        if requests[0].decoding.verification == TYPICAL and not requests[0].decoding.greedy:
            raise UserError("decoding.verification=typical is for greedy decoding: set it to token")
        for request in requests:
            length, new_tokens = len(request.prompt), request.decoding.max_new_tokens
            if not length:
                raise UserError("the prompt is empty")
            require_at_least(1, max_new_tokens=new_tokens)
            if length + new_tokens > self.context_length:
                raise UserError(
                    f"a prompt of {length} tokens and {new_tokens} new ones do not fit the context of "
                    f"{self.context_length}"
                )

    # -- the trace

    def _complete(self, done: Round) -> None:
        """Adds the shared times of a round, and the stats of each sequence, to its steps."""
        b = len(done.steps)
        align, drafting, verify, other = (self.clock.seconds(a, z) / b for a, z in pairwise(done.marks))
        if not self._layout.aligns:
            align, other = 0.0, align + other
        for step in done.steps:
            step.draft_seconds, step.verify_seconds = drafting, verify
            step.other_seconds, step.align_seconds = other, align
        for name, value in done.stats.items():
            if isinstance(value, tuple):
                value = self.clock.seconds(*value)
            elif isinstance(value, torch.Tensor):
                value = value.tolist()
            for slot, step in enumerate(done.steps):
                step.stats[name] = value[slot] if isinstance(value, list) else value

    def _generation(self, one: SequenceState, opening: float) -> Generation:
        prefill = opening + self.clock.seconds(*one.prefill)
        finish = "stop" if one.tokens[-1] in one.stop_ids else "length"
        spent = sum(step.seconds for step in one.steps)
        return Generation(one.new_tokens, prefill, prefill + spent, finish, one.steps)


def exhaust(rounds: Rounds) -> list[Generation]:
    """Runs all rounds of a generator at once; returns the answers."""
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return end.value
