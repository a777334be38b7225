"""Whole runs of another engine, played by stubs: verdicts, numbers, table, failures, and what is refused beforehand."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from specbench.commands.engine import content_of
from specbench.config import checks
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines.client import EngineError, events, is_ready
from specbench.engines.environments import environment, interpreter
from specbench.engines.openai import OpenAI
from specbench.measure.numeric_noise import ENGINE_NOISE, engine_noise, forced_logits
from specbench.models.pairs import load_pair
from specbench.report.runs import read_run
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support.commands import measure_here, run_main, small_pair_and_questions
from tests.support.conf import composed
from tests.support.decoding import random_pair
from tests.support.engine_stub import Stub, serving
from tests.support.messages import says

NO_TIES = dict.fromkeys(("first_divergence_median", "tie_margin", "tie_noise"))
EXACT = {"answers": 3, "exact": 3, "tie": 0, "violation": 0} | NO_TIES


@pytest.fixture
def answer(tmp_path):
    """The answers of a small target, and the arguments of a run of it."""
    small = small_pair_and_questions(tmp_path)
    cfg = composed("bench", *(word for word in small if word.startswith("pair.")))
    pair = load_pair(cfg.pair, 0, with_draft=False)
    engine, lock = Engine(pair.staged, Drafter(), pair.stop_ids), threading.Lock()

    def function(prompt: list[int], n: int) -> list[int]:
        with lock:
            [generation] = engine.generate([Request(prompt, SamplingParams(n))])
        return generation.tokens

    function.arguments = small
    return function


@pytest.fixture
def run(tmp_path, monkeypatch, capfd, answer):
    """Measures two stubs of this target; returns exit code, output, errors and the run folder."""

    def measure(plain: Stub, speculative: Stub, *more: str, dialect: str = "llama_cpp"):
        monkeypatch.chdir(tmp_path)
        measure_here(monkeypatch)
        with serving(plain, speculative) as urls:
            code, out, err = run_main(
                monkeypatch,
                capfd,
                *answer.arguments,
                *(() if any(word.startswith("method=") for word in more) else ("method=sps",)),
                "engine=openai",
                f"engine.plain_url={urls[0]}",
                f"engine.speculative_url={urls[1]}",
                f"engine.dialect={dialect}",
                "engine.version=stub-1",
                *(["engine.model=owl"] if dialect == "openai" else []),
                "threads=1",
                *more,
            )
        assert Path("runs").exists(), err
        folders = sorted(path for path in Path("runs").iterdir() if path.is_dir())
        return code, out, err, folders[-1]

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["llama_cpp", "openai"])
def test_a_run_has_three_verdicts_and_the_engines_numbers(run, answer, dialect):
    plain = Stub(answer)
    code, out, _, folder = run(plain, Stub(answer, drafts=True), dialect=dialect)
    assert code == 0
    assert {body.get("model") for body in plain.bodies} == {"owl" if dialect == "openai" else None}
    summary = read_run(folder).summary
    assert summary["equivalence"] == summary["baseline"]["equivalence"] == EXACT
    engine = summary["engine"]
    assert engine["name"] == "openai" and engine["version"] == "stub-1" and engine["faults"] == []
    assert engine["again_equivalence"] == EXACT
    assert engine["own_tokens_per_second"] > 0 and engine["again"]["speedup"] > 0
    assert summary["baseline"]["quoted_against"] == "engine"
    assert summary["overall"]["speedup"] > 0 and summary["overall"]["draft_seconds"] is None
    assert 1 < summary["overall"]["acceptance_length"] < 4
    assert 0 < summary["overall"]["acceptance_rate"] < 1
    assert summary["settings"] == {} and summary["settings_source"] is None
    assert says(
        " ".join(out.split()),
        "sps by openai ... baseline: plain openai ... against itself ... our loop ... stub-1",
    )
    [record, *_] = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert sorted(record["turns"][0]["arms"]) == ["again", "baseline", "method", "own_loop"]
    assert "_sps_openai_" in folder.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "fault", "of_method", "of_plain", "of_again"),
    [
        ("speculative", "breaks", 3, 0, 0),
        ("speculative", "repeats", 3, 0, 0),
        ("plain", "breaks", 3, 3, 0),
    ],
)
def test_wrong_tokens_are_violations_where_they_are_said(
    run, answer, arm, fault, of_method, of_plain, of_again
):
    stubs = {"plain": Stub(answer), "speculative": Stub(answer, drafts=True)}
    stubs[arm].fault = fault
    code, out, err, folder = run(*stubs.values())
    assert code == 1 and says(err, "answers are violations")
    summary = read_run(folder).summary
    assert summary["equivalence"]["violation"] == of_method
    assert summary["baseline"]["equivalence"]["violation"] == of_plain
    assert summary["engine"]["again_equivalence"]["violation"] == of_again
    assert "VIOLATION" in out


@pytest.mark.slow
def test_a_server_at_a_url_that_fails_ends_the_run_and_the_same_command_goes_on(run, answer):
    asked = Stub(answer)
    run(asked, Stub(answer, drafts=True), "seed=7")
    handshake_and_warm_up = asked.asked - 6  # twice for each question
    fails = Stub(answer, fault="leaves", after=handshake_and_warm_up + 2)
    code, _, err, folder = run(fails, Stub(answer, drafts=True))
    assert code != 0 and says(err, "the plain server failed ... ended before the answer did")
    done = (folder / "records.jsonl").read_text().count("\n")
    assert 0 < done < 3
    [fault] = read_json(folder / "facts.json")["engine"]["faults"]  # whoever goes on is told
    assert fault.startswith("plain: ") and "ended before the answer did" in fault


@pytest.mark.slow
def test_what_one_process_met_is_told_by_those_after_it(run, answer):
    """Its servers said two things in the first handshake, and nothing wrong in the second one."""
    _, out, _, folder = run(
        Stub(answer, fault="breaks", after=3, times=1), Stub(answer, drafts=True), "repeats=2", "processes=2"
    )
    summary = read_run(folder).summary
    assert summary["processes"] == 2 and "FAULTS of openai: 1" in out
    assert summary["engine"]["started"] is False and "its servers were started elsewhere" in out
    assert summary["engine"]["faults"] == ["plain: two answers to one prompt differ"]


@pytest.mark.slow
def test_a_batch_is_asked_for_at_once_and_compared_with_one_at_a_time(run, answer):
    plain = Stub(answer)
    words = ["method=ragged", "drafter=sps", "batch_size=2", "pool=3"]
    code, out, err, folder = run(plain, Stub(answer, drafts=True), *words)
    assert code == 0, err
    summary = read_run(folder).summary
    assert summary["unit"] == "pool" and summary["equivalence"] == EXACT
    assert summary["engine"]["again_equivalence"] == summary["baseline"]["equivalence"] == EXACT
    assert summary["baseline"]["single_tokens_per_second"] > 0 and summary["overall"]["speedup"] > 0
    assert summary["overall"]["occupancy"] is None and summary["overall"]["mbsu"] is None
    assert 1 < summary["overall"]["acceptance_length"] < 4
    assert plain.most_at_once == 2
    assert "sps by openai" in out and "beside its own alone: 3/0/0" in " ".join(out.split())
    assert summary["peak_memory_bytes"] is None  # ours says nothing of a server's


@pytest.mark.slow
def test_an_engine_that_says_something_else_later_is_no_fault_of_its_method(run, answer):
    steady = Stub(answer)
    run(steady, Stub(answer, drafts=True), "repeats=2", "seed=7")
    of_second_pass = 2 * EXACT["answers"]  # plain, and plain again
    shaky = Stub(answer, fault="breaks", after=steady.asked - of_second_pass)
    _, _, _, folder = run(shaky, Stub(answer, drafts=True), "repeats=2")
    summary = read_run(folder).summary
    assert summary["equivalence"]["violation"] == summary["baseline"]["equivalence"]["violation"] == 0
    assert summary["engine"]["again_equivalence"]["violation"] > 0


@pytest.mark.slow
def test_threads_are_not_chosen_by_an_engine_that_has_its_own(run, answer):
    _, _, _, folder = run(Stub(answer), Stub(answer, drafts=True), "threads=null")
    provenance = json.loads((folder / "provenance.json").read_text())
    choice = provenance["thread_choice"]
    assert choice["chosen_by"] in ("torch", "OMP_NUM_THREADS") and not choice["seconds"]
    assert choice["threads"] == provenance["threads"]["torch"] == torch.get_num_threads()


@pytest.mark.slow
def test_drawn_answers_that_are_not_the_targets_are_violations(run, answer):
    """Greedy tokens are likelier than drawn ones, other tokens less likely."""
    _, out, _, folder = run(Stub(answer), Stub(answer, drafts=True, fault="breaks"), "decoding=sample")
    summary = read_run(folder).summary
    assert summary["equivalence"]["answers"] == 0
    likely = summary["likelihood"]
    assert likely["baseline"]["logprob"] > likely["method"]["logprob"]
    assert "mean log p of drawn tokens: plain" in " ".join(out.split())
    assert "VIOLATION: plain answers of openai are not drawn from the target's distributions" in out


# -- before anything is started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=kangaroo", "engine=llama_cpp"], "llama_cpp does not draft as kangaroo ... known: pld, sps"),
        (["method=sps", "engine=llama_cpp", "+engine.cores=2"], "no parameter 'cores'"),
        (["method=sps", "engine=llama_cpp", "decoding.verify_width=8"], "verify_width"),
        (["method=vocabtrim", "engine=openai"], "vocab=trim"),
        (
            ["method=sps", "engine=llama_cpp", "decoding.verification=typical"],
            "does not support decoding.verification",
        ),
        (["method=sps", "engine=llama_cpp", "+engine.threads=2"], "no parameter 'threads'"),
    ],
)
def test_what_an_engine_cannot_decode_is_refused(words, message):
    with pytest.raises(UserError) as raised:
        checks.check(composed("bench", "pair=tiny", *words))
    assert says(str(raised.value), message)


def test_a_method_that_the_engine_is_told_to_draft_as_is_taken():
    words = ["method=suffix", "engine=llama_cpp", "+engine.speculative.suffix={types: [ngram_mod]}"]
    spec = checks.check(composed("bench", "pair=tiny", *words))
    assert spec.settings == {"types": ["ngram_mod"]} and not spec.learns and spec.owners == []


@pytest.mark.parametrize(
    ("words", "drafts_elsewhere"),
    [
        (["method=eagle3", "engine=openai", "pair.parts.eagle3=null"], True),
        (["method=sps", "engine=openai", "pair.draft=null"], True),
        (["method=sps", "engine=llama_cpp", "pair.draft=null", "engine.draft=/m/draft.gguf"], True),
        (["method=sps", "engine=vllm", "pair.draft=null", "+engine.speculative.sps.model=/m/draft"], True),
        (["method=sps", "engine=llama_cpp"], False),
        (["method=eagle3", "engine=vllm"], False),
    ],
)
def test_an_engine_with_weights_of_its_own_needs_none_of_the_pair(words, drafts_elsewhere):
    spec = checks.check(composed("bench", "pair=tiny", *words))
    assert spec.drafts_elsewhere == drafts_elsewhere
    assert drafts_elsewhere != (spec.needs.draft_model or spec.needs.part is not None)


def test_an_engine_that_cannot_be_imported_is_one_line():
    words = ["method=sps", "engine=llama_cpp", "engine._target_=no.such.Engine"]
    with pytest.raises(UserError, match="engine._target_=no.such.Engine cannot be imported"):
        checks.check(composed("bench", "pair=tiny", *words))


def test_settings_of_a_method_are_those_of_the_engine_in_its_words():
    words = ["method=sps", "engine=llama_cpp", "method.max_draft_tokens=3", "settings=published"]
    spec = checks.check(composed("bench", "pair=tiny", *words))
    assert spec.settings["draft.n_max"] == 3 and spec.settings["types"] == ["draft_simple"]
    assert spec.engine["name"] == "llama_cpp"


def test_settings_of_own_code_inside_another_engine_are_the_methods_too():
    words = ["method=suffix", "engine=vllm", "method.factor=2", "settings=published"]
    spec = checks.check(composed("bench", "pair=tiny", *words))
    assert spec.settings["max_draft_tokens"] == 32 and spec.settings["factor"] == 2
    other = checks.check(composed("bench", "pair=tiny", "method=pld", "engine=vllm"))
    assert "match" not in other.settings and not other.is_own_code


@pytest.mark.parametrize("url", ["http://localhost:80x", "localhost:8000", "http://", "ftp://x", ""])
def test_a_url_that_is_none_is_one_line(url):
    with pytest.raises(UserError, match="set engine.plain_url to the plain server"):
        OpenAI.check(
            {"dialect": "openai", "plain_url": url, "speculative_url": "http://127.0.0.1:8000"},
            {"name": "sps"},
            1,
        )


def test_a_path_of_a_url_comes_in_front(monkeypatch):
    """As that of a gateway, which has several servers."""
    asked = []

    def request(_self, _verb, path, *_):
        asked.append(path)
        raise OSError

    monkeypatch.setattr(HTTPConnection, "request", request)
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:1/deployed/", "http://127.0.0.1:1/v1"):
        assert not is_ready(url, "/health")
        with pytest.raises(EngineError):
            list(events(url, "/v1/completions", {}, 1.0))
    paths = ["", "/deployed", ""]
    assert asked == [path + end for path in paths for end in ("/health", "/v1/completions")]


def test_an_engine_that_is_not_installed_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    for name in ("llama_cpp", "openvino", "vllm"):
        with pytest.raises(UserError, match=f"specbench engine install {name}"):
            interpreter(name, content_of(name))
    assert environment({"requirements": ["a==1"]}) != environment({"requirements": ["a==2"]})
    other = content_of("vllm", ["engine.install.requirements=['vllm==0.1']"])
    assert other["requirements"] == ["vllm==0.1"] and environment(other) != environment(content_of("vllm"))
    with pytest.raises(UserError, match="unknown engine 'vlm'.*vllm"):
        content_of("vlm")
    with pytest.raises(UserError, match="engine openai has no environment of its own"):
        content_of("openai")


# -- rounding between engines


class TestNoise:
    PROMPT, TOKENS = [3, 9, 27, 11, 33], [5, 6, 7, 8]

    @pytest.fixture(scope="class")
    def pair(self):
        return random_pair("llama")

    def tops(self, pair, move: float = 0.0) -> list[dict[int, float]]:
        logits = forced_logits(pair.staged, self.PROMPT, self.TOKENS, 1).log_softmax(-1)
        tops = []
        for row in logits:
            values, ids = row.topk(2)
            tops.append({int(ids[0]): float(values[0]) + move, int(ids[1]): float(values[1])})
        return tops

    def test_it_is_twice_the_largest_change_of_the_first_twos_distance(self, pair):
        for move in (0.0, 0.01, 0.1):
            noise = engine_noise(pair.staged, [(self.PROMPT, self.TOKENS, self.tops(pair, move))])
            assert noise == pytest.approx(2 * move, abs=1e-4)

    def test_a_place_with_one_choice_alone_tells_what_its_token_falls_short_by(self, pair):
        """A server may give fewer than it is asked for."""
        greedy = int(forced_logits(pair.staged, self.PROMPT, [5], 1).argmax())
        for tops in ([{}], [{greedy: -0.1}]):
            assert engine_noise(pair.staged, [(self.PROMPT, [greedy], tops)]) == 0.0

    def test_what_no_rounding_explains_is_none(self, pair):
        tops = self.tops(pair)
        tops[2] = self.tops(pair, 3.0)[2]
        assert engine_noise(pair.staged, [(self.PROMPT, self.TOKENS, tops)]) < 1e-3
        assert engine_noise(pair.staged, [(self.PROMPT, self.TOKENS, self.tops(pair, 0.4))]) == ENGINE_NOISE

    def test_without_log_probabilities_it_is_what_greedy_tokens_fall_short_by(self, pair):
        best: list[int] = []
        for _ in range(4):
            best.append(int(forced_logits(pair.staged, self.PROMPT, [*best, 0], 1)[-1].argmax()))
        assert engine_noise(pair.staged, [(self.PROMPT, best, [])]) == 0.0
