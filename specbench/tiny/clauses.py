"""Clauses: small syntax trees that can be said in English (in full or short) and in the second language."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from specbench.tiny.lexicon import Lexicon, Modifier, Noun, Verb, article, harmony, mix, pick_near_equal

_CONNECTIVES = (
    ("Then", "After that", "Later", "Soon"),
    ("Subsequently", "Furthermore", "Moreover", "In addition"),
    ("Suddenly", "All at once", "Right away", "And then"),
    ("At dusk", "In silence", "Slowly", "Under the stars"),
)
_REASONS = ("because", "since", "so that", "although", "while", "until")


@dataclass(frozen=True)
class Phrase:
    """A noun phrase. With `name` set it is a person and `noun` only steers the collocations."""

    noun: Noun
    adjective: Modifier | None = None
    many: bool = False
    definite: bool = True
    name: str | None = None

    def english(self, short: bool = False) -> str:
        """The phrase with its article; `short` leaves the adjective out."""
        if self.name:
            return self.name
        head = self.noun.many if self.many else self.noun.one
        words = f"{self.adjective.word} {head}" if self.adjective and not short else head
        if self.definite:
            return f"the {words}"
        return f"some {words}" if self.many else f"{article(words)} {words}"

    def foreign(self, case: str) -> str:
        """The phrase with its case suffix: "" subject, "o" object, "l" place. Adjectives follow in number."""
        if self.name:
            return self.name
        head = self.noun.foreign_many if self.many else self.noun.foreign
        if case == "o":
            head += harmony(head, "em", "am")
        elif case == "l":
            head += harmony(head, "enk", "onk")
        if not self.adjective:
            return head
        adjective = self.adjective.foreign + (harmony(self.adjective.foreign, "i", "u") if self.many else "")
        return f"{adjective} {head}"


@dataclass(frozen=True)
class Clause:
    """Who did what to what, how and where."""

    subject: Phrase
    verb: Verb
    object: Phrase
    adverb: Modifier | None = None
    preposition: str = ""
    site: Phrase | None = None
    place: str | None = None

    def english(
        self, short: bool = False, fronted: bool = False, passive: bool = False, negated: bool = False
    ) -> str:
        """The clause without capital and full stop. `short` drops adjectives, adverb and place."""
        subject, object_ = self.subject.english(short), self.object.english(short)
        where = (
            f"{self.preposition} {self.site.english()}"
            if self.site
            else f"in {self.place}"
            if self.place
            else ""
        )
        if passive:
            auxiliary = "were" if self.object.many else "was"
            words = [object_, auxiliary, self.verb.participle, "by", subject]
        elif negated:
            words = [subject, "did not", self.verb.base, object_]
        else:
            words = [subject, self.verb.past, object_]
        if self.adverb and not short:
            words.append(self.adverb.word)
        if where and not short:
            words = [where + ",", *words] if fronted else [*words, where]
        return " ".join(words)

    def foreign(self) -> str:
        """The clause in the second language: place, subject, object, adverb, verb."""
        past = self.verb.foreign + harmony(self.verb.foreign, "et", "at")
        words = [self.site.foreign("l")] if self.site else [f"{self.place}-enk"] if self.place else []
        words += [self.subject.foreign(""), self.object.foreign("o")]
        if self.adverb:
            words.append(self.adverb.foreign)
        return " ".join([*words, past])


def sentence(text: str, end: str = ".") -> str:
    """Capitalise and close."""
    return text[0].upper() + text[1:] + end


class Writer:
    """Writes clauses and sentences about one topic in one register, with its own random stream."""

    def __init__(self, lexicon: Lexicon, rng: random.Random, topic: int, register: int) -> None:
        self.lexicon, self.rng, self.topic, self.register = lexicon, rng, topic, register

    def phrase(self, noun: Noun) -> Phrase:
        """A phrase with `noun` as its head, two times in three with an adjective."""
        rng = self.rng
        adjective = None
        if rng.random() >= 0.35:
            adjective = self.lexicon.adjective(rng, noun, self.topic, self.register)
        return Phrase(noun, adjective, rng.random() < 0.25, rng.random() < 0.7)

    def person(self, name: str) -> Phrase:
        """A named person, whose habits follow from the name."""
        agents = self.lexicon.topic_agents[self.topic].items
        return Phrase(agents[mix(self.lexicon.seed, *name.encode()) % len(agents)], name=name)

    def agent(self) -> Phrase:
        """Somebody who belongs to the topic."""
        return self.phrase(self.lexicon.topic_agents[self.topic].draw(self.rng))

    def clause(
        self, subject: Phrase | None = None, object_: Phrase | None = None, plain: bool = False
    ) -> Clause:
        """A clause on the topic; `plain` leaves adverb and place out."""
        rng, lex = self.rng, self.lexicon
        subject = subject or self.agent()
        verb = lex.verb(rng, subject.noun.index, self.topic, self.register)
        object_ = object_ or self.phrase(lex.thing(rng, verb, self.topic, self.register))
        clause = Clause(subject, verb, object_)
        if plain:
            return clause
        if rng.random() < 0.4:
            clause = replace(clause, adverb=lex.adverb(rng, verb, self.register))
        chance = rng.random()
        if chance < 0.35:
            site = lex.site(rng, object_.noun, self.topic)
            clause = replace(clause, site=Phrase(site), preposition=lex.preposition(rng, site))
        elif chance < 0.45:
            clause = replace(clause, place=lex.place.draw(rng))
        return clause

    def connective(self, subject: Phrase) -> str:
        """A linking word; register, topic and subject decide which one is likely."""
        options = list(_CONNECTIVES[self.register])
        shift = (self.topic + subject.noun.index) % 4
        return pick_near_equal(self.rng, options[shift:] + options[:shift])

    def say(self, clause: Clause, linked: bool = False) -> str:
        """One full sentence around `clause`: one of several constructions, chosen by verb and register."""
        rng = self.rng
        shift = mix(clause.verb.index, self.register) % 8
        kind = (shift + rng.choices(range(8), weights=(6, 3, 2, 1, 1, 1, 1, 1))[0]) % 8
        if kind == 1 and clause.site:
            text = clause.english(fronted=True)
        elif kind == 2:
            text = clause.english(passive=True)
        elif kind == 3:
            reason = _REASONS[mix(clause.verb.index, self.topic) % len(_REASONS)]
            text = f"{clause.english()}, {reason} {self.clause(plain=True).english()}"
        elif kind == 4:
            other = self.clause(clause.subject, plain=True)
            text = f"{clause.english()} and {other.verb.past} {other.object.english()}"
        elif kind == 5:
            other = self.clause(clause.subject, clause.object, plain=True)
            it = "them" if clause.object.many else "it"
            text = f"{other.english(negated=True)} but {clause.verb.past} {it}"
            text += f" {clause.adverb.word}" if clause.adverb else " at last"
        elif kind == 6:
            text = f"when {self.clause(plain=True).english()}, {clause.english()}"
        else:
            text = clause.english()
        if linked and rng.random() < 0.4:
            text = f"{self.connective(clause.subject)}, {text}"
        return sentence(text)

    def retell(self, clause: Clause, linked: bool = False) -> str:
        """One sentence of a story about an event; verb and register choose how it is told."""
        rng = self.rng
        clause = replace(clause, adverb=self.lexicon.adverb(rng, clause.verb, self.register))
        kind = mix(clause.verb.index, self.register) % 3
        if kind == 1:
            text = clause.english(passive=True)
        elif kind == 2:
            plain = replace(clause, adverb=None)
            text = f"{clause.adverb.word}, {plain.english()}"
        else:
            text = clause.english()
        if linked and kind != 2 and rng.random() < 0.4:
            text = f"{self.connective(clause.subject)}, {text}"
        return sentence(text)

    def story(self, subjects: list[Phrase | None]) -> list[tuple[Clause, str]]:
        """A sentence about each subject, anybody where it is None; what they handle comes back."""
        told: list[tuple[Clause, str]] = []
        for number, subject in enumerate(subjects):
            earlier = None
            if told and self.rng.random() < 0.35:
                earlier = replace(told[-1][0].object, definite=True, adjective=None)
            clause = self.clause(subject, earlier)
            told.append((clause, self.say(clause, linked=number > 0)))
        return told
