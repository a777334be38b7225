"""Finds a method's settings for a pair and this machine: `specbench tune method=... [trials=20] [key=value]`.

Optuna chooses within the bounds of `conf/search/METHOD.yaml`. A trial is a run like any other, its score the speedup
over all questions; it asks the warm-up questions, because a setting that was chosen on the test questions would flatter
itself there. A study belongs to one configuration, code and machine: <runs_root>/tune/<method>_<pair>_<hash>/. It goes
on when it was killed, or when more trials are asked for. Exit code: 1 if a trial failed, else as of `specbench run`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.text import Text

from specbench import THREAD_VARIABLES
from specbench.commands.run import run, run_locally
from specbench.commands.sweep import Job, chosen_threads
from specbench.config.checks import check
from specbench.config.compose import program
from specbench.config.overrides import check_no_run_dir, overridden_key
from specbench.data.question_files import TASKS
from specbench.data.questions import EVERY, WARMUP, questions_sha256, warmup_questions
from specbench.measure.records import run_folder as store
from specbench.measure.records.source import method_sha256, source_sha256
from specbench.system import settings as values
from specbench.system.errors import UserError, import_optional
from specbench.system.files import lock_folder, make_folder

OWN = ("search", "trials")  # keys that a run does not have
RUN, REASON = "run_dir", "reason"  # attributes of a trial in Optuna, beside settings and score


def tune(cfg: DictConfig) -> int:
    """Runs trials until the study has `cfg.trials` of them; returns 1 if any of them failed."""
    values.check("trials", cfg.trials, values.Count)
    optuna = import_optional("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    overrides = list(HydraConfig.get().overrides.task)
    fixed = {overridden_key(override) for override in overrides}
    bounds = dict(searched(cfg.search))
    space = {key: distribution(optuna, key, bounds[key]) for key in bounds if key not in fixed}
    if not space:
        if not bounds:
            raise UserError("there is nothing to search: no setting has bounds")
        raise UserError(f"nothing is left to search: the command line already sets {', '.join(bounds)}")
    base = trial_config(overrides)
    check_no_run_dir(base.run_dir, "trial")
    folder = study_folder(base, str(space))
    with lock_folder(folder, "tuned"):
        began_with = own_settings(base, space)
        study = open_study(optuna, folder, began_with)
        while (number := len(ended(study))) < cfg.trials:
            # A resumed study needs another seed: with the same one it would draw the same settings again.
            seed = (cfg.seed + len(study.trials)) % 2**32  # NumPy accepts no more bits
            study.sampler = optuna.samplers.TPESampler(seed=seed)
            trial = study.ask(space)
            chosen = [*as_overrides(trial.params), *threads_of_trials(base, study, folder)]
            job = Job(chosen, trial_config([*overrides, *chosen]))
            job.cfg.runs_root = str(folder)
            print(f"trial {number + 1} of {cfg.trials}: {' '.join(job.overrides)}", flush=True)
            run([job], run_locally, folder)
            speedup, reason = score(job)
            trial.set_user_attr(RUN, job.run_dir and job.run_dir.name)
            trial.set_user_attr(REASON, reason)
            study.tell(trial, speedup, optuna.trial.TrialState.FAIL if speedup is None else None)
        measured = [o for o in overrides if not is_own(o)] + threads_of_trials(base, study, folder)
        if not any(o.startswith("settings=") for o in measured):
            measured.append(f"settings={cfg.settings}")  # a plain run would use the tuned ones
        failed = report(study, folder, measured, began_with.keys() == space.keys())
    return min(failed, 1)


# -- a trial


def trial_config(overrides: list[str]) -> DictConfig:
    """The configuration of a run on the warm-up questions."""
    cfg = compose("tune", overrides)
    with open_dict(cfg):
        for key in OWN:
            del cfg[key]
        # A task may have no warm-up questions of its kind.
        if cfg.task.name not in {question.task for question in warmup_questions(cfg.data, cfg.task)}:
            cfg.task.name, cfg.task.tasks = EVERY, TASKS
    cfg.data.path, cfg.data.sha256, cfg.data.split = cfg.data.warmup or WARMUP, None, None
    cfg.data.name = f"{cfg.data.name}_warmup"
    return cfg


def as_overrides(params: dict) -> list[str]:
    """Settings as command-line overrides."""
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in params.items()}
    return [f"{key}={'null' if value is None else value}" for key, value in shown.items()]


def threads_of_trials(base: DictConfig, study: Any, folder: Path) -> list[str]:
    """The override that sets all trials on a CPU to the threads that the first one chose; [] if none applies."""
    runs = [trial.user_attrs[RUN] for trial in study.trials if trial.value is not None]
    if base.threads is not None or not runs:
        return []
    threads = chosen_threads(folder / runs[0])
    return [] if threads is None else [f"threads={threads}"]


def score(job: Job) -> tuple[float | None, str | None]:
    """The speedup of a trial, or why it has none, such as a fault that a report would show."""
    if job.code != 0 or job.run_dir is None:
        return None, job.reason
    from specbench.report.runs import read_run
    from specbench.report.verdicts import faults  # late: pandas takes a second

    summary = read_run(job.run_dir).summary
    if wrong := faults(summary):
        return None, "; ".join(wrong)
    speedup = summary["overall"]["speedup"]
    return speedup, None if speedup is not None else "no speedup could be measured"


# -- what is searched


def searched(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys to vary, each with its bounds: a list of choices, or {low, high} and a step."""
    for name, item in node.items():
        key = str(name)
        if isinstance(item, DictConfig) and "low" not in item:
            yield from searched(item, f"{prefix}{key}.")
        else:
            yield prefix + key, OmegaConf.to_container(item) if OmegaConf.is_config(item) else item


