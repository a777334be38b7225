"""Which method to take: what was measured as fastest, for each pair and way of decoding, and how sure that is.

Runs are alternatives if they differ only in the method and its settings. A run with a violation or a failed question is
none. Two of them are distinguished if their intervals do not overlap: a cautious rule, as it does not use that both
asked the same questions (`specbench compare` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specbench.config.spec import POOL, without_group
from specbench.measure.metrics.statistics import LEAST_POOLS, LEAST_QUESTIONS, Estimate, verdict, widened
from specbench.report import remarks, verdicts
from specbench.report.cells import (
    NUMBER,
    UNKNOWN,
    WRONG,
    PlainTable,
    equivalence_text,
    number_text,
    speedup_text,
)
from specbench.report.labels import (
    DIFFERING,
    DISTRIBUTION,
    as_text,
    chosen_settings,
    method_label,
    named,
    of_engine,
    varied_settings,
)
from specbench.report.phases import slow_machine
from specbench.report.training_data import tokens_seen
from specbench.system.settings import TOKEN

if TYPE_CHECKING:
    from rich.table import Table

    from specbench.report.runs import Run

# What alternatives share; what a title words differently from a label.
SETTING = (
    *("pair", "data", "split", "turns", "task", "limit", *DISTRIBUTION, "max_new_tokens", "seed"),
    *("verification", "dtype", "device", "processor", "weights", "anatomy", "batch_size", "pool", "protocol"),
)
IN_TITLES = DIFFERING | {
    "pair": "pair={}",
    "data": "data={}",
    "task": "task={}",
    "temperature": "temperature {:g}",
    "top_k": "top_k {}",
    "top_p": "top_p {:g}",
}
USUAL = {
    "pool": 48,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "verification": TOKEN,
    "task": "all",
    "weights": "pretrained",
    "protocol": "paired",
}  # defaults, not shown
# What matters as well, and is shown if it differs.
UNSAID = {
    "target": "target={}",
    "verify_width": "verify_width={}",
    "compiled": "compiled={}",
    "graphs": "graphs={}",
    "kernels": "kernels={}",
    "prompting": "prompts {:.8}",
    "questions_sha256": "questions {:.8}",
}
ENGINE = "engine"  # what a speedup is quoted against, if it is our own loop
SHOWN = 12  # alternatives in a table
NARROWEST = 12  # characters of a column of words
LENGTH = "max_draft_tokens"
# Names of the draft length: here, for a batch's drafter, and in other engines.
LENGTHS = (
    *(LENGTH, f"drafter.{LENGTH}", "num_speculative_tokens", "num_assistant_tokens"),
    *("draft.n_max", "ngram_simple.size_m"),
)
OF_TREES = ("nodes", "width")  # settings of older runs that drafted trees
FASTEST, AS_FAST, GAINS, NONE = "fastest", "not told apart", "gains", "not to be trusted"
OF_VERDICT = {"faster": GAINS, "slower": "slower", "no difference": "no gain shown", None: "no gain shown"}


@dataclass
class Alternative:
    """Runs of one method with the same settings: the last one speaks for all."""

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def summary(self) -> dict:
        """Of the last run."""
        return self.runs[-1].summary

    @property
    def speedup(self) -> float:
        """Of the last run; 0 if it has none."""
        return self.summary["overall"]["speedup"] or 0.0

    @property
    def faults(self) -> list[str]:
        """What is wrong with any of the runs."""
        return [line for run in self.runs for line in verdicts.faults(run.summary)]

    @property
    def spread(self) -> str:
        """The lowest and the highest speedup of several runs."""
        speedups = [run.summary["overall"]["speedup"] for run in self.runs]
        speedups = [speedup for speedup in speedups if speedup is not None]
        return f"{min(speedups):.2f}–{max(speedups):.2f} in {len(speedups)}" if len(speedups) > 1 else UNKNOWN


@dataclass
class Decision:
    """What was measured in one setting.

    Attributes:
        setting: what its runs share, in words.
        alternatives: the fastest first.
        itself: runs of the baseline against itself.
    """

    setting: str
    alternatives: list[Alternative]
    itself: list[Run]

    @cached_property
    def ranks(self) -> list[str]:
        """The rank of each alternative relative to the fastest of those that gain.

        The fastest of many gains by chance more often than one: the level of each is divided by their number.
        """
        alone = [_rank(one, len(self.alternatives)) for one in self.alternatives]
        if GAINS not in alone:
            return alone
        best = alone.index(GAINS)
        least = self.alternatives[best].summary["overall"]["speedup_low"]
        return [
            FASTEST
            if i == best
            else AS_FAST
            if rank == GAINS and one.summary["overall"]["speedup_high"] >= least
            else rank
            for i, (one, rank) in enumerate(zip(self.alternatives, alone))
        ]

    @property
    def sentence(self) -> str:
        """The answer: which to take, or none."""
        ranked: dict[str, list[str]] = {}
        for one, rank in zip(self.alternatives, self.ranks):
            ranked.setdefault(rank, []).append(one.label)
        if FASTEST in ranked:
            best = self.alternatives[self.ranks.index(FASTEST)].summary
            what = f"{ranked[FASTEST][0]}{_size_in_words(best)}"
            parts = [f"Take {what} with {speedup_text(best['overall'])} times the baseline's speed"]
            if (count := len(self.alternatives)) > 1:
                chosen = of_many(best["overall"], count)
                interval = f"[{chosen.low:.2f}, {chosen.high:.2f}] allows for that choice"
                parts.append(
                    f"It is the best of {count}: {interval}, and other questions will tend to show less"
                )
            if AS_FAST in ranked:
                parts.append(f"Not told apart from it: {named(ranked[AS_FAST])}")
        elif (lacking := self._lacking_interval) is not None:
            parts = [f"No verdict: {lacking}"]
        else:
            parts = ["Stay with autoregressive decoding: no method is shown to be faster"]
        if NONE in ranked:
            parts.append(f"Not to be trusted: {named(ranked[NONE])}")
        if self.alarm is not None:
            explained = self._explained_by(self.alarm)
            which = "speedup here" if ranked[FASTEST][0] in explained else f"gain of {named(explained)}"
            gave = speedup_text(self.alarm.summary["overall"])
            parts.append(f"The baseline against itself gave {gave}: trust no {which}")
        return ". ".join(parts)

    @property
    def questions(self) -> str:
        """How many questions its runs asked, such as "1 question", or "12–36 questions"."""
        counts = sorted({one.summary["overall"]["questions"] for one in self.alternatives})
        return (
            f"{'–'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} question{'s' * (counts[-1] != 1)}"
        )

    @property
    def _lacking_interval(self) -> str | None:
        """Why no run has an interval, and how to get one; None if a run has one."""
        summaries = [one.summary for one in self.alternatives]
        if any(summary["overall"]["speedup_low"] is not None for summary in summaries):
            return None
        if all(summary["unit"] == POOL for summary in summaries):
            return f"an interval needs at least {LEAST_POOLS} pools, or repeats of one: raise repeats"
        if all(summary["overall"]["questions"] < LEAST_QUESTIONS for summary in summaries):
            needs = (
                f"an interval needs at least {LEAST_QUESTIONS} questions, these runs have {self.questions}"
            )
            failed = any(summary["failed"] for summary in summaries)
            return f"{needs}: {'the others failed' if failed else 'raise data.limit'}"
        return "no run has an interval"

    @cached_property
    def alarm(self) -> Run | None:
        """The run in which the baseline differs most from itself, and by as much as a method gains; None if none does.

        Of many such runs some differ by chance: the level of each is divided by their number.
        """
        count = len(self.itself)
        alarming = [run for run in self.itself if _differs(run, count) and self._explained_by(run)]
        return max(alarming, key=lambda run: abs(math.log(run.summary["overall"]["speedup"])), default=None)

    def _explained_by(self, run: Run) -> list[str]:
        """The alternatives whose gains a run of the baseline against itself explains."""
        itself = run.summary["overall"]
        return [
            one.label
            for one, rank in zip(self.alternatives, self.ranks)
            if rank in (FASTEST, AS_FAST, GAINS)
            and verdicts.could_explain(itself["speedup_low"], itself["speedup_high"], one.summary["overall"])
        ]


def _differs(run: Run, count: int) -> bool:
    """Whether the interval of the baseline against itself excludes 1, in one of `count` such runs."""
    return verdict_of_many(run.summary["overall"], count) in ("faster", "slower")


def _rank(one: Alternative, count: int) -> str:
    """The rank of an alternative against the baseline, as one of `count` alternatives."""
    return NONE if one.faults else OF_VERDICT[verdict_of_many(one.summary["overall"], count)]


def verdict_of_many(overall: Mapping[str, Any], count: int) -> str | None:
    """As `verdict`, for a speedup that is one of `count` from which the fastest is chosen."""
    interval = of_many(overall, count)
    return verdict(interval.low, interval.high)


def of_many(overall: Mapping[str, Any], count: int) -> Estimate:
    """A speedup with the interval that it needs as one of `count` from which the fastest is chosen."""
    value, low, high = (overall[f"speedup{end}"] for end in ("", "_low", "_high"))
    return widened(Estimate(value, low, high, overall["speedup_freedom"]), count)


def decisions(runs: Iterable[Run]) -> list[Decision]:
    """A decision for each setting, in the order of the runs."""
    runs = [run for run in runs if not is_hypothetical(run.summary)]
    varied = varied_settings(run.summary for run in runs)
    settings: dict[tuple[str, ...], dict[str, Alternative]] = {}
    itself: dict[tuple[str, ...], list[Run]] = {}
    for run, differing in zip(runs, varied):
        setting = setting_key(run.summary)
        settings.setdefault(setting, {})
        if _is_plain(run.summary):
            if run.summary["baseline"]["quoted_against"] == ENGINE:  # else it is our loop beside generate
                itself.setdefault(setting, []).append(run)
            continue
        name = f"{method_label(run.summary)}{remarks.cores_label(run.summary)}"
        label = ", ".join([name, *as_text(differing)])
        settings[setting].setdefault(label, Alternative(label)).runs.append(run)
    return [
        Decision(
            in_words(setting, settings),
            sorted(of_it.values(), key=lambda one: -one.speedup),
            itself.get(setting, []),
        )
        for setting, of_it in settings.items()
        if of_it
    ]


def in_words(setting: tuple[str, ...], others: Iterable[tuple[str, ...]]) -> str:
    """A setting in words, with those of `UNSAID` in which others of the same words differ."""
    _, *others_values = zip(*(other for other in others if other[0] == setting[0]))
    unsaid = zip(UNSAID.values(), setting[1:], others_values)
    differing = [form.format(value) for form, value, values in unsaid if len(set(values)) > 1]
    return ", ".join([setting[0], *differing])


def is_hypothetical(summary: dict) -> bool:
    """Whether the run cannot be deployed: its drafter knows the answers, or its weights are random."""
    return bool(summary["reference_answer"]) or summary["weights"] == "random"


def _is_plain(summary: dict) -> bool:
    """Whether a run compares the baseline with itself; a drafter that found nothing, or failed, does not."""
    drafts = summary["settings"] if summary["drafter"] is None else summary["drafter"] != "none"
    overall = summary["overall"]
    nothing = overall["acceptance_rate"] is None and summary["engine"] is None
    as_usual = not overall["alignment_share"] and not summary["settings"].get("token_budget")
    return nothing and as_usual and not drafts and not verdicts.faults(summary)


def decision_table(decision: Decision) -> Table:
    """The alternatives of a setting, the fastest first, with `facts` below."""
    shown = list(zip(decision.alternatives, decision.ranks))[:SHOWN]
    several = any(len(one.runs) > 1 for one, _ in shown)
    table = PlainTable(f"which method: {decision.setting}", "\n".join(facts(decision)))
    table.add_columns("method", overflow="fold", min_width=NARROWEST)
    table.add_columns(
        "drafts at\nmost (levels)", "speedup\n[95 % interval]", *(("of runs",) if several else ()), **NUMBER
    )
    table.add_columns("accept.\nlength", "MBSU", "exact/tie/\nviolation", "trained on,\ntokens", **NUMBER)
    table.add_columns("verdict", overflow="fold", min_width=NARROWEST)
    for one, rank in shown:
        summary, overall = one.summary, one.summary["overall"]
        table.add_row(
            one.label,
            _size(summary),
            speedup_text(overall),
            *((one.spread,) if several else ()),
            number_text(overall["acceptance_length"], 2),
            number_text(overall["mbsu"], 2),
            equivalence_text(summary["equivalence"]),
            _trained(summary),
            Text(rank, style={NONE: WRONG, FASTEST: "green"}.get(rank, "")),
        )
    return table


def facts(decision: Decision) -> list[str]:
    """Facts about the alternatives, the recommendation first."""
    shown = decision.alternatives[:SHOWN]
    lines = [decision.sentence, f"{decision.questions} a run"]
    if left_out := len(decision.alternatives) - len(shown):
        lines[-1] += f"; the {left_out} slowest are not shown"
    if decision.itself:
        run = decision.alarm or decision.itself[-1]
        lines.append(f"the baseline against itself: {speedup_text(run.summary['overall'])}")
    if any(remarks.is_one_pool(one.summary) for one in shown):
        lines.append(remarks.ONE_POOL)
    if any(len(one.runs) == 1 and remarks.in_one_process(one.runs) for one in shown):
        lines.append(remarks.ONE_PROCESS)
    if weak := [one.label for one in shown if remarks.weak_baseline(one.summary)]:
        lines.append(f"the baseline is faster with other threads: {named(weak)}")
    if busy := [one.label for one in shown if remarks.disturbed(one.summary)]:
        lines.append(f"disturbed by other processes: {named(busy)}")
    if slow := [one.label for one in shown if slow_machine(one.summary)]:
        lines.append(f"measured on a slow machine: {named(slow)}")
    return lines


def setting_key(summary: dict, batches: bool = True) -> tuple[str, ...]:
    """The key of a setting: what alternatives share, in words, and the values of `UNSAID`.

    It contains size and pools of a batch only if `batches`, and what a run chooses by itself for such a batch: its
    threads, and the faster baseline.
    """
    shared = {key: summary[key] for key in SETTING}
    shared["batch_size"] = batch_size(summary) if batches else None
    shared["pool"] = summary["pool"] if batches else None
    shared["dtype"] = remarks.dtype_label(summary)
    words = [
        IN_TITLES[key].format(value)
        for key, value in shared.items()
        if value is not None and USUAL.get(key) != value
    ]
    if batches and (threads := summary["threads"]) is not None:
        words.append(f"{threads} threads" if threads != 1 else "1 thread")
    if batches and summary["baseline"]["quoted_against"] != ENGINE:
        words.append("against generate")
    words += filter(None, of_engine(summary).values())
    return ", ".join(words), *(str(summary[key]) for key in UNSAID)


def batch_size(summary: dict) -> int:
    """Sequences that were decoded together."""
    return summary["batch_size"] if summary["unit"] == POOL else 1


def draft_length(summary: Mapping) -> int | None:
    """The most tokens of a path of a draft, under any of `LENGTHS`; None without such a setting."""
    settings = summary["settings"]
    if (key := next((key for key in LENGTHS if key in settings), None)) is None:
        return None
    longest = summary["longest_path"] or None  # unknown for another engine
    if settings[key] is None:
        return longest
    # A tree of few nodes has fewer levels than requested.
    return settings[key] if longest is None or summary["engine"] is not None else min(settings[key], longest)


def tree_size(summary: dict) -> tuple[int | None, int | None] | None:
    """The most nodes and levels of a draft that is a tree, each None if unknown; None for a chain."""
    settings = without_group(summary["settings"])
    if summary["engine"] is not None or settings.get("width") == 1:  # other engines verify chains
        return None
    if (nodes := summary["max_nodes"]) is not None:
        return (nodes, summary["longest_path"]) if nodes else None
    if settings.keys().isdisjoint(OF_TREES) and settings.get("shape") != "tree":
        return None
    return settings.get("nodes"), draft_length(summary)


def _size(summary: dict) -> str:
    """The longest draft: tokens of a chain, nodes (levels) of a tree."""
    tree = tree_size(summary)
    numbers = [UNKNOWN if number is None else str(number) for number in tree or (draft_length(summary),)]
    return "{} ({})".format(*numbers) if tree else numbers[0]


def _size_in_words(summary: dict) -> str:
    """Likewise, as a part of a sentence; without what is unknown."""
    if (tree := tree_size(summary)) is None:
        drafts = draft_length(summary)
        return "" if drafts is None else f", {drafts} draft tokens at most,"
    parts = [f"{n} {name}" for n, name in zip(tree, ("nodes", "levels")) if n is not None]
    return f", a tree of {' and '.join(parts)} at most," if parts else ""


def beside_length(summary: dict) -> dict:
    """The chosen settings that have a value, in order, and the draft model, without the draft length."""
    return {
        key: value
        for key, value in sorted(chosen_settings(summary).items())
        if value is not None and key not in LENGTHS
    }


def _trained(summary: dict) -> str:
    """The most tokens that a part of the drafter was trained on, over all its stages."""
    tokens = [tokens_seen(record) for record in summary["training"].values() if "steps" in record]
    return f"{max(tokens) / 1e6:.1f} M" if tokens else UNKNOWN
