"""Lookahead decoding: pool, window and mask against the algorithm in plain Python, and losslessness."""

from __future__ import annotations

import copy
import random
from functools import cache

import pytest
import torch

from methods.lookahead import Lookahead, Pool, Search, merged
from methods.ragged import RaggedBatch
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Request, SequenceState
from specbench.measure.metrics.dataframes import steps_frame
from tests.support import batches
from tests.support.aligned import AlignedChaos
from tests.support.decoding import random_pair
from tests.support.lossless import (
    assert_lossless,
    assert_samples_like_plain_decoding,
    assert_stops_anywhere,
    sampled_requests,
)
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import SCHEDULERS, assert_lossless_with
from tests.support.synthetic import columns, generation, record, turn

PROMPT = [3, 9, 27, 11, 33, 29, 17, 9, 27]
SIZES = [(1, 2, 1), (4, 2, 2), (3, 3, 2), (4, 4, 3), (2, 5, 5), (5, 5, 1)]  # W, N, G


def test_the_pool_after_a_hand_made_sequence():
    pool = Pool(2)
    for first, *others in [(1, 2, 3), (1, 4, 5), (7, 1, 1), (1, 2, 3), (1, 6, 6)]:
        pool.add(first, tuple(others))
    assert list(pool.guesses(1)) == [(6, 6), (2, 3)], (
        "an n-gram that came again is younger than one that did not"
    )
    assert list(pool.guesses(7)) == [(1, 1)] and list(pool.guesses(2)) == []


def test_a_window_goes_on_by_hand():
    """Three columns, n-grams of three tokens. Those of the first round hold tokens of the first window."""
    search = Search([(0, 1), (2, 3), (4, 5)], Pool(3))
    search.go_on(9, [11, 13, 15])
    assert search.columns == [(1, 11), (3, 13), (5, 15)] and search.pool.after == {}
    search.go_on(10, [21, 23, 25])
    assert search.columns == [(11, 21), (13, 23), (15, 25)]
    assert search.pool.after == {10: {(11, 21): None}, 3: {(13, 23): None}, 5: {(15, 25): None}}
    search.go_on(11, [31])  # there was room for one column alone
    assert search.columns == [(21, 31), (13, 23), (15, 25)]
    assert search.pool.after[11] == {(21, 31): None}
    late = Search([(0, 1), (2, 3)], Pool(3))
    for pending in (9, 10, 11):
        late.go_on(pending, [pending + 10])
    late.go_on(12, [22, 32])
    assert not any(3 in others for ngrams in late.pool.after.values() for others in ngrams), (
        "a column that had no room before still holds tokens of the first window"
    )


def test_guesses_with_one_beginning_share_it():
    chains = [(1, 2, 3), (1, 4, 3), (5, 2, 3), (1, 2, 6)]
    tokens, parents = merged(chains, 3, 99)
    assert (tokens, parents) == ([1, 5, 2, 4, 2, 3, 3, 3, 6], [-1, -1, 0, 0, 1, 2, 3, 4, 2])
    for depth, nodes in [(2, 5), (1, 2), (0, 0)]:  # by levels, so that a cut is a prefix
        assert merged(chains, depth, 99) == merged(chains, 3, nodes) == (tokens[:nodes], parents[:nodes])


def round_of(drafter: Lookahead, search: Search, pending: int) -> Batch:
    """A round of one sequence, whose search is given."""
    request = Request(PROMPT, SamplingParams(50))
    sequence = SequenceState(0, request, frozenset(), [*PROMPT, pending])
    drafter.open(Slots(1, 100, torch.device("cpu")), None)
    drafter._searches[0] = search
    tokens = torch.tensor([sequence.tokens])
    sizes = [drafter.max_draft_tokens], drafter.max_nodes
    return Batch([sequence], [sequence.length], *sizes, tokens, request.decoding, None)


