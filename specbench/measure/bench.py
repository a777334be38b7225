"""A run that is ready to be measured: questions in, journal records out.

Per question, all arms answer the same prompt in turns. A batch method gets a pool of questions in place of one;
everything else is the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from tqdm import tqdm

from specbench.config.spec import BASELINE, METHOD
from specbench.decoding.trace import Clock, Generation, Step
from specbench.measure.certify import worst
from specbench.system.errors import JobError, one_line

if TYPE_CHECKING:
    import torch

    from specbench.data.question_files import Question
    from specbench.decoding.state import Request
    from specbench.measure.arms import Setup
    from specbench.measure.certify import Certifier
    from specbench.measure.conductor import Conductor
    from specbench.measure.protocol import Protocol


@dataclass(slots=True)
class Bench:
    """What measures one job.

    Attributes:
        setup: models and arms.
        protocol: makes their requests.
        conductor: runs and times the arms.
        certifier: judges the answers.
        training: of the parts of the drafter, see `provenance.trained`.
        trained_weights: their sizes and forms, see `provenance.trained_weights`.
    """

    setup: Setup
    protocol: Protocol
    conductor: Conductor
    certifier: Certifier
    training: dict[str, dict] = field(default_factory=dict)
    trained_weights: dict[str, dict] = field(default_factory=dict)

    def measure(self, questions: list[Question], pool: int, repeat: int = 0) -> list[dict]:
        """Measures some questions, which a batch method answers together.

        A question whose prompt cannot be made or does not fit fails alone; a failed turn fails all of them. Earlier
        turns count.

        Args:
            questions: to ask.
            pool: number of this pool, which with `repeat` chooses the order of the arms.
            repeat: number of the pass over all questions.

        Returns:
            A journal record for each question.
        """
        if pool == 0:
            self.setup.drafter.forget()  # of the warm-up, and of the pass before
        arms = self.setup.arms
        texts: dict[int, dict[str, list[str]]] = {q.question_id: {n: [] for n in arms} for q in questions}
        turns: dict[int, list[dict]] = {q.question_id: [] for q in questions}
        errors: dict[int, str] = {}
        for turn in range(max(len(q.turns) for q in questions)):
            requests: dict[int, dict[str, Request]] = {}
            for q in questions:
                if q.question_id in errors or len(q.turns) <= turn:
                    continue
                with _noting(errors, [q.question_id], self.setup.pair.device):
                    requests[q.question_id] = {
                        name: self.protocol.request(q, texts[q.question_id], name, repeat) for name in arms
                    }
            records: dict[int, dict] = {}
            with _noting(errors, requests, self.setup.pair.device):
                records = self._turn(requests, turn, pool, repeat) if requests else {}
            for number, record in records.items():
                for name in arms:
                    texts[number][name].append(self.setup.pair.decode(record["arms"][name][0]["tokens"]))
                record["text"] = {name: texts[number][name][-1] for name in (BASELINE, METHOD)}
                turns[number].append(record)
        return [_record(q, pool, repeat, turns[q.question_id], errors.get(q.question_id)) for q in questions]

    def _turn(
        self, requests: dict[int, dict[str, Request]], turn: int, pool: int, repeat: int
    ) -> dict[int, dict]:
        """Runs one turn of some questions through all arms; returns a record by question."""
        order = self.protocol.order(self.setup.arms, pool, turn, repeat)
        in_order = {name: [by_arm[name] for by_arm in requests.values()] for name in order}
        for engine in self.setup.engines:  # a failed engine has released its buffers
            engine.reserve(in_order[METHOD])
        measured = self.conductor.measure(in_order)
        leans = self.certifier.leans([by_arm[METHOD] for by_arm in requests.values()])
        records: dict[int, dict] = {}
        for i, (number, by_arm) in enumerate(requests.items()):
            attempts = {name: [attempt.answers[name][i] for attempt in measured.attempts] for name in order}
            prompt = by_arm[self.setup.reference].prompt
            records[number] = record = {
                "turn": turn,
                "prompt_tokens": len(prompt),
                "prompt_sha256": hashlib.sha256(repr(prompt).encode()).hexdigest(),
                "arms": {name: [_journal(by_arm[name], measured.answers[name][i])] for name in order},
                "machine": measured.machine,  # that of the whole pool
                "baseline_equivalence": None,
            }
            first = self.certifier.first_answer(number, repeat, record)
            for key, arms in self.setup.judged.items():
                of_arms = (self.certifier.judge(arm, by_arm, attempts, first) for arm in arms)
                record[key] = asdict(worst(of_arms))
            if repeat == 0:  # later ones give the same answers
                chance = self.certifier.tie_chance(by_arm[self.setup.reference], first)
                record |= {} if chance is None else {"tie_chance": chance}
            if judged_arms := self.certifier.by_likelihood:
                likely = {
                    arm: asdict(self.certifier.likelihood(by_arm[arm], measured.answers[arm][i].tokens))
                    for arm in judged_arms
                }
                if leans:
                    likely[METHOD]["lean"] = asdict(leans[i])
                record["likelihood"] = likely
        return records


def attempt(bench: Bench, questions: list[Question], pool: int, repeat: int = 0) -> list[dict]:
    """Measures some questions together; an error is recorded and does not affect other questions."""
    errors: dict[int, str] = {}
    with _noting(errors, [question.question_id for question in questions], bench.setup.pair.device):
        records = bench.measure(questions, pool, repeat)
    if errors:
        records = [_record(one, pool, repeat, [], errors[one.question_id]) for one in questions]
    for record in records:
        if record["error"] is not None:
            tqdm.write(f"question {record['question_id']} failed: {record['error']}", file=sys.stderr)
    return records


@contextmanager
def _noting(errors: dict[int, str], numbers: Iterable[int], device: torch.device) -> Iterator[None]:
    """Records an exception for these questions and suppresses it, unless the whole job has failed."""
    try:
        yield
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 - recorded, reported, and in the exit code
        _check_device(device, error)
        errors.update(dict.fromkeys(numbers, one_line(error)))


def _check_device(device: torch.device, met: Exception) -> None:
    """Raises JobError if a device has stopped working.

    After an illegal address or a failed assertion on a GPU every call of this process fails, and with it every further
    question.
    """
    try:
        Clock(device).synchronize()
    except RuntimeError as error:
        raise JobError(f"{device} has failed and cannot be used any more: {one_line(error)}") from met


def _record(question: Question, pool: int, repeat: int, turns: list[dict], error: str | None) -> dict:
    """The journal record of a question; if it failed with an `error`, `turns` are those before, which count."""
    return {
        "question_id": question.question_id,
        "task": question.task,
        "category": question.category,
        "pool": pool,  # questions of one number were measured together
        "repeat": repeat,
        "error": error,
        "turns": turns,
    }


def _journal(request: Request, generation: Generation) -> dict:
    """A generation as the journal holds it: steps by column, and how long the arm's own prompt was."""
    columns = {name: [getattr(step, name) for step in generation.steps] for name in Step.__dataclass_fields__}
    columns["stats"] = [stats or None for stats in columns["stats"]]
    fields = ("tokens", "prefill_seconds", "seconds", "finish")
    of_generation = {name: getattr(generation, name) for name in fields}
    return {"prompt_tokens": len(request.prompt)} | of_generation | {"steps": columns}
