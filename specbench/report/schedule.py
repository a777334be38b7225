"""How many tokens to draft at which batch size: `specbench schedule RUNS`, in the forms that serving engines read.

For each batch size the draft length is that of the fastest run whose whole interval is above 1, at a level of 5 % / n
for n lengths; 0 if there is none: speculation is not shown to pay there. A batch size between two that were measured
uses the length of the smaller one. Drafters of trees are left out: these engines accept the lengths of chains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from specbench.config.spec import POOL, without_group
from specbench.report import decision
from specbench.report.cells import NUMBER, PlainTable, console, speedup_text
from specbench.report.compare import warnings
from specbench.report.labels import DRAFT, as_text, method_label
from specbench.report.remarks import ONE_POOL, is_one_pool
from specbench.report.runs import oldest_first
from specbench.report.tables import print_notes, runs_of_command
from specbench.report.verdicts import faults
from specbench.system.errors import UserError, file_errors, one_line_errors
from specbench.system.settings import CONSTANT

if TYPE_CHECKING:
    from rich.table import Table

    from specbench.report.runs import Run


@dataclass(frozen=True)
class Schedule:
    """The draft length of a drafter by batch size.

    Attributes:
        drafter: its name.
        setting: what its runs share, in words.
        fastest: by batch size, in ascending order, the fastest run that may be trusted; None if there is none.
        measured: by batch size, the draft lengths that were measured.
    """

    drafter: str
    setting: str
    fastest: dict[int, Run | None]
    measured: dict[int, list[int]]

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Draft lengths by batch size; 0: do not draft."""
        return {size: 0 if run is None else _length(run) for size, run in self.fastest.items()}

    @property
    def ranges(self) -> list[list[int]]:
        """The first and the last batch size of each range, of which the first begins at 1, and its draft length."""
        sizes = list(self.lengths)
        firsts, ends = [1, *sizes[1:]], [*(size - 1 for size in sizes[1:]), sizes[-1]]
        return [[first, end, self.lengths[size]] for size, first, end in zip(sizes, firsts, ends)]

    def vllm(self) -> dict:
        """Keys of vLLM's speculative config: ranges of batch sizes, both ends included."""
        return {
            "num_speculative_tokens": max(self.lengths.values()),
            "num_speculative_tokens_per_batch_size": self.ranges,
        }

    def tensorrt_llm(self) -> dict | str:
        """Keys of TensorRT-LLM's speculative config, as it reads them since its pull request 10860 (March 2026).

        A batch uses the length of the first key that is not smaller, and none above the largest key. The length of the
        smallest key must be the largest one; otherwise returns why there are no keys. Older versions read a key as the
        smallest batch of a length.
        """
        first = self.lengths[min(self.lengths)]
        if max(self.lengths.values()) > first:
            return "none, it cannot draft more tokens for larger batches"
        schedule = {end: length for _, end, length in self.ranges}
        return {"max_draft_len": first, "draft_len_schedule": schedule}

    def sglang(self) -> dict:
        """SGLang's adaptive config: the steps to choose from by batch size; it cannot express 0."""
        return {str(size): {"candidate_steps": [length]} for size, length in self.lengths.items() if length}


def schedules(runs: Iterable[Run]) -> list[Schedule]:
    """A schedule for each drafter, scheduler and setting of which several batch sizes, or lengths, were measured."""
    measured: dict[tuple[str, str, tuple[str, ...]], dict[str, list[Run]]] = {}
    for run in runs:
        summary = run.summary
        has_length = decision.draft_length(summary) and summary["draft_length"] == CONSTANT
        drafts = summary["overall"]["acceptance_rate"] is not None or summary["engine"] is not None
        if not (drafts and has_length) or decision.tree_size(summary) or decision.is_hypothetical(summary):
            continue  # no drafts, or not chains of one length, or not deployable
        scheduling, drafting = _chosen(summary)
        key = (
            summary["drafter"] or summary["method"],
            drafting,
            decision.setting_key(summary, batches=False),
        )
        measured.setdefault(key, {}).setdefault(scheduling, []).append(run)
    every = []
    settings = {setting for *_, setting in measured}
    for (drafter, drafting, setting), by_scheduler in measured.items():
        single = by_scheduler.pop("", [])  # a batch of one, whatever schedules larger ones
        for scheduling, of_it in (by_scheduler or {"": []}).items():
            if len(single + of_it) > 1:
                words = filter(None, (scheduling, drafting, decision.in_words(setting, settings)))
                every.append(_schedule(drafter, words, single + of_it))
    return every


