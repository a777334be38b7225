"""The tuner: it never asks a test question, counts failures, and goes on with what it was at."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from specbench import ROOT
from specbench.commands import run as bench
from specbench.commands import tune
from specbench.commands.sweep import Job
from specbench.config.combinations import check_method
from specbench.config.compose import CONF
from specbench.data.questions import load_questions
from specbench.measure import runner
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from specbench.system.files import read_json
from tests.support.commands import exit_code, small_pair_and_questions
from tests.support.conf import composed
from tests.support.messages import says
from tests.support.samples import ENGINE, SUMMARY, changed, write_run

optuna = pytest.importorskip("optuna")

SEARCHES = sorted((CONF / "search").glob("*.yaml"))
TUNED = sorted((CONF / "tuned").glob("*/*.yaml"))


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
def test_every_search_varies_what_its_method_has(path):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("tune", [f"method={path.stem}"])
        space = {key: tune.distribution(optuna, key, bounds) for key, bounds in tune.searched(cfg.search)}
        assert space and tune.own_settings(tune.trial_config([f"method={path.stem}"]), space)
        for end in (0, -1):
            ends = {
                key: among.choices[end] if hasattr(among, "choices") else (among.low, among.high)[end]
                for key, among in space.items()
            }
            check_method(compose("bench", [f"method={path.stem}", *tune.as_overrides(ends)]))


@pytest.mark.parametrize("path", TUNED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_search_can_find_what_was_tuned(path):
    space = dict(tune.searched(composed("tune", f"method={path.stem}").search))
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if (bounds := space.get(f"method.{key}")) is not None:
            assert value in bounds if isinstance(bounds, list) else bounds["low"] <= value <= bounds["high"]


def test_what_was_tuned_on_a_real_pair_is_searched_again_on_its_questions():
    for path in (path for path in TUNED if path.parent.name == "smollm2-135m"):
        (command,) = re.findall(r"`make tune (.*)`", path.read_text(encoding="utf-8"))
        method, pair, arguments = shlex.split(command)
        assert (method, pair) == (f"METHOD={path.stem}", f"PAIR={path.parent.name}")
        named = [f"method={path.stem}", f"pair={path.parent.name}", *arguments.removeprefix("ARGS=").split()]
        cfg = composed("tune", *named)
        assert (cfg.data.name, cfg.data.limit) == ("spec_bench", 1)
        assert cfg.vocab.name == composed("bench", *named[:2]).vocab.name


def test_warm_up_questions_have_no_split():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = tune.trial_config(["method=pld", "data=speed_bench"])
    assert cfg.data.split is None and cfg.data.path.endswith("warmup.jsonl")


@pytest.mark.parametrize(
    "task", [("task.name=sql",), ("task.name=code", "+task.tasks.code=[python]"), ("task=all",)]
)
def test_questions_of_a_users_own_task_are_tuned_for_on_all_warm_up_questions(task):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = tune.trial_config(["method=pld", "data=jsonl", "data.path=mine.jsonl", *task])
        rag = tune.trial_config(["method=pld", "task=rag"])
    lines = (ROOT / "specbench" / "warmup.jsonl").read_text(encoding="utf-8").splitlines()
    every = {json.loads(line)["category"] for line in lines}  # which are the tasks of such data
    assert {question.task for question in load_questions(cfg.data, cfg.task)} == every
    assert {question.task for question in load_questions(rag.data, rag.task)} == {"rag"}


def test_own_questions_are_tuned_for_on_warm_up_questions_of_their_kind(tmp_path):
    rows = [{"turns": ["Count?"], "category": "sql"}, {"messages": [{"role": "user", "content": "Why?"}]}]
    warmup = tmp_path / "warm.jsonl"
    warmup.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = ["method=pld", "data=jsonl", "data.path=mine.jsonl", f"data.warmup={warmup}"]
        cfgs = [tune.trial_config([*overrides, *task]) for task in ([], ["task.name=sql"])]
    tasks = [[question.task for question in load_questions(cfg.data, cfg.task)] for cfg in cfgs]
    assert tasks == [["sql", "warm"], ["sql"]]


def test_bounds():
    whole = tune.distribution(optuna, "k", {"low": 1, "high": 5})
    steps = tune.distribution(optuna, "k", {"low": 0.0, "high": 1, "step": 0.25})
    assert isinstance(whole, optuna.distributions.IntDistribution)
    assert isinstance(steps, optuna.distributions.FloatDistribution) and steps.step == 0.25
    for wrong in ({"low": 1}, {"low": 2, "high": 1}, 7, []):
        with pytest.raises(UserError, match=r"search\.k .*choices.*low.*high.*step"):
            tune.distribution(optuna, "k", wrong)


def test_what_the_search_takes_is_no_argument_of_a_run():
    own = ("trials=3", "+search.k=[1,2]", "~search.method.nodes", "++trials=2")
    assert all(map(tune.is_own, own)) and not tune.is_own("~tracker") and not tune.is_own("method.k=3")


def test_settings_as_a_command_takes_them():
    assert tune.as_overrides({"a": 0.05 * 11, "b": None, "c": "[0.3,0.6]"}) == [
        "a=0.55",
        "b=null",
        "c=[0.3,0.6]",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"equivalence__violation": 2}, "VIOLATION: 2 of"),
        ({"baseline__equivalence__violation": 1}, "VIOLATION: our loop and"),
        (
            {"likelihood": {"method": {"logprob": -9.0, "standard_errors": -20.0}}},
            "VIOLATION: answers of the method",
        ),
        ({"verification": "typical"}, "LOSSY"),
        ({"engine": ENGINE | {"faults": ["plain: broke off"]}}, "FAULTS of llama_cpp"),
    ],
)
def test_a_trial_that_a_report_would_not_trust_has_no_score(tmp_path, changes, reason):
    """Also where answers are drawn, which have no verdicts token by token."""
    job = Job([], DictConfig({}), code=0, run_dir=write_run(tmp_path, "a"))
    assert tune.score(job) == (SUMMARY["overall"]["speedup"], None)
    job.run_dir = write_run(tmp_path, "b", changed(SUMMARY, **changes))
    speedup, why = tune.score(job)
    assert speedup is None and why.startswith(reason)


@pytest.fixture
def tuned(tmp_path, monkeypatch, capfd):
    """Runs the tuner on a small pair, measuring within this process, and stops it at a trial if asked to."""
    monkeypatch.chdir(tmp_path)
    arguments = small_pair_and_questions(tmp_path)
    question = {"question_id": 9, "category": "qa", "turns": ["Not a test question?"]}
    (tmp_path / "warmup.jsonl").write_text(json.dumps(question) + "\n")

    def tuner(*more: str, stop_at: int | None = None) -> tuple[int, str, str]:
        runs = []

        def measured(run_dir):
            runs.append(run_dir)
            if len(runs) == stop_at:
                raise KeyboardInterrupt
            try:
                return runner.run(run_dir)
            except UserError as error:
                store.note_failure(run_dir, str(error))
                return 2

        monkeypatch.setattr(bench, "measure", measured)
        given = [argument for argument in more if argument.startswith("method=")] or ["method=sps"]
        others = [argument for argument in more if not argument.startswith("method=")]
        fixed = [*arguments, "data.warmup=warmup.jsonl", "repeats=1"]
        monkeypatch.setattr(sys, "argv", ["tune", *given, *fixed, *others])
        for name in ("HYDRA_FULL_ERROR", "SPECBENCH_SCRATCH"):  # set by main
            monkeypatch.setenv(name, "")
        capfd.readouterr()
        return exit_code(tune.main), *capfd.readouterr()

    return tuner


@pytest.mark.slow
def test_a_study_goes_on_and_asks_no_test_question(tuned, tmp_path):
    code, out, err = tuned("trials=3", stop_at=2)
    assert code == 130 and "stopped" in err.splitlines()[-1]
    stopped = [line for line in out.splitlines() if line.startswith("trial ")][-1]
    assert (
        "trial 1 of 3: method.max_draft_tokens=5 method.confidence_threshold=0\n" in out
    )  # its own settings

    code, out, err = tuned("trials=3")
    assert code == 0, err
    trials = [line for line in out.splitlines() if line.startswith("trial ")]
    assert len(trials) == 2 and trials[0] == stopped
    (folder,) = (tmp_path / "runs" / "tune").iterdir()
    run_dirs = [path for path in folder.iterdir() if path.is_dir()]
    assert len(run_dirs) == 3
    (threads,) = {read_json(run_dir / store.SUMMARY)["threads"] for run_dir in run_dirs}
    assert {store.read_config(run_dir)["threads"] for run_dir in run_dirs} == {None, threads}, (
        "as the first chose"
    )
    assert f"threads={threads}" in shlex.split(out.splitlines()[-1])
    for run_dir in run_dirs:
        assert [record["question_id"] for record in store.read_records(run_dir)] == [9]
        assert read_json(run_dir / store.SUMMARY)["data"] == "tiny_warmup"

    code, again, _ = tuned("trials=3")
    assert code == 0 and "trial " not in again
    best = max(run_dirs, key=lambda run_dir: read_json(run_dir / store.SUMMARY)["overall"]["speedup"])
    method = store.read_config(best)["method"]
    command = shlex.split(again.splitlines()[-1])
    assert command[:5] == ["python", "-m", "specbench", "run", "method=sps"] and "trials=3" not in command
    assert command[-2:] == [f"method.{k}={method[k]:g}" for k in ("max_draft_tokens", "confidence_threshold")]
    assert "settings=published" in command, "the tuned settings of the pair would be part of it"
    assert composed("bench", *command[4:]).data.path == "q.jsonl"


@pytest.mark.slow
def test_any_seed_of_a_run_is_one_of_a_study_and_what_is_given_is_not_searched(tuned):
    code, out, err = tuned("trials=1", "seed=9223372036854775807", "method.max_draft_tokens=3")
    assert code == 0, err
    assert "trial 1 of 1: method.confidence_threshold=0\n" in out
    assert {"method.max_draft_tokens=3", "method.confidence_threshold=0"} <= set(
        shlex.split(out.splitlines()[-1])
    )


@pytest.mark.slow
def test_trials_that_fail_are_counted_and_named(tuned):
    none = ["search.method.max_draft_tokens.low=0", "search.method.max_draft_tokens.high=0"]
    code, out, err = tuned("trials=2", *none)
    assert code == 2 and out.count("failed: method.max_draft_tokens=0") == 2
    assert len(re.findall(r"max_draft_tokens .*1.*\b0\b", out)) >= 2
    assert says(err.splitlines()[-1], "error: ... 2 trials")


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=ar"], "no bounds for tuning ar: write conf/search/ar.yaml\n"),
        (["method=ar", "search=kangaro"], "search 'kangaro' ... kangaroo, "),
        (
            ["method=sps,pld"],
            "method=sps,pld has several values: `specbench sweep` measures each\n",
        ),
        (["-m", "method=sps"], "sweep"),
        (["search.method.max_draft_tokens=7"], "search.method.max_draft_tokens ... choices"),
        (["trails=3"], "'trails' ... trials"),
        (["data.warmup=nothing.jsonl"], "nothing.jsonl"),
        (["trials=abc"], "trials ... 1 ... 'abc'"),
        (["trials=null"], "trials ... 1 ... null"),
        (["trials=0"], "trials ... 1 ... 0"),
        (["runs_root=q.jsonl"], "q.jsonl"),
        (
            ["method.max_draft_tokens=3", "method.confidence_threshold=0.1"],
            "nothing is left to search: ... sets method.max_draft_tokens, method.confidence_threshold",
        ),
        (["run_dir=here"], "run_dir ... each trial has its own ... runs_root"),
    ],
)
def test_errors_are_one_line(tuned, arguments, message):
    code, out, err = tuned(*arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert says(err, message)
