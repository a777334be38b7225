"""OpenVINO: what its servers are told, how they answer, and, where it is installed, real runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines import openvino
from specbench.engines.dialects import openai
from specbench.engines.openvino import SCRIPT, OpenVINO
from specbench.engines.served import PLAIN, SPECULATIVE
from specbench.engines.standalone import completions, parameters
from specbench.report.runs import read_run
from specbench.system.errors import UserError
from tests.engines.test_completions import serving as answering
from tests.engines.test_llama_cpp import is_installed
from tests.support.commands import cli

PRESETS = {"sps": {"num_assistant_tokens": 4}, "pld": {"lookup": True, "max_ngram_size": 3}}
SCHEDULER = {"enable_prefix_caching": False}
PROMPT = [3, 9, 27]


@pytest.fixture
def told(monkeypatch):
    """Makes an engine, and gives it with what each server is told."""

    def made(method: str, draft: object = None, **settings) -> tuple[OpenVINO, dict[str, dict]]:
        monkeypatch.setattr(
            openvino, "program", lambda name, install, *_: (Path("python3"), install["requirements"][-1])
        )
        monkeypatch.setattr(
            openvino,
            "as_gguf",
            lambda model, tokenizer, name, *form: Path("/".join(("/models", name, *form))),
        )
        weight = torch.tensor([[settings.pop("weight", 0.5)]], dtype=torch.float32)
        pair = SimpleNamespace(
            name="tiny",
            target=SimpleNamespace(state_dict=lambda: {"w": weight}),
            draft=draft,
            exported_tokenizer=None,
            dtype=settings.pop("dtype", torch.float32),
        )
        plain = {"scheduler": SCHEDULER} | settings.pop("plain", {})
        options = {"plain": plain, "speculative": PRESETS} | settings
        install = {"requirements": ["openvino-genai==1"]}
        engine = OpenVINO(pair, {"name": method}, 1, install=install, **options)
        commands = {arm: server.command(8123) for arm, server in engine.servers.items()}
        assert all(words[:3] == ["python3", str(SCRIPT), "8123"] for words in commands.values())
        return engine, {arm: json.loads(words[3]) for arm, words in commands.items()}

    return made


def test_one_server_decodes_plainly_and_the_other_speculates(told):
    engine, of = told("sps", draft=object())
    assert engine.version == "openvino-genai==1"
    assert of[SPECULATIVE]["draft"] == "/models/tiny-draft/F16/smollm"
    assert of[PLAIN]["draft"] is None and of[PLAIN]["generation"] == {}
    assert of[SPECULATIVE]["generation"] == PRESETS["sps"] and not of[SPECULATIVE]["lookup"]
    for name in ("target", "properties", "scheduler"):  # in nothing else do they differ
        assert of[PLAIN][name] == of[SPECULATIVE][name]
    assert of[PLAIN]["target"] == "/models/tiny-target/F16/smollm" and of[PLAIN]["scheduler"] == SCHEDULER
    assert engine.servers[PLAIN].cores == engine.servers[SPECULATIVE].cores


def test_it_computes_in_the_dtype_of_the_pair(told):
    _, of = told("pld", plain={"KV_CACHE_PRECISION": "u8"}, dtype=torch.bfloat16)
    assert of[PLAIN]["properties"] == {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "u8",
    }
    assert of[SPECULATIVE]["lookup"] and of[SPECULATIVE]["generation"] == {"max_ngram_size": 3}
    assert of[SPECULATIVE]["draft"] is None


def test_weights_that_float16_does_not_hold_are_others(told, tmp_path):
    assert told("pld")[0].same_weights
    assert not told("pld", weight=0.1)[0].same_weights
    (tmp_path / "q4.gguf").write_bytes(b"")
    engine, of = told("pld", target=str(tmp_path / "q4.gguf"))
    assert not engine.same_weights and of[PLAIN]["target"].endswith("q4.gguf")


@pytest.mark.parametrize(
    ("settings", "batch_size", "said"),
    [
        ({}, 2, "one answer at a time"),
        ({"target": "/none.gguf"}, 1, "no file"),
        ({"plain": {"scheduler": {}}}, 1, "keeps prompts"),
        ({"plain": {"scheduler": None}}, 1, "engine.plain.scheduler must be a dictionary, not null"),
        ({"plain": {"scheduler": {"enable_prefix_caching": True}}}, 1, "keeps prompts"),
        (
            {"python": None, "install": {"requirements": ["none"]}},
            1,
            r"engine openvino \(none\) is not installed",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_a_model_is_loaded(settings, batch_size, said):
    every = {"name": "openvino", "plain": {"scheduler": SCHEDULER}, "python": "python3"} | settings
    with pytest.raises(UserError, match=said):
        OpenVINO.check(every, {"name": "pld"}, batch_size)


def test_drafting_with_a_model_wants_one(told):
    with pytest.raises(UserError, match="set pair.draft"):
        told("sps")


# -- the script, in a world where OpenVINO is installed


class Settings(SimpleNamespace):
    """Settings of OpenVINO's, with what the script sets."""

    def __init__(self):
        super().__init__(
            max_new_tokens=0,
            stop_token_ids=set(),
            do_sample=False,
            temperature=1.0,
            rng_seed=0,
            num_assistant_tokens=None,
            enable_prefix_caching=None,
        )


