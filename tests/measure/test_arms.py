"""Arms that answer: the faster one of several, and what warms them up."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import GenerationConfig

from specbench.config.spec import BASELINE, HF, METHOD, SINGLE, RunSpec
from specbench.data.question_files import Question
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Rounds, exhaust
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation
from specbench.measure import arms, runner, warm_up
from specbench.measure.arms import FastestOf, Setup, generate_arm, hf_generate_arm, usual_experts
from specbench.measure.protocol import Protocol
from specbench.measure.runner import make_ready
from specbench.system import threads
from tests.support.decoding import generate_with_transformers, random_pair
from tests.support.graphs import PretendedRunner

PROMPT = [3, 9, 27, 11]


def arm_of(seconds: float, asked: list[float]):
    def answer(requests: list[Request]) -> Rounds:
        asked.append(seconds)
        yield len(requests)
        return [Generation([1], 0.0, seconds, "length") for _ in requests]

    return answer


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_arm_answers(seconds):
    asked: list[float] = []
    arm = FastestOf({"first": arm_of(seconds[0], asked), "second": arm_of(seconds[1], asked)})
    for _ in range(2):
        assert [g.seconds for g in exhaust(arm([Request(PROMPT, SamplingParams(1))] * 2))] == [1.0, 1.0]
    assert arm.chosen == ("first", "second")[seconds.index(1.0)]
    assert len(asked) == 2 * 2 + 2, "each is tried once, and timed once"


def test_an_arm_that_fails_at_first_is_left_out_with_a_warning_unless_all_do(capsys):
    def fails(requests: list[Request]) -> Rounds:
        yield len(requests)
        raise RuntimeError("no such kernel")

    requests = [Request(PROMPT, SamplingParams(1))]
    for arms_by_name in (
        {"dynamic": arm_of(1.0, []), "static": fails},
        {"static": fails, "dynamic": arm_of(1.0, [])},
    ):
        arm = FastestOf(arms_by_name)
        assert exhaust(arm(requests)) and arm.chosen == "dynamic"
        assert "generate (static cache) fails and is left out: " in (said := capsys.readouterr().err)
        assert "no such kernel" in said and said.count("\n") == 1
    with pytest.raises(RuntimeError, match="no such kernel"):
        exhaust(FastestOf({"dynamic": fails, "static": fails})(requests))


def test_on_cuda_generate_has_two_ways(monkeypatch):
    made = []
    monkeypatch.setattr(
        arms, "hf_generate_arm", lambda *given, **options: made.append(options) or arm_of(1.0, [])
    )
    for device in ("cpu", "cuda:0"):
        made.clear()
        arm = generate_arm(SimpleNamespace(device=torch.device(device)), 2, 10)
        assert (
            isinstance(arm, FastestOf) == (device == "cuda:0") == ({"cache_implementation": "static"} in made)
        )


def test_a_static_cache_gives_the_same_answer():
    pair = random_pair("llama")
    arm = hf_generate_arm(pair, cache_implementation="static")
    (answer,) = exhaust(arm([Request(PROMPT, SamplingParams(12))]))
    assert answer.tokens == generate_with_transformers(pair.target, PROMPT, 12)


def test_generate_does_as_it_is_asked_whatever_the_checkpoint_prefers(monkeypatch):
    """A repetition penalty of its own would make it decode something else."""
    pair = random_pair("llama")
    expected = generate_with_transformers(pair.target, PROMPT, 12)
    preferred = GenerationConfig(repetition_penalty=5.0, bad_words_ids=[[expected[0]]])
    monkeypatch.setattr(pair.target, "generation_config", preferred)  # other tests have the same pair
    (answer,) = exhaust(hf_generate_arm(pair)([Request(PROMPT, SamplingParams(12))]))
    assert answer.tokens == expected
    assert pair.target.generation_config is preferred


@pytest.mark.parametrize(
    ("passes", "own", "tokens"),
    [(None, None, warm_up.TOKENS), (PretendedRunner(), None, 300), (None, PretendedRunner(), 300)],
)
def test_graphs_are_warmed_up_with_whole_answers(passes, own, tokens):
    """A capture takes many passes' time, which is nothing that an answer costs."""
    asked: list[list[Request]] = []

    def arm(requests: list[Request]) -> Rounds:
        asked.append(requests)
        yield len(requests)

    pair = SimpleNamespace(context_length=512, prompt_ids=lambda messages: PROMPT)
    drafter = Drafter()
    drafter.model = SimpleNamespace(runner=own)  # a draft model: may be captured where the target is not
    setup = Setup(pair, SimpleNamespace(runner=passes), drafter, {BASELINE: arm}, RunSpec({}))
    questions = [Question(1, "qa", ("a question",), None, "qa")]
    warm_up.warm_up(setup, Protocol(pair, SamplingParams(300), "paired", 0, questions))
    assert [[request.decoding.max_new_tokens for request in requests] for requests in asked] == [[tokens] * 2]


