from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from methods.ar import Autoregressive
from specbench.config.spec import AGAIN, BASELINE, HF, METHOD, OWN_LOOP, SINGLE, RunSpec
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams, sample_inverse_cdf, truncate_at_stop
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation
from specbench.measure import certify as certify_module
from specbench.measure import numeric_noise
from specbench.measure.arms import Setup
from specbench.measure.certify import Certificate, Certifier, certify, worst
from specbench.measure.numeric_noise import drawn_margin
from specbench.measure.protocol import Protocol
from specbench.measure.truncation import truncated_margin
from tests.support.decoding import random_pair

STOP = {0}
LIMIT = 1e-3
WORDS = [w for n in range(5) for w in product((0, 1, 2), repeat=n)]  # every sequence of up to 4 tokens


def never(index, expected, found):
    raise AssertionError("no two tokens differ, so there is no margin to ask for")


def noise():
    return LIMIT


def no_noise():
    raise AssertionError("no margin is held against the noise, so there is no need to measure it")


def margin_of(value):
    return lambda index, expected, found: value


def cut(tokens):
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


@pytest.mark.parametrize("tokens", WORDS)
def test_truncate_at_stop(tokens):
    assert truncate_at_stop(tokens, STOP) == list(cut(tokens))


def test_every_pair_of_short_answers():
    for reference, answer in product(WORDS, repeat=2):
        asked = []

        def margin_at(index, expected, found, asked=asked):
            asked.append((index, expected, found))
            return LIMIT

        found = certify(reference, answer, STOP, margin_at, noise)
        left, right = cut(reference), cut(answer)
        shared = min(len(left), len(right))
        at = next((i for i in range(shared) if left[i] != right[i]), shared)
        if left == right and len(answer) > len(right):
            assert found == Certificate("violation", len(right), None, None) and not asked
        elif left == right:
            assert found == Certificate("exact", None, None, None) and not asked
        elif at < shared:
            verdict = "tie" if len(answer) == len(right) else "violation"  # it goes on after its stop token
            assert found == Certificate(verdict, at, LIMIT, LIMIT) and asked == [(at, left[at], right[at])]
        else:
            assert found == Certificate("violation", at, None, None) and not asked


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [(0.0, "tie"), (LIMIT, "tie"), (-LIMIT, "tie"), (1.01 * LIMIT, "violation"), (-1.01 * LIMIT, "violation"),
     (float("nan"), "violation"), (float("inf"), "violation")],
)  # fmt: skip
def test_a_tie_lies_within_the_noise(margin, verdict):
    found = certify([1, 2, 0], [1, 1, 0], STOP, margin_of(margin), noise)
    assert (found.verdict, found.first_divergence) == (verdict, 1)


REFERENCE = [5, 6, 7, 8, 9, 0]


@pytest.mark.parametrize(
    ("answer", "verdict", "at"),
    [
        ([5, 6, 8, 8, 9, 0], "violation", 2),  # a swapped token
        ([5, 6, 7, 9, 0], "violation", 3),  # a dropped bonus token
        ([5, 6, 7, 8, 9, 0, 4, 4], "violation", 6),  # tokens after the stop token
        ([5, 6, 7], "violation", 3),  # truncated
        ([], "violation", 0),
        ([5, 6, 7, 7, 8, 9, 0], "violation", 3),  # an extra token
        ([5, 6, 7, 8, 9], "violation", 5),  # the stop token is missing
        ([5, 6, 7, 8, 9, 9], "violation", 5),  # went on instead of stopping, at no near-tie
        ([5, 6, 0], "violation", 2),  # stopped early, at no near-tie
    ],
)
def test_planted_faults(answer, verdict, at):
    found = certify(REFERENCE, answer, STOP, margin_of(3.0), noise)
    assert (found.verdict, found.first_divergence) == (verdict, at)


def test_stopping_at_a_near_tie_is_a_tie():
    assert certify(REFERENCE, [5, 6, 0], STOP, margin_of(0.0), noise).verdict == "tie"


