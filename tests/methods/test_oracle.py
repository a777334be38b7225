"""The oracle: its draws, its drafts alone and in batches, what it leaves in the wrapped drafter, and a run of it."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.kangaroo.adapter import save_adapter
from methods.oracle import Foretold, Oracle, evenly, rates_by_place
from methods.ragged import RaggedBatch
from specbench.config.spec import needs_of
from specbench.decoding import acceptance as acceptance_rules
from specbench.decoding.acceptance import Accepted, outcome
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support import commands, lossless
from tests.support.batches import cases
from tests.support.decoding import random_pair, random_prompt
from tests.support.methods import near_identity_adapter, sorted_pair

COSTS = ("none", "pld", "sps", "s2d", "kangaroo")
SOME_COSTS = [pytest.param(cost, marks=[pytest.mark.slow] * (cost in ("pld", "s2d"))) for cost in COSTS]
LENGTH = 44


def config(cost: str, folder: Path) -> dict:
    """What `choice` gives for a drafter, as far as the small random pairs need it."""
    names = {
        "none": ("methods.ar.Autoregressive", {}),
        "pld": ("methods.pld.PromptLookup", {"max_draft_tokens": 2}),
        "sps": ("methods.sps.SpeculativeSampling", {"confidence_threshold": 0.9}),
        "s2d": ("methods.s2d.SortedDraft", {"thresholds": [0.03, 0.04]}),
        "kangaroo": ("methods.kangaroo.Kangaroo", {"weights": str(folder), "exit_layer": 2}),
    }
    target, settings = names[cost]
    return {"_target_": target, "name": cost, **settings}


def oracle(
    cost: str, folder: Path, acceptance: float | list[float] = 0.7, k: int = 4, length: float | None = None
) -> Oracle:
    pair = sorted_pair("llama")
    if cost == "kangaroo":
        save_adapter(near_identity_adapter(pair), folder, torch.float32)
    return Oracle(pair, config(cost, folder), acceptance, length, cost, k)


def drawn(prompt: list[int], answer: list[int], acceptance: float, vocab: int, seed: int, spare: int):
    """Which places are right, and what is proposed at each."""
    known = Foretold(prompt, answer, vocab, seed, spare)
    right = known.draws < acceptance
    return right.tolist(), np.where(right, known.right, known.wrong)


@cache
def known_answers(count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, what the baseline answers where nothing stops it)."""
    pair, rng = random_pair("llama"), random.Random(8)
    engine = Engine(StagedModel(pair.target), Drafter(), frozenset())
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(count)]
    return [(prompt, engine.answer(prompt, SamplingParams(LENGTH)).tokens) for prompt in prompts]


