"""How likely drawn tokens are: drawn ones lie within some standard errors of zero, all others do not."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.measure import certify
from specbench.measure.likelihood import BLOCK, RAREST, likelihood, of_logits
from specbench.measure.metrics.drawn import (
    SURPRISE,
    UNLIKELY,
    errors_of,
    is_off,
    judgement,
    likelihoods,
    rare_p,
    rarities,
    spread_p,
    standard_errors,
)
from specbench.report import remarks, verdicts
from specbench.system.files import finite
from tests.support.decoding import random_pair
from tests.support.synthetic import answered

PLACES, VOCAB = 4000, 37


def at(temperature: float) -> SamplingParams:
    return SamplingParams(1, temperature)


def drawn(logits: torch.Tensor, decoding: float | SamplingParams, seed: int = 0) -> list[int]:
    probs = (decoding if isinstance(decoding, SamplingParams) else at(decoding)).probs(logits)
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_drawn_tokens_lie_within_a_few_standard_errors(temperature):
    logits = 2 * torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(1))
    for seed in range(20):
        one = of_logits(logits, drawn(logits, temperature, seed), at(temperature))
        assert one.tokens == PLACES and abs(standard_errors(one.surprise, one.variance)) < SURPRISE


@pytest.mark.parametrize(("other", "sign"), [(0.8, 1), (1.3, -1)])
def test_tokens_of_another_temperature_do_not(other, sign):
    logits = 2 * torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(1))
    one = of_logits(logits, drawn(logits, other), at(1.0))
    assert sign * standard_errors(one.surprise, one.variance) > SURPRISE


CUTS = [{"top_k": 6}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_tokens_drawn_with_top_k_and_top_p_are_judged_as_such(cut, noise):
    """With noise, the tokens come from other logits than the judge's: at the edge other tokens are left out."""
    g = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(PLACES, VOCAB, generator=g)
    drawing, decoding = logits + noise / 12 * torch.randn(logits.shape, generator=g), replace(at(0.7), **cut)
    for seed in range(10):
        one = asdict(of_logits(logits, drawn(drawing, decoding, seed), decoding, noise))
        assert abs(errors_of([one])) < SURPRISE and rare_p([one]) > UNLIKELY
    edges = (decoding.probs(drawing) > 0) != (decoding.probs(logits) > 0)
    assert edges.any() == (noise > 0), "the noise changes no edge: nothing is tested"
    whole = asdict(of_logits(logits, drawn(logits, 0.7), decoding, noise))
    assert errors_of([whole]) < -SURPRISE and rare_p([whole]) < UNLIKELY
    cut_again = asdict(of_logits(logits, drawn(logits, replace(decoding, top_k=2)), decoding, noise))
    assert errors_of([cut_again]) > SURPRISE


@pytest.mark.parametrize("temperature", [0.02, 1.0])
def test_of_tokens_that_are_as_likely_as_each_other_any_may_be_left_out(temperature):
    """In half precision many logits are equal; other programs draw from exactly top_k of them."""
    logits = (2 * torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(1))).mul(4).round() / 4
    decoding, noise = replace(at(temperature), top_k=9), 0.1
    ranked = logits.argsort(dim=-1, descending=True, stable=True)
    last = logits.gather(1, ranked[:, 8:10])
    assert (last[:, 0] == last[:, 1]).float().mean() > 0.3, "few are tied: nothing is tested"
    exactly = torch.full_like(logits, -math.inf).scatter(1, ranked[:, :9], logits.gather(1, ranked[:, :9]))
    for tokens in (drawn(exactly, temperature), drawn(logits, decoding)):
        one = asdict(of_logits(logits, tokens, decoding, noise))
        assert abs(errors_of([one])) < SURPRISE and rare_p([one]) > UNLIKELY
    tokens[3] = int(ranked[3, 25])
    assert rare_p([asdict(of_logits(logits, tokens, decoding, noise))]) == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_one_token_that_was_left_out_is_found(noise):
    logits, decoding = torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(2)), at(1.0)
    decoding = replace(decoding, top_k=9)
    tokens = drawn(logits, decoding)
    assert rare_p([asdict(of_logits(logits, tokens, decoding, noise))]) > UNLIKELY
    tokens[70] = int(logits[70].argsort(descending=True)[14])
    assert rare_p([asdict(of_logits(logits, tokens, decoding, noise))]) == 0.0


