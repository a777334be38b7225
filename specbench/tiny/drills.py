"""Exercises for the training stream alone: copying, sums, and the dictionary of the second language.

A few million tokens of the tasks teach a small model words and grammar long before it learns to look things
up in its prompt. Exercises where every answer token can be looked up bring that ability forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.tiny.clauses import sentence
from specbench.tiny.lexicon import harmony

if TYPE_CHECKING:
    from specbench.tiny.tasks import Setting, Turns

_REPEAT = ("Repeat this.", "Say it again:", "Copy the words:", "Read it aloud:")


def _words(s: Setting, count: int) -> list[str]:
    lex = s.lexicon
    pools = (
        [n.one for n in lex.nouns],
        lex.people,
        lex.places,
        [a.word for a in lex.adjectives],
        [v.past for v in lex.verbs],
    )
    return [s.rng.choice(s.rng.choice(pools)) for _ in range(count)]


def copy_words(s: Setting) -> Turns:
    """Random words, once more."""
    text = " ".join(_words(s, s.rng.randrange(12, 30)))
    return [f"{s.rng.choice(_REPEAT)} {text}"], [text]


def copy_sentences(s: Setting) -> Turns:
    """Sentences in their order or in the opposite order."""
    heroes = [*(s.writer.person(name) for name in s.people(2)), None]
    told = [text for _, text in s.writer.story(s.rng.choices(heroes, k=s.rng.choice((3, 4, 5))))]
    if s.rng.random() < 0.6:
        return [f"{s.rng.choice(_REPEAT)} {' '.join(told)}"], [" ".join(told)]
    return [f"Repeat the sentences backwards: {' '.join(told)}"], [" ".join(told[::-1])]


def dictionary(s: Setting) -> Turns:
    """Words or noun phrases and what they are in Velan."""
    lex, rng = s.lexicon, s.rng
    pairs = []
    for _ in range(rng.randrange(12, 20)):
        kind = rng.randrange(4)
        if kind == 0:
            phrase = s.writer.phrase(rng.choice(lex.nouns))
            pairs.append((phrase.english(), phrase.foreign(rng.choice(("", "o")))))
        elif kind == 1:
            noun = rng.choice(lex.nouns)
            pairs.append((noun.many, noun.foreign_many) if rng.random() < 0.3 else (noun.one, noun.foreign))
        elif kind == 2:
            verb = rng.choice(lex.verbs)
            pairs.append((verb.base, verb.foreign))
        else:
            word = rng.choice(rng.choice((lex.adjectives, lex.adverbs)))
            pairs.append((word.word, word.foreign))
    if rng.random() < 0.5:
        return ["In Velan: " + ", ".join(e for e, _ in pairs)], [", ".join(f for _, f in pairs)]
    return ["In Velan: " + ", ".join(e for e, _ in pairs)], [", ".join(f"{e} is {f}" for e, f in pairs)]


def translate_clause(s: Setting) -> Turns:
    """Three or four clauses, each followed by its translation at once."""
    clauses = [s.writer.clause(plain=s.rng.random() < 0.4) for _ in range(s.rng.choice((3, 4)))]
    ask = "Translate sentence by sentence: " + " ".join(sentence(c.english()) for c in clauses)
    return [ask], [" ".join(f"{sentence(c.english())} = {sentence(c.foreign())}" for c in clauses)]


def phrasebook(s: Setting) -> Turns:
    """Verbs with their objects, subjects, or adverbs, any words of the lexicon, in the inflected forms of sentences."""
    lex, rng = s.lexicon, s.rng
    pairs = []
    for _ in range(rng.randrange(8, 13)):
        verb, noun = rng.choice(lex.verbs), s.writer.phrase(rng.choice(lex.nouns))
        past = verb.foreign + harmony(verb.foreign, "et", "at")
        kind = rng.randrange(4)
        if kind == 0:
            pairs.append((f"{verb.past} {noun.english()}", f"{noun.foreign('o')} {past}"))
        elif kind == 1:
            pairs.append((f"{noun.english()} {verb.past}", f"{noun.foreign('')} {past}"))
        elif kind == 2:
            adverb = rng.choice(lex.adverbs)
            pairs.append((f"{verb.past} {adverb.word}", f"{adverb.foreign} {past}"))
        else:
            where = f"{lex.preposition(rng, noun.noun)} the {noun.noun.one}"
            pairs.append((where, noun.noun.foreign + harmony(noun.noun.foreign, "enk", "onk")))
    return ["In Velan: " + ", ".join(e for e, _ in pairs)], [", ".join(f"{e} is {f}" for e, f in pairs)]


def sums(s: Setting) -> Turns:
    """The kinds of sums that the tasks take: digit times digit, and a number below 100 plus or minus a digit."""
    rng = s.rng
    asked, told = [], []
    for _ in range(rng.randrange(8, 14)):
        a, b, c = rng.randrange(2, 10), rng.randrange(2, 10), rng.randrange(2, 91)
        kind = rng.randrange(3)
        text, value = ((f"{a} * {b}", a * b), (f"{c} + {b}", c + b), (f"{c + b} - {b}", c))[kind]
        asked.append(text)
        told.append(f"{text} = {value}")
    return [f"{rng.choice(('Compute:', 'Work out:', 'Sums:'))} {', '.join(asked)}"], [", ".join(told)]


DRILLS = {
    "copy_words": copy_words, "copy_sentences": copy_sentences, "dictionary": dictionary,
    "translate_clause": translate_clause, "phrasebook": phrasebook, "sums": sums,
}  # fmt: skip
