"""The world: the same seed gives the same text, and benchmark questions are not training questions."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest

from specbench.tiny import world
from specbench.tiny.data import conversations
from specbench.tiny.lexicon import Lexicon
from specbench.tiny.train import FULL, QUESTIONS, SHIPPED, WARMUP, write_questions


def test_a_seed_gives_the_same_examples():
    first = list(islice(world.training_examples(4), 30))
    assert first == list(islice(world.training_examples(4), 30))
    assert first != list(islice(world.training_examples(5), 30))


@pytest.mark.slow
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


@pytest.mark.nightly
@pytest.mark.slow
def test_training_text_holds_no_measured_turn():
    """Some of the text of every stage, and of what methods' parts are trained on, by the seeds of `make tiny`."""
    rows = [
        json.loads(line) for name in (QUESTIONS, WARMUP) for line in (SHIPPED / name).open(encoding="utf-8")
    ]
    measured = {turn for row in rows for turn in row["turns"]}
    measured |= {turn for e in world.benchmark_examples(world.HELD_OUT_SEED, 200) for turn in e.turns}
    trained: set[str] = set()
    for stage in FULL.stages:
        for example in islice(world.training_examples(stage.seed, stage.drills), 6000):
            trained.update(example.turns)
    for seed in (0, 20):
        for messages in islice(conversations(seed), 1000):
            trained.update(message["content"] for message in messages if message["role"] == "user")
    assert len(trained) > 20_000 and len(measured) > 1200
    assert not measured & trained


def test_one_text_in_eight_is_measured_with_and_leaving_it_out_changes_no_other_example(monkeypatch):
    texts = [turn for i in range(400) for turn in world.make_example("math", 3, i).turns]
    assert 0.08 < sum(map(world.is_measured, texts)) / len(texts) < 0.17
    some = list(islice(world.training_examples(12), 200))
    monkeypatch.setattr(world, "is_measured", lambda _: False)
    whole = list(islice(world.training_examples(12), 400))
    assert len(some) < len(whole)
    monkeypatch.undo()
    kept = [e for e in whole if not any(map(world.is_measured, e.turns))]
    assert kept[:200] == some[: len(kept)]


@pytest.mark.slow
def test_measured_examples_are_different_and_not_those_to_avoid():
    some = world.measured_examples("stem", 5, 12)
    more = world.measured_examples("stem", 5, 12, avoid=some)
    turns = [example.turns for example in [*some, *more]]
    assert len(set(turns)) == 24 and all(world.is_measured(turn) for both in turns for turn in both)
    asked = {example.turns for example in world.benchmark_examples()}
    assert len(asked) == 240 and not asked & {example.turns for example in world.warmup_examples()}


def test_a_world_with_too_few_questions_is_reported(monkeypatch):
    monkeypatch.setattr(world, "MOST_TRIES", 30)
    with pytest.raises(ValueError, match=r"stem: \d examples to measure with among 30, not 20"):
        world.measured_examples("stem", 5, 20)


def test_what_a_question_asks_for_is_known():
    _, facts = world.the_world()
    for kind in facts.by_kind.values():
        for entity in kind.items:
            assert facts.near(entity).kind == entity.kind and facts.near(entity) is not entity
            for number, (stem, _) in enumerate(entity.facts):
                assert facts.asked(stem.format(entity.name)) == (entity, number)
    with pytest.raises(KeyError):
        facts.asked("What is the time?")


@pytest.mark.slow
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


@pytest.mark.slow
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
