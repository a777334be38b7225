"""Measures one job: `python -m specbench.measure.runner RUN_DIR`, where RUN_DIR holds `config.yaml`.

Every finished question is journalled at once, and the summary is written last: a killed run resumes from its journal.
If several processes share the passes of a run, this one measures its own and ends with the exit code
`run_folder.EXIT_CONTINUE`.
"""

from __future__ import annotations

import gc
import pkgutil
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from specbench.config.spec import BASELINE, HF, METHOD, POOL, SINGLE, RunSpec, make_drafter
from specbench.data.questions import find_questions_file, load_questions, warmup_questions
from specbench.data.warm_start import warm_record
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.trace import counted
from specbench.measure.agreement import check_staged
from specbench.measure.arms import Arm, FastestOf, Setup, generate_arm
from specbench.measure.bench import Bench, attempt
from specbench.measure.certify import Certifier
from specbench.measure.conductor import Conductor
from specbench.measure.draft_length import VariableLength, make_rule
from specbench.measure.facts import changing_facts, facts, models_in_place
from specbench.measure.machine import bandwidth, hardware, provenance
from specbench.measure.machine.speed import Probes
from specbench.measure.metrics.statistics import Estimate
from specbench.measure.plan import RunPlan
from specbench.measure.protocol import Protocol
from specbench.measure.records import run_folder as store
from specbench.measure.round_costs import set_round_costs
from specbench.measure.served import prepare_served
from specbench.measure.warm_up import choose_threads, warm_up
from specbench.models.pairs import load_pair, pair_for
from specbench.system.errors import BusyError, UserError, one_line, one_line_errors
from specbench.system.files import read_json, write_json
from specbench.system.settings import CONSTANT, GOODPUT, parameters

if TYPE_CHECKING:
    from specbench.data.question_files import Question


def prepare(cfg: DictConfig, scheduler: Scheduler | None = None) -> Bench:
    """Loads the pair and builds the arms; `scheduler` replaces the usual one of the method's sequences."""
    spec = RunSpec.of(cfg)
    if spec.engine is not None:
        return prepare_served(cfg, spec)
    needs = spec.needs
    pair_cfg = pair_for(cfg.pair, needs)
    width, with_draft = cfg.decoding.verify_width, needs.draft_model
    pair = load_pair(pair_cfg, cfg.seed, with_draft, width=width, trimmed=spec.trimmed)
    target = pair.staged
    check_staged(target, pair.sample_ids())
    drafter = make_drafter(spec.drafter, pair=pair)
    if spec.scheduler is not None:
        make = pkgutil.resolve_name(spec.scheduler["_target_"])
        scheduler = make(batch_size=spec.batch_size, **parameters(spec.scheduler))
    if (name := cfg.decoding.draft_length) != CONSTANT:
        longest = drafter.max_draft_tokens
        if scheduler is not None:
            longest = min(longest, scheduler.longest_draft)
        if longest < 1:
            raise UserError(
                f"decoding.draft_length={name} has nothing to choose: the batch leaves no room for drafts"
            )
        drafter = VariableLength(drafter, make_rule(name, longest, cfg.decoding.round_costs))

    def engine(drafter: Drafter, scheduler: Scheduler | None = None) -> Engine:
        return Engine(target, drafter, pair.stop_ids, scheduler, pair.context_length)

    measured, single = engine(drafter, scheduler), engine(Drafter())
    arms: dict[str, Arm] = {BASELINE: single.rounds, METHOD: measured.rounds}
    engines = [measured, single]
    if spec.batch_size > 1:
        engines.append(engine(Drafter(), Scheduler(spec.batch_size)))
        arms |= {BASELINE: engines[-1].rounds, SINGLE: single.rounds}
    if cfg.generate:
        arms[HF] = generate_arm(pair, spec.batch_size, counted(target.pass_bytes()))
    sizes = measured.verify_tokens, measured.scheduler.slots
    setup = Setup(pair, target, drafter, arms, spec, *sizes, engines=engines)
    decoding = SamplingParams.from_settings(cfg.decoding)
    protocol = Protocol(pair, decoding, cfg.protocol, cfg.seed, warmup_questions(cfg.data, cfg.task))
    return Bench(
        setup,
        protocol,
        Conductor(setup, None if drafter.extra_cores else cfg.slice_seconds, cfg.remeasure),
        Certifier(setup, protocol),
        provenance.trained(pair_cfg, spec.drafting, needs.draft_model) | warm_record(spec.drafter, pair),
        provenance.trained_weights(spec.drafter),
    )


