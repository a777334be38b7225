"""Conversations as training text: where they come from, what is masked, how rows are packed."""

from __future__ import annotations

import json
import random
from itertools import islice
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from specbench.data.contamination import MeasuredTexts
from specbench.data.conversations import (
    batched,
    check_conversations,
    conversations,
    count_left_out,
    data_set_of,
    end_of_answer,
    is_file,
    packed_rows,
    parse,
    read,
    shuffled,
    tokenizer_of,
)
from specbench.data.training_folder import data_of
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.models import byte_tokenizer, save_pair

NOWHERE = OmegaConf.create({"name": "mine", "training": None})


def write(path, texts) -> str:
    rows = [{"messages": [{"role": r, "content": text} for r in ("user", "assistant")]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(source: str | None, pair=NOWHERE, **more):
    """What reads conversations, with nothing to leave out."""
    return OmegaConf.create({"conversations": source, "pair": pair, "seed": 0, "split": "train"} | more)


def some(source: str | None, held_out: bool = False, **more):
    return conversations(settings(source, **more), held_out)


def test_held_out_conversations_are_never_trained_on(tmp_path):
    file = write(tmp_path / "a.jsonl", [str(i) for i in range(120)])
    trained = [m[0]["content"] for m in islice(some(file), 117 * 2)]
    held_out = [m[0]["content"] for m in islice(some(file, held_out=True), 3)]
    assert sorted(held_out, key=int) == ["0", "50", "100"]
    assert not set(trained) & set(held_out)
    first, second = trained[:117], trained[117:]
    assert sorted(first) == sorted(second) and first != second  # every pass is whole, in another order
    assert trained == [m[0]["content"] for m in islice(some(file), 234)]
    assert trained != [m[0]["content"] for m in islice(some(file, seed=1), 234)]


def test_the_embedded_pairs_own_text_differs_when_held_out():
    cfg = OmegaConf.create({"name": "tiny", "training": {"_target_": "specbench.tiny.data.conversations"}})
    one, other = (list(islice(some(None, held_out, pair=cfg), 20)) for held_out in (False, True))
    assert one != other and all(m[0]["role"] == "user" and m[1]["role"] == "assistant" for m in one)


@given(st.lists(st.integers(), max_size=3000, unique=True))
def test_shuffling_loses_nothing(rows):
    assert sorted(shuffled(rows, random.Random(0))) == sorted(rows)


def test_conversations_are_masked_turn_by_turn(tmp_path):
    pair = load_pair(save_pair(tmp_path), 0, with_draft=False)
    turns = [("human", "a?"), ("gpt", "bb"), ("human", "c?"), ("gpt", "dd")]
    row = {"conversations": [{"from": f, "value": v} for f, v in turns]}
    (tmp_path / "sharegpt.jsonl").write_text((json.dumps(row) + "\n") * 2)
    messages = next(some(str(tmp_path / "sharegpt.jsonl")))
    [(ids, weights)] = tokenizer_of(pair, prompt_weight=0.2)(messages)
    assert pair.tokenizer.decode(ids) == "<s><user>a?<assistant>bb</s><user>c?<assistant>dd</s>"
    said = [i for i, w in zip(ids, weights) if w == 1.0]
    assert pair.tokenizer.decode(said) == "bb</s>dd</s>"
    assert weights[0] == 0.0 and set(weights[1:]) == {0.2, 1.0}  # BOS stays in, and nothing predicts it


def test_turns_that_the_template_writes_anew_become_rows_of_their_own(tmp_path):
    """Qwen3's template ends a prompt with an empty thought, and leaves it out once the turn is history."""
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[a]<think></think>{% endif %}"
    )
    pair = load_pair(save_pair(tmp_path, byte_tokenizer(template)), 0, with_draft=False)
    turns = [("user", "q?"), ("assistant", "bb"), ("user", "r?"), ("assistant", "dd")]
    rows = tokenizer_of(pair)([{"role": role, "content": text} for role, text in turns])
    texts = [pair.tokenizer.decode(ids) for ids, _ in rows]
    assert texts == [
        "<s>[u]q?[a]<think></think>bb</s>",
        "<s>[u]q?[a]bb</s>[u]r?[a]<think></think>dd</s>",
    ]
    said = [[i for i, w in zip(ids, weights) if w == 1.0] for ids, weights in rows]
    assert [pair.tokenizer.decode(ids) for ids in said] == ["bb</s>", "dd</s>"]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("gpt human gpt", "user assistant"),
        ("system gpt human chatgpt", "system user assistant"),
        ("human human gpt", "user"),
        ("human gpt gpt human", "user assistant"),
        ("gpt", ""),
    ],
)
def test_conversations_are_cut_to_turns_that_alternate(told, kept):
    messages = parse({"conversations": [{"from": role, "value": "x"} for role in told.split()]})
    assert " ".join(message["role"] for message in messages) == kept


