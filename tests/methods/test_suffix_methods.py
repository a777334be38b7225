"""SAM-Decoding and Suffix Decoding: what they draft, what they keep, and that every answer is the target's own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from methods.ragged import RaggedBatch
from methods.rest.datastore import FOLLOWERS, save_datastore
from methods.samd import SAMDecoding, merged, repeated
from methods.suffix import SuffixDecoding
from specbench.config.combinations import check_method
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.slots import Slots
from specbench.decoding.state import Draft, Request
from specbench.decoding.tree import Tree
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers, random_pair, random_prompt
from tests.support.distribution import SHAPE, p_value_in_a_batch
from tests.support.lossless import (
    assert_lossless,
    assert_samples_like_plain_decoding,
    assert_stops_anywhere,
    sampled_requests,
)
from tests.support.methods import with_tokenizer
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with

PROMPT = [3, 9, 27, 11, 33, 29, 17, 9, 27]
LONG = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A datastore of what the target says to some prompts, but not to those of the tests."""
    pair, rng = with_tokenizer("llama"), random.Random(40)
    rows = []
    for _ in range(20):
        prompt = random_prompt(rng, pair.vocab_size)
        rows.append([*prompt, *generate_with_transformers(pair.target, prompt, 60, ())])
    return str(save_datastore(tmp_path_factory.mktemp("corpus"), rows, pair))


AUXILIARIES = {
    "recycling": {"_target_": "methods.recycling.TokenRecycling", "name": "recycling", "nodes": 20},
    "sps": {"_target_": "methods.sps.SpeculativeSampling", "name": "sps", "max_draft_tokens": 3},
}


def with_auxiliary(pair, name: str, corpus: str | None = None) -> SAMDecoding:
    return SAMDecoding(pair, AUXILIARIES[name], name, threshold=2, max_draft_tokens=9, corpus=corpus)


DRAFTERS = {
    "samd": lambda pair, _: SAMDecoding(pair),
    "samd, corpus": lambda pair, corpus: SAMDecoding(pair, max_draft_tokens=12, growth=2, corpus=corpus),
    "samd, recycling": lambda pair, _: with_auxiliary(pair, "recycling"),
    "samd, corpus, recycling": lambda pair, corpus: with_auxiliary(pair, "recycling", corpus),
    "samd, sps": lambda pair, _: with_auxiliary(pair, "sps"),
    "samd, corpus, sps": lambda pair, corpus: with_auxiliary(pair, "sps", corpus),
    "suffix": lambda pair, _: SuffixDecoding(pair, factor=4.0, min_probability=0.0),
    "suffix, chain": lambda pair, _: SuffixDecoding(pair, "chain", 6),
    "suffix, run": lambda pair, _: SuffixDecoding(pair, factor=3.0, memory="run"),
}
EVERY_DRAFTER = pytest.mark.parametrize("name", DRAFTERS)


# -- what is drafted


def fed(drafter: Drafter, tokens: list[int], limit: int = 50, nodes: int = 50) -> tuple[list[int], list[int]]:
    """Tokens and parents of the draft after a text."""
    batch = type("Batch", (), {"limits": [limit], "max_nodes": nodes})
    drafter.open(Slots(1, 100, torch.device("cpu")), None)
    sequence = type("Sequence", (), {"tokens": tokens})
    drafter.begin(0, sequence, None)
    batch.tokens = type("Tensor", (), {"device": torch.device("cpu")})
    draft = drafter.draft(batch)
    parents = [] if draft.tree is None else draft.tree.parents[0].tolist()
    return draft.tokens[0].tolist(), parents


def test_samd_copies_the_more_the_longer_the_match_is():
    drafter = SAMDecoding(None, max_draft_tokens=20, growth=4)
    text = [*range(10, 40), 1, 2, *range(12, 15)]
    assert fed(drafter, text)[0] == list(range(15, 27))  # 4 * 3
    assert fed(drafter, [*text, 15])[0] == list(range(16, 32))
    assert fed(drafter, [*text, 15, 16, 17])[0] == list(range(18, 38))  # 20 at most
    assert fed(drafter, text, limit=3)[0] == list(range(15, 18))
    assert fed(drafter, text, nodes=2)[0] == [15, 16]
    assert fed(drafter, [*text, 99])[0] == []


def test_samd_goes_on_with_its_own_draft_where_the_text_ends():
    drafter = SAMDecoding(None, max_draft_tokens=8, growth=4)
    assert fed(drafter, [7, 1, 2, 3, 1, 2, 3])[0] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert fed(drafter, [5, 5, 5])[0] == [5] * 8
    assert repeated([4, 1, 2], 1, 5) == [1, 2, 1, 2, 1] and repeated([4, 1, 2], 0, 2) == [4, 1]


