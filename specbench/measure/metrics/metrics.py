"""The metrics of a run: one function each, in `METRICS`, which summaries, reports and trackers walk.

A metric reads what was measured and is pure. One that could not be measured is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbench.config.spec import BASELINE, METHOD, POOL, QUESTION, RunSpec
from specbench.data.ngrams import ngrams
from specbench.measure.metrics.acceptance import (
    acceptance_at_positions,
    acceptance_length,
    acceptance_length_by_answer,
    acceptance_over,
    acceptance_rate,
    accepted_per_verified,
    judged_positions,
    mbsu,
    occupancy,
    ratio,
    rounds_over,
    sequences_per_pass,
    total,
)
from specbench.measure.metrics.statistics import Estimate, over_passes, speedup
from specbench.measure.metrics.timing import (
    columns_of,
    paired_seconds,
    passes_seconds,
    pools_of,
    question_sums,
    turn_means,
    unit_seconds,
)

if TYPE_CHECKING:
    import pandas as pd

    from specbench.decoding.drafter import Drafter
    from specbench.decoding.scheduler import Scheduler

VERDICTS = EXACT, TIE, VIOLATION = "exact", "tie", "violation"  # the worst last


@dataclass(frozen=True)
class MetricInput:
    """Some questions of a run, as metrics read them.

    Attributes:
        records: of the journal.
        generations: their answers of all arms, as returned by `generations_frame`.
        steps: their rounds of all arms, as returned by `steps_frame`.
        facts: of the run, as `facts.json` holds them.
        reference: the arm that speedups are against.
        spec: the run.
        whole_run: whether these are all questions that were measured.
    """

    records: list[dict]
    generations: pd.DataFrame
    steps: pd.DataFrame
    facts: dict
    reference: str
    spec: RunSpec
    whole_run: bool = True

    def part(self, records: list[dict]) -> MetricInput:
        """The questions of some of the records."""
        question_ids = {record["question_id"] for record in records}
        generations, steps = (
            frame[frame["question_id"].isin(question_ids)] for frame in (self.generations, self.steps)
        )
        return replace(self, records=records, generations=generations, steps=steps, whole_run=False)

    @cached_property
    def method(self) -> pd.DataFrame:
        """Answers of the method."""
        return self.generations[self.generations["arm"] == METHOD]

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """Rounds of the method."""
        return self.steps[self.steps["arm"] == METHOD]

    @cached_property
    def turns(self) -> pd.DataFrame:
        """Means over the repeats, as returned by `turn_means`."""
        return turn_means(self.generations)

    @cached_property
    def seconds(self) -> pd.DataFrame:
        """`paired_seconds` per question."""
        return paired_seconds(self.turns, self.reference)

    @cached_property
    def speedups(self) -> tuple[Estimate, Estimate]:
        """The speedup with its interval over questions or pools, and that with its interval over passes."""
        return speedups(self.generations, self.reference, self.spec.unit)

    @cached_property
    def decode_speedup(self) -> Estimate:
        """The speedup without the prefills of both arms, with its interval over questions or pools."""
        return speedups(self.generations, self.reference, self.spec.unit, with_prefill=False)[0]


def alignment_share(measured: MetricInput) -> float | None:
    """Share of a batch method's seconds that was spent on alignment in memory."""
    return ratio(measured.rounds["align_seconds"].sum(), measured.method["seconds"].sum())


def speedups(
    generations: pd.DataFrame, reference: str, unit: str, with_prefill: bool = True
) -> tuple[Estimate, Estimate]:
    """The speedup with its interval over questions or pools, and that with its interval over passes.

    Args:
        generations: of all arms.
        reference: the arm that they are against.
        unit: what is timed, "question" or "pool".
        with_prefill: whether the prefills of both arms count.
    """
    passes = passes_seconds(generations, reference, with_prefill)
    several = passes.index.name == "process"
    processes = [[[value] for value in one] for one in passes.to_numpy()] if several else []
    runs = unit_seconds(generations, reference, unit, with_prefill)
    return (
        speedup(*columns_of(runs), pools=pools_of(runs), processes=processes),
        over_passes(*columns_of(passes)),
    )


def spec_bench_speedup(turns: pd.DataFrame, reference: str) -> float | None:
    """Mean over questions of the method's tokens/s, divided by that of the reference (Spec-Bench's speed.py).

    Tokens are generated ids in both arms; Spec-Bench counts the baseline's from its text, which favours the
    method.
    """
    timed = turns[["tokens", "seconds"]].loc[:, (slice(None), [reference, METHOD])]
    sums = question_sums(timed)
    rates = sums["tokens"] / sums["seconds"]
    return ratio(rates[METHOD].sum(), rates[reference].sum())


