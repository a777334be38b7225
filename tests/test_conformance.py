"""What every method of conf/method/ must do, each prepared once: answers, samples, batches, waits, and graphs.

A new method is found here by its file; nothing has to be entered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.ragged import RaggedBatch
from specbench.config.checks import check
from specbench.config.spec import BASELINE, METHOD, RunSpec, needs_of
from specbench.data.questions import warmup_questions
from specbench.decoding import engine, sampling
from specbench.decoding.acceptance import Accepted
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams, sample_inverse_cdf
from specbench.decoding.state import Draft, Request
from specbench.decoding.trace import Generation
from specbench.measure import runner
from specbench.measure.bench import Bench
from specbench.measure.runner import prepare
from specbench.models.pairs import Pair, load_pair
from specbench.system.errors import UserError
from specbench.system.paths import packaged
from specbench.system.settings import LASTING, MEMORY
from tests.support.conf import composed, drafts, inline, is_scheduler, lacks_part, names
from tests.support.graphs import pretend, replays_by_round, what_was_drafted
from tests.support.waits import Waits, watched

METHODS = [name for name in names("method") if not is_scheduler(name)]
FAST = ("pld",)
TASKS = ("mt_bench", "summarization")  # a short prompt, a long one
NEW_TOKENS = 20
# Each drafter with one of them, each with a third of the drafters.
SCHEDULERS = (RaggedBatch, EqSpec, ExSpec)
# Where a drafter looks at the device, and how often in a round at most. Each costs the time until all that is queued is
# done; a drafter says why in its module.
CONFIDENCE = {"continues_at": 6}  # a draft ends after a token of low confidence: one look at each
BRANCHES = {"likely": 1}  # in the draft's thread: which branches there are
# How many guesses of the streams came true says how many passes there are, and which entries stay.
STREAMS = {"_grown": 2 * NEW_TOKENS, "settle": 1, "joined": 1}
LOOKS: dict[str, dict[str, int]] = {
    "kangaroo": CONFIDENCE,
    "kangaroo_tree": CONFIDENCE,
    "s2d": {"_next": 2 * 5},  # whether a token goes on to the next of three exits
    "swift": {"_look": 25},  # likewise, and how many tokens stand beside it
    "mirror_sd": BRANCHES,
    "mirror_hybrid": BRANCHES,
    "ssd": BRANCHES,
    "sps_ss": STREAMS,
    "mirror_ss": STREAMS | BRANCHES | {"_pick": 1},
}
# Replays of a round, as methods are configured.
REPLAYS = {
    "ar": 1,
    "pld": 1,
    "sps": 2,
    "vocabtrim": 2,
    "sps_tree": 3,
    "oracle": 2,
    "medusa": 3,
    "hydra_heads": 4,
    "eagle": 4,
    "eagle2": 3,  # on this pair a chain, which is accepted in a few operations
    "eagle3": 3,
}


@pytest.fixture(autouse=True, scope="module")
def _pairs_are_loaded_once() -> Iterator[None]:
    loaded: dict[tuple, Pair] = {}

    def load(
        cfg: DictConfig,
        seed: int,
        with_draft: bool,
        width: int | None,
        trimmed: tuple[str, int | None] | None,
    ) -> Pair:
        key = OmegaConf.to_yaml(cfg), seed, with_draft
        if key not in loaded:
            loaded[key] = load_pair(cfg, seed, with_draft=with_draft)
        return replace(loaded[key], width=width, trimmed=trimmed)  # and drives its models anew

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "load_pair", load)
        yield


def pair_of(method: str) -> str:
    """The pair to run a method on: layers are all alike, so the one with fewer where it has what the method needs.

    Only against the deep target do the streams of mirror_ss have to pick a branch so soon.
    """
    return "tiny" if method == "mirror_ss" or lacks_part(method, "tiny_shallow") else "tiny_shallow"


def prepared(method: str, *settings: str, pair: str | None = None) -> Bench:
    """A method on its pair, or another one, with one warm-up question of each of TASKS."""
    chosen = (f"method={method}", f"pair={pair or pair_of(method)}", *settings)
    cfg = composed("bench", *inline(method), *chosen, "pair.device=cpu", "generate=false")
    OmegaConf.resolve(cfg)
    bench = prepare(cfg)
    questions = {question.task: question for question in reversed(warmup_questions(cfg.data))}
    bench.protocol.warmup = [questions[task] for task in TASKS]
    return bench


@pytest.fixture(
    scope="module", params=[pytest.param(m, marks=[] if m in FAST else pytest.mark.slow) for m in METHODS]
)
def method(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def bench(method) -> Iterator[Bench]:
    made = prepared(method)
    with closing(made.setup.drafter):
        yield made


def test_a_head_is_trimmed_where_the_drafter_says_that_it_can_be(method):
    """Else `vocab=trim` would be a label alone."""
    settings = (
        *inline(method),
        f"method={method}",
        f"pair={pair_of(method)}",
        "vocab=trim",
        "vocab.size=512",
    )
    cfg = composed("bench", *settings, "pair.device=cpu", "generate=false")
    if not RunSpec.of(cfg).needs.trims:
        with pytest.raises(UserError, match="has no head to trim"):
            check(cfg)
        return
    assert check(cfg).settings["vocab_size"] == 512
    made = prepare(cfg).setup.drafter
    with closing(made):
        assert getattr(made, "inner", made).head.rows == 512


def requests_of(bench: Bench, temperature: float = 0.0, count: int = 2) -> list[Request]:
    """Requests of different lengths, two of each prompt where there are four."""
    prompts = [request.prompt for request in bench.protocol.warm_up_requests(NEW_TOKENS)]
    cut = {"top_k": 20, "top_p": 0.9} if temperature else {}
    decoding = SamplingParams(NEW_TOKENS, temperature, **cut)
    return [
        Request(prompts[i % 2], replace(decoding, max_new_tokens=NEW_TOKENS - 2 * i), i) for i in range(count)
    ]


@cache
def plain_on(pair: str) -> Bench:
    """Autoregressive decoding on a pair."""
    return prepared("ar", pair=pair)


@cache
def expected(pair: str, temperature: float, count: int) -> list[list[int]]:
    """What autoregressive decoding says."""
    plain = plain_on(pair)
    return [answer.tokens for answer in plain.setup.answers(BASELINE, requests_of(plain, temperature, count))]


def answered(bench: Bench, requests: list[Request]) -> list[Generation]:
    """The method's answers, by a drafter that remembers none of them."""
    bench.setup.drafter.forget()
    bench.setup.set_reference_answers(requests)
    return bench.setup.answers(METHOD, requests)