def test_graphs_are_warmed_up_with_prompts_as_long_as_the_questions(monkeypatch):
    """A cache that grows within an answer would lose all graphs."""
    asked: list[Request] = []

    def arm(requests: list[Request]) -> Rounds:
        asked.extend(requests)
        yield len(requests)

    pair = SimpleNamespace(context_length=4096, prompt_ids=lambda messages: [1] * 700 * len(messages))
    setup = Setup(pair, SimpleNamespace(runner=PretendedRunner()), Drafter(), {BASELINE: arm}, RunSpec({}))
    protocol = Protocol(
        pair, SamplingParams(300), "paired", 0, [Question(1, "qa", ("a question",), None, "qa")]
    )
    warm_up.warm_up(setup, protocol, [Question(1, "qa", ("one", "two"), None, "qa")])
    lengths = [(len(request.prompt), request.decoding.max_new_tokens) for request in asked]
    assert lengths[0] == (3 * 700 + 300, 300)  # three messages, and an answer of any length
    assert lengths[1:] == [(2040, 16), (1528, 16), (1016, 16), (700, 300), (700, 300)]


@pytest.mark.parametrize(("requested", "extra", "counts"), [(None, 0, {1, 2}), (1, 0, set()), (1, 1, {1, 2})])
def test_the_baseline_is_timed_by_itself_with_each_number_of_threads(monkeypatch, requested, extra, counts):
    """A number that suits both arms may not suit it; and a drafter may have cores that it lacks."""
    seconds = {1: 0.02, 2: 0.005}

    def baseline(requests: list[Request]) -> Rounds:
        time.sleep(seconds[torch.get_num_threads()])
        yield len(requests)

    def method(requests: list[Request]) -> Rounds:
        time.sleep(0.1 * torch.get_num_threads())
        yield len(requests)

    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "present_cores", lambda: 2)
    pair = SimpleNamespace(context_length=512, prompt_ids=lambda messages: PROMPT, device=torch.device("cpu"))
    drafter = Drafter()
    drafter.extra_cores = extra
    setup = Setup(pair, None, drafter, {BASELINE: baseline, METHOD: method}, RunSpec({}))
    protocol = Protocol(
        pair, SamplingParams(30), "paired", 0, [Question(1, "qa", ("a question",), None, "qa")]
    )
    try:
        chosen, timed = warm_up.choose_threads(setup, protocol, requested, {})
        assert chosen.threads == torch.get_num_threads() == 1
        known = {1: 1.0, 2: 0.5}
        monkeypatch.setattr(Setup, "answers", None)  # a later process of the run measures nothing anew
        assert warm_up.choose_threads(setup, protocol, 1, known)[1] == known
    finally:
        torch.set_num_threads(before)
    assert timed.keys() == counts
    assert not timed or timed[2] < 0.9 * timed[1]