def test_a_message_without_text_ends_a_conversation():
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None}]}
    assert [message["role"] for message in parse(row)] == ["user"]


@pytest.mark.parametrize("row", ["{]", '{"messages": [{"role": "user"}]}', '{"text": "?"}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path, row):
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n' + row + "\n")
    with pytest.raises(UserError, match=r"bad\.jsonl.*line 2"):
        next(some(str(tmp_path / "bad.jsonl")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        ('{"text": "?"}\n', 'line 1: not a conversation: it needs "messages" of .* or "conversations" of'),
    ],
)
def test_a_file_of_nothing_or_of_another_form_is_told_when_it_is_checked(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"bad\.jsonl.*{message}"):
        check_conversations(settings(str(tmp_path / "bad.jsonl")))


def test_bytes_that_are_no_text_are_named(tmp_path):
    bad = b'{"messages": [{"role": "user", "content": "\xff"}]}'
    (tmp_path / "bad.jsonl").write_bytes(b'{"messages": []}\n' + bad)
    with pytest.raises(UserError, match=r"bad\.jsonl.*line 2: not a conversation .*Unicode"):
        next(some(str(tmp_path / "bad.jsonl")))


def test_half_of_a_surrogate_pair_is_named(tmp_path):
    """A whole one is text."""
    text = '{"messages": [{"role": "user", "content": "%s"}]}'
    (tmp_path / "bad.jsonl").write_text("\n".join(text % half for half in (r"\ud83d\ude00", r"\ud83d")))
    rows = read(str(tmp_path / "bad.jsonl"))
    assert next(rows) == [{"role": "user", "content": "\U0001f600"}]
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: not a conversation .*surrogates"):
        next(rows)


def test_conversations_that_the_project_brings_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "specbench/smollm2/conversations.jsonl"
    assert is_file(source) and len(next(read(source))) >= 2


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        next(some("missing.jsonl"))
    with pytest.raises(UserError, match="nobody/nothing-of-the-kind"):
        next(some("nobody/nothing-of-the-kind"))
    with pytest.raises(UserError, match="too few"):
        next(some(write(tmp_path / "one.jsonl", ["only"])))


def test_answers_without_text_are_no_answers(tmp_path):
    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": " "}]}
    file = tmp_path / "empty.jsonl"
    file.write_text(3 * (json.dumps(row) + "\n"))
    with pytest.raises(UserError, match="in which the assistant says anything"):
        list(islice(some(str(file)), 9))


@pytest.mark.parametrize(("source", "revision"), [("a/set", None), ("a/set@old", "old")])
def test_a_data_set_is_read_and_known_by_its_commit(monkeypatch, source, revision):
    requested, read_at = [], []

    def dataset_info(_, name, revision, timeout):
        requested.append((name, revision))
        return SimpleNamespace(sha="c0ffee")

    def load_dataset(name, revision, split, streaming):
        read_at.append((name, revision))
        return [{"messages": [{"role": "user", "content": "Why?"}]}]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data_set_of.cache_clear()
    assert [one[0]["content"] for one in read(source)] == ["Why?"]
    cfg = OmegaConf.create({"conversations": source, "split": "train"})
    assert data_of(cfg) == "a/set@c0ffee:train"
    assert requested == [("a/set", revision)] and read_at == [("a/set", "c0ffee")]
    data_set_of.cache_clear()


@given(st.lists(st.integers(1, 12), max_size=80))
def test_packing_keeps_every_row_that_fits_whole(lengths):
    rows = [([100 + n] * length, [1.0] * length) for n, length in enumerate(lengths)]
    packed = list(packed_rows(rows, 10, pad_id=0))
    found = []
    for ids, weights in packed:
        assert len(ids) == len(weights) == 10
        assert [w > 0 for w in weights] == [i > 0 for i in ids]
        found += [i for i in ids if i]
    assert sorted(found) == sorted(i for ids, _ in rows if len(ids) <= 10 for i in ids)
    batches = list(batched(iter(packed), 3))
    assert sum(len(b["input_ids"]) for b in batches) == len(packed)


def test_a_column_of_the_other_form_may_be_null():
    messages = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert parse({"messages": None, "conversations": messages}) == parse({"conversations": messages}) != []
    with pytest.raises(KeyError):
        parse({"messages": None})


def test_an_answer_that_was_cut_has_no_stop_token_to_learn(tmp_path):
    pair = load_pair(save_pair(tmp_path), 0, with_draft=False)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    row["messages"][1]["complete"] = False
    [(cut, cut_weights)] = tokenizer_of(pair)(parse(row))
    for complete in (True, None):  # null, as tables have it
        row["messages"][1]["complete"] = complete
        [(ids, weights)] = tokenizer_of(pair)(parse(row))
        assert ids[:-1] == cut and ids[-1] in pair.stop_ids and weights[:-1] == cut_weights
    del row["messages"][1]["complete"]
    assert tokenizer_of(pair)(parse(row)) == [(ids, weights)]


# -- a benchmark's text

ASKED = "Which old river runs slowly past the town of nine bridges?"


def benchmark(folder, turn: str = ASKED, **more) -> dict:
    """The groups `data` and `task` of a benchmark with one question."""
    path = folder / "question.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": [turn]}) + "\n")
    data = {"name": "elsewhere", "schema": "spec_bench", "path": str(path), "url": None, "sha256": None}
    return {"data": data | more, "task": {"name": "all", "tasks": {}}}


