"""The arms of a job on the same questions: what they are asked, in which order, and what the journal gets of it.

Per question the arms take turns on the same prompt, slice by slice (`specbench.decoding.interleave`), or answer by
answer where one of them must not be cut, in an order that rotates: what slows the machine slows all of them alike. A
batch method gets a pool of questions in place of one; everything else is the same.
"""

from __future__ import annotations

import hashlib
import math
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from specbench.config.spec import POOL, QUESTION
from specbench.decoding.cpu.autotune import PassShape, choose_layouts
from specbench.decoding.interleave import Interleaver
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.sampling import TARGET, SamplingParams, position_draws
from specbench.decoding.state import Request
from specbench.decoding.trace import Clock, Generation, Step
from specbench.measure.certify import Certificate, certify
from specbench.measure.machine import provenance
from specbench.measure.machine.watch import LOST, Counters, Watch, added, between
from specbench.measure.metrics.metrics import VERDICTS
from specbench.measure.numeric_noise import batch_noise, drawn_margin, margin, shape_noise
from specbench.measure.remeasure import Attempt, Slice, least_disturbed
from specbench.system.errors import JobError, UserError, one_line
from specbench.system.threads import Threads, use_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from specbench.config.spec import RunSpec
    from specbench.data.questions import Question
    from specbench.decoding.drafter import Drafter
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.measure.arms import Arm
    from specbench.models.pairs import Pair

WARM_UP_TOKENS = 16  # of each arm on a warm-up question, to warm up and to choose the number of threads by
NOISE_TOKENS = 32  # of each warm-up question, on which the rounding noise is measured
# Stop measuring again once more than this share of all time was disturbed, checked after so many seconds.
HOPELESS, HOPELESS_AFTER = 0.5, 3.0
TOLERATED = 0.05  # of a turn's time may be disturbed without measuring it again
# SINGLE: the baseline at batch size 1, in batched runs the reference for equivalence and for the throughput ratio.
BASELINE, METHOD, HF, SINGLE = "baseline", "method", "hf_generate", "single"


