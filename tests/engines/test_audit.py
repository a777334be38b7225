"""The audit: right answers of other engines are let through, every planted fault is found, at its place."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specbench.commands import audit as command
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.engines.answer_files import Answered, read_answers
from specbench.engines.audit import (
    EXACT,
    FAR,
    TIE,
    VIOLATION,
    Arm,
    FirstTokens,
    Referee,
    arms_of,
    first_tokens,
    largest_rounding,
    likelihoods,
    multinomial_p,
    same_answers,
)
from specbench.measure.metrics.drawn import SURPRISE, UNLIKELY, is_off
from specbench.measure.numeric_noise import ENGINE_NOISE
from specbench.models import pairs
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support.commands import exit_code
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers, random_pair
from tests.support.messages import shown

PROMPT, NEW = [3, 9, 27, 11, 33, 29, 17], 24
DRAWN = SamplingParams(1, 0.8)


def answered(tokens, prompt=PROMPT, name="1", logprobs=None, cap=NEW) -> Answered:
    return Answered(name, list(prompt), list(tokens), logprobs, cap)


def greedy(pair, prompt=PROMPT) -> list[int]:
    return list(greedy_of(pair.name, tuple(prompt)))


@cache  # many tests begin with the same one
def greedy_of(arch: str, prompt: tuple[int, ...]) -> list[int]:
    pair = random_pair(arch)
    return generate_with_transformers(pair.target, list(prompt), NEW, pair.stop_ids)


def audited(pair, answers: list[Answered], tolerance: float | None = 1e-3) -> Arm:
    [arm] = arms_of(Referee(pair, SamplingParams(1)), {"answers": answers}, NEW, tolerance)
    return arm


@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "gemma2", "opt", "gpt_neox"])
def test_answers_of_transformers_are_exact(arch):
    pair = random_pair(arch)
    answers = [answered(greedy(pair, PROMPT[i:]), PROMPT[i:], str(i)) for i in range(4)]
    arm = audited(pair, answers, tolerance=None)
    assert arm.verdicts == {EXACT: 4} and arm.tokens == sum(len(a.tokens) for a in answers)
    assert 0 < arm.bound < 0.01


@pytest.mark.parametrize("temperature", [0.0, 0.02])
def test_answers_of_transformers_in_half_precision_are_none_that_another_program_may_not_give(temperature):
    """Its kernels round otherwise than ours, which give the same bits in any pass: that is no bound for others."""
    full = random_pair("llama")
    pair = type(full)(
        **(vars(full) | {"target": copy.deepcopy(full.target).bfloat16(), "dtype": torch.bfloat16})
    )
    pair.target.generation_config.update(do_sample=temperature > 0, temperature=temperature or None)
    torch.manual_seed(0)
    prompts = [[*PROMPT[i:], *PROMPT[:i]] for i in range(len(PROMPT))]
    answers = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "top_k": 0, "pad_token_id": 0}
        text = pair.target.generate(ids, eos_token_id=sorted(pair.stop_ids) or None, **asked)
        answers.append(answered(text[0, len(prompt) :].tolist(), prompt, str(i)))
    [arm] = arms_of(Referee(pair, SamplingParams(1, temperature)), {"answers": answers}, NEW, None)
    if temperature:
        assert abs(errors(arm)) < SURPRISE
    else:
        assert arm.verdicts[VIOLATION] == 0 and 0.01 < arm.bound < 1
        broken = replace(answers[0], tokens=[*answers[0].tokens[:5], 44, *answers[0].tokens[6:]])
        assert arms_of(Referee(pair, SamplingParams(1)), {"answers": [broken]}, NEW, None)[0].verdicts == {
            VIOLATION: 1
        }


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_token_is_found_at_its_place(seed):
    pair = random_pair("llama")
    tokens = greedy(pair)
    generator = torch.Generator().manual_seed(seed)
    place = int(torch.randint(len(tokens), (1,), generator=generator))
    ids = torch.tensor([PROMPT + tokens[:place]])
    logits = pair.target(ids).logits[0, -1]
    others = [token for token in logits.argsort().tolist()[:-1] if token not in pair.stop_ids]
    other = others[int(torch.randint(len(others), (1,), generator=generator))]
    arm = audited(pair, [answered([*tokens[:place], other, *tokens[place + 1 :]])])
    departure = arm.departure(arm.judged[0])
    assert arm.verdicts == {VIOLATION: 1}
    assert (departure.index, departure.token, departure.best) == (place, other, tokens[place])
    assert departure.margin == pytest.approx(float(logits.max() - logits[other]), abs=1e-3)


def test_a_departure_within_the_bound_is_a_tie():
    pair = random_pair("llama")
    tokens = greedy(pair)
    second = pair.target(torch.tensor([PROMPT + tokens[:5]])).logits[0, -1].topk(2)
    gap = float(second.values[0] - second.values[1])
    rest = generate_with_transformers(
        pair.target, [*PROMPT, *tokens[:5], int(second.indices[1])], NEW - 6, pair.stop_ids
    )
    other = [answered([*tokens[:5], int(second.indices[1]), *rest])]
    assert audited(pair, other, gap * 1.1).verdicts == {TIE: 1}
    wrong = audited(pair, other, gap * 0.9)
    assert wrong.verdicts == {VIOLATION: 1} and wrong.departure(wrong.judged[0]).index == 5


def with_a_stop(pair) -> tuple[object, list[int]]:
    """The pair with a stop token that its answer has in the middle, and the answer up to there."""
    tokens = greedy(pair)
    place = next(i for i in range(4, len(tokens)) if tokens[i] not in tokens[:i])
    stopping = type(pair)(**vars(pair) | {"stop_ids": frozenset({tokens[place]})})
    return stopping, tokens[: place + 1]


def test_an_answer_must_end_where_the_target_ends():
    pair, tokens = with_a_stop(random_pair("llama"))
    for right in (tokens, tokens[:-1]):  # with its stop token, or, as some engines have it, without
        assert audited(pair, [answered(right)]).verdicts == {EXACT: 1}
    early = audited(pair, [answered(tokens[:3])])
    assert early.verdicts == {VIOLATION: 1}
    assert early.departure(early.judged[0]).reason == "ends early"
    margin = early.judged[0].end_margin
    nearly = audited(pair, [answered(tokens[:3])], margin * 1.1)
    assert nearly.verdicts == {TIE: 1} and nearly.departure(nearly.judged[0]).margin == margin
    at_the_cap = answered(tokens[:3], cap=3)
    assert audited(pair, [at_the_cap]).verdicts == {EXACT: 1}
    following = int(pair.target(torch.tensor([PROMPT + tokens])).logits[0, -1].argmax())
    late = audited(pair, [answered([*tokens, following])])
    departure = late.departure(late.judged[0])
    assert late.verdicts == {VIOLATION: 1}
    assert (departure.index, departure.reason) == (len(tokens), "continues after a stop token")


def test_rounding_is_measured_on_answers_that_are_long_enough():
    """However short the first ones are."""
    pair = random_pair("llama")
    tokens = greedy(pair)
    noises = [
        Referee(pair, SamplingParams(1)).noise([*[answered(tokens[:1])] * short, answered(tokens)])
        for short in (0, 5)
    ]
    assert noises[0] == noises[1] > 0


def test_an_engine_that_says_nothing_is_not_exact():
    [arm] = arms_of(
        Referee(random_pair("llama"), SamplingParams(1)),
        {"answers": [answered([], cap=None)] * 2},
        None,
        1e-3,
    )
    assert arm.verdicts == {VIOLATION: 2} and arm.departure(arm.judged[0]).reason == "ends early"


def test_an_answer_beyond_its_limit_is_a_violation():
    arm = audited(random_pair("llama"), [answered(greedy(random_pair("llama")), cap=5)])
    departure = arm.departure(arm.judged[0])
    assert arm.verdicts == {VIOLATION: 1} and (departure.index, departure.reason) == (
        5,
        "continues after its limit",
    )


def test_a_stop_token_that_was_left_out_changes_no_mean():
    pair, tokens = with_a_stop(random_pair("llama"))
    referee = Referee(pair, DRAWN)
    with_it, without = (referee.judge(answered(some), NEW) for some in (tokens, tokens[:-1]))
    assert without.likely.surprise == pytest.approx(with_it.likely.surprise)
    last = referee.judge(answered([tokens[-1]], [*PROMPT, *tokens[:-1]], cap=1)).logprob
    assert without.logprob == pytest.approx(with_it.logprob - last, abs=1e-4)


def test_an_answer_may_fill_the_context():
    pair = random_pair("llama")
    tokens = greedy(pair)
    small = type("Small", (type(pair),), {"context_length": len(PROMPT) + len(tokens)})(**vars(pair))
    arm = audited(small, [answered(tokens, cap=10**6)])
    assert arm.verdicts == {EXACT: 1}


@pytest.mark.slow
def test_drawn_answers_must_end_where_one_may_be_drawn():
    """With their stop token or without; but not before, not after it, and not beyond their limit."""
    pair, _ = with_a_stop(random_pair("llama"))
    right = drawn(pair, 60, 0.8)
    ended = [one for one in right if one.tokens[-1] in pair.stop_ids]
    assert len(ended) > 5
    bare = [replace(one, tokens=one.tokens[:-1]) if one in ended else one for one in right]
    cut, empty = ([replace(one, tokens=one.tokens[:n]) for one in right] for n in (2, 0))
    whole, without, short, nothing = drawn_arms(pair, right, bare, cut, empty)
    assert abs(errors(whole)) < SURPRISE and abs(errors(without)) < SURPRISE
    assert errors(short) < -SURPRISE and errors(nothing) < -SURPRISE
    assert [arm.wrong_ends for arm in (whole, without, short, nothing)] == [0] * 4
    late = [replace(one, tokens=[*one.tokens, 5]) for one in ended]
    [arm] = drawn_arms(pair, late)
    assert arm.wrong_ends == len(late)


def test_without_a_cap_the_longest_answer_is_at_it():
    pair = random_pair("llama")
    tokens = greedy(pair)
    answers = [answered(tokens, cap=None), answered(tokens[:7], name="2", cap=None)]
    [arm] = arms_of(Referee(pair, SamplingParams(1)), {"answers": answers}, None, 1e-3)
    assert [arm.verdict(one) for one in arm.judged] == [EXACT, VIOLATION]


def test_the_plain_arm_says_how_much_an_engine_rounds():
    """Its departures widen the bound, as far as they can be rounding; a wrong plain arm excuses nothing."""
    pair = random_pair("llama")
    tokens = greedy(pair)
    logits = pair.target(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    place = int(logits.topk(2).values.diff().abs().argmin())  # where the two best are closest
    top = logits[place].topk(logits.shape[1])

    def departed(rank: int) -> tuple[list[int], float]:
        return [*tokens[:place], int(top.indices[rank])], float(top.values[0] - top.values[rank])

    near, gap = departed(1)
    far, distance = departed(-1)
    assert gap < ENGINE_NOISE < distance
    referee = Referee(pair, SamplingParams(1))
    cases: tuple = (
        ([near] * 3, {TIE: 1}),
        ([near], {VIOLATION: 1}),  # one departure may as well be a fault
        ([far] * 3, {VIOLATION: 1}),
    )
    for plain, verdict in cases:
        files = {"plain": [answered(one, cap=None) for one in plain], "answers": [answered(near, cap=None)]}
        arms = arms_of(referee, files, None, None)
        assert arms[1].verdicts == verdict
    assert arms[0].verdicts == {VIOLATION: 3}


def test_a_fault_of_the_plain_arm_is_not_the_size_of_its_rounding():
    def judged(*margins: float) -> list[Any]:
        return [SimpleNamespace(margins=np.array([0.0, *margins]))]

    assert largest_rounding(judged(0.01, 0.02, 0.06)) == 0.06
    assert largest_rounding(judged(0.01, 0.02, 0.03, 0.45)) == pytest.approx(FAR * 0.025)
    assert largest_rounding(judged(0.45, 0.01)) == 0.0 == largest_rounding(judged(2.0, 3.0, 4.0))


def drawn(pair, count: int, temperature: float, prompt=PROMPT, new: int = 10, **cut) -> list[Answered]:
    engine = Engine(pair.staged, Drafter(), pair.stop_ids)
    decoding = SamplingParams(new, temperature, **cut)
    answers = [engine.answer(prompt, decoding, seed=seed).tokens for seed in range(count)]
    return [answered(tokens, prompt, str(i), cap=new) for i, tokens in enumerate(answers)]


def errors(arm: Arm) -> float:
    return arm.judgement["standard_errors"]


def drawn_arms(pair, *answers: list[Answered]) -> list[Arm]:
    referee = Referee(pair, DRAWN)
    return arms_of(referee, {f"{i}": some for i, some in enumerate(answers)}, None, 0.0)


@pytest.mark.slow
def test_drawn_answers_are_as_likely_as_drawn_ones():
    pair = random_pair("llama")
    right = drawn(pair, 60, 0.8)
    noise = [
        answered(
            torch.randint(3, 60, (10,), generator=torch.Generator().manual_seed(i)).tolist(), name=str(i)
        )
        for i in range(60)
    ]
    hot, cold = drawn(pair, 60, 1.3), drawn(pair, 60, 0.4)
    arms = drawn_arms(pair, right, noise, hot, cold, [answered(greedy(pair))] * 3)
    assert abs(errors(arms[0])) < SURPRISE and not is_off(arms[0].judgement)
    for arm in arms[1:3]:
        assert errors(arm) < -SURPRISE
    for arm in arms[3:]:
        assert errors(arm) > SURPRISE
    first = {
        name: p
        for arm in arms[:3]
        for _, _, p in first_tokens(Referee(pair, DRAWN), arm)
        for name in arm.name
    }
    assert first["0"] > 1e-4 > first["1"]


@pytest.mark.slow
def test_a_token_that_is_hardly_ever_drawn_is_a_violation():
    """Whatever all other tokens are."""
    (arm,) = drawn_arms(pair := random_pair("llama"), drawn(pair, 20, 0.8))
    assert arm.judgement["rare_p"] > UNLIKELY and not is_off(arm.judgement)
    first, *others = arm.judged
    wrong = replace(first, likely=replace(first.likely, rarest=[1e-12, *first.likely.rarest[:-1]]))
    arm = replace(arm, judged=[wrong, *others])
    assert arm.judgement["rare_p"] < UNLIKELY and command._facts_of(arm, True)["wrong"]
    table = shown(command._drawn_table([arm], {}), width=200)
    assert "violation: tokens that are hardly ever drawn" in table


def test_first_tokens_raise_no_more_false_alarms_than_their_p_says():
    """Few answers of a steep distribution: where a chi-square says 1e-4, 1e-3 is true."""
    generator, probs = np.random.default_rng(0), 0.6 ** np.arange(1, 40)
    probs /= probs.sum()
    p_values = np.array([multinomial_p(generator.multinomial(30, probs), probs) for _ in range(4000)])
    for level in (0.1, 0.01, 0.001):
        assert (p_values < level).mean() <= level + 2 * (level / 4000) ** 0.5
    # Rounding of a bfloat16 moves even odds to three to two: of a thousand answers that is no chance.
    counts = np.array([600, 400])
    assert (
        multinomial_p(counts, np.array([0.5, 0.5]))
        < 1e-6
        < 0.9
        < multinomial_p(counts, np.array([0.5, 0.5]), 1.5)
    )
    assert multinomial_p(np.array([700, 300]), np.array([0.5, 0.5]), 1.5) < 1e-6
    other = np.roll(probs, 1)
    assert np.median([multinomial_p(generator.multinomial(60, other), probs) for _ in range(20)]) < 1e-6


def test_first_tokens_with_top_k_are_judged_without_those_at_the_edge():
    """Tokens 2 and 3 are as likely as each other: rounding decides which one top_k leaves out."""
    probs, yes, no = np.array([0.5, 0.26, 0.12, 0.12]), True, False
    first = FirstTokens(probs, np.array([yes, yes, no, no]), np.array([yes, yes, yes, yes]))
    right = np.random.default_rng(0).multinomial(600, [0.58, 0.3, 0.12, 0.0])
    assert first.p_value(right, 1.0) > 0.01 and first.p_value(right[[0, 1, 3, 2]], 1.0) > 0.01
    assert first.p_value(right[[1, 0, 2, 3]], 1.0) < 1e-6
    never = FirstTokens(probs, first.always, np.array([yes, yes, yes, no]))
    assert never.p_value(right, 1.0) > 0.01 and never.p_value(right[[0, 1, 3, 2]], 1.0) == 0.0
    assert first.p_value(np.array([0, 0, 9, 9]), 1.0) == 1.0


@pytest.mark.slow
def test_answers_drawn_with_top_p_are_right_only_if_the_audit_is_told():
    pair = random_pair("llama")
    cut = SamplingParams(10, 0.8, top_k=12, top_p=0.8)
    answers = drawn(pair, 60, 0.8), drawn(pair, 60, 0.8, top_k=12, top_p=0.8)
    for decoding, right in ((DRAWN, 0), (cut, 1)):
        referee = Referee(pair, decoding)
        arms = arms_of(referee, {f"{i}": some for i, some in enumerate(answers)}, None, 0.0)
        assert [is_off(arm.judgement) for arm in arms] == [i != right for i in (0, 1)]
        p_values = [p for arm in arms for _, _, p in first_tokens(referee, arm)]
        assert p_values[right] > 1e-3 and (right == 0 or p_values[0] == 0.0)


def test_the_surprise_of_a_token_is_zero_on_average():
    """Over all tokens, weighted by their probabilities; so is its variance what is said."""
    pair = random_pair("llama")
    referee = Referee(pair, DRAWN)
    probs = torch.from_numpy(referee.first_tokens(PROMPT, 0.0).probs)
    torch.testing.assert_close(
        probs,
        (pair.target(torch.tensor([PROMPT])).logits[0, -1].double() / 0.8).softmax(-1),
        rtol=1e-3,
        atol=1e-6,
    )
    ones = [referee.judge(answered([token], cap=1)) for token in range(len(probs))]
    surprises = torch.tensor([one.likely.surprise for one in ones], dtype=torch.double)
    assert (probs @ surprises).item() == pytest.approx(0.0, abs=1e-4)
    assert (probs @ surprises.square()).item() == pytest.approx(ones[0].likely.variance, rel=1e-3)


@pytest.mark.slow
def test_likelihoods_are_paired_by_prompt():
    pair = random_pair("llama")
    prompts = [PROMPT[i:] for i in range(5)]
    right = [one for p in prompts for one in drawn(pair, 4, 0.8, p)]
    wrong = [answered([5, 40, 41, 7], p, cap=4) for p in prompts[1:]]
    first, again, second = drawn_arms(pair, right, right, wrong)
    paired = likelihoods(first, second)
    by_hand = []
    for prompt in prompts[1:]:
        mine = [one for one in first.judged if one.answer.prompt == prompt]
        theirs = [one for one in second.judged if one.answer.prompt == prompt]
        means = [sum(o.logprob for o in x) / sum(len(o.answer.tokens) for o in x) for x in (mine, theirs)]
        by_hand.append(means[1] - means[0])
    assert paired.prompts == 4 and paired.difference == pytest.approx(np.mean(by_hand))
    half = 3.182446 * np.std(by_hand, ddof=1) / 2  # t of 3 degrees of freedom
    assert (paired.low, paired.high) == pytest.approx(
        (paired.difference - half, paired.difference + half), rel=1e-4
    )
    same = likelihoods(first, again)
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)
    [alone] = drawn_arms(pair, [answered([5], [4, 4])])
    assert likelihoods(first, alone) is None


def test_logprobs_of_the_engine_are_held_against_the_referee():
    pair = random_pair("llama")
    tokens = greedy(pair)
    logp = pair.target(torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
    logprobs = [float(logp[len(PROMPT) - 1 + i, token]) for i, token in enumerate(tokens)]
    for shift in (0.0, 0.25):
        arm = audited(pair, [answered(tokens, logprobs=[x - shift for x in logprobs]), answered(tokens)])
        assert arm.logprob_error == pytest.approx(shift, abs=1e-3)
    assert audited(pair, [answered(tokens)]).logprob_error is None


def test_same_answers_up_to_their_end():
    pair, tokens = with_a_stop(random_pair("llama"))
    first = audited(pair, [answered(tokens), answered(tokens), answered([5, 6], [8, 8])])
    second = audited(pair, [answered([*tokens, 9]), answered(tokens[:2]), answered([1], [7, 7])])
    assert same_answers(first, second) == (1, 2) and same_answers(first, first) == (3, 3)


def test_one_low_p_value_of_many_is_chance():
    assert not command.are_unlikely([]) and command.are_unlikely([5e-5])
    assert not command.are_unlikely([5e-5, *[0.5] * 9]) and command.are_unlikely([5e-6, *[0.5] * 9])


@pytest.fixture(scope="module")
def tiny():
    return load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, 0, with_draft=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ('{"tokens": [1]}', "line 2: lines need `tokens` and either `prompt` or `messages`"),
        ('{"prompt": [1], "messages": [], "tokens": [1]}', "either `prompt` or `messages`"),
        ('{"prompt": [1], "tokens": [1], "text": "x"}', "unknown key 'text'"),
        ('{"prompt": [1], "tokens": [1.5]}', "tokens must be token ids from 0 to"),
        ('{"prompt": [1], "tokens": [true]}', "tokens must be token ids"),
        ('{"prompt": [99999999], "tokens": [1]}', "prompt must be token ids"),
        ('{"prompt": [], "tokens": [1]}', "the prompt is empty"),
        ('{"prompt": [1], "tokens": [1, 2], "logprobs": [-1]}', "1 logprobs for 2 tokens"),
        ('{"prompt": [1], "tokens": [1, 2], "logprobs": [null, -1.0]}', "logprobs must be finite numbers"),
        ('{"prompt": [1], "tokens": [1], "logprobs": 3}', "logprobs must be finite numbers"),
        ('{"prompt": [1], "tokens": [1], "max_new_tokens": "16"}', "max_new_tokens must be a whole number"),
        ('{"messages": "hello", "tokens": [1]}', "messages must be a list of objects"),
        ('{"messages": [{"content": "hi"}], "tokens": [1]}', "messages must be a list of objects"),
        (b'{"prompt": "\xe9", "tokens": [1]}', "codec can't decode"),
        (r'{"prompt": "\ud83d", "tokens": [1]}', "line 2: "),
        ("[" * 100_000, "line 2: "),
        ('{"prompt": [1], "tokens": [1], "logprobs": [-1%s]}' % ("0" * 400), "line 2: "),
    ],
)
def test_bad_lines_are_one_line(tiny, tmp_path, line, message):
    path = tmp_path / "answers.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes('{"prompt": "Hello\u2028", "tokens": [5]}\n'.encode() + line + b"\n")
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        read_answers(path, tiny)
    path.write_text("\n")
    with pytest.raises(UserError, match="holds no answers"):
        read_answers(path, tiny)
    full = {"prompt": [1], "tokens": [1] * (tiny.context_length - 1)}
    path.write_text(json.dumps(full))
    assert len(read_answers(path, tiny)) == 1
    long = {"prompt": [1], "tokens": [1] * tiny.context_length}
    path.write_text(json.dumps(long))
    with pytest.raises(UserError, match="do not fit"):
        read_answers(path, tiny)


def run_audit(monkeypatch, capfd, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["audit", *words])
    for name in ("HYDRA_FULL_ERROR", "SPECBENCH_SCRATCH"):  # set by main
        monkeypatch.setenv(name, "")
    return exit_code(command.main), *capfd.readouterr()


def test_a_file_that_is_not_there_is_told_before_the_target_is_loaded(monkeypatch, capfd):
    monkeypatch.setattr(pairs, "load_pair", None)
    for words in (["none.jsonl"], [f"{__file__}", "plain=none.jsonl"]):
        code, _, errors = run_audit(monkeypatch, capfd, *words, "pair=tiny")
        assert code == 2 and "there is no file 'none.jsonl'" in errors


def test_no_report_replaces_the_answers(monkeypatch, capfd, tmp_path):
    answers = tmp_path / "a.jsonl"
    answers.write_text("{}")
    code, _, err = run_audit(monkeypatch, capfd, f"{answers}", "pair=tiny", f"out={answers}")
    assert code == 2 and "would replace answers" in err and answers.read_text() == "{}"


@pytest.mark.parametrize("words", [["out="], ["out=none/report.json"], ["temperature=1e-300"]])
def test_what_cannot_work_is_told_before_the_target_is_loaded(monkeypatch, capfd, words):
    monkeypatch.setattr(pairs, "load_pair", None)
    code, _, errors = run_audit(monkeypatch, capfd, __file__, "pair=tiny", *words)
    assert code == 2 and errors.count("\n") == 1 and words[0].partition("=")[0] in errors


@pytest.mark.slow
def test_the_command(tiny, tmp_path, monkeypatch, capfd):
    messages = [{"role": "user", "content": "Which planet is the largest?"}]
    prompt = tiny.prompt_ids(messages)
    tokens = generate_with_transformers(tiny.target, prompt, 12, tiny.stop_ids)
    right, wrong, out = (tmp_path / name for name in ("right.jsonl", "wrong.jsonl", "out.json"))
    right.write_text(json.dumps({"messages": messages, "tokens": tokens, "id": "a"}) + "\n")
    broken = [*tokens[:4], 5, *tokens[5:]]
    wrong.write_text(json.dumps({"prompt": prompt, "tokens": broken, "id": "b"}) + "\n")
    code, _, errors = run_audit(monkeypatch, capfd, f"{right}", "pair=tiny", f"again={right}")
    assert code == 2 and "name the first as plain=FILE" in errors
    again = [f"plain={right}", f"again={right}"]
    code, text, _ = run_audit(monkeypatch, capfd, f"{right}", "pair=tiny", *again)
    assert code == 0 and "1 of 1" not in text.splitlines()[3]
    code, text, _ = run_audit(monkeypatch, capfd, f"{wrong}", "pair=tiny", f"plain={right}", f"out={out}")
    assert code == 1 and "answers, b: token 4: a token that the referee would not say (5; " in text
    report = read_json(out)
    assert report["arms"]["plain"]["verdicts"] == {EXACT: 1} and report["dtype"] == "float32"
    [place] = report["arms"]["answers"]["departures"]
    assert (place["id"], place["verdict"], place["index"], place["best"]) == ("b", VIOLATION, 4, tokens[4])
    code, text, _ = run_audit(
        monkeypatch, capfd, f"{wrong}", "pair=tiny", f"plain={right}", "temperature=0.5", f"out={out}"
    )
    report = read_json(out)
    assert code == 1 and "violation" in text and report["arms"]["answers"]["wrong"]
    assert not report["arms"]["plain"]["wrong"] and math.isfinite(report["paired"]["answers"]["difference"])
    code, _, errors = run_audit(monkeypatch, capfd, "pair=tiny")
    assert code == 2 and "usage: specbench audit FILE" in errors