def test_batches_are_warmed_up_with_all_that_a_scheduler_holds_and_become_smaller_one_by_one():
    asked: list[tuple[str, list[int]]] = []

    def arm(name: str, requests: list[Request]) -> Rounds:
        asked.append((name, [request.decoding.max_new_tokens for request in requests]))
        assert len({len(request.prompt) for request in requests}) == 2, (
            "layers are compiled for unequal lengths"
        )
        yield len(requests)

    pair = SimpleNamespace(context_length=512, prompt_ids=lambda messages: PROMPT)
    arms = {name: partial(arm, name) for name in (BASELINE, METHOD, SINGLE)}
    protocol = Protocol(
        pair, SamplingParams(40), "paired", 0, [Question(1, "qa", ("a question",), None, "qa")]
    )
    drafter = Drafter()
    drafter.max_draft_tokens = 4
    for passes, cap in ((None, warm_up.TOKENS), (PretendedRunner(), 40)):
        target, spec = SimpleNamespace(runner=passes), RunSpec({}, None, 4)
        warm_up.warm_up(Setup(pair, target, drafter, arms, spec, slots=6), protocol)
        shrinking = [(BASELINE, [1, 2, 3, 4]), (METHOD, [5, 10, 15, 20] if passes else [4, 8, 12, 16])]
        whole = [(BASELINE, [cap] * 4), (METHOD, [cap] * 4), (SINGLE, [cap] * 2)]
        assert asked == [*whole, *shrinking, (METHOD, [cap] * 6)]
        asked.clear()


def test_every_turn_follows_all_that_was_said_before():
    pair = SimpleNamespace(prompt_ids=lambda messages: [one["content"] for one in messages])
    protocol = Protocol(pair, SamplingParams(4), "paired", 0)
    question = Question(1, "mt_bench", ("one?", "two?", "three?"), None, "writing")
    answers = ["one", "two"]
    prompts = [protocol.prompt(question, answers[:turn]) for turn in range(3)]
    assert prompts == [["one?"], ["one?", "one", "two?"], ["one?", "one", "two?", "two", "three?"]]
    history = ({"role": "system", "content": "be brief"},)
    assert protocol.prompt(replace(question, history=history), ["one"]) == ["be brief", *prompts[1]]


def test_a_resumed_run_drafts_by_the_costs_that_it_began_with(monkeypatch):
    given_costs = []
    monkeypatch.setattr(runner, "set_round_costs", lambda setup, protocol, costs: given_costs.append(costs))
    for given, earlier in (
        (None, {}),
        (None, {"round_costs": [1.0, 1.2]}),
        ([1.0, 1.1], {"round_costs": [2.0]}),
    ):
        cfg = OmegaConf.create({"decoding": {"draft_length": "goodput", "round_costs": given}})
        made_ready(monkeypatch, arm_of(1.0, []), "cpu", earlier, cfg)
    assert given_costs == [None, [1.0, 1.2], [1.0, 1.1]]


def made_ready(
    monkeypatch, generate, device: str, earlier: dict, cfg: DictConfig | None = None
) -> tuple[dict, MagicMock]:
    """What is known of a run that is about to begin, and its conductor."""
    pair = SimpleNamespace(device=torch.device(device))
    setup = Setup(pair, None, Drafter(), {HF: generate}, RunSpec({}))
    bench = SimpleNamespace(setup=setup, protocol=None, conductor=MagicMock())
    requests = [Request(PROMPT, SamplingParams(1))]
    monkeypatch.setattr(runner, "warm_up", lambda setup, *_: setup.answers(HF, requests))
    usual = OmegaConf.create({"decoding": {"draft_length": "constant"}})
    return make_ready(bench, cfg or usual, earlier), bench.conductor


@pytest.mark.parametrize(("earlier", "kept"), [({}, "dynamic"), ({"generate_cache": "static"}, "static")])
def test_processes_of_a_run_use_the_cache_that_generate_was_fastest_with(monkeypatch, earlier, kept):
    arm = FastestOf({"dynamic": arm_of(1.0, []), "static": arm_of(2.0, [])})
    ready, _ = made_ready(monkeypatch, arm, "cuda", earlier)
    assert ready["generate_cache"] == kept


