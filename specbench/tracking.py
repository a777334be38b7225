"""Weights & Biases: a view of a finished run folder, which stays the truth. A tracker never costs a measurement."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from specbench.measure import store


def track(run_dir: Path, tracker: Mapping) -> None:
    """Logs a complete run folder as `conf/tracker/` says: config, summary scalars, a row per task, the folder itself.

    What goes wrong with the service is reported in one line and changes nothing else.
    """
    if tracker["name"] == "none":
        return
    try:
        _log_to_wandb(run_dir, tracker)
    except Exception as error:  # noqa: BLE001 - a service's failure must not fail a run that is measured and on disk
        print(f"warning: {run_dir} is not tracked: {error}", file=sys.stderr)


def scalars(value: Mapping, prefix: str = "") -> dict[str, float]:
    """The numbers of nested dictionaries by their path: {"overall": {"speedup": 2}} -> {"overall/speedup": 2}."""
    flat = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= scalars(item, f"{prefix}{key}/")
        elif isinstance(item, int | float):
            flat[prefix + key] = item
    return flat


def _log_to_wandb(run_dir: Path, tracker: Mapping) -> None:
    import wandb  # here, for it takes a second that a run without it need not spend

    summary, config = store.read_json(run_dir / store.SUMMARY), store.read_config(run_dir)
    run = wandb.init(
        project=tracker["project"],
        mode=tracker["mode"],
        group=tracker["group"],
        job_type=summary["method"],
        name=run_dir.name,
        config=config,
        dir=str(run_dir),
        reinit="finish_previous",
    )
    run.summary.update(scalars(summary))
    columns = [key for key, item in summary["overall"].items() if isinstance(item, int | float)]
    rows = [[task, *(block.get(key) for key in columns)] for task, block in summary["tasks"].items()]
    run.log({"tasks": wandb.Table(columns=["task", *columns], data=rows)})
    artifact = wandb.Artifact(run_dir.name.replace(":", "-"), type="run")
    for file in sorted(run_dir.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()
