"""What is said of parts whose text was cleared of other questions."""

from __future__ import annotations

from specbench.data.contamination import uncleared_lines


def test_a_part_that_was_cleared_of_other_questions_is_named():
    training = {
        "rest": {"questions": "a"},
        "weights": {"questions": "b"},
        "draft": {"steps": 9},
        "warm": {"questions": None},
    }
    [line] = uncleared_lines(training, "b")
    assert line.startswith("text of rest was cleared of other questions")
    assert uncleared_lines(training, None) == []  # an older run does not tell which it measured
