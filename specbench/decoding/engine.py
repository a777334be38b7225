"""The one draft-verify-commit loop. Plain autoregressive decoding is this loop with empty drafts."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from specbench.decoding.acceptance import Accepted, accept
from specbench.decoding.draft import Context, Draft, Drafter
from specbench.decoding.sampling import TARGET, all_drawn, position_draws
from specbench.decoding.target import Target, ancestors
from specbench.decoding.trace import Clock, Generation, Mark, Step
from specbench.decoding.turns import between_rounds
from specbench.errors import UserError, at_least

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.sampling import Decoding

CACHE_STEP = 256  # a cache that grows in steps is reused by most questions


class Engine:
    """Decodes one sequence at a time with a target and a drafter; buffers are kept between calls."""

    def __init__(
        self, target: Target, drafter: Drafter, stop_ids: frozenset[int], context_length: int | None = None
    ):
        self.target = target
        self.drafter = drafter
        self.stop_ids = stop_ids
        self.context_length = context_length or target.config.max_position_embeddings
        self.clock = Clock(target.device)
        self._cache = target.new_cache(CACHE_STEP)

    @torch.inference_mode()
    def generate(self, prompt: list[int], decoding: Decoding, seed: int = 0) -> Generation:
        """Decodes after `prompt` until a stop token or exactly `decoding.max_new_tokens` new tokens.

        Args:
            prompt: token ids.
            decoding: how tokens are chosen, and how many at most.
            seed: of the sampling; greedy decoding draws nothing.

        Raises:
            UserError: the context cannot hold it all.
        """
        check_fits(prompt, decoding, self.context_length)
        try:
            return self._generate(prompt, decoding, seed)
        finally:
            self.drafter.end()

    def _generate(self, prompt: list[int], decoding: Decoding, seed: int) -> Generation:
        target, drafter, clock = self.target, self.drafter, self.clock
        clock.synchronize()
        started = clock.mark()
        room = len(prompt) + decoding.max_new_tokens
        cache = self._empty_cache(room + drafter.tree_nodes)
        tokens = torch.empty(room, dtype=torch.int64, device=target.device)
        tokens[: len(prompt)] = torch.tensor(prompt)
        context = Context(tokens, len(prompt), 0, decoding, None, drafter.siblings, seed)
        if not decoding.greedy:
            numbers = position_draws(seed, decoding.max_new_tokens, drafter.siblings, target.device)
            context.uniforms = torch.cat([numbers.new_zeros(len(prompt), numbers.shape[1]), numbers])

        prefill = target.prefill(context.known().unsqueeze(0), cache, drafter.taps)
        draw = None if context.uniforms is None else context.uniforms[context.length, TARGET].view(1)
        first, _ = decoding.select(prefill.logits, draw)
        tokens[context.length : context.length + 1] = first
        context.length += 1
        out = all_drawn(first.tolist())
        context.following = out[0]
        drafter.begin(context, prefill, target, cache)
        prefilled = clock.mark()

        nothing = Draft(tokens[:0])
        rounds = []
        others = [between_rounds(clock, len(out))]
        while out[-1] not in self.stop_ids and len(out) < decoding.max_new_tokens:
            begun = clock.mark()
            context.max_draft = decoding.max_new_tokens - len(out) - 1
            asked = context.max_draft > 0  # the last place belongs to the target alone
            draft = drafter.draft(context) if asked else nothing
            drafted = clock.mark()
            exits: list[Mark] = []
            at_exit = None
            if asked and drafter.launch_layer is not None:

                def at_exit(states: torch.Tensor, draft: Draft = draft, exits: list[Mark] = exits) -> None:
                    exits.append(clock.mark())
                    drafter.launch(context, draft, states)

            logits = target.verify(context.pending(), draft, cache, drafter.launch_layer, at_exit)
            verified = clock.mark()
            behind = None if context.uniforms is None else context.uniforms[context.length :]
            verdict = accept(logits, draft, decoding, behind)
            new, accepted = self._settle(verdict, draft, context, cache)
            if asked:
                drafter.commit(context, accepted)
            emitted = that_count(new, self.stop_ids)
            out += new[:emitted]
            marks = (begun, drafted, verified, clock.mark())
            rounds.append((draft, min(accepted, emitted), emitted, marks, exits))
            others.append(between_rounds(clock, len(out)))
        drafter.end()
        ended = clock.mark()
        clock.synchronize()
        return Generation(
            tokens=out,
            prefill_seconds=clock.seconds(started, prefilled),
            seconds=clock.seconds(started, ended) - sum(clock.seconds(*span) for span in others if span),
            finish="stop" if out[-1] in self.stop_ids else "length",
            steps=[self._step(*r) for r in rounds],
        )

    def _settle(
        self, verdict: Accepted, draft: Draft, context: Context, cache: KVCache
    ) -> tuple[list[int], int]:
        """Brings context and cache up to what was accepted; returns the new tokens and the accepted count."""
        k = draft.tokens.shape[0]
        parts = [verdict.count.view(1), verdict.next.view(1), draft.tokens]
        if verdict.path is not None:
            parts.append(verdict.path)
        count, following, *rest = torch.cat(parts).tolist()  # the one time in a round that the host waits
        at = context.length
        if verdict.path is None:
            new = rest[:count]
            kept = draft.tokens[:count]
            cache.truncate(at + count)
        else:
            nodes = verdict.path[:count]
            new = [rest[i] for i in rest[k : k + count]]
            kept = draft.tokens[nodes]
            cache.keep(at, nodes)
        context.tokens[at : at + count] = kept
        context.tokens[at + count] = verdict.next
        context.length += count + 1
        context.following = following
        return all_drawn([*new, following]), count

    def _step(
        self, draft: Draft, accepted: int, emitted: int, marks: tuple[Mark, ...], exits: list[Mark]
    ) -> Step:
        drafted = draft.tokens.shape[0]
        depth = drafted
        if draft.parents is not None:
            depth = int(ancestors(draft.parents).sum(1).max())
        drafting, verifying, other = (self.clock.seconds(a, b) for a, b in pairwise(marks))
        layer = draft.resume.layer if draft.resume is not None else 0
        return Step(
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            depth=depth,
            draft_seconds=drafting,
            verify_seconds=verifying,
            other_seconds=other,
            draft_bytes=draft.bytes_read,
            target_bytes=self.target.pass_bytes(layer),
            exits=tuple(draft.exits),
            exit_seconds=self.clock.seconds(marks[1], exits[0]) if exits else None,
            **({} if draft.beside is None else asdict(draft.beside)),
        )

    def _empty_cache(self, capacity: int) -> KVCache:
        if self._cache.capacity < capacity:
            self._cache = self.target.new_cache(-(-capacity // CACHE_STEP) * CACHE_STEP)
        self._cache.truncate(0)
        return self._cache


def check_fits(prompt: list[int], decoding: Decoding, context_length: int) -> None:
    """Raises UserError unless there is a prompt, something to decode, and a context that holds both."""
    if not prompt:
        raise UserError("the prompt is empty")
    at_least(1, max_new_tokens=decoding.max_new_tokens)
    if len(prompt) + decoding.max_new_tokens > context_length:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {decoding.max_new_tokens} new ones do not fit the context of "
            f"{context_length}"
        )


def that_count(new: list[int], stop_ids: frozenset[int]) -> int:
    """How many of the new tokens count: up to and including the first stop token."""
    for i, token in enumerate(new):
        if token in stop_ids:
            return i + 1
    return len(new)
