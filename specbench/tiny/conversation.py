"""The eight MT-Bench categories as two-turn conversations; the second turn builds on the first answer."""

from __future__ import annotations

import itertools

from specbench.tiny.clauses import Phrase, Writer, sentence
from specbench.tiny.lexicon import REGISTERS, article, mix
from specbench.tiny.tasks import _OPENERS, Setting, Turns, describe, join, register_name


def writing(s: Setting) -> Turns:
    """A story of given events, then the same events in another register."""
    hero = s.writer.person(s.people(1)[0])
    place = s.lexicon.place.draw(s.rng)
    events = [s.writer.clause(hero, plain=True) for _ in range(s.rng.choice((4, 5, 6)))]
    start = s.opener(hero.name, (
        f"Once there lived a certain {hero.name} in {place}.", f"Nobody in {place} knew {hero.name} well.",
        f"It was a long day in {place} for {hero.name}.", f"{hero.name} came to {place} in the rain.",
    ))  # fmt: skip
    first = " ".join([start, *(s.writer.retell(c, linked=i > 0) for i, c in enumerate(events))])
    target = (s.register + 1 + s.rng.randrange(3)) % 4
    writer = Writer(s.lexicon, s.rng, s.topic, target)
    again = " ".join(writer.retell(c, linked=i > 0) for i, c in enumerate(events))
    listed = "; ".join(f"{c.verb.base} {c.object.english()}" for c in events)
    ask = f"Write a {register_name(s)} story about {hero.name} and {place}. Events: {listed}."
    return [ask, f"Tell the story of {hero.name} again in a {REGISTERS[target]} style."], [first, again]


def roleplay(s: Setting) -> Turns:
    """First person: a day in the life of someone with given things, then with others."""
    agent = s.lexicon.topic_agents[s.topic].draw(s.rng)
    place = s.lexicon.place.draw(s.rng)
    things: list[Phrase] = []
    while len(things) < 7:
        phrase = s.writer.phrase(s.thing())
        if phrase.noun not in [other.noun for other in things]:
            things.append(phrase)
    own, others = things[:4], things[4:]

    def mine(objects: list[Phrase]) -> list[str]:
        lines = []
        for number, thing in enumerate(objects):
            clause = s.writer.clause(Phrase(agent, name="I"), thing)
            link = s.writer.connective(clause.subject) + ", " if number and s.rng.random() < 0.5 else ""
            lines.append(sentence(link + clause.english()))
        return lines

    start = s.opener(agent.one, (f"I am {article(agent.one)} {agent.one} of {place}.",
                                 f"They call me the {agent.one} of {place}.",
                                 f"My days as {article(agent.one)} {agent.one} are long.",
                                 f"Life in {place} is never dull."))  # fmt: skip
    wish = s.opener(others[0].noun.one, (
        "Yes, I often think of them.", "No, they do not trouble me.", "They are all I have.",
        "I would rather not speak of them.",
    ))  # fmt: skip
    ask = f"Pretend to be {article(agent.one)} {agent.one} from {place}. Tell me about your day with {listed(own)}."
    ask += f" Be {register_name(s)}."
    return [ask, f"And what about {listed(others)}?"], [join(start, mine(own)), join(wish, mine(others))]


