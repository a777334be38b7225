"""Writes the results tables and the plots of the documentation: `make readme-figures [RUNS="FOLDER ..."]`.

Given run folders, it takes those. Without any it measures the rows of a pair first (--pair), in rounds: each row with
one process, then each with another, so that every row sees the same hours. What was measured stays in
runs/readme/PAIR/, and the same command goes on from there; other code needs another folder (--into). A process begins
only while the machine is as fast as it can be. Tables and plots are those of `specbench.report`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specbench.config.checks import check
from specbench.config.compose import CONF
from specbench.data.questions import load_questions
from specbench.measure.machine.speed import Probes
from specbench.measure.plan import RunPlan
from specbench.measure.records import run_folder as store
from specbench.report import formats, phases, plots, remarks, tables
from specbench.report.compare import warnings
from specbench.report.runs import Run, finished_runs
from specbench.report.training_data import SAME, differing_training, training_table
from specbench.system.errors import UserError, one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# The rows of the table, and what each is measured with.
ROWS: dict[str, tuple[str, ...]] = {
    "pld": ("method=pld",),
    "pld (match=earliest)": ("method=pld", "method.match=earliest"),
    "lookahead": ("method=lookahead",),
    "recycling": ("method=recycling",),
    "recycling (memory=run)": ("method=recycling", "method.memory=run"),
    "rest": ("method=rest",),
    "samd": ("method=samd",),
    "samd_eagle2": ("method=samd_eagle2",),
    "suffix": ("method=suffix",),
    "suffix (memory=run)": ("method=suffix", "method.memory=run"),
    "sps": ("method=sps",),
    "pard": ("method=pard",),
    "dflash": ("method=dflash",),
    "ddtree": ("method=ddtree",),
    "dspark": ("method=dspark",),
    "dflash2": ("method=dflash2",),
    "peagle": ("method=peagle",),
    "mtp": ("method=mtp",),
    "sps_tree": ("method=sps_tree",),
    "kangaroo": ("method=kangaroo",),
    "kangaroo_tree": ("method=kangaroo_tree",),
    "medusa": ("method=medusa",),
    "hydra_heads": ("method=hydra_heads",),
    "eagle": ("method=eagle",),
    "eagle2": ("method=eagle2",),
    "eagle3": ("method=eagle3",),
    "vocabtrim": ("method=vocabtrim",),
    "s2d": ("method=s2d",),
    "ssd": ("method=ssd",),
    "mirror_sd": ("method=mirror_sd",),
    "mirror_hybrid": ("method=mirror_hybrid",),
}
# Those of a real model, on Spec-Bench's own questions, in full and in half precision.
REAL = "smollm2-135m"
# A tree that costs a CPU little where several tokens cost about as much as one.
ONE_LEVEL = ("method.nodes=8", "method.width=8", "method.max_draft_tokens=1")
REAL_METHODS: dict[str, tuple[str, ...]] = {
    "pld": ("method=pld",),
    "pld (match=latest)": ("method=pld", "method.match=latest"),
    "recycling": ("method=recycling",),
    "suffix": ("method=suffix",),
    "samd": ("method=samd",),
    "samd_eagle2": ("method=samd_eagle2",),
    "lookahead": ("method=lookahead",),
    "recycling (memory=run)": ("method=recycling", "method.memory=run"),
    "suffix (memory=run)": ("method=suffix", "method.memory=run"),
    "swift": ("method=swift",),
    **{name: ROWS[name] for name in ("rest", "sps", "sps_tree", "vocabtrim", "s2d", "mirror_sd")},
    **{name: ROWS[name] for name in ("kangaroo", "kangaroo_tree", "medusa", "hydra_heads")},
    **{name: ROWS[name] for name in ("eagle", "eagle2", "eagle3", "mtp")},
    "eagle2 (one level)": ("method=eagle2", "vocab=trim", *ONE_LEVEL),
    "eagle3 (one level)": ("method=eagle3", *ONE_LEVEL),
    "eagle2 (vocab=trim)": ("method=eagle2", "vocab=trim"),
}
ROWS_OF = {
    "tiny": ROWS,
    REAL: {
        f"{label}, {settings}, {dtype}": (
            *overrides,
            f"settings={settings}",
            f"pair={REAL}",
            f"pair.dtype={dtype}",
            "data=spec_bench",
        )
        for dtype in ("float32", "bfloat16")
        for settings in ("published", "tuned")
        for label, overrides in REAL_METHODS.items()
        if settings == "published"
        or (
            len(overrides) == 1
            and (CONF / "tuned" / REAL / f"{overrides[0].partition('=')[2]}.yaml").exists()
        )
    },
}
# The rows beside which transformers' generate is timed: once is enough, and with each row it would take half the time.
WITH_GENERATE = ("pld", "pld, published, float32", "pld, published, bfloat16")
SECONDS_BETWEEN_LOOKS = 30.0  # at a machine that is waited for
RESULTS = "results"  # what the markers of a page are called
BEGIN, END = f"<!-- {RESULTS}:begin -->", f"<!-- {RESULTS}:end -->"
PLOTS = {
    "speedup_by_task": "Speedup by task, and overall with its 95 % interval",
    "acceptance_and_speedup": "Speedup over acceptance length: on a grey line rounds cost the same",
    "acceptance_by_place": "Acceptance length over the new tokens that there were before a round",
    "acceptance_by_context": "Acceptance length over the tokens of prompt and answer before a round",
    "time": "Milliseconds per token by part, and the baseline",
}


@dataclass(frozen=True)
class Page:
    """A page with markers: which runs stand between them, where figures lie as seen from it, and which it shows.

    With `methods` it has of each of these one run with published settings, one with tuned and one with other ones. With
    `in_full`, the page that has all rows, it only names what the notes below the table are about.
    """

    path: Path
    pair: str
    figures: str
    plots: tuple[str, ...]
    by_task: bool
    dtype: str = "float32"
    methods: tuple[str, ...] = ()
    in_full: str = ""

    def rows(self, runs: Iterable[Run]) -> list[Run]:
        """Those of the runs that it shows."""
        if not self.methods:
            return list(runs)
        firsts: dict[tuple[str, str], Run] = {}
        for run in runs:
            if run.summary["method"] in self.methods:
                firsts.setdefault((run.summary["method"], run.summary["settings_source"]), run)
        return list(firsts.values())

    @property
    def folder(self) -> str:
        """Where its plots lie among the figures."""
        return self.pair if self.dtype == "float32" else f"{self.pair}-{self.dtype}"


PAGES = (
    Page(
        Path("docs/results/methods.md"),
        "tiny",
        "../figures",
        ("acceptance_and_speedup", "speedup_by_task", "time"),
        by_task=True,
    ),
    Page(
        Path("docs/results/smollm2.md"),
        REAL,
        "../figures",
        ("acceptance_and_speedup", "speedup_by_task", "acceptance_by_place", "acceptance_by_context"),
        by_task=True,
    ),
    Page(
        Path("docs/results/smollm2-bfloat16.md"),
        REAL,
        "../figures",
        ("acceptance_and_speedup", "speedup_by_task"),
        by_task=True,
        dtype="bfloat16",
    ),
    Page(
        Path("README.md"),
        REAL,
        "docs/figures",
        ("acceptance_and_speedup",),
        by_task=False,
        dtype="bfloat16",
        methods=(
            *("samd", "samd_eagle2", "suffix", "pld", "kangaroo", "mtp", "vocabtrim", "sps"),
            *("eagle", "eagle2", "eagle3", "hydra_heads", "medusa"),
        ),
        in_full="docs/results/smollm2-bfloat16.md",
    ),
)


def block(runs: list[Run], page: Page, drawn: Iterable[str]) -> str:
    """What stands between the markers of a page, in Markdown.

    Args:
        runs: Finished runs, in the order of the table.
        page: The page.
        drawn: Names of the plots that the runs have data for.
    """
    summaries = [run.summary for run in runs]
    by_task = tables.spec_bench_table(summaries) if page.by_task else None
    parts = [measured_on(runs), body(tables.overview_table(summaries))]
    if by_task is not None:
        parts += [
            "Speedups by task, with intervals from six questions of a task on; *its def.* is Spec-Bench's own.",
            body(by_task),
        ]
        parts += [f"{line}." for line in dict.fromkeys(map(remarks.repetition_line, summaries)) if line]
    parts += [in_short(runs, page.in_full)] if page.in_full else [f"**{note}**" for note in warnings(runs)]
    trained = training_table(summaries)
    if trained is not None and not differing_training(summaries):
        parts.append(f"Training: {SAME}.")
    parts += [
        f"![{PLOTS[name]}]({page.figures}/{page.folder}/{name}.png)" for name in page.plots if name in drawn
    ]
    return "\n\n".join(filter(None, parts))


def in_short(runs: list[Run], page: str, with_names: bool = True) -> str:
    """What the warnings are about, and the page that has them in full; empty where there are none."""
    kinds = remarks.kinds(warnings(runs))
    if not with_names:
        kinds = [*dict.fromkeys(kind.rpartition(": ")[2] for kind in kinds)]
    return f"**{'; '.join(kinds)}: [in full]({page})**" if kinds else ""


def measured_on(runs: list[Run]) -> str:
    """When, where and how the runs were measured, in a sentence or two.

    Raises:
        UserError: A run has no provenance, or the runs were measured on several machines.
    """
    known = [run.provenance for run in runs if run.provenance is not None]
    machines = {(one["machine"]["cpu"], one["machine"]["usable_cores"]) for one in known}
    if len(known) < len(runs) or len(machines) > 1:
        raise UserError("a table needs runs of one machine, each with its provenance")
    (cpu, cores) = machines.pop()
    days = sorted({one["time"][:10] for one in known})
    summary = runs[0].summary
    answers = {run.summary["equivalence"]["answers"] for run in runs}
    threads = {run.summary.get("threads") or "unknown" for run in runs}
    processes = {run.summary.get("processes", 1) for run in runs}
    shared = (
        f", {processes.pop()} processes a row in rounds" if len(processes) == 1 and processes != {1} else ""
    )
    arguments = "" if summary["pair"] == "tiny" else f' ARGS="--pair {summary["pair"]}"'
    facts = [
        f"`make readme-figures{arguments}`{shared}, {' to '.join(dict.fromkeys((days[0], days[-1])))}",
        f"{cpu}, {cores} cores" + (f", threads of torch: {threads.pop()}" if len(threads) == 1 else ""),
        f"pair `{summary['pair']}`, {remarks.dtype_label(summary)}, "
        + ("greedy" if summary["temperature"] == 0 else f"temperature {summary['temperature']:g}"),
        f"{summary['overall']['questions']} questions"
        + (f", {answers.pop()} answers a method" if len(answers) == 1 else ""),
    ]
    for one in (run.summary["baseline"] for run in runs):
        if (generate := one["hf_generate_tokens_per_second"]) is not None:
            facts.append(
                f"transformers' generate {generate:.1f} tokens/s where our loop had {one['tokens_per_second']:.1f}"
            )
            break
    return "; ".join(facts) + "."


def body(table: Table) -> str:
    """A table in Markdown without the title above it."""
    return formats.markdown(table).partition("\n\n")[2].strip()


def between_markers(text: str, content: str) -> str:
    """The text with other content between its markers.

    Raises:
        UserError: It does not have both markers, in order.
    """
    written = formats.between(text, RESULTS, content)
    if written is None:
        raise UserError(f"the page has no lines {BEGIN} and {END}")
    return written


def write(runs: list[Run], root: Path = ROOT) -> None:
    """Writes plots and tables into the pages of the runs' pair and dtype, below `root`; prints those without a page.

    The pages of methods have the rows in float32.
    """
    changed: dict[Path, str] = {}
    groups: dict[str, list[Run]] = {}
    folders = {(page.pair, page.dtype): page.folder for page in PAGES}
    for run in runs:
        groups.setdefault(folders.get((run.summary["pair"], run.summary["dtype"]), ""), []).append(run)
    if without_page := groups.pop("", None):
        tables.print_overview(without_page)
    for name, group in groups.items():
        pages = [page for page in PAGES if page.folder == name]
        shown = {plot for page in pages for plot in page.plots}
        drawn = {plot: figure for plot, figure in plots.figures(group).items() if plot in shown}
        for page in pages:
            path = root / page.path
            changed[path] = between_markers(
                path.read_text(encoding="utf-8"), block(page.rows(group), page, drawn)
            )
        if name == pages[0].pair:
            changed |= method_pages(group, pages[0], root, changed)
        folder = root / "docs" / "figures" / name
        folder.mkdir(parents=True, exist_ok=True)
        for plot, figure in drawn.items():
            figure.savefig(folder / f"{plot}.png", dpi=120)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(root))


def method_pages(runs: list[Run], full: Page, root: Path, changed: Mapping[Path, str]) -> dict[Path, str]:
    """The pages of methods, with the rows of the methods in their headings between the markers of the pair.

    Args:
        runs: Finished runs of a pair.
        full: The page of the pair that has all rows.
        root: Of the checkout.
        changed: What pages will hold that are not written yet.
    """
    pages = {}
    for path in sorted((root / "docs" / "methods").glob("*.md")):
        text = changed.get(path) or path.read_text(encoding="utf-8")
        methods = re.findall(r"`(\w+)`", text.partition("\n")[0])
        if shown := [run for run in runs if run.summary["method"] in methods]:
            table = body(tables.overview_table(run.summary for run in shown))
            parts = measured_on(shown), table, in_short(shown, f"../results/{full.path.name}", False)
            written = formats.between(text, full.pair, "\n\n".join(filter(None, parts)))
            if written is not None:
                pages[path] = written
    return pages


# -- measuring


def measure(
    rows: dict[str, tuple[str, ...]], into: Path, more: Iterable[str], ready: Callable[[], None]
) -> list[Path]:
    """Measures rows in rounds, each of them with one process a round; goes on where it was stopped.

    Args:
        rows: What each is measured with, by its label.
        into: Holds a run folder for each.
        more: What all rows are measured with: `processes=` is how many rounds there are.
        ready: Called before each process; it returns when the machine can be measured on.

    Returns:
        The finished run folders, in the order of the rows.

    Raises:
        UserError: A run failed, or its folder was made by other code or settings.
    """
    folders = {}
    for label, overrides in rows.items():
        generate = f"generate={str(label in WITH_GENERATE).lower()}"
        folders[label] = run_folder([*overrides, generate], into / slug(label), more)
    rounds = max(OmegaConf.create(store.read_config(folder)).processes for folder in folders.values())
    for number in range(rounds):
        for label, folder in folders.items():
            if is_due(folder, number):
                ready()
                print(f"round {number + 1} of {rounds}: {label}", flush=True)
                measure_process(folder)
    return list(folders.values())


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"\W+", "-", label).strip("-")


def run_folder(overrides: Iterable[str], folder: Path, more: Iterable[str]) -> Path:
    """Makes a run folder, or goes on with it. Raises UserError for one of other settings or code."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", overrides=[*overrides, *more])
    cfg.run_dir = str(folder)
    check(cfg)
    return store.find_or_create(cfg)


