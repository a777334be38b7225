"""What is true in the world: 160 entities of four kinds with six facts each, some far better known."""

from __future__ import annotations

import random
from dataclasses import dataclass

from specbench.tiny.lexicon import Lexicon, Zipf, article, mix, pick_near_equal, plural

KINDS = {"person": 60, "town": 40, "guild": 30, "substance": 30}  # entities of each


@dataclass(frozen=True)
class Entity:
    """One entity: `name`, its `kind`, and six facts, each as (question stem, paraphrases of the answer)."""

    name: str
    kind: str
    intro: str
    facts: tuple[tuple[str, tuple[str, ...]], ...]


class Facts:
    """All entities, drawn by popularity."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        makers = (self._person, self._town, self._guild, self._substance)
        taken: set[str] = set()
        self.by_kind: dict[str, Zipf] = {}
        for number, (maker, (kind, count)) in enumerate(zip(makers, KINDS.items(), strict=True)):
            entities = []
            while len(entities) < count:
                rng = random.Random(mix(lexicon.seed, 7, number, len(entities), len(taken)))
                entity = maker(rng)
                fresh = entity.name not in taken
                taken.add(entity.name if fresh else f"{entity.name}#{len(taken)}")
                if fresh:
                    entities.append(entity)
            self.by_kind[kind] = Zipf(entities, 0.8)
        self._questions = {
            stem.format(entity.name): (entity, number)
            for kind in self.by_kind.values()
            for entity in kind.items
            for number, (stem, _) in enumerate(entity.facts)
        }

    def draw(self, rng: random.Random, kind: str | None = None) -> Entity:
        """An entity; without a `kind` one of a kind that is drawn as well."""
        return self.by_kind[kind or rng.choices([*KINDS], weights=(4, 3, 2, 1))[0]].draw(rng)

    def near(self, entity: Entity) -> Entity:
        """The next entity of the same kind: what an answer about `entity` also mentions."""
        kind = self.by_kind[entity.kind].items
        return kind[(kind.index(entity) + 1) % len(kind)]

    def asked(self, question: str) -> tuple[Entity, int]:
        """The entity and the number of the fact that a question asks for; KeyError when it asks for none."""
        return self._questions[question]

    def _things(self, rng: random.Random) -> tuple[str, str, str, str]:
        """(verb-ing, plural thing, adjective, one thing) on one topic: the material of facts."""
        lex = self.lexicon
        topic = rng.randrange(len(lex.topic_verbs))
        verb = rng.choice(lex.topic_verbs[topic].items)
        thing = rng.choice(lex.topic_things[topic].items)
        return verb.ing, thing.many, lex.adjective(rng, thing, topic, 0).word, thing.one

    def _person(self, rng: random.Random) -> Entity:
        lex = self.lexicon
        name = f"{rng.choice(lex.people)} {rng.choice(lex.people)}"
        agents = [n.one for n in lex.nouns if n.agent]
        job, town, teacher = rng.choice(agents), rng.choice(lex.places), rng.choice(lex.people)
        ing, many, adj, one = self._things(rng)
        ing2, many2, adj2, _ = self._things(rng)
        year = rng.randrange(101, 990)
        return Entity(name, "person", f"{article(job)} {job} from {town}", (
            ("When was {} born?", (f"was born in the year {year}", f"came into the world in {year}")),
            ("Where did {} grow up?", (f"grew up in {town}", f"spent the early years in {town}")),
            ("What is {} known for?", (f"is known for {ing} {many}", f"became famous by {ing} {adj} {many}")),
            ("Who taught {}?", (f"was taught by {teacher}", f"learned the craft from {teacher}")),
            ("What did {} invent?", (f"invented the {adj2} {one}", f"made the first {adj2} {one}")),
            ("What did {} do late in life?", (f"later turned to {ing2} {many2}",
                                              f"spent the last years {ing2} {many2}")),
        ))  # fmt: skip

    def _town(self, rng: random.Random) -> Entity:
        lex = self.lexicon
        name = rng.choice(lex.places)
        _, many, adj, _ = self._things(rng)
        ing, many2, adj2, one2 = self._things(rng)
        river, founder = rng.choice(lex.people), rng.choice(lex.people)
        season = rng.choice(("spring", "summer", "autumn", "winter"))
        size = rng.randrange(2, 98)
        return Entity(name, "town", f"{article(adj)} {adj} town on the river {river}", (
            ("How many people live in {}?", (f"has {size} thousand people",
                                             f"is home to {size} thousand people")),
            ("Which river flows through {}?", (f"lies on the river {river}",
                                               f"stands on the banks of the {river}")),
            ("What does {} trade in?", (f"trades in {many}", f"sells {adj} {many} to its neighbours")),
            ("Who founded {}?", (f"was founded by {founder}", f"owes its beginning to {founder}")),
            ("What can be seen in {}?", (f"is proud of its {adj2} {one2}", f"has a famous {adj2} {one2}")),
            ("When is the festival of {}?", (f"holds a {season} festival of {ing} {many2}",
                                             f"meets every {season} for {ing} {many2}")),
        ))  # fmt: skip

    def _guild(self, rng: random.Random) -> Entity:
        lex = self.lexicon
        ing, many, adj, one = self._things(rng)
        _, many2, adj2, one2 = self._things(rng)
        union = rng.choice(("Guild", "Order", "League", "House"))
        name = f"{union} of the {adj.capitalize()} {one.capitalize()}"
        town, head, rival = rng.choice(lex.places), rng.choice(lex.people), rng.choice(lex.places)
        year = rng.randrange(101, 990)
        return Entity(f"the {name}", "guild", f"a society of {town}", (
            ("When did {} begin?", (f"was formed in the year {year}", f"goes back to the year {year}")),
            ("Where does {} meet?", (f"meets in {town}", f"has its seat in {town}")),
            ("Who leads {}?", (f"is led by {head}", f"follows its master {head}")),
            ("What does {} do?", (f"lives by {ing} {many}", f"takes care of {ing} {many}")),
            ("What is the sign of {}?", (f"carries the sign of {article(adj2)} {adj2} {one2}",
                                         f"shows {article(adj2)} {adj2} {one2} on its flag")),
            ("Who opposes {}?", (f"has an old quarrel with {rival}",
                                 f"never forgave {rival} for taking its {many2}")),
        ))  # fmt: skip

    def _substance(self, rng: random.Random) -> Entity:
        lex = self.lexicon
        ing, many, adj, _ = self._things(rng)
        _, many2, adj2, one2 = self._things(rng)
        name = rng.choice(lex.nouns).one + rng.choice(("ite", "ium", "ide", "ane"))
        town = rng.choice(lex.places)
        state = rng.choice(("metal", "salt", "gas", "oil", "crystal"))
        heat = rng.randrange(11, 98) * 10
        return Entity(name, "substance", f"{article(adj)} {adj} {state}", (
            ("What is {}?", (f"is {article(adj)} {adj} {state}", f"belongs to the {adj} {plural(state)}")),
            ("Where is {} found?", (f"is found near {town}", f"comes from the mines of {town}")),
            ("When does {} melt?", (f"melts at {heat} degrees", f"turns soft at {heat} degrees")),
            ("What is {} used for?", (f"is used for {ing} {many}", f"helps in {ing} {many}")),
            ("How does {} react?", (f"turns {adj2} when it touches {many2}", f"grows {adj2} near {many2}")),
            ("What is made from {}?", (f"goes into every {one2}", f"is the main part of the {one2}")),
        ))  # fmt: skip


def tell(rng: random.Random, entity: Entity, which: list[int], style: int) -> list[str]:
    """Sentences about `entity`, one or two facts each, in a paraphrase that the entity and `style` favour."""
    noun = {"person": "the master", "town": "the town", "guild": "the society", "substance": "the substance"}
    sentences: list[str] = []
    position = 0
    while position < len(which):
        taken = which[position : position + (2 if (style + which[position]) % 3 == 0 else 1)]
        parts = []
        for fact in taken:
            options = entity.facts[fact][1]
            first = mix(len(entity.name), fact, style) % 2
            parts.append(options[first if rng.random() < 0.75 else 1 - first])
        again = [noun[entity.kind], "it" if entity.kind != "person" else entity.name.split()[0]]
        subject = entity.name if not sentences else pick_near_equal(rng, again if style % 2 else again[::-1])
        link = pick_near_equal(rng, ["", "", "also "] if sentences else [""])
        text = f"{subject} {link}{' and '.join(parts)}."
        sentences.append(text[0].upper() + text[1:])
        position += len(taken)
    return sentences
