"""Models as files for other engines: what is read back is the same model, and each is written once."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench.commands import export as command
from specbench.decoding.drafter import Drafter
from specbench.models import export as module
from specbench.models.export import as_folder, as_gguf, as_part
from specbench.models.gguf import converted
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.commands import exit_code
from tests.support.conf import composed
from tests.support.decoding import random_pair

pytestmark = pytest.mark.slow  # files are written, read and converted


@pytest.fixture(scope="module")
def tiny():
    return load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, 0, with_draft=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "export"


def test_a_gguf_file_gives_the_same_weights_back(tiny):
    path = as_gguf(tiny.draft, tiny.tokenizer, "tiny-draft")
    model = AutoModelForCausalLM.from_pretrained(converted(path))
    theirs, ours = model.state_dict(), tiny.draft.state_dict()
    assert path.name == "tiny-draft-F32.gguf" and theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_gguf_file_names_the_width_of_a_head(tiny):
    """Where it is not the width over the heads llama.cpp could not guess it."""
    model = random_pair("llama", head_dim=32).target
    assert model.config.hidden_size // model.config.num_attention_heads != 32
    fields = gguf.GGUFReader(as_gguf(model, tiny.tokenizer, "wide")).fields
    assert [fields[f"llama.attention.{name}_length"].contents() for name in ("key", "value")] == [32, 32]


def test_a_folder_gives_the_same_weights_and_tokens_back(tiny):
    path = as_folder(tiny.draft, tiny.tokenizer, "tiny-draft")
    theirs, ours = AutoModelForCausalLM.from_pretrained(path).state_dict(), tiny.draft.state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert AutoTokenizer.from_pretrained(path).get_vocab() == tiny.tokenizer.get_vocab()


def test_each_is_written_once_and_anew_where_weights_differ(tiny, cache, monkeypatch):
    path = as_gguf(tiny.draft, tiny.tokenizer, "a")
    written = path.stat().st_mtime_ns
    assert as_gguf(tiny.draft, tiny.tokenizer, "a") == path and path.stat().st_mtime_ns == written
    weight = tiny.draft.model.norm.weight
    with torch.no_grad():
        before = weight.clone()
        weight[0] += 1
    try:
        assert as_gguf(tiny.draft, tiny.tokenizer, "a") != path
    finally:
        with torch.no_grad():
            weight.copy_(before)
    monkeypatch.setattr(module, "FORM", 99)
    assert as_gguf(tiny.draft, tiny.tokenizer, "a").parent.parent == cache
    assert len(list(cache.glob("*/a-F32.gguf"))) == 3


def test_a_tokenizer_that_merges_characters_is_refused(tiny):
    """As Llama 2's, which has tokens for bytes only where characters lack one."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["model"]["byte_fallback"] = True
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))
    with pytest.raises(UserError, match="byte-level BPE"):
        as_gguf(tiny.draft, tokenizer, "a")


def test_another_template_or_special_token_is_another_file(tiny):
    pair = replace(tiny, chat_template="{{ messages }}")
    assert pair.exported_tokenizer.chat_template == "{{ messages }}" != tiny.tokenizer.chat_template
    other_end = copy.deepcopy(tiny.tokenizer)
    other_end.eos_token = other_end.bos_token
    tokenizers = [tiny.tokenizer, tiny.exported_tokenizer, pair.exported_tokenizer, other_end]
    assert len({as_gguf(tiny.draft, one, "a") for one in tokenizers}) == 3


def test_what_a_killed_process_left_is_no_file(tiny, monkeypatch):
    def killed(path, *_, **__):
        path.write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_gguf", killed)
        with pytest.raises(KeyboardInterrupt):
            as_gguf(tiny.draft, tiny.tokenizer, "a")
    path = as_gguf(tiny.draft, tiny.tokenizer, "a")
    assert path.stat().st_size > 10_000 and not list(path.parent.glob("partial*"))


