"""What a target is asked when it writes conversations by itself, and which of them are kept.

After Magpie (Xu et al. 2024, arXiv 2406.08464): an instruction-tuned model that is given the opening of a user's turn
writes what a user might ask, and then answers it. What it does not ask by itself (translations, summaries, questions on
documents) comes from templates, which are filled with what it wrote before.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specbench.data.contamination import words_of
from specbench.data.ngrams import distinct_share, ngrams
from specbench.system.errors import UserError, suggest
from specbench.system.settings import NotNegative, Probability, check

if TYPE_CHECKING:
    from specbench.data.contamination import BenchmarkNgrams

PROSE_WORDS = range(40, 201)  # of an answer that templates may quote
CODE = "```"
LOOP = 16  # consecutive 4-grams of tokens that occurred before make a loop
FIELD = re.compile(r"\{(\w+)\}")
# What templates may hold beside the names of kinds.
TEXT, OTHER, QUESTION, SENTENCE, NUMBER = "text", "other", "question", "sentence", "number"
FIELDS = (TEXT, OTHER, QUESTION, SENTENCE, NUMBER)
LARGEST_NUMBER = 200
KIND_SETTINGS: dict[str, Any] = {
    "share": NotNegative,
    "openings": list[str] | None,
    "templates": list[str] | None,
    "follow_up": Probability | None,
}


@dataclass(frozen=True)
class Kind:
    """A kind of conversation.

    Attributes:
        name: of the kind.
        share: how frequent it is beside the others.
        openings: first words of a user's turn, which the target continues; "" lets it begin by itself.
        templates: whole turns of a user, with fields for what the target wrote before, see `Material`.
        follow_up: share of its conversations in which the target asks a second question.
    """

    name: str
    share: float
    openings: tuple[str, ...]
    templates: tuple[str, ...]
    follow_up: float

    @classmethod
    def of(cls, name: str, cfg: Mapping) -> Kind:
        """The kind of a configuration. Raises UserError for settings that no kind has."""
        for key in cfg:
            if key not in KIND_SETTINGS:
                raise UserError(f"unknown key 'kinds.{name}.{key}': {suggest(str(key), KIND_SETTINGS)}")
        for key, kind in KIND_SETTINGS.items():
            check(f"kinds.{name}.{key}", cfg.get(key), kind)
        openings, templates = tuple(cfg.get("openings") or ()), tuple(cfg.get("templates") or ())
        if not openings and not templates:
            raise UserError(f"kinds.{name} needs openings or templates")
        return cls(name, cfg["share"], openings, templates, cfg.get("follow_up") or 0.0)


def kinds_of(cfg: Mapping) -> list[Kind]:
    """The kinds of a configuration that have a share above 0.

    Raises:
        UserError: there is none, a setting is wrong, or a template has a field that nothing fills.
    """
    kinds = [Kind.of(name, settings) for name, settings in cfg.items() if settings is not None]
    kinds = [kind for kind in kinds if kind.share]
    fields = [*FIELDS, *(kind.name for kind in kinds)]
    for kind in kinds:
        for name in (name for template in kind.templates for name in FIELD.findall(template)):
            if name not in fields:
                hint = suggest(name, fields)
                raise UserError(f"a template of kinds.{kind.name} has the field '{name}': {hint}")
    if not kinds:
        raise UserError("kinds: none has a share above 0")
    return kinds


class Material:
    """Earlier texts of a target, for the fields of templates.

    `{text}` is an answer in prose and `{question}` what it answers, `{other}` another such answer, `{sentence}` its
    first sentence, `{number}` a whole number, drawn anew each time. The name of a kind is an answer of that kind.
    """

    def __init__(self) -> None:
        self._prose: list[tuple[str, str]] = []
        self._answers: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, question: str, answer: str) -> None:
        """Adds a complete answer."""
        self._answers[kind].append(answer)
        if len(answer.split()) in PROSE_WORDS and CODE not in answer:
            self._prose.append((question, answer))

    def fill(self, template: str, rng: random.Random) -> str | None:
        """The template with its fields filled; None while material for one of them is missing."""
        names = set(FIELD.findall(template))
        needed = 2 if OTHER in names else int(bool(names & {TEXT, QUESTION, SENTENCE}))
        if len(self._prose) < needed:
            return None
        values: dict[str, str] = {}
        if needed:
            drawn = rng.sample(self._prose, min(2, len(self._prose)))
            (question, text), (_, other) = drawn[0], drawn[-1]
            values = {TEXT: text, OTHER: other, QUESTION: question, SENTENCE: first_sentence(text)}
        for name in sorted(names - {*FIELDS}):
            if not self._answers[name]:
                return None
            values[name] = rng.choice(self._answers[name])

        def value(match: re.Match) -> str:
            return str(rng.randint(2, LARGEST_NUMBER)) if match[1] == NUMBER else values[match[1]]

        return FIELD.sub(value, template)


def first_sentence(text: str) -> str:
    """The first sentence of a text, or its first line."""
    return re.split(r"(?<=[.!?])\s", text.strip(), maxsplit=1)[0].splitlines()[0]


@dataclass
class Filters:
    """Decides whether a question or an answer is kept, and gives the reason if not.

    Attributes:
        distinct: least share of token 4-grams that do not occur earlier in the text; below it, the text is a loop.
        ascii: least share of ASCII characters; 0 for other languages than English and its neighbours.
        question_words: fewest words of a question.
        answer_tokens: fewest tokens of an answer.
        benchmark: n-grams that no message may contain; None: not searched for.
        seen: questions so far.
    """

    distinct: float
    ascii: float
    question_words: int
    answer_tokens: int
    benchmark: BenchmarkNgrams | None
    seen: set[tuple[str, ...]] = field(default_factory=set)

    def question(self, text: str, ids: Sequence[int]) -> str | None:
        """Returns why a question is dropped, or None if it is kept; a kept question is remembered.

        Args:
            text: of the question.
            ids: the tokens that the target wrote of it.
        """
        words = words_of(text)
        if len(words) < self.question_words:
            return "short question"
        if words in self.seen:
            return "question asked before"
        if (reason := self._of_text(text, ids)) is not None:
            return f"question: {reason}"
        self.remember(text)
        return None

    def remember(self, question: str) -> None:
        """Records a question as asked: the same words are not kept again."""
        self.seen.add(words_of(question))

    def forget(self, question: str) -> None:
        """Forgets a question whose answer is not kept."""
        self.seen.discard(words_of(question))

    def answer(self, text: str, ids: Sequence[int]) -> str | None:
        """Returns why an answer is dropped, or None if it is kept; arguments as in `question`."""
        if len(ids) < self.answer_tokens:
            return "short answer"
        return None if (reason := self._of_text(text, ids)) is None else f"answer: {reason}"

    def _of_text(self, text: str, ids: Sequence[int]) -> str | None:
        if distinct_share(ids) < self.distinct:
            return "loop"
        if sum(map(str.isascii, text)) < self.ascii * len(text):
            return "language"
        if self.benchmark is not None and self.benchmark.in_text(text):
            return "words of the benchmark"
        return None


def loop_start(ids: Sequence[int]) -> int | None:
    """Number of tokens before the first run of `LOOP` repeated 4-grams; None if there is no such run."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end, ngram in enumerate(ngrams(ids, 4), 4):
        repeated = repeated + 1 if ngram in seen else 0
        if repeated == LOOP:
            return end - LOOP
        seen.add(ngram)
    return None