@pytest.mark.parametrize(("w", "n", "g"), [(5, 4, 2), (7, 5, 7), (3, 2, 2)])
def test_the_mask_is_the_published_one(w, n, g):
    """As a matrix: first row, the other rows, the guesses; each sees the pending token."""
    rows = [[1000 * (row + 1) + i for i in range(w)] for row in range(n - 1)]
    guesses = [tuple(100 * (i + 1) + j for j in range(1, n)) for i in range(g)]
    order = [7, *rows[0][1:], *(token for row in rows[1:] for token in row), *sum(guesses, ())]
    size = (w + g) * (n - 1)
    assert len(order) == size
    expected, positions = torch.zeros(size, size, dtype=torch.bool), [0] * size
    expected[:, 0] = True
    for i in range(w):
        expected[i, : i + 1] = True
        positions[i] = i
        for row in range(1, n - 1):
            at = row * w + i
            expected[at, : i + 1] = True
            expected[at, [r * w + i for r in range(1, row + 1)]] = True
            positions[at] = row + i
    for i in range(g):
        for j in range(n - 1):
            start = w * (n - 1) + i * (n - 1)
            expected[start + j, start : start + j + 1] = True
            positions[start + j] = j + 1

    drafter = Lookahead(random_pair("llama"), w, n, g)
    search = Search([tuple(row[i] for row in rows) for i in range(w)], Pool(g))
    for guess in guesses:
        search.pool.add(7, guess)
    draft = drafter.draft(round_of(drafter, search, 7))
    fed = [7, *draft.tokens[0].tolist()]
    assert sorted(fed) == sorted(order) and len(set(fed)) == size == 1 + drafter.max_nodes
    index = [fed.index(token) for token in order]
    assert torch.equal(draft.tree.visible[0][index][:, index], expected)
    assert draft.tree.offsets()[0][index].tolist() == positions
    assert draft.candidates.tolist() == [g * (n - 1)]
    assert set(fed[1 : 1 + g * (n - 1)]) == set(sum(guesses, ()))
    # What is reported is the choice after the last row.
    choices = torch.nn.functional.one_hot(torch.tensor([fed]), 10_000).float()
    assert draft.report(choices)[0].tolist() == [7 if token == rows[0][0] else token for token in rows[-1]]


# -- the algorithm in plain Python


def simulated(choose, prompt, rows, w, n, g, cap, text):
    """Lookahead as its paper has it, row by row, with a pass of its own for every token that is looked at.

    choose: the target's token after some tokens. rows: the first window, N - 1 rows of W.

    Returns the new tokens, and of every round what was accepted and the pool as a list of n-grams, the oldest first.
    """
    rows = [[*row] for row in rows]
    known = [*prompt, choose(prompt)]
    ngrams, rounds = [], []

    def read(start):
        if text:
            ngrams.extend(tuple(known[i : i + n]) for i in range(start, len(known) - n + 1))

    read(0)
    while len(known) < len(prompt) + cap:
        limit = min(len(prompt) + cap - len(known) - 1, n - 1)
        if limit == 0:  # the last token is the target's alone
            known.append(choose(known))
            rounds.append((0, None))
            continue
        pending, before = known[-1], [*known]
        guesses = [*dict.fromkeys(x[1:] for x in reversed(ngrams) if x[0] == pending)][:g]
        accepted = 0
        for guess in guesses:
            fits = 0
            while fits < limit and choose([*before, *guess[:fits]]) == guess[fits]:
                fits += 1
            accepted = max(accepted, fits)
        for _ in range(accepted + 1):
            known.append(choose(known))
        found = []
        for i in range(w):
            column = [rows[row][i] for row in range(1, n - 1)]
            found.append(choose([*before, *rows[0][1 : i + 1], *column]))
            if len(rounds) >= n - 2:
                ngrams.append((rows[0][i] if i else pending, *column, found[-1]))
        rows = [*rows[1:], found]
        read(max(len(before) - n + 1, 0))
        rounds.append((accepted, [*ngrams]))
    return known[len(prompt) :], rounds


class Watched(Lookahead):
    """Keeps what its window began with and its pool after every round."""

    def begin(self, slot, sequence, prefill):
        super().begin(slot, sequence, prefill)
        self.began, self.pools = [*self._searches[slot].columns], []

    def commit(self, batch, verified):
        super().commit(batch, verified)
        self.pools.append(copy.deepcopy(self._searches[0].pool.after))


def against_the_simulation(w, n, g, text=False) -> int:
    """Checks an answer, round by round; returns how many draft tokens were accepted."""
    pair, cap = random_pair("llama"), 40

    @cache
    def after(tokens):
        return int(pair.target(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())

    drafter = Watched(pair, w, n, g, text)
    answer = Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(cap))
    rows = [[column[row] for column in drafter.began] for row in range(n - 1)]
    assert {token for row in rows for token in row} <= set(PROMPT)
    with torch.inference_mode():
        tokens, rounds = simulated(lambda some: after(tuple(some)), PROMPT, rows, w, n, g, cap, text)
    assert answer.tokens == tokens
    assert [step.accepted for step in answer.steps] == [accepted for accepted, _ in rounds]
    ngrams = [pool for _, pool in rounds if pool is not None]
    assert len(drafter.pools) == len(ngrams) > 5
    for pool, all_ngrams in zip(drafter.pools, ngrams):
        expected = {}
        for first, *others in reversed(all_ngrams):  # of each first token the g different ones that came last
            kept = expected.setdefault(first, [])
            if tuple(others) not in kept and len(kept) < g:
                kept.append(tuple(others))
        assert {first: [*reversed(kept)] for first, kept in pool.items()} == expected
    return sum(accepted for accepted, _ in rounds)


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_round_is_that_of_the_algorithm(size):
    accepted = against_the_simulation(*size)
    assert accepted > 2 or size[0] == 1