@pytest.mark.parametrize(
    ("temperature", "said"), [(0.02, 0), (0.3, 0), (1.0, 0), (0.3, -1), (0.3, 1), (1.0, -1), (1.0, 1)]
)
def test_what_rounds_otherwise_is_drawn_and_another_temperature_is_none(temperature, said):
    """Tokens come from logits that are rounded otherwise than the judge's; at 0.02 that decides which one it is."""
    g = torch.Generator().manual_seed(3)
    exact = 4 * torch.randn(2 * PLACES, VOCAB, generator=g)
    judging, drawing = (exact + 0.04 * torch.randn(exact.shape, generator=g) for _ in range(2))
    tokens = drawn(drawing, temperature * {0: 1.0, -1: 1.3, 1: 0.8}[said])
    blind, seeing = (asdict(of_logits(judging, tokens, at(temperature), noise)) for noise in (0.0, 0.5))
    assert said * errors_of([seeing]) > SURPRISE if said else abs(errors_of([seeing])) < SURPRISE
    assert (abs(errors_of([blind])) > SURPRISE) == (bool(said) or temperature == 0.02)


@pytest.mark.parametrize(
    ("dtype", "device", "served", "noise", "noise_of_a_cut"),
    [
        (torch.float32, "cpu", None, 0.0, 0.6),
        (torch.float32, "cpu", "another engine", 0.0, 0.6),
        (torch.bfloat16, "cpu", None, 0.25, 0.25),
        (torch.bfloat16, "cpu", "another engine", 0.6, 0.6),
        (torch.bfloat16, "cuda", None, 0.6, 0.6),
    ],
)
def test_half_precision_and_cuts_are_judged_within_the_noise_of_the_run(
    monkeypatch, dtype, device, served, noise, noise_of_a_cut
):
    """And of the judge, where that is the model's own forward."""
    given = []
    monkeypatch.setattr(certify, "likelihood", lambda *arguments: given.append(arguments[-2:]))
    pair = random_pair("llama")
    target = SimpleNamespace(dtype=dtype, device=torch.device(device))
    setup = SimpleNamespace(target=target, pair=pair, served=served)
    certifier = certify.Certifier(setup, None)
    certifier.__dict__ |= {"_noise_of_shapes": 0.25, "_noise_of_served": 0.1, "_noise_of_others": 0.6}
    for cut in ({}, {"top_k": 9}):
        certifier.likelihood(Request([3, 9], SamplingParams(4, 0.5, **cut)), [5, 6])
    assert given == [(noise, 0.0), (noise_of_a_cut, 0.6)]


def test_a_near_tie_of_a_cut_that_leaves_one_token_is_no_violation_and_another_token_is():
    """Each distribution has one token and no variance: the smallest difference would be many standard errors."""
    logits = 4 * torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(5))
    decoding, noise = replace(at(1.0), top_k=1), 2e-5
    best, second = logits.topk(2, dim=-1).indices[7].tolist()
    logits[7, second] = logits[7, best] - 5e-6
    tokens = logits.argmax(-1).tolist()
    tokens[7] = second
    near = judgement([asdict(of_logits(logits, tokens, decoding, noise, noise))])
    assert not is_off(near)
    assert is_off(judgement([asdict(of_logits(logits, tokens, decoding, 0.0, 0.0))])), "nothing is tested"
    tokens[7] = int(logits[7].argsort(descending=True)[3])
    assert is_off(judgement([asdict(of_logits(logits, tokens, decoding, noise, noise))]))


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_tokens_that_are_hardly_ever_drawn_are_found_among_many(temperature, noise):
    """One of a thousand, or two of four thousand: the sum of all tokens moves by less than four standard errors."""
    g = torch.Generator().manual_seed(3)
    exact = 4 * torch.randn(PLACES, VOCAB, generator=g)
    logits = exact + noise / 12 * torch.randn(exact.shape, generator=g)
    for place in (7, 9):
        exact[place, 5] = logits[place, 5] = logits[place].max() - 30.0  # e^-30 at temperature 1
    for seed in range(20):
        tokens = drawn(logits, temperature, seed)
        pieces = [slice(0, 100), slice(100, PLACES)]
        honest, *parts = (
            asdict(of_logits(exact[s], tokens[s], at(temperature), noise)) for s in (slice(None), *pieces)
        )
        assert rare_p([honest]) > UNLIKELY and rare_p(parts) == pytest.approx(rare_p([honest]))
        if seed:
            continue
        judged = {"standard_errors": 0.0, "rare_p": rare_p([honest]), "spread_p": None}
        tokens[7] = 5
        few, many = (asdict(of_logits(exact[:n], tokens[:n], at(temperature), noise)) for n in (1000, PLACES))
        assert rare_p([few]) < UNLIKELY < rare_p([many]), "that often a random number is exactly 0"
        assert temperature < 1 or abs(errors_of([few])) < SURPRISE
        tokens[9] = 5
        wrong = asdict(of_logits(exact, tokens, at(temperature), noise))
        assert (
            rare_p([wrong]) < UNLIKELY and is_off(judged | {"rare_p": rare_p([wrong])}) and not is_off(judged)
        )
        assert temperature < 1 or abs(errors_of([wrong])) < SURPRISE


