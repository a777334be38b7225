"""The words of the world: an invented lexicon with inflection, collocations, names, and a second language.

Content words are pronounceable inventions; function words are real English. Frequencies are Zipfian inside
each topic. A collocation (which adjectives a noun likes, which objects a verb likes, ...) is a short list of
near-equal choices that depends on the word *and* on topic or register: that is what makes the text hard to
guess for a small model and yet learnable for a deep one.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import NamedTuple

from specbench.tiny import english

TOPICS = (
    "harbour", "kitchen", "court", "market", "forest", "workshop", "school", "theatre",
    "mine", "garden", "temple", "army", "hospital", "road", "library", "winter",
)  # fmt: skip
REGISTERS = ("plain", "formal", "lively", "poetic")

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl pr sh sl st th tr".split()
_VOWELS = "a e i o u ai ea oo ou ie".split()
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "k", "nd", "lt", "rn", "ft"]
_AGENT_ENDINGS = ("er", "ist", "man", "wright", "keeper")
_ADJ_ENDINGS = ("y", "ous", "al", "ic", "ish", "ent", "", "")
_NAME_ENDINGS = ("a", "in", "or", "el", "is", "o", "ard", "ine")
_PLACE_ENDINGS = ("ford", "ham", "stead", "mere", "wick", "ia", "burg", "dale")
# No invented word may contain one of these (they would make words that nobody wants to read).
_UNWANTED = (
    "fuk fuc cun kun shit dik dic kok coc cok cum kum fag nig tit slu pis wan rap sex naz tur poo pee "
    "kil die ret kik coon spi jap gay hom hor dy tar por ana ars bum bit poop fart pus vag pen bre ass "
    "tra hit kak kac sod sot slop"
).split()
_FOREIGN_ONSETS = "k t p m n s v z y r l ts kh zh b d".split()

# The best of four has half of the mass: what comes next can be guessed, but not known.
CHOICE_WEIGHTS = (0.50, 0.24, 0.15, 0.11)
_CUM_CHOICE = list(accumulate(CHOICE_WEIGHTS))


class Noun(NamedTuple):
    """A noun with both numbers; `agent` nouns act, the others are acted upon."""

    index: int
    one: str
    many: str
    agent: bool
    foreign: str
    foreign_many: str


class Verb(NamedTuple):
    """A transitive verb; only a few verbs have a participle other than their past."""

    index: int
    base: str
    past: str
    participle: str
    ing: str
    foreign: str


class Modifier(NamedTuple):
    """An adjective or an adverb."""

    index: int
    word: str
    foreign: str


def mix(*parts: int) -> int:
    """Mix small integers into one 64-bit integer, the same on every machine and Python (unlike `hash`)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state


def pick_near_equal(rng: random.Random, options: list | tuple):
    """One of the first four options, with the probabilities of `CHOICE_WEIGHTS`."""
    return rng.choices(options[:4], cum_weights=_CUM_CHOICE[: len(options[:4])])[0]


def article(word: str) -> str:
    """The indefinite article in front of `word`."""
    return "an" if word[0] in "aeiou" else "a"


