"""Kangaroo's tree: which paths are drafted, what is in the caches, that width 1 is the chain, and losslessness."""

from __future__ import annotations

import pytest
import torch

from methods.eqspec import EqSpec
from methods.kangaroo import Kangaroo, KangarooTree
from methods.ragged import RaggedBatch
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from tests.support import batches
from tests.support.decoding import PROMPT, random_pair, tokens_through_layers
from tests.support.lossless import assert_lossless, assert_stops_anywhere
from tests.support.methods import trimmed
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with

WIDTH, LEVELS, EXIT = 3, 4, 2


def shallow(target: StagedModel, tokens: list[int]) -> torch.Tensor:
    """Exit states [1, n, d] of tokens, of one pass into an empty cache."""
    return target.run_layers(target.embed(torch.tensor([tokens])), target.new_cache(len(tokens)), 0, 0, EXIT)


def adapted(adapter, states: torch.Tensor) -> tuple[torch.Tensor, object]:
    """What the adapter makes of them in one pass, and its cache."""
    n = states.shape[1]
    cache = adapter.new_cache(n)
    cache.begin_pass(0, 1, ForwardContext.consecutive(0, n), 1, n)
    rope = adapter.rope(torch.arange(n).unsqueeze(0), states)
    return adapter(states, position_embeddings=rope, past_key_values=cache), cache


def likeliest_paths(
    drafter: KangarooTree, known: list[int], levels: int
) -> list[list[tuple[float, tuple[int, ...]]]]:
    """(confidence, path) of each node, level by level, worked out on whole sequences."""
    target, frontier, found = drafter.target, [(1.0, ())], []
    for _ in range(levels):
        followers = []
        for confidence, path in frontier:
            out, _ = adapted(drafter.adapter, shallow(target, [*known, *path]))
            likely = target.unembed(out[0, -1]).softmax(-1)
            followers += [(confidence * p, (*path, i)) for i, p in enumerate(likely.tolist())]
        frontier = sorted(followers, reverse=True)[:WIDTH]
        found.append(frontier)
    return found


@pytest.mark.slow
@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_what_is_drafted_and_what_the_caches_hold(arch, adapter):
    """The likeliest paths, level by level. After a round the adapter holds what one pass over the known tokens gives,
    but for the last one after a path that reached the last level; the target's layers hold it all."""
    pair, rounds = random_pair(arch), []

    class Checked(KangarooTree):
        def draft(self, batch):
            draft = super().draft(batch)
            known, levels = batch.sequences[0].tokens, draft.tokens.shape[1] // WIDTH
            expected = [node for level in likeliest_paths(self, known, levels) for node in level]
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(draft.tokens[0].tolist(), draft.tree.parents[0].tolist()):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert paths == [path for _, path in expected]
            for node, path in enumerate(paths):
                states = shallow(self.target, [*known, *path])[0, -1]
                torch.testing.assert_close(draft.resume.hidden[0, 1 + node], states, atol=1e-4, rtol=1e-3)
            return draft

        def commit(self, batch, verified):
            super().commit(batch, verified)
            (sequence,), held = batch.sequences, self._adapted[0]
            known = sequence.length - 1
            assert known - held == (verified.counts[0] == verified.logits.shape[1] // WIDTH)
            rounds.append((known - held, verified.counts[0]))
            states = shallow(self.target, sequence.tokens[:-1])
            _, own = adapted(self.adapter, states)
            whole = self.target.new_cache(known)
            self.target.run_layers(self.target.embed(torch.tensor([sequence.tokens[:-1]])), whole, 0)
            for cache, expected, n in (
                (self._layer_cache.layout.cache, own, held),
                (batch.layout.cache, whole, known),
            ):
                ours, theirs = (c.segments[0][:, :, :, :n] for c in (cache, expected))
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(self._before[:1], states[:, -1:], atol=1e-4, rtol=1e-3)

    drafter = Checked(pair, adapter(arch), EXIT, WIDTH, LEVELS, 0.0)
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(36))
    assert {0, 1} == {missing for missing, _ in rounds} and len({count for _, count in rounds}) > 2