def batch_engine(bench: Bench, method: str) -> Engine:
    """Decodes three sequences at a time with the method's drafter."""
    setup = bench.setup
    scheduler = SCHEDULERS[METHODS.index(method) % len(SCHEDULERS)](3)
    return Engine(setup.target, setup.drafter, setup.pair.stop_ids, scheduler, setup.pair.context_length)


def watched_answers(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, requests: list[Request]
) -> tuple[list[Generation], Waits]:
    """As `answered`, and where the host waited for the device meanwhile."""
    monkeypatch.setattr(sampling, "FEW", 2**30)  # only a CPU, which never waits, tries a few tokens first
    bench.setup.drafter.forget()
    bench.setup.set_reference_answers(requests)
    with watched(monkeypatch) as waits:
        return bench.setup.answers(METHOD, requests), waits


def test_answers_are_the_targets_and_drafts_are_worth_something(monkeypatch, bench, method):
    right = expected(pair_of(method), 0.0, 2)
    answers, waits = watched_answers(monkeypatch, bench, requests_of(bench))
    assert [answer.tokens for answer in answers] == right
    accepted = sum(step.accepted for answer in answers for step in answer.steps)
    assert (accepted > 0) == drafts(method), "no draft token was accepted: has it weights for this pair?"
    assert_one_wait(waits, LOOKS.get(method, {}))


@pytest.mark.one_in(2)
@pytest.mark.slow
def test_samples_without_chance_in_drafts_are_the_targets(monkeypatch, bench, method):
    if not needs_of(composed("bench", f"method={method}").method).sampling:
        pytest.skip(f"{method} does not sample")
    right = expected(pair_of(method), 0.8, 2)
    chains = drawn_chains(monkeypatch)
    answers, waits = watched_answers(monkeypatch, bench, requests_of(bench, 0.8))
    for tokens, drawn in chains:
        assert tokens.equal(drawn), (
            "a draft token is not drawn from the distribution that it is verified with"
        )
    if bench.setup.drafter.deterministic:
        assert [answer.tokens for answer in answers] == right
    assert_one_wait(waits, LOOKS.get(method, {}), greedy=False)


