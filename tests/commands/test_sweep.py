"""Sweeps: what is measured is not measured again, what failed is named, and nothing is lost with a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specbench.commands import run as bench
from specbench.commands import sweep as sweeps
from specbench.commands.sweep import FAILED, LEFT_OUT, OK, RUNNING, WAITING, Job, open_sweep, threads_of_first
from specbench.measure.machine import provenance
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from specbench.system.files import write_json
from tests.support.commands import (
    TIMEOUT,
    measure_here,
    run_main,
    small_pair_and_questions,
    start,
    wait_for,
)
from tests.support.conf import composed
from tests.support.folders import hurried  # noqa: F401 - a fixture
from tests.support.messages import says
from tests.support.models import save_pair
from tests.support.samples import SUMMARY, write_run

pytestmark = pytest.mark.usefixtures("hurried")


def states(cwd: Path) -> list[str]:
    """The states of the jobs of the newest sweep; none as long as there is no sweep."""
    files = sorted(cwd.glob(f"runs/sweeps/*/{sweeps.SWEEP}"))
    return [job["state"] for job in json.loads(files[-1].read_text())["jobs"]] if files else []


def runs(cwd: Path) -> list[Path]:
    return sorted(path for path in (cwd / "runs").iterdir() if path.name != sweeps.SWEEPS)


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_sweep_goes_on_and_names_what_fails(monkeypatch, capfd, tmp_path):
    # Two jobs are the same, and the draft model of the third one has another vocabulary.
    arguments = small_pair_and_questions(tmp_path)
    narrow = save_pair(tmp_path / "narrow", vocab_size=258).draft
    good = next(a.partition("=")[2] for a in arguments if a.startswith("pair.draft="))
    command = ["-m", "method=sps", *arguments, f"pair.draft={good},{good},{narrow}"]

    process = start(tmp_path, *command)
    wait_for(lambda: states(tmp_path) == [OK, RUNNING, WAITING] or process.poll() is not None)
    process.kill()
    process.communicate(timeout=TIMEOUT)
    monkeypatch.chdir(tmp_path)
    assert states(tmp_path) == [OK, RUNNING, WAITING]
    first, second = runs(tmp_path)

    measure_here(monkeypatch)
    code, out, err = run_main(monkeypatch, capfd, *command)
    assert code == 2, err
    threads = [store.read_config(run_dir)["threads"] for run_dir in (first, second)]
    assert threads == [None, sweeps.chosen_threads(first)]
    assert runs(tmp_path) == [first, second], "what was refused leaves no folder"
    assert states(tmp_path) == [OK, OK, FAILED]
    assert f": runs/{first.name}\n" in out and "all runs" in out
    *_, count, failed, last = out.splitlines()
    assert count.startswith("1 of 3 ") and last == f"runs/{second.name}"
    assert failed.startswith(f"  pair.draft={narrow}: ") and "258" in failed
    assert "Traceback" not in err


def test_bad_input_is_told_once_wherever_the_job_was(capsys, tmp_path):
    """A runner here has said it; what one on a cluster says is in its log."""
    here, there = tmp_path / "here", tmp_path / "there"
    for run_dir in (here, there):
        run_dir.mkdir()
        store.note_failure(run_dir, "the vocabularies differ")
    (there / store.LOG).write_text("error: the vocabularies differ\n")
    bench.end(Job(["method=sps"], OmegaConf.create(), run_dir=here), 2)
    assert capsys.readouterr() == ("", "") and not here.exists()
    bench.end(Job(["method=sps"], OmegaConf.create(), run_dir=there), 2)
    assert capsys.readouterr() == (f"{there}\n", f"error: the vocabularies differ; see {there}\n")


@pytest.mark.slow
def test_a_violation_is_a_failure_that_is_not_measured_again(monkeypatch, capfd, tmp_path):
    arguments = small_pair_and_questions(tmp_path)
    measure_here(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specbench.report.verdicts.violates", lambda summary: True)
    command = ["-m", "method=sps", *arguments, "seed=0,1", "rerun=false"]
    for measured in ("", "already measured"):
        code, out, err = run_main(monkeypatch, capfd, *command)
        assert code == 1 and measured in out
        assert measured or "error: answers are violations; see runs/" in err
        assert says(out, "2 of 2 jobs have wrong answers: ... seed=0: answers are violations (runs/")
        assert states(tmp_path) == [OK, OK] and len(runs(tmp_path)) == 2


# -- which sweep goes on


@pytest.fixture
def jobs(tmp_path):
    """Makes the jobs of a sweep anew, as a process does that is given the same command."""

    def make(*names: str) -> list[Job]:
        cfg = OmegaConf.create({"runs_root": str(tmp_path / "runs")})
        return [Job([f"method={name}"], cfg) for name in names]

    return make


def swept(jobs: list[Job], *codes: int) -> Path:
    """Ends some jobs of their sweep; returns its folder."""
    with open_sweep(jobs) as sweep:
        for job, code in zip(jobs, codes):
            job.ended(code, "so it was" if code else None)
        sweep.save()
    return sweep.folder


def test_a_sweep_goes_on_until_all_is_measured(jobs):
    folder = swept(jobs("ar", "pld"), 0)
    assert swept(jobs("ar", "pld"), 0, 1) == folder
    again = jobs("ar", "pld")
    with open_sweep(again) as sweep:
        assert sweep.folder == folder and [job.state for job in again] == [OK, FAILED]
    assert swept(jobs("ar", "pld"), 0, 0) == folder
    assert swept(jobs("ar", "pld")) != folder


@pytest.mark.slow
def test_a_finished_sweep_stays_where_that_is_asked_for(jobs, monkeypatch):
    def kept(*names: str) -> list[Job]:
        made = jobs(*names)
        for job in made:
            job.cfg.rerun = False
        return made

    folder = swept(kept("ar", "pld"), 0, 0)
    again = kept("ar", "pld")
    for job in again:
        job.overrides.append("rerun=false")
    assert swept(again) == folder and [job.state for job in again] == [OK, OK]
    monkeypatch.setattr(sweeps, "source_sha256", lambda: "other")
    assert swept(kept("ar", "pld")) != folder


@pytest.mark.slow
def test_other_jobs_or_other_code_are_another_sweep(jobs, monkeypatch):
    folders = {swept(jobs("ar", "pld")), swept(jobs("pld", "ar")), swept(jobs("ar"))}
    monkeypatch.setattr(sweeps, "source_sha256", lambda: "other")
    assert len(folders | {swept(jobs("ar"))}) == 4


def test_jobs_take_the_threads_of_the_first_on_the_same_models(tmp_path):
    """So that a report can compare them."""

    def job(
        name: str, device: str | None = None, pair: str = "tiny", batch_size: int = 1, **more: str
    ) -> Job:
        folder = tmp_path / name
        if device is not None:
            write_run(tmp_path, name, SUMMARY | {"device": device, "threads": 3})
        cfg = {"pair": {"name": pair, **more}, "engine": None, "batch_size": batch_size}
        return Job([], OmegaConf.create(cfg), run_dir=folder)

    one, waiting = job("one", "cpu"), job("waiting")
    assert threads_of_first(waiting, [job("killed"), one, waiting]) == 3
    assert threads_of_first(waiting, [job("gpu", "cuda:0"), waiting]) is None
    assert threads_of_first(job("other", pair="other"), [one]) is None
    assert threads_of_first(job("batches", batch_size=8), [one]) is None
    assert threads_of_first(job("other_draft", draft="x", parts="y"), [one]) == 3
    one.overrides.append("threads=3")
    assert threads_of_first(waiting, [one]) is None, "which was given, and not chosen"


def test_a_job_that_began_before_the_first_had_ended_goes_on_in_its_folder(jobs, tmp_path, monkeypatch):
    """With the threads of the job that has ended since, it would be another run, and begin anew."""
    monkeypatch.setattr(bench, "check", lambda cfg: None)
    monkeypatch.setattr(bench, "resume_state", lambda job: None)
    monkeypatch.setattr(bench, "end", lambda *_: None)
    monkeypatch.setattr(store, "find_or_create", lambda cfg, taken: tmp_path / cfg.name)
    begun, ended, waiting = sweep = [*jobs("begun"), *jobs("ended"), *jobs("waiting")]
    for job, name in zip(sweep, ("begun", "ended", "waiting")):
        values = {"name": name, "threads": None, "pair": {"name": "tiny"}, "engine": None, "batch_size": 1}
        job.cfg = OmegaConf.create(values)
        job.run_dir = tmp_path / name
    write_run(tmp_path, "ended", SUMMARY | {"threads": 3})
    ended.state = OK
    begun.run_dir.mkdir()
    bench.run(sweep, lambda folders, logs: ((folder, 0, None) for folder in folders), tmp_path)
    assert [job.cfg.threads for job in (begun, waiting)] == [None, 3]


def test_a_job_that_was_measured_with_other_packages_is_measured_again(tmp_path, monkeypatch, capsys):
    """Unless another machine has measured it, which has its own."""
    versions = {"torch": "1.0"}
    monkeypatch.setattr(provenance, "versions", lambda: versions)
    monkeypatch.setattr(provenance, "weights", lambda *_: {})
    monkeypatch.setattr(store, "_difference", lambda *_: None)
    folder = write_run(tmp_path, "run")
    write_json(folder / store.PROVENANCE, provenance.around() | {"weights": {}})
    write_json(folder / store.FACTS, {"unit": "question"})
    cfg = composed("bench", "method=pld")
    assert store.is_measured(folder, cfg)
    versions["torch"] = "2.0"
    assert not store.is_measured(folder, cfg)
    bench.resume_state(job := Job([], cfg, OK, folder))
    assert job.state == WAITING
    assert capsys.readouterr().out == f"measured again (versions.torch 1.0 against 2.0): {folder}\n"
    (folder / store.LOG).touch()
    assert store.is_measured(folder, cfg)


def test_a_sweep_without_jobs_is_one_line():
    with pytest.raises(UserError, match="the sweep has no job"):
        bench.Command().sweep([], lambda *_: iter(()))


def test_a_sweep_that_goes_on_keeps_the_threads_of_its_jobs(jobs):
    begun = jobs("ar")
    begun[0].cfg.threads = 3
    swept(begun)
    again = jobs("ar")
    with open_sweep(again):
        assert again[0].cfg.threads == 3


def test_one_process_at_a_time(jobs):
    with open_sweep(jobs("ar")), pytest.raises(UserError, match="another process"):
        swept(jobs("ar"))


def test_a_label_tells_a_job_from_the_others():
    jobs = [Job(["pair=tiny", f"method={name}"], OmegaConf.create()) for name in ("ar", "pld")]
    assert [sweeps.label(job, jobs) for job in jobs] == ["method=ar", "method=pld"]
    assert sweeps.label(jobs[0], jobs[:1]) == "pair=tiny method=ar"


# -- within one process


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Three jobs, one of which cannot work, and the states of all whenever one of the others is measured."""
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["?"]}\n')
    seen: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", lambda run_dir: seen.append(states(tmp_path)) or 0)
    return seen


