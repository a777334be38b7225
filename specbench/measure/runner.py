"""Measures one job: `python -m specbench.measure.runner RUN_DIR`, where RUN_DIR holds `config.yaml`.

Per question the arms take turns on the same prompt, slice by slice (`specbench.decoding.turns`), or answer by answer
where one of them must not be cut, in an order that rotates from question to question: what slows the machine slows all
of them alike. Every finished question is journalled at once; the summary is written last. A batch method gets a pool of
questions in place of one; everything else is the same.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from specbench.decoding.batch import BatchEngine, Request, Scheduler
from specbench.decoding.draft import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from specbench.decoding.trace import Generation, Step
from specbench.decoding.turns import Turns
from specbench.errors import JobError, UserError, one_line_errors, reason
from specbench.measure import provenance, store
from specbench.measure.arms import Arm, hf_generate_arm, one_by_one
from specbench.measure.equivalence import VERDICTS, Certificate, certify
from specbench.measure.rounding import batch_noise, margin, shape_noise
from specbench.pairs import Pair, load_pair, with_part
from specbench.questions import Question, find_questions_file, load_questions, warmup_questions
from specbench.threads import Threads, use_threads
from specbench.values import parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM_UP_TOKENS = 16  # of each arm on a warm-up question, to warm up and to choose the number of threads by
NOISE_TOKENS = 32  # of each warm-up question, on which the rounding noise is measured
# SINGLE: plain decoding at batch size 1; in batched runs the reference for equivalence and for the throughput ratio.
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
        repeats: answers of each arm to each question.
        protocol: whose earlier answers a conversation goes on with: "spec_bench": each arm's own.
        seed: of the sampling.
        batch_size: None for a method that decodes one sequence at a time.
        warmup: questions to warm up with.
        slice_seconds: after which an arm hands over to another one; None: arms alternate by whole answers.
        peak_memory: bytes, while a batch method ran; None where it was not measured.
    """

    pair: Pair
    target: Target
    drafter: Drafter
    arms: dict[str, Arm]
    decoding: Decoding
    repeats: int
    protocol: str
    seed: int
    batch_size: int | None = None
    warmup: Sequence[Question] = ()
    slice_seconds: float | None = None
    peak_memory: int | None = None
    _noise: float | None = None

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

    def capped(self, prompt: list[int]) -> Decoding:
        """The decoding with a cap that the context still holds, the same for every arm."""
        room = self.pair.context_length - len(prompt)
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the context only {self.pair.context_length}"
            )
        return Decoding(min(self.decoding.max_new_tokens, room), self.decoding.temperature)

    def measure(self, questions: list[Question], place: int) -> list[dict]:
        """Measures some questions, which a batch method answers together.

        A question whose prompt cannot be made or does not fit fails alone; everything else is raised.

        Args:
            questions: to ask.
            place: number of this measurement, which chooses the order of the arms.

        Returns:
            A journal record for each question.
        """
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
                    failed[q.question_id] = reason(error)
                    continue
                asked.append(q)
                for name, request in own.items():
                    requests[name].append(request)
            if not asked:
                continue
            for q, record in zip(asked, self._turn(asked, turn, requests, place)):
                texts = {n: self.pair.decode(record["arms"][n][0]["tokens"]) for n in self.arms}
                for name, text in texts.items():
                    said[q.question_id][name].append(text)
                record["text"] = {name: texts[name] for name in (BASELINE, METHOD)}
                turns[q.question_id].append(record)
        return [
            failure(q, place, failed[q.question_id])
            if (q.question_id in failed)
            else _record(q, place, turns[q.question_id])
            for q in questions
        ]

    def _request(self, question: Question, said: dict[str, list[str]], arm: str) -> Request:
        """The next turn of a question for one arm, still without a seed."""
        prompt = self.prompt(question, said[arm if self.protocol == "spec_bench" else BASELINE])
        return Request(prompt, self.capped(prompt))

    def _turn(
        self, questions: list[Question], turn: int, requests: dict[str, list[Request]], place: int
    ) -> list[dict]:
        """One turn of every question through all arms: a record for each."""
        orders = list(permutations(name for name in self.arms if name != SINGLE))
        answers: dict[str, list[list[Generation]]] = {name: [] for name in self.arms}  # by arm, then repeat
        for repeat in range(self.repeats):
            seeds = [answer_seed(self.seed, q.question_id, turn, repeat) for q in questions]
            order = list(orders[(place + turn + repeat) % len(orders)])
            if SINGLE in self.arms:  # as long as all others together: first and last in turns
                order.insert(len(order) * (repeat % 2), SINGLE)
            seeded = {
                name: [replace(r, seed=seed) for r, seed in zip(requests[name], seeds)] for name in order
            }
            if self.slice_seconds is not None:
                turns = Turns(self.slice_seconds)
                said = turns.run([partial(self.arms[name], seeded[name]) for name in order])
                for name, answered in zip(order, said):
                    answers[name].append(answered)
                continue
            for name in order:
                watched = name == METHOD and self.batch_size
                if watched:
                    provenance.reset_peak_memory(self.pair.device)
                answers[name].append(self.arms[name](seeded[name]))
                if watched:
                    peak = provenance.peak_memory(self.pair.device)
                    self.peak_memory = peak and max(peak, self.peak_memory or 0)
        records = []
        for i in range(len(questions)):
            prompts = {name: asked[i].prompt for name, asked in requests.items()}
            own = {name: [repeat[i] for repeat in repeats] for name, repeats in answers.items()}
            prompt = prompts[BASELINE]
            records.append(
                {
                    "turn": turn,
                    "prompt_tokens": len(prompt),
                    "prompt_sha256": hashlib.sha256(repr(prompt).encode()).hexdigest(),
                    "arms": {name: [_journal(g) for g in generations] for name, generations in own.items()},
                    "equivalence": asdict(self._certify(prompts, own, METHOD)),
                    "baseline_equivalence": asdict(self._certify(prompts, own, HF)) if HF in own else None,
                }
            )
        return records

    def _certify(
        self, prompts: dict[str, list[int]], answers: dict[str, list[Generation]], arm: str
    ) -> Certificate:
        """The worst certificate of an arm's repeats, and of the reference's later ones, against its first answer."""
        if not self.decoding.greedy or prompts[arm] != prompts[self.reference]:
            return Certificate(None, None, None, None)
        prompt, reference = prompts[self.reference], answers[self.reference][0].tokens

        def margin_at(index: int, preferred: int, other: int) -> float:
            return margin(self.target, prompt, reference, index, preferred, other)

        others = answers[arm] + answers[self.reference][1:]
        if arm == HF and self.reference == SINGLE:
            others = others + answers[BASELINE]
        certificates = [
            certify(reference, a.tokens, self.pair.stop_ids, margin_at, self.noise) for a in others
        ]
        return max(certificates, key=lambda c: VERDICTS.index(c.verdict))

    def warm_up(self) -> None:
        """Runs every arm on the warm-up questions with the shortest and the longest prompt."""
        by_length = sorted(self._warm_up_requests(WARM_UP_TOKENS), key=lambda request: len(request.prompt))
        ends = [by_length[0], by_length[-1]]
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
            self._noise = shape_noise(self.target, samples)
            if self.batch_size:
                self._noise = max(self._noise, batch_noise(self.target, samples, self.batch_size))
        return self._noise

    def use_threads(self, asked: int | None) -> Threads:
        """Sets torch's threads for all arms: `asked`, or as many as baseline and method together are fastest with.

        It is measured on the first warm-up question (batches: on as many as fill one).
        """
        requests = self._filled(self._warm_up_requests(WARM_UP_TOKENS))[: self.batch_size or 1]

        def work() -> None:
            for name in (BASELINE, METHOD):
                self.arms[name](requests)

        return use_threads(asked, work if self.pair.device.type == "cpu" else None)

    def _warm_up_requests(self, most_tokens: int) -> list[Request]:
        """A request for each warm-up question."""
        requests = []
        for question in self.warmup:
            prompt = self.prompt(question, [])
            cap = min(self.capped(prompt).max_new_tokens, most_tokens)
            requests.append(Request(prompt, Decoding(cap, self.decoding.temperature), self.seed))
        return requests

    def _filled(self, requests: list[Request]) -> list[Request]:
        """The same requests again until they fill a batch."""
        return requests * -(-(self.batch_size or 1) // len(requests))


def answer_seed(*parts: int) -> int:
    """A seed for one answer that any of its parts changes; the same on every machine."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _journal(generation: Generation) -> dict:
    """A generation as the journal holds it: steps by column."""
    columns = {name: [getattr(step, name) for step in generation.steps] for name in Step.__dataclass_fields__}
    return {
        "tokens": generation.tokens,
        "prefill_seconds": generation.prefill_seconds,
        "seconds": generation.seconds,
        "finish": generation.finish,
        "steps": columns,
    }


def prepare(cfg: DictConfig) -> Bench:
    """Loads the pair and builds the arms."""
    method = hydra.utils.get_class(cfg.method._target_)
    batched = issubclass(method, Scheduler)
    drafting = cfg.drafter if batched else cfg.method
    drafter_class = hydra.utils.get_class(drafting._target_)
    needs = drafter_class.needs  # type: ignore[attr-defined] # Hydra gives a bare type
    pair_cfg = cfg.pair
    if needs.part:  # it may bring the draft model with it
        pair_cfg = with_part(cfg.pair, needs.draft_of(cfg.pair))
    pair = load_pair(pair_cfg, cfg.seed, with_draft=needs.draft_model)
    target = Target(pair.target)
    target.check()
    # Not hydra's instantiate, which would wrap what a method says is wrong.
    drafter = drafter_class(pair=pair, **parameters(drafting))
    ends = (pair.stop_ids, pair.context_length)
    size = cfg.batch_size if batched else None
    if batched:
        scheduler = method(batch_size=size, **parameters(cfg.method))
        single = one_by_one(Engine(target, Drafter(), *ends))
        plain = BatchEngine(target, Drafter(), Scheduler(cfg.batch_size), *ends).generate
        arms: dict[str, Arm] = {
            BASELINE: plain if cfg.batch_size > 1 else single,
            METHOD: BatchEngine(target, drafter, scheduler, *ends).generate,
        }
        if cfg.batch_size > 1:
            arms[SINGLE] = single
    else:
        arms = {
            BASELINE: one_by_one(Engine(target, Drafter(), *ends)),
            METHOD: one_by_one(Engine(target, drafter, *ends)),
        }
    if cfg.generate:
        arms[HF] = hf_generate_arm(pair, size or 1)
    decoding = Decoding(cfg.decoding.max_new_tokens, cfg.decoding.temperature)
    warmup = warmup_questions(cfg.data)
    whole = batched or drafter.uninterrupted
    return Bench(
        pair=pair,
        target=target,
        drafter=drafter,
        arms=arms,
        decoding=decoding,
        repeats=cfg.repeats,
        protocol=cfg.protocol,
        seed=cfg.seed,
        batch_size=size,
        warmup=warmup,
        slice_seconds=None if whole else cfg.slice_seconds,
    )


def attempt(bench: Bench, questions: list[Question], place: int) -> list[dict]:
    """Measures some questions together; whatever goes wrong with them is recorded, and leaves the others alone."""
    try:
        records = bench.measure(questions, place)
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 - recorded, reported, and the exit code tells
        records = [failure(question, place, reason(error)) for question in questions]
    for record in records:
        if record["error"] is not None:
            tqdm.write(f"question {record['question_id']} failed: {record['error']}", file=sys.stderr)
    return records


def failure(question: Question, pool: int, error: str) -> dict:
    """The journal record of a question that failed."""
    return _record(question, pool, []) | {"error": error}


def _record(question: Question, pool: int, turns: list[dict]) -> dict:
    return {
        "question_id": question.question_id,
        "task": question.task,
        "category": question.category,
        "pool": pool,  # questions of one number were measured together
        "error": None,
        "turns": turns,
    }


def pools(questions: list[Question], size: int | None, seed: int) -> list[list[Question]]:
    """The questions as they are measured: one by one, or in pools, whose order mixes the tasks as on a server.

    Args:
        questions: all of a run.
        size: questions of a pool at most, all pools about equal; None: one by one.
        seed: of the order.
    """
    if size is None:
        return [[question] for question in questions]
    mixed = random.Random(seed).sample(questions, len(questions))
    n = -(-len(questions) // size)
    return [mixed[i::n] for i in range(n)]


def run(run_dir: Path) -> int:
    """Measures what the folder still lacks and writes its summary; returns 1 if a question failed, else 0."""
    cfg = OmegaConf.create(store.read_config(run_dir))
    questions = load_questions(cfg.data, cfg.task)
    with store.open_journal(run_dir) as journal:
        if len(journal.records) < len(questions) or not _is_known(run_dir):
            bench = prepare(cfg)
            with closing(bench.drafter):
                _measure(run_dir, cfg, bench, questions, journal)
        summary = store.finalise(run_dir)
    return 1 if summary["status"] != "complete" else 0


def drop_torn_pool(journal: store.Journal, planned: list[list[Question]]) -> None:
    """Drops from a journal the records of a pool that lacks some, and prints that.

    A batch of the other questions alone has another occupancy and other times, which cannot be added to those of the
    first. It is the last pool of the journal, since pools are written one after the other, each at once.
    """
    if not journal.records:
        return
    place = journal.records[-1]["pool"]
    count = sum(record["pool"] == place for record in journal.records)
    if count < len(planned[place]):
        print(
            f"pool {place + 1} of {len(planned)} was cut short behind {count} of its {len(planned[place])} questions: "
            "all of them are measured again",
            file=sys.stderr,
        )
        journal.keep_first(len(journal.records) - count)


def _measure(
    run_dir: Path, cfg: DictConfig, bench: Bench, questions: list[Question], journal: store.Journal
) -> None:
    """Warms up, notes what the run is made of, and measures the questions that are not in the journal."""
    planned = pools(questions, cfg.pool if bench.batch_size else None, cfg.seed)
    drop_torn_pool(journal, planned)
    done = {record["question_id"] for record in journal.records}
    asked = cfg.threads
    if (run_dir / store.PROVENANCE).exists():  # gone on with: the same number, not one that is measured anew
        asked = store.read_json(run_dir / store.PROVENANCE)["threads"]["torch"]
    chosen = bench.use_threads(asked)
    found = provenance.collect(OmegaConf.to_container(cfg), find_questions_file(cfg.data))
    provenance.record(run_dir, found | {"thread_choice": asdict(chosen)})
    bench.warm_up()
    if (run_dir / store.FACTS).exists():  # gone on with: the peak is that of all parts
        bench.peak_memory = store.read_json(run_dir / store.FACTS)["peak_memory_bytes"]
    known = facts(bench)
    store.write_json(run_dir / store.FACTS, known)
    gc.collect()
    gc.freeze()  # what is loaded by now stays: the collector need not walk it between two questions
    label = f"{cfg.method.name}, {cfg.drafter.name}" if bench.batch_size else cfg.method.name
    with tqdm(desc=label, unit="question", initial=len(done), total=len(questions)) as bar:
        for place, pool in enumerate(planned):
            if pool[0].question_id not in done:
                journal.append(*attempt(bench, pool, place))
                bar.update(len(pool))
                if bench.peak_memory != known["peak_memory_bytes"]:
                    known["peak_memory_bytes"] = bench.peak_memory
                    store.write_json(run_dir / store.FACTS, known)
    store.write_json(run_dir / store.FACTS, known | {"noise": bench.noise()})


def _is_known(run_dir: Path) -> bool:
    """Whether the run's facts are all there, the noise as the last of them."""
    path = run_dir / store.FACTS
    return path.exists() and store.read_json(path)["noise"] is not None


def facts(bench: Bench) -> dict:
    """What the summary needs of the run beside its records; the noise is added when the records are there."""
    pair = bench.pair
    return {
        "target_pass_bytes": bench.target.pass_bytes(),
        "threads": torch.get_num_threads(),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "device": str(pair.device),
        "bandwidth_bytes_per_second": provenance.bandwidth(pair.device),
        "noise": None,
        "weights": pair.init,
        "anatomy": pair.anatomy,
        "batched": bench.batch_size is not None,
        "slice_seconds": bench.slice_seconds,
        "peak_memory_bytes": bench.peak_memory,
    }


@one_line_errors()
def main() -> int:
    """The command line: one argument, the run folder."""
    if len(sys.argv) != 2:
        raise UserError("usage: python -m specbench.measure.runner RUN_DIR")
    run_dir = Path(sys.argv[1])
    try:
        return run(run_dir)
    except Exception as error:
        with suppress(
            UserError
        ):  # on a full disk there may be no room for the note: what happened is told all the same
            store.note_failure(run_dir, str(error) if isinstance(error, UserError) else reason(error))
        raise


if __name__ == "__main__":
    sys.exit(main())
