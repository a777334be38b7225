"""The world: the same seed gives the same text, and benchmark questions are not training questions."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest

from specbench.tiny import world
from specbench.tiny.data import conversations
from specbench.tiny.lexicon import Lexicon
from specbench.tiny.train import FULL, QUESTIONS, ROW, SHIPPED, WARMUP, write_questions


def test_a_seed_gives_the_same_examples():
    first = list(islice(world.training_examples(4), 30))
    assert first == list(islice(world.training_examples(4), 30))
    assert first != list(islice(world.training_examples(5), 30))


def test_drills_are_a_share_of_the_training_stream_alone():
    assert not any(e.category == "drill" for e in islice(world.training_examples(4), 200))
    drilled = list(islice(world.training_examples(4, drills={"dictionary": 0.2, "copy_words": 0.15}), 1000))
    assert 0.3 < sum(e.category == "drill" for e in drilled) / 1000 < 0.4
    assert not any(e.category == "drill" for e in world.benchmark_examples())


def test_the_lexicon_follows_from_its_seed():
    one, same, other = Lexicon(3), Lexicon(3), Lexicon(4)
    assert one.nouns == same.nouns and one.people == same.people
    assert one.nouns != other.nouns


def test_invented_words_are_unique():
    lexicon = Lexicon(world.WORLD_SEED)
    for words in ([n.one for n in lexicon.nouns], lexicon.people, lexicon.places):
        assert len(words) == len(set(words))


@pytest.mark.slow
def test_training_text_holds_no_measured_question():
    """The whole text of every stage, and some of what methods' parts are trained on, by the seeds of `make tiny`."""
    rows = [
        json.loads(line) for name in (QUESTIONS, WARMUP) for line in (SHIPPED / name).open(encoding="utf-8")
    ]
    measured = {row["turns"][0] for row in rows}
    assert len(measured) == len(rows)
    trained = set()
    for stage in FULL.stages:
        tokens = stage.schedule.steps * stage.batch * ROW
        examples = islice(
            world.training_examples(stage.seed, stage.drills), tokens // 160
        )  # tokens of an example
        trained |= {example.turns[0] for example in examples}
    for seed in (0, 2, 4):
        trained |= {messages[0]["content"] for messages in islice(conversations(seed), 1000)}
    assert len(trained) > 30_000
    shared = measured & trained
    assert not shared


def test_leaving_questions_out_changes_no_other_example(monkeypatch):
    whole = list(islice(world.training_examples(12), 200))
    left_out = whole[20].turns[0]
    measured = world.measured_questions()
    monkeypatch.setattr(world, "measured_questions", lambda: measured | {left_out})
    rest = [example for example in whole if example.turns[0] != left_out]
    assert len(rest) < len(whole)
    assert list(islice(world.training_examples(12), len(rest))) == rest


def test_every_task_and_category_is_there():
    examples = world.benchmark_examples()
    assert {e.category for e in examples} == {*world.MT_BENCH, *world.TASKS}
    assert len(world.MT_BENCH) == 8 and len(world.TASK_NAMES) == 6
    for task in world.TASK_NAMES:
        assert sum(e.task == task for e in examples) == 40
    assert all(len(e.turns) == len(e.answers) == (2 if e.task == "mt_bench" else 1) for e in examples)


def test_an_unknown_category_is_refused():
    with pytest.raises(KeyError, match="poetry"):
        world.make_example("poetry", 1, 0)


def test_arithmetic_is_right():
    for index in range(50):
        for category in ("math", "math_reasoning"):
            for answer in world.make_example(category, 8, index).answers:
                words = answer.replace(".", " ").replace(":", " ").replace(",", " ").split()
                for at, word in enumerate(words):
                    if word == "=":
                        left, sign, right, total = *words[at - 3 : at], words[at + 1]
                        assert eval(f"{int(left)} {sign} {int(right)}") == int(total)


def test_shipped_questions_are_those_of_the_generator(tmp_path):
    write_questions(tmp_path / QUESTIONS, world.benchmark_examples())
    assert (tmp_path / QUESTIONS).read_bytes() == (SHIPPED / QUESTIONS).read_bytes()
    write_questions(tmp_path / WARMUP, world.warmup_examples(), first_id=9001)
    assert (tmp_path / WARMUP).read_bytes() == (SHIPPED / WARMUP).read_bytes()


def test_questions_have_the_schema_of_spec_bench():
    rows = [
        json.loads(line) for name in (QUESTIONS, WARMUP) for line in (SHIPPED / name).open(encoding="utf-8")
    ]
    assert len(rows) == 246
    assert len({row["question_id"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"question_id", "category", "turns", "reference"}
        assert len(row["turns"]) == len(row["reference"]) and all(map(str.strip, row["turns"]))
    grouped = [row["category"] for row in rows[:240]]
    assert sum(a != b for a, b in pairwise(grouped)) == len(set(grouped)) - 1