@pytest.mark.parametrize("after", [2 * LIMIT, float("inf"), float("nan")])
def test_a_fault_after_a_tie_is_a_violation(after):
    answer = [5, 6, 8, 8, 9, 0]
    judged = certify(REFERENCE, answer, STOP, margin_of(0.0), noise, lambda tokens, index: after)
    assert (judged.verdict, judged.first_divergence) == ("violation", 2)
    asked = []
    certify(REFERENCE, answer, STOP, margin_of(0.0), noise, lambda *given: asked.append(given) or LIMIT)
    assert asked == [(answer, 2)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_follows_a_tie_is_held_against_the_target(monkeypatch, temperature):
    """A text that departs by rounding is followed to its end: another fault in it is found."""
    pair, prompt, n = random_pair("llama", vocab_size=32), [3, 9, 27, 11], 24
    engine, decoding = Engine(pair.staged, Drafter(), frozenset()), SamplingParams(n, temperature)
    arms = {BASELINE: engine.rounds, METHOD: engine.rounds}
    setup = Setup(pair, pair.staged, Autoregressive(pair), arms, RunSpec({}))
    certifier = Certifier(setup, Protocol(pair, decoding, "paired", 0))
    monkeypatch.setattr(Certifier, "noise", lambda self, arm: 0.01)
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    request = Request(prompt, decoding, seed=7)

    def verdict(answer: list[int], first: list[int]) -> str | None:
        answers = {BASELINE: [], METHOD: [Generation(answer, 0.0, 0.0, "length")]}
        return certifier.judge(METHOD, {BASELINE: request, METHOD: request}, answers, first).verdict

    (answer,) = engine.generate([request])
    # A reference that chance made differ at one place, by less than the noise there.
    first = [*answer.tokens]
    first[4] = (first[4] + 1) % 32
    monkeypatch.setattr(certify_module, "next_logits", lambda *given: torch.zeros(32))
    monkeypatch.setattr(certify_module, "drawn_margin", within(drawn_margin, first=0.0))
    assert verdict(answer.tokens, first) == "tie"
    for place in (5, 12, n - 1):
        wrong = [*answer.tokens]
        wrong[place] = (wrong[place] + 1) % 32
        monkeypatch.setattr(certify_module, "drawn_margin", within(drawn_margin, first=0.0))
        assert verdict(wrong, first) == "violation"
    monkeypatch.setattr(certify_module, "drawn_margin", within(drawn_margin, first=0.0))
    assert verdict(answer.tokens[:-3], first) == "violation", "nothing has ended it"
    monkeypatch.setattr(certify_module, "drawn_margin", within(drawn_margin, first=0.0))
    assert verdict([*answer.tokens, 1], first) == "violation", "longer than it may be"
    if decoding.greedy:  # of a draw of the stop token nothing is known
        ends = (i for i in range(6, n) if answer.tokens[i] not in [*answer.tokens[:i], *first[:i]])
        if (end := next(ends, None)) is not None:
            monkeypatch.setattr(pair, "stop_ids", frozenset([answer.tokens[end]]))
            monkeypatch.setattr(certify_module, "drawn_margin", within(drawn_margin, first=0.0))
            assert verdict(answer.tokens[:end], first) == "tie", "by a stop token that an engine left out"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reference_that_is_wrong_is_no_tie(monkeypatch, temperature):
    """Though the answer beside it is right, or as wrong."""
    pair, prompt, n = random_pair("llama", vocab_size=32), [3, 9, 27, 11], 12
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    monkeypatch.setattr(Certifier, "noise", lambda self, arm: 1e-3)
    engine, decoding = Engine(pair.staged, Drafter(), frozenset()), SamplingParams(n, temperature)
    arms = {BASELINE: engine.rounds, METHOD: engine.rounds}
    setup = Setup(pair, pair.staged, Autoregressive(pair), arms, RunSpec({}))
    certifier = Certifier(setup, Protocol(pair, decoding, "paired", 0))
    request = Request(prompt, decoding, seed=7)
    (right,) = engine.generate([request])

    def verdict(first: list[int], answer: list[int]) -> str | None:
        answers = {BASELINE: [], METHOD: [Generation(answer, 0.0, 0.0, "length")]}
        return certifier.judge(METHOD, dict.fromkeys(arms, request), answers, first).verdict

    assert verdict(right.tokens, right.tokens) == "exact"
    wrong, other = ([*right.tokens[:4], (right.tokens[4] + step) % 32, *right.tokens[5:]] for step in (1, 2))
    assert verdict(wrong, right.tokens) == "violation"
    if decoding.greedy:
        logits = torch.zeros(32)
        logits[right.tokens[4]] = 5.0  # the target's choice, which neither of them took
        monkeypatch.setattr(certify_module, "next_logits", lambda *given: logits)
        assert verdict(wrong, other) == "violation"


def served_certifier(pair, decoding: SamplingParams) -> Certifier:
    arms = dict.fromkeys((BASELINE, METHOD, AGAIN, OWN_LOOP))
    setup = Setup(pair, pair.staged, Drafter(), arms, RunSpec({}), served=SimpleNamespace(has_own_file=False))
    return Certifier(setup, Protocol(pair, decoding, "paired", 0))


def test_after_a_tie_it_is_the_engines_own_answer_that_is_followed(monkeypatch):
    """Our loop's answer is right by construction: a fault later in the engine's was called a tie."""
    pair, n = random_pair("llama", vocab_size=32), 24
    decoding = SamplingParams(n)
    request = Request([3, 9, 27, 11], decoding)
    monkeypatch.setattr(Certifier, "noise", lambda self, arm: 0.01)
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    ours = Engine(pair.staged, Drafter(), frozenset()).answer(request.prompt, decoding).tokens
    certifier = served_certifier(pair, decoding)
    monkeypatch.setattr(certify_module, "next_logits", lambda *given: torch.zeros(32))

    def verdict(*wrong: int) -> str | None:
        """On an engine's answer that chance made differ at place 4, and that is not the target's there."""
        other = [*ours[:4], (ours[4] + 1) % 32]
        rest = Engine(pair.staged, Drafter(), frozenset()).answer(
            [*request.prompt, *other], SamplingParams(n - 5)
        )
        other += rest.tokens
        for place in wrong:
            other[place] = (other[place] + 1) % 32
        texts = {BASELINE: other, METHOD: other, AGAIN: other, OWN_LOOP: ours}
        answers = {arm: [Generation(text, 0.0, 0.0, "length")] for arm, text in texts.items()}
        return certifier.judge(OWN_LOOP, dict.fromkeys(texts, request), answers, other).verdict

    assert verdict() == "tie"
    assert [verdict(place) for place in (9, n - 1)] == ["violation"] * 2


def test_a_drawn_answer_that_continues_after_its_end_is_a_violation():
    """Its extra tokens are as likely as any, and another engine may ignore stop tokens or the limit."""
    pair, decoding = random_pair("llama"), SamplingParams(6, 1.0)
    request, stop = Request([3, 9, 27, 11], decoding), next(iter(pair.stop_ids))
    certifier = served_certifier(pair, decoding)

    def verdicts(text: list[int]) -> list[str | None]:
        answers = {arm: [Generation(text, 0.0, 0.0, "length")] for arm in (BASELINE, METHOD, AGAIN, OWN_LOOP)}
        requests = dict.fromkeys(answers, request)
        return [certifier.judge(arm, requests, answers, text).verdict for arm in (METHOD, AGAIN, OWN_LOOP)]

    for right in ([5, 6, 7], [5, 6, 7, 8, 9, 10], [5, stop]):
        assert verdicts(right) == [None] * 3
    for wrong in ([5, 6, 7, 8, 9, 10, 11], [5, stop, 6]):
        assert verdicts(wrong) == ["violation"] * 3


def test_a_missing_stop_token_is_as_far_off_as_the_likeliest_of_them():
    logits = torch.tensor([0.0, 1.0, 5.0, 3.0])
    assert certify_module.greedy_margin(logits, [1, 3]) == certify_module.greedy_margin(logits, [3, 1]) == 2.0


def test_the_next_logits_are_those_in_front_of_a_token():
    pair, prompt, answer = random_pair("llama"), [3, 9, 27, 11], [5, 6, 7]
    for i in range(3):
        with torch.inference_mode():
            expected = pair.target(torch.tensor([prompt + answer[:i]])).logits[0, -1].float()
        logits = numeric_noise.next_logits(pair.staged, prompt, answer, i)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


def test_the_noise_of_batches_is_twice_what_so_many_rows_change(monkeypatch):
    target, sizes = random_pair("llama").staged, []
    forward, rows = target.model.forward, numeric_noise.forced_rows
    monkeypatch.setattr(
        target.model, "forward", lambda ids, **more: sizes.append(len(ids)) or forward(ids, **more)
    )
    sample = [([5, 9, 2], [3, 4, 5, 6])]
    widths = []
    monkeypatch.setattr(numeric_noise, "forced_rows", lambda *given: widths.append(given[3]) or rows(*given))
    numeric_noise.batch_noise(target, sample, 3)
    assert {*sizes} == {1, 3} and 60 not in widths
    numeric_noise.batch_noise(target, sample, 3, widest=60)
    assert 60 in widths, "the method's own passes may be wider"

    def moved(*given):
        logits = rows(*given).clone()
        logits[-1, 0, logits[-1, 0].argmax()] += 0.25
        return logits

    monkeypatch.setattr(numeric_noise, "forced_rows", moved)
    assert numeric_noise.batch_noise(target, sample, 3) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batched_baseline_is_judged_beside_one_sequence_also_where_the_method_draws(
    monkeypatch, temperature
):
    """And where transformers answered another prompt."""
    pair, decoding = random_pair("llama", vocab_size=32), SamplingParams(8, temperature)
    monkeypatch.setattr(pair, "stop_ids", frozenset())
    engine = Engine(pair.staged, Drafter(), pair.stop_ids)
    arms = dict.fromkeys((BASELINE, METHOD, SINGLE, HF), engine.rounds)
    setup = Setup(pair, pair.staged, Drafter(), arms, RunSpec({}))
    assert setup.judged == {"equivalence": [METHOD], "baseline_equivalence": [HF, BASELINE]}
    request = Request([3, 9, 27, 11], decoding, seed=7)
    requests = dict.fromkeys(arms, request) | {HF: Request([3, 9, 27], decoding)}
    answers = {name: engine.generate([request]) for name in arms}
    first = answers[SINGLE][0].tokens

    def verdicts() -> list[str | None]:
        certifier = Certifier(setup, Protocol(pair, decoding, "paired", 0))
        certifier.__dict__["_noise_of_shapes"] = 0.0
        return [certifier.judge(arm, requests, answers, first).verdict for arm in (HF, BASELINE, METHOD)]

    assert verdicts() == [None, "exact", "exact" if decoding.greedy else None]
    answers[BASELINE][0].tokens[5] += -1 if first[5] else 1
    assert verdicts()[1] == "violation"


def test_the_worst_certificate_is_that_of_an_answer_that_was_judged():
    ones = [Certificate(verdict, None, None, None) for verdict in (None, "exact", "violation", "tie")]
    assert worst(ones) is ones[2] and worst(ones[:2]) is ones[1] and worst(ones[:1]) is ones[0]


def within(function, first):
    """The function, whose first two calls, on the two tokens at the first difference, give `first`."""
    calls = []

    def called(*given):
        calls.append(given)
        return first if len(calls) <= 2 else function(*given)

    return called


EDGES = [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.9}]