def test_the_least_likely_tokens_are_few_and_their_chances_those_of_a_draw():
    """Of 400 answers of one token each, the p values are as they should be: not often small."""
    logits = torch.randn(400 * 50, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = drawn(logits, 1.0)
    p_values = []
    for i in range(400):
        part = slice(50 * i, 50 * (i + 1))
        one = of_logits(logits[part], tokens[part], at(1.0))
        assert len(one.rarest) == RAREST and one.rarest == sorted(one.rarest) and one.rarest[0] > 0
        p_values.append(rare_p([asdict(one)]))
    assert sum(p < 0.05 for p in p_values) <= 30  # 20 at most are expected
    assert rare_p([{"tokens": 0, "rarest": []}]) == 1.0


@pytest.mark.parametrize("places", [1, 8, 48])
@pytest.mark.parametrize("temperature", [0.1, 0.3, 1.0])
def test_answers_that_are_drawn_are_not_spread_more_than_chance_has_it(temperature, places):
    """Of 100 runs of 20 answers each; steep distributions, too, whose sums are far from normal."""
    logits = 3 * torch.randn(20 * places, VOCAB, generator=torch.Generator().manual_seed(places))
    p_values = []
    for seed in range(100):
        tokens = drawn(logits, temperature, seed)
        parts = [slice(places * i, places * (i + 1)) for i in range(20)]
        p_values.append(spread_p([asdict(of_logits(logits[s], tokens[s], at(temperature))) for s in parts]))
    assert min(p_values) > UNLIKELY and sum(p < 0.01 for p in p_values) <= 5


def test_opposite_errors_of_answers_do_not_cancel():
    """Half of them drawn too cold, half too hot: the sum is right, the answers are not."""
    logits = 2 * torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(1))
    parts = [slice(i, i + 100) for i in range(0, PLACES, 100)]
    likely = []
    for i, part in enumerate(parts):
        tokens = drawn(logits[part], 0.8 if i % 2 else 1.24, i)
        likely.append(asdict(of_logits(logits[part], tokens, at(1.0))))
    judged = judgement(likely)
    assert abs(judged["standard_errors"]) < SURPRISE and judged["rare_p"] > UNLIKELY > judged["spread_p"]
    assert is_off(judged) and rarities(judged)[0].startswith("single answers too far off (p = ")


def test_nothing_blurs_without_noise():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    one = of_logits(logits, [1, 2, 3, 4, 5], at(0.7))
    assert (one.blurred_surprise, one.blurred_variance, one.blurred_third) == (0.0, one.variance, one.third)
    assert errors_of([asdict(one)]) == standard_errors(one.surprise, one.variance, one.third)
    assert math.isnan(errors_of([asdict(one) | {"surprise": math.nan}]))


def test_a_model_is_asked_at_the_places_of_the_answer():
    pair, prompt, tokens = random_pair("llama"), [3, 9, 27, 11], [5, 6, 7, 8, 9]
    one = likelihood(pair.staged, prompt, tokens, SamplingParams(5, 0.7), pair.stop_ids)
    logits = pair.target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().item()
    assert one.logprob == pytest.approx(expected, abs=1e-3) and one.tokens == 5


