"""The command line: what is wrong is said in one line before a weight is loaded, and exit codes tell."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from specbench import bench, checks
from specbench.errors import UserError
from specbench.measure import runner, store
from tests.support.commands import (
    TIMEOUT,
    cli,
    exit_code,
    measure_here,
    run_main,
    small_pair_and_questions,
    wait_for,
)
from tests.support.models import save_pair


def composed(*overrides: str):
    with initialize_config_dir(str(bench.CONF), version_base="1.3"):
        return compose("bench", overrides=list(overrides))


# -- names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=kangaro"], "unknown method 'kangaro': did you mean kangaroo? (known: ar, ar_batch, "),
        (["-m", "method=sps,kangaro"], "unknown method 'kangaro': did you mean kangaroo?"),
        (["pair=tny"], "unknown pair 'tny': did you mean tiny?"),
        (["task=rga"], "unknown task 'rga': did you mean rag?"),
        (["experiment=smok"], "unknown experiment 'smok': did you mean smoke?"),
        (["metod=ar"], "unknown key 'metod': did you mean method?"),
        (["method=sps", "method.max_draft_token=3"], "did you mean max_draft_tokens?"),
        (["-m", "method=sps,kangaroo", "method.exit_layer=3"], "unknown key 'method.exit_layer': known:"),
        (["-m", "method=kangaroo,sps", "method.exit_layer=3"], "is not there for every choice of this sweep"),
        (["method=sps,ar"], "To sweep over it, add --multirun"),
        (["data.limit"], "missing EQUAL"),
        (["method=sps", "method=pld"], "method is given twice: sps and pld"),
        (["method=ar", "hydra/launcher=ray"], "hydra/launcher is of a sweep, and this is a single run: add -m"),
    ],
)  # fmt: skip
def test_unknown_names(monkeypatch, capfd, arguments, message):
    code, out, err = run_main(monkeypatch, capfd, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


# -- values and combinations


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["repeats=0"], "repeats must be a whole number of at least 1, not 0"),
        (["batch_size=two"], "batch_size must be a whole number of at least 1, not 'two'"),
        (["data.limit=0"], "data.limit must be"),
        (["data.limit=true"], "data.limit must be"),
        (["decoding.max_new_tokens=0"], "decoding.max_new_tokens must be"),
        (["seed=-1"], "seed must be"),
        (["decoding.temperature=-0.5"], "decoding.temperature must be a number equal to 0 or a number of at least"),
        (["decoding.temperature=1e-38"], "decoding.temperature must be a number equal to 0 or a number of at least"),
        (["decoding.temperature=nan"], "decoding.temperature must be"),
        (["decoding.temperature=hot"], "decoding.temperature must be"),
        (["generate=maybe"], "generate must be true or false, not 'maybe'"),
        (["protocol=pared"], "unknown protocol 'pared': did you mean paired?"),
        (["pair.dtype=fp16"], "unknown pair.dtype 'fp16': "),
        (["tracker=wandb", "tracker.mode=of"], "unknown tracker.mode 'of': "),
        (["pair.init=zero"], "unknown pair.init 'zero'"),
        (["pair.device=gpu"], "pair.device must be auto, cpu or cuda:0"),
        (["pair.device_map=balance"], "unknown pair.device_map 'balance': did you mean balanced"),
        (["pair.device_map=auto", "pair.init=random"], "set pair.init=pretrained"),
        (["pair.device_map=auto", "method=ragged"], "needs the whole target on one device"),
        (["+method.gamma=3"], "method kangaroo has no parameter 'gamma'"),
        (["method=pld", "vocab=trim"], "method pld has no head to trim: set vocab=full"),
        (["vocab=trim", "vocab.map=null"], "pair tiny has no vocabulary map: make one with `python -m methods.vocab_"),
        (["vocab=trim", "~method.vocab_map"], "pair tiny has no vocabulary map"),
        (["vocab.size=0"], "vocab.size must be"),
        (["vocab.size=1024"], "set vocab=trim too"),
        (["vocab.map=here"], "set vocab=trim too"),
        (["method=mirror_sd", "vocab=trim", "vocab.size=1024"], "method.vocab_size=4096; set these, too"),
        (["batch_size=4", "method=sps"], "one sequence at a time: use method=ragged drafter=sps batch_size=4"),
        (["method=kangaroo", "drafter=pld"], "method kangaroo drafts by itself: set drafter=none, or method=ragged"),
        (["method=exspec", "pool=4"], "pool=4 questions cannot fill batch_size=8 rows"),
        (["method=exspec", "+method.gamma=3"], "method exspec has no parameter 'gamma'"),
        (["method=exspec", "+drafter.gamma=3"], "drafter sps has no parameter 'gamma'"),
        (["method=exspec", "drafter=pld", "vocab=trim"], "drafter pld has no head to trim"),
        (["method=eqspec", "pair.draft=null"], "drafter sps needs a draft model and pair tiny has none"),
        (["method=sps", "pair.draft=null"], "pair tiny has none: set pair.draft"),
        (
            ["pair.parts.kangaroo=null"],
            "train it with `python -m methods.kangaroo.train pair=tiny`, then name it with ++pair.parts.",
        ),
        (["pair.target=.", "pair.tokenizer=null", "pair.parts.kangaroo=./nothing"], "there is no folder './nothing'"),
        (["method=ar", "pair.target=/nothing"], "there is no folder '/nothing'"),
        (["method.adapter=${nope}"], "nope"),
        (["seed=9223372036854775808"], "seed must be a whole number from 0 to 9223372036854775807, not 922337203"),
        (["task.tasks=abc"], "task.tasks must be a dictionary, each value a list, each item text, not 'abc'"),
        (["run_dir=7"], "run_dir must be text or null, not 7"),
        (["method._target_=os.system"], "method._target_=os.system is no Drafter or Scheduler"),
        (["method._target_=nope.Nope"], "method._target_=nope.Nope cannot be imported: ModuleNotFoundError"),
        (["method._target_=specbench.bench.main"], "specbench.bench.main is no Drafter or Scheduler"),
        (["method._target_=specbench.bench.Command"], "specbench.bench.Command is no Drafter or Scheduler"),
        (["method=ragged", "drafter._target_=methods.ragged.RaggedBatch"], "RaggedBatch is no Drafter"),
        (["method.max_draft_tokens=abc"], "method.max_draft_tokens must be a whole number of at least 1, not 'abc'"),
        (["method.max_draft_tokens=2.5"], "method.max_draft_tokens must be a whole number of at least 1, not 2.5"),
        (["method.max_draft_tokens=null"], "method.max_draft_tokens must be a whole number of at least 1, not null"),
        (["method.max_draft_tokens=true"], "method.max_draft_tokens must be a whole number of at least 1, not True"),
        (["method.max_draft_tokens=0"], "method.max_draft_tokens must be a whole number of at least 1, not 0"),
        (["method.confidence_threshold=nan"], "method.confidence_threshold must be a number from 0 to 1, not nan"),
        (["method.confidence_threshold=7"], "method.confidence_threshold must be a number from 0 to 1, not 7"),
        (["method.confidence_threshold=abc"], "method.confidence_threshold must be a number from 0 to 1, not 'abc'"),
        (["method.exit_layer=0"], "method.exit_layer must be a whole number of at least 1 or null, not 0"),
        (["method=s2d", "method.thresholds=abc"], "method.thresholds must be a list, each item a number from 0 to 1"),
        (["method=s2d", "method.thresholds=[0.5,2]"], "method.thresholds must be"),
        (["method=mirror_sd", "method.kappa=0"], "method.kappa must be a whole number of at least 1, not 0"),
        (["method=mirror_sd", "method.patience=0"], "method.patience must be a number above 0, not 0"),
        (["method=mirror_sd", "method.draft_cores=0"], "method.draft_cores must be"),
        (["method=mirror_sd", "method.branches=0"], "method.branches must be a whole number of at least 1 or null"),
        (["method=mirror_sd", "method.floor=1.1"], "method.floor must be a number from 0 to 1"),
        (["method=mirror_sd", "method.candidates=exits"], "unknown method.candidates 'exits': did you mean exit?"),
        (["method=mirror_sd", "method.placement=proces"], "unknown method.placement 'proces': did you mean process?"),
        (["method=ragged", "drafter.max_draft_tokens=2.5"], "drafter.max_draft_tokens must be"),
        (["method=exspec", "method.window=0"], "method.window must be a whole number of at least 1, not 0"),
        (["method=exspec", "method.slack=-1"], "method.slack must be a number of at least 0, not -1"),
        (["method=exspec", "method.token_budget=0"], "method.token_budget must be"),
        (["method=exspec", "method.token_budget=4"], "token_budget must be at least 8, not 4"),
        (["pair.target=???"], "there is no value for pair.target"),
        (["method=ar", "pair.target=.", "pair.tokenizer=null", "data.path=/nowhere/q.jsonl"], "/nowhere/q.jsonl"),
    ],
)  # fmt: skip
def test_values_and_combinations(overrides, message):
    with pytest.raises(UserError) as caught:
        checks.check(composed(*overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize("group", checks.GROUPS)
@pytest.mark.parametrize("sweep", [[], ["-m"]])
def test_a_group_without_a_choice(monkeypatch, capfd, group, sweep):
    code, _, err = run_main(monkeypatch, capfd, *sweep, f"{group}=null")
    assert code == 2 and err.startswith(f"error: unknown {group} 'null': ") and err.count("\n") == 1
    if group != "pair":  # which others refer to, as they are composed
        with pytest.raises(
            UserError, match=f"no {group} is chosen: set {group} to the name of a file in conf/{group}/"
        ):
            checks.check(composed(f"~{group}"))


@pytest.mark.parametrize("target", ["os.system", "nope.Nope", "os.nope", "", "null"])
def test_a_target_that_is_no_method_is_one_line(monkeypatch, capfd, target):
    code, out, err = run_main(monkeypatch, capfd, f"method._target_={target}")
    assert (code, out) == (2, "") and err.startswith("error: method._target_=") and err.count("\n") == 1


def test_values_on_the_borders_are_taken():
    checks.check_method(composed("method.confidence_threshold=1", "method.max_draft_tokens=1"))
    checks.check_method(composed("method=s2d", "method.thresholds=[0,1]", "method.exits=[2,4,6]"))
    checks.check_values(composed("seed=9223372036854775807", "decoding.temperature=1"))


@pytest.mark.parametrize(
    "argument", ["run_dir=file", "run_dir=file/run", "run_dir=/proc/foo", "runs_root=file", "runs_root=loose"]
)
@pytest.mark.parametrize("sweep", [[], ["-m"]])
def test_a_folder_that_cannot_be_made(monkeypatch, capfd, place, argument, sweep):
    cwd, arguments = place
    (cwd / "file").write_text("")
    (cwd / "loose").symlink_to(cwd / "nowhere" / "at all")
    monkeypatch.chdir(cwd)
    measured = []
    monkeypatch.setattr(bench, "measure", measured.append)
    capfd.readouterr()
    code, _, err = run_main(monkeypatch, capfd, *sweep, "method=ar", *arguments, argument)
    assert code == 2 and not measured
    assert err.startswith("error: ") and err.count("\n") == 1 and argument.partition("=")[2] in err


def test_the_runner_without_a_configuration(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(sys, "argv", ["runner", str(tmp_path)])
    assert exit_code(runner.main) == 2
    error = capfd.readouterr().err
    assert error == f"error: {tmp_path / store.CONFIG}: No such file or directory\n"


def test_sampling_needs_a_method_that_can(monkeypatch):
    from methods.pld import PromptLookup
    from specbench.decoding.draft import Needs

    monkeypatch.setattr(PromptLookup, "needs", Needs(sampling=False))
    checks.check_method(composed("method=pld"))
    with pytest.raises(UserError, match="method pld cannot sample"):
        checks.check_method(composed("method=pld", "decoding=sample"))


def test_part_given_by_hand():
    checks.check_method(composed("pair.parts.kangaroo=null", "method.adapter=/some/folder"))


# -- the child process


@pytest.fixture
def endless_child(tmp_path):
    """A command that measures with a child that never ends, and the file where the child leaves its pid."""
    pid_file, fake_python = tmp_path / "pid", tmp_path / "python"
    fake_python.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new && mv {pid_file}.new {pid_file}\nexec sleep 600\n"
    )
    fake_python.chmod(0o755)
    code = (
        f"import sys; sys.executable = {str(fake_python)!r}; from pathlib import Path\n"
        "from specbench.bench import measure; measure(Path('.'))"
    )
    return [sys.executable, "-c", code], pid_file


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc; only Linux ends the child of a killed parent"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_orphan_stays(endless_child, number):
    command, pid_file = endless_child
    # Tests that run in the background ignore Ctrl-C, and so would all that they start.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heed)
    wait_for(pid_file.exists)
    child = int(pid_file.read_text())
    assert alive(child)
    parent.send_signal(number)
    code = parent.wait(TIMEOUT)
    assert code == {signal.SIGTERM: 143}.get(number, -number)
    wait_for(lambda: not alive(child))


def test_exit_code_of_the_child(monkeypatch, tmp_path):
    for name, script in {"3": "exit 3", "1": "kill -9 $$"}.items():
        fake_python = tmp_path / name
        fake_python.write_text(f"#!/bin/sh\n{script}\n")
        fake_python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake_python))
        assert bench.measure(tmp_path) == int(name)
        assert store.why_failed(tmp_path) == {"3": None, "1": "killed by SIGKILL"}[name]


def test_sweep_goes_on_after_a_failure(monkeypatch, capfd, tmp_path):
    asked = []
    files = ["data.path=q.jsonl", "data.warmup=q.jsonl", "pair.target=.", "pair.tokenizer=null"]

    def measured(run_dir):
        asked.append(run_dir)
        return 1 if len(asked) == 1 else 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", measured)
    code, out, err = run_main(monkeypatch, capfd, "-m", "method=ar,pld", "repeats=0,1,2", *files)
    assert code == 2 and not asked and err.count("there is no file") == 4
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["?"]}\n')
    code, out, err = run_main(monkeypatch, capfd, "-m", "method=ar,pld", "repeats=0,1,2", *files)
    assert code == 2 and len(asked) == 4
    assert err.count("repeats must be") == 2 and err.count("error:") == 3
    lines = out.splitlines()
    assert lines[:4] == [str(run_dir) for run_dir in asked]
    assert lines[4] == "3 of 6 jobs failed; the same command runs them again:" and len(lines) == 8
    assert [path.name for path in tmp_path.iterdir() if path.name != "q.jsonl"] == ["runs"]
    assert not list(tmp_path.rglob("multirun.yaml"))


# -- end to end


@pytest.fixture
def place(tmp_path):
    """A folder with a small saved pair and three questions, and the arguments that name them."""
    return tmp_path, small_pair_and_questions(tmp_path)


def test_measures_and_names_the_folder(place):
    cwd, arguments = place
    before = {path.name for path in cwd.iterdir()}
    done = cli(cwd, "method=sps", *arguments)
    assert done.returncode == 0, done.stderr
    run_dir = cwd / done.stdout.splitlines()[-1]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["method"] == "sps" and summary["overall"]["questions"] == 3
    assert summary["equivalence"]["violation"] == 0
    assert {path.name for path in cwd.iterdir()} - before == {"runs"}


def test_error_of_the_runner_is_one_line(monkeypatch, capfd, place):
    cwd, arguments = place
    narrow = save_pair(cwd / "narrow", vocab_size=258)
    monkeypatch.chdir(cwd)
    measure_here(monkeypatch)
    arguments = ["method=sps", *arguments, f"pair.draft={narrow.draft}", "run_dir=here"]
    code, out, err = run_main(monkeypatch, capfd, *arguments)
    assert code == 2 and out == ""
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "the vocabularies differ" in errors[0] and "Traceback" not in err
    assert not (cwd / "here" / "summary.json").exists()
