"""The jobs of a sweep give the same answers wherever they run, and a job that is lost costs no other."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir

from hydra_plugins import specbench_launchers
from specbench import ROOT
from specbench.commands import run as bench
from specbench.config.compose import CONF
from specbench.measure import runner
from specbench.measure.records import run_folder as store
from specbench.system.errors import UserError
from tests.support.commands import cli, run_main, small_pair_and_questions
from tests.support.conf import composed
from tests.support.messages import says

JOBS = ("ar", "pld")


def tokens(runs: Path) -> dict[str, list]:
    """By method, the token ids of every answer of every arm."""
    return {
        store.read_config(run_dir)["method"]["name"]: [
            (record["question_id"], arm, generation["tokens"])
            for record in store.read_records(run_dir)
            for turn in record["turns"]
            for arm, generations in sorted(turn["arms"].items())
            for generation in generations
        ]
        for run_dir in runs.iterdir()
        if store.is_complete(run_dir)
    }


@pytest.fixture(scope="module")
def swept_here(tmp_path_factory):
    """A folder, the arguments of a sweep there, and what it answers when nothing launches it."""
    folder = tmp_path_factory.mktemp("swept")
    arguments = small_pair_and_questions(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for method in JOBS:
            cfg = composed("bench", f"method={method}", "runs_root=here", *arguments)
            assert runner.run(store.find_or_create(cfg)) == 0
    return folder, ["-m", f"method={','.join(JOBS)}", *arguments], tokens(folder / "here")


@pytest.mark.parametrize("path", sorted((CONF / "hydra/launcher").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_launcher_takes_its_settings(path):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", [f"hydra/launcher={path.stem}"], return_hydra_config=True).hydra.launcher
    settings = {key: value for key, value in cfg.items() if key != "_target_"}
    assert isinstance(hydra.utils.get_class(cfg._target_)(**settings), specbench_launchers.SweepLauncher)


@pytest.mark.parametrize("page", ["conf/hydra/launcher/submitit_slurm.yaml", "docs/sweeps.md"])
def test_a_node_is_shared_as_the_pages_say(page):
    [override] = re.findall(r"hydra\.launcher\.additional_parameters=\w+", (ROOT / page).read_text())
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("bench", ["hydra/launcher=submitit_slurm", override], return_hydra_config=True)
    assert not cfg.hydra.launcher.additional_parameters


@pytest.mark.slow
def test_a_package_that_is_missing_is_one_line(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run_main(monkeypatch, capfd, "-m", "method=ar", "hydra/launcher=ray")
    assert code == 2 and says(err, "error: ray ... pip install")


def test_launchers_that_take_jobs_away_are_refused():
    with pytest.raises(UserError, match="launcher"):
        pickle.dumps(bench.Command())


# -- submitit


@pytest.mark.nightly
@pytest.mark.cluster
def test_submitit_gives_the_same_answers(monkeypatch, capfd, swept_here):
    pytest.importorskip("submitit")
    folder, arguments, answers = swept_here
    monkeypatch.chdir(folder)
    there = ["runs_root=submitit", "hydra/launcher=submitit_local"]
    code, out, err = run_main(monkeypatch, capfd, *arguments, *there)
    assert code == 0, err
    assert "all runs" in out and tokens(folder / "submitit") == answers


@pytest.mark.cluster
def test_submitit_names_a_job_that_was_lost(monkeypatch, capfd, tmp_path):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.core.core.Job, "_results_timeout_s", 1)  # for a file system of a cluster: 15
    monkeypatch.chdir(tmp_path)
    lost = [
        "hydra/launcher=submitit_local",
        "+hydra.launcher.setup=[exit]",
    ]  # of the shell that is to start it
    code, out, _ = run_main(monkeypatch, capfd, "-m", "method=ar,pld", *lost)
    assert code == 1 and out.count("(UncompletedJobError, FINISHED)") == 2


# -- Ray


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster of two nodes on this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so; by default 15: beside other load its jobs would starve
    # Where Ray notes a cluster, wherever that one lives.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray") as scratch:
        head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": scratch}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.add_node(num_cpus=3)
        yield nodes.address
        nodes.shutdown()


@pytest.mark.nightly
@pytest.mark.cluster
def test_ray_gives_the_same_answers(swept_here, cluster):
    folder, arguments, answers = swept_here
    there = ["runs_root=ray", "hydra/launcher=ray", f"hydra.launcher.address={cluster}"]
    done = cli(folder, *arguments, *there)
    assert done.returncode == 0, done.stderr
    assert "all runs" in done.stdout and tokens(folder / "ray") == answers


@pytest.mark.nightly
@pytest.mark.cluster
def test_ray_gives_a_job_a_whole_node_and_leaves_one_that_lost_a_job(monkeypatch, tmp_path, cluster):
    def on_node(run_dir: Path, folder: str, threads: str | None) -> int:
        import ray

        begin = time.time()
        time.sleep(0.3)
        node = ray.get_runtime_context().get_node_id()
        (run_dir / "when.json").write_text(json.dumps([node, begin, time.time()]))
        if run_dir.name == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        return int(run_dir.name)

    monkeypatch.setattr(specbench_launchers, "measure_as_here", on_node)
    run_dirs = [tmp_path / str(i) for i in range(7)]
    for run_dir in run_dirs:
        run_dir.mkdir()
    ended = list(specbench_launchers.Ray(cluster).place(iter(run_dirs), tmp_path))
    assert {run_dir: code for run_dir, code, _ in ended} == {
        d: 1 if d.name == "2" else int(d.name) for d in run_dirs
    }
    (reason,) = [why for _, _, why in ended if why is not None]
    assert reason.startswith("the job was lost: WorkerCrashedError")

    found = [json.loads((run_dir / "when.json").read_text()) for run_dir in run_dirs]
    lost_node = found[2][0]
    assert len({node for node, _, _ in found}) == 2
    assert not any(node == lost_node and begin > found[2][2] for node, begin, _ in found)
    for node in {node for node, _, _ in found}:
        spans = sorted(when for name, *when in found if name == node)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("devices", [None, "3"])
def test_a_job_here_has_the_gpus_of_the_command(monkeypatch, devices):
    """submitit would make the first ones visible to it."""
    monkeypatch.setenv(specbench_launchers.DEVICES, "0")
    seen = []
    monkeypatch.setattr(
        bench, "measure", lambda *_, **__: seen.append(os.environ.get(specbench_launchers.DEVICES))
    )
    with monkeypatch.context() as patch:
        patch.delenv(specbench_launchers.DEVICES) if devices is None else patch.setenv(
            "CUDA_VISIBLE_DEVICES", devices
        )
        call = specbench_launchers.SubmititLocal().measuring()
    call(Path("somewhere"))
    assert seen == [devices]


def test_a_node_gets_the_variables_that_a_job_reads(monkeypatch):
    """Workers have those with which the node was started."""
    ours = {
        "SPECBENCH_KERNELS": "0",
        "SPEC_BENCH_QUESTIONS": "/nfs/q.jsonl",
        "HF_TOKEN": "x",
        "OMP_NUM_THREADS": "3",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    variables = specbench_launchers.own_variables()
    assert variables.items() >= {**ours, "XDG_CACHE_HOME": None}.items() and "PATH" not in variables
    for name in ours:
        monkeypatch.setenv(name, "of the node")
    monkeypatch.setenv("XDG_CACHE_HOME", "of the node")
    seen = {}
    monkeypatch.setattr(bench, "measure", lambda *_, **__: seen.update(os.environ))
    specbench_launchers.measure_as_here(Path("somewhere"), os.getcwd(), variables)
    assert seen.items() >= ours.items() and "XDG_CACHE_HOME" not in seen


def test_what_a_cluster_refuses_is_one_line(monkeypatch, tmp_path):
    submitit = pytest.importorskip("submitit")

    def refuse(*_: object) -> None:
        raise submitit.core.utils.FailedJobError("sbatch: error: invalid partition specified: typo")

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", refuse)
    with pytest.raises(UserError, match="submitit_local: .*invalid partition"):
        next(specbench_launchers.SubmititLocal().place([tmp_path], tmp_path))