def test_matrices_of_another_kind_and_a_tokenizer_by_another_name(tiny):
    path = as_gguf(tiny.draft, tiny.tokenizer, "tiny-draft", "F16", "smollm")
    assert path.name == "tiny-draft-F16-smollm.gguf"
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16
    model = AutoModelForCausalLM.from_pretrained(converted(path))
    theirs, ours = model.state_dict(), tiny.draft.state_dict()
    assert all(torch.equal(theirs[name], ours[name].half().float()) for name in ours if ours[name].ndim == 2)


class Exporting(Drafter):
    """Writes a text."""

    def __init__(self, text: str):
        self.text = text

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(self.text)


def test_what_a_drafter_exports_lies_where_its_content_says(cache):
    path = as_part(Exporting("a"), "heads")
    assert (path / "config.json").read_text() == "a" and path.name == "heads" and path.parent.parent == cache
    assert as_part(Exporting("a"), "heads") == path != as_part(Exporting("b"), "heads")
    assert {one.name for one in cache.iterdir()} == {
        path.parent.name,
        as_part(Exporting("b"), "heads").parent.name,
    }
    with pytest.raises(UserError, match="nothing to export"):
        as_part(Drafter(), "nothing")


def test_other_families_are_refused(tiny):
    pair = random_pair("opt")
    with pytest.raises(UserError, match=r"Llama family.*not 'opt'; .*engine\.target"):
        as_gguf(pair.target, tiny.tokenizer, "a")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "positions of type 'llama3'"),
        ({"attention_bias": True}, "layers with biases"),
        ({"mlp_bias": True}, "layers with biases"),
    ],
)
def test_what_would_be_lost_in_a_file_is_refused(tiny, change, says):
    model = copy.copy(tiny.target)
    model.config = copy.deepcopy(tiny.target.config)
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(UserError, match=says):
        as_gguf(model, tiny.tokenizer, "a")


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_the_command_writes_both_models_and_prints_where(tmp_path, monkeypatch, capsys, form):
    monkeypatch.setattr(sys, "argv", ["export", form, "pair=tiny", f"out={tmp_path / 'out'}"])
    assert exit_code(command.main) == 0
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == {"target", "draft"}
    assert all(Path(path).exists() and Path(path).parent == tmp_path / "out" for path in lines.values())


def test_the_command_writes_a_part_as_vllm_reads_it(tmp_path, monkeypatch, capsys):
    words = ["export", "part", "method=medusa", "pair=tiny", f"out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", words)
    assert exit_code(command.main) == 0
    assert capsys.readouterr().out == f"medusa: {tmp_path / 'out' / 'tiny-medusa'}\n"
    with safe_open(tmp_path / "out" / "tiny-medusa" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in set(file.keys())
    monkeypatch.setattr(sys, "argv", ["export", "part", "method=pld", "pair=tiny"])
    assert exit_code(command.main) == 2
    assert "PromptLookup has nothing to export" in capsys.readouterr().err


def test_an_export_that_was_stopped_has_another_name(tmp_path, monkeypatch):
    def stopped(source, to):
        to.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "model.gguf").write_text("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command.shutil, "copyfile", stopped)
        command._copied(tmp_path / "model.gguf", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    command._copied(tmp_path / "model.gguf", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "whole" and len([*tmp_path.iterdir()]) == 2


def test_what_is_there_already_is_copied_nowhere_and_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    assert command._copied(tmp_path / "file", tmp_path / "file") == tmp_path / "file"
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    (folder / "new").write_text("y")
    (out / "old").write_text("z")
    assert command._copied(folder, out) == out and [path.name for path in out.iterdir()] == ["new"]
    (folder / "file").mkdir()
    with pytest.raises(UserError, match="cannot write .*folder/file: Is a directory"):
        command._copied(tmp_path / "file", tmp_path / "folder" / "file")


def test_a_full_disk_is_one_line(tiny, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_gguf", full)
    with pytest.raises(UserError, match="cannot write .*nowhere.*: No space left on device"):
        as_gguf(tiny.target, tiny.tokenizer, "nowhere")


def test_an_unknown_form_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["export", "onnx", "pair=tiny"])
    assert exit_code(command.main) == 2
    assert "gguf" in capsys.readouterr().err
