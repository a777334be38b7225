"""Suffix automaton, suffix array and the trees of counts against plain searches of the text."""

from __future__ import annotations

import random
import time
from collections import Counter
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.common.counted_trees import likeliest, most_frequent
from methods.common.suffix_array import LOOKED_AT, READ, SORTED, Index, Interval, check_sorted, suffix_array
from methods.common.suffix_automaton import ROOT, Match, SuffixAutomaton
from specbench.system.errors import UserError

# Few different tokens, and periods: stretches that come again.
TEXT = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.builds(
        lambda period, n, tail: (period * n)[:60] + tail,
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.integers(1, 20),
        st.lists(st.integers(0, 3), max_size=5),
    ),
)

FEWER = settings(max_examples=50)  # of long texts


def ends(text: list[int], stretch: list[int]) -> list[int]:
    """The places after every occurrence."""
    n = len(stretch)
    return [i + n for i in range(len(text) - n + 1) if text[i : i + n] == stretch]


def longest_earlier(text: list[int]) -> int:
    """The length of the longest end of a text that occurs earlier in it."""
    return max(n for n in range(len(text)) if n == 0 or len(ends(text, text[-n:])) > 1)


# -- the automaton


@given(TEXT)
@FEWER
def test_the_longest_end_that_occurs_earlier_and_where(text):
    automaton = SuffixAutomaton()
    for known in (text[: i + 1] for i in range(len(text))):
        automaton.append(known[-1])
        length, end = automaton.earlier_match()
        assert length == longest_earlier(known)
        if length:
            assert end == ends(known, known[-length:])[0]
    assert automaton.tokens == text and len(automaton.link) <= 2 * len(text) + 1


@given(TEXT, st.integers(1, 8))
def test_occurrences_are_counted_up_to_the_depth(text, depth):
    automaton = SuffixAutomaton(depth)
    for known in (text[: i + 1] for i in range(len(text))):
        automaton.append(known[-1])
        # A token touches no more states than that.
        assert automaton.length[automaton.link[automaton._counted]] < depth
    for start in range(len(text)):
        state = ROOT
        for n, token in enumerate(text[start : start + depth], 1):
            state = automaton.following[state][token]
            assert automaton.occurrences[state] == len(ends(text, text[start : start + n]))


@given(TEXT, st.integers(1, 8), st.integers(0, 4))
@FEWER
def test_every_end_that_occurs_earlier_is_proposed_once_per_state(text, longest, more):
    automaton = SuffixAutomaton(longest + more)
    for known in (text[: i + 1] for i in range(len(text))):
        automaton.append(known[-1])
        found = list(automaton.earlier(longest))
        lengths = [length for _, length in found]
        assert lengths == sorted(set(lengths), reverse=True)
        assert (lengths[0] if lengths else 0) == min(longest_earlier(known), longest)
        places = []
        for state, length in found:
            followed = Counter(known[end] for end in ends(known, known[-length:]) if end < len(known))
            if more:
                assert {token: n for token, _, n in automaton.followers(state)} == followed
            assert {token for token, _, _ in automaton.followers(state)} == set(followed)
            places.append(ends(known, known[-length:]))
        # A shorter end that is not proposed occurs where a longer one does.
        for n in range(1, lengths[0] if lengths else 0):
            assert n in lengths or ends(known, known[-n:]) in places


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT, st.integers(1, 8), st.randoms())
@FEWER
def test_a_match_in_an_automaton_that_grows(texts, looked_up, longest, rng):
    automaton, whole = SuffixAutomaton(longest + 2), []
    separators = count(-1, -1)
    match, known = Match(automaton, longest), []
    # A match may be shorter than what is there by now: it began before that was added.
    waiting = [text for text in texts]
    growing = waiting.pop()
    automaton.extend(growing)
    automaton.separate()
    whole += [*growing, next(separators)]
    assert automaton.tokens == whole
    for token in looked_up:
        if waiting and rng.random() < 0.2:
            automaton.extend(new := waiting.pop())
            automaton.separate()
            whole += [*new, next(separators)]
        before = match.length
        match.append(token)
        known.append(token)
        n = match.length
        assert n <= longest and (n == 0 or ends(whole, known[-n:]))
        # It is as long as can be after the match before.
        assert not any(ends(whole, known[-m:]) for m in range(n + 1, min(before + 1, longest) + 1))
        shares = {}
        for state, length in match.stretches():
            followed = Counter(whole[end] for end in ends(whole, known[-length:]) if end < len(whole))
            shares[length] = {token: n for token, _, n in automaton.followers(state)}
            assert shares[length] == {token: n for token, n in followed.items() if token >= 0}
        assert max(shares, default=0) == n
    if not waiting and len(texts) == 1:
        expected = max(m for m in range(min(longest, len(known)) + 1) if m == 0 or ends(whole, known[-m:]))
        assert match.length == expected


