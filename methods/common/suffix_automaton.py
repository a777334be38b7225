"""A suffix automaton that grows token by token: every stretch of a text, and where and how often it occurs.

All stretches that end at the same places share a state, so that n tokens take at most 2n states and a token takes
constant time on average (Blumer et al. 1985). One automaton may hold several texts one after the other, with a unique
separator between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy

ROOT = 0  # the state of the empty stretch


class SuffixAutomaton:
    """All stretches of the tokens so far.

    A state represents stretches that end at the same places: `length` is that of its longest one; the others are its
    suffixes that are longer than the longest one of `link`, which occurs at more places.

    Args:
        depth: longest stretch whose occurrences are counted; 0: none. Each token then touches up to `depth` states.

    Attributes:
        tokens: the text. Separators are negative.
        following: of each state, the state of its stretches with one more token, by that token.
        link: of each state; -1 of the first one.
        length: of each state.
        first_end: of each state, the place after its first occurrence.
        occurrences: of each state how often its stretches occur, if they are no longer than `depth`.
        last: the state of the whole text.
    """

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.tokens: list[int] = []
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.first_end, self.occurrences = [-1], [0], [0], [0]
        self.last = ROOT
        self._counted = ROOT  # the state of the last `depth` tokens
        self._separators = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end."""
        for token in tokens:
            self.append(token)

    def add(self, text: Iterable[int]) -> None:
        """Adds a whole text."""
        self.extend(text)
        self.separate()

    def copy(self) -> SuffixAutomaton:
        """Returns an independent copy."""
        other = copy(self)
        other.tokens, other.following = [*self.tokens], [transitions.copy() for transitions in self.following]
        other.link, other.length = [*self.link], [*self.length]
        other.first_end, other.occurrences = [*self.first_end], [*self.occurrences]
        return other

    def separate(self) -> None:
        """Ends a text: no stretch of what is added from now on reaches into it."""
        self._separators += 1
        self.append(-self._separators)

    def append(self, token: int) -> None:
        """Adds one token at the end."""
        self.tokens.append(token)
        new = self._state({}, len(self.tokens), len(self.tokens), 0)
        state = self.last
        while state >= 0 and token not in self.following[state]:
            self.following[state][token] = new
            state = self.link[state]
        self.link[new] = ROOT if state < 0 else self._ending(state, token)
        self.last = new
        if self.depth:
            self._count(token)

    def earlier_match(self) -> tuple[int, int]:
        """Returns the length of the text's longest suffix that occurs earlier, and the place after that one."""
        state = max(self.link[self.last], ROOT)
        return self.length[state], self.first_end[state]

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Returns the tokens after a state's stretches, without separators: token, state after it, and count."""
        transitions = self.following[state].items()
        return [(token, after, self.occurrences[after]) for token, after in transitions if token >= 0]

    def earlier(self, longest: int) -> Iterator[tuple[int, int]]:
        """Suffixes of the text that occur earlier in it, up to a length within `depth`.

        Yields:
            State and length of the longest stretch of each state, the longest ones first.
        """
        state = self._counted if self._counted != self.last else self.link[self.last]
        if state > ROOT:
            state = self.holding(state, longest)
        while state > ROOT:
            yield state, min(self.length[state], longest)
            state = self.link[state]

    def _state(self, following: dict[int, int], length: int, first_end: int, occurrences: int) -> int:
        self.following.append(following)
        self.link.append(ROOT)
        self.length.append(length)
        self.first_end.append(first_end)
        self.occurrences.append(occurrences)
        return len(self.link) - 1

    def _ending(self, state: int, token: int) -> int:
        """The state whose longest stretch is that of `state` with `token`, split off from a longer one if need be."""
        longer, length = self.following[state][token], self.length[state] + 1
        if self.length[longer] == length:
            return longer
        shorter = self._state(
            self.following[longer].copy(), length, self.first_end[longer], self.occurrences[longer]
        )
        self.link[shorter], self.link[longer] = self.link[longer], shorter
        while state >= 0 and self.following[state].get(token) == longer:
            self.following[state][token] = shorter
            state = self.link[state]
        return shorter

    def _count(self, token: int) -> None:
        """Counts one more occurrence of the ends of the text, up to `depth` tokens."""
        # The last `depth` tokens and the new one; then without the first of them.
        self._counted = state = self.holding(self.following[self._counted][token], self.depth)
        while state > ROOT:
            self.occurrences[state] += 1
            state = self.link[state]

    def holding(self, state: int, length: int) -> int:
        """The state of the last `length` tokens, 1 at least, of a state's longest stretch."""
        while self.length[self.link[state]] >= length:
            state = self.link[state]
        return state


class Match:
    """The longest suffix of a text that occurs in an automaton, which may grow meanwhile.

    Args:
        automaton: to search.
        longest: greatest length of a match.
    """

    def __init__(self, automaton: SuffixAutomaton, longest: int):
        self.automaton, self.longest = automaton, longest
        self.length, self._state = 0, ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Adds one token to the text."""
        automaton, state = self.automaton, self.state
        while state >= 0 and token not in automaton.following[state]:
            state = automaton.link[state]
            self.length = automaton.length[state] if state >= 0 else 0
        if state >= 0:
            state = automaton.following[state][token]
            self.length = min(self.length + 1, self.longest)
        self._state = max(state, ROOT)

    @property
    def state(self) -> int:
        """The state of the match."""
        # It may have been split since the last look.
        if self.length:
            self._state = self.automaton.holding(self._state, self.length)
        return self._state

    def stretches(self) -> Iterator[tuple[int, int]]:
        """State and length of the longest stretch of each state among the text's suffixes, the longest first."""
        state, length = self.state, self.length
        while state > ROOT:
            yield state, length
            state = self.automaton.link[state]
            length = self.automaton.length[state]