def test_samd_takes_the_longer_match(tmp_path):
    pair = with_tokenizer("llama")
    folder = save_datastore(tmp_path, [[1, 2, 3, 4, 50], [1, 2, 3, 4, 50], [9, 3, 4, 51, 52]], pair)
    drafter = SAMDecoding(pair, max_draft_tokens=4, growth=2, corpus=str(folder))
    assert fed(drafter, [2, 3, 4]) == ([50], [-1])  # three tokens; after it the row ends
    assert fed(drafter, [8, 3, 4]) == ([50, 51, 52], [-1, -1, 1]), "two of three occurrences"
    assert fed(drafter, [8, 3, 4], limit=1) == ([50, 51], [-1, -1]), "a limit is one of depth, not of nodes"
    assert fed(drafter, [8, 3, 4], nodes=1) == ([50], [-1])
    text = [2, 3, 4, 60, 61, 62, 2, 3, 4]
    assert fed(drafter, text) == ([60, 61, 62, 2], [-1, 0, 1, 2]), "of equal matches that in the text"
    assert fed(drafter, [1, 2, 3, 4, 60, 61, 2, 3, 4])[0] == [60, 61, 2, 3]
    assert fed(drafter, [2, 3, 4, 60, 61, 1, 2, 3, 4])[0] == [50], "of 1 2 3 4, of 2 3 4"
    assert SAMDecoding(pair, max_draft_tokens=40, corpus=str(folder), max_match=30).levels == 2
    with pytest.raises(UserError, match=r"max_match=32 "):
        SAMDecoding(pair, max_draft_tokens=4, corpus=str(folder), max_match=32)


def shares(texts: list[list[int]], end: list[int]) -> dict[int, float]:
    """What share of the followers of a stretch each token has."""
    found = Counter(
        text[i + len(end)]
        for text in texts
        for i in range(len(text) - len(end))
        if text[i : i + len(end)] == end
    )
    return {token: n / found.total() for token, n in found.items()}


def best_score(texts: list[list[int]], text: list[int], factor: float, most: int, least: float) -> float:
    """The largest score of any end of a text in some texts, from an enumeration of all paths."""
    best = 0.0
    for n in range(1, len(text) + 1):
        end, found, level = text[-n:], [], [((), 1.0)]
        for _ in range(most):
            level = [
                ((*path, token), product * share)
                for path, product in level
                for token, share in shares(texts, [*end, *path]).items()
                if product * share >= least
            ]
            found += [product for _, product in level]
        limit = min(int(factor * n), most)
        best = max(best, sum(sorted(found, reverse=True)[:limit]))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_suffix_drafts_the_tree_with_the_largest_score(seed):
    rng = random.Random(seed)
    factor, most = rng.choice((1.0, 2.0, 3.5)), rng.choice((3, 6))
    drafter = SuffixDecoding(None, "tree", most, factor, memory="run")
    earlier = [[rng.randrange(3) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(0, 3))]
    text = [rng.randrange(3) for _ in range(rng.randint(2, 14))]
    drafter.restore(earlier)
    tokens, parents = fed(drafter, text)
    expected = max(best_score(texts, text, factor, most, 0.1) for texts in ([text], earlier))
    # The score of what was drafted, for the end of the text and the texts that fit best.
    scores = []
    for texts in ([text], earlier):
        for n in range(1, len(text) + 1):
            paths, products = [], []
            for token, parent in zip(tokens, parents):
                above, product = (paths[parent], products[parent]) if parent >= 0 else ((), 1.0)
                share = shares(texts, [*text[-n:], *above]).get(token, 0.0)
                paths.append((*above, token))
                products.append(product * share)
            if len(tokens) <= min(int(factor * n), most):
                scores.append(sum(products))
    assert max(scores, default=0.0) == pytest.approx(expected)
    assert len(set(paths)) == len(paths) == len(tokens)


def test_suffix_prefers_the_longer_match_and_its_own_text():
    drafter = SuffixDecoding(None, "chain", 4, 1.0, memory="run")
    drafter.restore([[1, 2, 7, 7, 7]])
    assert fed(drafter, [1, 2, 8, 9, 1, 2])[0] == [8, 9]
    assert fed(drafter, [2, 8, 9, 1, 2])[0] == [7, 7]
    drafter.restore([[1, 2, 7, 2, 6], [2, 6], [2, 6], [2, 7]])
    assert fed(drafter, [4, 2])[0] == [6], "the most frequent follower"
    drafter.restore([[5, 3], [5, 4]])
    assert fed(drafter, [5, 1, 5, 2, 5])[0] == [1], "of equal scores that of its own text"
    drafter.forget()
    assert fed(drafter, [4, 2])[0] == []