def ceiling_rate(rounds: pd.DataFrame, facts: dict) -> float | None:
    """Tokens per second if each pass did nothing but read the target's weights, for a token of each of its sequences.

    Args:
        rounds: of one arm. In a batch they show how many sequences share a pass.
        facts: of the run.

    Returns:
        None if unknown, as for batches of another engine, or of transformers' generate.
    """
    bandwidth, read = facts["bandwidth_bytes_per_second"], facts["target_pass_bytes"]
    sequences: float | None = 1.0
    if facts["unit"] == POOL:
        sequences = None if facts["engine"] else sequences_per_pass(rounds)
    return sequences * bandwidth / read if sequences and bandwidth and read else None


def bandwidth_fraction(answers: pd.DataFrame, ceiling: float | None) -> float | None:
    """The speed of decoding as a fraction of that of reading the target's weights once per token of each sequence.

    Prefills are left out, as a prefill reads the weights once for many tokens: the fraction of autoregressive decoding
    is what others call model bandwidth utilisation. Above 1: faster than any autoregressive decoding from memory on
    this machine. Weights that fit into the caches can be read faster than memory; keys and values are not counted.

    Args:
        answers: of one arm: columns `tokens`, `seconds`, `prefill_seconds`. Where no prefill was timed, as of
            transformers' generate in older folders, they count whole, and the fraction is a lower bound.
        ceiling: as returned by `ceiling_rate`.
    """
    if ceiling is None:
        return None
    tokens, seconds = answers["tokens"], answers["seconds"]
    if answers["prefill_seconds"].notna().any():
        tokens, seconds = tokens - 1, seconds - answers["prefill_seconds"]  # a prefill gives the first token
    timed = seconds.notna()
    rate = ratio(tokens[timed].sum(), seconds[timed].sum())
    return None if rate is None else rate / ceiling


def distinct_4grams(records: list[dict]) -> float | None:
    """Of all 4-grams in the baseline's answers, the share that does not occur earlier in the same answer.

    An answer that repeats itself is easy to draft by look-up: a low share inflates acceptance lengths.
    """
    arm = BASELINE
    answers = {
        (record["question_id"], turn["turn"], record["repeat"]): turn["arms"][arm][0]["tokens"]
        for record in records
        for turn in record["turns"]
        if turn["arms"].get(arm)
    }
    by_answer = [list(ngrams(tokens, 4)) for tokens in answers.values()]
    return ratio(sum(len(set(one)) for one in by_answer), sum(map(len, by_answer)))


def certificates(records: list[dict], key: str = "equivalence") -> dict[tuple[int, int], list[dict]]:
    """The certificates of every judged answer by (question id, turn), one for each repeat."""
    repeats_of: dict[tuple[int, int], list[dict]] = {}
    for record in records:
        for turn in record["turns"]:
            if (certificate := turn.get(key)) and certificate["verdict"] is not None:
                repeats_of.setdefault((record["question_id"], turn["turn"]), []).append(certificate)
    return repeats_of


def worst_of(some: Iterable[dict]) -> dict:
    """The certificate with the worst verdict, of several the first."""
    return max(some, key=lambda one: VERDICTS.index(one["verdict"]))


def equivalence(records: list[dict], key: str = "equivalence") -> dict:
    """Counts of the verdicts, each the worst of an answer's repeats.

    - answers: number of judged answers; if 0 (sampling), the counts are None.
    - tie_margin: of the widest tie of all repeats, in logits; None without ties.
    - tie_noise: the rounding noise that it was compared with.
    """
    repeats_of = certificates(records, key)
    judged = [worst_of(some) for some in repeats_of.values()]
    divergences = [c["first_divergence"] for c in judged if c["first_divergence"] is not None]
    counts = {name: sum(c["verdict"] == name for c in judged) if judged else None for name in VERDICTS}
    tied = (c for some in repeats_of.values() for c in some if c["verdict"] == TIE)
    margin, noise = max(((abs(c["margin"]), c["noise"]) for c in tied), default=(None, None))
    return {
        "answers": len(judged),
        **counts,
        "first_divergence_median": float(median(divergences)) if divergences else None,
        "tie_margin": margin,
        "tie_noise": noise,
    }


def ties(records: list[dict]) -> dict | None:
    """Number of ties, and the number that rounding explains; None if that was not computed.

    A lossy rule that departs from the target by less than rounding makes ties, too, but too many. Repeats of an answer
    count once.

    - count: ties.
    - expected: the sum of the answers' chances.
    - p_value: of as many or more, if answers tie independently (Poisson's binomial distribution).
    """
    turns = [turn for record in records for turn in record["turns"]]
    judged = [turn for turn in turns if turn.get("tie_chance") is not None and turn["equivalence"]["verdict"]]
    if not judged:
        return None
    chances = [turn["tie_chance"] for turn in judged]
    count = sum(turn["equivalence"]["verdict"] == TIE for turn in judged)
    of_count = np.ones(1)  # probability of each number of ties
    for chance in chances:
        of_count = np.convolve(of_count, [1.0 - chance, chance])
    return {"count": count, "expected": sum(chances), "p_value": min(float(of_count[count:].sum()), 1.0)}