def test_no_layer_sees_a_token_twice_in_a_round(adapter):
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    drafter = KangarooTree(pair, adapter("llama"), EXIT, WIDTH, LEVELS, 0.2)
    with tokens_through_layers(pair.target) as tokens:
        steps = Engine(target, drafter, frozenset()).answer(PROMPT, SamplingParams(40)).steps
    assert tokens == [len(PROMPT) + sum(s.drafted + 1 for s in steps)] * len(tokens)
    assert {s.drafted % WIDTH for s in steps} == {0} and len({s.drafted for s in steps}) > 2
    head, own = target.pass_bytes(0, 0), sum(p.nbytes for p in drafter.adapter.parameters())
    for step in steps:
        assert step.depth * WIDTH == step.drafted
        if step.drafted:
            first = target.pass_bytes(0, EXIT, head=False)
            assert step.draft_bytes == step.depth * (own + head) + (1 + step.depth) * first


def test_a_level_that_is_unsure_is_the_last(adapter):
    """Its likeliest path is less likely than the threshold; those of all levels above are not."""
    pair, eta, depths = random_pair("llama"), 0.3, set()

    class Checked(KangarooTree):
        def draft(self, batch):
            draft = super().draft(batch)
            levels = draft.tokens.shape[1] // WIDTH
            best = [level[0][0] for level in likeliest_paths(self, batch.sequences[0].tokens, levels)]
            assert all(confidence >= eta for confidence in best[:-1])
            assert best[-1] < eta or levels == min(LEVELS, batch.max_draft)
            depths.add(levels)
            return draft

    drafter = Checked(pair, adapter("llama"), EXIT, WIDTH, LEVELS, eta)
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(40))
    assert len(depths) > 2


def test_of_width_one_it_is_the_chain(adapter):
    pair, (requests, _) = random_pair("llama"), batches.cases("llama")
    chain, tree = (
        Kangaroo(pair, adapter("llama"), EXIT, 4, 0.0),
        KangarooTree(pair, adapter("llama"), EXIT, 1, 4, 0.0),
    )
    found = []
    for drafter in (chain, tree):
        answers = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(3)).generate(requests)
        found.append([(a.tokens, [(s.depth, s.accepted, s.draft_bytes) for s in a.steps]) for a in answers])
    assert found[0] == found[1]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, adapter):
    pair, steps = random_pair(arch), []
    for turn, (width, levels, eta) in enumerate(((3, 4, 0.0), (2, 5, 0.1), (4, 2, 0.0), (1, 3, 1.0))):
        steps += assert_lossless(
            arch, KangarooTree(pair, adapter(arch), EXIT, width, levels, eta), third=turn
        )
    half = list(range(0, pair.vocab_size, 2))
    steps += assert_lossless(arch, trimmed(KangarooTree(pair, adapter(arch), EXIT, 3, 4, 0.0), half), third=1)
    assert {0, 1, 2, 3} <= {s.accepted for s in steps}


@pytest.mark.one_in(3)
@pytest.mark.slow
@EVERY_SCHEDULER
@pytest.mark.parametrize("eta", [0.0, 0.1])
def test_lossless_in_batches(scheduler, eta, adapter):
    steps = []
    for arch in ("qwen2", "mistral"):
        drafter = KangarooTree(random_pair(arch), adapter(arch), EXIT, WIDTH, LEVELS, eta)
        steps += assert_lossless_with(scheduler, arch, drafter)
    assert {0, 1, 2} <= {s.accepted for s in steps}


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [RaggedBatch, EqSpec])
def test_a_sequence_of_a_batch_is_drafted_for_as_if_alone(scheduler, adapter):
    """Also where others of the batch draft more levels than it does."""
    pair, requests = (
        random_pair("llama"),
        [Request(r.prompt, SamplingParams(16)) for r in batches.cases("llama")[0]],
    )
    target, drafter = StagedModel(pair.target), KangarooTree(pair, adapter("llama"), EXIT, WIDTH, LEVELS, 0.2)
    alone = [Engine(target, drafter, frozenset()).generate([request])[0] for request in requests]
    together = Engine(target, drafter, frozenset(), scheduler(4)).generate(requests)
    for one, other in zip(alone, together):
        assert one.tokens == other.tokens
        assert [(s.depth, s.accepted) for s in one.steps] == [(s.depth, s.accepted) for s in other.steps]
    assert len({s.depth for a in together for s in a.steps}) > 2


@pytest.mark.slow
def test_stop_token_anywhere(adapter):
    pair = random_pair("llama")
    assert_stops_anywhere(lambda *_: KangarooTree(pair, adapter("llama"), EXIT, WIDTH, 6, 0.0))
