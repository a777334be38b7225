"""A gate for continuous integration: did a run lose against the one before it?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.config.spec import POOL
from specbench.measure.machine.provenance import COMPARABLE
from specbench.measure.metrics.statistics import LEAST_POOLS, LEAST_QUESTIONS
from specbench.report import remarks, verdicts
from specbench.report.compare import (
    SPEEDUP,
    differing_conditions,
    differing_turns,
    faulty,
    relative,
    without_difference,
)

if TYPE_CHECKING:
    from specbench.report.runs import Run

# A gate judges changes of the code: differing code does not prevent a comparison.
CODE = ("source_sha256", "versions.specbench")
# What may differ on request: keys of provenance, and what a summary holds of how a run computed.
TURNS = "slice_seconds"  # by which arms took turns
NAMES = (*(name.rstrip(".") for name in COMPARABLE), "engine.version", "kernels", "compiled", "seed", TURNS)
PASSED, FAILED, INCOMPARABLE = "passed", "failed", "incomparable"
EXIT_CODES: dict[str | None, int] = {PASSED: 0, FAILED: 1, INCOMPARABLE: 2}


@dataclass(frozen=True)
class Judged:
    """A run against the first one.

    Args:
        ratio: metric of the run / metric of the first, over the questions that both answered; None if unknown.
        low: lower end of its 95 % interval.
        high: upper end.
        count: how many `unit`s the interval rests on.
        verdict: passed, failed or incomparable; None without a limit.
        reasons: why the runs may not be compared, why the run failed, and for a speedup, warnings about the machine
            and what its interval does not cover.

    As text each reason has a line; the last one is the verdict.
    """

    first: str
    run: str
    metric: str
    ratio: float | None
    low: float | None
    high: float | None
    count: int
    unit: str
    fail_below: float | None
    verdict: str | None
    reasons: list[str]

    def __str__(self) -> str:
        value = "unknown" if self.ratio is None else f"{self.ratio:.3f}"
        if self.low is not None:
            value += f" [{self.low:.3f}, {self.high:.3f}]"
        line = f"{self.metric} of {self.run} / {self.first}: {value}, {remarks.paired_over(self.count, self.unit)}"
        if self.verdict:
            line = f"{self.verdict}: {line}, limit {self.fail_below:g}"
        return "\n".join([*self.reasons, line])


def judge(
    runs: list[Run], metric: str = SPEEDUP, fail_below: float | None = None, allow: Collection[str] = ()
) -> list[Judged]:
    """Judges each run after the first by the ratio of a metric to that of the first.

    A run fails when the whole interval is below the limit, or when anything is wrong with either run, such as a
    violation or a failed question: what is fast with other answers, or with fewer, is not fast.

    Args:
        runs: two or more finished runs with their records.
        metric: one of `compare.METRICS`.
        fail_below: the limit; None for none.
        allow: beginnings of provenance keys that may differ, such as "machine" or "versions.torch"; code always may.
    """
    first, *others = runs
    return [_judge(first, run, metric, fail_below, (*CODE, *allow)) for run in others]


def exit_code(judged: list[Judged]) -> int:
    """0 passed, 1 failed, 2 the runs may not be compared; the highest of all."""
    return max(EXIT_CODES.get(one.verdict, 0) for one in judged)


def _judge(first: Run, run: Run, metric: str, fail_below: float | None, allow: tuple[str, ...]) -> Judged:
    hindrances = [*differing_conditions(first, run, allow), *without_difference([first, run])]
    if metric == SPEEDUP:
        hindrances += [
            f"{one.name}: {line}" for one in (first, run) if (line := verdicts.no_speed(one.summary))
        ]
        hindrances += [] if TURNS.startswith(allow) else differing_turns([first, run])
    hindrances += [
        f"{one.name} has no {metric}" for one in (first, run) if one.summary["overall"][metric] is None
    ]
    overall = relative(first, run, metric).get("overall")
    ratio, count, unit = overall or (None, 0, "question")
    value, low, high = (ratio.value, ratio.low, ratio.high) if ratio else (None, None, None)
    if high is None and not hindrances:
        least = f"{LEAST_QUESTIONS} questions that both answered"
        if run.summary["unit"] == POOL:
            least = f"{LEAST_POOLS} pools" + (", or repeats of one" if metric == SPEEDUP else "")
        hindrances.append(f"there is no interval: it takes {least}")
    wrong = faulty([first, run], with_speed=False)
    doubts = remarks.machine_warnings([first, run]) if metric == SPEEDUP else []
    if metric == SPEEDUP and high is not None and remarks.in_one_process([first, run]):
        doubts.append(remarks.ONE_PROCESS)
    verdict = None
    if fail_below is not None:
        lost = high is not None and high < fail_below
        # A failed question is also missing from what can be compared.
        verdict = FAILED if wrong else INCOMPARABLE if hindrances else FAILED if lost else PASSED
    reasons = hindrances + wrong + doubts
    return Judged(first.name, run.name, metric, value, low, high, count, unit, fail_below, verdict, reasons)
