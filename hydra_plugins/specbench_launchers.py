"""Hydra launchers: where the jobs of a sweep are measured, `hydra/launcher=NAME` with conf/hydra/launcher/NAME.yaml.

A job is a run folder; another machine measures it with `python -m specbench.measure.runner RUN_DIR`. The command's own
process composes, checks, prints and keeps the records, so that a killed job loses nothing. All machines see the same
files.

Hydra's own launchers for submitit (1.2.0) and Ray (1.2.2) are not used: they wait for the jobs in order and give up at
the first killed one; the former starts all local jobs at once, and pip found no compatible versions for the latter.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from specbench import THREAD_VARIABLES
from specbench.system.errors import UserError, import_optional, one_line

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction

POLL_SECONDS = 1
DEVICES = "CUDA_VISIBLE_DEVICES"


class SweepLauncher(Launcher):
    """Composes the jobs of a sweep and passes them to `place`, which measures them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes over Hydra's context. Raises UserError for a program that has no sweeps."""
        if not hasattr(task_function, "sweep"):
            raise UserError("this program has no sweeps: leave out -m, or choose hydra/launcher=basic")
        self.command, self.config = task_function, config
        self.loader = hydra_context.config_loader

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Composes and measures the jobs of a sweep; a job returns its exit code."""
        from specbench.commands.sweep import Job  # late: every program that uses Hydra looks at its plugins

        jobs = [Job(list(overrides), self._compose(list(overrides))) for overrides in job_overrides]
        self.command.sweep(jobs, self.place)
        return [
            JobReturn(job.overrides, job.cfg, status=JobStatus.COMPLETED, _return_value=job.code)
            for job in jobs
        ]

    def _compose(self, overrides: list[str]) -> DictConfig:
        cfg = self.loader.load_sweep_config(self.config, overrides)
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        return cfg

    @abstractmethod
    def place(
        self, run_dirs: Iterable[Path], logs: Path
    ) -> Generator[tuple[Path, int, str | None], None, None]:
        """As `specbench.commands.sweep.Executor`."""


class Local(SweepLauncher):
    """On this machine, one after the other."""

    def place(
        self, run_dirs: Iterable[Path], logs: Path
    ) -> Generator[tuple[Path, int, str | None], None, None]:
        """Measures the run folders on this machine, one after the other."""
        from specbench.commands.run import run_locally

        return run_locally(run_dirs, logs)


class Submitit(SweepLauncher):
    """Through submitit, with the parameters of Hydra's own launcher for it."""

    cluster: str
    at_once: int | None  # jobs that are submitted together, the next when these are done; None: all
    common = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name")

    def __init__(self, **parameters):
        plain = OmegaConf.to_container(OmegaConf.create(parameters))
        self.parameters = {k if k in self.common else f"{self.cluster}_{k}": v for k, v in plain.items()}

    def place(
        self, run_dirs: Iterable[Path], logs: Path
    ) -> Generator[tuple[Path, int, str | None], None, None]:
        """Measures each run folder in a job of submitit; yields them as they are done.

        Raises:
            UserError: submitit is not installed, or the cluster does not take its parameters.
        """
        from specbench.commands.run import queue
        from specbench.system.processes import heeding_sigterm

        submitit = import_optional("submitit", "slurm")
        try:
            executor = submitit.AutoExecutor(logs / "submitit" / "%j", cluster=self.cluster)
            executor.update_parameters(**self.parameters)
        except (
            AssertionError,
            NameError,
            RuntimeError,
            ValueError,
        ) as error:  # no Slurm, an unknown parameter
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {error}") from error
        left = iter(run_dirs)
        with heeding_sigterm():
            while group := list(islice(left, self.at_once)):
                try:
                    submitted = executor.map_array(self.measuring(), group)
                except submitit.core.utils.FailedJobError as error:  # refused, with the cluster's own words
                    raise UserError(f"hydra/launcher=submitit_{self.cluster}: {one_line(error)}") from error
                for run_dir in group:
                    queue(run_dir)
                print(f"{len(group)} jobs submitted; logs are in {logs}", file=sys.stderr)
                of_job = dict(zip(submitted, group))
                try:
                    for job in submitit.helpers.as_completed(submitted, poll_frequency=POLL_SECONDS):
                        yield of_job.pop(job), *_outcome(job)
                finally:
                    for job in of_job:
                        job.cancel()

    def measuring(self) -> Callable[[Path], int]:
        """Returns the function that a job calls with its run folder."""
        from specbench.commands.run import measure

        return partial(measure, logged=True)