def listed(phrases: list[Phrase]) -> str:
    """The phrases as "a, b and c"."""
    words = [phrase.english() for phrase in phrases]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def reasoning(s: Setting) -> Turns:
    """Put people in order from pairwise comparisons; then one more joins."""
    names = s.people(6)
    trait = s.rng.choice(
        (("older", "oldest"), ("taller", "tallest"), ("faster", "fastest"), ("richer", "richest"))
    )
    more, most = trait
    chain, extra = names[:5], names[5]
    pairs = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(chain)]
    shuffled = s.rng.sample(pairs, len(pairs))
    steps = [f"We know that {a} is {more} than {b}." for a, b in itertools.pairwise(chain)]
    opener = s.opener(
        chain[0], ("Let us put them in order.", "Step by step.", "Let me think.", "We compare them.")
    )
    first = f"{opener} {' '.join(steps)} The order is {', '.join(chain)}. So {chain[0]} is the {most}."
    above = s.rng.random() < 0.5
    fact = f"{extra} is {more} than {chain[0]}." if above else f"{chain[-1]} is {more} than {extra}."
    order = [extra, *chain] if above else [*chain, extra]
    place = "first" if above else "last"
    second = (
        f"{fact} We saw that {chain[0]} is {more} than all the others, so {extra} comes {place}. "
        f"The new order is {', '.join(order)}. Now {order[0]} is the {most}."
    )
    return [f"{' '.join(shuffled)} Who is the {most}?", f"{fact} Who is the {most} now?"], [first, second]


def math(s: Setting) -> Turns:
    """Evaluate an expression term by term; then go on from the result."""
    rng = s.rng
    a, b, c, d, e, f = (rng.randrange(2, 10) for _ in range(6))
    product, more = a * b, a * b + c
    d = min(d, more - 2)
    value = more - d
    e = min(e, value - 1)
    opener = s.opener(f"{a}{b}", ("We go step by step.", "Products come first.", "Let us compute it."))
    first = (
        f"{opener} First {a} * {b} = {product}. Then we add {c}: {product} + {c} = {more}. "
        f"Now we take away {d}: {more} - {d} = {value}. So the result is {value}."
    )
    second = (
        f"The result was {value}. First we take away {e}: {value} - {e} = {value - e}. "
        f"Then we add {f}: {value - e} + {f} = {value - e + f}. The new result is {value - e + f}."
    )
    ask = rng.choice(("What is", "Compute", "Find the value of"))
    again = rng.choice(("Take away {} from it and add {}.", "Now take away {} and add {}.",
                        "What if we take away {} and then add {}?"))  # fmt: skip
    return [f"{ask} {a} * {b} + {c} - {d}?", again.format(e, f)], [first, second]


_TESTS = (("larger than", ">"), ("smaller than", "<"), ("equal to", "=="))
_GOALS = (
    ("the sum of", "total = 0", "total += {x}", "total"),
    ("the number of", "count = 0", "count += 1", "count"),
    ("a list of", "found = []", "found.append({x})", "found"),
    ("the largest of", "best = 0", "best = max(best, {x})", "best"),
)


def coding(s: Setting) -> Turns:
    """A small function over a list; then the same function with another condition."""
    rng = s.rng
    thing = s.thing()
    goal, start, step, name = rng.choice(_GOALS)
    (said, sign), (said2, sign2) = rng.sample(_TESTS, 2)
    limit, limit2 = rng.randrange(2, 60), rng.randrange(2, 60)
    verb = s.lexicon.verb(rng, thing.index, s.topic, s.register)

    def code(sign: str, limit: int) -> str:
        return (
            f"def {verb.base}_{thing.many}({thing.many}):\n    {start}\n"
            f"    for {thing.one} in {thing.many}:\n        if {thing.one} {sign} {limit}:\n"
            f"            {step.format(x=thing.one)}\n    return {name}"
        )

    opener = s.opener(
        thing.one, ("Here is the function:", "This does it:", "You can write:", "A simple loop will do:")
    )
    first = f"{opener}\n{code(sign, limit)}\nIt goes through the {thing.many} and keeps those {said} {limit}."
    second = f"We change the condition:\n{code(sign2, limit2)}\n"
    second += f"Now it returns {goal} the {thing.many} {said2} {limit2}."
    ask = f"Write a function {verb.base}_{thing.many} that returns {goal} the {thing.many} {said} {limit}."
    again = f"Now let {verb.base}_{thing.many} take those {said2} {limit2} instead."
    return [ask, again], [first, second]