def test_an_end_without_a_stop_token_was_drawn_too():
    """As some engines leave it out. One that was cut has drawn an unlikely one."""
    pair, prompt, tokens = random_pair("llama"), [3, 9, 27, 11], [5, 6, 7]
    logits = pair.target(torch.tensor([prompt + tokens])).logits[0, -1].float()
    ranked = logits.argsort(descending=True).tolist()
    stop_ids = frozenset({ranked[3], ranked[-1]})
    full, ended = (likelihood(pair.staged, prompt, tokens, SamplingParams(n, 1.0), stop_ids) for n in (3, 9))
    assert (full.tokens, ended.tokens) == (3, 4)
    assert ended.logprob - full.logprob == pytest.approx(float(logits.log_softmax(-1)[ranked[3]]), abs=1e-3)
    stopped = likelihood(pair.staged, prompt, [*tokens, ranked[3]], SamplingParams(9, 1.0), stop_ids)
    assert stopped.tokens == 4 and stopped.logprob == pytest.approx(ended.logprob, abs=1e-3)
    assert likelihood(pair.staged, prompt, tokens, SamplingParams(9, 1.0), frozenset()).tokens == 3
    assert likelihood(pair.staged, prompt, [], SamplingParams(9, 1.0), stop_ids).tokens == 1


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_logits_none_of_which_is_a_number_are_judged_with_a_cut_too(cut):
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2] = math.nan
    one = asdict(of_logits(logits, [1, 2, 4, 4, 5], replace(at(1.0), **cut), 0.1))
    assert math.isnan(one["surprise"]) and is_off(judgement([one]))


def test_a_run_sums_over_its_answers():
    likely = {"tokens": 10, "logprob": -5.0, "surprise": -8.0, "variance": 4.0}
    records = [answered(1), answered(2, turns=2)]
    for one in records:
        for turn in one["turns"]:
            turn["likelihood"] = {"baseline": likely | {"surprise": 1.0}, "method": likely}
    assert likelihoods([answered(1)]) == {}
    numbers = likelihoods(records)
    count = sum(len(one["turns"]) for one in records)
    assert numbers["method"] == {
        "logprob": -0.5,
        "standard_errors": pytest.approx(-8.0 * count / (4.0 * count) ** 0.5),
        "rare_p": None,
        "spread_p": pytest.approx(0.0, abs=1e-6),
        "lean": None,
    }
    assert numbers["baseline"]["standard_errors"] == pytest.approx(count / (4.0 * count) ** 0.5)


def test_logits_that_are_no_numbers_are_violations_and_no_traceback():
    """The journal holds null for NaN. A logit of minus infinity is none of them: its token is never drawn."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2, 3] = -math.inf
    fine = asdict(of_logits(logits, [1, 2, 4, 4, 5], at(1.0)))
    assert math.isfinite(fine["surprise"]) and math.isfinite(fine["variance"])
    logits[2, 3] = math.nan
    wrong = finite(asdict(of_logits(logits, [1, 2, 4, 4, 5], at(1.0))))
    assert wrong["surprise"] is None
    record = answered(1)
    record["turns"][0]["likelihood"] = {"baseline": fine, "method": wrong}
    summary = {"likelihood": finite(likelihoods([record])), "engine": None}
    assert verdicts.improbable(summary) == ["method"]
    assert "– standard errors off" in remarks.likelihood_line(summary)


def test_the_rare_is_judged_by_the_skew_of_the_sum():
    """Of few tokens at a low temperature, one that is unlikely is no sign of a fault; a hundred are."""
    p = torch.tensor([0.99, 0.01]).double()
    logits = p.log().expand(20, 2)

    def errors(*, unlikely: int) -> float:
        one = of_logits(logits, [0] * (20 - unlikely) + [1] * unlikely, at(1.0))
        assert one.third < 0
        return standard_errors(one.surprise, one.variance, one.third)

    assert -3 < errors(unlikely=1) < -1 and -4 < errors(unlikely=2) < -2 and errors(unlikely=8) < -5
    assert errors(unlikely=0) > 0


def test_what_is_likelier_than_usual_by_a_little_is_no_fault():
    """A fitted curve ends before the sum does: of a token at 0.6 and one at 0.999 the likelier two are the rule."""
    one = of_logits(torch.tensor([[0.6, 0.4], [0.999, 0.001]]).double().log(), [0, 0], at(1.0))
    assert 0.5 < standard_errors(one.surprise, one.variance, one.third) < 0.6


def test_moments_are_summed_in_blocks():
    torch.manual_seed(0)
    logits, tokens = torch.randn(3 * BLOCK + 5, 40) * 3, [int(i) for i in torch.randint(40, (3 * BLOCK + 5,))]
    one = of_logits(logits, tokens, at(0.7))
    logp = (logits.double() / 0.7).log_softmax(-1)
    p, entropy = logp.exp(), -(logp.exp() * logp).sum(-1, keepdim=True)
    assert one.variance == pytest.approx((p * (logp + entropy) ** 2).sum().item(), rel=1e-4)
    assert one.third == pytest.approx((p * (logp + entropy) ** 3).sum().item(), rel=1e-4)
    assert one.logprob == pytest.approx(logp.gather(1, torch.tensor(tokens)[:, None]).sum().item(), rel=1e-4)