def choose(bench: Bench, cfg: DictConfig, earlier: Mapping) -> dict[str, Any]:
    """Chooses the number of threads.

    Args:
        bench: of the run.
        cfg: its configuration.
        earlier: provenance of an earlier process of the run, whose choice is reused; {} in the first one.

    Returns:
        `thread_choice`, `baseline_by_threads` and `kernels`, for the provenance.
    """
    threads = earlier["threads"]["torch"] if earlier else cfg.threads
    measured = {int(n): seconds for n, seconds in earlier.get("baseline_by_threads", {}).items()}
    thread_choice, by_threads = choose_threads(bench.setup, bench.protocol, threads, measured)
    return {
        "thread_choice": asdict(thread_choice),
        "baseline_by_threads": by_threads,
        "kernels": bench.setup.target.uses_torch,
    }


def make_ready(
    bench: Bench, cfg: DictConfig, earlier: Mapping, questions: Sequence[Question] = ()
) -> dict[str, Any]:
    """Warms up, and measures the costs of rounds if draft lengths depend on them. Call `choose` first (same Args).

    Returns:
        For the provenance: `unfit`, why the machine is not fit for measuring; `round_costs`; `generate_cache`, the
        cache with which generate is fastest.
    """
    setup, protocol, watch = bench.setup, bench.protocol, bench.conductor.watch
    # One thread on the host drives a GPU; the others are idle.
    watch.threads = torch.get_num_threads() if setup.pair.device.type == "cpu" else 1
    watch.find_children()
    before = watch.read()
    generate = setup.arms.get(HF)
    if isinstance(generate, FastestOf):
        generate.chosen = earlier.get("generate_cache")
    warm_up(setup, protocol, questions)
    costs = None
    if cfg.decoding.draft_length == GOODPUT:
        costs = set_round_costs(setup, protocol, cfg.decoding.round_costs or earlier.get("round_costs"))
    fitness = {"unfit": watch.unfit(before, watch.read()), "round_costs": costs}
    return fitness | ({"generate_cache": generate.chosen} if isinstance(generate, FastestOf) else {})


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
    """Measures this process's share of what the folder lacks, and writes the summary once nothing is missing.

    Returns:
        1 if a question failed, `run_folder.EXIT_CONTINUE` if another process must continue, else 0.
    """
    cfg = OmegaConf.create(store.read_config(run_dir))
    questions = load_questions(cfg.data, cfg.task)
    with store.open_journal(run_dir) as journal:
        (run_dir / store.FAILURE).unlink(missing_ok=True)  # of an earlier attempt
        job = Job(run_dir, cfg, questions, journal)
        repeat = job.next_pass()
        if repeat is not None or not (run_dir / store.FACTS).exists():
            bench = prepare(cfg)
            with closing(bench.setup):
                job.measure(bench, repeat)
        if job.next_pass() is not None:
            return store.EXIT_CONTINUE
        summary = store.finalise(run_dir)
    return 1 if summary["status"] != "complete" else 0