def test_a_token_takes_constant_time_on_average():
    """Also in a text of one token, and in one that repeats itself: states that are passed are paid for before."""
    rng = random.Random(1)
    for text in ([5] * 20_000, [1, 2, 3, 1, 2] * 4_000, [rng.randrange(50) for _ in range(20_000)]):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert len(automaton.link) <= 2 * len(text)
        assert sum(map(len, automaton.following)) <= 3 * len(text)


# -- the suffix array


def index(text: list[int], kind: str = ">u2") -> Index:
    tokens = np.array(text, dtype=kind)
    return Index(tokens, suffix_array(tokens), int(np.iinfo(tokens.dtype).max))


SEPARATOR = 2**16 - 1
TOKEN = st.sampled_from([0, 1, 255, 256])  # also where the second byte decides
STORED = st.lists(st.lists(TOKEN, min_size=1, max_size=40), min_size=1, max_size=4).map(
    lambda rows: [token for row in rows for token in (*row, SEPARATOR)]
)


@given(STORED)
def test_places_are_sorted_by_what_stands_there(text):
    places = suffix_array(np.array(text, dtype=">u2")).tolist()
    assert places == sorted(range(len(text)), key=lambda i: (text[i : i + SORTED], i))


def test_places_are_sorted_as_deep_as_is_said_and_no_deeper():
    text = [*[7] * SORTED, 1, *[7] * SORTED, 0, 9]
    places = suffix_array(np.array(text, dtype=">u4")).tolist()
    key = [text[i : i + SORTED] for i in places]
    assert key == sorted(key)
    check_sorted(SORTED - 4, 4)
    with pytest.raises(UserError, match=f"{SORTED}"):
        check_sorted(SORTED - 4, 5)


@given(STORED, st.lists(TOKEN, min_size=1, max_size=12), st.sampled_from([">u2", ">u4"]))
@FEWER
def test_look_ups_are_exact(text, looked_up, kind):
    if kind == ">u4":
        text = [2**32 - 1 if token == SEPARATOR else token for token in text]
    found = index(text, kind)
    n = len(looked_up)
    where = found.longest(looked_up, n, n)
    assert (0 if where is None else where.occurrences) == len(ends(text, looked_up))
    for most, least in ((12, 1), (3, 1), (5, 3)):
        fitting = [n for n in range(least, most + 1) if n <= len(looked_up) and ends(text, looked_up[-n:])]
        where = found.longest(looked_up, most, least)
        assert (None if where is None else where.length) == (max(fitting) if fitting else None)
        if where is None:
            continue
        tails = ends(text, looked_up[-where.length :])
        assert where.occurrences == len(tails)
        followed = Counter(text[end] for end in tails if text[end] != found.separator)
        behind = found.followers(where, 300)
        assert {token: place.occurrences for token, place in behind} == followed
        counts = [(-place.occurrences, token) for token, place in behind]
        assert counts == sorted(counts)
        assert found.followers(where, 2) == behind[:2]
        for token, place in behind:
            assert place.length == where.length + 1
            assert {int(found.positions[i]) + where.length for i in range(place.first, place.after)} == {
                end for end in tails if text[end] == token
            }


def test_what_cannot_be_a_token_of_the_text_is_not_found():
    found = index([1, 2, 3, SEPARATOR])
    assert found.longest([70_000], 1) is found.longest([2, SEPARATOR], 2, 2) is None
    assert found.longest([70_000, 2], 5).length == 1 and found.longest([2, 70_000], 5) is None
    assert found.longest([2, 3], 5, least=3) is None and found.followers(found.longest([3], 1), 8) == []


