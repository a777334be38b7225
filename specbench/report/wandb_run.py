"""A run folder as a run of Weights & Biases: `python -m specbench.report.wandb_run RUN_DIR TRACKER_AS_JSON`.

`specbench.commands.log` starts this as a process of its own: the service's client may hang, crash or end its process.
Prints one line: where the run is on the service or, offline, its folder; and when it fails, why.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import PIL.Image
import wandb
import yaml

from specbench.config.spec import METHOD
from specbench.measure.metrics.acceptance import STRETCHES
from specbench.measure.metrics.questions import by_question
from specbench.measure.metrics.timing import ARMS
from specbench.measure.records import run_folder as store
from specbench.report import plots
from specbench.report.runs import Run, read_run, summary_frame
from specbench.system.errors import one_line
from specbench.system.secrets import without_secrets
from specbench.system.settings import flat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REACH_SECONDS = 30  # to wait for the service to answer at all
ARTIFACT = "run"  # the artifacts of this type are run folders
# What may hold a secret: how it is read and written. Records and answers hold the models' texts alone.
FORMATS: dict[str, tuple[Callable, Callable]] = {
    ".yaml": (yaml.safe_load, partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)),
    ".json": (json.loads, partial(json.dumps, indent=2, ensure_ascii=False)),
    ".txt": (str, str),
}


def log_run(run_dir: Path, tracker: Mapping) -> str:
    """Logs a complete run folder: config, summary, tables, histograms, and the folder as artifact.

    Logging it again updates the same run. Errors of the client are not caught.

    Args:
        run_dir: the run folder.
        tracker: the keys of conf/tracker/wandb.yaml.

    Returns:
        The run's address or, offline, the folder of its log.
    """
    measured = read_run(run_dir)
    summary = measured.summary
    online = tracker["mode"] == "online"
    run = wandb.init(
        entity=tracker["entity"],
        project=tracker["project"],
        mode=tracker["mode"],
        group=tracker["group"],
        job_type=summary["method"],
        id=run_id(run_dir),
        resume="allow" if online else None,  # offline it is unknown whether the run exists
        name=run_dir.name,
        config=without_secrets(store.read_config(run_dir)),
        dir=str(run_dir),
        settings=wandb.Settings(
            init_timeout=REACH_SECONDS,
            console="off",
            # provenance.json describes the machine, which need not be the one that logs.
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            save_code=False,
        ),
    )
    run.summary.update(scalars(summary))
    run.log(contents(measured))
    logged = run.log_artifact(artifact(run_dir, tracker["upload_diff"]))
    if online:
        logged.wait()  # raises when the upload failed, which finish() only prints
    run.finish()
    return str(run.url) if online else str(Path(run.dir).parent)


def run_id(run_dir: Path) -> str:
    """16 hex digits that identify a run, from the folder's name and its records: a name may occur twice."""
    return hashlib.sha256(run_dir.name.encode() + (run_dir / store.RECORDS).read_bytes()).hexdigest()[:16]


def scalars(summary: Mapping) -> dict[str, float]:
    """The numbers of nested dictionaries by their path: {"overall": {"speedup": 2}} -> {"overall/speedup": 2}."""
    return {name: value for name, value in flat(summary, "/").items() if isinstance(value, int | float)}


def contents(run: Run) -> dict[str, object]:
    """What is logged beside summary and config, by its name on the service."""
    summary = run.summary
    reference = ARMS[summary["baseline"]["quoted_against"]]
    questions = by_question(run.records, reference, run.unit)
    steps = pd.read_parquet(run.folder / store.STEPS)
    rounds = steps[steps["arm"] == METHOD]
    logged: dict[str, object] = {"tasks": table(by_task(run)), "questions": table(questions)}
    if len(rounds):
        logged |= {f"{name}_per_round": histogram(rounds[name]) for name in ("emitted", "accepted")}
    overall = summary["overall"]
    if overall["acceptance_by_position"]:
        logged["acceptance_by_position"] = acceptance_lines(overall)
    for name, edges in STRETCHES.items():
        rows = [*zip(edges, overall[f"acceptance_by_{name}"], overall[f"rounds_by_{name}"])]
        columns = ["from", "acceptance_length", "rounds"]
        logged[f"acceptance_by_{name}"] = table(pd.DataFrame(rows, columns=columns))
    drawn = plots.figures([run])
    return logged | {f"plots/{name}": picture(figure) for name, figure in drawn.items()}


def picture(figure: Figure) -> wandb.Image:
    """A plot as it is; from a figure the service would draw its own."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100)
    return wandb.Image(PIL.Image.open(out))


def by_task(run: Run) -> pd.DataFrame:
    """The rows of `runs.summary_frame`; of its columns the metrics that were measured."""
    frame = summary_frame([run])
    measured = run.summary["overall"] | run.summary["overall"]["equivalence"]
    return frame[["task", *(n for n in frame if n in measured and pd.api.types.is_numeric_dtype(frame[n]))]]


def table(frame: pd.DataFrame) -> wandb.Table:
    """A data frame; what was not measured is empty."""
    rows = frame.astype(object).where(frame.notna(), None)
    return wandb.Table(columns=list(frame), data=rows.to_numpy().tolist())


def histogram(counts: pd.Series) -> wandb.Histogram:
    """How often each whole number from 0 up came; its bin is [n, n + 1), or wider if the client takes no more bins."""
    bins = min(int(counts.max()) + 1, wandb.Histogram.MAX_LENGTH)
    return wandb.Histogram(np_histogram=np.histogram(counts, bins, (0, counts.max() + 1)))


def acceptance_lines(numbers: dict) -> wandb.plot.CustomChart:
    """Acceptance at each draft position from 1 on, two lines: see `metrics.acceptance_by_position`."""
    lines = {"unconditional": "acceptance_by_position", "conditional": "acceptance_by_position_conditional"}
    points = {
        name: [(i, share) for i, share in enumerate(numbers[key], start=1) if share is not None]
        for name, key in lines.items()
    }
    return wandb.plot.line_series(
        xs=[[position for position, _ in line] for line in points.values()],
        ys=[[share for _, share in line] for line in points.values()],
        keys=list(points),
        title="acceptance by draft position",
        xname="draft position",
    )


def artifact(run_dir: Path, upload_diff: bool = False) -> wandb.Artifact:
    """The run folder as it may leave this machine: without secrets, and without the code's diff.

    Args:
        run_dir: the run folder. A file in which nothing changes is not copied.
        upload_diff: keep the difference of the code from its commit; else only its checksum is kept.
    """
    upload = wandb.Artifact(re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name), type=ARTIFACT)
    for file in sorted(run_dir.iterdir()):
        if not file.is_file() or file.name.startswith("."):
            continue
        if file.suffix not in FORMATS:
            upload.add_file(str(file), policy="immutable", skip_cache=True)
            continue
        load, dump = FORMATS[file.suffix]
        content = load(file.read_text(encoding="utf-8"))
        shown = without_secrets(content)
        if file.name == store.PROVENANCE and shown["git"] and not upload_diff:
            shown["git"].pop("diff", None)
        if shown == content:
            upload.add_file(str(file), policy="immutable", skip_cache=True)
        else:
            with upload.new_file(file.name, encoding="utf-8") as copy:
                copy.write(dump(shown))
    return upload


def main() -> int:
    """Two arguments, the run folder and the tracker's settings; returns 1 when nothing, or not all, was logged."""
    try:
        print(log_run(Path(sys.argv[1]), json.loads(sys.argv[2])), flush=True)
        return 0
    except Exception as error:
        print(one_line(error), flush=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