COMMAND = ["-m", "method=ar", "repeats=1,2,0", "tracker=wandb", "pair.target=.", "pair.tokenizer=null"]
COMMAND += ["data.path=q.jsonl", "data.warmup=q.jsonl"]


@pytest.mark.slow
def test_all_jobs_are_checked_before_the_first_is_measured(monkeypatch, capfd, tmp_path, measured):
    code, _, err = run_main(monkeypatch, capfd, *COMMAND)
    assert code == 2 and err.count("error:") == 1
    assert measured == [[RUNNING, WAITING, FAILED], [OK, RUNNING, FAILED]]
    (sweep,) = (tmp_path / "runs" / sweeps.SWEEPS).iterdir()
    assert {store.read_config(run_dir)["tracker"]["group"] for run_dir in runs(tmp_path)} == {sweep.name}


@pytest.mark.slow
def test_what_a_pair_lacks_is_left_out_where_that_is_asked_for(monkeypatch, capfd, tmp_path, measured):
    command = ["-m", "method=pld,medusa,sps", "pair=mistral-small-24b", *COMMAND[3:]]
    code, _, err = run_main(monkeypatch, capfd, *command)
    assert code == 2 and "error: pair mistral-small-24b has no part 'medusa'" in err
    assert states(tmp_path) == [OK, FAILED, FAILED]

    code, out, err = run_main(monkeypatch, capfd, *command, "leave_out=true")
    assert code == 0 and "jobs failed" not in out
    assert "left out: pair mistral-small-24b has no part 'medusa'" in err
    assert "left out: method sps needs a draft model" in err
    assert states(tmp_path) == [OK, LEFT_OUT, LEFT_OUT]


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_in_one_line(monkeypatch, capfd, tmp_path, measured):
    def stopped(run_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", stopped)
    code, out, err = run_main(monkeypatch, capfd, *COMMAND[:2])
    assert code == 130 and out == "" and err.startswith("\nstopped") and err.count("\n") == 2
    assert states(tmp_path) == [RUNNING]
