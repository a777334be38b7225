"""Random schedules on a fake model: every row ends as its own sequential run.

The next token is a checksum of all tokens that the attention sees, each with its position: a stale, missing,
doubled or misplaced entry of the cache changes it. It goes through the real cache, places, layouts and engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import ForwardContext, KVCache
from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.model.graphs import EagerRunner
from specbench.decoding.model.layer_stack import attention_mask
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Draft, Prefill, Request, SequenceState
from specbench.decoding.tree import Tree
from tests.support.batches import Chaos
from tests.support.drafters import branched

VOCAB = 13


def following(tokens: list[int]) -> int:
    """The next token, in plain Python."""
    return sum((token + 2) * (7 * i + 3) for i, token in enumerate(tokens)) % VOCAB


def sequential(prompt: list[int], cap: int, stop_ids: frozenset[int]) -> list[int]:
    tokens, out = list(prompt), []
    while len(out) < cap and (not out or out[-1] not in stop_ids):
        out.append(following(tokens))
        tokens.append(out[-1])
    return out


class FakeTarget:
    """The interface of `StagedModel` that the batch engine uses. Keys hold a token's share of the checksum."""

    device = torch.device("cpu")
    runner, fixed_shapes, width, padding = EagerRunner(), False, None, 0
    config = SimpleNamespace(max_position_embeddings=10**6)

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        return KVCache([self.device], 1, 1, slots, capacity, torch.float64)

    def prefill(self, ids: torch.Tensor, cache: KVCache, taps) -> Prefill:
        n = ids.shape[1]
        shares = self._shares(ids, torch.arange(n))
        cache.begin_pass(0, 1, ForwardContext.consecutive(0, n), 1, n)
        cache.update(shares.view(1, 1, -1, 1), shares.view(1, 1, -1, 1), 0)
        return Prefill(ids, self._logits(shares.sum(1)))

    def verify(
        self, pending: torch.Tensor, draft: Draft, cache: KVCache, ctx: ForwardContext, taps, on_hidden, split
    ) -> torch.Tensor:
        ids = torch.cat([pending, draft.tokens], dim=1)
        b, n = ids.shape
        positions = ctx.positions if ctx.start is None else torch.arange(ctx.start, ctx.kv_len)[None]
        shares = self._shares(ids, positions)
        cache.begin_pass(0, 1, ctx, b, n)
        keys, values = cache.update(shares[:, None, :, None], shares[:, None, :, None], 0)
        assert torch.equal(keys, values)
        # A mask of None is the kernel's own: causal for an empty cache, all for a single token.
        mask = attention_mask(ctx, n, keys)
        seen = torch.ones(n, ctx.kv_len) if mask is None else mask[:, 0] == 0
        return self._logits((keys[:, 0, :, 0].unsqueeze(1) * seen).sum(2))

    def pass_bytes(self, lo: int = 0, tokens: int = 1) -> int:
        return 1

    def _shares(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ((ids + 2) * (7 * positions + 3)).double()

    def _logits(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(sums.long() % VOCAB, VOCAB).double()


class FakeDrafter(Drafter):
    """Drafts what the target will say, but for random mistakes, and lets each row draft less than the batch."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.max_draft_tokens = rng.randint(0, 6)
        self.skill = rng.choice((0.0, 0.5, 0.8, 1.0))
        self.trees = rng.random() < 0.5
        self.max_nodes = 3 * self.max_draft_tokens if self.trees else 0
        self.owner: list[tuple] = []

    def open(self, slots: Slots, target) -> None:
        self.owner = slots.values(tuple)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        self.owner[slot] = tuple(sequence.request.prompt)

    def draft(self, batch: Batch) -> Draft:
        k = self.rng.randint(1, min(self.max_draft_tokens, batch.max_draft))
        chains = []
        for slot, length in enumerate(batch.lengths):
            tokens = batch.tokens[slot, :length].tolist()
            assert tokens == batch.sequences[slot].tokens
            assert tuple(tokens[: len(self.owner[slot])]) == self.owner[slot], (
                "a drafter's state went to another sequence"
            )
            for _ in range(k):
                right = following(tokens)
                tokens.append(right if self.rng.random() < self.skill else self.rng.randrange(VOCAB))
            chains.append(tokens[length:])
        if self.trees and self.rng.random() < 0.8:
            return self._tree(chains)
        counts = None
        if self.rng.random() < 0.5:
            counts = torch.tensor([self.rng.randint(0, k) for _ in chains])
        return Draft(torch.tensor(chains), candidates=counts)

    def _tree(self, chains: list[list[int]]) -> Draft:
        """Trees of different shapes, or of one that all share."""

        def wrong(token: int) -> int:
            return (token + self.rng.randrange(1, VOCAB)) % VOCAB

        if self.rng.random() < 0.5:
            state = self.rng.getstate()
            trees = []
            for chain in chains:  # the same random numbers, so the same shape
                self.rng.setstate(state)
                trees.append(branched(self.rng, chain, wrong))
            return Draft(torch.tensor([t for t, _ in trees]), tree=Tree.of(torch.tensor(trees[0][1])))
        trees = [branched(self.rng, chain, wrong) for chain in chains]
        counts = [len(tokens) for tokens, _ in trees]
        k = max(counts)
        tokens = torch.tensor([tokens + [0] * (k - len(tokens)) for tokens, _ in trees])
        parents = torch.tensor([parents + [-1] * (k - len(parents)) for _, parents in trees])
        return Draft(tokens, tree=Tree.of(parents), candidates=torch.tensor(counts))


def any_requests(rng: random.Random) -> list[Request]:
    requests = []
    for _ in range(rng.randint(1, 9)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 11)))]
        stops = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1))))
        requests.append(Request(prompt, SamplingParams(rng.choice((1, 2, 5, 9))), 0, stops))
    return requests


def run_schedules(seed: int, count: int, scheduler: Callable[[random.Random], Scheduler]) -> set[tuple]:
    """Runs random requests under `count` schedulers and checks every answer; returns the pairs (scheduler, layout)
    that ran."""
    rng, ran = random.Random(seed), set()
    for _ in range(count):
        chosen = scheduler(rng)
        engine = Engine(FakeTarget(), FakeDrafter(rng), frozenset(), chosen)
        for _ in range(rng.choice((1, 1, 2))):  # the second time in the buffers of the first
            requests = any_requests(rng)
            answers = engine.generate(requests)
            assert [a.tokens for a in answers] == expected_answers(requests)
            assert all(len(a.tokens) == 1 + sum(s.emitted for s in a.steps) for a in answers)
        ran.add((type(chosen), type(engine._layout)))
    return ran


def expected_answers(requests: list[Request]) -> list[list[int]]:
    return [sequential(r.prompt, r.decoding.max_new_tokens, r.stop_ids) for r in requests]


def assert_found(layout: type[RaggedLayout]) -> None:
    """Many answers must be wrong with a faulty layout."""
    rng, wrong = random.Random(5), 0
    for _ in range(40):
        scheduler, requests = Chaos(3, rng), any_requests(rng)
        scheduler.layout = layout
        answers = Engine(FakeTarget(), FakeDrafter(rng), frozenset(), scheduler).generate(requests)
        wrong += [a.tokens for a in answers] != expected_answers(requests)
    assert wrong > 5