def test_suffix_leaves_out_what_seldom_follows():
    text = [1, 2, *[1, 3] * 9, 4, 1]
    tokens = {
        least: fed(SuffixDecoding(None, "tree", 9, 9.0, min_probability=least), text, limit=2)[0]
        for least in (0, 0.2)
    }
    assert tokens[0][:2] == tokens[0.2] == [3, 1] and {2, 4} <= set(tokens[0])


# -- answers


@pytest.mark.slow
@pytest.mark.one_in(3)
@EVERY_DRAFTER
def test_lossless(name, corpus):
    pair, steps = with_tokenizer("llama"), []
    for third in range(3):
        steps += assert_lossless("llama", DRAFTERS[name](pair, corpus), third=third)
    assert any(s.accepted for s in steps) and any(s.accepted < s.depth for s in steps)
    if name == "suffix":
        assert any(s.depth < s.drafted for s in steps), "some must be trees"


@pytest.mark.slow
@pytest.mark.one_in(4)
@EVERY_DRAFTER
@EVERY_SCHEDULER
def test_lossless_in_batches(name, scheduler, corpus):
    longest = ", sps" in name or ", recycling" in name  # those draft for the longest rest of a batch
    alone = ["accepted"] if longest else ["drafted", "accepted"]
    drafter = DRAFTERS[name](with_tokenizer("llama"), corpus)
    assert_lossless_with(scheduler, "llama", drafter, 3, alone=[] if name == "suffix, run" else alone)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if not name.endswith("sps")])
def test_sampled_text_of_a_batch_is_that_of_autoregressive_decoding(name, corpus):
    pair = with_tokenizer("llama")
    drafter, requests = DRAFTERS[name](pair, corpus), sampled_requests(pair, 40, 0.3)
    assert assert_samples_like_plain_decoding(pair, drafter, requests, RaggedBatch(4)) > 5


@pytest.mark.slow
@pytest.mark.one_in(3)
@EVERY_DRAFTER
def test_it_stops_anywhere(name, corpus):
    """Also inside a draft: the drafter has seen the answer before."""

    def knowing(prompt: list[int], free: list[int]) -> Drafter:
        drafter = DRAFTERS[name](with_tokenizer("llama"), corpus)
        begin = drafter.begin
        drafter.begin = lambda slot, sequence, prefill: begin(
            slot, replace(sequence, tokens=[*prompt, *free, *sequence.tokens]), prefill
        )
        return drafter

    assert_stops_anywhere(knowing)


# -- the auxiliary drafter


def long_requests() -> tuple[list[Request], list[list[int]]]:
    """Requests that nothing ends early, and transformers' answers."""
    pair, rng = random_pair("llama"), random.Random(9)
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(6)]
    requests = [Request(prompt, SamplingParams(LONG), stop_ids=frozenset()) for prompt in prompts]
    return requests, [generate_with_transformers(pair.target, prompt, LONG, ()) for prompt in prompts]


@pytest.mark.slow
def test_the_auxiliary_drafter_drafts_where_the_match_is_short():
    """Alone and in batches; and its state goes on as if it had drafted in every round."""
    pair, (requests, _) = random_pair("llama"), long_requests()
    target = StagedModel(pair.target)
    for name in AUXILIARIES:
        drafter = with_auxiliary(pair, name)
        for size in (1, 3):
            engine = Engine(target, drafter, frozenset(), RaggedBatch(size))
            steps = [s for answer in engine.generate(requests) for s in answer.steps if s.stats]
            for copied in (0, 1):
                some = [s for s in steps if s.stats["copied"] == copied]
                assert any(s.accepted for s in some) and any(s.accepted < s.depth for s in some)
            own = max(s.drafted for s in steps if not s.stats["copied"])
            assert own == {"recycling": 20, "sps": 3}[name]


