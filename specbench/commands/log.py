"""Weights & Biases: a view of finished run folders, which stay the truth. A tracker never costs a measurement.

`python -m specbench log RUN_DIR ...` logs finished runs, again or for the first time.
`python -m specbench.commands.log compare GROUP` gets the run folders of a group back, and prints their tables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.config.checks import check_tracker
from specbench.config.folders import group_file
from specbench.measure.records import run_folder as store
from specbench.system.arguments import Parser
from specbench.system.errors import UserError, one_line, one_line_errors, print_error
from specbench.system.files import read_json, write_json
from specbench.system.processes import end_with_parent

if TYPE_CHECKING:
    import pandas as pd
    import wandb

MODES = ("online", "offline")
CACHE = Path("runs") / "wandb"  # where `compare` puts the run folders that it gets
IDS = ".wandb_ids.json"  # beside run folders that were downloaded: the id of each on the service, by its name
OFFLINE_SECONDS = 120  # time limit for logging without the service
API_SECONDS = 20  # time limit for an answer of the service


# -- logging


def track(run_dir: Path, tracker: Mapping) -> bool:
    """Logs a complete run folder as configured in `conf/tracker/`; returns whether it was logged, online or offline.

    A failure of the service prints one line and has no other effect.
    """
    if tracker["name"] == "none":
        return True
    later = f"to log it later: python -m specbench log {shlex.quote(str(run_dir))}"
    try:
        print(_log(run_dir, dict(tracker)), flush=True)
        return True
    except KeyboardInterrupt:
        print(f"\nstopped, not logged; {later}", file=sys.stderr)
        raise
    except Exception as error:  # noqa: BLE001 - a service's failure must not fail a run that is measured and on disk
        print(f"warning: not logged ({error}); {later}", file=sys.stderr)
        return False


def _log(run_dir: Path, tracker: dict) -> str:
    """Logs a run, offline if the service fails; returns a message for the user."""
    check_tracker(tracker)
    failed = ""
    if tracker["mode"] == "online":
        try:
            return f"logged: {_attempt(run_dir, tracker, tracker['timeout'])}"
        except ChildProcessError as error:
            failed = f" ({error})"
    folder = _attempt(run_dir, tracker | {"mode": "offline"}, OFFLINE_SECONDS)
    return f"logged offline{failed}; to upload it: wandb sync {shlex.quote(folder)}"


def _attempt(run_dir: Path, tracker: dict, limit: float) -> str:
    """Runs `report/wandb_run.py` in a separate process without a terminal; returns the line that it printed.

    Raises ChildProcessError, with the reason, if it failed or took more than `limit` seconds. All files of the
    service's client are in `wandb/` of the run folder, with its stderr in a .log.
    """
    home = run_dir.resolve() / "wandb"
    home.mkdir(exist_ok=True)
    variables = {"WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(home / "cache"), "WANDB_DATA_DIR": str(home)}
    # No shared service process: an abandoned run would continue in it.
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    module = "specbench.report.wandb_run"
    command = [sys.executable, "-m", module, str(run_dir.resolve()), json.dumps(tracker)]
    # Files, not pipes: the client's own service process holds them, too, and may end later.
    with tempfile.TemporaryFile("w+") as output, open(home / f"{tracker['mode']}.log", "w") as log:
        try:
            ended = subprocess.run(
                command,
                env=inherited | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                preexec_fn=end_with_parent,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ChildProcessError(f"no end within {limit} s") from None
        output.seek(0)
        line = output.readline().strip()
    if ended.returncode != 0:
        raise ChildProcessError(line or f"exit code {ended.returncode}, see {log.name}")
    return line


def tracker_of(run_dir: Path, **overrides: str | None) -> dict:
    """The tracker's settings in a run folder, or else the defaults, updated with the `overrides`."""
    run_settings = store.read_config(run_dir)["tracker"]
    settings = group_file("tracker", "wandb")
    if run_settings["name"] == "wandb":
        settings |= run_settings
    return settings | {key: value for key, value in overrides.items() if value is not None}


def logged(run_dir: Path, overrides: Mapping[str, str | None]) -> bool:
    """Whether a run folder was logged; prints why not."""
    try:
        return track(run_dir, tracker_of(run_dir, **overrides))
    except UserError as error:  # of this folder alone
        print_error(error)
        return False


# -- getting a group back


def group_frame(
    group: str, project: str = "specbench", entity: str | None = None, into: Path = CACHE
) -> pd.DataFrame:
    """`report.runs.summary_frame` of the runs of a group; see `pull`."""
    from specbench.report.runs import read_runs, summary_frame

    return summary_frame(read_runs(pull(group, project, entity, into))[0])


