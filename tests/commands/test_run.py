"""The command line: what is wrong is said in one line before a weight is loaded, and exit codes tell."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from specbench.commands import run as bench
from specbench.config import checks
from specbench.config.combinations import check_method
from specbench.measure import runner
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from tests.support import conf
from tests.support.commands import (
    TIMEOUT,
    cli,
    exit_code,
    measure_here,
    run_main,
    small_pair_and_questions,
    wait_for,
)
from tests.support.messages import says
from tests.support.models import save_pair

composed = partial(conf.composed, "bench")

BLOCK = ["decoding=sample", "decoding.verification=block"]


# -- names


@pytest.mark.one_in(3)
@pytest.mark.first_fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=kangaro"], "method \'kangaro\' ... kangaroo ... ar, ar_batch, "),
        (["-m", "method=sps,kangaro"], "method \'kangaro\' ... kangaroo"),
        (["method=ragged", "drafter=spd"], "unknown drafter \'spd\' ... sps"),
        (["-m", "method=ragged", "drafter=pld,spd", "drafter.max_draft_tokens=3"], "unknown drafter \'spd\' ... sps"),
        (["method=ragged", "drafter=eqspec"], "unknown drafter \'eqspec\' ... known: ar, "),  # which schedules
        (["-m", "method=ragged", "drafter=glob(*)"], "drafter ... glob"),
        (["pair=tny"], "pair \'tny\' ... tiny"),
        (["task=rga"], "task \'rga\' ... rag"),
        (["experiment=smok"], "experiment \'smok\' ... smoke"),
        (["settings=publish"], "settings \'publish\' ... published"),
        (["metod=ar"], "key \'metod\' ... method"),
        (["+data.limitt=3"], "unknown key 'data.limitt' ... did you mean limit"),
        (["++pair.part.kangaroo=here"], "unknown key 'pair.part' ... did you mean parts"),
        (["pair.parts.kangaro=here"], "unknown key 'pair.parts.kangaro' ... did you mean kangaroo"),
        (["method=sps", "method.max_draft_token=3"], "max_draft_token ... max_draft_tokens"),
        (["-m", "method=sps,kangaroo", "method.exit_layer=3"], "'method.exit_layer' ... max_draft_tokens"),
        (["-m", "method=kangaroo,sps", "method.exit_layer=3"], "method.exit_layer"),
        (["method=sps,ar", "seed=1"], "method=sps,ar has several values: `specbench sweep` measures each\n"),
        (["seed=1,2"], "seed=1,2 has several values: `specbench sweep` measures each; a list is key=[a,b]\n"),
        (["data.limit"], "'data.limit' is not key=value\n"),
        (["sps"], "'sps' is not key=value: did you mean method=sps?\n"),
        (["method=sps", "method=pld"], "method ... sps ... pld"),
        (["method=ar", "hydra/launcher=ray"], "hydra/launcher ... specbench sweep"),
    ],
)  # fmt: skip
def test_unknown_names(monkeypatch, capfd, arguments, message):
    code, out, err = run_main(monkeypatch, capfd, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert says(err, message)


@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ("pair/mine", ["pair=mine"]),
        ("pair/mine", ["-m", "pair=tiny,mine"]),
        ("pair/mine", ["pair=mine", "settings=published"]),
        ("method/mine", ["method=mine"]),
    ],
)
def test_a_file_that_is_no_yaml(monkeypatch, capfd, tmp_path, file, arguments):
    path = tmp_path / "conf" / f"{file}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: mine\ntarget: [a\nother: 1\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = run_main(monkeypatch, capfd, *arguments)
    assert code == 2 and err == f"error: {path}, line 3: expected ',' or ']', but got ':'\n"
    with pytest.raises(UserError, match="mine.yaml, line 3: "):
        checks.check_command("bench", [f"{file.partition('/')[0]}=mine"])


TABLE = """
from specbench.decoding.drafter import Drafter, Needs


class Table(Drafter):
    needs = Needs(part="table")