@pytest.mark.slow
def test_token_recycling_learns_from_copied_tokens():
    pair = random_pair("llama")
    drafter = with_auxiliary(pair, "recycling")
    real, copied = drafter.inner.commit, []

    def commit(batch, verified):
        real(batch, verified)
        copied.append(drafter._copies[0])
        if batch.is_over:  # nothing is drafted from this table any more
            return
        token = batch.sequences[0].tokens[-2]
        # Of copied tokens none is told as accepted: they were not its own.
        with_copied = replace(verified, counts=verified.count.tolist())
        likeliest = with_copied.last(verified.logits)[0].topk(8).indices
        assert drafter.inner._followers[0, token].tolist() == likeliest.tolist()

    drafter.inner.commit = commit
    Engine(StagedModel(pair.target), drafter, frozenset()).generate(long_requests()[0])
    assert copied.count(True) > 5 < copied.count(False)


@pytest.mark.slow
def test_what_is_copied_does_not_leave_the_draft_models_cache_wrong():
    """Where it is the target itself, all that it drafts is accepted, also after copied tokens."""
    pair = random_pair("llama")
    twin = type(pair)(**(vars(pair) | {"draft": pair.target}))
    requests, expected = long_requests()
    for size in (1, 4):
        engine = Engine(StagedModel(pair.target), with_auxiliary(twin, "sps"), frozenset(), RaggedBatch(size))
        steps = batches.assert_lossless(engine, requests, expected)
        own = [s for s in steps if s.stats and not s.stats["copied"]]
        assert all(s.accepted == s.depth or s.emitted == s.accepted for s in own) and len(own) > 20
        assert any(s.stats["copied"] for s in steps if s.stats)


def test_a_draft_model_that_did_not_draft_for_long_is_fed_in_one_pass(monkeypatch):
    """Where passes are captured: the number of tokens that it lacks would be a part of the graph's key."""
    pair, requests = random_pair("llama"), long_requests()[0]
    fed = []

    def generated(*, fixed: bool) -> list:
        drafter = with_auxiliary(pair, "sps")
        real = drafter.inner._catch_up
        monkeypatch.setattr(drafter.inner.model, "fixed_shapes", fixed)
        monkeypatch.setattr(drafter.inner, "_catch_up", lambda batch, n: fed.append(n) or real(batch, n))
        engine = Engine(StagedModel(pair.target), drafter, frozenset())
        return [(one.tokens, [s.accepted for s in one.steps]) for one in engine.generate(requests)]

    usual = generated(fixed=False)
    assert fed == [] and generated(fixed=True) == usual
    assert fed and min(fed) > 3


def test_a_certain_draft_among_drawn_ones_and_trees():
    deterministic = Draft.of([[7, 8, 9], [5]], torch.device("cpu"))
    drawn = Draft(torch.tensor([[1, 2], [3, 4]]), probs=torch.full((2, 2, 10), 0.1))
    draft = merged(deterministic, drawn, [True, False])
    assert draft.tokens.tolist() == [[7, 8, 9], [3, 4, 0]] and draft.candidates.tolist() == [3, 2]
    assert draft.tree is None and draft.probs[0].argmax(-1).tolist() == [7, 8, 9]
    assert draft.probs[0].sum() == 3 and torch.equal(draft.probs[1, :2], drawn.probs[1])
    tree = Draft(torch.tensor([[1, 2, 3, 4]] * 2), tree=Tree.of(torch.tensor([-1, -1, 0, 1])))
    draft = merged(deterministic, tree, [False, True])
    assert draft.tokens.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]] and draft.candidates.tolist() == [4, 1]
    assert draft.tree.parents.tolist() == [[-1, -1, 0, 1], [-1, 0, 1, 2]] and draft.probs is None


def test_trees_beside_drawn_tokens_have_as_many_children_as_they_say(tmp_path):
    """And answers are those of trees that may have any number of children."""
    pair, rng = with_tokenizer("llama"), random.Random(5)
    folder = save_datastore(tmp_path, [rng.choices(range(pair.vocab_size), k=40_000)], pair)
    requests = sampled_requests(pair, 12, 1.0)

    def answers(*, bounded: bool) -> list[list[int]]:
        drafter = SAMDecoding(pair, AUXILIARIES["sps"], "sps", threshold=1, corpus=str(folder))
        real = drafter.draft

        def drafted(batch):
            draft = real(batch)
            if draft.tree is not None:
                assert draft.tree.max_children == FOLLOWERS
                live = draft.acceptable()
                before = draft.tree.siblings_before()
                most.append(int((before if live is None else before * live).max()))
                draft.tree = draft.tree if bounded else replace(draft.tree, max_children=None)
            return draft

        drafter.draft = drafted
        engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(2))
        return [one.tokens for one in engine.generate(requests)]

    most: list[int] = []
    assert answers(bounded=True) == answers(bounded=False)
    assert 0 < max(most) < FOLLOWERS and len(most) > 10