def plural(word: str) -> str:
    """The regular English plural."""
    if word.endswith(("s", "sh", "ch", "x", "z")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


class Zipf:
    """Draws items with probability proportional to 1 / (rank + 2) ** exponent."""

    def __init__(self, items: list, exponent: float = 0.9) -> None:
        self.items = items
        self.cumulative = list(accumulate(1.0 / (rank + 2) ** exponent for rank in range(len(items))))

    def draw(self, rng: random.Random):
        """One of the items, by their frequencies."""
        return rng.choices(self.items, cum_weights=self.cumulative)[0]


class Lexicon:
    """All words of one world, made from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = random.Random(mix(seed, 1))
        self._taken: set[str] = {
            *english.AGENTS,
            *english.THINGS,
            *english.ADJECTIVES,
            *english.ADVERBS,
            *(form for verb in english.VERBS for form in verb.split("/")),
            *english.FREQUENT,
        }
        self.nouns = [self._noun(i) for i in range(220)]
        self.verbs = [self._verb(i) for i in range(90)]
        self.adjectives = self._modifiers(english.ADJECTIVES, 90, _ADJ_ENDINGS)
        self.adverbs = self._modifiers(english.ADVERBS, 32, ("ly", "ly", "ward"))
        self.people = [self._word(2, _NAME_ENDINGS).capitalize() for _ in range(2000)]
        self.places = [self._word(1, _PLACE_ENDINGS).capitalize() for _ in range(1000)]
        self.person = Zipf(
            self.people, 0.5
        )  # many and alike: names are copied from a prompt, not known by heart
        self.place = Zipf(self.places, 0.5)
        agents = [n for n in self.nouns if n.agent]
        things = [n for n in self.nouns if not n.agent]
        self.topic_agents = [self._share(agents, t, 12) for t in range(len(TOPICS))]
        self.topic_things = [self._share(things, t, 40) for t in range(len(TOPICS))]
        self.topic_verbs = [self._share(self.verbs, t, 24) for t in range(len(TOPICS))]
        self._adjective_pool = self.adjectives + self.adjectives[: len(english.ADJECTIVES)] * 4
        self._lists: dict[tuple, list] = {}

    # -- making words ------------------------------------------------------------------------------------

    def _syllable(self, last: bool) -> str:
        rng = self._rng
        return rng.choice(_ONSETS) + rng.choice(_VOWELS[:5] if rng.random() < 0.8 else _VOWELS) + (
            rng.choice(_CODAS) if last or rng.random() < 0.15 else ""
        )  # fmt: skip

    def _word(self, syllables: int, endings: tuple[str, ...] = ("",)) -> str:
        while True:
            count = max(1, syllables - (self._rng.random() < 0.35))
            word = "".join(self._syllable(i == count - 1) for i in range(count)) + self._rng.choice(endings)
            if word not in self._taken and 3 <= len(word) <= 11 and not any(bad in word for bad in _UNWANTED):
                self._taken.add(word)
                return word

    def _foreign(self) -> str:
        """A stem of the second language: all its vowels are front (e i) or all back (a o u)."""
        rng = self._rng
        while True:
            vowels = "ei" if rng.random() < 0.5 else "aou"
            word = "".join(
                rng.choice(_FOREIGN_ONSETS) + rng.choice(vowels) for _ in range(rng.choice((1, 2, 2, 3)))
            )
            word += rng.choice(("", "n", "r", "sh", "k"))
            if len(word) > 2 and word not in self._taken and not any(bad in word for bad in _UNWANTED):
                self._taken.add(word)
                return word

    def _noun(self, index: int) -> Noun:
        agent = index % 4 == 0
        known, rank = (english.AGENTS, index // 4) if agent else (english.THINGS, index - index // 4 - 1)
        one = self._word(
            1 if agent else 2, _AGENT_ENDINGS if agent else ("", "", "", "ing", "ment", "ness", "le")
        )
        irregular = self._rng.random()
        if rank < len(known):
            one, irregular = known[rank], 0.0
        many = plural(one) if irregular < 0.9 else one if irregular < 0.93 else one + "en"
        foreign = self._foreign()
        foreign_many = foreign + harmony(foreign, "ir", "ur")
        if self._rng.random() < 0.08:  # a few plurals of the second language must be learnt by heart
            foreign_many = foreign[0] + foreign + harmony(foreign, "i", "u")
        return Noun(index, one, many, agent, foreign, foreign_many)

    def _verb(self, index: int) -> Verb:
        base = self._word(2)
        if index < len(english.VERBS):
            base, *irregular = english.VERBS[index].split("/")
            stem = base.removesuffix("e")
            irregular = irregular or [stem + "ed"]
            return Verb(index, base, irregular[0], irregular[-1], stem + "ing", self._foreign())
        stem = base[:-1] if base.endswith("e") else base
        past = stem + "ed"
        if self._rng.random() < 0.15:  # strong verbs: the vowel changes
            swap = str.maketrans("aeiou", "oaouo")
            past = base.translate(swap) + ("" if base.translate(swap) != base else "t")
        return Verb(index, base, past, past, stem + "ing", self._foreign())

    def _modifiers(self, known: list[str], count: int, endings: tuple[str, ...]) -> list[Modifier]:
        made = [self._word(2, endings) for _ in range(max(0, count - len(known)))]
        return [Modifier(i, word, self._foreign()) for i, word in enumerate([*known, *made][:count])]

    def _share(self, words: list, topic: int, count: int) -> Zipf:
        """The words of one topic, most frequent first; a third of them belong to several topics."""
        rng = random.Random(mix(self.seed, 2, topic, len(words)))
        own = [w for i, w in enumerate(words) if i % len(TOPICS) == topic]
        shared = rng.sample(words, max(0, count - len(own)))
        chosen = list(dict.fromkeys(own + shared))
        chosen.sort(
            key=lambda w: rng.random() * (0.5 if w.index < 90 else 1.0)
        )  # everyday words are commoner
        return Zipf(chosen)

    # -- collocations ------------------------------------------------------------------------------------

    def _preferred(self, kind: int, pool: list, key: tuple[int, ...], size: int = 4) -> list:
        """`size` members of `pool`, fixed by `key`: the options of a collocation, best first."""
        full = (kind, *key)
        found = self._lists.get(full)
        if found is None:
            drawn = random.Random(mix(self.seed, 3, *full)).sample(pool, min(2 * size, len(pool)))
            found = list(dict.fromkeys(drawn))[:size]
            self._lists[full] = found
        return found

    def adjective(self, rng: random.Random, noun: Noun, topic: int, register: int) -> Modifier:
        """An adjective that goes with `noun`: six are the noun's own, topic and register order four."""
        own = self._preferred(0, self._adjective_pool, (noun.index,), 6)
        return pick_near_equal(rng, self._preferred(1, own, (noun.index, topic % 4, register)))

    def verb(self, rng: random.Random, subject: int, topic: int, register: int) -> Verb:
        """What `subject` (an integer that stands for it) does in this topic: mostly one of its habits."""
        if rng.random() < 0.25:
            return self.topic_verbs[topic].draw(rng)
        own = self._preferred(2, self.topic_verbs[topic].items, (subject % 97, topic), 6)
        return pick_near_equal(rng, self._preferred(3, own, (subject % 97, topic, register)))

    def thing(self, rng: random.Random, verb: Verb, topic: int, register: int) -> Noun:
        """The object of `verb`: mostly one of its own in this topic, sometimes any thing of the topic."""
        if rng.random() < 0.2:
            return self.topic_things[topic].draw(rng)
        return pick_near_equal(
            rng, self._preferred(4, self.topic_things[topic].items, (verb.index, topic, register))
        )

    def adverb(self, rng: random.Random, verb: Verb, register: int) -> Modifier:
        """How `verb` is done."""
        own = self._preferred(5, self.adverbs, (verb.index,), 6)
        return pick_near_equal(rng, self._preferred(6, own, (verb.index, register)))

    def site(self, rng: random.Random, noun: Noun, topic: int) -> Noun:
        """Where `noun` is found: one of its places among the things of the topic."""
        return pick_near_equal(
            rng, self._preferred(7, self.topic_things[topic].items[:24], (noun.index, topic))
        )

    def preposition(self, rng: random.Random, noun: Noun) -> str:
        """The preposition that `noun` takes as a place."""
        pool = ["in", "near", "under", "behind", "beside", "above", "across", "around"]
        return pick_near_equal(rng, self._preferred(8, pool, (noun.index,), 2))


def harmony(stem: str, front: str, back: str) -> str:
    """The suffix variant that agrees with the last vowel of `stem`."""
    for letter in reversed(stem):
        if letter in "ei":
            return front
        if letter in "aou":
            return back
    return back