class Pipeline:
    """Recites an answer, `width` tokens a pass; the stop token is told at the end alone."""

    width = 2
    made: ClassVar[list[tuple]] = []

    def __init__(self, *arguments, **options):
        self.made.append((arguments, options))
        if options.get("enable_save_ov_model"):
            Path(arguments[0]).with_name("openvino_model.xml").touch()

    def generate(self, prompt, config, streamer):
        self.asked = config
        answer = [*range(10, 10 + config.max_new_tokens - 1), 2]
        sent = [answer[0], *(answer[i : i + self.width] for i in range(1, len(answer) - 1, self.width))]
        for tokens in sent:
            if streamer.write(tokens) != "running":
                return SimpleNamespace(tokens=[])
        return SimpleNamespace(tokens=[answer])


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    engine = ModuleType("openvino_genai")
    engine.__version__ = "9"
    engine.LLMPipeline, engine.StreamerBase = Pipeline, object
    engine.SchedulerConfig = engine.GenerationConfig = Settings
    engine.StreamingStatus = SimpleNamespace(RUNNING="running", CANCEL="cancel")
    engine.draft_model = lambda *arguments, **options: ("draft", *arguments, options)
    base = ModuleType("openvino")
    base.Tensor = lambda array: array
    monkeypatch.setattr(Pipeline, "made", [])
    for name, module in (("openvino_genai", engine), ("openvino", base)):
        monkeypatch.setitem(sys.modules, name, module)
    for module in (completions, parameters):
        monkeypatch.setitem(sys.modules, module.__name__.rpartition(".")[2], module)
    spec = importlib.util.spec_from_file_location("serve_openvino", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(**more) -> dict:
    every = {"target": "t.gguf", "properties": {"P": 1}, "scheduler": SCHEDULER}
    return every | {"draft": None, "lookup": False, "generation": {}} | more


class TestScript:
    def test_a_plain_pipeline(self, script):
        script.pipeline(words())
        [(arguments, options)] = Pipeline.made
        assert arguments == ("t.gguf", "CPU") and options.keys() == {"P", "scheduler_config"}
        assert options["scheduler_config"].enable_prefix_caching is False

    def test_a_pipeline_that_looks_up(self, script):
        script.pipeline(words(lookup=True))
        assert Pipeline.made[0][1].keys() == {"P", "scheduler_config", "prompt_lookup"}

    def test_a_draft_model_is_converted_once(self, script, tmp_path):
        settings = words(draft=str(tmp_path / "d.gguf"))
        (tmp_path / "d.gguf").touch()
        script.pipeline(settings)
        folder = tmp_path / "d-openvino-9"
        assert Pipeline.made[0][1] == {"enable_save_ov_model": True}
        assert Pipeline.made[1][1]["draft_model"] == ("draft", str(folder), "CPU", {"P": 1})
        assert {path.name for path in tmp_path.iterdir()} == {"d.gguf", folder.name}
        assert [path.name for path in folder.iterdir()] == ["openvino_model.xml"]
        script.pipeline(settings)
        assert len(Pipeline.made) == 3

    @pytest.mark.parametrize("more", [{"scheduler": {"nonsense": 1}}, {"generation": {"nonsense": 1}}])
    def test_unknown_settings_are_refused(self, script, more):
        with pytest.raises(SystemExit, match="no parameter 'nonsense'"):
            script.Decoder(words(**more))

    @pytest.mark.parametrize(
        ("lookup", "passes"),
        [(False, [[10], [11], [12], [13], [14], [2]]), (True, [[10], [11, 12], [13, 14], [2]])],
    )
    def test_answers_pass_by_pass(self, script, monkeypatch, lookup, passes):
        monkeypatch.setattr(Pipeline, "width", 2 if lookup else 1)
        decode = script.Decoder(words(lookup=lookup, generation={"num_assistant_tokens": 5}))
        with answering(decode) as url:
            reply = openai(url, Request(PROMPT, SamplingParams(6, 0.5), seed=3), frozenset({2}), 10.0)
        assert [one.tokens for one in reply.passes] == passes
        assert {one.drafted for one in reply.passes} == {None}  # it does not tell

    def test_settings_of_a_request(self, script):
        decode = script.Decoder(words(generation={"num_assistant_tokens": 5}))
        asked = completions.Completion(PROMPT, 4, 0.5, 9, [3, 7])
        assert decode(asked, lambda *_: None) == "length"
        config = decode.pipeline.asked
        assert (config.max_new_tokens, config.stop_token_ids) == (4, {3, 7})
        assert (config.do_sample, config.temperature, config.rng_seed) == (True, 0.5, 9)
        assert config.num_assistant_tokens == 5
        decode(completions.Completion(PROMPT, 4), lambda *_: None)
        assert decode.pipeline.asked.do_sample is False
        for cut in ({"top_k": 5}, {"top_p": 0.5}):
            decode(completions.Completion(PROMPT, 4, 0.5, **cut), lambda *_: None)
            config = decode.pipeline.asked
            assert (getattr(config, "top_k", 0), config.top_p) == (cut.get("top_k", 0), cut.get("top_p", 1.0))
        with pytest.raises(completions.RequestError, match="set only one"):
            decode(completions.Completion(PROMPT, 4, 0.5, top_k=5, top_p=0.5), lambda *_: None)

    def test_a_client_that_hangs_up_stops_the_answer(self, script):
        def gone(*_):
            raise completions.HungUpError

        with pytest.raises(completions.HungUpError):
            script.Decoder(words())(completions.Completion(PROMPT, 9), gone)

    @pytest.mark.parametrize(
        ("tokens", "why"), [([4, 5, 7], "stop"), ([4, 5, 6], "length"), ([4] * 8 + [7], "stop")]
    )
    def test_an_answer_that_was_cut_did_not_stop(self, script, tokens, why):
        """As where the memory for the cache is too small: the run then fails the question."""
        decode = script.Decoder(words())
        decode.pipeline.generate = lambda *_: SimpleNamespace(tokens=[tokens])
        assert decode(completions.Completion(PROMPT, 9, 0.0, 0, [2, 7]), lambda *_: None) == why

    def test_no_tokens_are_an_error(self, script, monkeypatch):
        decode = script.Decoder(words())
        decode.pipeline.generate = lambda *_: SimpleNamespace(tokens=[[]])
        with pytest.raises(completions.RequestError, match="no tokens"):
            decode(completions.Completion(PROMPT, 9), lambda *_: None)


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.skipif(not is_installed("openvino"), reason="`specbench engine install openvino` was not run")
class TestForReal:
    RUN = ("pair=tiny", "engine=openvino", "threads=1", "data.limit=1", "decoding.max_new_tokens=32")

    @pytest.mark.parametrize("method", ["sps", "pld"])
    def test_answers_are_exact(self, tmp_path, method):
        done = cli(tmp_path, *self.RUN, f"method={method}", "remeasure=0")
        assert done.returncode == 0, done.stderr
        summary = read_run(Path(tmp_path, done.stdout.splitlines()[-1])).summary
        for counts in (summary["equivalence"], summary["baseline"]["equivalence"]):
            assert counts["exact"] + counts["tie"] == counts["answers"] == 7
        assert summary["overall"]["acceptance_length"] > (2 if method == "sps" else 1)
        assert summary["overall"]["acceptance_rate"] is None
