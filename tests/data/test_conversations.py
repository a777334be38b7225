"""Conversations as training text: where they come from, what is masked, how rows are packed."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from specbench.data.conversations import batched, conversations, packed_rows, parse, shuffled, tokenizer_of
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.models import byte_tokenizer, save_pair

NOWHERE = OmegaConf.create({"name": "mine", "training": None})


def write(path, texts) -> str:
    rows = [{"messages": [{"role": r, "content": text} for r in ("user", "assistant")]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_held_out_conversations_are_never_trained_on(tmp_path):
    file = write(tmp_path / "a.jsonl", [str(i) for i in range(120)])
    trained = [m[0]["content"] for m in islice(conversations(file, NOWHERE, 0), 117 * 2)]
    held_out = [m[0]["content"] for m in islice(conversations(file, NOWHERE, 0, held_out=True), 3)]
    assert sorted(held_out, key=int) == ["0", "50", "100"]
    assert not set(trained) & set(held_out)
    first, second = trained[:117], trained[117:]
    assert sorted(first) == sorted(second) and first != second  # every pass is whole, in another order
    assert trained == [m[0]["content"] for m in islice(conversations(file, NOWHERE, 0), 234)]
    assert trained != [m[0]["content"] for m in islice(conversations(file, NOWHERE, 1), 234)]


def test_the_embedded_pairs_own_text_differs_when_held_out():
    cfg = OmegaConf.create({"name": "tiny", "training": {"_target_": "specbench.tiny.data.conversations"}})
    one, other = (list(islice(conversations(None, cfg, 0, held_out), 20)) for held_out in (False, True))
    assert one != other and all(m[0]["role"] == "user" and m[1]["role"] == "assistant" for m in one)


@given(st.lists(st.integers(), max_size=3000, unique=True))
def test_shuffling_loses_nothing(rows):
    assert sorted(shuffled(rows, random.Random(0))) == sorted(rows)


def test_conversations_are_masked_turn_by_turn(tmp_path):
    pair = load_pair(save_pair(tmp_path), 0, with_draft=False)
    turns = [("human", "a?"), ("gpt", "bb"), ("human", "c?"), ("gpt", "dd")]
    row = {"conversations": [{"from": f, "value": v} for f, v in turns]}
    (tmp_path / "sharegpt.jsonl").write_text((json.dumps(row) + "\n") * 2)
    messages = next(conversations(str(tmp_path / "sharegpt.jsonl"), NOWHERE, 0))
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
        next(conversations(str(tmp_path / "bad.jsonl"), NOWHERE, 0))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        next(conversations("missing.jsonl", NOWHERE, 0))
    with pytest.raises(UserError, match="nobody/nothing-of-the-kind"):
        next(conversations("nobody/nothing-of-the-kind", NOWHERE, 0))
    with pytest.raises(UserError, match="too few"):
        next(conversations(write(tmp_path / "one.jsonl", ["only"]), NOWHERE, 0))


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


def test_an_answer_that_was_cut_has_no_stop_token_to_learn(tmp_path):
    pair = load_pair(save_pair(tmp_path), 0, with_draft=False)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    row["messages"][1]["complete"] = False
    [(cut, cut_weights)] = tokenizer_of(pair)(parse(row))
    del row["messages"][1]["complete"]
    [(ids, weights)] = tokenizer_of(pair)(parse(row))
    assert ids[:-1] == cut and ids[-1] in pair.stop_ids and weights[:-1] == cut_weights
