"""REST: how a datastore is made and what is refused, what is drafted from it, and losslessness."""

from __future__ import annotations

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods.common.suffix_array import suffix_array
from methods.rest import REST
from methods.rest.datastore import PLACES, RECORD, TOKENS, load_datastore, save_datastore, tree_after
from methods.rest.train import train
from specbench import ROOT
from specbench.data.contamination import WORDS, MeasuredTexts
from specbench.data.conversations import tokenizer_of
from specbench.data.question_files import TASKS, Question, read_questions
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from specbench.tiny.tokenizer import load_tokenizer
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers, random_prompt
from tests.support.lossless import assert_lossless, assert_stops_anywhere, free_answers
from tests.support.methods import with_tokenizer
from tests.support.models import byte_tokenizer, save_pair
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with

SHIPPED = ROOT / "specbench" / "tiny" / "weights" / "rest"


@pytest.fixture(scope="module")
def datastore(tmp_path_factory):
    """What the target says to some prompts, and what `assert_stops_anywhere` asks it."""
    pair, rng = with_tokenizer("llama"), random.Random(40)
    rows = [[*prompt, *answer] for prompt, answer in free_answers()]
    for _ in range(20):
        prompt = random_prompt(rng, pair.vocab_size)
        rows.append([*prompt, *generate_with_transformers(pair.target, prompt, 60, ())])
    return str(save_datastore(tmp_path_factory.mktemp("rest"), rows, pair))


# -- the folder


@pytest.mark.parametrize("vocabulary", [300, 2**16 - 1, 2**16, 150_000])
def test_a_datastore_is_what_was_saved(tmp_path, vocabulary):
    top = vocabulary - 1
    pair = SimpleNamespace(name="saved", vocab_size=vocabulary, tokenizer=byte_tokenizer())
    rows = [[1, 2, top, 258, 1, 2], [], [top, 258]]
    folder = save_datastore(tmp_path / "a" / "b", rows, pair, data="some text")
    record = json.loads((folder / RECORD).read_text())
    assert (record["tokens"], record["rows"], record["data"]) == (8, 2, "some text")
    assert record["types"][0] == (">u2" if vocabulary < 2**16 else ">u4")
    index = load_datastore(folder, pair)
    assert isinstance(index.tokens.base, np.memmap) and isinstance(index.positions.base, np.memmap)
    assert [token for token in index.tokens.tolist() if token != index.separator] == [*rows[0], *rows[2]]
    where = index.longest([9, top, 258], 16)
    assert (where.length, where.occurrences) == (2, 2)
    tree = tree_after(index, where, 5, 5)
    assert (tree.tokens, tree.parents, tree.score) == ([1, 2], [-1, 0], 1.0), "half of what follows is an end"


def test_what_is_no_datastore_is_refused(tmp_path):
    pair = SimpleNamespace(name="saved", vocab_size=300, tokenizer=byte_tokenizer())
    other = SimpleNamespace(name="other", vocab_size=300, tokenizer=byte_tokenizer(first_special="<bos>"))
    with pytest.raises(UserError, match=r"no datastore .*specbench train rest"):
        load_datastore(tmp_path, pair)
    with pytest.raises(UserError, match="no tokens"):
        save_datastore(tmp_path, [[], []], pair)
    save_datastore(tmp_path, [[1, 2, 3]], pair)
    with pytest.raises(UserError, match="another tokenizer"):
        load_datastore(tmp_path, other)
    whole = {name: (tmp_path / name).read_bytes() for name in (RECORD, TOKENS, PLACES)}
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content[:-2])
        with pytest.raises(UserError, match="broken"):
            load_datastore(tmp_path, pair)
        (tmp_path / name).write_bytes(content)
    (tmp_path / RECORD).write_bytes(whole[RECORD].replace(b">u2", b"<u2"))
    with pytest.raises(UserError, match="broken"):
        load_datastore(tmp_path, pair)


@pytest.mark.slow
def test_settings_that_cannot_be(datastore):
    pair = with_tokenizer("llama")
    with pytest.raises(UserError, match="max_match must be at least 9"):
        REST(pair, datastore, max_match=8, min_match=9)
    with pytest.raises(UserError, match=r"max_match=30 .*max_draft_tokens=10"):
        REST(pair, datastore, max_match=30)


# -- how it is made


