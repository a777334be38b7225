"""Texts that are looked through once, and what is said of parts whose text may hold measured questions."""

from __future__ import annotations

from specbench.data.contamination import BenchmarkNgrams, MeasuredTexts, Screen, uncleared_lines, words_of
from specbench.data.question_files import Question

ASKED = "Which old river runs slowly past the town of nine bridges?"


def test_a_part_that_was_cleared_of_other_questions_is_named():
    training = {
        "rest": {"questions": "a"},
        "weights": {"questions": "b"},
        "warm": {"questions": None},  # a run refuses a memory with a measured text
    }
    [line] = uncleared_lines(training, "b")
    assert line.startswith("text of rest was cleared of other questions")
    assert uncleared_lines(training, None) == []  # an older run does not tell which it measured


def test_a_part_of_which_no_record_tells_is_named():
    """Also where it is a stage before the last one that does not, or where nothing was looked for."""
    training = {
        "weights": {"questions": "b", "earlier": [{"questions": "b"}]},
        "draft": {"questions": "b", "earlier": [{"steps": 9}]},
        "rest": {"questions": None},
        "heads": {"steps": 9},
    }
    [line] = uncleared_lines(training, "b")
    assert line.startswith("text of draft, rest, heads may hold these questions: no record says")
    changed = training | {"draft": {"questions": "b", "earlier": [{"questions": "a"}]}}
    other, unknown = uncleared_lines(changed, "b")
    assert "text of draft was cleared of other questions" in other and "text of rest, heads" in unknown


def talk(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_source_is_looked_through_once_by_all_that_read_it(monkeypatch):
    """By readers that take turns, too: each is given what a look at every conversation would leave."""
    looked_at = []

    def in_messages(self, messages) -> bool:
        looked_at.append(messages[0]["content"])
        return messages[0]["content"] == ASKED

    monkeypatch.setattr(MeasuredTexts, "in_messages", in_messages)
    texts = ["a", ASKED, "b", "c", ASKED, "d"]
    screen = Screen(MeasuredTexts([Question(1, "qa", (ASKED,), None, "qa")]))
    first, second = (screen.cleared(map(talk, texts)) for _ in range(2))
    assert [next(first)[0], next(second)[0], next(second)[0], next(first)[0]] == [0, 0, 2, 2]
    assert not screen.is_complete
    assert [number for number, _ in second] == [number for number, _ in first] == [3, 5]
    assert looked_at == texts and screen.left_out == {1, 4} and screen.is_complete


def test_what_a_question_is_about_is_found_behind_another_instruction():
    article = " ".join(f"word{i}" for i in range(60))
    turns = (
        f"Summarize: {article}",
        "Translate German to English: Der Hund lief gestern durch den alten Park.",
    )
    measured = MeasuredTexts([Question(i, "qa", (turn,), None, "qa") for i, turn in enumerate(turns)])
    for text in (
        f"{article} TL;DR",
        f"Give the gist of this: {article[:300]}",
        "Please translate: der Hund lief gestern durch den alten Park",
    ):
        assert measured.in_messages(talk(text)), text
    assert not measured.in_messages(talk(f"Summarize: {article[100:300]}"))
    assert not measured.in_messages(talk("Translate German to English: Der Hund lief weg."))


def test_what_the_user_said_before_a_question_is_measured_text_and_a_system_message_is_not():
    texts = [
        f"{role} " + " ".join(f"{role}{i}" for i in range(20)) for role in ("system", "user", "assistant")
    ]
    history = tuple({"role": text.split()[0], "content": text} for text in texts)
    question = Question(1, "qa", ("Why?",), None, "qa", history)
    for finder in (MeasuredTexts([question]).in_messages, in_ngrams(BenchmarkNgrams([question]))):
        assert [finder(talk(text)) for text in texts] == [False, True, False]


def in_ngrams(ngrams: BenchmarkNgrams):
    return lambda messages: ngrams.in_text(messages[0]["content"])


def test_a_question_is_found_within_a_message_of_a_script_without_spaces():
    asked = "法国的首都是哪里?"
    measured = MeasuredTexts([Question(1, "qa", (asked,), None, "qa")])
    assert measured.in_messages(talk(f"请回答: {asked}")) and not measured.in_messages(
        talk("德国的首都是哪里?")
    )
    assert words_of("C\u0327a va-t-il, GPT4?") == ("ça", "va", "t", "il", "gpt4")
    assert words_of("東京 2020") == ("東", "京", "2020")


def test_a_question_without_words_matches_no_message():
    questions = [Question(1, "qa", ("???",), None, "qa"), Question(2, "qa", ("",), None, "qa")]
    assert not MeasuredTexts(questions).in_text("!") and not BenchmarkNgrams(questions).in_text("")