@pytest.mark.parametrize(("device", "threads"), [("cpu", 5), ("cuda", 1)])
def test_one_thread_of_the_host_is_watched_where_a_gpu_computes(monkeypatch, device, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    _, conductor = made_ready(monkeypatch, arm_of(1.0, []), device, {})
    assert conductor.watch.threads == threads


def test_other_arms_compute_experts_as_usual_while_generate_is_paused():
    """On a GPU generate decodes with kernels for experts of its own, which no prompt of another arm should meet."""

    class Mixture:
        def __init__(self):
            self.way = {"": "grouped_mm"}

        def get_experts_implementation(self):
            return self.way

        def set_experts_implementation(self, way):
            self.way = way

    model = Mixture()
    usual, model.way = model.way, {"": "batched_mm"}
    with usual_experts(model, usual):
        assert model.way == usual
    assert model.way == {"": "batched_mm"}
    model.way = usual
    model.set_experts_implementation = None  # not called
    with usual_experts(model, usual):
        assert model.way == usual


def protocol_of(seed: int = 0) -> Protocol:
    pair = SimpleNamespace(prompt_ids=lambda messages: PROMPT, context_length=64)
    return Protocol(pair, SamplingParams(4, 1.0), "paired", seed)


def test_the_longest_prompt_is_that_of_the_last_turn_after_answers_of_a_word():
    """A template may refuse an assistant that says nothing."""

    def prompt_ids(messages: list[dict]) -> list[int]:
        assert all(one["content"] for one in messages)
        if messages[0]["content"] == "cut":
            raise UnicodeEncodeError("utf-8", "", 0, 1, "surrogates not allowed")
        return [1] * len(messages)

    pair = SimpleNamespace(prompt_ids=prompt_ids, context_length=64)
    protocol = Protocol(pair, SamplingParams(4, 1.0), "paired", 0)
    questions = [
        Question(i, "qa", turns, None, "qa") for i, turns in enumerate([("Why?",), ("Why?", "How?")])
    ]
    assert protocol.longest_prompt(questions) == 3 + 4 and protocol.longest_prompt([]) == 0
    impossible = Question(9, "qa", ("cut", "on"), None, "qa")
    assert protocol.longest_prompt([impossible, *questions]) == 3 + 4, "it fails when it is asked, alone"


def test_every_arm_goes_first_over_questions_turns_and_repeats():
    protocol, names = protocol_of(), ["baseline", "method", "hf_generate"]
    for varied in ("pool", "turn", "repeat"):
        orders = [
            tuple(protocol.order(names, **{"pool": 0, "turn": 0, "repeat": 0} | {varied: i}))
            for i in range(6)
        ]
        assert sorted(order[0] for order in orders) == sorted(names * 2), varied
        assert len({*orders}) == 6
    with_single = [protocol.order([*names, "single"], 0, 0, repeat) for repeat in range(4)]
    assert [order.index("single") for order in with_single] == [0, 3, 0, 3]


def test_each_answer_is_drawn_with_numbers_of_its_own():
    def seed(run: int = 0, question: int = 7, turn: int = 0, repeat: int = 0) -> int:
        one = Question(question, "qa", ("Why?", "How?"), None, "qa")
        answers = {arm: ["So."] * turn for arm in ("baseline", "method")}
        return protocol_of(run).request(one, answers, "method", repeat).seed

    seeds = [seed(), seed(run=1), seed(question=8), seed(turn=1), seed(repeat=1)]
    assert len({*seeds}) == 5 and seed() == seeds[0]


@pytest.mark.parametrize(("cut", "asked"), [({}, (0, 1.0)), ({"top_k": 9, "top_p": 0.8}, (9, 0.8))], ids=str)
def test_generate_draws_from_the_tokens_and_with_the_seed_of_the_request(monkeypatch, cut, asked):
    """By itself it would draw from the fifty likeliest."""
    pair, seen = random_pair("llama"), []
    real = pair.target.generate
    monkeypatch.setattr(
        pair.target, "generate", lambda *a, **k: seen.append(k["generation_config"]) or real(*a, **k)
    )
    arm = hf_generate_arm(pair)
    texts = [
        exhaust(arm([Request(PROMPT, SamplingParams(8, 0.7, **cut), seed=seed)]))[0].tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert {(one.do_sample, one.temperature, one.top_k, one.top_p) for one in seen} == {(True, 0.7, *asked)}
