"""W&B as a view: what is logged can be read back, a group comes back as it was, and no failure costs anything."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from specbench import ROOT
from specbench.commands import log as tracking
from specbench.config.checks import check_tracker
from specbench.measure.metrics.questions import QUESTION_COLUMNS, by_question
from specbench.measure.records import run_folder as store
from specbench.report.runs import read_runs, summary_frame
from specbench.report.wandb_run import histogram, run_id, scalars
from specbench.system.errors import UserError
from specbench.system.files import read_json, write_json
from tests.support.commands import exit_code
from tests.support.messages import says
from tests.support.synthetic import CONFIG, FACTS, TIE, answered, record
from tests.support.wandb_server import KEY, serving

NONE = {"name": "none"}
TRACKER = {
    "name": "wandb",
    "entity": None,
    "project": "specbench",
    "mode": "online",
    "group": "g",
    "timeout": 60,
    "upload_diff": False,
}
OFFLINE = TRACKER | {"mode": "offline"}
NOWHERE = "http://127.0.0.1:9"
TIMEOUT = 120


def finished_run(root: Path, *records: dict, **config) -> Path:
    """A complete run folder of these records."""
    run_dir = store.find_or_create(CONFIG | {"runs_root": str(root), "tracker": TRACKER} | config)
    write_json(run_dir / store.FACTS, FACTS)
    with store.open_journal(run_dir) as journal:
        journal.append(*records)
    store.finalise(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two run folders; of the first a question failed."""
    root = tmp_path_factory.mktemp("runs")
    first = [
        answered(1, "qa", (2, 3)),
        answered(2, "rag", (0, 5, 1), slow=1.5),
        record(3, error="it did not fit"),
    ]
    first[1]["turns"][0]["equivalence"] = TIE
    second = [answered(1, "qa", (1, 1)), answered(2, "rag", (4,), slow=0.5)]
    return [finished_run(root, *first), finished_run(root, *second, seed=1)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Of a user who has no login; what is sent to nobody stays unsent."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return kept | {"HOME": str(tmp_path_factory.mktemp("home")), "WANDB_ERROR_REPORTING": "false"}


@contextmanager
def as_user(environment: dict[str, str]) -> Iterator[None]:
    """This process as one of that user's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "WANDB_API_KEY", "WANDB_BASE_URL"):
            patch.setenv(name, environment[name])
        yield


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return finished_run(tmp_path, answered(1), answered(2))


def command(*arguments: object, **options) -> subprocess.CompletedProcess:
    """`python -m specbench.commands.log`, from the folder of this checkout."""
    words = [sys.executable, "-m", "specbench.commands.log", *map(str, arguments)]
    usual = {
        "cwd": ROOT,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    return subprocess.run(words, text=True, timeout=TIMEOUT, **usual | options)


# -- the log, read by the client's own reader


@pytest.fixture(scope="module")
def offline(runs, environment) -> tuple[str, Path]:
    """What `log` says of the first run, when nobody is logged in but a terminal is there to ask; the log's folder."""
    keyboard, terminal = pty.openpty()
    try:
        done = command("log", runs[0], env=environment, stdin=terminal, stderr=terminal)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.returncode == 0
    (folder,) = runs[0].glob("wandb/offline-run-*")
    return done.stdout, folder


@pytest.fixture(scope="module")
def logged(offline, environment) -> list[dict]:
    """The records of the log."""
    reader = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", offline[1]]
    done = subprocess.run(
        reader, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def values(logged: list[dict], kind: str) -> dict:
    """What the records of one kind set, the later over the earlier."""
    found = {}
    for line in logged:
        if line["type"] == kind:
            found |= line[kind]["item" if kind == "history" else "update"]
    return found


def logged_table(offline, logged, name: str) -> pd.DataFrame:
    content = json.loads((offline[1] / "files" / values(logged, "history")[f"{name}.path"]).read_text())
    return pd.DataFrame(content["data"], columns=content["columns"], dtype=object)


@pytest.mark.process
def test_without_login_a_run_is_logged_offline_and_nobody_is_asked(offline):
    said, folder = offline
    assert said.startswith("logged offline (UsageError: No API key")
    assert said.endswith(f"wandb sync {folder}\n") and said.count("\n") == 1


@pytest.mark.process
def test_a_log_holds_the_configuration_and_the_summary(runs, logged):
    (run,) = [line["run"] for line in logged if line["type"] == "run"]
    assert run["run_id"] == run_id(runs[0]) and run["display_name"] == runs[0].name
    assert (run["run_group"], run["job_type"], run["project"]) == ("g", "sps", "specbench")
    assert run["config"]["update"] | store.read_config(runs[0]) == run["config"]["update"]
    summary, expected = values(logged, "summary"), scalars(read_json(runs[0] / store.SUMMARY))
    assert expected["overall/speedup"] > 1 and expected["failed"] == 1
    assert {key: summary[key] for key in expected} == pytest.approx(expected)


@pytest.mark.process
def test_a_log_holds_the_tables(runs, offline, logged):
    tasks = logged_table(offline, logged, "tasks").set_index("task")
    summary = read_json(runs[0] / store.SUMMARY)
    assert list(tasks.index) == ["qa", "rag", "overall"]
    for task, numbers in [*summary["tasks"].items(), ("overall", summary["overall"])]:
        for name in ("questions", "tokens_per_second", "speedup", "acceptance_length", "mbsu"):
            assert tasks.loc[task, name] == pytest.approx(numbers[name])
        assert tasks.loc[task, "tie"] == numbers["equivalence"]["tie"]
    questions = logged_table(offline, logged, "questions")
    expected = by_question(store.read_records(runs[0]), "baseline", "question")
    pd.testing.assert_frame_equal(questions.astype(QUESTION_COLUMNS), expected)
    assert list(questions["verdict"]) == ["exact", "tie", None]
    assert list(questions["error"]) == [None, None, "it did not fit"]


@pytest.mark.process
def test_a_log_holds_the_plots(offline):
    _, folder = offline
    drawn = {path.name.rsplit("_", 2)[0] for path in folder.rglob("media/images/plots/*.png")}
    assert {"speedup_by_task", "time", "mbsu_and_speedup"} <= drawn


@pytest.mark.process
def test_a_log_holds_the_histograms_and_acceptance_by_position(runs, offline, logged):
    history = values(logged, "history")
    assert history["accepted_per_round.values"] == [1, 1, 1, 1, 0, 1]
    assert history["emitted_per_round.values"] == [0, 1, 1, 1, 1, 0, 1]
    assert history["emitted_per_round.bins"] == list(range(8))
    lines = logged_table(offline, logged, "acceptance_by_position_table")
    overall = read_json(runs[0] / store.SUMMARY)["overall"]
    for name, key in (("unconditional", ""), ("conditional", "_conditional")):
        line = lines[lines["lineKey"] == name]
        assert list(line["step"]) == [1, 2, 3, 4, 5]
        assert list(line["lineVal"]) == pytest.approx(overall[f"acceptance_by_position{key}"])


def test_a_histogram_of_many_lengths_has_wider_bins():
    """The client refuses more than 512."""
    few, many = (histogram(pd.Series([0, 1, 1, most])) for most in (5, 3000))
    assert few.histogram == [1, 2, 0, 0, 0, 1] and few.bins == [0, 1, 2, 3, 4, 5, 6]
    assert len(many.histogram) == 512 and sum(many.histogram) == 4 and many.bins[-1] == 3001


def digests(run_dir: Path) -> dict[str, str]:
    """MD5 of the files of a run folder, as a manifest of an artifact has them."""
    files = [path for path in run_dir.iterdir() if path.is_file() and path.name != ".lock"]
    return {path.name: base64.b64encode(hashlib.md5(path.read_bytes()).digest()).decode() for path in files}


@pytest.mark.process
def test_a_log_holds_the_run_folder(runs, logged):
    (artifact,) = [line["artifact"] for line in logged if line.get("artifact", {}).get("type") == "run"]
    contents = artifact["manifest"]["contents"]
    assert {entry["path"]: entry["digest"] for entry in contents} == digests(runs[0])
    assert all(Path(entry["local_path"]).parent == runs[0] for entry in contents)  # nothing was copied


# -- the service


@pytest.fixture(scope="module")
def service(runs, offline, environment):
    """A service that got the log of the first run by `wandb sync`, and the second run at once, twice.

    Gives the service, the environment of its user, and what the user was told.
    """
    with serving() as there:
        user = environment | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": there.url}
        sync = [Path(sys.executable).with_name("wandb"), "sync", offline[1]]
        subprocess.run(sync, cwd=runs[0], env=user, capture_output=True, timeout=TIMEOUT, check=True)
        with as_user(user), redirect_stdout(io.StringIO()) as told:
            assert [tracking.track(runs[1], TRACKER) for _ in range(2)] == [True, True]
        yield there, user, told.getvalue()


@pytest.mark.process
def test_the_service_gets_every_run_once(service, runs):
    there, _, told = service
    assert told == 2 * f"logged: {there.url}/me/specbench/runs/{run_id(runs[1])}\n"
    assert list(there.runs) == [run_id(run_dir) for run_dir in runs]
    for run_dir in runs:
        run = there.runs[run_id(run_dir)]
        assert (run["displayName"], run["groupName"], run["jobType"]) == (run_dir.name, "g", "sps")
        assert json.loads(run["config"])["seed"]["value"] == store.read_config(run_dir)["seed"]
        summary = json.loads(there.files[f"{run_id(run_dir)}/wandb-summary.json"])
        speedup = read_json(run_dir / store.SUMMARY)["overall"]["speedup"]
        assert summary["overall/speedup"] == pytest.approx(speedup)
        assert "accepted_per_round" in there.history[run_id(run_dir)][0]


@pytest.mark.process
def test_a_group_comes_back_as_it_was(service, runs, tmp_path):
    there, user, _ = service
    there.UpsertBucket({"name": "x", "displayName": "still running", "groupName": "g", "config": "{}"})
    done = command("compare", "g", env=user | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0
    assert says(done.stderr, "warning: ... still running ... group g")
    assert done.stdout.splitlines()[-1] == "runs/wandb/g"
    assert all(f"\nsps, seed={seed} " in done.stdout for seed in (0, 1))
    found = [tmp_path / "runs" / "wandb" / "g" / run_dir.name for run_dir in runs]
    for mine, theirs in zip(runs, found):
        assert digests(mine) == digests(theirs)
    with as_user(user):
        frame = tracking.group_frame("g", into=tmp_path / "runs" / "wandb")
        pd.testing.assert_frame_equal(frame, summary_frame(read_runs(sorted(runs))[0]))
        with pytest.raises(UserError, match="'h'.*'specbench'"):
            tracking.pull("h")
        with pytest.raises(UserError, match="Could not find project other"):
            tracking.pull("g", "other")


def test_a_run_of_the_same_name_in_another_project_is_not_taken_for_it(runs, tmp_path, monkeypatch):
    class Artifact:
        def __init__(self, run_dir: Path):
            self.run_dir = run_dir

        def download(self, root: str, **_) -> None:
            shutil.copytree(self.run_dir, root)

    def pulled(run_dir: Path) -> Path:
        group_runs = [("branch", run_id(run_dir), Artifact(run_dir))]
        monkeypatch.setattr(tracking, "_run_folders", lambda *_: group_runs)
        (folder,) = tracking.pull("g", into=tmp_path / "cache")
        return folder

    named = [tmp_path / str(i) / "branch" for i in range(2)]
    for run_dir, copy in zip(runs, named):
        shutil.copytree(run_dir, copy)
    first, second = map(pulled, named)
    assert first.name == "branch" and second.name == f"branch_{run_id(named[1])}"
    assert [digests(folder) for folder in (first, second)] == [digests(folder) for folder in named]
    assert pulled(named[0]) == first and pulled(named[1]) == second


def test_a_run_that_was_renamed_on_the_service_is_fetched_once(runs, tmp_path, monkeypatch):
    names = iter(["as it was", "renamed", "again"])

    class Artifact:
        def download(self, root: str, **_) -> None:
            shutil.copytree(runs[0], root)

    monkeypatch.setattr(tracking, "_run_folders", lambda *_: [(next(names), run_id(runs[0]), Artifact())])
    found = [tracking.pull("g", into=tmp_path) for _ in range(3)]
    assert found == 3 * [[tmp_path / "g" / "as-it-was"]]
    assert {folder.name for folder in (tmp_path / "g").iterdir()} == {"as-it-was", tracking.IDS}


def test_comparing_needs_a_name():
    with pytest.raises(UserError, match="group.*name"):
        tracking.pull("")


@pytest.mark.process
def test_comparing_needs_login_and_network(monkeypatch, environment, tmp_path):
    done = command("compare", "g", env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert says(done.stderr, "error: ... UsageError: No API key")
    monkeypatch.setattr(tracking, "API_SECONDS", 1)
    user = as_user(environment | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": NOWHERE})
    with user, pytest.raises(UserError, match=f"Failed to verify credentials with {NOWHERE}"):
        tracking.pull("g", into=tmp_path)


# -- what goes wrong


def test_scalars_are_numbers_by_path():
    assert scalars({"a": {"b": 1, "c": None, "d": {"e": 0.5}}, "f": "text"}) == {"a/b": 1, "a/d/e": 0.5}


def test_a_run_that_is_left_out_is_named_and_the_exit_code_says_so(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "track", lambda *_: True)
    (tmp_path / store.CODE).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["log", "log", str(runs[0]), str(tmp_path)])
    assert tracking.main() == 1
    assert f"left out: {tmp_path.name}: unfinished" in capsys.readouterr().out


def test_a_folder_without_settings_keeps_no_other_from_the_log(runs, tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(tracking, "track", lambda run_dir, _: seen.append(run_dir) or True)
    shutil.copytree(runs[0], tmp_path / "a")
    shutil.copytree(runs[0], tmp_path / "b")
    (tmp_path / "a" / store.CONFIG).unlink()
    monkeypatch.setattr(sys, "argv", ["log", "log", str(tmp_path / "a"), str(tmp_path / "b")])
    assert tracking.main() == 1
    assert seen == [tmp_path / "b"] and store.CONFIG in capsys.readouterr().err


def test_a_comparison_tells_of_questions_that_failed(runs, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "pull", lambda **_: runs)
    monkeypatch.setattr(sys, "argv", ["log", "compare", "g"])
    assert tracking.main() == 0
    assert "FAILED: 1 questions, left out of every number" in " ".join(capsys.readouterr().out.split())


def test_a_key_on_the_command_line_is_told_of_the_options(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["log", "log", str(runs[0]), "tracker.mode=offline"])
    with pytest.raises(SystemExit):
        tracking.main()
    assert says(capsys.readouterr().err, "log takes ... --mode ... not tracker.mode=offline")


def test_wrong_options_are_one_line(monkeypatch, capsys):
    for words, named in (
        (["log"], "required: run_dir"),
        (["log", "A", "--mode", "of"], "invalid choice: 'of'"),
    ):
        monkeypatch.setattr(sys, "argv", ["log", *words])
        assert exit_code(tracking.main) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and named in error and error.count("\n") == 1


def test_nothing_is_written_without_a_tracker(run_dir):
    before = sorted(run_dir.iterdir())
    assert tracking.track(run_dir, NONE)
    assert sorted(run_dir.iterdir()) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"group": 20261128}, "tracker.group must be text or null, not 20261128"),
        ({"project": 7}, "tracker.project must be text or null, not 7"),
        ({"entity": True}, "tracker.entity must be text or null, not True"),
        ({"mode": "onlin"}, "tracker.mode 'onlin' ... online"),
        ({"timeout": 0}, "tracker.timeout ... 1 ... 0"),
        ({"timeout": "long"}, "tracker.timeout ... 'long'"),
        ({"upload_diff": "maybe"}, "tracker.upload_diff ... true ... false ... 'maybe'"),
    ],
)
def test_a_setting_that_cannot_work(wrong, message):
    with pytest.raises(UserError) as caught:
        check_tracker(TRACKER | wrong)
    assert says(str(caught.value), message)


def test_a_run_names_itself(runs, tmp_path):
    assert run_id(runs[0]) != run_id(runs[1])
    copy = tmp_path / runs[0].name
    copy.mkdir()
    (copy / store.RECORDS).write_bytes((runs[0] / store.RECORDS).read_bytes())
    assert run_id(copy) == run_id(runs[0])
    (copy / store.RECORDS).write_bytes((runs[1] / store.RECORDS).read_bytes())
    assert run_id(copy) != run_id(runs[0])


@pytest.mark.process
def test_a_failing_tracker_is_one_line(run_dir, capsys, monkeypatch):
    (run_dir / store.STEPS).write_bytes(b"not a table")
    before = digests(run_dir)
    assert not tracking.track(run_dir, OFFLINE)
    error = capsys.readouterr().err
    assert error.startswith("warning: not logged (ArrowInvalid: ") and error.count("\n") == 1
    assert error.endswith(f"python -m specbench log {run_dir}\n")
    assert "Traceback" in (run_dir / "wandb" / "offline.log").read_text()
    assert digests(run_dir) == before


@pytest.mark.process
def test_a_process_that_dies_is_one_line(run_dir, capsys, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert not tracking.track(run_dir, OFFLINE)
    assert says(capsys.readouterr().err, "warning: ... -9")


@pytest.mark.process
def test_a_service_that_never_answers(run_dir, capsys, environment):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with as_user(environment | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}):
            assert tracking.track(run_dir, TRACKER | {"timeout": 2})
    assert capsys.readouterr().out.startswith("logged offline (no end within 2 s)")


@pytest.mark.process
def test_ctrl_c_leaves_a_hint(run_dir, environment):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = [sys.executable, "-m", "specbench", "log", str(run_dir)]
        user = environment | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a test in the background ignores it
        child = subprocess.Popen(
            words, cwd=ROOT, env=user, stderr=subprocess.PIPE, text=True, preexec_fn=heed
        )
        silent.settimeout(TIMEOUT)
        with silent.accept()[0] as asked:
            assert b"HTTP" in asked.recv(4096)  # now it waits for the answer
            child.send_signal(signal.SIGINT)
            _, error = child.communicate(timeout=TIMEOUT)
    assert child.returncode == 130
    assert says(error, f"stopped ... python -m specbench log {run_dir}")


def test_secrets_stay_here(tmp_path):
    from specbench.report.wandb_run import artifact

    run_dir = finished_run(tmp_path, answered(1), tracker=OFFLINE | {"api_key": "open sesame"})
    (entry,) = [e for e in artifact(run_dir).manifest.entries.values() if e.path == store.CONFIG]
    sent = Path(entry.local_path).read_text()
    assert "open sesame" not in sent and "api_key: '***'" in sent
    assert "open sesame" in (run_dir / store.CONFIG).read_text()


SECRET_URL = "https://me:pw@host/q?token=abc"


def sent_files(run_dir: Path, **options) -> dict[str, str]:
    from specbench.report.wandb_run import artifact

    entries = artifact(run_dir, **options).manifest.entries.values()
    return {entry.path: Path(entry.local_path).read_text() for entry in entries if entry.path != store.STEPS}


def test_no_file_that_is_sent_holds_a_secret(tmp_path):
    data = CONFIG["data"] | {"url": SECRET_URL}
    run_dir = finished_run(tmp_path, answered(1), data=data)
    # As an older version wrote it, or a child on another machine.
    write_json(run_dir / store.PROVENANCE, {"config": {"data": data}, "git": None})
    (run_dir / "log.txt").write_text(f"cannot download {SECRET_URL}\n")
    store.note_failure(run_dir, f"cannot download {SECRET_URL}")
    sent = sent_files(run_dir)
    for name in (store.CONFIG, store.PROVENANCE, store.FAILURE, "log.txt"):
        assert "https://***@host/q?***" in sent[name]
    assert not any("pw@host" in text or "token=abc" in text for text in sent.values())
    assert store.read_config(run_dir)["data"]["url"] == SECRET_URL  # here it is needed


def test_the_code_stays_here_unless_asked_for(tmp_path):
    run_dir = finished_run(tmp_path, answered(1))
    git = {"commit": "c" * 40, "diff_sha256": "d" * 64, "diff": "+unpublished = 1\n"}
    write_json(run_dir / store.PROVENANCE, {"git": git})
    (sent,) = [json.loads(text) for name, text in sent_files(run_dir).items() if name == store.PROVENANCE]
    assert sent["git"] == {"commit": "c" * 40, "diff_sha256": "d" * 64}
    (sent,) = [
        json.loads(text)
        for name, text in sent_files(run_dir, upload_diff=True).items()
        if name == store.PROVENANCE
    ]
    assert sent["git"] == git == read_json(run_dir / store.PROVENANCE)["git"]
