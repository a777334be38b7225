"""Random schedules on a fake model: every row ends as its own sequential run.

The next token is a checksum of all tokens that the attention sees, each with its position: a stale, missing,
doubled or misplaced entry of the cache changes it. It goes through the real cache, places, layouts and engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import torch

from specbench.decoding.batch import BatchEngine, Request, Rows, Scheduler
from specbench.decoding.draft import Draft, Drafter, Needs
from specbench.decoding.kv_cache import KVCache, Places, RowCache
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Prefill

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
    """The interface of `Target` that the batch engine uses. Keys hold a token's share of the checksum."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=10**6)

    def new_rows(self, rows: int, capacity: int) -> RowCache:
        return RowCache(1, 1, 1, rows, capacity, self.device, torch.float64)

    def prefill(self, ids: torch.Tensor, cache: KVCache, taps) -> Prefill:
        shares = self._shares(ids, torch.arange(ids.shape[1]))
        cache.update(shares.view(1, 1, -1, 1), shares.view(1, 1, -1, 1), 0)
        return Prefill(self._logits(shares.sum(1)))

    def verify_rows(
        self, pending: torch.Tensor, draft: Draft, cache: RowCache, places: Places
    ) -> torch.Tensor:
        ids = torch.cat([pending, draft.tokens], dim=1)
        shares = self._shares(ids, places.positions)
        cache.open(0, 1, places)
        keys, values = cache.update(shares[:, None, :, None], shares[:, None, :, None], 0)
        assert torch.equal(keys, values)
        seen = places.columns.unsqueeze(1) <= places.positions.unsqueeze(2)
        return self._logits((keys[:, 0, :, 0].unsqueeze(1) * seen).sum(2))

    def pass_bytes(self, lo: int = 0) -> int:
        return 1

    def _shares(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ((ids + 2) * (7 * positions + 3)).double()

    def _logits(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(sums.long() % VOCAB, VOCAB).double()


class FakeDrafter(Drafter):
    """Drafts what the target will say, but for random mistakes, and lets each row draft less than the batch."""

    needs = Needs(batching=True)

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.max_draft_tokens = rng.randint(0, 6)
        self.skill = rng.choice((0.0, 0.5, 0.8, 1.0))
        self.owner: list[tuple] = []

    def open_rows(self, rows: int, capacity: int, target, cache) -> None:
        self.owner = [()] * rows

    def begin_row(self, row: int, prompt: torch.Tensor, prefill: Prefill, target) -> None:
        self.owner[row] = tuple(prompt[0].tolist())

    def move_rows(self, sources: list[int], destinations: list[int], reach: int) -> None:
        moved = [self.owner[source] for source in sources]
        for destination, owner in zip(destinations, moved):
            self.owner[destination] = owner

    def draft_rows(self, rows: Rows) -> Draft:
        known, k = rows.known.tolist(), self.rng.randint(1, min(self.max_draft_tokens, rows.max_draft))
        drafts = []
        for row, length in enumerate(known):
            tokens = rows.tokens[row, :length].tolist()
            assert tuple(tokens[: len(self.owner[row])]) == self.owner[row], (
                "a drafter's state went to another row"
            )
            for _ in range(k):
                right = following(tokens)
                tokens.append(right if self.rng.random() < self.skill else self.rng.randrange(VOCAB))
            drafts.append(tokens[length:])
        counts = [self.rng.randint(0, k) for _ in known] if self.rng.random() < 0.5 else [k] * len(known)
        return Draft(torch.tensor(drafts), counts=torch.tensor(counts))


def any_requests(rng: random.Random) -> list[Request]:
    requests = []
    for _ in range(rng.randint(1, 9)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 11)))]
        stops = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1))))
        requests.append(Request(prompt, Decoding(rng.choice((1, 2, 5, 9))), 0, stops))
    return requests


def run_schedules(seed: int, count: int, scheduler: Callable[[random.Random], Scheduler]) -> set[tuple]:
    """Runs random requests under `count` schedulers and checks every answer; returns the pairs (scheduler, layout)
    that ran."""
    rng, ran = random.Random(seed), set()
    for _ in range(count):
        chosen = scheduler(rng)
        engine = BatchEngine(FakeTarget(), FakeDrafter(rng), chosen, frozenset())
        for _ in range(rng.choice((1, 1, 2))):  # the second time in the buffers of the first
            requests = any_requests(rng)
            answers = engine.generate(requests)
            assert [a.tokens for a in answers] == expected_answers(requests)
            assert all(len(a.tokens) == 1 + sum(s.emitted for s in a.steps) for a in answers)
        ran.add((type(chosen), type(engine._layout)))
    return ran


def expected_answers(requests: list[Request]) -> list[list[int]]:
    return [sequential(r.prompt, r.decoding.max_new_tokens, r.stop_ids) for r in requests]
