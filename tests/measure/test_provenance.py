import copy
import gc
import hashlib
import inspect
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from specbench import ROOT
from specbench.data.training import RECORD
from specbench.decoding.cpu.packed_linear import Panels
from specbench.measure.machine import provenance
from specbench.measure.machine.provenance import buffer_bytes  # as it is, whatever size all tests get
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from tests.support.kernel_passes import needs_kernels
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
    assert provenance._weights(source, None, {}) == {"source": source, "files": {}}


def test_checksums_of_weights_on_disk(tmp_path, monkeypatch):
    target, part = tmp_path / "target", tmp_path / "head.bin"
    target.mkdir()
    for name in ("model.safetensors", "config.json"):
        (target / name).write_text(name)
    part.write_bytes(b"part")
    found = provenance.weights(PAIR | {"target": str(target), "parts": {"kangaroo": str(part)}}, {})
    names = ("config.json", "model.safetensors")
    assert found["target"]["files"] == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert found["parts.kangaroo"]["files"] == {"head.bin": hashlib.sha256(b"part").hexdigest()}
    assert "draft" not in found
    chosen = provenance.weights(PAIR, {"name": "sps", "vocab_map": str(target), "max_draft_tokens": 5})
    assert chosen["method.vocab_map"]["files"].keys() == set(names) and "method.name" not in chosen
    monkeypatch.chdir(tmp_path)  # where a folder is called like the method
    (tmp_path / "sps").mkdir()
    (tmp_path / "sps" / RECORD).write_text("{}")
    chosen = {"name": "sps", "_target_": "sps", "drafter": {"name": "sps"}}
    assert provenance.weights(PAIR, chosen).keys() == {"target"}
    assert provenance.trained(PAIR, chosen, with_draft=False) == provenance.trained_weights(chosen) == {}
    wrapped = provenance.weights(PAIR, {"name": "samd", "drafter": {"weights": str(target)}})
    assert wrapped["method.drafter.weights"]["files"] == found["target"]["files"]
    of_engine = provenance.weights(PAIR, {}, {"name": "llama_cpp", "target": str(part), "draft": None})
    assert of_engine["engine.target"]["files"] == {"head.bin": hashlib.sha256(b"part").hexdigest()}
    assert "engine.draft" not in of_engine


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/q.jsonl?token=abc&x=1", "https://host/q.jsonl?***"),
        ("https://s3.host/q?X-Amz-Signature=ab12&X-Amz-Date=1", "https://s3.host/q?***"),
        ("https://host/q#access_token=abc", "https://host/q#***"),
        ("https://TOKEN@host/q", "https://***@host/q"),
        ("https://user:p@w@host/q", "https://***@host/q"),
        ("see https://user:p/w@host:8/q?a=b for more", "see https://***@host:8/q?*** for more"),
        ("https://user:p?w@host/q", "https://***"),
        ("https://host/q?token=a@b", "https://***"),
        ("https://host:8080/data/q.jsonl", "https://host:8080/data/q.jsonl"),
        ("Authorization: Bearer abc.def-1", "Authorization: ***"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: ***"),
        ("a basic question, to the point", "a basic question, to the point"),
        *((f"x {key} y", "x *** y") for key in (
            "glpat-abcdefghij0123456789", "xoxb-1234567890-abcdef", "xoxp-1234567890-abcdef", "AIza" + "a1B2-_" * 6,
            "hf_" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "gho_" + "a1B2" * 9, "sk-" + "a1B2" * 8, "AKIA" + "ABCD" * 4,
            "ASIA" + "ABCD" * 4, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmN",
        )),
        ("hf_generate_tokens_per_second", "hf_generate_tokens_per_second"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_blanked(text, shown):
    assert provenance.without_secrets({"note": [text]}) == {"note": [shown]}


def test_what_is_named_like_a_secret_is_blanked():
    secret = (
        *(
            "key",
            "api_key",
            "apiKey",
            "secret_key",
            "private_key",
            "X-Amz-Signature",
            "auth",
            "Authorization",
        ),
        *("bearer", "token", "hf_token", "accessToken", "password", "client_secret", "credentials"),
    )
    harmless = (
        *("tokenizer", "max_new_tokens", "monkey", "keys", "token_budget", "author", "tokens", "keyboard"),
        *("max_draft_tokens", "signatures", "same_added_tokens"),
    )
    shown = provenance.without_secrets(dict.fromkeys((*secret, *harmless), "x"))
    assert shown == dict.fromkeys(secret, "***") | dict.fromkeys(harmless, "x")
    assert provenance.without_secrets({"password": 1234, "auth": {"a": "b"}, "token": None, "key": True}) == {
        "password": "***", "auth": "***", "token": None, "key": True
    }  # fmt: skip


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
    monkeypatch.setattr(provenance.shutil, "which", lambda name: None)
    assert provenance.git_state(ROOT) is None and provenance.gpus() == []


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 570.1, 143771, 1980, 700.00'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [g["name"] for g in provenance.gpus()] == ["NVIDIA H200"]
    assert provenance.gpus()[0]["driver_version"] == "570.1"
    tool.write_text("#!/bin/sh\necho '0, 1755, 412.33, 61'\n")
    state = {"index": "0", "clocks.sm": "1755", "power.draw": "412.33", "temperature.gpu": "61"}
    assert provenance.gpus(provenance.GPU_STATE) == [state]
    # Of several GPUs the one that computes, whatever nvidia-smi calls it.
    tool.write_text(
        "#!/bin/sh\ncase \"$*\" in *--id=GPU-ab-12*) echo '3, 900, 99.0, 40';; *) exit 6;; esac\n"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-12"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert provenance.gpus(provenance.GPU_STATE, torch.device("cuda:1"))[0]["clocks.sm"] == "900"
    names = [provenance.processor(torch.device(name)) for name in ("cuda:1", "cpu")]
    assert names == ["GPU of cuda:1", provenance.cpu_model()]
    for broken in ("echo 'no driver' >&2\nexit 9", "echo '0, a GPU, and no more'"):
        tool.write_text(f"#!/bin/sh\n{broken}\n")
        assert provenance.gpus() == []

    def hangs(*given, **_):
        raise subprocess.TimeoutExpired(given, 60)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert provenance.gpus() == []


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
    provenance.record(tmp_path, found)
    before = (tmp_path / store.PROVENANCE).read_bytes()
    provenance.record(tmp_path, found | {"time": "later"})
    assert (tmp_path / store.PROVENANCE).read_bytes() == before
    with pytest.raises(UserError, match=r"questions\.sha256 .* 0"):
        provenance.record(tmp_path, found | {"questions": {"path": "x", "sha256": "0"}})
    with pytest.raises(UserError, match="engine_version"):
        provenance.record(tmp_path, found | {"engine_version": "another==2"})
    for folder, advice in ((None, "the same command now starts over"), ("x", "name another folder")):
        begun = found | {
            "questions": {"path": "x", "sha256": "0"},
            "config": found["config"] | {"run_dir": folder},
        }
        with pytest.raises(
            UserError, match=f": {advice}; once they are restored, run_dir={tmp_path} resumes it"
        ):
            provenance.record(tmp_path, begun)


def test_bandwidth_is_a_plausible_speed(monkeypatch):
    monkeypatch.setattr(provenance, "buffer_bytes", lambda kind: 2**24)
    assert 1e7 < provenance.bandwidth(torch.device("cpu")) < 1e13


def test_the_buffer_of_the_bandwidth_is_larger_than_the_caches(tmp_path, monkeypatch):
    """An EPYC 9684X: 12 caches of 96 MiB, each of 8 cores."""
    for core in range(96):
        cache = tmp_path / f"cpu{core}" / "cache" / "index3"
        cache.mkdir(parents=True)
        (cache / "size").write_text("98304K\n")
        (cache / "shared_cpu_list").write_text(f"{core // 8 * 8}-{core // 8 * 8 + 7}\n")
    assert provenance.last_level_cache_bytes(tmp_path) == 1152 * 2**20
    assert provenance.last_level_cache_bytes(tmp_path / "none") == provenance.UNKNOWN_CACHE_BYTES
    monkeypatch.setattr(provenance, "last_level_cache_bytes", lambda: 1152 * 2**20)
    monkeypatch.setattr(provenance, "free_memory", lambda: None)
    assert buffer_bytes("cpu") == 2304 * 2**20 and buffer_bytes("cuda") == 2**30


def test_the_buffer_and_its_copy_leave_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(provenance, "last_level_cache_bytes", lambda: 2**30)
    for free, size in ((2**34, 2**31), (2**32, 2**30), (2**30 + 999, 2**28), (0, 4 * provenance.COLUMNS)):
        monkeypatch.setattr(provenance, "free_memory", lambda free=free: free)
        assert buffer_bytes("cpu") == size


@needs_kernels
def test_the_buffer_is_given_back_before_its_copy_is_read(monkeypatch):
    made, ones, times = [], torch.ones, Panels.times

    def watched(*size, **options):
        tensor = ones(*size, **options)
        made.append(weakref.ref(tensor))
        return tensor

    def read(panels, states, bias):
        assert made[0]() is None
        return times(panels, states, bias)

    monkeypatch.setattr(torch, "ones", watched)
    monkeypatch.setattr(Panels, "times", read)
    assert provenance.bandwidth(torch.device("cpu")) > 0 and len(made) == 2


def test_processors_without_a_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance.platform, "processor", lambda: "")
    monkeypatch.setattr(provenance.platform, "machine", lambda: "aarch64")
    cpuinfo = tmp_path / "cpuinfo"
    assert provenance.cpu_model(cpuinfo) == "aarch64"
    core = "processor\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n"
    cpuinfo.write_text(core.format(0) + core.format(1))
    assert provenance.cpu_model(cpuinfo) == "aarch64, implementer 0x41, part 0xd0c, variant 0x3"
    cpuinfo.write_text("processor\t: 0\nflags\t\t:\nmodel name\t: AMD EPYC 9684X\ncache size\t: 1024 KB\n")
    assert provenance.cpu_model(cpuinfo) == "AMD EPYC 9684X"


@pytest.mark.slow
@pytest.mark.skipif(not provenance.RESET_PEAK.exists(), reason="nothing counts the peak here")
def test_the_buffer_of_the_bandwidth_is_in_no_peak_memory(monkeypatch):
    cpu, size = torch.device("cpu"), 2**27
    monkeypatch.setattr(provenance, "buffer_bytes", lambda kind: size)
    gc.collect()  # what other tests have left would go in the middle
    provenance.reset_peak_memory(cpu)
    before = provenance.peak_memory(cpu)
    provenance.bandwidth(cpu)
    assert provenance.peak_memory(cpu) > before + size / 2
    provenance.reset_peak_memory(cpu)
    assert provenance.peak_memory(cpu) < before + size / 2