def stats_of(owners: Iterable[type[Drafter | Scheduler]], rounds: pd.DataFrame) -> dict[str, Any]:
    """The numbers that drafters and schedulers keep of their rounds, summarised by their classes."""
    return {name: value for owner in owners for name, value in owner.summarise(rounds).items()}


class Metric(NamedTuple):
    """A number of a run.

    Attributes:
        compute: returns it, or None if it could not be measured.
        unit: of the runs that have it, "question" or "pool"; None: all have.
        timed: whether it compares seconds: some questions of a pool have none of their own, as rounds belong to all.
        of_engines: whether other engines report what it needs.
    """

    compute: Callable[[MetricInput], Any]
    unit: str | None = None
    timed: bool = False
    of_engines: bool = True

    def is_of(self, measured: MetricInput) -> bool:
        """Whether what was measured can have the number."""
        unit, engine = measured.spec.unit, measured.spec.engine
        is_known = engine is None or self.of_engines
        return (
            is_known
            and self.unit in (None, unit)
            and (not self.timed or measured.whole_run or unit == QUESTION)
        )


METRICS = {
    "questions": Metric(lambda m: m.method["question_id"].nunique()),
    "pools": Metric(lambda m: m.method["pool"].nunique(), POOL),
    "tokens": Metric(lambda m: total(m.method["tokens"])),
    "seconds": Metric(lambda m: total(m.method["seconds"])),
    "tokens_per_second": Metric(
        lambda m: ratio(m.method["tokens"].sum(), m.method["seconds"].sum()), timed=True
    ),
    "speedup": Metric(lambda m: m.speedups[0].value, timed=True),
    "speedup_low": Metric(lambda m: m.speedups[0].low, timed=True),
    "speedup_high": Metric(lambda m: m.speedups[0].high, timed=True),
    "speedup_freedom": Metric(lambda m: m.speedups[0].freedom, timed=True),
    "speedup_questions": Metric(lambda m: len(m.seconds)),
    "passes_low": Metric(lambda m: m.speedups[1].low, timed=True),
    "passes_high": Metric(lambda m: m.speedups[1].high, timed=True),
    "decode_speedup": Metric(lambda m: m.decode_speedup.value, timed=True),
    "decode_speedup_low": Metric(lambda m: m.decode_speedup.low, timed=True),
    "decode_speedup_high": Metric(lambda m: m.decode_speedup.high, timed=True),
    "spec_bench_speedup": Metric(lambda m: spec_bench_speedup(m.turns, m.reference), QUESTION),
    "acceptance_length": Metric(lambda m: acceptance_length(m.rounds)),
    "acceptance_length_by_answer": Metric(lambda m: acceptance_length_by_answer(m.rounds)),
    "acceptance_rate": Metric(lambda m: acceptance_rate(m.rounds)),
    "accepted_per_verified": Metric(lambda m: accepted_per_verified(m.rounds)),
    "acceptance_by_position": Metric(lambda m: acceptance_at_positions(m.rounds)),
    "acceptance_by_position_conditional": Metric(
        lambda m: acceptance_at_positions(m.rounds, conditional=True)
    ),
    "judged_by_position": Metric(lambda m: judged_positions(m.rounds)),
    "acceptance_by_place": Metric(lambda m: acceptance_over(m.rounds, "place")),
    "rounds_by_place": Metric(lambda m: rounds_over(m.rounds, "place")),
    "acceptance_by_context": Metric(lambda m: acceptance_over(m.rounds, "context")),
    "rounds_by_context": Metric(lambda m: rounds_over(m.rounds, "context")),
    "mbsu": Metric(lambda m: mbsu(m.rounds, m.facts["target_pass_bytes"])),
    "bandwidth_fraction": Metric(
        lambda m: bandwidth_fraction(m.method, ceiling_rate(m.rounds, m.facts)), timed=True
    ),
    "prefill_seconds": Metric(lambda m: total(m.method["prefill_seconds"])),
    "draft_seconds": Metric(lambda m: total(m.rounds["draft_seconds"])),
    "verify_seconds": Metric(lambda m: total(m.rounds["verify_seconds"])),
    "other_seconds": Metric(lambda m: total(m.rounds["other_seconds"])),
    # Which requests shared a pass of another engine is not known.
    "occupancy": Metric(lambda m: occupancy(m.rounds, m.spec.batch_size), POOL, of_engines=False),
    "align_seconds": Metric(lambda m: total(m.rounds["align_seconds"]), POOL, of_engines=False),
    "alignment_share": Metric(alignment_share, POOL, of_engines=False),
    "stats": Metric(lambda m: stats_of(m.spec.owners, m.rounds)),
    "distinct_4grams": Metric(lambda m: distinct_4grams(m.records)),
}


def numbers(measured: MetricInput, names: Iterable[str] = METRICS) -> dict[str, Any]:
    """The metrics with these names; None for one that `measured` cannot have."""
    chosen = {name: METRICS[name] for name in names}
    return {name: one.compute(measured) if one.is_of(measured) else None for name, one in chosen.items()}
