"""What a target is asked when it writes conversations, and why a message is not kept."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from specbench import CONF
from specbench.data.contamination import WORDS, BenchmarkNgrams, words_of
from specbench.data.ngrams import distinct_share
from specbench.data.question_files import Question
from specbench.data.synthesis import (
    FIELD,
    LOOP,
    Filters,
    Kind,
    Material,
    first_sentence,
    kinds_of,
    loop_start,
)
from specbench.system.errors import UserError

PROSE = ("What is a ferry?", "A ferry is a boat. " + "It crosses the sea every day. " * 8)
OTHER = ("What is a lorry?", "A lorry is a car. " + "It brings bread to the island. " * 8)
TURN = "How many gulls does a class of school children draw on the old pier?"


def filters(**changed) -> Filters:
    settings = {"distinct": 0.0, "ascii": 0.0, "question_words": 1, "answer_tokens": 1, "benchmark": None}
    return Filters(**settings | changed)


def test_kinds_are_read_and_those_without_a_share_left_out():
    unused = {"share": 0, "templates": ["x {nothing}"], "follow_up": 1}
    kinds = kinds_of({"a": {"share": 2, "openings": [""]}, "b": unused, "c": None})
    assert kinds == [Kind("a", 2, ("",), (), 0.0)]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"a": {"share": 1}}, "kinds.a needs openings or templates"),
        ({"a": {"share": -1, "openings": [""]}}, r"kinds\.a\.share .*-1"),
        ({"a": {"share": 1, "opening": [""]}}, r"unknown key 'kinds\.a\.opening'.*openings"),
        ({"a": {"share": 1, "openings": [""], "follow_up": 2}}, r"kinds\.a\.follow_up .*2"),
        ({"a": {"share": 1, "templates": ["{txt}"]}}, r"kinds\.a has the field 'txt'.*text"),
        ({"a": {"share": 1, "templates": ["{b}"]}, "b": {"share": 0, "openings": [""]}}, "the field 'b'"),
        ({"a": {"share": 0, "openings": [""]}}, "share above 0"),
    ],
)
def test_a_wrong_kind_is_one_line(cfg, message):
    with pytest.raises(UserError, match=message):
        kinds_of(cfg)


def test_templates_are_filled_with_what_was_written():
    material, rng = Material(), random.Random(0)
    assert material.fill("Sum it up: {text}", rng) is None and material.fill("{chat}", rng) is None
    material.add("chat", *PROSE)
    assert material.fill("Sum it up: {text}", rng) == f"Sum it up: {PROSE[1]}"
    assert material.fill("{question} {sentence}", rng) == "What is a ferry? A ferry is a boat."
    assert material.fill("{text} {other}", rng) is None
    material.add("chat", *OTHER)
    seen = {material.fill("{text} | {other} | {question}", rng) for _ in range(30)}
    assert seen == {f"{a[1]} | {b[1]} | {a[0]}" for a, b in ((PROSE, OTHER), (OTHER, PROSE))}
    assert material.fill("Say {chat}", rng) in {f"Say {PROSE[1]}", f"Say {OTHER[1]}"}


def test_code_and_short_answers_are_quoted_by_their_kind_alone():
    material, rng = Material(), random.Random(0)
    material.add("coding", "Code?", "```" + PROSE[1])
    material.add("coding", "Code?", "Short.")
    assert material.fill("{text}", rng) is None and material.fill("{coding}", rng) is not None


def test_numbers_are_drawn_anew_each_time():
    filled = [Material().fill("{number} and {number}", random.Random(i)) for i in range(20)]
    pairs = [tuple(map(int, re.findall(r"\d+", text or ""))) for text in filled]
    assert all(2 <= n <= 200 for pair in pairs for n in pair) and any(a != b for a, b in pairs)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("One. Two.", "One."), ("A list:\n- x", "A list:"), ("Why? So.", "Why?"), ("x", "x")],
)
def test_the_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


@given(st.lists(st.integers(0, 5), max_size=40))
def test_the_distinct_share_counts_each_run_of_four_once(ids):
    runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    assert distinct_share(ids) == (len(set(runs)) / len(runs) if runs else 1.0)


@given(st.integers(0, 30), st.integers(4, 9), st.integers(0, 60))
def test_a_text_is_cut_where_it_begins_to_repeat_itself(before, period, more):
    fresh, cycle = list(range(100, 100 + before)), list(range(period))
    text = fresh + (cycle * 20)[: period + more]
    start = before + period + 3  # the first 4-gram that was there before ends with its fourth token
    assert loop_start(text) == (start if len(text) >= start + LOOP else None)


def test_each_filter_says_why():
    some = filters(distinct=0.7, ascii=0.9, question_words=2, answer_tokens=3)
    some.benchmark = BenchmarkNgrams([Question(1, "qa", (TURN,), None, "qa")])
    assert some.question("Why?", [1]) == "short question"
    assert some.question("Why is it?", [1, 2, 3]) is None
    assert some.question("why is IT", [1, 2, 3]) == "question asked before"
    assert some.question("A B C", [7] * 30) == "question: loop"
    assert some.question("Ünïcödé ägäïn öh", [1, 2, 3]) == "question: language"
    assert some.question(f"Please: {TURN}", [1, 2, 3]) == "question: words of the benchmark"
    assert some.answer("Yes.", [1, 2]) == "short answer"
    assert some.answer("Yes it is.", [7] * 30) == "answer: loop"
    assert some.answer(" ".join(TURN.split()[1 : 1 + WORDS]), [1, 2, 3]) == "answer: words of the benchmark"
    assert some.answer("Yes it is.", [1, 2, 3]) is None
    some.forget("Why is it?")
    assert some.question("Why is it?", [1, 2, 3]) is None


@given(st.integers(0, 20), st.integers(1, 20))
def test_eight_words_in_a_row_are_of_the_benchmark_and_seven_are_not(start, length):
    words = words_of(TURN)
    run = words[start : start + length]
    ngrams = BenchmarkNgrams([Question(1, "qa", (TURN,), None, "qa")])
    text = f"Other words, {' '.join(run).upper()}! More of them."
    assert ngrams.in_text(text) == (len(run) >= WORDS)


def test_a_short_turn_is_found_as_a_whole_message_alone():
    ngrams = BenchmarkNgrams([Question(1, "qa", ("Who are you?",), None, "qa")])
    assert ngrams.in_text("who are you") and not ngrams.in_text("Tell me, who are you?")


def test_the_kinds_that_come_along_can_all_be_filled():
    cfg = OmegaConf.to_container(OmegaConf.load(CONF / "converse.yaml").kinds)
    material = Material()
    for number, kind in enumerate(kinds_of(cfg)):
        material.add(kind.name, f"Question {number}?", f"{PROSE[1]} {number}")
    for kind in kinds_of(cfg):
        for template in kind.templates:
            text = material.fill(template, random.Random(0))
            assert text and not FIELD.search(text)