def extraction(s: Setting) -> Turns:
    """Records out of running text; then a question about the records."""
    rng = s.rng
    names = s.people(5)
    jobs = [s.lexicon.topic_agents[s.topic].draw(rng).one for _ in names]
    towns = [s.lexicon.place.draw(rng) for _ in names]
    ages = rng.sample(range(18, 90), len(names))
    lines = []
    for name, job, town, age in zip(names, jobs, towns, ages, strict=True):
        lines.append(rng.choice((
            f"{name}, {article(job)} {job} of {age} years, lives in {town}.",
            f"In {town} we met the {job} {name}, who is {age} years old.",
            f"{name} is {age} and works in {town} as {article(job)} {job}.",
        )))  # fmt: skip
    rows = [f"{n} | {a} | {j} | {t}" for n, a, j, t in zip(names, ages, jobs, towns, strict=True)]
    left_out = rng.randrange(5)
    others = [i for i in range(5) if i != left_out]
    oldest, youngest = max(others, key=lambda i: ages[i]), min(others, key=lambda i: ages[i])
    second = (
        f"The oldest is {names[oldest]}, {article(jobs[oldest])} {jobs[oldest]} from {towns[oldest]}, "
        f"with {ages[oldest]} years. The youngest is {names[youngest]}, "
        f"{article(jobs[youngest])} {jobs[youngest]} from {towns[youngest]}, "
        f"with {ages[youngest]} years. We left out {names[left_out]} from {towns[left_out]}."
    )
    ask = f"List name, age, work and town of everyone: {' '.join(lines)}"
    return [ask, f"But for {names[left_out]}, who is the oldest and who is the youngest?"], [
        "name | age | work | town\n" + "\n".join(rows),
        second,
    ]


def stem(s: Setting) -> Turns:
    """A substance and its properties; then another one beside it."""
    one, other = s.facts.draw(s.rng, "substance"), s.facts.draw(s.rng, "substance")
    style = mix(len(one.name), s.register) % 5
    order = [(f * 2 + style) % 5 + 1 for f in range(5)]
    first = join(s.opener(one.name, _OPENERS), describe(s, one, [0, *order]))
    link = s.opener(
        other.name, ("In contrast to it,", "By comparison,", "Not so different:", "Quite another matter:")
    )
    second = " ".join([f"{link} {other.name} is {other.intro}.", *describe(s, other, [2, 4, 1, 3, 5])])
    ask = s.rng.choice(("Explain what {} is and how it behaves.", "What do we know about {}?",
                        "Describe {} and what it is used for.", "What is {}, and how does it behave?"))  # fmt: skip
    again = s.rng.choice(("And how is {} different?", "How does {} compare?", "What about {}?"))
    return [ask.format(one.name), again.format(other.name)], [first, second]


def humanities(s: Setting) -> Turns:
    """A person, town or guild in history; then a second one in relation to it."""
    one = s.facts.draw(s.rng, s.rng.choice(("person", "guild", "town")))
    other = s.facts.draw(s.rng, s.rng.choice(("person", "town")))
    style = mix(len(one.name), s.register) % 6
    first = join(s.opener(one.name, _OPENERS), describe(s, one, [(style + f) % 6 for f in range(6)]))
    close = s.opener(other.name, (
        "Both are remembered today.", "They never met.", "History is kinder to the first.",
        "Scholars still argue about both.",
    ))  # fmt: skip
    second = " ".join([f"{other.name} is {other.intro}.", *describe(s, other, [2, 3, 5, 0]), close])
    ask = s.rng.choice(("Tell me about {} in history.", "What does history say about {}?",
                        "Write a note on {} for a museum."))  # fmt: skip
    again = s.rng.choice(("Compare that with {}.", "And what about {}?", "How does {} differ?"))
    return [ask.format(one.name), again.format(other.name)], [first, second]


CATEGORIES = {
    "writing": writing, "roleplay": roleplay, "reasoning": reasoning, "math": math,
    "coding": coding, "extraction": extraction, "stem": stem, "humanities": humanities,
}  # fmt: skip
