"""One self-contained HTML page of a report: tables, plots, and where each run comes from."""

from __future__ import annotations

import base64
import time

import yaml
from jinja2 import Environment, PackageLoader, select_autoescape
from matplotlib.figure import Figure
from rich.table import Table

from specbench.report import formats, plots, tables
from specbench.report.runs import LeftOut, Run, labels

SHOWN_OF_A_DIGEST = 12


def page(
    runs: list[Run],
    left_out: list[LeftOut],
    side_by_side: list[Table],
    drawn: dict[str, Figure],
    notes: list[str],
    published: list[Table],
) -> str:
    """The page as text. It needs no other file and no network."""
    environment = Environment(
        loader=PackageLoader("specbench.report", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
    )
    named = list(zip(labels(run.summary for run in runs), runs))
    wrong = [
        f"{label} ({run.name}): {run.summary['equivalence']['violation']} of "
        f"{run.summary['equivalence']['answers']} answers are not the target's own"
        for label, run in named
        if run.summary["equivalence"]["violation"]
    ]
    return environment.get_template("page.html").render(
        title="Speculative decoding, measured",
        date=time.strftime("%Y-%m-%d %H:%M"),
        wrong=wrong,
        notes=notes,
        tables=[formats.html(table) for table in side_by_side],
        plots={name: base64.b64encode(plots.svg(figure)).decode() for name, figure in drawn.items()},
        published=[formats.html(table) for table in published],
        runs=[_run(label, run) for label, run in named],
        left_out=left_out,
    )


def _run(label: str, run: Run) -> dict:
    found = run.provenance or {}
    config = (
        yaml.safe_dump(found["config"], sort_keys=False, allow_unicode=True) if "config" in found else None
    )
    return {
        "name": run.name,
        "label": label,
        "table": formats.html(tables.run_table(run.summary)),
        "provenance": _provenance(found),
        "config": config,
    }


def _provenance(found: dict) -> list[tuple[str, str]]:
    """What a reader wants to know of where a run comes from; the whole of it is in its folder."""
    if not found:
        return [("provenance", "none that can be read")]
    git, machine = found["git"], found["machine"]
    commit = "no repository" if git is None else git["commit"] + (", changed" if git.get("diff") else "")
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    return [
        ("begun", found["time"]),
        ("command", " ".join(found["command"])),
        ("machine", f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, {gpus}"),
        ("threads", ", ".join(f"{name} {count}" for name, count in found["threads"].items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("load when it began", ", ".join(f"{load:.2f}" for load in found["load_average"])),
        ("code", f"{commit}; sha256 {found['source_sha256'][:SHOWN_OF_A_DIGEST]}"),
        (
            "questions",
            f"{found['questions']['path']}; sha256 {found['questions']['sha256'][:SHOWN_OF_A_DIGEST]}",
        ),
    ]
