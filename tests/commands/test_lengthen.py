"""Questions with long prompts: their length in the pair's own tokens, what they hold, and what is refused."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace

import pytest

from methods import answer
from specbench.commands import converse
from specbench.commands import lengthen as command
from specbench.config.compose import program
from specbench.data.questions import load_questions
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.conf import composed

ALL = {"name": "all", "tasks": {}}


def data(path) -> dict:
    return {"name": "jsonl", "schema": "turns", "path": path, "url": None, "sha256": None, "limit": None}


def written(tmp_path, *settings: str):
    cfg = composed("lengthen", f"out={tmp_path}/long.jsonl", *settings)
    return cfg, load_questions(data(command.lengthen(cfg)), ALL)


def test_prompts_are_as_long_as_asked_and_tasks_by_length(tmp_path):
    cfg, questions = written(tmp_path, "lengths=[128,700]", "count=3")
    assert [q.task for q in questions] == ["context_128"] * 3 + ["context_700"] * 3
    pair = load_pair(cfg.pair, cfg.seed, with_draft=False, weights=False)
    for question in questions:
        length = int(question.task.removeprefix("context_"))
        tokens = len(pair.prompt_ids([{"role": "user", "content": question.turns[0]}]))
        assert length - 20 < tokens <= length  # the tokens of a word may be many
    assert len({question.turns for question in questions}) == 6


@pytest.mark.parametrize("out", ["null", "20261128", ".", "''"])
@pytest.mark.parametrize(
    ("config", "task"),
    [("lengthen", command.lengthen), ("converse", converse.converse), ("answer", answer.answer)],
)
def test_a_file_to_write_has_a_name(config, task, out):
    with pytest.raises(UserError, match="'?out'?"):
        task(composed(config, f"out={out}"))


def test_a_file_that_cannot_be_read_is_one_line_in_every_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lengthen"])
    main = program("lengthen", lambda cfg: (tmp_path / "gone").read_text())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/gone: No such file or directory\n"


def test_a_document_that_is_asked_for_is_there(tmp_path):
    _, questions = written(tmp_path, "lengths=[600]", "count=4")
    for question in questions:
        number, total = re.search(r"document (\d+) of the (\d+) documents", question.turns[0]).groups()
        assert question.turns[0].count("\n\nDocument ") == int(total) - 1
        assert f"Document {number}: " in question.turns[0]


def test_the_same_seed_writes_the_same_questions(tmp_path):
    first, again, other = (
        written(tmp_path, "lengths=[200]", "count=2", f"seed={seed}")[1] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_documents_come_from_answers_that_are_long_enough(tmp_path):
    talk = tmp_path / "talk.jsonl"
    texts = [" ".join(f"{name}{i}" for i in range(60)) for name in ("alpha", "beta")]
    rows = [
        [{"role": "user", "content": "gamma " * 60}, {"role": "assistant", "content": text}]
        for text in (*texts, texts[0], "too short")
    ]
    talk.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    _, questions = written(tmp_path, f"conversations={talk}", "lengths=[300]", "count=1")
    (turn,) = questions[0].turns
    assert "alpha0" in turn and "gamma" not in turn and "short" not in turn
    with pytest.raises(UserError, match="fewer than a prompt of 3000"):
        written(tmp_path, f"conversations={talk}", "lengths=[3000]")


def test_a_text_without_an_end_and_without_long_answers_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "TOO_MANY", 30)
    with pytest.raises(UserError, match="the answers of at least 5000 words have 0 tokens in all"):
        written(tmp_path, "words=5000", "lengths=[100]")


@pytest.mark.parametrize(("count", "words"), [(2, 22), (12, 72), (13, 77), (14, 80), (5000, 80)])
def test_no_more_is_tokenised_than_a_few_prompts(count, words):
    """The longest prompt is found, however many documents there are."""
    documents, tried = [f"{i} beta gamma" for i in range(count)], []

    def prompt_ids(messages) -> list[str]:
        tried.append(messages[0]["content"].split())
        return tried[-1]

    turn = command.prompt(documents, 80, random.Random(0), SimpleNamespace(prompt_ids=prompt_ids))
    assert len(turn.split()) == words and max(map(len, tried)) <= 160


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["lengths=[4000]", "room=400"], "do not fit into the context of 4096 tokens"),
        (["lengths=[10]"], "lengths=10: not even one document fits"),
        (["lengths=[0]"], "lengths"),
        (["lengths=[]"], "^lengths is empty: "),
        (["count=0"], "count"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, settings, says):
    with pytest.raises(UserError, match=says) as caught:
        written(tmp_path, *settings)
    assert "\n" not in str(caught.value)