def test_measured_texts_are_found_in_messages():
    long = "Explain in one sentence why the sky over the sea is blue."
    answer = "Because air scatters the short waves of light more than long ones."
    questions = [
        Question(1, "qa", ("Who wrote Hamlet?", long), [answer, "Yes."], "qa"),
        Question(2, "qa", ("One more?",), None, "qa"),
    ]
    measured = MeasuredTexts(questions)
    assert len(long.split()) > WORDS and len(answer.split()) > WORDS
    same = (long.lower(), long[:-1], f'"{long}"', f"User:{long}")
    for text in (long, f"Please: {long} Now.", long.replace(" ", "\n "), answer, f"Well. {answer}", *same):
        assert measured.in_text(text)
    assert measured.in_text("Who wrote  Hamlet?") and measured.in_text("One more?")
    for text in ("Who wrote Hamlet? Tell me.", "Yes.", long[:-6], ""):
        assert not measured.in_text(text)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("make")
    save_pair(folder)
    asked = "What is the name of the old man by the sea?"
    talks = [
        ["Hello.", "Good day to you."],
        ["And?", "So."],
        [asked, "Nobody knows."],
        ["Who?", f"He. {asked} He."],
    ]
    rows = [
        {"messages": [{"role": r, "content": t} for r, t in zip(("user", "assistant"), talk)]}
        for talk in talks
    ]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    question = {"question_id": 1, "category": "qa", "turns": [asked]}
    (folder / "q.jsonl").write_text(json.dumps(question) + "\n")
    return folder


def settings(workplace, out, *more: str):
    overrides = [
        f"pair.target={workplace}/target",
        f"pair.tokenizer={workplace}/target",
        "pair.device=cpu",
        f"data.path={workplace}/q.jsonl",
        f"conversations={workplace}/talk.jsonl",
        f"out={out}",
    ]
    return composed("train_rest", *overrides, *more)


def test_conversations_become_a_datastore_without_what_is_measured(workplace, tmp_path):
    cfg = settings(workplace, tmp_path)
    folder = train(cfg)
    pair = load_pair(cfg.pair, 0, with_draft=False)
    talk = [json.loads(line)["messages"] for line in (workplace / "talk.jsonl").read_text().splitlines()]
    expected = [ids for messages in talk[:2] for ids, _ in tokenizer_of(pair)(messages)]
    index, record = load_datastore(folder, pair), json.loads((folder / RECORD).read_text())
    assert index.tokens.tolist() == [token for ids in expected for token in (*ids, index.separator)]
    assert record["left_out"] == 2 and record["data"].startswith("sha256:") and record["rows"] == 2
    part = train(settings(workplace, tmp_path / "part", f"tokens={len(expected[0]) + 3}"))
    kept = load_datastore(part, pair).tokens.tolist()
    assert kept == [*expected[0], index.separator, *expected[1][:3], index.separator]
    with pytest.raises(UserError, match="tokens="):
        train(settings(workplace, tmp_path, "conversations=null"))


MAKERS = ("train_rest", "train_medusa", "states", "answer")
BENCHMARKS = {"tiny": "tiny", "tiny_wide_draft": "tiny", "vicuna-7b": "spec_bench"}


@pytest.mark.parametrize(
    ("name", "pair", "data"),
    [
        # Each maker of something, and each pair, is among the fast ones.
        pytest.param(name, pair, data, marks=[pytest.mark.slow] * (i % len(BENCHMARKS) != j))
        for i, name in enumerate(MAKERS)
        for j, (pair, data) in enumerate(BENCHMARKS.items())
    ],
)
def test_text_is_cleared_of_the_questions_that_fit_its_pair(name, pair, data):
    assert composed(name, f"pair={pair}").data.name == data
    assert composed(name, f"pair={pair}", "data=specttsbench").data.name == "specttsbench"


def test_a_datastore_is_not_made_without_the_questions(workplace, tmp_path):
    gone = ("data.name=elsewhere", "data.path=null", "data.url=http://127.0.0.1:1/question.jsonl")
    with pytest.raises(UserError, match="cannot download"):
        train(settings(workplace, tmp_path / "out", *gone))
    assert not (tmp_path / "out").exists()