def drawn_chains(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fills with the drawn chains to come: their tokens, and those that their places' numbers draw from `probs`."""
    chains: list[tuple[torch.Tensor, torch.Tensor]] = []
    verify = engine.accept

    def spy(
        logits: torch.Tensor,
        draft: Draft,
        decoding: SamplingParams,
        uniforms: torch.Tensor | None,
        limits: Any,
    ) -> Accepted:
        if draft.probs is not None and draft.tree is None:
            assert uniforms is not None
            numbers = uniforms[:, : draft.tokens.shape[1], 1 + uniforms.shape[2] // 2]
            drawn, kept = sample_inverse_cdf(draft.probs, numbers), draft.acceptable()
            drawn = drawn if kept is None else drawn.where(kept, draft.tokens)
            chains.append((draft.tokens.clone(), drawn))
        return verify(logits, draft, decoding, uniforms, limits)

    monkeypatch.setattr(engine, "accept", spy)
    return chains


@pytest.mark.one_in(2)
@pytest.mark.slow
def test_no_answer_changes_what_is_drafted_for_the_next(bench, method):
    """Else a repeat of a question, or its warm-up, would flatter the method: only `memory=run` may, and says so."""
    if composed("bench", f"method={method}").method.get(MEMORY) == LASTING:
        pytest.skip(f"{method} remembers answers, and says so")
    requests = requests_of(bench, count=1)
    first = answered(bench, requests)
    again = bench.setup.answers(METHOD, requests)  # without forgetting
    assert what_was_drafted(again) == what_was_drafted(first)


def test_in_a_batch(monkeypatch, bench, method):
    """Each sequence gets its answer, and the batch waits for the device as often as one sequence does."""
    if not bench.setup.drafter.needs.batching:
        pytest.skip(f"{method} decodes one sequence at a time")
    decoder, requests = batch_engine(bench, method), requests_of(bench, count=4)
    right = expected(pair_of(method), 0.0, 4)
    bench.setup.drafter.forget()
    bench.setup.set_reference_answers(requests)
    with watched(monkeypatch) as waits:
        answers = decoder.generate(requests)
    assert [answer.tokens for answer in answers] == right
    assert_one_wait(waits, LOOKS.get(method, {}))


def assert_one_wait(waits: Waits, looks: dict[str, int], greedy: bool = True) -> None:
    """One read a round, by the engine; one for each sequence that joins; and those that the drafter says.

    greedy: every drafter then comes by all its places; what is drawn may miss every branch.
    """
    assert len(waits.found["round"]) > 1 and waits.found["join"]
    looked = set()
    for found in waits.found["round"]:
        # On a CPU, in float32, NumPy finds the likeliest token: no wait on any other device.
        found = [wait for wait in found if not wait.endswith(" in argmax")]
        own = [wait for wait in found if wait.endswith(" in _on_host")]
        assert len(own) == 1, found
        rest = [re.sub(".* in ", "", wait) for wait in found if wait not in own]
        assert all(rest.count(place) <= looks.get(place, 0) for place in rest), found
        looked |= set(rest)
    assert looked == set(looks) or not greedy, "what is no longer looked at need not be excused"
    assert not any(waits.found["retire"])


@pytest.mark.one_in(3)
@pytest.mark.slow
def test_graphs_change_neither_an_answer_nor_a_draft(monkeypatch, bench, method):
    """A draft that is wrong where it should not be costs time alone, and would not be seen in an answer."""
    requests = requests_of(bench, count=1)
    plain = answered(bench, requests)
    counts = replays_by_round(monkeypatch, pretend(monkeypatch))
    captured = prepared(method)
    captured.setup.set_reference_answers(requests)
    with closing(captured.setup.drafter):
        for _ in range(2):  # what was captured, then what is replayed
            counts.clear()
            captured.setup.drafter.forget()
            answers = captured.setup.answers(METHOD, requests)
            assert method not in REPLAYS or counts[0] == REPLAYS[method]
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
            assert what_was_drafted(answers) == what_was_drafted(plain)


@pytest.mark.one_in(3)
@pytest.mark.slow
def test_graphs_change_neither_an_answer_nor_a_draft_of_a_batch(monkeypatch, bench, method):
    """Sequences have different lengths and accept different numbers of tokens: all that differs must be an input."""
    if not bench.setup.drafter.needs.batching:
        pytest.skip(f"{method} decodes one sequence at a time")
    requests = requests_of(bench, count=4)

    def answered_together(some: Bench) -> list[Generation]:
        some.setup.drafter.forget()
        some.setup.set_reference_answers(requests)
        return batch_engine(some, method).generate(requests)

    plain = answered_together(bench)
    pretend(monkeypatch)
    captured = prepared(method)
    with closing(captured.setup.drafter):
        answers = answered_together(captured)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert what_was_drafted(answers) == what_was_drafted(plain)


@pytest.mark.slow
def test_the_targets_thread_never_waits_for_the_drafts(monkeypatch):
    """The watch is of this thread alone: the draft's side reads in its own."""
    bench = prepared("mirror_sd", "method.placement=thread")
    with closing(bench.setup.drafter), watched(monkeypatch) as waits:
        bench.setup.answers(METHOD, requests_of(bench, count=1))
    assert_one_wait(waits, {})


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_angles_of_positions_are_not_rounded(name):
    """Trained in float32, a part with other angles drafts worse the longer the text is; nothing else would tell."""
    cfg = composed("bench", f"method={name}", f"pair={pair_of(name)}")
    needs = needs_of(cfg.method)
    folder = None if needs.part is None else packaged(cfg.pair.parts[needs.part])
    if not needs.draft_model and (folder is None or not any(folder.glob("*.safetensors"))):
        pytest.skip(f"{name} brings no weights")
    with closing(prepared(name, "pair.dtype=bfloat16").setup.drafter) as drafter:
        modules = [module for module in modules_of(drafter, set()) if [*module.parameters()]]
        assert modules
        for module in modules:
            assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
            assert {b.dtype for _, b in module.named_buffers() if b.is_floating_point()} <= {torch.float32}


def modules_of(thing: object, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Modules that an object of this project holds, directly or not."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.nn.Module):
        yield thing
    elif isinstance(thing, list | tuple | dict):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from modules_of(part, seen)
    elif type(thing).__module__.startswith(("methods.", "specbench.")):
        for part in vars(thing).values() if hasattr(thing, "__dict__") else ():
            yield from modules_of(part, seen)
