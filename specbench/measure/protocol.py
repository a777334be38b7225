"""What the arms of a run are asked, and in which order: prompts, caps, seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

from specbench.config.spec import BASELINE, SINGLE
from specbench.decoding.sampling import answer_seed
from specbench.decoding.state import Request
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from specbench.data.question_files import Question
    from specbench.decoding.sampling import SamplingParams
    from specbench.models.pairs import Pair


@dataclass(slots=True)
class Protocol:
    """What a run asks.

    Attributes:
        pair: whose tokenizer, chat template and context prompts are made for.
        decoding: of every answer.
        conversation: whose earlier answers a later turn follows: "spec_bench": each arm's own; else the baseline's.
        seed: of the sampling.
        warmup: questions to warm up with.
    """

    pair: Pair
    decoding: SamplingParams
    conversation: str
    seed: int
    warmup: Sequence[Question] = ()

    def prompt(self, question: Question, answers: Sequence[str]) -> list[int]:
        """Token ids of the conversation up to the turn that follows `answers`."""
        messages = [*question.history]
        for turn, answer in zip(question.turns, answers):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question.turns[len(answers)]})
        return self.pair.prompt_ids(messages)

    def capped(self, prompt: list[int], most: int | None = None) -> SamplingParams:
        """The decoding, capped to what the context holds and to `most`, if given; the same for every arm."""
        length, context = len(prompt), self.pair.context_length
        if length >= context:
            raise UserError(f"the prompt has {length} tokens, the context only {context}")
        caps = (self.decoding.max_new_tokens, context - length, *(() if most is None else (most,)))
        return replace(self.decoding, max_new_tokens=min(caps))

    def longest_prompt(self, questions: Iterable[Question]) -> int:
        """Tokens of the longest prompt that any turn may have, if answers are as long as they can be; 0 without any."""
        longest = 0
        for one in questions:
            turns = len(one.turns) - 1
            with suppress(Exception):  # it fails, and is reported, when it is asked
                # Of a word each: some templates reject an empty assistant message.
                prompt = self.prompt(one, ["x"] * turns)
                longest = max(longest, len(prompt) + turns * self.decoding.max_new_tokens)
        return min(longest, self.pair.context_length - 1)

    def request(self, question: Question, answers: Mapping[str, list[str]], arm: str, repeat: int) -> Request:
        """The next turn of a question for one arm.

        Args:
            question: to ask.
            answers: to its earlier turns, by arm.
            arm: its name.
            repeat: number of the pass over all questions.

        Raises:
            UserError: the prompt does not fit the context.
        """
        prompt = self.prompt(question, answers[arm if self.conversation == "spec_bench" else BASELINE])
        seed = answer_seed(self.seed, question.question_id, len(answers[arm]), repeat)
        return Request(prompt, self.capped(prompt), seed)

    def order(self, arms: Iterable[str], pool: int, turn: int, repeat: int) -> list[str]:
        """The arms in the order of their first slices, which rotates over pools, turns and repeats."""
        single, others = ([arm for arm in arms if (arm == SINGLE) == alone] for alone in (True, False))
        orders = list(permutations(others))
        # Seven at a time: of 24 orders the first six begin with one arm.
        order = orders[7 * (pool + turn + repeat) % len(orders)]
        # It takes as long as all others together: it alternates between first and last.
        return [*order, *single] if repeat % 2 else [*single, *order]

    def warm_up_requests(self, max_new_tokens: int) -> list[Request]:
        """A request for each warm-up question."""
        prompts = [self.prompt(question, []) for question in self.warmup]
        return [Request(prompt, self.capped(prompt, max_new_tokens), self.seed) for prompt in prompts]