def pull(group: str, project: str = "specbench", entity: str | None = None, into: Path = CACHE) -> list[Path]:
    """Downloads the run folders of a group from the service into `into`/<group>/; returns them sorted by name.

    A run is fetched once, also if its name has changed since; if a folder holds another run of that name, the run's id
    is appended. A run without a folder is left out with a warning. entity: None is the user's own. Raises UserError if
    there is no such group, no login, or no network.
    """
    if not group:
        raise UserError("name the group: make wandb-compare GROUP=name")
    from specbench.report.wandb_run import run_id  # late, as below

    group_runs = _run_folders(group, project, entity)
    names = [name for name, _, _ in group_runs]
    folders, root = [], into / _file_name(group)
    ids = read_json(root / IDS) if (root / IDS).is_file() else {}
    fetched = {
        ids.get(one.name) or run_id(one): one
        for one in (sorted(root.iterdir()) if root.is_dir() else [])
        if store.is_complete(one)
    }
    for name, number, artifact in group_runs:
        folder = fetched.get(number) or root / _file_name(name)
        if number not in fetched and (names.count(name) > 1 or store.is_complete(folder)):
            folder = root / _file_name(f"{name}_{number}")
        if artifact is not None and not store.is_complete(folder):
            _download(artifact, folder)
            write_json(root / IDS, ids := ids | {folder.name: number})
        if store.is_complete(folder):
            folders.append(folder)
        else:
            print(f"warning: run {name} of group {group} has no run folder, left out", file=sys.stderr)
    if not folders:
        raise UserError(f"no run folder in group '{group}' of project '{project}'")
    return sorted(folders)


def _run_folders(
    group: str, project: str, entity: str | None
) -> list[tuple[str, str, wandb.Artifact | None]]:
    """Name, id and run folder of each run of a group, as the service has them."""
    with _service_errors():
        import wandb  # late: it takes a second that others need not spend

        from specbench.report.wandb_run import ARTIFACT

        path = f"{entity}/{project}" if entity else project
        group_runs = []
        for run in wandb.Api(timeout=API_SECONDS).runs(path, {"group": group}):
            folders = [artifact for artifact in run.logged_artifacts() if artifact.type == ARTIFACT]
            group_runs.append((run.name, run.id, folders[-1] if folders else None))
        return group_runs


def _download(artifact: wandb.Artifact, folder: Path) -> None:
    """Downloads an artifact; if it is a complete run folder, renames it to `folder` in one step."""
    part = folder.with_name(f".{folder.name}")
    with _service_errors():
        artifact.download(root=str(part), skip_cache=True)
    if store.is_complete(part):
        part.rename(folder)


@contextmanager
def _service_errors() -> Iterator[None]:
    """Turns any error of the service's client, which raises those of several libraries, into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"Weights & Biases: {one_line(error)}") from error


def _file_name(name: str) -> str:
    """A name from the service as a folder name: no separators, not hidden."""
    return re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "-"


# -- the command


@one_line_errors()
def main() -> int:
    """The commands `log` and `compare`; returns the exit code, 1 if a run was not logged."""
    parser = Parser(
        prog="python -m specbench.commands.log",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    log = commands.add_parser("log", help="log finished runs; safe to repeat")
    log.add_argument("run_dir", nargs="+", type=Path, help="run folders, or folders of them")
    log.add_argument("--group", help="default: the run's own group")
    log.add_argument("--mode", choices=MODES)
    compare = commands.add_parser("compare", help="tables of the runs of a group")
    compare.add_argument("group")
    log.add_argument("--project")
    compare.add_argument("--project", default="specbench")
    for command in (log, compare):
        command.add_argument("--entity", help="default: your own account")
    arguments = vars(parser.parse_args())
    from specbench.report import tables
    from specbench.report.compare import faulty
    from specbench.report.runs import finished_runs, oldest_first

    if arguments.pop("command") == "log":
        paths = arguments.pop("run_dir")
        if keys := [path for path in paths if "=" in path.name and not path.exists()]:
            raise UserError(f"log takes --mode, --group, --project and --entity, not {keys[0]}")
        runs, left_out = finished_runs(paths)
        tables.print_left_out(left_out)
        try:
            outcomes = [logged(run.folder, arguments) for run in runs]
        except KeyboardInterrupt:
            return 130
        return 0 if all(outcomes) and not left_out else 1
    os.environ["WANDB_SILENT"] = "true"  # it prints nothing, and asks nothing
    runs, left_out = finished_runs(pull(**arguments))
    runs = oldest_first(runs)
    tables.print_overview(runs)
    tables.print_notes(faulty(runs))
    tables.print_left_out(left_out)
    print(runs[0].folder.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
