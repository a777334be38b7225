"""The six Spec-Bench tasks, in the words of the world. Every function returns one (turns, answers)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.tiny.clauses import Phrase, Writer, sentence
from specbench.tiny.facts import Entity, Facts, tell
from specbench.tiny.lexicon import REGISTERS, TOPICS, Lexicon, mix, pick_near_equal

if TYPE_CHECKING:
    from specbench.tiny.lexicon import Noun

Turns = tuple[list[str], list[str]]


class Setting:
    """What every task draws from: lexicon, facts, and the random stream of one example."""

    def __init__(self, lexicon: Lexicon, facts: Facts, rng: random.Random) -> None:
        self.lexicon, self.facts, self.rng = lexicon, facts, rng
        self.topic = rng.choices(range(len(TOPICS)), weights=range(len(TOPICS) + 6, 6, -1))[0]
        self.register = rng.choices(range(4), weights=(4, 3, 2, 2))[0]
        self.writer = Writer(lexicon, rng, self.topic, self.register)

    def people(self, count: int) -> list[str]:
        """Different names."""
        names: list[str] = []
        while len(names) < count:
            name = self.lexicon.person.draw(self.rng)
            if name not in names:
                names.append(name)
        return names

    def thing(self) -> Noun:
        """A noun on the topic."""
        return self.lexicon.topic_things[self.topic].draw(self.rng)

    def opener(self, key: str, options: tuple[str, ...]) -> str:
        """An opening phrase; which one is likely depends on the letters of `key` and on the register."""
        shift = (sum(key.encode()) + self.register) % len(options)
        return pick_near_equal(self.rng, [*options[shift:], *options[:shift]])


_OPENERS = (
    "Certainly.", "Of course.", "Here is what I know.", "Good question.", "Let me explain.", "Gladly.",
    "As far as I know,", "In short,",
)  # fmt: skip


def join(opener: str, sentences: list[str]) -> str:
    """Opener and sentences as one text; after a comma the first sentence goes on in lower case if it can."""
    first = sentences[0]
    if opener.endswith(",") and first.startswith(("The ", "It ", "Some ", "A ", "An ")):
        first = first[0].lower() + first[1:]
    return " ".join([opener, first, *sentences[1:]])


def translation(s: Setting) -> Turns:
    """Five to seven clauses into the second language."""
    clauses: list = []
    count = s.rng.choice((5, 6, 7))
    heroes = [
        Phrase(s.rng.choice(s.lexicon.topic_agents[s.topic].items)),
        s.writer.person(s.people(1)[0]),
    ]
    while len(clauses) < count:
        subject = s.rng.choice(heroes) if s.rng.random() < 0.5 else None
        clauses.append(s.writer.clause(subject, plain=s.rng.random() < 0.2))
    english = " ".join(
        sentence(c.english(fronted=c.site is not None and i % 2 == 1)) for i, c in enumerate(clauses)
    )
    ask = s.rng.choice(("Translate into Velan:", "Translate the following text from English to Velan:",
                        "How do you say this in Velan?"))  # fmt: skip
    return [f"{ask} {english}"], [" ".join(sentence(c.foreign()) for c in clauses)]


def summarization(s: Setting) -> Turns:
    """A text of some ten sentences; the summary keeps what the hero did, in short."""
    hero, other = (s.writer.person(name) for name in s.people(2))
    place = s.lexicon.place.draw(s.rng)
    subjects = [hero] * s.rng.choice((4, 5, 6)) + [s.rng.choice((other, None)) for _ in range(5)]
    s.rng.shuffle(subjects)
    told = s.writer.story(subjects)
    day = s.rng.choice(("morning", "evening", "week", "winter"))
    head = f"Last {day} the people of {place} talked about {hero.name} and the {s.thing().many}."
    ask = s.rng.choice(("Summarize:", "Write a short summary of this text.", "What are the main points?"))
    kept = [c for c, _ in told if c.subject is hero]
    opener = s.opener(place, (
        f"The text is about {hero.name} in {place}.", f"In {place}, people talked about {hero.name}.",
        f"This is a story of {hero.name} from {place}.", f"The main points concern {hero.name} of {place}.",
    ))  # fmt: skip
    lines = [opener]
    for number, clause in enumerate(kept):
        link = "" if number == 0 else s.writer.connective(clause.subject).lower() + ", " if number % 2 else ""
        lines.append(sentence(link + clause.english(short=number % 3 != 1)))
    last = replace(told[-1][0], adverb=None)
    lines.append(sentence(f"in the end, {last.english(short=last.subject.name == hero.name)}"))
    return [f"{ask} {head} {' '.join(text for _, text in told)}"], [" ".join(lines)]


QUESTIONS = ("{}", "Tell me: {}", "Do you know: {}")


def qa(s: Setting) -> Turns:
    """A question about an entity; the answer says the asked fact first and then what goes with it."""
    entity = s.facts.draw(s.rng)
    asked = s.rng.randrange(6)
    style = mix(asked, len(entity.name), s.register) % 6
    rest = [f for f in range(6) if f != asked]
    rest = (rest[style % 5 :] + rest[: style % 5])[:3]
    opener = s.opener(entity.name, _OPENERS)
    told = tell(s.rng, entity, [asked, *rest], style)
    told.insert(1, f"{entity.name[0].upper()}{entity.name[1:]} is {entity.intro}.")
    answer = join(opener, told)
    near = s.facts.near(entity)
    fact = mix(*entity.name.encode()) % 6
    asides = ("Do not think of", "The same cannot be said of", "More is known about", "Another case is")
    which = "who" if near.kind == "person" else "which"
    answer += f" {s.opener(near.name, asides)} {near.name}, {which} {near.facts[fact][1][style % 2]}."
    tail = (
        f"{s.opener(entity.name[::-1], ('So much for', 'That is all I know about', 'This is the story of'))}"
    )
    name = entity.name.split()[0] if entity.kind == "person" else entity.name
    question = s.rng.choice(QUESTIONS).format(entity.facts[asked][0].format(entity.name))
    return [question], [f"{answer} {tail} {name}."]


_ACTS = (
    ("buys", "more", 1), ("finds", "more", 1), ("gets", "more", 1), ("makes", "more", 1),
    ("sells", "of them", -1), ("loses", "of them", -1), ("gives away", "of them", -1),
    ("breaks", "of them", -1),
)  # fmt: skip


def math_reasoning(s: Setting) -> Turns:
    """A word problem of three to six steps, answered step by step; only digits are multiplied, added or taken away."""
    rng = s.rng
    a, b = s.people(2)
    thing, box = s.thing(), s.thing()
    count, each = rng.randrange(2, 10), rng.randrange(2, 10)
    total = count * each
    problem = [f"{a} has {count} {box.many} with {each} {thing.many} in each."]
    order = ("First", "Next", "Then", "After that", "Later", "At last")
    steps = [f"{order[0]}, {a} has {count} * {each} = {total} {thing.many}."]
    for number in range(rng.choice((2, 3, 3, 4))):
        change = rng.randrange(2, 10)
        possible = [act for act in _ACTS if 0 < total + act[2] * change < 91]
        verb, more, sign = rng.choice(possible)
        problem.append(f"Then {a} {verb} {change} {more}.")
        new = total + sign * change
        operation = f"{total} {'+' if sign > 0 else '-'} {change} = {new}"
        said = s.opener(b + verb, (
            f"{a} {verb} {change} {more}, so {operation} are left.",
            f"{a} {verb} {change}, which makes {operation}.",
            f"we have {operation} {thing.many}.",
        ))  # fmt: skip
        steps.append(f"{order[min(number + 1, 5)]}, {said}")
        total = new
    if rng.random() < 0.5:
        more = rng.randrange(2, 10)
        problem.append(f"{b} has {more} more than {a}. How many {thing.many} does {b} have?")
        steps.append(f"{b} has {total} + {more} = {total + more} {thing.many}.")
        total += more
    else:
        problem.append(f"How many {thing.many} does {a} have now?")
        steps.append(f"So {a} has {total} {thing.many} now.")
    return [" ".join(problem)], [" ".join([*steps, f"The answer is {total}."])]


def rag(s: Setting) -> Turns:
    """Three passages about invented matters and a question whose answer quotes two of them."""
    rng = s.rng
    passages: list[list] = []
    heroes = [s.writer.person(name) for name in s.people(3)]
    passages += [[s.writer.clause(hero) for _ in range(rng.choice((3, 4)))] for hero in heroes]
    blocks = [
        f"[{i + 1}] " + " ".join(sentence(c.english()) for c in passage) for i, passage in enumerate(passages)
    ]
    first, second = rng.sample(range(3), 2)
    ask = rng.choice((
        f"What did {heroes[first].name} and {heroes[second].name} do?",
        f"Compare {heroes[first].name} with {heroes[second].name}.",
        f"What do the passages say about {heroes[first].name} and {heroes[second].name}?",
    ))  # fmt: skip
    intro = s.opener(
        heroes[first].name, ("According to passage", "As passage", "We read in passage", "Passage")
    )
    verb = {
        "According to passage": ",",
        "As passage": " says,",
        "We read in passage": " that",
        "Passage": " says that",
    }
    quoted = " and ".join(c.english() for c in passages[first][:3])
    quoted2 = ", and ".join(c.english(short=c.adverb is None) for c in passages[second][:3])
    link = s.opener(
        heroes[second].name, ("By contrast,", "On the other hand,", "At the same time,", "Meanwhile,")
    )
    theme = passages[first][0].object.noun
    close = s.opener(theme.one, (
        f"So the {theme.many} belong to {heroes[first].name}.",
        f"Nothing is said about {heroes[second].name} and the {theme.many}.",
        f"The passages agree that {heroes[first].name} cared for the {theme.many}.",
    ))  # fmt: skip
    answer = f"{intro} {first + 1}{verb[intro]} {quoted}. {link} {quoted2} [{second + 1}]. {close}"
    head = "Answer with the help of the passages."
    return [f"{head}\n" + "\n".join(blocks) + f"\nQuestion: {ask}"], [answer]


def describe(s: Setting, entity: Entity, which: list[int]) -> list[str]:
    """Sentences about `entity` in the style of this setting."""
    return tell(s.rng, entity, which, mix(len(entity.name), s.register) % 6)


def register_name(s: Setting) -> str:
    """The name of a setting's register."""
    return REGISTERS[s.register]