class SubmititSlurm(Submitit):
    """Under Slurm, as one array."""

    cluster, at_once = "slurm", None


class SubmititLocal(Submitit):
    """On this machine in Slurm's manner, on the GPUs that the command may use."""

    cluster, at_once = "local", 1

    def measuring(self) -> Callable[[Path], int]:
        """As in the base class, on the command's own GPUs; submitit would make the first ones visible."""
        return partial(measure_as_here, folder=os.getcwd(), variables={DEVICES: os.environ.get(DEVICES)})


def _outcome(job) -> tuple[int, str | None]:
    """Returns the exit code of a finished submitit job, and the reason if it was lost."""
    try:
        return job.result(), None
    except Exception as error:  # noqa: BLE001 - whatever it died of, it is this job's reason
        return 1, f"the job was lost ({type(error).__name__}, {job.state}); see {job.paths.folder}"


class Ray(SweepLauncher):
    """On the nodes of a Ray cluster. A job has all processors and GPUs of its node, so that no two share one.

    address: as of ray.init; None: $RAY_ADDRESS, or the cluster that this machine belongs to.
    """

    def __init__(self, address: str | None):
        self.address = address

    def place(
        self, run_dirs: Iterable[Path], logs: Path
    ) -> Generator[tuple[Path, int, str | None], None, None]:
        """Measures each run folder in a task of Ray; yields them as they are done.

        Raises:
            UserError: Ray is not installed, or cannot be reached.
        """
        from specbench.commands.run import queue
        from specbench.system.processes import heeding_sigterm

        ray = import_optional("ray", "ray")
        self._connect(ray)
        task = ray.remote(max_retries=0)(measure_as_here)
        folder, variables = os.getcwd(), own_variables()
        left, running, lost = iter(run_dirs), {}, set()
        with heeding_sigterm():
            try:
                while True:
                    busy = {node for _, node in running.values()}
                    free = [node for node in _nodes(ray) if node["NodeID"] not in busy]
                    # A node that lost a job is the last resort.
                    idle = [node for node in free if node["NodeID"] not in lost] or ([] if running else free)
                    for node, run_dir in zip(idle, left):
                        queue(run_dir)
                        reference = task.options(**_whole(ray, node)).remote(run_dir, folder, variables)
                        running[reference] = run_dir, node["NodeID"]
                    if not running:
                        break
                    done, _ = ray.wait(list(running), timeout=POLL_SECONDS)
                    for reference in done:
                        run_dir, node = running.pop(reference)
                        try:
                            yield run_dir, ray.get(reference), None
                        except ray.exceptions.RayError as error:
                            lost.add(node)
                            yield run_dir, 1, f"the job was lost: {one_line(error)}"
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)
                ray.shutdown()
        for run_dir in left:
            yield run_dir, 1, "no node of the Ray cluster is left"

    def _connect(self, ray: ModuleType) -> None:
        # For a cluster started here: Ray's default niceness of 15 lets other processes slow down measurements.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            ray.init(self.address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise UserError(f"hydra.launcher.address={self.address}: {one_line(error)}") from error


def own_variables() -> dict[str, str | None]:
    """The environment variables that a job reads, by name; None: not set.

    A worker has those of `ray start`, and Ray chooses some for threads itself.
    """
    names = {
        name for name in os.environ if name.startswith(("SPECBENCH_", "HF_")) or name.endswith("_QUESTIONS")
    }
    return {name: os.environ.get(name) for name in (*THREAD_VARIABLES, *sorted(names), "XDG_CACHE_HOME")}


def _nodes(ray: ModuleType) -> list[dict]:
    """Returns the live nodes of the cluster that accept tasks."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _whole(ray: ModuleType, node: dict) -> dict:
    """Options of a task that has a node to itself."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    has = node["Resources"]
    return {"num_cpus": has["CPU"], "num_gpus": has.get("GPU", 0), "scheduling_strategy": strategy}


def measure_as_here(run_dir: Path, folder: str, variables: dict[str, str | None]) -> int:
    """Measures a job in another process, as the command itself would.

    Args:
        run_dir: the run folder.
        folder: the working directory of the command.
        variables: its environment variables; None: not set.

    Returns:
        The exit code.
    """
    from specbench.commands.run import measure

    os.chdir(folder)
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return measure(run_dir, logged=True)