def _chosen(summary: dict) -> tuple[str, str]:
    """The scheduler (empty for one sequence at a time) and the drafter's settings but its length, in words."""
    settings = decision.beside_length(summary)
    if summary["unit"] != POOL:  # "drafter." is that of a drafter which the method wraps
        return "", ", ".join(sorted(as_text(settings)))
    if summary["engine"] is not None:  # another engine schedules by itself
        return "", ", ".join(sorted(as_text(without_group(settings))))
    of_scheduler = {k: v for k, v in settings.items() if k != DRAFT and not k.startswith("drafter.")}
    drafting = without_group({k: v for k, v in settings.items() if k not in of_scheduler})
    return ", ".join([summary["method"], *as_text(of_scheduler)]), ", ".join(sorted(as_text(drafting)))


def _schedule(drafter: str, words: Iterable[str], runs: list[Run]) -> Schedule:
    """The schedule of runs that differ in batch size and draft length; words: of what they share."""
    by_size: dict[int, list[Run]] = {}
    for run in sorted(oldest_first(runs), key=lambda run: decision.batch_size(run.summary)):
        by_size.setdefault(decision.batch_size(run.summary), []).append(run)
    fastest = {size: _fastest(of_size) for size, of_size in by_size.items()}
    measured = {size: sorted({_length(run) for run in of_size}) for size, of_size in by_size.items()}
    return Schedule(drafter, ", ".join(words), fastest, measured)


def _length(run: Run) -> int:
    """The draft length of a run that has one."""
    return cast("int", decision.draft_length(run.summary))


def _fastest(runs: list[Run]) -> Run | None:
    """The fastest run without faults that gains, as one of the number of lengths; of one length, the last."""
    last = {_length(run): run for run in runs}
    gains = [
        run
        for run in last.values()
        if not faults(run.summary) and decision.verdict_of_many(run.summary["overall"], len(last)) == "faster"
    ]
    return max(gains, key=lambda run: run.summary["overall"]["speedup"], default=None)


def schedule_table(schedule: Schedule) -> Table:
    """A row per batch size: the draft length to take, what it gains, and the lengths that were measured."""
    table = PlainTable(f"how long to draft with {schedule.drafter}: {schedule.setting}")
    table.add_columns("batch\nsize", "draft\nlength", "speedup\n[95 % interval]", **NUMBER)
    table.add_columns("measured lengths")
    if any(run is not None and is_one_pool(run.summary) for run in schedule.fastest.values()):
        table.caption = ONE_POOL
    for size, run in schedule.fastest.items():
        gain = "no gain shown" if run is None else speedup_text(run.summary["overall"])
        measured = ", ".join(map(str, schedule.measured[size]))
        table.add_row(str(size), str(schedule.lengths[size]), gain, measured)
    return table


@one_line_errors()
@file_errors()
def main() -> int:
    """Prints the schedules of the runs of the command line; returns the exit code."""
    runs = runs_of_command("specbench schedule", __doc__)
    all_schedules = schedules(runs)
    if trees := sorted({method_label(run.summary) for run in runs if decision.tree_size(run.summary)}):
        print(f"Left out, as they draft trees: {', '.join(trees)}.")
    if not all_schedules:
        raise UserError(
            "a schedule needs runs of one drafter at several batch sizes or draft lengths: "
            "specbench sweep method=ragged drafter=sps batch_size=1,4,16 drafter.max_draft_tokens=2,4"
        )
    print_notes(warnings(runs))
    for schedule in all_schedules:
        console().print(schedule_table(schedule))
        for engine, form in (
            ("vLLM, --speculative-config", schedule.vllm()),
            ("TensorRT-LLM, speculative_config", schedule.tensorrt_llm()),
            ("SGLang, --speculative-adaptive-config", schedule.sglang()),
        ):
            text = form if isinstance(form, str) else json.dumps(form)
            print(f"{engine}: {text if any(schedule.lengths.values()) else 'none, do not speculate'}")
        zeros = [str(size) for size, length in schedule.lengths.items() if not length]
        if 0 < len(zeros) < len(schedule.lengths):
            print(f"SGLang cannot be told not to draft, as at batch size {', '.join(zeros)}.")
        smallest, largest = min(schedule.lengths), max(schedule.lengths)
        if smallest > 1:
            print(f"Batches smaller than {smallest} were not measured: they use its draft length.")
        print(f"Batches larger than {largest} were not measured.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
