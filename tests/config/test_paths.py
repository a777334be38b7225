"""Paths with signs that Hydra's grammar takes only in quotes."""

from __future__ import annotations

import shlex

import pytest

from specbench.config.compose import compose_arguments, positional
from specbench.system.errors import UserError


def test_a_folder_with_any_name_holds_own_yamls(tmp_path, monkeypatch):
    folder = tmp_path / 'a "müller", (1) = $x'
    (folder / "conf" / "pair").mkdir(parents=True)
    (folder / "conf" / "pair" / "mine.yaml").write_text("defaults: [tiny, _self_]\nname: mine\n")
    monkeypatch.chdir(folder)
    assert compose_arguments("bench", ["pair=mine"]).pair.name == "mine"
    with pytest.raises(UserError, match="unknown key 'pairs'"):
        compose_arguments("bench", ["pair=mine", "pairs=1"])


@pytest.mark.parametrize("name", ["b[1].jsonl", "b (1).jsonl", "größe", "b's", "t=0.8"])
def test_a_path_that_needs_quotes_is_told_so(name):
    with pytest.raises(UserError) as caught:
        compose_arguments("bench", [f"data.path=/a/{name}"])
    message = str(caught.value)
    assert "cannot be read: quote the text, data.path='" in message and "\n" not in message
    (override,) = shlex.split(message.partition("quote the text, ")[2].partition(", or close")[0])
    assert compose_arguments("bench", [override]).data.path == f"/a/{name}"


def test_a_home_folder_is_named_by_its_variable():
    with pytest.raises(UserError, match=r"^runs_root=~/runs cannot be read: write runs_root=\$HOME/runs$"):
        compose_arguments("bench", ["runs_root=~/runs"])


def test_a_file_with_any_name_is_one_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("réponses.jsonl", "a (1), b.jsonl", "t=0.8.jsonl"):
        (tmp_path / name).write_text("{}")
        arguments = positional("answers", [name, "pair=tiny"], "audit FILE")
        assert compose_arguments("audit", arguments).answers == name
    for words in (["a", "b"], ["pair=tiny"], ["--answers"]):
        with pytest.raises(UserError, match="usage: audit FILE"):
            positional("answers", words, "audit FILE")
