"""How many tokens to draft at which batch size: `specbench schedule RUNS`, in the forms that serving engines read.

For each batch size the draft length is that of the fastest run whose whole interval lies above 1, and 0 where there is
none: speculation is not shown to pay there. A batch size between two that were measured takes the length of the
smaller one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.measure.metrics.statistics import verdict
from specbench.report.cells import NUMBER, PlainTable, console, speedup_text
from specbench.report.decision import batch_size, draft_length, setting_of
from specbench.report.remarks import faults
from specbench.report.runs import Run, finished_runs
from specbench.report.tables import print_left_out
from specbench.system.errors import UserError, file_errors, one_line_errors
from specbench.system.settings import CONSTANT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table


@dataclass(frozen=True)
class Schedule:
    """The draft length of a drafter by batch size.

    Attributes:
        drafter: its name.
        setting: what its runs share, in words.
        fastest: by batch size, in ascending order, the fastest run that may be trusted; None where there is none.
        measured: by batch size, the draft lengths that were measured.
    """

    drafter: str
    setting: str
    fastest: dict[int, Run | None]
    measured: dict[int, list[int]]

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Draft lengths by batch size; 0: do not draft."""
        return {
            size: 0 if run is None else draft_length(run.summary) or 0 for size, run in self.fastest.items()
        }

    def vllm(self) -> dict:
        """Keys of vLLM's speculative config: ranges of batch sizes, both ends included."""
        sizes = list(self.lengths)
        ends = [*(size - 1 for size in sizes[1:]), sizes[-1]]
        ranges = [[size, end, self.lengths[size]] for size, end in zip(sizes, ends)]
        return {
            "num_speculative_tokens": max(self.lengths.values()),
            "num_speculative_tokens_per_batch_size": ranges,
        }

    def tensorrt_llm(self) -> dict:
        """Keys of TensorRT-LLM's speculative config, whose length at batch size 1 must be the largest one."""
        first = self.lengths[min(self.lengths)]
        return {
            "max_draft_len": first,
            "draft_len_schedule": {size: min(length, first) for size, length in self.lengths.items()},
        }

    def sglang(self) -> dict:
        """SGLang's adaptive config: the steps to choose from by batch size; it has no way to say 0."""
        return {str(size): {"candidate_steps": [length]} for size, length in self.lengths.items() if length}


def schedules(runs: Iterable[Run]) -> list[Schedule]:
    """A schedule for each drafter and setting of which several batch sizes, or lengths, were measured."""
    measured: dict[tuple[str, str], dict[int, list[Run]]] = {}
    for run in runs:
        summary = run.summary
        has_length = draft_length(summary) and summary["draft_length"] == CONSTANT
        if summary["overall"]["acceptance_rate"] is None or not has_length:
            continue  # nothing is drafted, or not with one length
        key = (summary["drafter"] or summary["method"], setting_of(summary, batches=False))
        measured.setdefault(key, {}).setdefault(batch_size(summary), []).append(run)
    return [
        Schedule(
            drafter,
            setting,
            {size: _fastest(of_size) for size, of_size in sorted(by_size.items())},
            {
                size: sorted({draft_length(run.summary) or 0 for run in of_size})
                for size, of_size in sorted(by_size.items())
            },
        )
        for (drafter, setting), by_size in measured.items()
        if sum(map(len, by_size.values())) > 1
    ]


def _fastest(runs: list[Run]) -> Run | None:
    """The fastest run whose whole interval lies above 1, and that nothing is wrong with."""
    gains = [
        run
        for run in runs
        if not faults(run.summary)
        and verdict(run.summary["overall"]["speedup_low"], run.summary["overall"]["speedup_high"]) == "faster"
    ]
    return max(gains, key=lambda run: run.summary["overall"]["speedup"], default=None)


def schedule_table(schedule: Schedule) -> Table:
    """A row per batch size: the draft length to take, what it gains, and the lengths that were measured."""
    table = PlainTable(f"how long to draft with {schedule.drafter}: {schedule.setting}")
    table.add_columns("batch\nsize", "draft\nlength", "speedup\n[95 % interval]", **NUMBER)
    table.add_columns("measured lengths")
    for size, run in schedule.fastest.items():
        gain = "no gain shown" if run is None else speedup_text(run.summary["overall"])
        measured = ", ".join(map(str, schedule.measured[size]))
        table.add_row(str(size), str(schedule.lengths[size]), gain, measured)
    return table


@one_line_errors()
@file_errors()
def main() -> int:
    """Prints the schedules of the runs of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="specbench schedule", description=__doc__)
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of them"
    )
    options = parser.parse_args()
    runs, left_out = finished_runs(options.runs)
    print_left_out(left_out)
    all_schedules = schedules(runs)
    if not all_schedules:
        raise UserError(
            "a schedule needs runs of one drafter at several batch sizes or draft lengths: "
            "specbench sweep method=ragged drafter=sps batch_size=1,4,16 drafter.max_draft_tokens=2,4"
        )
    for schedule in all_schedules:
        console().print(schedule_table(schedule))
        for engine, form in (
            ("vLLM, --speculative-config", schedule.vllm()),
            ("TensorRT-LLM, speculative_config", schedule.tensorrt_llm()),
            ("SGLang, --speculative-adaptive-config", schedule.sglang()),
        ):
            print(f"{engine}: {json.dumps(form)}")
        print(f"Larger batches than {max(schedule.lengths)} were not measured.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
