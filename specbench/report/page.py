"""One self-contained HTML page of a report: tables, plots, and where each run comes from."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

import yaml
from jinja2 import Environment, PackageLoader, select_autoescape

from specbench.measure.machine import provenance
from specbench.report import formats, tables, verdicts
from specbench.report.decision import Decision, decision_table, facts
from specbench.report.labels import labels
from specbench.system.secrets import without_secrets

if TYPE_CHECKING:
    from rich.table import Table

    from specbench.report.runs import Run, SkippedRun

SHOWN_OF_A_DIGEST = 12
FIRST_PLOT = ("speedup_by_task", "throughput")  # beside the verdict, the first that there is
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast, where PyYAML was built with it


def page(
    runs: list[Run],
    left_out: list[SkippedRun],
    decided: list[Decision],
    side_by_side: list[Table],
    drawn: dict[str, bytes],
    notes: list[str],
    published: list[Table],
) -> str:
    """The page as text. drawn: plots as SVG, by name. It needs no other file and no network."""
    environment = Environment(
        loader=PackageLoader("specbench.report", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
    )
    named = list(zip(labels(run.summary for run in runs), runs))
    wrong = [f"{label} ({run.name}): {line}" for label, run in named for line in verdicts.faults(run.summary)]
    return environment.get_template("page.html").render(
        title="Speculative decoding, measured",
        date=time.strftime("%Y-%m-%d %H:%M"),
        wrong=wrong,
        notes=notes,
        first_plot=next((name for name in FIRST_PLOT if name in drawn), None),
        decided=[(one.setting, facts(one), formats.html(decision_table(one), alone=True)) for one in decided],
        tables=[formats.html(table) for table in side_by_side],
        plots={name: base64.b64encode(image).decode() for name, image in drawn.items()},
        published=[formats.html(table) for table in published],
        runs=[_run(label, run) for label, run in named],
        left_out=left_out,
    )


def _run(label: str, run: Run) -> dict:
    # Folders of older versions may hold secrets that those did not know.
    origin = without_secrets(run.provenance)
    config = origin and yaml.dump(origin["config"], Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    return {
        "name": run.name,
        "label": label,
        "table": formats.html(tables.run_table(run.summary)),
        "provenance": _provenance(origin),
        "config": config,
    }


def _provenance(origin: dict | None) -> list[tuple[str, str]]:
    """The main facts of a run's provenance; the whole of it is in its folder."""
    if origin is None:
        return [("provenance", "none that can be read")]
    git, machine = origin["git"], origin["machine"]
    commit = "no repository"
    if git is not None:  # a folder that was uploaded may hold the checksum of the difference alone
        unchanged = not git["diff"] if "diff" in git else git["diff_sha256"] == provenance.NO_DIFF
        commit = git["commit"] + ("" if unchanged else ", changed")
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    return [
        ("begun", origin["time"]),
        ("command", " ".join(origin["command"])),
        ("machine", f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, {gpus}"),
        ("threads", ", ".join(f"{name} {count}" for name, count in origin["threads"].items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in origin["versions"].items())),
        ("load when it began", ", ".join(f"{load:.2f}" for load in origin["load_average"])),
        ("code", f"{commit}; sha256 {origin['source_sha256'][:SHOWN_OF_A_DIGEST]}"),
        (
            "questions",
            f"{origin['questions']['path']}; sha256 {origin['questions']['sha256'][:SHOWN_OF_A_DIGEST]}",
        ),
    ]