def test_a_missing_token_is_a_violation_whatever_the_noise():
    assert certify(REFERENCE, [5, 6], STOP, never, float("inf")).verdict == "violation"
    assert certify([5, 6], [5, 6, 7], STOP, never, float("inf")).verdict == "violation"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("temperature", [0.02, 0.7])
@pytest.mark.parametrize("cut", EDGES, ids=str)
def test_a_token_at_the_edge_is_as_far_off_as_logits_must_move_to_let_it_in(cut, temperature, seed):
    """No random move of logits by less than the margin draws the other token; some by little more do."""
    g = torch.Generator().manual_seed(seed)
    logits, decoding, uniform = 2 * torch.randn(6, generator=g), SamplingParams(4, temperature, **cut), 0.6
    first = decoding.select(logits[None], torch.tensor([uniform]))[0].item()
    assert drawn_margin(logits, first, decoding, uniform) == 0.0
    moved = logits + torch.linspace(0, 3, 4000)[:, None] * (torch.rand(4000, 6, generator=g) - 0.5)
    size = (moved - logits).amax(1) - (moved - logits).amin(1)  # by how much distances between logits change
    drawn = decoding.select(moved, torch.full((4000,), uniform))[0]
    for other in {*drawn.tolist()} - {first}:
        margin, least = drawn_margin(logits, other, decoding, uniform), size[drawn == other].min()
        assert 0.0 < margin <= least + 1e-3 and least < 3 * margin + 0.2