class Job:
    """A run folder with its plan and its journal.

    Args:
        run_dir: the folder.
        cfg: its configuration.
        questions: of every pass.
        journal: of the folder, held by this process.
    """

    def __init__(self, run_dir: Path, cfg: DictConfig, questions: list[Question], journal: store.Journal):
        self.run_dir, self.cfg, self.questions, self.journal = run_dir, cfg, questions, journal
        self.plan = RunPlan.of(cfg)
        self._speedup, self._passes = Estimate(None, None, None), 0  # with its interval over so many passes

    def next_pass(self) -> int | None:
        """The next pass to measure; None if there is none."""
        done = Counter(record["repeat"] for record in self.journal.records)
        seconds = sum(record["wall_seconds"] for record in self.journal.records)
        return self.plan.next(done, len(self.questions), self._width(done), seconds)

    def measure(self, bench: Bench, repeat: int | None) -> None:
        """Warms up, writes provenance and facts, and measures this process's passes from `repeat` on."""
        planned = pools(
            self.questions, self.cfg.pool if bench.setup.spec.unit == POOL else None, self.cfg.seed
        )
        process = 0 if repeat is None else self.plan.process_of(repeat)
        run_facts, probes = self._begin(bench)  # rejects a run begun under other conditions
        drop_torn(self.journal, planned, bench.setup.spec.learns)
        bench.certifier.recall(self.journal.records)
        gc.collect()
        gc.freeze()  # what is loaded by now stays: the collector need not walk it between two questions
        with self._bar(bench) as bar:
            while repeat is not None and self.plan.process_of(repeat) == process:
                done = {r["question_id"] for r in self.journal.records if r["repeat"] == repeat}
                for pool, questions in enumerate(planned):
                    if questions[0].question_id in done:
                        continue
                    if probes.is_due():
                        probes.take_if_possible()
                    begun = time.perf_counter()
                    try:
                        records = attempt(bench, questions, pool, repeat)
                    finally:  # even if a fault ends the job: a resuming process reads it
                        self._keep(run_facts, bench)
                    spent = (time.perf_counter() - begun) / len(questions)
                    if pool == len(planned) - 1:
                        probes.take_if_possible()
                    records[-1]["speed"] = probes.collect()
                    shared = {"process": process, "wall_seconds": spent}
                    self.journal.append(*(record | shared for record in records))
                    bar.update(len(questions))
                repeat = self.next_pass()
                if repeat is not None:
                    bar.total = max(bar.total or 0, (repeat + 1) * len(self.questions))
                bar.set_postfix_str(self._interval())

    def _begin(self, bench: Bench) -> tuple[dict, Probes]:
        """Chooses the threads, warms up, probes the machine, and writes provenance and facts.

        Returns:
            The facts, and the probes with a first one.
        """
        setup, path = bench.setup, self.run_dir / store.PROVENANCE
        earlier = read_json(path) if path.exists() else {}
        chosen = choose(bench, self.cfg, earlier)
        config, questions = OmegaConf.to_container(self.cfg), find_questions_file(self.cfg.data)
        collected = provenance.collect(config, setup.spec.drafting, questions)
        chosen |= make_ready(bench, self.cfg, earlier, self.questions)
        if chosen["unfit"]:
            print(f"this machine is not fit for measuring now: {'; '.join(chosen['unfit'])}", file=sys.stderr)
        probes = Probes(setup.pair.device, bench.conductor.settle)
        first = probes.take_if_possible()
        speed = {"machine": probes.machine, "best": probes.best}
        chosen |= {"device": str(setup.pair.device), "processor": hardware.processor(setup.pair.device)}
        chosen["engine_version"] = None if setup.served is None else setup.served.version
        chosen["compiled"] = setup.target.stack.is_compiled  # known once it has warmed up
        try:
            provenance.record(path, collected | chosen | {"speed": speed | {"first": first}})
        except UserError as error:
            store.give_up(self.run_dir, str(error))
            raise
        ceiling = bandwidth.bandwidth_if_possible(setup.pair.device)
        if (self.run_dir / store.FACTS).exists():  # peak and ceiling are those of all processes
            facts_before = read_json(self.run_dir / store.FACTS)
            ceilings = ceiling, facts_before["bandwidth_bytes_per_second"]
            ceiling = max((one for one in ceilings if one is not None), default=None)
            bench.conductor.peak_memory = facts_before["peak_memory_bytes"]
            if setup.served is not None:  # a fault that the handshake found again is not new
                before, faults = facts_before["engine"]["faults"], setup.served.faults
                faults[:] = [*before, *(fault for fault in faults if fault not in before)]
        run_facts = facts(bench) | {
            "bandwidth_bytes_per_second": ceiling,
            "speed": speed,
            "round_costs": chosen["round_costs"],
            "baseline_by_threads": chosen["baseline_by_threads"],
            **models_in_place(setup, self.cfg.pair, collected["weights"]),
            "questions": collected["questions"]["sha256"],
            "processor": chosen["processor"],
        }
        write_json(self.run_dir / store.FACTS, run_facts)
        return run_facts, probes

    def _keep(self, run_facts: dict, bench: Bench) -> None:
        """Writes the facts if any have changed."""
        if any(run_facts[key] != value for key, value in changing_facts(bench).items()):
            run_facts |= changing_facts(bench)
            write_json(self.run_dir / store.FACTS, run_facts)

    def _bar(self, bench: Bench) -> tqdm:
        done = len(self.journal.records)
        return tqdm(
            desc=", ".join(group["name"] for group in bench.setup.spec.groups.values()),
            unit="question",
            initial=done,
            total=max(self.plan.repeats * len(self.questions), done),
            postfix=self._interval(),
        )

    def _interval(self) -> str:
        """The speedup and its interval over passes in words; empty if there is no interval."""
        speedup = self._speedup
        return "" if speedup.width is None else f"{speedup.value:.3f} [{speedup.low:.3f}, {speedup.high:.3f}]"

    def _width(self, done: Counter) -> float | None:
        """The width of the interval over the whole passes; computed only if passes may be added."""
        passes = sum(count == len(self.questions) for count in done.values())
        if self.plan.precision is None or passes < self.plan.repeats:
            return None
        if self._passes != passes:
            # Late: pandas takes a second to import.
            from specbench.measure.metrics.summary import speedup_over_passes

            recorded_facts = read_json(self.run_dir / store.FACTS)
            self._speedup = speedup_over_passes(self.journal.records, recorded_facts)
            self._passes = passes
        return self._speedup.width


