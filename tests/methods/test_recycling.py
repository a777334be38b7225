"""Token Recycling: the published tree, what the table holds, that nothing outlives an answer, and losslessness."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from methods.common.rank_trees import chance, likeliest_ids, rank_tree
from methods.recycling import RANKS, TREE, TokenRecycling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support.decoding import random_pair
from tests.support.lossless import assert_lossless, assert_stops_anywhere
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with

PROMPT = [3, 9, 27, 11, 33, 29, 17, 9, 27]


def test_the_tree_is_the_published_one():
    paths = TREE
    assert len(paths) == len(set(paths)) == 80
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert all(chance(path) < chance(path[:-1]) for path in paths)
    with pytest.raises(UserError, match=r"nodes=81.*\b80\b"):
        TokenRecycling(random_pair("llama"), nodes=81)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_a_tree_of_ranks_is_laid_out_level_by_level(depth):
    paths = TREE[:30]
    tree, levels = rank_tree(tuple(paths), depth, torch.device("cpu"))
    parents, found = tree.parents[0].tolist(), []
    ranks = torch.cat([level.ranks for level in levels]).tolist()
    for node, (parent, rank) in enumerate(zip(parents, ranks)):
        assert parent < node
        found.append((*(found[parent] if parent >= 0 else ()), rank))
    assert set(found) == {path for path in paths if len(path) <= depth}
    begins = 0
    for own, below in pairwise(levels):
        found = parents[begins + len(own.parents) :][: len(below.parents)]
        assert found == [begins + place for place in below.parents.tolist()]
        begins += len(own.parents)


@pytest.mark.parametrize("shape", [(3, 61), (2, 5, 1024), (81, 16_384), (1, 10_007)])
def test_the_likeliest_ids(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(likeliest_ids(logits, 8), logits.topk(8, dim=-1).indices)
    assert torch.equal(likeliest_ids(logits, 1), logits.argmax(-1, keepdim=True))


class Watched(TokenRecycling):
    """Compares its table with one that plain Python keeps."""

    def begin(self, slot, sequence, prefill):
        super().begin(slot, sequence, prefill)
        model, prompt = self.target.model, sequence.request.prompt
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
        self.known = {}
        for token, row in zip(prompt, logits) if self.prompt else ():
            self.known[token] = row.topk(RANKS).indices.tolist()
        self.compare()

    def commit(self, batch, verified):
        super().commit(batch, verified)
        if batch.is_over:  # nothing is drafted from this table any more
            self.compare()
            return
        draft = verified.draft
        tokens, k = [*batch.last_tokens(1)[0].tolist(), *draft.tokens[0].tolist()], draft.tokens.shape[1]
        depths = draft.tree.offsets()[0].tolist()
        path = [0] if verified.path is None else [0, *(verified.path[0, : verified.counts[0]] + 1).tolist()]
        # What counts is written last: of rejected nodes deep ones first, then the accepted path in its order.
        rejected = sorted(set(range(1 + k)) - set(path), key=lambda node: (-depths[node], node))
        for node in [*rejected, *path]:
            self.known[tokens[node]] = verified.logits[0, node].topk(RANKS).indices.tolist()
        self.compare()

    def compare(self):
        for token in range(self.target.vocab_size):
            assert self._followers[0, token].tolist() == self.known.get(token, [-1] * RANKS)
        assert (self._newest == -1).all()


@pytest.mark.parametrize("prompt", [True, False])
def test_the_table_after_every_round(prompt):
    pair = random_pair("llama")
    drafter = Watched(pair, 30, prompt)
    answer = Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(40))
    assert sum(step.accepted for step in answer.steps) > 3
    assert max(step.drafted for step in answer.steps) == 30


def test_a_target_has_fewer_tokens_than_a_table_has_columns():
    pair = random_pair("llama", vocab_size=7)
    drafter = TokenRecycling(pair)
    assert drafter.max_nodes == len([path for path in TREE if max(path) < 7]) < len(TREE)
    prompt = [token % 7 for token in PROMPT]
    answers = [
        Engine(pair.staged, one, frozenset()).answer(prompt, SamplingParams(24))
        for one in (drafter, Drafter())
    ]
    assert answers[0].tokens == answers[1].tokens


def test_the_last_round_of_an_answer_teaches_only_what_goes_on(monkeypatch):
    learned = []
    monkeypatch.setattr(TokenRecycling, "_learn", lambda self, *_: learned.append(self.shared))
    for memory in ("answer", "run"):
        pair = random_pair("llama")
        drafter = TokenRecycling(pair, 20, prompt=False, memory=memory)
        stop = Engine(pair.staged, Drafter(), frozenset()).answer(PROMPT, SamplingParams(9)).tokens[-1]
        rounds = len(Engine(pair.staged, drafter, frozenset([stop])).answer(PROMPT, SamplingParams(40)).steps)
        assert len(learned) == rounds - (memory == "answer") > 0
        learned.clear()


def accepted(drafter, engine: Engine, prompt: list[int]) -> list[int]:
    return [step.accepted for step in engine.answer(prompt, SamplingParams(24)).steps]


def test_a_repeat_copies_nothing_unless_memory_is_kept():
    """With a table that outlives the answer, the second time the answer itself is drafted."""
    pair = random_pair("llama")
    drafter = TokenRecycling(pair, 40, prompt=False)
    engine = Engine(StagedModel(pair.target), drafter, frozenset())
    assert accepted(drafter, engine, PROMPT) == accepted(drafter, engine, PROMPT)
    keeping = TokenRecycling(pair, 40, prompt=False, memory="run")
    engine = Engine(StagedModel(pair.target), keeping, frozenset())
    first = accepted(keeping, engine, PROMPT)
    before = keeping.snapshot()
    second = accepted(keeping, engine, PROMPT)
    assert len(second) < len(first), "kept state copies the answer that was given before"
    keeping.restore(before)
    assert accepted(keeping, engine, PROMPT) == second
    keeping.forget()
    assert accepted(keeping, engine, PROMPT) == first


def test_lossless():
    steps = []
    for turn, nodes in enumerate((1, 8, 30)):
        steps += assert_lossless("llama", TokenRecycling(random_pair("llama"), nodes), third=turn)
    assert any(s.accepted for s in steps) and any(s.accepted < s.depth for s in steps)


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@pytest.mark.parametrize("memory", ["answer", "run"])
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, memory):
    arch = "mistral" if memory == "run" else "llama"
    drafter = TokenRecycling(random_pair(arch), 20, memory=memory)
    assert_lossless_with(scheduler, arch, drafter, 3, alone=["accepted"] if memory == "answer" else [])


@pytest.mark.slow
def test_it_stops_anywhere():
    assert_stops_anywhere(lambda *_: TokenRecycling(random_pair("llama"), 40))