def distribution(optuna: Any, key: str, bounds: list | dict) -> Any:
    """Optuna's distribution for a key; integer bounds yield integers. Raises UserError for malformed bounds."""
    kinds = optuna.distributions
    try:
        if isinstance(bounds, list):
            return kinds.CategoricalDistribution(bounds)
        is_integer = all(type(value) is int for value in bounds.values())
        return (kinds.IntDistribution if is_integer else kinds.FloatDistribution)(**bounds)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"search.{key} takes choices, or low, high and step, not {bounds}") from error


def own_settings(base: DictConfig, space: dict) -> dict:
    """The values of the base configuration that are within the bounds of the search.

    For a number, null means no limit ("all nodes") and is replaced by the upper bound.
    """
    settings = {}
    for key, among in space.items():
        value = OmegaConf.select(base, key)
        value = value.name if isinstance(value, DictConfig) else value  # a group: the name of its choice
        if hasattr(among, "choices"):
            if value is None and "null" in among.choices:
                value = "null"
            allowed = value in among.choices
        else:
            value = among.high if value is None else value
            allowed = type(value) in (int, float) and among.low <= value <= among.high
        if allowed:
            settings[key] = value
    return settings


def is_own(override: str) -> bool:
    """Whether an argument configures the search, not a run."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0] in OWN


# -- the study


def study_folder(base: DictConfig, space: str) -> Path:
    """The folder of the study that these trials belong to. Raises UserError for a configuration that cannot work."""
    checked = cast("DictConfig", OmegaConf.create(OmegaConf.to_container(base)))
    spec = check(checked)
    from specbench.measure.machine import hardware, provenance  # late: with torch it takes seconds
    from specbench.models.model_source import fetch_small_files
    from specbench.models.names import is_hub_id
    from specbench.models.packages import is_package
    from specbench.models.pairs import pair_for

    threads = [os.environ.get(name) for name in THREAD_VARIABLES]
    plain = values.plain(checked)
    made_of = [source_sha256(), method_sha256(plain), questions_sha256(plain["data"])]
    pair = pair_for(checked.pair, spec.needs)  # with the draft model that the method takes
    models = ("target", "draft") if spec.needs.draft_model else ("target",)
    for name in models:
        if is_hub_id(pair[name]):  # its commit is known then
            fetch_small_files(pair[name], pair[f"{name}_revision"], pair.gated)
    weights = provenance.weights(values.plain(pair), spec.drafting, spec.engine)
    # Without packages, whose checksums are in the configuration: they may not be fetched yet.
    used = {
        name: one
        for name, one in weights.items()
        if not is_package(one["source"]) and ("files" in one or name in models)
    }
    same = [store.config_hash(checked), space, made_of, used, hardware.machine(), threads]
    digest = hashlib.sha256(json.dumps(same).encode()).hexdigest()[:8]
    folder = Path(base.runs_root) / "tune" / f"{spec.groups['method']['name']}_{base.pair.name}_{digest}"
    return make_folder(folder)


def open_study(optuna: Any, folder: Path, first: dict) -> Any:
    """Opens Optuna's study. A new one begins with the settings `first`, a resumed one with an interrupted trial.

    Optuna draws the settings that `first` lacks.
    """
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name="tune",
        direction="maximize",
        load_if_exists=True,
    )
    states = optuna.trial.TrialState
    if not study.trials:
        study.enqueue_trial(first)
    for trial in study.get_trials(states=[states.RUNNING]):
        study.tell(trial.number, state=states.PRUNED)
        study.enqueue_trial(trial.params)
    return study


def ended(study: Any) -> list:
    """The finished trials: those with a score, best first, then the failed ones."""
    done = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "FAIL")]
    return sorted(done, key=lambda trial: float("inf") if trial.value is None else -trial.value)


def report(study: Any, folder: Path, overrides: list[str], began_with_own: bool) -> int:
    """Prints all trials, the best first, and the command that measures the best one; returns how many failed.

    Args:
        study: with its trials.
        folder: of their runs.
        overrides: of a run with the settings that are not searched.
        began_with_own: whether the first trial had all of the base configuration's own settings.
    """
    from specbench.report import cells, tables  # late, as above
    from specbench.report.runs import read_run

    trials = ended(study)
    scored = [trial for trial in trials if trial.value is not None]
    out = cells.console()
    if scored:
        out.print(tables.overview_table(read_run(folder / trial.user_attrs[RUN]).summary for trial in scored))
    for trial in trials[len(scored) :]:
        where = f" ({folder / trial.user_attrs[RUN]})" if trial.user_attrs[RUN] else ""
        line = f"failed: {' '.join(as_overrides(trial.params))}: {trial.user_attrs[REASON]}{where}"
        out.print(Text(line, style="red"), soft_wrap=True)
    if not scored:
        raise UserError(f"none of the {len(trials)} trials succeeded")
    ranks = [rank for rank, trial in enumerate(scored, start=1) if began_with_own and trial.number == 0]
    remark = f"the initial settings ranked {ranks[0]} out of {len(scored)}; " if ranks else ""
    print(f"{remark}the best of many trials is partly luck, so measure it on the test questions:")
    best = ["python", "-m", "specbench", "run", *overrides, *as_overrides(scored[0].params)]
    print(shlex.join(best), flush=True)
    return len(trials) - len(scored)


main = program("tune", tune)