def drop_torn(journal: store.Journal, planned: list[list[Question]], learns: bool) -> None:
    """Drops the records of an incomplete pool (incomplete pass, if the method learns) from a journal; prints that.

    A batch of the other questions alone has another occupancy and other times, which cannot be added to those of the
    first. What was learnt in a pass is lost with the process. The incomplete part is the last of the journal, since
    pools are written one after the other, each at once.
    """
    if not journal.records:
        return
    last = journal.records[-1]
    records = [record for record in journal.records if record["repeat"] == last["repeat"]]
    what, questions = "a pass", sum(map(len, planned))
    if not learns:
        pool = last["pool"]
        records = [record for record in records if record["pool"] == pool]
        what, questions = f"pool {pool + 1} of {len(planned)}", len(planned[pool])
    count = len(records)
    if count < questions:
        print(
            f"{what} was cut short after {count} of its {questions} questions: all of them are measured again",
            file=sys.stderr,
        )
        journal.keep_first(len(journal.records) - count)


@one_line_errors()
def main() -> int:
    """The command line: one argument, the run folder."""
    if len(sys.argv) != 2:
        raise UserError("usage: python -m specbench.measure.runner RUN_DIR")
    run_dir = Path(sys.argv[1])
    try:
        return run(run_dir)
    except BusyError:  # another process holds the folder and records its failures
        raise
    except Exception as error:
        # On a full disk there may be no room for the note: the error is reported all the same.
        with suppress(UserError):
            store.note_failure(run_dir, str(error) if isinstance(error, UserError) else one_line(error))
        raise


if __name__ == "__main__":
    sys.exit(main())
