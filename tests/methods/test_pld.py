"""Prompt lookup: what it drafts, against each rule spelt out token by token, alone and in batches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from methods.pld import PromptLookup
from tests.support.decoding import random_pair
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with

MATCHES = ("earliest", "latest")
EVERY_MATCH = pytest.mark.parametrize("match", MATCHES)


def looked_up(text: list[int], **settings) -> list[int]:
    return PromptLookup(None, **settings)._look_up(np.array(text)).tolist()


def earliest(text: list[int], n: int, most: int) -> int | None:
    """Where the draft begins: after the first occurrence of the newest n tokens from which `most` tokens can be copied
    that begin in front of these n."""
    for start in range(n, len(text)):
        fits = start + most <= len(text) and start < len(text) - n
        if text[start - n : start] == text[-n:] and fits:
            return start
    return None


def latest(text: list[int], n: int, most: int) -> int | None:
    """Where the draft begins: after the last occurrence of the newest n tokens but for these themselves."""
    for start in range(len(text) - 1, n - 1, -1):
        if text[start - n : start] == text[-n:]:
            return start
    return None


@EVERY_MATCH
def test_the_draft_is_what_the_rule_finds(match):
    rule, rng, found = {"earliest": earliest, "latest": latest}[match], random.Random(7), 0
    for _ in range(4000):
        text = [rng.randrange(rng.choice((1, 2, 4, 9))) for _ in range(rng.randint(1, 40))]
        longest, most = rng.randint(1, 5), rng.choice((1, 2, 3, 5, 10))
        shortest = rng.randint(1, longest)
        expected: list[int] = []
        for n in range(longest, shortest - 1, -1):
            start = rule(text, n, most)
            if start is not None:
                expected = text[start : start + most]
                break
        drafted = looked_up(text, max_draft_tokens=most, max_ngram=longest, min_ngram=shortest, match=match)
        assert drafted == expected, (text, longest, shortest, most)
        found += len(expected) > 0
    assert 1000 < found < 3500


def test_the_first_occurrence_must_have_a_whole_draft_behind_it():
    text = [1, 2, 3, 4, 5, 6, 2, 9, 8, 2]
    first = {"match": "earliest", "max_ngram": 1}
    assert looked_up(text, max_draft_tokens=3, **first) == [3, 4, 5]
    assert looked_up(text, max_draft_tokens=8, **first) == [3, 4, 5, 6, 2, 9, 8, 2]
    assert looked_up(text, max_draft_tokens=9, **first) == []
    last = {"match": "latest", "max_ngram": 1}
    assert (
        looked_up(text, max_draft_tokens=3, **last)
        == looked_up(text, max_draft_tokens=9, **last)
        == [9, 8, 2]
    )


def test_where_a_long_ngram_has_too_little_behind_it_a_shorter_one_is_looked_for():
    text = [2, 7, 7, 7, 7, 1, 2, 9, 1, 2]
    assert looked_up(text, max_draft_tokens=4, match="earliest") == [7, 7, 7, 7]
    assert looked_up(text, max_draft_tokens=3, match="earliest") == [9, 1, 2]
    assert looked_up(text, max_draft_tokens=4, match="latest") == [9, 1, 2]


def test_the_author_s_rule_is_the_default():
    assert PromptLookup(None).earliest


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@EVERY_MATCH
@EVERY_SCHEDULER
def test_a_sequence_of_a_batch_drafts_as_alone(scheduler, match):
    drafter = PromptLookup(random_pair("llama"), 3, max_ngram=2, match=match)
    # How much of a batch's draft is padding differs, what is accepted does not.
    assert_lossless_with(scheduler, "llama", drafter, 3, alone=["accepted"])