def test_conversations_with_a_text_of_the_benchmark_are_left_out(tmp_path, capsys):
    """Which of the others are held out, and their order in each epoch, depends on nothing else."""
    texts = [str(i) for i in range(120)]
    texts[7], texts[50] = f"Please: {ASKED}", ASKED
    cfg = settings(write(tmp_path / "a.jsonl", texts), **benchmark(tmp_path))
    trained = [m[0]["content"] for m in islice(conversations(cfg), 116 * 2)]
    assert sorted(trained[:116]) == sorted(trained[116:]) == sorted({*texts} - {"0", ASKED, "100", texts[7]})
    assert trained == [m[0]["content"] for m in islice(conversations(cfg), 116 * 2)]
    assert {m[0]["content"] for m in islice(conversations(cfg, held_out=True), 4)} == {"0", "100"}
    assert count_left_out(cfg) == 2 and "2 conversations hold a text of elsewhere" in capsys.readouterr().out
    assert count_left_out(settings(cfg.conversations)) is None


def test_each_conversation_is_looked_through_once(tmp_path, monkeypatch):
    """However often it is read, and by whom; a file that has changed is looked through anew."""
    texts, looked_at, in_messages = [str(i) for i in range(120)], [], MeasuredTexts.in_messages
    texts[7], texts[50] = f"Please: {ASKED}", ASKED
    cfg = settings(write(tmp_path / "a.jsonl", texts), **benchmark(tmp_path))

    def counted(self, messages) -> bool:
        looked_at.append(messages)
        return in_messages(self, messages)

    monkeypatch.setattr(MeasuredTexts, "in_messages", counted)
    for held_out in (True, False, False):
        list(conversations(cfg, held_out, epochs=3))
    assert count_left_out(cfg) == 2 and len(looked_at) == 120
    write(tmp_path / "a.jsonl", [*texts, ASKED])
    trained = {m[0]["content"] for m in conversations(cfg, epochs=2)}
    assert count_left_out(cfg) == 3 and len(looked_at) == 120 + 121 and ASKED not in trained
    other = settings(cfg.conversations, **benchmark(tmp_path, "119"))
    assert "119" not in {m[0]["content"] for m in conversations(other, epochs=1)}