def test_a_datastore_is_made_without_the_targets_weights(workplace, tmp_path):
    """They are not even there; the stop token that only the generation config names is known all the same."""
    bare = tmp_path / "bare"
    shutil.copytree(workplace, bare)
    (bare / "target" / "model.safetensors").unlink()
    generation = json.loads((bare / "target" / "generation_config.json").read_text()) | {
        "eos_token_id": [257, 5]
    }
    (bare / "target" / "generation_config.json").write_text(json.dumps(generation))
    folder = train(settings(bare, tmp_path / "out"))
    pair = load_pair(settings(bare, tmp_path).pair, 0, with_draft=False, weights=False)
    assert pair.stop_ids == {257, 5} and pair.target.device.type == "meta"
    assert load_datastore(folder, pair).tokens.size
    with pytest.raises(UserError, match="cannot load"):
        load_pair(settings(bare, tmp_path).pair, 0, with_draft=False)


def test_the_shipped_datastore_is_whole_and_knows_no_question():
    tokenizer = load_tokenizer(ROOT / "specbench" / "tiny" / "weights" / "tokenizer")
    pair = SimpleNamespace(name="tiny", vocab_size=len(tokenizer), tokenizer=tokenizer)
    index, record = load_datastore(SHIPPED, pair), json.loads((SHIPPED / RECORD).read_text())
    assert record["tokens"] > 100_000
    tokens = np.array(index.tokens)
    assert (np.array(index.positions) == suffix_array(tokens)).all()
    text = tokenizer.decode(tokens[tokens != index.separator])
    questions = read_questions(ROOT / "specbench" / "tiny" / "questions.jsonl", TASKS)
    assert len(questions) > 200
    for question in questions:
        assert not any(turn in text for turn in question.turns if len(turn.split()) >= WORDS)
        for turn in question.turns:  # as it is asked: between the marks of its role
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
            )
            n = min(len(ids) - 1, 32)
            assert index.longest(ids[1:], n, n) is None


# -- what is drafted


def test_the_longest_match_drafts_the_most_frequent_nodes(tmp_path):
    pair = with_tokenizer("llama")
    rows = [[1, 2, 3, 10, 11], [1, 2, 3, 10, 12], [1, 2, 3, 13], [9, 2, 3, 14], [9, 2, 3, 14], [9, 2, 3, 14]]
    folder = str(save_datastore(tmp_path, rows, pair))

    def draft(tokens: list[int], limit: int = 9, nodes: int = 9, **options) -> tuple[list[int], list[int]]:
        drafter = REST(pair, folder, **({"nodes": 9} | options))
        batch = SimpleNamespace(
            sequences=[SimpleNamespace(tokens=tokens)],
            limits=[limit],
            max_nodes=nodes,
            tokens=SimpleNamespace(device=torch.device("cpu")),
        )
        made = drafter.draft(batch)
        return made.tokens[0].tolist(), [] if made.tree is None else made.tree.parents[0].tolist()

    assert draft([1, 2, 3]) == ([10, 13, 11, 12], [-1, -1, 0, 0])
    assert draft([4, 2, 3]) == ([14, 10, 13, 11, 12], [-1, -1, -1, 1, 1])
    assert draft([4, 2, 3], nodes=2) == ([14, 10], [-1, -1])
    assert draft([4, 2, 3], limit=1) == ([14, 10, 13], [-1, -1, -1])
    assert draft([1, 2, 3], max_match=2)[0][0] == 14
    assert draft([4, 3])[0] == [] and draft([4, 3], min_match=1)[0][0] == 14
    assert draft([70_000, 2, 3])[0][0] == 14 and draft([3, 70_000])[0] == []


@pytest.mark.slow
def test_lossless(datastore):
    pair, steps = with_tokenizer("llama"), []
    for turn, nodes in enumerate((1, 8, 30)):
        steps += assert_lossless("llama", REST(pair, datastore, nodes, min_match=1), third=turn)
    assert any(s.accepted < s.depth for s in steps) and any(s.depth < s.drafted for s in steps)
    assert any(s.accepted for s in steps)


@pytest.mark.slow
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, datastore):
    drafter = REST(with_tokenizer("llama"), datastore, 12, min_match=1)
    assert_lossless_with(scheduler, "llama", drafter, 3, alone=["drafted", "accepted"])


@pytest.mark.slow
def test_it_stops_anywhere(datastore):
    assert_stops_anywhere(lambda *_: REST(with_tokenizer("llama"), datastore))