@pytest.mark.slow
def test_the_text_as_a_source_of_ngrams():
    assert against_the_simulation(4, 3, 3, text=True) > against_the_simulation(1, 3, 1)


# -- losslessness


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch):
    steps = []
    for third, size in enumerate(SIZES):
        steps += assert_lossless(arch, Lookahead(random_pair(arch), *size), third=third)
    assert any(s.accepted for s in steps) and any(s.accepted < s.depth for s in steps)
    assert all(s.depth <= 4 for s in steps), "the window is deeper, but no part of it can be accepted"
    assert any(not s.drafted and s.stats for s in steps), "a window goes on without a guess"


MORE_SCHEDULERS = {
    "batch size 1": lambda size: Scheduler(1),
    **SCHEDULERS,
    "chaos": lambda size: AlignedChaos(size, random.Random(3)),
}


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("scheduler", MORE_SCHEDULERS)
def test_lossless_in_batches(scheduler):
    arch = "mistral" if scheduler in ("eqspec", "chaos") else "llama"
    drafter = Lookahead(random_pair(arch), 4, 3, 3)
    assert_lossless_with(MORE_SCHEDULERS[scheduler], arch, drafter, 3, alone=["drafted", "accepted"])


@pytest.mark.parametrize("tokens", [2, 4, 9, 14])
def test_a_budget_of_tokens_cuts_the_window(tokens):
    requests, expected = batches.cases("llama")
    drafter = Lookahead(random_pair("llama"), 4, 4, 3)
    engine = Engine(
        StagedModel(random_pair("llama").target), drafter, frozenset(), RaggedBatch(3, 3 * tokens)
    )
    steps = batches.assert_lossless(engine, requests, expected)
    looked_at = [s.drafted + s.stats["looked_at"] for s in steps if s.stats]
    assert max(looked_at) <= tokens - 1 and any(looked_at) == (tokens > 2)


@pytest.mark.parametrize(("nodes", "room"), [(43, 20), (21, 10), (3, 0), (2, 2)])
def test_guesses_leave_the_window_its_share_of_a_budget(nodes, room):
    """Six columns of four tokens beside five guesses of four, the pending token among the former."""
    drafter = Lookahead(random_pair("llama"), window=6, ngram=5, guesses=5)
    assert drafter.max_nodes == 43 and drafter._room_for_guesses(nodes) == room


@pytest.mark.slow
def test_sampled_text_of_a_batch_is_that_of_autoregressive_decoding():
    pair = random_pair("llama")
    requests, drafter = sampled_requests(pair, 30, 1.0), Lookahead(pair, 6, 3, 6)
    assert assert_samples_like_plain_decoding(pair, drafter, requests, RaggedBatch(4)) > 5


@pytest.mark.slow
def test_it_stops_anywhere():
    assert_stops_anywhere(lambda *_: Lookahead(random_pair("llama"), 6, 3, 4))


def test_its_numbers():
    """Of three rounds with a window; a round without one, the last, does not count."""
    rounds = [
        {"accepted": 1, "drafted": 3, "stats": {"looked_at": 7}},
        {"accepted": 0, "drafted": 0, "stats": {"looked_at": 7}},
        {"accepted": 0, "drafted": 2, "stats": {"looked_at": 4}},
        {"accepted": 0, "drafted": 0},
    ]
    method = generation([r["accepted"] for r in rounds]) | {"steps": columns(rounds)}
    frame = steps_frame([record(turns=[turn(method=method)])])
    stats = Lookahead.summarise(frame)
    assert stats == {"guess_rate": pytest.approx(2 / 3), "looked_at": 6.0}
    assert Lookahead.describe(stats) == ["guesses in 67% of the rounds; window: 6.0 tokens a round"]
    assert Lookahead.describe(Lookahead.summarise(frame[3:])) == []