def rounds_of(right: list[bool], length: int, k: int) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each round, worked out from which places are right."""
    rounds, at = [], 1
    while at < length:
        drafted = right[at : at + min(k, length - at - 1)]
        rounds.append((len(drafted), drafted.index(False) if False in drafted else len(drafted)))
        at += rounds[-1][1] + 1
    return rounds


# -- the draws


@pytest.mark.first_fast
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_the_share_of_right_tokens_is_the_asked_one(acceptance):
    answer = [random.Random(1).randrange(50) for _ in range(40_000)]
    right, tokens = drawn([1, 2], answer, acceptance, 50, 0, spare=5)
    own = tokens[: len(answer)] == answer
    assert own.tolist() == right[: len(answer)]  # a wrong token is never the target's own
    error = math.sqrt(acceptance * (1 - acceptance) / len(answer))
    assert abs(own.mean() - acceptance) <= 4 * error
    after = own[1:][own[:-1]].mean() if acceptance else 0.0  # independent: also after a right one
    assert abs(after - acceptance) <= 4 * error / math.sqrt(max(acceptance, 0.1))
    assert len(tokens) == len(answer) + 5 and tokens.min() >= 0 and tokens.max() < 50


def test_draws_belong_to_the_prompt_the_seed_and_the_place():
    def right(prompt: list[int], seed: int, spare: int, length: int = 200) -> list[bool]:
        return drawn(prompt, [3] * length, 0.5, 50, seed, spare)[0][:100]

    first = right([1, 2], 0, 4)
    assert first == right([1, 2], 0, 8) == right([1, 2], 0, 4, length=100)
    others = [right([1, 3], 0, 4), right([1, 2], 1, 4), right([2, 1], 0, 4)]
    assert all(first != other for other in others)


@pytest.mark.parametrize(
    ("shares", "rates"),
    [
        (0.8, [0.8, 0.8, 0.8]),
        ([0.8, 0.4, 0.4], [0.8, 0.5, 1.0]),
        ([0.6], [0.6, 0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0, 0.0]),
        ([1, 1, 0.5, 0.2], [1.0, 1.0, 0.5]),
    ],
)
def test_shares_by_place_are_those_of_drafts_that_get_so_far(shares, rates):
    assert rates_by_place(shares, 3) == pytest.approx(rates)


def test_a_length_with_least_variance():
    assert evenly(3.25, 4) == [1, 1, 0.25, 0] and evenly(1, 2) == [0, 0] and evenly(3, 2) == [1, 1]
    with pytest.raises(UserError, match="must lie between 1 and 4"):
        evenly(4.5, 3)
    with pytest.raises(UserError, match="may not rise"):
        rates_by_place([0.4, 0.5], 2)


# -- one sequence


@pytest.mark.first_fast
@pytest.mark.parametrize("cost", ["none", "sps"])
def test_each_place_of_a_draft_has_its_acceptance(cost, tmp_path):
    """Of many answers, alone and in a batch; a given length has drafts of two neighbouring numbers alone."""
    pair, rng = random_pair("llama"), random.Random(3)
    target, plain = StagedModel(pair.target), Drafter()
    prompts = [random_prompt(rng, pair.vocab_size) for _ in range(12)]
    requests = [Request(prompt, SamplingParams(LENGTH)) for prompt in prompts]
    answers = [a.tokens for a in Engine(target, plain, frozenset(), RaggedBatch(4)).generate(requests)]

    def accepted(drafter: Oracle) -> list[int]:
        drafter.set_reference_answers(prompts, answers)
        said = Engine(target, drafter, frozenset(), RaggedBatch(4)).generate(requests)
        assert [answer.tokens for answer in said] == answers
        alone = Engine(target, drafter, frozenset()).answer(prompts[0], SamplingParams(LENGTH))
        assert [s.accepted for s in alone.steps] == [s.accepted for s in said[0].steps]
        return [s.accepted for answer in said for s in answer.steps if s.drafted == 3]

    shares = [0.9, 0.5, 0.1]
    found = np.array(accepted(oracle(cost, tmp_path, shares, 3)))
    for place, share in enumerate(shares):
        error = 4 * math.sqrt(share * (1 - share) / len(found))
        assert abs((found > place).mean() - share) <= error, place
    even = np.array(accepted(oracle(cost, tmp_path, k=3, length=2.5)))
    assert set(even.tolist()) == {1, 2} and abs(even.mean() - 1.5) <= 4 * 0.5 / math.sqrt(len(even))


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("cost", SOME_COSTS)
def test_what_is_accepted_is_what_was_drawn(cost, tmp_path):
    pair = random_pair("llama")
    answers = known_answers(3)
    for acceptance, k, asked in ((0.0, 3, answers[:1]), (0.7, 4, answers * 2), (1.0, 6, answers[2:])):
        drafter = oracle(cost, tmp_path, acceptance, k)
        engine = Engine(StagedModel(pair.target), drafter, frozenset())
        drafter.set_reference_answers(*zip(*answers))
        for prompt, answer in asked:
            right, _ = drawn(prompt, answer, acceptance, pair.vocab_size, 0, k)
            said = engine.answer(prompt, SamplingParams(LENGTH))
            assert said.tokens == answer
            assert [(s.drafted, s.accepted) for s in said.steps] == rounds_of(right, LENGTH, k)


@pytest.mark.slow
def test_the_wrapped_drafter_does_its_work(tmp_path):
    """The bytes that it reads are those of its own passes, and of as many as there are draft tokens."""
    pair, (prompt, answer) = sorted_pair("llama"), known_answers(1)[0]
    for cost in ("sps", "kangaroo"):
        drafter = oracle(cost, tmp_path, 0.5, 4)
        drafter.set_reference_answers([prompt], [answer])
        steps = (
            Engine(StagedModel(pair.target), drafter, frozenset())
            .answer(prompt, SamplingParams(LENGTH))
            .steps
        )
        alone = drafter.inner
        alone.head = alone.head._head
        own = (
            Engine(StagedModel(pair.target), alone, frozenset()).answer(prompt, SamplingParams(LENGTH)).steps
        )
        assert {s.draft_bytes for s in steps if s.drafted == 4} == {
            s.draft_bytes for s in own if s.drafted == 4
        }
        assert {s.target_bytes for s in steps if s.drafted} == {s.target_bytes for s in own if s.drafted}


def test_the_wrapped_cache_follows_the_verified_tokens(tmp_path):
    """Its keys and values are those of a prefill with the answer: none is of a token that was replaced."""
    pair, (prompt, answer) = sorted_pair("llama"), known_answers(1)[0]
    drafter = oracle("sps", tmp_path, 0.6, 4)
    drafter.set_reference_answers([prompt], [answer])
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(LENGTH))
    held = drafter.inner._layout.cache
    n = drafter.inner._fed[0]
    assert n > len(prompt) + LENGTH // 2
    model = StagedModel(pair.draft)
    fresh = model.new_cache(held.capacity)
    with torch.inference_mode():
        model.run_layers(model.embed(torch.tensor([[*prompt, *answer][:n]])), fresh, 0, 0, len(model.layers))
    ours, theirs = (cache.segments[0][:, :, :, :n] for cache in (held, fresh))
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.first_fast
@pytest.mark.parametrize("cost", COSTS)
def test_an_answer_that_is_not_the_known_one_is_drafted_by_the_wrapped_drafter(cost, tmp_path):
    """From the first token that differs on; and all of it where nothing was foretold."""
    pair, (prompt, answer) = random_pair("llama"), known_answers(1)[0]
    drafter = oracle(cost, tmp_path, 1.0, 3)
    engine = Engine(StagedModel(pair.target), drafter, frozenset())
    alone = engine.answer(prompt, SamplingParams(LENGTH))
    assert alone.tokens == answer
    place = 20
    wrong = [*answer[:place], *((t + 1) % pair.vocab_size for t in answer[place:])]
    drafter.set_reference_answers([prompt], [wrong])
    said = engine.answer(prompt, SamplingParams(LENGTH))
    assert said.tokens == answer
    emitted = 1
    for step in said.steps:
        if emitted + step.emitted > place:
            break
        assert step.accepted == step.drafted == 3
        emitted += step.emitted
    rest = said.steps[said.steps.index(step) + 1 :]
    if cost == "none":
        assert sum(s.drafted for s in rest) == 0
    else:
        behind = [s.accepted for s in alone.steps]
        assert sum(s.accepted for s in rest) > 0 or sum(behind[-len(rest) :]) == 0
        assert drafter._current == [None]


def test_an_answer_that_goes_on_behind_the_known_one(tmp_path):
    prompt, answer = known_answers(1)[0]
    drafter = oracle("none", tmp_path, 1.0, 4)
    target = StagedModel(random_pair("llama").target)
    drafter.set_reference_answers([prompt], [answer[:11]])
    alone = Engine(target, drafter, frozenset()).answer(prompt, SamplingParams(LENGTH))
    (batch,) = Engine(target, drafter, frozenset(), RaggedBatch(1)).generate(
        [Request(prompt, SamplingParams(LENGTH))]
    )
    for said in (alone, batch):
        assert said.tokens == answer
        assert [s.accepted for s in said.steps[:2]] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["none", "sps", "kangaroo"])
def test_it_stops_anywhere(cost, tmp_path):
    def drafter(prompt: list[int], free: list[int]) -> Drafter:
        made = oracle(cost, tmp_path, 0.8, 4)
        made.set_reference_answers([prompt], [free])
        return made

    lossless.assert_stops_anywhere(drafter)


# -- batches


@pytest.mark.one_in(4)
@pytest.mark.first_fast
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("scheduler", [RaggedBatch, EqSpec, ExSpec])
def test_a_batch_accepts_what_each_sequence_does_alone(cost, scheduler, tmp_path):
    pair, (requests, expected) = random_pair("llama"), cases("llama")
    drafter = oracle(cost, tmp_path)
    drafter.set_reference_answers([r.prompt for r in requests], expected)
    target = StagedModel(pair.target)
    answers = Engine(target, drafter, frozenset(), scheduler(3)).generate(requests)
    assert [a.tokens for a in answers] == expected
    for request, answer in zip(requests, answers):
        alone = Engine(target, drafter, request.stop_ids).answer(request.prompt, request.decoding)
        told = [(s.drafted, s.accepted, s.emitted) for s in answer.steps]
        assert told == [(s.drafted, s.accepted, s.emitted) for s in alone.steps]
    assert sum(s.accepted for a in answers for s in a.steps) > 20


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["none", "sps"])
def test_in_a_batch_an_answer_that_is_not_the_known_one_leaves_the_others_alone(cost, tmp_path):
    pair, answers = random_pair("llama"), known_answers(4)
    drafter = oracle(cost, tmp_path, 1.0, 3)
    told = [list(answer) for _, answer in answers]
    told[1][20:] = [(t + 1) % pair.vocab_size for t in told[1][20:]]
    drafter.set_reference_answers([p for p, _ in answers[:3]], told[:3])  # nothing of the last one
    requests = [Request(prompt, SamplingParams(LENGTH)) for prompt, _ in answers]
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(4))
    said = engine.generate(requests)
    assert [a.tokens for a in said] == [answer for _, answer in answers]
    for place in (0, 2):
        assert all(s.accepted == s.drafted for s in said[place].steps)
    left, unknown = said[1].steps[9:], said[3].steps
    if cost == "none":
        assert sum(s.drafted for s in (*left, *unknown)) == 0
    else:
        assert sum(s.accepted for s in left) > 0 < sum(s.accepted for s in unknown)
    assert any(s.accepted < s.drafted for s in left) == (cost != "none")


# -- what it needs, and a run


def test_it_needs_what_the_wrapped_drafter_needs(tmp_path):
    def needs(cost: str):
        return needs_of({"_target_": "methods.oracle.Oracle", "drafter": config(cost, tmp_path)})

    assert needs("sps").draft_model and needs("s2d").part == "s2d" and needs("kangaroo").part == "kangaroo"
    assert not needs("none").draft_model and needs("pld").part is None
    assert all(needs(cost).reference_answer and needs(cost).batching for cost in COSTS)
    assert not any(needs(cost).sampling for cost in COSTS)
    assert (
        not needs_of(config("sps", tmp_path)).reference_answer and needs_of(config("sps", tmp_path)).sampling
    )


def test_a_drafter_that_it_cannot_wrap(tmp_path):
    class Tree(Drafter):
        max_nodes = 3

        def __init__(self, pair):
            pass

    name = f"{__name__}.Tree"
    globals()["Tree"] = Tree
    with pytest.raises(UserError, match="chains"):
        Oracle(random_pair("llama"), {"_target_": name, "name": "tree"}, cost_of="tree")
    # Its tokens are chosen by a head of its brancher, which goes on from them.
    with pytest.raises(UserError, match="which sps_ss does not"):
        Oracle(random_pair("llama"), {"_target_": "methods.mirror_sd.StreamingSampling"}, cost_of="sps_ss")


@pytest.fixture
def place(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    commands.measure_here(monkeypatch)
    return [*commands.small_pair_and_questions(tmp_path), "repeats=2", "decoding.max_new_tokens=40"]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["method=oracle"], ["method=ragged", "drafter=oracle", "batch_size=3"]])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_a_run_has_the_asked_acceptance(monkeypatch, capfd, place, chosen, acceptance):
    """The runner foretells what the baseline answers, the answers are certified, and the journal has the draws."""
    what = "drafter" if "drafter=oracle" in chosen else "method"
    settings = [*chosen, f"{what}.acceptance={acceptance}", f"{what}.max_draft_tokens=3"]
    code, out, err = commands.run_main(monkeypatch, capfd, *place, *settings, "runs_root=runs")
    assert code == 0, err
    run_dir = Path(out.splitlines()[-1])
    summary = read_json(run_dir / store.SUMMARY)
    assert summary["equivalence"]["violation"] == 0 and summary["equivalence"]["answers"] == 3
    overall, k = summary["overall"], 3
    if acceptance in (0.0, 1.0):
        assert overall["acceptance_rate"] == acceptance
    judged = 3 * 40 * (1 - acceptance ** (k + 1))  # about so many draws
    for rate in overall["acceptance_by_position_conditional"][:1]:
        assert abs(rate - acceptance) <= 4 * math.sqrt(acceptance * (1 - acceptance) / max(judged / 3, 1))
    prefix = "drafter." if what == "drafter" else ""
    assert summary["settings"][f"{prefix}cost_of"] == "sps" and f"{prefix}drafter" not in summary["settings"]
    drawn: dict[int, list] = {}
    for record in map(json.loads, (run_dir / store.RECORDS).read_text().splitlines()):
        steps = record["turns"][0]["arms"]["method"][0]["steps"]
        drawn.setdefault(record["question_id"], []).append(steps["accepted"])
    assert all(first == second for first, second in drawn.values())


@pytest.mark.slow
def test_a_wrong_token_that_is_taken_is_found(monkeypatch, capfd, place):
    """A verification that accepts every draft token lets the oracle's wrong ones into the answers."""

    def takes_all(choices: torch.Tensor, tokens: torch.Tensor, live: torch.Tensor | None = None) -> Accepted:
        return outcome(tokens, torch.full((len(tokens),), tokens.shape[-1]), choices[..., -1])

    monkeypatch.setattr(acceptance_rules, "greedy_chain", takes_all)
    settings = ["method=oracle", "method.acceptance=0.6", "runs_root=runs", "repeats=1"]
    _, out, _ = commands.run_main(monkeypatch, capfd, *place, *settings)
    summary = read_json(Path(out.splitlines()[-1]) / store.SUMMARY)
    assert summary["equivalence"]["violation"] == 3