@dataclass(slots=True)
class Bench:
    """Everything one job needs.

    Attributes:
        pair: the loaded models.
        target: of the pair.
        drafter: of the method.
        arms: by name.
        decoding: of every answer.
        protocol: whose earlier answers a conversation goes on with: "spec_bench": each arm's own.
        seed: of the sampling.
        spec: the run.
        verify_tokens: tokens of each sequence in the method's widest pass.
        warmup: questions to warm up with.
        slice_seconds: after which an arm hands over to another one; None: arms alternate by whole answers.
        remeasure: how often a turn that others disturbed is measured again at most.
        training: of the parts of the drafter, see `provenance.trained`.
        trained_weights: their sizes and forms, see `provenance.trained_weights`.
        process: number of this process among those that share the repeats of a run.
        peak_memory: bytes, while a batch method ran; None where it was not measured.
        watch: of the machine.
    """

    pair: Pair
    target: StagedModel
    drafter: Drafter
    arms: dict[str, Arm]
    decoding: SamplingParams
    protocol: str
    seed: int
    spec: RunSpec
    verify_tokens: int = 1
    warmup: Sequence[Question] = ()
    slice_seconds: float | None = None
    remeasure: int = 0
    training: dict[str, dict] = field(default_factory=dict)
    trained_weights: dict[str, dict] = field(default_factory=dict)
    process: int = 0
    peak_memory: int | None = None
    watch: Watch = field(default_factory=Watch)
    _noise: float | None = None
    _first: dict[tuple[int, int, str, int], list[int]] = field(default_factory=dict)
    _seconds: float = 0.0
    _disturbed_seconds: float = 0.0

    @property
    def reference(self) -> str:
        """The arm that every answer is compared with."""
        return SINGLE if SINGLE in self.arms else BASELINE

    def prompt(self, question: Question, answers: list[str]) -> list[int]:
        """Token ids of the conversation up to the turn that follows `answers`."""
        messages = []
        for turn, answer in zip(question.turns, answers):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question.turns[len(answers)]})
        return self.pair.prompt_ids(messages)

    def capped(self, prompt: list[int]) -> SamplingParams:
        """The decoding with a cap that the context still holds, the same for every arm."""
        room = self.pair.context_length - len(prompt)
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the context only {self.pair.context_length}"
            )
        return SamplingParams(min(self.decoding.max_new_tokens, room), self.decoding.temperature)

    def recall(self, records: list[dict]) -> None:
        """Takes the answers of earlier repeats from the journal: later ones are certified against the first."""
        for record in records:
            for turn in record["turns"]:
                key = self._key(record["question_id"], turn["turn"], turn["prompt_sha256"], record["repeat"])
                self._first.setdefault(key, turn["arms"][self.reference][0]["tokens"])

    def measure(self, questions: list[Question], place: int, repeat: int = 0) -> list[dict]:
        """Measures some questions, which a batch method answers together.

        A question whose prompt cannot be made or does not fit fails alone; everything else is raised.

        Args:
            questions: to ask.
            place: number of this pool, which with `repeat` chooses the order of the arms.
            repeat: number of the pass over all questions.

        Returns:
            A journal record for each question.
        """
        if place == 0:
            self.drafter.forget()  # of the warm-up, and of the pass before
        said: dict[int, dict[str, list[str]]] = {
            q.question_id: {name: [] for name in self.arms} for q in questions
        }
        turns: dict[int, list[dict]] = {q.question_id: [] for q in questions}
        failed: dict[int, str] = {}
        for turn in range(max(len(q.turns) for q in questions)):
            asked: list[Question] = []
            requests: dict[str, list[Request]] = {name: [] for name in self.arms}
            for q in questions:
                if q.question_id in failed or len(q.turns) <= turn:
                    continue
                try:
                    own = {name: self._request(q, said[q.question_id], name) for name in self.arms}
                except Exception as error:  # noqa: BLE001 - recorded, reported, and the exit code tells
                    failed[q.question_id] = one_line(error)
                    continue
                asked.append(q)
                for name, request in own.items():
                    requests[name].append(request)
            if not asked:
                continue
            for q, record in zip(asked, self._turn(asked, turn, requests, place, repeat)):
                texts = {n: self.pair.decode(record["arms"][n][0]["tokens"]) for n in self.arms}
                for name, text in texts.items():
                    said[q.question_id][name].append(text)
                record["text"] = {name: texts[name] for name in (BASELINE, METHOD)}
                turns[q.question_id].append(record)
        return [
            self.record(q, place, repeat, turns[q.question_id], failed.get(q.question_id)) for q in questions
        ]

    def _request(self, question: Question, said: dict[str, list[str]], arm: str) -> Request:
        """The next turn of a question for one arm, still without a seed."""
        prompt = self.prompt(question, said[arm if self.protocol == "spec_bench" else BASELINE])
        return Request(prompt, self.capped(prompt))

    def record(
        self, question: Question, pool: int, repeat: int, turns: list[dict], error: str | None
    ) -> dict:
        """The journal record of a question; of one that failed with an `error`, no turns."""
        return {
            "question_id": question.question_id,
            "task": question.task,
            "category": question.category,
            "pool": pool,  # questions of one number were measured together
            "repeat": repeat,
            "process": self.process,
            "error": error,
            "turns": [] if error else turns,
        }

    def _turn(
        self,
        questions: list[Question],
        turn: int,
        requests: dict[str, list[Request]],
        place: int,
        repeat: int,
    ) -> list[dict]:
        """One turn of every question through all arms: a record for each."""
        orders = list(permutations(name for name in self.arms if name != SINGLE))
        order = list(orders[(place + turn + repeat) % len(orders)])
        if SINGLE in self.arms:  # as long as all others together: first and last in turns
            order.insert(len(order) * (repeat % 2), SINGLE)
        seeds = [answer_seed(self.seed, q.question_id, turn, repeat) for q in questions]
        seeded = {name: [replace(r, seed=seed) for r, seed in zip(requests[name], seeds)] for name in order}
        self._set_reference_answers(requests[METHOD])
        self.watch.find_children()
        heat = self.watch.heat()
        learnt = self.drafter.snapshot()
        attempts = [self._attempt(seeded)]
        answers, disturbed = least_disturbed(attempts)
        still_disturbed = disturbed
        while self._is_worth_another(attempts, still_disturbed):
            self.drafter.restore(learnt)  # or it would copy the answer that it has just given
            attempts.append(self._attempt(seeded))
            answers, still_disturbed = least_disturbed(attempts)
        heat = between(heat, self.watch.heat())
        machine = _journal_machine(attempts, disturbed, still_disturbed, heat) | {
            "clock_mhz": self.watch.clock_mhz(),
            "gpus": provenance.gpus(provenance.GPU_STATE) if self.pair.device.type == "cuda" else [],
        }
        records = []
        for i, question in enumerate(questions):
            prompts = {name: asked[i].prompt for name, asked in requests.items()}
            own = {name: answered[i] for name, answered in answers.items()}
            every = {name: [attempt.answers[name][i] for attempt in attempts] for name in own}
            prompt = prompts[BASELINE]
            sha256 = hashlib.sha256(repr(prompt).encode()).hexdigest()
            key = self._key(question.question_id, turn, sha256, repeat)
            first = self._first.setdefault(key, own[self.reference].tokens)
            records.append(
                {
                    "turn": turn,
                    "prompt_tokens": len(prompt),
                    "prompt_sha256": sha256,
                    "arms": {name: [_journal(generation)] for name, generation in own.items()},
                    "equivalence": asdict(self._certify(prompts, every, METHOD, first, seeds[i])),
                    "baseline_equivalence": asdict(self._certify(prompts, every, HF, first, seeds[i]))
                    if HF in own
                    else None,
                    "machine": machine,  # that of the whole pool
                }
            )
        return records

    def _set_reference_answers(self, requests: list[Request]) -> None:
        """Gives a drafter that needs them the target's own answers to what it is asked next; not timed."""
        if self.drafter.needs.reference_answer:
            answers = self.arms[BASELINE](requests)
            self.drafter.set_reference_answers([r.prompt for r in requests], [a.tokens for a in answers])

    def _attempt(self, requests: dict[str, list[Request]]) -> Attempt:
        """Lets every arm answer its requests, in turns that begin in the order of `requests`."""
        order = list(requests)
        slices: dict[str, list[Slice]] = {name: [] for name in order}

        @contextmanager
        def watched(number: int) -> Iterator[None]:
            name = order[number]
            counts_memory = name == METHOD and self.spec.unit == POOL
            if counts_memory:
                provenance.reset_peak_memory(self.pair.device)
            before = self.watch.read()
            yield
            counted = between(before, self.watch.read())
            slices[name].append(Slice(turns.tokens[number], counted, self.watch.disturbance(counted)))
            if counts_memory:
                peak = provenance.peak_memory(self.pair.device)
                self.peak_memory = peak and max(peak, self.peak_memory or 0)

        turns = Interleaver(self.slice_seconds or math.inf, watched)
        answers = turns.run([partial(self.arms[name], asked) for name, asked in requests.items()])
        return Attempt(dict(zip(order, answers)), slices)

    def _is_worth_another(self, attempts: list[Attempt], disturbed: float) -> bool:
        """Whether a turn of which this share is disturbed is to be measured again, and that may help."""
        if len(attempts) == 1:
            counted = attempts[0].counted()
            self._seconds += counted["seconds"]
            self._disturbed_seconds += counted["disturbed"]
        busy = self._disturbed_seconds > HOPELESS * self._seconds and self._seconds > HOPELESS_AFTER
        return (
            len(attempts) <= self.remeasure
            and not busy
            and self.spec.unit == QUESTION  # the rounds of a batch belong to all its sequences
            and disturbed > TOLERATED
        )

    def _key(self, question: int, turn: int, prompt_sha256: str, repeat: int) -> tuple[int, int, str, int]:
        """What an answer is certified under: when sampling, every repeat has a text of its own."""
        return question, turn, prompt_sha256, 0 if self.decoding.greedy else repeat

    def _certify(
        self,
        prompts: dict[str, list[int]],
        answers: dict[str, list[Generation]],
        arm: str,
        first: list[int],
        seed: int,
    ) -> Certificate:
        """The worst certificate of an arm's answers, and of the reference's, against the reference's first answer.

        Not judged are answers to other prompts, and such that are drawn with other numbers than the reference's: those
        of transformers, and of a drafter that draws.

        answers: of each arm, in every go: also one that is not timed must be right. seed: of the answers.
        """
        same_draws = self.decoding.greedy or (arm != HF and self.drafter.deterministic)
        if not same_draws or prompts[arm] != prompts[self.reference]:
            return Certificate(None, None, None, None)
        prompt = prompts[self.reference]

        def margin_at(index: int, preferred: int, other: int) -> float:
            if self.decoding.greedy:
                return margin(self.target, prompt, first, index, preferred, other)
            decoding = self.capped(prompt)
            numbers = position_draws(seed, decoding.max_new_tokens, 1, self.pair.device)
            uniform = float(numbers[index, TARGET])
            return drawn_margin(self.target, prompt, first, index, other, decoding, uniform)

        judged = {arm, self.reference} | ({BASELINE} if arm == HF else set())
        texts = {tuple(answer.tokens) for name in judged for answer in answers[name]}
        certificates = [
            certify(first, list(text), self.pair.stop_ids, margin_at, self.noise) for text in texts
        ]
        return max(certificates, key=lambda c: VERDICTS.index(c.verdict))

    def warm_up(self) -> None:
        """Runs every arm on the warm-up questions with the shortest and the longest prompt."""
        # Whole answers where passes are captured: each number of entries that they attend to has a graph of its own.
        whole = isinstance(self.target.runner, GraphRunner)
        requests = self._warm_up_requests(self.decoding.max_new_tokens if whole else WARM_UP_TOKENS)
        by_length = sorted(requests, key=lambda request: len(request.prompt))
        ends = [by_length[0], by_length[-1]]
        self._set_reference_answers(ends)
        for name, arm in self.arms.items():
            arm(ends if name == SINGLE else self._filled(ends))

    def noise(self) -> float:
        """The rounding noise in logits, on the baseline's answers to the warm-up questions.

        It is measured when it is first needed: the first answer that differs waits for it, not the first question.
        """
        if self._noise is None:
            requests = self._warm_up_requests(NOISE_TOKENS)
            answers = self.arms[self.reference](requests)
            samples = [(request.prompt, answer.tokens) for request, answer in zip(requests, answers)]
            self._noise = shape_noise(self.target, samples, trees=self.drafter.max_nodes > 0)
            if self.spec.unit == POOL:
                self._noise = max(self._noise, batch_noise(self.target, samples, self.spec.batch_size))
        return self._noise

    def use_threads(self, asked: int | None) -> Threads:
        """Sets torch's threads for all arms: `asked`, or as many as baseline and method together are fastest with.

        It is measured on the first warm-up question (batches: on as many as fill one).
        """
        requests = self._filled(self._warm_up_requests(WARM_UP_TOKENS))[: self.spec.batch_size]
        self._set_reference_answers(requests)

        def work() -> None:
            for name in (BASELINE, METHOD):
                self.arms[name](requests)

        on_cpu = self.pair.device.type == "cpu"
        return use_threads(asked, work if on_cpu else None, self.choose_layouts)

    def choose_layouts(self, known: dict | None = None) -> dict:
        """Gives all weights the layouts that are fastest in this run's passes; see `autotune.choose_layouts`.

        Those are the baseline's, of one token of each sequence, and the widest of the method. A batch has passes of a
        single sequence, too, of the arm that it is compared with.
        """
        b = self.spec.batch_size
        passes = [PassShape(1, 1), PassShape(b, 1), PassShape(b, self.verify_tokens)]
        return choose_layouts(self.target, passes, known or {})

    def _warm_up_requests(self, most_tokens: int) -> list[Request]:
        """A request for each warm-up question."""
        requests = []
        for question in self.warmup:
            prompt = self.prompt(question, [])
            cap = min(self.capped(prompt).max_new_tokens, most_tokens)
            requests.append(Request(prompt, SamplingParams(cap, self.decoding.temperature), self.seed))
        return requests

    def _filled(self, requests: list[Request]) -> list[Request]:
        """The same requests again until they fill a batch."""
        return requests * -(-self.spec.batch_size // len(requests))


def answer_seed(*parts: int) -> int:
    """A seed for one answer that any of its parts changes; the same on every machine."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _journal(generation: Generation) -> dict:
    """A generation as the journal holds it: steps by column."""
    columns = {name: [getattr(step, name) for step in generation.steps] for name in Step.__dataclass_fields__}
    columns["stats"] = [stats or None for stats in columns["stats"]]
    return {
        "tokens": generation.tokens,
        "prefill_seconds": generation.prefill_seconds,
        "seconds": generation.seconds,
        "finish": generation.finish,
        "steps": columns,
    }


def _journal_machine(
    attempts: list[Attempt], disturbed: float, still_disturbed: float, heat: Counters
) -> dict:
    """What the journal holds of the machine during a turn; the counters are summed over all goes and arms."""
    counted = added([attempt.counted() for attempt in attempts])
    watched = any(name in counted for name in (*LOST, "others"))
    return {
        "goes": len(attempts),
        "disturbed_share": disturbed if watched else None,
        "still_disturbed_share": still_disturbed if watched else None,
        "counters": counted | heat,
    }


def _check_device(device: torch.device, met: Exception) -> None:
    """Raises JobError where a device does nothing more.

    After an illegal address or a failed assertion on a GPU every call of this process fails, and so would every further
    question.
    """
    try:
        Clock(device).synchronize()
    except RuntimeError as error:
        raise JobError(f"{device} has failed and cannot be used any more: {one_line(error)}") from met


def attempt(bench: Bench, questions: list[Question], place: int, repeat: int = 0) -> list[dict]:
    """Measures some questions together; whatever goes wrong with them is recorded, and leaves the others alone."""
    try:
        records = bench.measure(questions, place, repeat)
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 - recorded, reported, and the exit code tells
        _check_device(bench.pair.device, error)
        records = [bench.record(question, place, repeat, [], one_line(error)) for question in questions]
    for record in records:
        if record["error"] is not None:
            tqdm.write(f"question {record['question_id']} failed: {record['error']}", file=sys.stderr)
    return records