def test_a_corpus_that_could_never_be_copied_from_is_one_line(corpus):
    pair = with_tokenizer("llama")
    settings = {"threshold": 9, "corpus": corpus}
    with pytest.raises(UserError, match="twice threshold=9 .* max_match=16 .* at most 8"):
        SAMDecoding(pair, AUXILIARIES["recycling"], "recycling", **settings)
    SAMDecoding(pair, AUXILIARIES["recycling"], "recycling", **settings, max_match=18)


@pytest.mark.slow
def test_samples_with_a_drawn_auxiliary_follow_the_target():
    pair = random_pair("llama", **SHAPE)
    for size in (1, 32):
        drafter = SAMDecoding(pair, AUXILIARIES["sps"], "sps", threshold=1, max_draft_tokens=2)
        assert p_value_in_a_batch(pair, drafter, RaggedBatch(size)) > 1e-3


@pytest.mark.slow
def test_a_sample_does_not_depend_on_whether_others_copy():
    """What is copied is accepted by one rule, whether or not a draft beside it was drawn."""
    pair = random_pair("llama", **SHAPE)
    n, decoding = pair.target.config.vocab_size, SamplingParams(24, 1.0)
    requests = [Request([(3 * i + j) % n for j in range(4 + i)], decoding, seed=i) for i in range(8)]
    drafter = SAMDecoding(pair, AUXILIARIES["sps"], "sps", threshold=2, max_draft_tokens=3)
    alone, together = (
        Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(size)).generate(requests)
        for size in (1, 8)
    )
    copied = [{step.stats["copied"] for step in one.steps if step.stats} for one in alone]
    assert {0, 1} in copied
    assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("with_corpus", [False, True])
@pytest.mark.parametrize("auxiliary", AUXILIARIES)
def test_whether_trees_are_drawn_is_known_without_weights(auxiliary, with_corpus, corpus):
    settings = {"auxiliary": auxiliary, "corpus": corpus if with_corpus else None}
    drafter = with_auxiliary(with_tokenizer("llama"), auxiliary, settings["corpus"])
    assert SAMDecoding.draws_trees(settings) == (drafter.siblings > 1)


@pytest.mark.parametrize("auxiliary", ["none", *AUXILIARIES])
def test_a_name_gives_the_auxiliary_drafter_and_what_it_needs(auxiliary):
    for group in (["method=samd"], ["method=ragged", "drafter=samd"]):
        what = "drafter" if len(group) == 2 else "method"
        cfg = composed("bench", *group, f"{what}.auxiliary={auxiliary}")
        OmegaConf.resolve(cfg)
        assert cfg[what].drafter.name == auxiliary
        assert check_method(cfg).needs.draft_model == (auxiliary == "sps")


# -- earlier answers


def accepted(engine: Engine, prompt: list[int]) -> list[int]:
    return [step.accepted for step in engine.answer(prompt, SamplingParams(LONG)).steps]


@pytest.mark.slow
def test_a_repeat_copies_nothing_unless_memory_is_kept():
    pair = random_pair("llama")
    target = StagedModel(pair.target)
    engine = Engine(target, SuffixDecoding(pair), frozenset())
    first = accepted(engine, PROMPT)
    assert accepted(engine, PROMPT) == first and engine.drafter.snapshot() == []
    keeping = SuffixDecoding(pair, memory="run")
    engine = Engine(target, keeping, frozenset())
    assert accepted(engine, PROMPT) == first
    before = keeping.snapshot()
    second = accepted(engine, PROMPT)
    assert len(second) < len(first), "kept state copies the answer that was given before"
    keeping.restore(before)
    assert accepted(engine, PROMPT) == second
    keeping.forget()
    assert accepted(engine, PROMPT) == first


@pytest.mark.parametrize("size", [1, 3])
def test_earlier_answers_are_learnt_whole_without_prompts_and_not_if_given_up(size):
    requests, expected = batches.cases("llama")
    pair = random_pair("llama")
    drafter = SuffixDecoding(pair, memory="run")
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(size))
    engine.generate(requests)
    assert sorted(drafter.snapshot()) == sorted(expected)
    learnt = drafter.snapshot()
    real, calls = drafter.commit, []

    def fails(batch, verified):
        calls.append(real(batch, verified))
        if len(calls) == 3:
            raise ZeroDivisionError

    drafter.commit = fails
    with pytest.raises(ZeroDivisionError):
        engine.generate([Request(PROMPT, SamplingParams(LONG), stop_ids=frozenset())])
    assert drafter.snapshot() == learnt
