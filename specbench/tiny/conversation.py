"""The eight MT-Bench categories as two-turn conversations; the second turn builds on the first answer."""

from __future__ import annotations

import itertools

from specbench.tiny.clauses import Writer, sentence
from specbench.tiny.lexicon import REGISTERS, article, mix
from specbench.tiny.tasks import _OPENERS, Setting, Turns, describe, join, register_name


def writing(s: Setting) -> Turns:
    """A story, then the same events in another register."""
    hero = s.writer.person(s.people(1)[0])
    thing = s.writer.phrase(s.thing(), bare=0.0)
    place = s.lexicon.place.draw(s.rng)
    told = s.writer.story(s.rng.choice((6, 7, 8)), [hero])
    start = s.opener(hero.name, (
        f"Once there lived a certain {hero.name} in {place}.", f"Nobody in {place} knew {hero.name} well.",
        f"It was a long day in {place} for {hero.name}.", f"{hero.name} came to {place} in the rain.",
    ))  # fmt: skip
    first = " ".join([start, *(text for _, text in told)])
    target = (s.register + 1 + s.rng.randrange(3)) % 4
    writer = Writer(s.lexicon, s.rng, s.topic, target)
    again = [writer.say(c, linked=i > 0) for i, (c, _) in enumerate(told)][:6]
    ask = f"Write a {register_name(s)} story about {hero.name}, {place} and {thing.english()}."
    ask += f" Topic: {s.topic_name}."
    return [ask, f"Tell it again in a {REGISTERS[target]} style."], [first, " ".join(again)]


def roleplay(s: Setting) -> Turns:
    """First person: a day in the life of someone, then a wish or a fear."""
    agent = s.lexicon.topic_agents[s.topic].draw(s.rng)
    place = s.lexicon.place.draw(s.rng)

    def mine(count: int) -> list[str]:
        lines = []
        for number in range(count):
            clause = s.writer.clause(s.writer.phrase(agent, bare=1.0))
            rest = clause.english().removeprefix(clause.subject.english())
            link = s.writer.connective(clause.subject) + ", " if number and s.rng.random() < 0.5 else ""
            lines.append(sentence(f"{link}I{rest}"))
        return lines

    start = s.opener(agent.one, (f"I am {article(agent.one)} {agent.one} of {place}.",
                                 f"They call me the {agent.one} of {place}.",
                                 f"My days as {article(agent.one)} {agent.one} are long.",
                                 f"Life in {place} is never dull."))  # fmt: skip
    thing = s.lexicon.site(s.rng, agent, s.topic)
    wish = s.opener(thing.one, (
        f"Yes, I often think of the {thing.many}.", f"No, the {thing.many} do not trouble me.",
        f"The {thing.many} are all I have.", f"I would rather not speak of the {thing.many}.",
    ))  # fmt: skip
    ask = f"Pretend to be {article(agent.one)} {agent.one} from {place}. Tell me about your day."
    ask += f" Be {register_name(s)}."
    return [ask, f"Do you think of the {thing.many}?"], [join(start, mine(7)), join(wish, mine(6))]


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
    a, b, c, d = (rng.randrange(2, 10) for _ in range(4))
    product, start = a * b, a * b + c
    value = start * d
    opener = s.opener(str(value), ("We go step by step.", "Brackets come first.", "Let us compute it."))
    first = (
        f"{opener} Inside the brackets {a} * {b} = {product}. Then {product} + {c} = {start}. "
        f"Now we multiply by {d}: {start} * {d} = {value}. So the result is {value}."
    )
    e, f = rng.randrange(2, min(30, value)), rng.randrange(2, 60)
    second = (
        f"The result was {value}. First we take away {e}: {value} - {e} = {value - e}. "
        f"Then we add {f}: {value - e} + {f} = {value - e + f}. The new result is {value - e + f}."
    )
    ask = rng.choice(("What is", "Compute", "Find the value of"))
    return [f"{ask} ({a} * {b} + {c}) * {d}?", f"Take away {e} from it and add {f}."], [first, second]


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
    return [ask, f"Now take those {said2} {limit2} instead."], [first, second]


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
    oldest, youngest = max(range(5), key=lambda i: ages[i]), min(range(5), key=lambda i: ages[i])
    second = (
        f"The oldest is {names[oldest]}, {article(jobs[oldest])} {jobs[oldest]} from {towns[oldest]}, "
        f"with {ages[oldest]} years. The youngest is {names[youngest]}, "
        f"{article(jobs[youngest])} {jobs[youngest]} from {towns[youngest]}, "
        f"with {ages[youngest]} years. Between them lie {ages[oldest]} - {ages[youngest]} = "
        f"{ages[oldest] - ages[youngest]} years."
    )
    ask = f"List name, age, work and town of everyone: {' '.join(lines)}"
    return [ask, "Who is the oldest and who is the youngest?"], [
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
    return [f"Explain what {one.name} is and how it behaves.", f"And how is {other.name} different?"], [
        first,
        second,
    ]


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
    return [f"Tell me about {one.name} in history.", f"Compare that with {other.name}."], [first, second]


CATEGORIES = {
    "writing": writing, "roleplay": roleplay, "reasoning": reasoning, "math": math,
    "coding": coding, "extraction": extraction, "stem": stem, "humanities": humanities,
}  # fmt: skip