def is_due(folder: Path, number: int) -> bool:
    """Whether a run still lacks what process `number`, or one before it, is to measure."""
    if store.is_complete(folder):
        return False
    cfg = OmegaConf.create(store.read_config(folder))
    plan, done = RunPlan.of(cfg), Counter(record["repeat"] for record in store.read_records(folder))
    repeat = plan.next(done, len(load_questions(cfg.data, cfg.task)), None, 0.0)
    return (
        repeat is None or plan.process_of(repeat) <= number
    )  # None: all is measured but the summary not written


def measure_process(folder: Path) -> None:
    """Measures the share of one process. Raises UserError where it fails."""
    code = subprocess.run(
        [sys.executable, "-m", "specbench.measure.runner", str(folder)], cwd=ROOT
    ).returncode
    if code not in (0, store.EXIT_CONTINUE):
        raise UserError(f"{folder.name} ended with exit code {code}: {store.why_failed(folder) or 'killed'}")


def wait_for_speed(probes: Probes, minutes: float, any_phase: bool) -> None:
    """Returns when the machine is as fast as it has shown to be, but for a small share.

    Args:
        probes: Of the device that is measured on.
        minutes: To wait at most.
        any_phase: Only say that the machine is slow.

    Raises:
        UserError: It is slow, and stayed so.
    """
    end = time.monotonic() + 60 * minutes
    while slow := phases.lacking(probes.take(), probes.best):
        print(f"the machine is slow now: {slow}", flush=True)
        if any_phase:
            return
        if time.monotonic() >= end:
            raise UserError(
                "nothing is measured in a slow phase of the machine: the same command goes on from here later, "
                "--wait MINUTES waits for a faster phase, --any-phase measures in this one and marks the table"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def slow_phases(runs: Iterable[Run]) -> list[str]:
    """One line for each run that was measured in a slow phase, and for each figure in which the runs' phases differ."""
    runs = list(runs)
    lines = []
    for run in runs:
        speed = (run.summary.get("machine") or {}).get("speed")
        if speed and (slow := phases.lacking(speed["median"], speed["best"])):
            lines.append(f"{run.name}: {slow}")
    return lines + phases.different_phases(runs)


@one_line_errors()
def main() -> int:
    """Does what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="finished run folders, in the order of the table")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="MINUTES", help="wait so long for a slow phase to end"
    )
    parser.add_argument(
        "--any-phase", action="store_true", help="measure in a slow phase, too; the table then says so"
    )
    parser.add_argument("--processes", type=int, default=3, help="fresh processes for each row (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--limit", type=int, help="questions of each task (default: the pair's own limit)")
    parser.add_argument("--rows", default="", help="measure only rows whose label holds this")
    parser.add_argument(
        "--pair", choices=ROWS_OF, default="tiny", help="whose rows are measured (%(default)s)"
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT / "runs" / "readme", help="holds the run folders, by pair"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="what all rows are measured with, too"
    )
    given = parser.parse_args()
    folders = given.runs
    if not folders:
        torch.set_num_threads(given.threads)
        probes = Probes(torch.device("cpu"))
        more = [f"processes={given.processes}", f"threads={given.threads}"]
        more += [f"data.limit={given.limit}"] if given.limit else []
        more += given.set
        rows = {label: row for label, row in ROWS_OF[given.pair].items() if given.rows in label}
        if not rows:
            raise UserError(f"no row of {given.pair} holds '{given.rows}': {', '.join(ROWS_OF[given.pair])}")
        ready = partial(wait_for_speed, probes, given.wait, given.any_phase)
        folders = measure(rows, given.into.resolve() / given.pair, more, ready)
    runs, left_out = finished_runs(folders)
    if left_out:
        raise UserError(
            f"no table is written without {'; '.join(f'{one.folder}: {one.reason}' for one in left_out)}"
        )
    if (slow := slow_phases(runs)) and not given.any_phase:
        raise UserError(
            f"no table is written of a slow phase ({'; '.join(slow)}): remove the run folders named here to measure "
            "them again, or write it all the same, marked, with --any-phase"
        )
    write(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
