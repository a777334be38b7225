import copy
import hashlib
import inspect
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from specbench import ROOT
from specbench.data.training_folder import RECORD
from specbench.measure.machine import hardware, provenance
from specbench.measure.records import run_folder as store
from specbench.models.weight_files import weight_facts
from specbench.system.errors import UserError
from tests.support.synthetic import CONFIG

PAIR = {"name": "tiny", "target": "none/such-model", "target_revision": "main", "draft": None, "parts": {}}


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("{}\n")
    return path


@pytest.fixture
def found(questions, monkeypatch) -> dict:
    monkeypatch.setattr(sys, "orig_argv", ["bench", "method=sps"])
    return provenance.collect(CONFIG | {"pair": PAIR}, CONFIG["method"], questions)


def test_what_is_collected(found, questions):
    json.dumps(found, allow_nan=False)
    assert found["versions"]["torch"] == torch.__version__ and "python" in found["versions"]
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert found["machine"]["cores"] >= found["machine"]["usable_cores"] >= 1 and found["machine"]["cpu"]
    assert found["questions"]["sha256"] == hashlib.sha256(questions.read_bytes()).hexdigest()
    assert found["config"]["method"]["max_draft_tokens"] == 5
    assert found["command"] == ["bench", "method=sps"]
    assert found["weights"] == {"target": {"source": "none/such-model", "revision": "main", "commit": None}}


@pytest.mark.parametrize("source", ["./models/draft", "../draft", "checkpoints/qwen3/medusa", "/none"])
def test_a_part_that_is_not_there_and_not_needed_has_no_files(source):
    assert weight_facts(source, None, {}) == {"source": source, "files": {}}


def test_checksums_of_weights_on_disk(tmp_path, monkeypatch):
    target, part = tmp_path / "target", tmp_path / "head.bin"
    target.mkdir()
    names = ("config.json", "model.safetensors", "modeling_own.py")
    for name in names:
        (target / name).write_text(name)
    part.write_bytes(b"part")
    pair = PAIR | {"target": str(target), "parts": {"kangaroo": str(part), "eagle": str(tmp_path)}}
    recorded = provenance.weights(pair, {"weights": str(part)})
    assert recorded["target"]["files"] == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert recorded["parts.kangaroo"]["files"] == {"head.bin": hashlib.sha256(b"part").hexdigest()}
    assert recorded.keys() == {"target", "parts.kangaroo"}, "only what the run reads"
    chosen = provenance.weights(PAIR, {"name": "sps", "vocab_map": str(target), "max_draft_tokens": 5})
    assert chosen["method.vocab_map"]["files"].keys() == set(names) and "method.name" not in chosen
    monkeypatch.chdir(tmp_path)  # where a folder is called like the method
    (tmp_path / "sps").mkdir()
    (tmp_path / "sps" / RECORD).write_text("{}")
    (tmp_path / "run").mkdir()  # or like one of the words that a setting takes
    (tmp_path / "run" / RECORD).write_text("{}")
    recycling = {"name": "recycling", "_target_": "methods.recycling.TokenRecycling", "memory": "run"}
    chosen = {"name": "sps", "_target_": "methods.sps.SpeculativeSampling", "drafter": recycling}
    assert provenance.weights(PAIR, chosen).keys() == {"target"}
    assert provenance.trained(PAIR, chosen, with_draft=False) == provenance.trained_weights(chosen) == {}
    wrapped = provenance.weights(PAIR, {"name": "samd", "drafter": {"weights": str(target)}})
    assert wrapped["method.drafter.weights"]["files"] == recorded["target"]["files"]
    of_engine = provenance.weights(PAIR, {}, {"name": "llama_cpp", "target": str(part), "draft": None})
    assert of_engine["engine.target"]["files"] == {"head.bin": hashlib.sha256(b"part").hexdigest()}
    assert "engine.draft" not in of_engine
    in_its_words = {"speculative": {"sps": {"method": "draft_model", "model": str(part)}}}
    drafted = provenance.weights(PAIR, {"name": "sps"}, in_its_words)
    assert drafted["engine.model"] == of_engine["engine.target"] and "engine.method" not in drafted
    assert "engine.model" not in provenance.weights(PAIR, {"name": "pld"}, in_its_words)


def test_another_chat_template_or_tokenizer_is_a_difference(tmp_path):
    """Prompts depend on them: a run must not go on with others."""
    target, other = tmp_path / "target", tmp_path / "other"
    for folder in (target, other):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.model").write_text("pieces")

    def state(tokenizer: str | None = None) -> dict:
        weights = provenance.weights(PAIR | {"target": str(target), "tokenizer": tokenizer}, {})
        return {"weights": weights}

    def differs(before: dict, after: dict) -> bool:
        return bool(provenance.differences(before, after, ["weights"]))

    first, beside = state(), state(str(other))
    assert not differs(first, state())
    (target / "chat_template.jinja").write_text("a template")
    second = state()
    assert differs(first, second) and not differs(beside, state(str(other)))
    (target / "chat_template.jinja").write_text("another")
    assert differs(second, state()) and not differs(beside, state(str(other)))
    (other / "tokenizer.model").write_text("other pieces")
    assert differs(beside, state(str(other)))


def test_engines_with_other_files_or_interpreters_do_not_compare():
    def run(digest: str, python: str | None) -> dict:
        files = {"engine.target": {"source": "x.gguf", "files": {"x.gguf": digest}}}
        return {"weights": files, "config": {"engine": {"name": "llama_cpp", "python": python}}}

    same, other_file, other_python = run("a", None), run("b", None), run("a", "/opt/bin/python")
    assert provenance.differences(same, run("a", None)) == []
    assert len(provenance.differences(same, other_file)) == 1
    assert len(provenance.differences(same, other_python)) == 1


