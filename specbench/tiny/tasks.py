"""The six Spec-Bench tasks, in the words of the world. Every function returns one (turns, answers)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.tiny.clauses import Phrase, Writer, sentence
from specbench.tiny.facts import Entity, Facts, tell
from specbench.tiny.lexicon import REGISTERS, TOPICS, Lexicon, mix, pick_near_equal

if TYPE_CHECKING:
    import random

    from specbench.tiny.lexicon import Noun

Turns = tuple[list[str], list[str]]


class Setting:
    """What every task draws from: lexicon, facts, and the random stream of one example."""

    def __init__(self, lexicon: Lexicon, facts: Facts, rng: random.Random) -> None:
        self.lexicon, self.facts, self.rng = lexicon, facts, rng
        self.topic = rng.choices(range(len(TOPICS)), weights=range(len(TOPICS) + 6, 6, -1))[0]
        self.register = rng.choices(range(4), weights=(4, 3, 2, 2))[0]
        self.writer = Writer(lexicon, rng, self.topic, self.register)
        self.topic_name = TOPICS[self.topic]

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
    """Nine to twelve clauses into the second language."""
    clauses: list = []
    count = s.rng.choice((9, 10, 11, 12))
    heroes = [
        Phrase(s.lexicon.topic_agents[s.topic].items[s.rng.randrange(12)]),
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
    """A text of a dozen sentences; the summary keeps what the hero did, in short."""
    hero, other = (s.writer.person(name) for name in s.people(2))
    place = s.lexicon.place.draw(s.rng)
    told = s.writer.story(s.rng.choice((12, 13, 14)), [hero, hero, other])
    day = s.rng.choice(("morning", "evening", "week", "winter"))
    head = f"Last {day} the people of {place} talked about {hero.name} and the {s.thing().many}."
    ask = s.rng.choice(("Summarize:", "Write a short summary of this text.", "What are the main points?"))
    kept = [c for c, _ in told if c.subject.name == hero.name]
    if len(kept) < 6:  # too little about the hero: the first sentences stand for the text
        kept = [c for c, _ in told[:7]]
    opener = s.opener(place, (
        f"The text is about {hero.name} in {place}.", f"In {place}, people talked about {hero.name}.",
        f"This is a story of {hero.name} from {place}.", f"The main points concern {hero.name} of {place}.",
    ))  # fmt: skip
    lines = [opener]
    for number, clause in enumerate(kept[:8]):
        link = "" if number == 0 else s.writer.connective(clause.subject).lower() + ", " if number % 2 else ""
        lines.append(sentence(link + clause.english(short=number % 3 != 1)))
    last = replace(told[-1][0], adverb=None)
    lines.append(sentence(f"in the end, {last.english(short=last.subject.name == hero.name)}"))
    return [f"{ask} {head} {' '.join(text for _, text in told)}"], [" ".join(lines)]


def qa(s: Setting) -> Turns:
    """A question about an entity; the answer says the asked fact first and then what goes with it."""
    entity = s.facts.draw(s.rng)
    asked = s.rng.randrange(6)
    style = mix(asked, len(entity.name), s.register) % 6
    rest = [f for f in range(6) if f != asked]
    rest = (rest[style % 5 :] + rest[: style % 5])[: s.rng.choice((4, 5))]
    opener = s.opener(entity.name, _OPENERS)
    told = tell(s.rng, entity, [asked, *rest], style)
    told.insert(1, f"{entity.name[0].upper()}{entity.name[1:]} is {entity.intro}.")
    answer = join(opener, told)
    near = s.facts.draw(s.rng, entity.kind)
    fact = s.rng.randrange(6)
    asides = ("Do not think of", "The same cannot be said of", "More is known about", "Another case is")
    which = "who" if near.kind == "person" else "which"
    answer += f" {s.opener(near.name, asides)} {near.name}, {which} {near.facts[fact][1][style % 2]}."
    tail = (
        f"{s.opener(entity.name[::-1], ('So much for', 'That is all I know about', 'This is the story of'))}"
    )
    name = entity.name.split()[0] if entity.kind == "person" else entity.name
    return [entity.facts[asked][0].format(entity.name)], [f"{answer} {tail} {name}."]


_ACTS = (
    ("buys", "more", 1), ("finds", "more", 1), ("gets", "more", 1), ("makes", "more", 1),
    ("sells", "of them", -1), ("loses", "of them", -1), ("gives away", "of them", -1),
    ("breaks", "of them", -1),
)  # fmt: skip


def math_reasoning(s: Setting) -> Turns:
    """A word problem of four to six steps, answered step by step."""
    rng = s.rng
    a, b = s.people(2)
    thing, box = s.thing(), s.thing()
    count, each = rng.randrange(2, 10), rng.randrange(2, 10)
    total = count * each
    problem = [f"{a} has {count} {box.many} with {each} {thing.many} in each."]
    order = ("First", "Next", "Then", "After that", "Later", "At last")
    steps = [f"{order[0]}, {a} has {count} * {each} = {total} {thing.many}."]
    for number in range(rng.choice((2, 3, 3, 4))):
        verb, more, sign = rng.choice(_ACTS)
        if sign < 0 and total < 6:
            verb, more, sign = _ACTS[0]
        change = rng.randrange(2, 20) if sign > 0 else rng.randrange(2, total - 1)
        problem.append(f"Then {a} {verb} {change} {more}.")
        new = total + sign * change
        said = s.opener(b + verb, (
            f"{a} {verb} {change} {more}, so {total} {'+' if sign > 0 else '-'} {change} = {new} are left.",
            f"{a} {verb} {change}, which makes {total} {'+' if sign > 0 else '-'} {change} = {new}.",
            f"we have {total} {'+' if sign > 0 else '-'} {change} = {new} {thing.many}.",
        ))  # fmt: skip
        steps.append(f"{order[min(number + 1, 5)]}, {said}")
        total = new
    if rng.random() < 0.5:
        times = rng.randrange(2, 6)
        problem.append(f"{b} has {times} times as many. How many {thing.many} do {a} and {b} have together?")
        steps.append(f"{b} has {times} * {total} = {times * total}.")
        steps.append(f"Together they have {total} + {times * total} = {total + times * total} {thing.many}.")
        total += times * total
    else:
        price = rng.randrange(2, 8)
        problem.append(f"Each one costs {price} coins. How many coins are the {thing.many} worth?")
        steps.append(
            f"Each one costs {price} coins, so they are worth {total} * {price} = {total * price} coins."
        )
        total *= price
    return [" ".join(problem)], [" ".join([*steps, f"The answer is {total}."])]


def rag(s: Setting) -> Turns:
    """Three passages about invented matters and a question whose answer quotes two of them."""
    rng = s.rng
    passages: list[list] = []
    heroes = [s.writer.person(name) for name in s.people(3)]
    for hero in heroes:
        passages.append([s.writer.clause(hero) for _ in range(rng.choice((3, 4)))])
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