@pytest.mark.parametrize("seed", range(20))
def test_without_an_edge_the_search_finds_the_same(seed):
    g = torch.Generator().manual_seed(seed)
    logits, uniform = 2 * torch.randn(6, generator=g), torch.rand((), generator=g).item()
    whole, all_six = SamplingParams(4, 0.7), SamplingParams(4, 0.7, top_k=6)
    for token in range(6):
        assert truncated_margin(logits, token, all_six, uniform) == pytest.approx(
            drawn_margin(logits, token, whole, uniform), abs=1e-4
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_token_is_as_far_off_as_logits_must_move(seed):
    g = torch.Generator().manual_seed(seed)
    logits, temperature = 2 * torch.randn(6, generator=g).double(), 0.7
    uniform = torch.rand((), generator=g).item()
    decoding = SamplingParams(4, temperature)

    def drawn(moved: torch.Tensor) -> int:
        return sample_inverse_cdf(torch.softmax(moved / temperature, dim=-1), torch.tensor(uniform)).item()

    own = drawn(logits)
    assert drawn_margin(logits.float(), own, decoding, uniform) == 0.0
    for other in set(range(6)) - {own}:
        margin = drawn_margin(logits.float(), other, decoding, uniform)
        # What the number lies beyond is moved against the rest, by a little less and a little more than the margin.
        apart = torch.where(torch.arange(6) < other + (other < own), -0.5, 0.5) * (1 if own < other else -1)
        before, behind = (drawn(logits + apart * margin * factor) for factor in (0.999, 1.001))
        assert (before < other) == (own < other) and before != other and behind == other


def test_a_token_of_no_probability_is_never_a_tie():
    logits = torch.tensor([0.0, float("-inf"), 0.0])
    assert drawn_margin(logits, 1, SamplingParams(4, 1.0), 0.2) == float("inf")


@pytest.mark.parametrize(("nodes", "unit"), [(0, "question"), (9, "question"), (0, "pool")])
def test_the_noise_is_that_of_the_shapes_in_use(monkeypatch, nodes, unit):
    """Trees, the method's widest verification, and batches are compared, too."""
    asked = []
    monkeypatch.setattr(certify_module, "shape_noise", lambda *given: asked.append(given[2:5]) or 0.1)
    monkeypatch.setattr(certify_module, "batch_noise", lambda *given: asked.append(given[2:]) or 0.3)
    spec = SimpleNamespace(unit=unit, batch_size=4)
    setup = SimpleNamespace(
        target=None, drafter=SimpleNamespace(max_nodes=nodes), verify_tokens=10, spec=spec
    )
    certifier = Certifier(setup, None)
    certifier.__dict__ |= {"_samples": [], "_changes_of_shapes": torch.zeros(1)}
    assert certifier._noise_of_shapes == (0.3 if unit == "pool" else 0.1)
    assert asked == ([(False, 10, 4), (4, 10)] if unit == "pool" else [(nodes > 0, 10, 1)])


def test_the_noise_of_an_engine_is_that_of_its_likeliest_tokens(monkeypatch):
    """What it has drawn is no rounding."""
    asked = []
    served = SimpleNamespace(tops=lambda request: asked.append(request.decoding) or ([1], []))
    drawn = SamplingParams(8, 1.0)
    protocol = SimpleNamespace(warm_up_requests=lambda count: [Request([1, 2], drawn)])
    monkeypatch.setattr(certify_module, "engine_noise", lambda target, answers: 0.1)
    certifier = Certifier(SimpleNamespace(served=served, target=None), protocol)
    assert certifier._noise_of_served == 0.1 and asked == [replace(drawn, temperature=0.0)]