def test_weights_that_one_run_does_not_know_are_no_difference():
    """A draft model that was fetched meanwhile, for another job of a sweep, is none that this one reads."""

    def run(commit: str | None) -> dict:
        return {"weights": {"draft": {"source": "a/b", "revision": None, "commit": commit}}}

    assert provenance.differences(run(None), run("abc"), ["weights"]) == []
    assert len(provenance.differences(run("abc"), run("def"), ["weights"])) == 1


def test_no_secret_is_recorded(questions, monkeypatch):
    secret = "hf_" + "a1B2" * 8
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("WANDB_API_KEY", "plain-words-key")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    config = CONFIG | {
        "pair": PAIR,
        "tracker": {"name": "wandb", "api_key": "plain-words-key"},
        "note": f"x {secret} y",
    }
    command = ["bench", f"note={secret}", "tracker.api_key=plain-words-key", secret, "https://me:pass@host/x"]
    monkeypatch.setattr(sys, "orig_argv", command)
    found = provenance.collect(config, config["method"], questions)
    text = json.dumps(found)
    for word in (secret, "plain-words-key", "me:pass"):
        assert word not in text
    assert found["environment"]["OMP_NUM_THREADS"] == "2"
    assert found["command"][2] == "tracker.api_key=***" and found["config"]["note"] == "x *** y"


def test_an_address_is_recorded_without_its_query(questions, monkeypatch):
    url = "https://me:pw@host/q?token=abc"
    config = CONFIG | {"pair": PAIR, "data": {"name": "x", "url": url}}
    monkeypatch.setattr(sys, "orig_argv", ["bench", f"data.url={url}", url])
    found = provenance.collect(config, config["method"], questions)
    shown = "https://***@host/q?***"
    assert found["config"]["data"]["url"] == shown and found["command"] == [
        "bench",
        f"data.url={shown}",
        shown,
    ]


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_commit_and_diff(tmp_path):
    assert provenance.git_state(tmp_path) is None
    git(tmp_path, "init")
    assert provenance.git_state(tmp_path) is None  # no commit yet
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "x")
    clean = provenance.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["diff"] == ""
    (tmp_path / "code.py").write_text("x = 2\n")
    changed = provenance.git_state(tmp_path)
    assert changed["commit"] == clean["commit"] and changed["diff_sha256"] != clean["diff_sha256"]
    assert "+x = 2" in changed["diff"]
    (tmp_path / "installed").mkdir()
    assert provenance.git_state(tmp_path / "installed") is None


def test_git_is_not_needed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert provenance.git_state(ROOT) is None and hardware.gpus() == []


def test_a_broken_installation_beside_ends_no_run(monkeypatch):
    nameless = SimpleNamespace(metadata={"Name": None}, version="1")
    there = [nameless, SimpleNamespace(metadata={"Name": "Torch"}, version="2")]
    monkeypatch.setattr(provenance.importlib.metadata, "distributions", lambda: there)
    assert inspect.unwrap(provenance.versions)().keys() == {"python", "torch"}  # it is kept in tests


def test_differences_name_what_cannot_be_compared(found):
    other = copy.deepcopy(found)
    other["time"], other["load_average"], other["config"]["method"]["name"] = "later", [9.0], "pld"
    assert provenance.differences(found, other) == []
    other["versions"]["torch"] = "1.0"
    other["threads"]["torch"] = 64
    other["environment"]["OMP_PLACES"] = "cores"
    lines = provenance.differences(found, other)
    assert len(lines) == 3
    assert f"versions.torch {torch.__version__} against 1.0" in lines
    assert any(line.startswith("environment.OMP_PLACES None against cores") for line in lines)


@pytest.mark.parametrize(
    "path",
    [
        *("config.decoding.max_new_tokens", "config.decoding.temperature", "config.decoding.verification"),
        *("config.decoding.top_k", "config.decoding.top_p"),
        *("config.decoding.verify_width", "config.protocol", "config.data.limit", "weights.target.files.x"),
        *("config.pair.template_kwargs.thinking", "config.pair.tokenizer", "config.pair.device_map"),
    ],
)
def test_runs_under_another_condition_cannot_be_compared(path):
    def run(value):
        for key in reversed(path.split(".")):
            value = {key: value}
        return value

    assert len(provenance.differences(run("a"), run("b"))) == 1


def test_a_run_goes_on_with_the_same_kernels():
    assert provenance.differences({"kernels": "a"}, {"kernels": "b"}, provenance.SAME_RUN)


def test_a_run_goes_on_only_where_it_began(found, tmp_path):
    path = tmp_path / store.PROVENANCE
    provenance.record(path, found)
    before = path.read_bytes()
    provenance.record(path, found | {"time": "later"})
    assert path.read_bytes() == before
    with pytest.raises(UserError, match=r"questions\.sha256 .* 0"):
        provenance.record(path, found | {"questions": {"path": "x", "sha256": "0"}})
    with pytest.raises(UserError, match="engine_version"):
        provenance.record(path, found | {"engine_version": "another==2"})
    for name in ("device", "processor"):
        with pytest.raises(UserError, match=f"{name} None against another"):
            provenance.record(path, found | {name: "another"})
    for folder, advice in ((None, "the same command now starts over"), ("x", "name another folder")):
        begun = found | {
            "questions": {"path": "x", "sha256": "0"},
            "config": found["config"] | {"run_dir": folder},
        }
        with pytest.raises(
            UserError, match=f": {advice}; once they are restored, run_dir={tmp_path} resumes it"
        ):
            provenance.record(path, begun)
