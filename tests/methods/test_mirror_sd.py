"""Mirror-SD: branches are the drafts that would have been made anyway, and misses follow the guesses."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from methods.common.heads import DraftHead
from methods.mirror_sd import StreamingSampling
from methods.mirror_sd.brancher import Brancher, Plan
from methods.mirror_sd.branches import likely_decisions, mixture, prefix_products
from methods.mirror_sd.streams import save_streams
from specbench.decoding import acceptance
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import KVCache
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.system.errors import UserError
from tests.support.decoding import PROMPT, random_pair
from tests.support.methods import drafts, trimmed
from tests.support.mirror import mirror, plain_drafts, steps, tokens_of
from tests.support.models import EVERY_ARCHITECTURE

VARIANTS = {
    "wide": {"kappa": 8},
    "narrow": {"kappa": 1},
    "budget": {"kappa": 8, "branches": 5},
    "first": {"kappa": 3, "positions": "first"},
    "from the draft": {"kappa": 3, "candidates": "draft"},
    "both": {"kappa": 8, "candidates": "both", "branches": 6},
    "likely": {"kappa": 8, "candidates": "both", "floor": 0.02},
    "likeliest": {"kappa": 8, "floor": 0.99},
}


def missed(pair, cap: int = 40, **settings) -> float:
    """Share of misses among the rounds that looked for a branch."""
    hits = [step.stats.get("hit") for step in steps(pair, mirror(pair, **settings), cap)]
    hits = [hit for hit in hits if hit is not None]
    assert hits
    return hits.count(False) / len(hits)


@pytest.mark.one_in(5)
@pytest.mark.first_fast
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_branches_are_the_drafts_of_speculative_sampling(arch, variant):
    pair = random_pair(arch)
    assert tokens_of(drafts(mirror(pair, **VARIANTS[variant]), pair, 0.0)) == plain_drafts(arch)


STREAMS = 3


SLOW = [pytest.param(arch, marks=pytest.mark.slow) for arch in ("mistral", "opt")]


@pytest.fixture(scope="module", params=["llama", *SLOW])
def streaming(request, tmp_path_factory):
    """A pair, and stream embeddings under which random models guess right now and then."""
    pair = random_pair(request.param)
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("streams")
    save_streams(0.3 * torch.randn(STREAMS, pair.draft.config.hidden_size), folder)
    return pair, str(folder)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, "serial"])
def test_streams_change_nothing_about_a_draft(streaming, variant):
    """Main streams vet the guesses: tokens are those of the draft model alone."""
    pair, folder = streaming
    if variant == "serial":
        drafter = StreamingSampling(pair, 4, weights=folder)
    else:
        drafter = mirror(pair, weights=folder, **VARIANTS[variant])
    assert tokens_of(drafts(drafter, pair, 0.0)) == plain_drafts(pair.name)


def test_a_pass_with_streams_reads_the_head_twice(streaming, monkeypatch):
    pair, folder = streaming
    alone = StreamingSampling(pair, 4, weights=folder)
    products, logits = [], DraftHead.logits
    monkeypatch.setattr(DraftHead, "logits", lambda head, states: products.append(1) or logits(head, states))
    answer = Engine(StagedModel(pair.target), alone, frozenset()).answer(PROMPT, SamplingParams(20))
    one_pass = alone.model.pass_bytes(head=False) + 2 * alone.head.bytes
    assert sum(step.draft_bytes for step in answer.steps) == len(products) / 2 * one_pass > 0


def test_streams_save_passes():
    """A draft model that says one token for ever, and streams that know it."""
    pair = copy.deepcopy(random_pair("llama"))
    with torch.no_grad():
        pair.draft.lm_head.weight[:] = 0.0
        pair.draft.lm_head.weight[7] = 1.0
        pair.draft.model.norm.weight.abs_()
        # The state that the head reads is the same for every token: only the final norm's weight is left of it.
        for layer in pair.draft.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
        pair.draft.model.embed_tokens.weight[:] = 1.0
    model = StagedModel(pair.draft)
    brancher = Brancher(model, DraftHead(model, 61), None, Plan(8, 1, guesses="none"), torch.ones(3, 64))
    brancher.begin(torch.tensor(PROMPT), 64, SamplingParams(1), 0)
    found = brancher.settle(0, 5, 8)
    assert found.tokens.tolist() == [7] * 8
    one_pass = model.pass_bytes(head=False) + 2 * brancher.head.bytes
    assert found.bytes_read == 3 * one_pass  # 1, then 4 with three guesses come true, then 4
    assert brancher.settle(8, 7, 8).bytes_read == 3 * one_pass


def test_a_draft_that_nobody_wants_any_more():
    """It is given up at once, and the next sequence knows nothing of it."""
    model = StagedModel(random_pair("llama").draft)
    brancher = Brancher(model, DraftHead(model, 61), None, Plan(4, 2, guesses="draft"))
    drafted = []
    for given_up in (False, True, False):
        brancher.begin(torch.tensor(PROMPT), 64, SamplingParams(1), 0)
        brancher.settle(0, 5, 4)
        brancher.expand(4, 4, None)
        found = brancher.settle(1, 7, 4, lambda stop=given_up: stop)
        drafted.append(found.tokens.tolist())
    assert drafted[1] == [] and len(drafted[0]) == 4 and drafted[2] == drafted[0]


def test_streams_of_another_model_are_refused(tmp_path):
    pair = random_pair("llama")
    with pytest.raises(UserError, match="train mirror_sd"):
        mirror(pair, weights=str(tmp_path))
    save_streams(torch.zeros(2, 32), tmp_path)
    with pytest.raises(UserError, match=r"\[2, 32\].*\b64\b"):
        mirror(pair, weights=str(tmp_path))


class Interrupted(Brancher):
    """Learns the decision before a random pass, as a worker does that runs beside the target."""

    rng = random.Random(0)

    def expand(self, k, depth, states, decided=None):
        passes = iter([False] * self.rng.randint(0, depth))
        super().expand(k, depth, states, lambda: next(passes, True))


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("variant", ["budget", "from the draft", "both"])
def test_whenever_the_decision_is_known(variant, streams, streaming, monkeypatch):
    pair, folder = streaming
    monkeypatch.setattr("methods.mirror_sd.drafter.Brancher", Interrupted)
    drafter = mirror(pair, weights=folder if streams else None, **VARIANTS[variant])
    assert tokens_of(drafts(drafter, pair, 0.0)) == plain_drafts(pair.name)


def test_a_branch_left_where_it_grew_would_be_found(monkeypatch):
    pair, expected = random_pair("llama"), plain_drafts("llama")
    monkeypatch.setattr(KVCache, "move_entries", lambda self, sources, destinations: None)
    assert tokens_of(drafts(mirror(pair, kappa=8), pair, 0.0)) != expected


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kept", [None, list(range(0, 61, 2))])
def test_the_ratio_rule_is_given_what_drafts_were_drawn_from(kept, streams, tmp_path):
    """Every token's row is the draft model's own distribution after the tokens before it, branch or not."""
    pair = random_pair("llama")
    save_streams(0.3 * torch.randn(STREAMS, 64), tmp_path)
    drafter = mirror(pair, kappa=3, acceptance="ratio", weights=str(tmp_path) if streams else None)
    if kept:
        drafter = trimmed(drafter, kept)
        drafter.worker.brancher.head = drafter.head
    checked = 0
    inner = drafter.draft

    def check(batch):
        nonlocal checked
        draft = inner(batch)
        ids = torch.tensor([batch.sequences[0].tokens + draft.tokens[0].tolist()])
        logits = pair.draft(ids, use_cache=False).logits[:, batch.lengths[0] - 1 : -1]
        if kept:
            outside = [i for i in range(61) if i not in kept]
            logits[..., outside] = float("-inf")
        torch.testing.assert_close(draft.probs, torch.softmax(logits, -1), atol=1e-4, rtol=1e-3)
        checked += draft.stats["hit"] is True
        return draft

    drafter.draft = check
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(60, 1.0), seed=3)
    assert checked > 3


def test_a_draft_model_whose_logits_are_nan_ends_a_sampled_answer():
    """Its own draws look up rows of a distribution that does not exist; the first acceptance says so."""
    pair = random_pair("llama")
    spoiled = copy.deepcopy(pair.draft)
    with torch.no_grad():
        spoiled.lm_head.weight[7] = float("nan")
    pair = type(pair)(**(vars(pair) | {"draft": spoiled}))
    drafter = StreamingSampling(pair, 3, acceptance="ratio")
    with pytest.raises(UserError, match="NaN or infinite"):
        Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(12, 1.0), seed=3)


@pytest.mark.slow
def test_misses():
    """None when everything is guessed, none when the guess is the decision itself; fewer with more guesses, with less
    likely ones, and with a later exit."""
    pair = random_pair("llama")
    layers = pair.target.config.num_hidden_layers
    assert missed(pair, cap=24, kappa=pair.vocab_size) == 0
    assert missed(pair, kappa=1, exit_layer=layers) == 0
    assert missed(pair, cap=24, kappa=pair.vocab_size, candidates="draft") == 0
    by_kappa = [missed(pair, kappa=kappa, exit_layer=1) for kappa in (1, 4, 16)]
    assert by_kappa == sorted(by_kappa, reverse=True) and by_kappa[0] > by_kappa[-1]
    by_floor = [missed(pair, kappa=16, exit_layer=1, floor=floor) for floor in (0.0, 0.015, 0.03)]
    assert by_floor == sorted(by_floor) and by_floor[0] < by_floor[-1]
    by_layer = [missed(pair, kappa=2, exit_layer=layer) for layer in (1, 3, layers)]
    assert by_layer[0] > by_layer[-1] == 0


@pytest.mark.slow
def test_the_first_position_alone_misses_more():
    pair = random_pair("llama")
    own = {"kappa": 4, "exit_layer": 4}
    assert missed(pair, positions="first", **own) > missed(pair, **own)


def test_likely_decisions_against_a_plain_loop():
    torch.manual_seed(1)
    path = torch.tensor([5, 0, 7])
    probs, kv_bucket = torch.randn(2, 4, 9).softmax(-1)
    scored = []
    for accepted in range(4):
        reaching = 1.0
        for i in range(accepted):
            reaching *= kv_bucket[i, path[i]].item()
        others = [t for t in range(9) if accepted == 3 or t != path[accepted]]
        best = sorted(others, key=lambda t: -probs[accepted, t].item())[:2]
        scored += [(reaching * probs[accepted, t].item(), accepted, t) for t in best]
    expected = [(accepted, token) for _, accepted, token in sorted(scored, reverse=True)]
    reaching = prefix_products(kv_bucket, path)

    def index(floor: float = 0.0, **limits) -> list[tuple[int, int]]:
        found = likely_decisions(probs.clone(), path, reaching, 2, **limits)
        likely, index = found.likely(floor)
        assert list(zip(likely.accepted.tolist(), likely.tokens.tolist())) == list(index)
        return list(index)

    assert index() == expected
    assert index(most=3) == expected[:3]
    first = likely_decisions(probs.clone(), path, reaching, 2, roots_only=True)
    assert set(first.accepted.tolist()) == {0} and len(first.tokens) == 2
    for floor in (1e-6, *(score for score, *_ in scored), 0.999):
        # Where none is as likely, the likeliest stays.
        assert index(floor - 1e-7) == expected[: max(1, sum(score >= floor for score, *_ in scored))]
    assert index(sorted(scored)[-2][0] - 1e-7, most=3) == expected[:2]


def test_a_mixture_is_the_mean_of_two_distributions():
    exit_probs, own = torch.softmax(torch.randn(3, 7), -1), torch.softmax(torch.randn(3, 4), -1)
    for kept, columns in ((None, [0, 1, 2, 3]), (torch.tensor([1, 2, 5, 6]), [1, 2, 5, 6])):
        expected = exit_probs.clone()
        expected[:, columns] += own
        torch.testing.assert_close(mixture(exit_probs.clone(), own, kept), expected / 2)


@pytest.mark.slow
def test_what_is_read_and_how_long_it_took():
    pair = random_pair("llama")
    drafter = mirror(pair, kappa=2)
    whole, guesses = drafter.model.pass_bytes(), drafter.worker.brancher.exit_bytes
    first, *others = steps(pair, drafter)
    assert first.stats["hit"] is None and first.draft_bytes == first.drafted * whole
    assert first.stats["overlapped_behind_exit_seconds"] == 0
    for step in (s for s in others if s.drafted):
        assert (
            step.stats["overlapped_behind_exit_seconds"] > 0
            and step.stats["overlapped_before_exit_seconds"] > 0
        )
        assert 0 <= step.stats["exit_seconds"] < step.verify_seconds
    for step in others[:-6]:  # further from the cap than a draft is long
        passes, rest = divmod(step.draft_bytes - guesses, whole)
        # One to look ahead, four for all branches, and four more for a draft of its own after a miss.
        assert (passes, rest) == (5 if step.stats["hit"] else 9, 0)


@pytest.mark.parametrize(
    ("arch", "placement"), [("llama", "inline"), ("llama", "thread"), ("mixtral", "thread")]
)
def test_what_is_read_for_branches_after_the_last_draft_counts_in_the_last_round(
    arch, placement, monkeypatch
):
    """With routed experts, by the number of tokens of each pass."""
    pair = random_pair(arch)
    text = Engine(StagedModel(pair.target), Drafter(), frozenset()).answer(PROMPT, SamplingParams(30)).tokens
    stop = next(token for i, token in enumerate(text) if i >= 12 and token not in text[:i])
    read, guesses = [], []
    run, expand = StagedModel.run_layers, Brancher.expand

    def counted(model, hidden, *where, **more):
        if model.model is drafter.model.model:
            read.append(model.pass_bytes(tokens=hidden.shape[1]))
        return run(model, hidden, *where, **more)

    monkeypatch.setattr(Brancher, "expand", lambda self, *given: guesses.append(1) or expand(self, *given))
    drafter = mirror(pair, kappa=2, placement=placement)
    monkeypatch.setattr(StagedModel, "run_layers", counted)
    engine = Engine(StagedModel(pair.target), drafter, frozenset({stop}))
    short = [engine.answer(PROMPT, SamplingParams(1)).steps]
    answer = engine.answer(PROMPT, SamplingParams(60))
    short.append(engine.answer(PROMPT, SamplingParams(1)).steps)
    weight, norm = pair.target.lm_head.weight, pair.target.model.norm.weight
    drafter.close()
    assert short == [[], []]  # no draft, and nothing of another answer
    assert answer.finish == "stop" and len(guesses) == len(answer.steps)
    prefill = read.pop(0)
    expected = sum(read) + len(guesses) * (weight.nbytes + norm.nbytes)
    assert sum(step.draft_bytes for step in answer.steps) == expected
    assert (prefill > read[0]) == (arch == "mixtral")


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["budget", "from the draft", "both"])
@pytest.mark.parametrize("streams", [False, True])
def test_guesses_are_made_from_the_draft_models_own_distributions(variant, streams, streaming, monkeypatch):
    """After the pending token and each draft token, however the draft came to be."""
    pair, folder = streaming
    monkeypatch.setattr("methods.mirror_sd.drafter.Brancher", Interrupted)
    drafter = mirror(pair, weights=folder if streams else None, **VARIANTS[variant])
    inner, hook, seen, drafted = drafter.draft, drafter.on_hidden, [], []

    def draft(batch):
        drafted[:] = [batch, inner(batch)]
        return drafted[1]

    def check(layer, states):
        hook(layer, states)
        batch, made = drafted
        if batch.max_draft == 1:  # nothing can follow this draft
            return
        k = made.tokens.shape[1]
        ids = torch.tensor([batch.sequences[0].tokens + made.tokens[0].tolist()])
        own = pair.draft(ids, use_cache=False).logits[0, -(k + 1) :]
        torch.testing.assert_close(drafter.worker.brancher._path_logits[: k + 1], own, atol=1e-3, rtol=1e-3)
        seen.append(k)

    drafter.draft, drafter.on_hidden = draft, check
    steps(pair, drafter, 24)
    assert len(seen) > 5


def test_drafts_are_drawn_with_other_numbers_than_acceptance(monkeypatch):
    pair = random_pair("llama")
    drafter = mirror(pair, acceptance="ratio", kappa=1)
    real, drawing, accepting = acceptance.sampled_chain, set(), set()

    def watched(probs, tokens, draft_probs, uniforms, live):
        accepting.update(uniforms[0].tolist())
        drawing.update(drafter.worker.brancher._uniforms.tolist())
        return real(probs, tokens, draft_probs, uniforms, live)

    monkeypatch.setattr(acceptance, "sampled_chain", watched)
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(40, 1.0), seed=3)
    assert len(accepting) > 20 and len(drawing) > 20 and not accepting & drawing


@pytest.mark.parametrize("arch", ["granite", "gemma2"])
def test_guesses_are_made_from_the_targets_own_logits(arch):
    """Which some families scale, or cap: without that one guess would seem to be certain."""
    pair = random_pair(arch)
    exit_head = mirror(pair, candidates="exit").worker.brancher.exit_head
    states = 3 * torch.randn(2, pair.staged.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(exit_head(states), pair.staged.head(states))


def test_streams_are_scaled_as_what_is_embedded():
    """In training they were added in front of the model's own forward, which scales its inputs."""
    model = random_pair("granite").staged
    assert model.embedding_scale != 1
    head = DraftHead(model, model.vocab_size)
    streams = torch.randn(STREAMS, model.hidden_size)
    brancher = Brancher(model, head, None, Plan(3, 2), streams)
    torch.testing.assert_close(brancher.streams, streams * model.embedding_scale)


def test_an_exit_layer_that_the_target_does_not_have():
    with pytest.raises(UserError, match=r"\b0\b.*\b5 layers"):
        mirror(random_pair("llama"), exit_layer=6)