def test_every_frequent_follower_is_seen_and_its_count_is_exact():
    """In an interval that is too large to be read as a whole, at any place."""
    rng = random.Random(3)
    text = [token for _ in range(6_000) for token in (9, min(int(rng.expovariate(0.08)), 200) + 10)]
    found = index([*text, SEPARATOR])
    where, followed = found.longest([9], 1), Counter(text[1::2])
    assert where.occurrences == 6_000 > 5 * READ
    behind = {token: place.occurrences for token, place in found.followers(where, 300)}
    assert all(followed[token] == n for token, n in behind.items())
    assert {token for token, n in followed.items() if n >= where.occurrences / LOOKED_AT} <= set(behind)


ROWS = st.integers(1, 6).flatmap(
    lambda depth: st.lists(
        st.lists(st.sampled_from([0, 1, 2, 3, SEPARATOR]), min_size=depth, max_size=depth),
        min_size=1,
        max_size=40,
    )
)


@given(ROWS, st.integers(1, 40), st.integers(1, 4))
@FEWER
def test_a_tree_that_is_built_at_once_is_that_of_one_node_after_the_other(rows, nodes, children):
    """With fractions, which no rounding puts in another order."""
    rows = sorted(rows)

    def followers(place: tuple[int, ...], above: int):
        own = [row for row in rows if tuple(row[:above]) == place]
        found = Counter(row[above] for row in own)
        total = len(own)
        best = sorted(found.items(), key=lambda one: (-one[1], one[0]))
        inside = [one for one in best if one[0] != SEPARATOR][:children]
        return [(token, (*place, token), Exact(Fraction(count, total))) for token, count in inside]

    expected = likeliest((), followers, nodes, len(rows[0]))
    found = most_frequent(np.array(rows).T, SEPARATOR, nodes, children)
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert found.score == pytest.approx(expected.score)


class Exact(Fraction):
    """A fraction whose product with a float is one, too."""

    def __rmul__(self, other):
        return Exact(Fraction(other) * Fraction(self))

    def __mul__(self, other):
        return self.__rmul__(other)

    def __neg__(self):
        return Exact(-Fraction(self))


@pytest.mark.slow
def test_a_million_tokens_are_sorted_in_a_minute_and_looked_up_in_no_time():
    rng = np.random.default_rng(0)
    tokens = (rng.zipf(1.3, 1_000_000) % 30_000).astype(">u2")
    begun = time.perf_counter()
    found = Index(tokens, suffix_array(tokens), SEPARATOR)
    assert time.perf_counter() - begun < 60
    places = rng.integers(20, len(tokens), 300).tolist()
    contexts = [tokens[place - 20 : place].tolist() for place in places]
    taken = []
    for context in contexts:
        begun = time.perf_counter()
        where = found.longest(context, 16)
        taken.append(time.perf_counter() - begun)
        assert where.length == 16
    assert sorted(taken)[len(taken) // 2] < 1e-3, "ten times what it takes"


# -- trees of counts


@given(st.integers(1, 12), st.integers(1, 4), st.randoms())
@settings(max_examples=40)
def test_the_likeliest_nodes_are_those_of_an_enumeration(nodes, depth, rng):
    shares: dict[tuple[int, ...], float] = {}

    def fill(path: tuple[int, ...], product: float) -> None:
        for token in range(rng.randint(0, 3)) if len(path) < 5 else ():
            shares[*path, token] = product * rng.random()
            fill((*path, token), shares[*path, token])

    fill((), 1.0)

    def followers(path: tuple[int, ...], above: int) -> list:
        assert above == len(path)
        parent = shares.get(path, 1.0)
        below = [p for p in shares if p[:-1] == path]
        return [(p[-1], p, shares[p] / parent) for p in below]

    for least in (0.0, 0.2):
        tree = likeliest((), followers, nodes, depth, least)
        paths = []
        for token, parent in zip(tree.tokens, tree.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        fitting = [p for p in shares if len(p) <= depth and shares[p] >= least * (1 + 1e-9)]
        expected = sorted(fitting, key=lambda path: -shares[path])[:nodes]
        assert paths == expected
        assert tree.score == pytest.approx(sum(shares[p] for p in expected))


def test_equal_nodes_come_in_the_order_in_which_they_were_found():
    tree = likeliest(0, lambda place, above: [(token, 0, 0.5) for token in (4, 2)], nodes=6, depth=9)
    assert tree.tokens == [4, 2, 4, 2, 4, 2] and tree.parents == [-1, -1, 0, 0, 1, 1]
    assert tree.score == 2.0
    assert likeliest(Interval(0, 1, 1), lambda *_: [], 5, 5).tokens == []