def test_a_pairs_own_text_is_looked_through_as_well(tmp_path):
    tiny = OmegaConf.create({"name": "tiny", "training": {"_target_": "specbench.tiny.data.conversations"}})
    first, second = islice(some(None, pair=tiny), 2)
    cfg = settings(None, tiny, **benchmark(tmp_path, first[0]["content"]))
    assert next(conversations(cfg)) == second and count_left_out(cfg) is None


def test_a_file_of_benchmark_text_alone_says_what_is_lacking(tmp_path):
    cfg = settings(write(tmp_path / "a.jsonl", [ASKED] * 5), **benchmark(tmp_path))
    with pytest.raises(UserError, match="too few .*beside those with a text of elsewhere"):
        next(conversations(cfg))


def test_without_the_benchmark_a_line_says_so_and_nothing_is_left_out(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [ASKED] * 3)
    gone = {"path": None, "url": "http://127.0.0.1:1/question.jsonl"}
    cfg = settings(file, **benchmark(tmp_path, **gone))
    check_conversations(cfg)
    told = capsys.readouterr().err
    assert told.startswith("warning: conversations with a question of elsewhere are not left out")
    assert told.count("\n") == 1 and "data.path=FILE" in told
    assert next(conversations(cfg))[0]["content"] == ASKED and count_left_out(cfg) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"path": "/nowhere/question.jsonl"}, "no file '/nowhere"), ({"sha256": "0" * 64}, "another version")],
)
def test_a_benchmark_that_is_not_what_was_named_is_refused(tmp_path, wrong, message):
    cfg = settings(write(tmp_path / "a.jsonl", ["1", "2"]), **benchmark(tmp_path, **wrong))
    with pytest.raises(UserError, match=message):
        check_conversations(cfg)


def test_an_introduction_without_text_is_dropped():
    row = {"messages": [{"role": "system", "content": None}, {"role": "user", "content": "?"}]}
    assert [message["role"] for message in parse(row)] == ["user"]


def test_an_answer_ends_with_what_the_template_writes_after_it():
    """Some models end a turn with another token than their tokenizer's own end."""
    pair = SimpleNamespace(tokenizer=byte_tokenizer(), stop_ids=frozenset({2, 7}))
    pair.tokenizer.eos_token = pair.tokenizer.convert_ids_to_tokens(2)

    def prompt_ids(after: list[int]):
        def ids(messages: list[dict]) -> list[int]:
            parts = [
                [8, *pair.tokenizer.encode(one["content"], add_special_tokens=False)] for one in messages
            ]
            ended = [
                part + (after if one["role"] == "assistant" else [9]) for part, one in zip(parts, messages)
            ]
            return [token for part in ended for token in part] + [8]

        return ids

    for after, end in (([7, 5], 7), ([2], 2), ([5], 2), ([], 2)):
        pair.prompt_ids = prompt_ids(after)
        assert end_of_answer(pair) == [end]
    pair.stop_ids = frozenset()
    assert end_of_answer(pair) == []