"""


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ("_target_: table.Table", [], "no part 'table', which method mine needs: name it with pair.parts.table="),
        ("_target_: table.Table", ["pair.parts.table=/nowhere"], "there is no folder '/nowhere'\n"),
        ("_target_: table.Table", ["pair.parts.tabel=here"], "unknown key 'pair.parts.tabel': did you mean table?"),
        ("width: 2", [], "conf/method/mine.yaml has no _target_: "),
    ],
)  # fmt: skip
def test_a_method_of_the_user(monkeypatch, capfd, tmp_path, lines, arguments, message):
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text(f"{lines}\nname: mine\n")
    (tmp_path / "table.py").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = run_main(monkeypatch, capfd, "method=mine", *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err
    sys.modules.pop("table", None)


# -- values and combinations


@pytest.mark.first_fast
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["repeats=0"], "repeats ... 1 ... 0"),
        (["batch_size=two"], "batch_size ... 1 ... 'two'"),
        (["data.limit=0"], "data.limit "),
        (["data.limit=true"], "data.limit "),
        (["decoding.max_new_tokens=0"], "decoding.max_new_tokens "),
        (["seed=-1"], "seed "),
        (["decoding.temperature=-0.5"], "decoding.temperature ... 0 ... "),
        (["decoding.temperature=1e-38"], "decoding.temperature ... 0 ... "),
        (["decoding.temperature=nan"], "decoding.temperature "),
        (["decoding.temperature=hot"], "decoding.temperature "),
        (["generate=maybe"], "generate ... true ... false ... 'maybe'"),
        (["protocol=pared"], "protocol \'pared\' ... paired"),
        (["pair.dtype=fp16"], "pair.dtype \'fp16\'"),
        (["tracker=wandb", "tracker.mode=of"], "tracker.mode \'of\'"),
        (["pair.init=zero"], "pair.init \'zero\'"),
        (["pair.device=gpu"], "pair.device ... auto, cpu or cuda:0"),
        (["pair.device=cuda:0", "pair.graphs=false", "pair.compile=true"], "set pair.graphs=null ... compile"),
        (["pair.device_map=balance"], "pair.device_map \'balance\' ... balanced"),
        (["pair.device_map=auto", "pair.init=random"], "set pair.init=pretrained"),
        (["pair.device_map=auto", "method=ragged"], "ragged ... device"),
        (["++pair.parts.kangaro=here"], "unknown key 'pair.parts.kangaro' ... did you mean kangaroo"),
        (["method=sps", "+pair.parts.nothing=here"], "unknown key 'pair.parts.nothing' ... known: ... dflash"),
        (["+method.gamma=3"], "method kangaroo ... 'gamma'"),
        (["method=pld", "vocab=trim"], "pld ... vocab=full"),
        (["vocab=trim", "vocab.map=null"], "tiny ... `specbench calibrate pair=tiny`"),
        (["vocab.size=0"], "vocab.size "),
        (["vocab.size=1024"], "vocab=trim"),
        (["vocab.map=here"], "vocab=trim"),
        (["method=sps", "+method.vocab_size=512"], "method sps ... 'vocab_size'"),
        (["method=pld", "+method.vocab_map=here"], "method pld ... 'vocab_map'"),
        (["method=samd", "method.auxiliary=sps", "+method.drafter.gamma=9"], "conf/method/NAME.yaml has no _target_"),
        (["batch_size=4", "method=sps"], "method=ragged drafter=sps batch_size=4"),
        (["method=oracle", "method.cost_of=spss"], "unknown drafter 'spss' ... sps"),
        (["method=oracle", "method.cost_of=oracle"], "oracle cannot wrap oracle"),
        (["method=oracle", "method.acceptance=1.5"], "method.acceptance ... 0 ... 1 ... 1.5"),
        (["method=oracle", "batch_size=4"], "method=ragged drafter=oracle batch_size=4"),
        (["method=oracle", "decoding=sample"], "oracle cannot sample ... decoding=greedy"),
        (["decoding.top_p=0.9"], "decoding.top_k and decoding.top_p are for sampled answers ... above 0"),
        (["decoding.top_p=0"], "decoding.top_p must be a number above 0, up to 1, not 0"),
        (["method=oracle", "pair.draft=null"], "oracle ... tiny ... pair.draft"),
        (["method=oracle", "method.cost_of=pld", "vocab=trim"], "pld ... vocab=full"),
        (
            ["method=ragged", "drafter=oracle", "drafter.cost_of=kangaroo", "pair.parts.kangaroo=null"],
            "oracle ... `specbench train kangaroo pair=tiny` ... name it with pair.parts.kangaroo=FOLDER",
        ),
        (["method=kangaroo", "drafter=pld"], "kangaroo ... drafter=none ... method=ragged"),
        (["method=ragged", "drafter=mirror_sd"], "drafter mirror_sd cannot batch"),
        (["method=ragged", "drafter=ar_batch"], "drafter._target_ ... is not a Drafter"),
        (["method=ragged", "drafter=swift", "drafter.memory=answer"], "swift ... drafter.memory=run"),
        (
            ["method=sps_tree", "method.shape=[1,1]", *BLOCK],
            "block ... method sps_tree samples trees ... token",
        ),
        (
            ["method=ragged", "drafter=samd", "drafter.auxiliary=sps", "drafter.corpus=here", *BLOCK],
            "block ... drafter samd samples trees ... token",
        ),
        (["method=pld", *BLOCK], "block ... method pld are not sampled ... token"),
        (["method=ssd", *BLOCK], "block ... method ssd are not sampled ... token"),
        (["method=sps_tree", "method.sampling=likeliest", *BLOCK], "block ... sps_tree are not sampled ... token"),
        (["method=exspec", "pool=4"], "pool=4 ... batch_size=8"),
        (["method=exspec", "+method.gamma=3"], "method exspec ... 'gamma'"),
        (["method=exspec", "+drafter.gamma=3"], "drafter sps ... 'gamma'"),
        (["method=exspec", "drafter=pld", "vocab=trim"], "drafter pld ... vocab=full"),
        (["method=eqspec", "pair.draft=null"], "drafter sps ... tiny ... pair.draft"),
        (["method=sps", "pair.draft=null"], "sps ... tiny ... pair.draft"),
        (
            ["pair.parts.kangaroo=null"],
            "`specbench train kangaroo pair=tiny` ... name it with pair.parts.kangaroo=FOLDER",
        ),
        (["pair.target=.", "pair.tokenizer=null", "pair.parts.kangaroo=./nothing"], "'./nothing'"),
        (["method=ar", "pair.target=/nothing"], "'/nothing'"),
        (["method.weights=${nope}"], "nope"),
        (["seed=9223372036854775808"], "seed ... 0 ... 9223372036854775807 ... 922337203"),
        (["task.tasks=abc"], "task.tasks ... dictionary ... list ... 'abc'"),
        (["run_dir=7"], "run_dir ... null ... 7"),
        (["method._target_=os.system"], "method._target_=os.system ... Drafter or Scheduler"),
        (["method._target_=nope.Nope"], "method._target_=nope.Nope ... ModuleNotFoundError"),
        (["method._target_=specbench.commands.run.main"], "specbench.commands.run.main ... Drafter or Scheduler"),
        (["method._target_=specbench.commands.run.Command"], "specbench.commands.run.Command ... Drafter or Scheduler"),
        (["method=ragged", "drafter._target_=methods.ragged.RaggedBatch"], "RaggedBatch ... Drafter"),
        (["method.max_draft_tokens=abc"], "method.max_draft_tokens ... 1 ... 'abc'"),
        (["method.max_draft_tokens=2.5"], "method.max_draft_tokens ... 1 ... 2.5"),
        (["method.max_draft_tokens=null"], "method.max_draft_tokens ... 1 ... null"),
        (["method.max_draft_tokens=true"], "method.max_draft_tokens ... 1 ... True"),
        (["method.max_draft_tokens=0"], "method.max_draft_tokens ... 1 ... 0"),
        (["method.max_draft_tokens=1000000000"], "method.max_draft_tokens ... to 10000, not 1000000000"),
        (["method=ragged", "drafter.max_draft_tokens=10001"], "drafter.max_draft_tokens ... to 10000, not 10001"),
        (["method=recycling", "method.nodes=1000000000"], "method.nodes ... to 10000"),
        (["threads=100000"], "threads ... 1 to 1024 or null, not 100000"),
        (["method.confidence_threshold=nan"], "method.confidence_threshold ... 0 ... 1 ... nan"),
        (["method.confidence_threshold=7"], "method.confidence_threshold ... 0 ... 1 ... 7"),
        (["method.confidence_threshold=abc"], "method.confidence_threshold ... 0 ... 1 ... 'abc'"),
        (["method.exit_layer=0"], "method.exit_layer ... 1 ... null ... 0"),
        (["method=s2d", "method.thresholds=abc"], "method.thresholds ... list ... 0 ... 1"),
        (["method=s2d", "method.thresholds=[0.5,2]"], "method.thresholds "),
        (["method=mirror_sd", "method.kappa=0"], "method.kappa ... 1 ... 0"),
        (["method=mirror_sd", "method.worker_timeout=0"], "method.worker_timeout ... 0 ... 0"),
        (["method=mirror_sd", "method.draft_cores=0"], "method.draft_cores "),
        (["method=mirror_sd", "method.branches=0"], "method.branches ... 1 ... null"),
        (["method=mirror_sd", "method.floor=1.1"], "method.floor ... 0 ... 1"),
        (["method=mirror_sd", "method.candidates=exits"], "method.candidates \'exits\' ... exit"),
        (["method=mirror_sd", "method.placement=proces"], "method.placement \'proces\' ... process"),
        (["method=ragged", "drafter.max_draft_tokens=2.5"], "drafter.max_draft_tokens "),
        (["method=exspec", "method.window=0"], "method.window ... 1 ... 0"),
        (["method=exspec", "method.slack=-1"], "method.slack ... 0 ... -1"),
        (["method=exspec", "method.token_budget=0"], "method.token_budget "),
        (["method=exspec", "method.token_budget=4"], "token_budget ... 8 ... 4"),
        (["pair.target=???"], "pair.target"),
        (["pair.stop_ids=2"], "pair.stop_ids ... list ... 2"),
        (["pair.stop_ids=[end]"], "pair.stop_ids "),
        (["pair.draft_layers=1.5"], "pair.draft_layers ... 1 ... 1.5"),
        (
            ["method=ar", "pair=qwen3-8b", "pair.init=random", "pair.target=Qwen/Qwen3-14B"],
            "pair.target=Qwen/Qwen3-14B ... the shape of Qwen/Qwen3-8B ... pair.target_shape",
        ),
        (["method=ar", "pair.target=.", "pair.tokenizer=null", "data.path=/nowhere/q.jsonl"], "/nowhere/q.jsonl"),
    ],
)  # fmt: skip
def test_values_and_combinations(overrides, message):
    with pytest.raises(UserError) as caught:
        checks.check(composed(*overrides))
    assert says(str(caught.value), message)


@pytest.mark.first_fast
@pytest.mark.parametrize("group", checks.GROUPS)
@pytest.mark.parametrize("sweep", [[], ["-m"]])
def test_a_group_without_a_choice(monkeypatch, capfd, group, sweep):
    code, _, err = run_main(monkeypatch, capfd, *sweep, f"{group}=null")
    assert code == 2 and err.startswith("error: ") and f"{group} 'null'" in err and err.count("\n") == 1
    if group != "pair":  # which others refer to, as they are composed
        with pytest.raises(UserError, match=f"set {group} .*conf/{group}/"):
            checks.check(composed(f"~{group}"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["os.system", "nope.Nope", "os.nope", "", "null"])
def test_a_target_that_is_no_method_is_one_line(monkeypatch, capfd, target):
    code, out, err = run_main(monkeypatch, capfd, f"method._target_={target}")
    assert (code, out) == (2, "") and err.startswith("error: method._target_=") and err.count("\n") == 1


def test_values_on_the_borders_are_taken():
    check_method(composed("method.confidence_threshold=1", "method.max_draft_tokens=1"))
    check_method(composed("method=s2d", "method.thresholds=[0,1]", "method.exits=[2,4,6]"))
    checks.check_values(composed("seed=9223372036854775807", "decoding.temperature=1"))


@pytest.mark.one_in(4)
@pytest.mark.slow
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


@pytest.mark.parametrize("value", ["2026", "null"])
@pytest.mark.parametrize("sweep", [[], ["-m"]])
def test_a_place_of_runs_that_is_no_text(monkeypatch, capfd, sweep, value):
    code, out, err = run_main(monkeypatch, capfd, *sweep, "method=ar", f"runs_root={value}")
    assert (code, out, err) == (2, "", f"error: runs_root must be text, not {value}\n")


def test_the_runner_without_a_configuration(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(sys, "argv", ["runner", str(tmp_path)])
    assert exit_code(runner.main) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {tmp_path / store.CONFIG}: ") and error.count("\n") == 1


def test_sampling_needs_a_method_that_can(monkeypatch):
    from methods.pld import PromptLookup
    from specbench.decoding.drafter import Needs

    monkeypatch.setattr(PromptLookup, "needs", Needs(sampling=False))
    check_method(composed("method=pld"))
    with pytest.raises(UserError, match="pld .*sampl"):
        check_method(composed("method=pld", "decoding=sample"))


def test_what_seems_like_a_refused_combination_is_taken():
    one_slot = ["method=ragged", "batch_size=1", "drafter=swift", "drafter.memory=answer"]
    for overrides in (
        one_slot,
        ["method=swift", "method.memory=answer"],
        ["method=ragged", "drafter=oracle", "drafter.cost_of=swift"],
        ["method=samd", "method.auxiliary=sps", *BLOCK],
    ):
        check_method(composed(*overrides))


def test_part_given_by_hand():
    check_method(composed("pair.parts.kangaroo=null", "method.weights=/some/folder"))


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
        "from specbench.commands.run import measure; measure(Path('.'))"
    )
    return [sys.executable, "-c", code], pid_file


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.process
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


@pytest.mark.process
def test_exit_code_of_the_child(monkeypatch, tmp_path):
    store.note_failure(tmp_path, "the reason of an earlier attempt")
    for name, script in {"3": "exit 3", "1": "kill -9 $$"}.items():
        fake_python = tmp_path / name
        fake_python.write_text(f"#!/bin/sh\n{script}\n")
        fake_python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake_python))
        assert bench.measure(tmp_path) == int(name)
        assert store.why_failed(tmp_path) == {"3": None, "1": "killed by SIGKILL"}[name]


@pytest.mark.parametrize("state", ["unused", "measured", "queued"])
def test_a_folder_in_which_nothing_was_measured_goes(monkeypatch, capfd, tmp_path, state):
    """What the runner refuses leaves none; a run that was cut short, by a full disk, can go on.

    So can one that waits for another machine, if a command here takes its folder and fails.
    """

    def refuse(run_dir):
        if state == "measured":
            (run_dir / store.RECORDS).write_text("")
        elif state == "queued":
            bench.queue(run_dir)
        return 2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", refuse)
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["?"]}\n')
    files = ["data.path=q.jsonl", "data.warmup=q.jsonl", "pair.target=.", "pair.tokenizer=null"]
    assert run_main(monkeypatch, capfd, "method=pld", *files)[0] == 2
    assert len([*(tmp_path / "runs").iterdir()]) == (state != "unused")


@pytest.mark.slow
def test_sweep_goes_on_after_a_failure(monkeypatch, capfd, tmp_path):
    asked = []
    files = ["data.path=q.jsonl", "data.warmup=q.jsonl", "pair.target=.", "pair.tokenizer=null"]

    def measured(run_dir):
        asked.append(run_dir)
        return 1 if len(asked) == 1 else 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", measured)
    code, out, err = run_main(monkeypatch, capfd, "-m", "method=ar,pld", "repeats=0,1,2", *files)
    assert code == 2 and not asked and err.count("q.jsonl") == 4
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["?"]}\n')
    code, out, err = run_main(monkeypatch, capfd, "-m", "method=ar,pld", "repeats=0,1,2", *files)
    assert code == 2 and len(asked) == 4
    assert err.count("error: repeats ") == 2 and err.count("error:") == 3
    lines = out.splitlines()
    assert lines[:4] == [str(run_dir) for run_dir in asked]
    assert lines[4].startswith("3 of 6 ") and len(lines) == 8
    assert [path.name for path in tmp_path.iterdir() if path.name != "q.jsonl"] == ["runs"]
    assert not list(tmp_path.rglob("multirun.yaml"))


# -- end to end


@pytest.fixture
def place(tmp_path):
    """A folder with a small saved pair and three questions, and the arguments that name them."""
    return tmp_path, small_pair_and_questions(tmp_path)


@pytest.mark.process
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
    again = cli(cwd, "method=sps", *arguments, f"run_dir={done.stdout.splitlines()[-1]}")
    assert again.returncode == 0 and f"already measured: {done.stdout.splitlines()[-1]}" in again.stdout


@pytest.mark.slow
def test_error_of_the_runner_is_one_line(monkeypatch, capfd, place):
    cwd, arguments = place
    narrow = save_pair(cwd / "narrow", vocab_size=258)
    monkeypatch.chdir(cwd)
    measure_here(monkeypatch)
    arguments = ["method=sps", *arguments, f"pair.draft={narrow.draft}", "run_dir=here"]
    code, out, err = run_main(monkeypatch, capfd, *arguments)
    assert code == 2 and out == ""
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and str(narrow.draft) in errors[0] and "Traceback" not in err
    assert not (cwd / "here" / "summary.json").exists()
