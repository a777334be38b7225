"""What can be known of a configuration without weights: values, names and folders that cannot work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from specbench.config.combinations import check_method
from specbench.config.compose import compose_arguments
from specbench.config.engine_settings import check_read
from specbench.config.folders import group_file
from specbench.config.overrides import own_error
from specbench.config.resolvers import benchmark_of
from specbench.config.tuned import settings_source
from specbench.data.conversations import check_source
from specbench.data.questions import load_questions, warmup_questions
from specbench.data.warm_start import check_warm
from specbench.models import expansion as expand
from specbench.models.expansion import EMBEDDED
from specbench.models.names import draft_source, local_folder
from specbench.models.packages import described, is_package
from specbench.system import settings as values
from specbench.system.errors import UserError, file_errors, warn
from specbench.system.paths import packaged
from specbench.system.settings import Count, Natural, Positive, Seed, Temperature, Threads, TopP

if TYPE_CHECKING:
    from specbench.config.spec import RunSpec
    from specbench.decoding.drafter import Needs

GROUPS = ("method", "drafter", "pair", "vocab", "data", "task", "decoding", "engine", "tracker")
KEYS = {
    "batch_size": Count,
    "pool": Count,
    "repeats": Count,
    "processes": Count,
    "precision": Positive | None,
    "max_minutes": Positive,
    "remeasure": Natural,
    "seed": Seed,
    "generate": bool,
    "rerun": bool,
    "leave_out": bool,
    "slice_seconds": Positive | None,
    "threads": Threads | None,
    "protocol": Literal["paired", "spec_bench"],
    "run_dir": str | None,
    "runs_root": str,
    "decoding.max_new_tokens": Count,
    "decoding.temperature": Temperature,
    "decoding.top_k": Natural,
    "decoding.top_p": TopP,
    "decoding.verification": Literal["token", "block", "typical"],
    "decoding.draft_length": Literal["constant", "adaptive", "goodput"],
    "decoding.round_costs": list[Positive] | None,
    "decoding.verify_width": Count | None,
    "pair.target_shape": dict | None,
    "pair.draft_shape": dict | None,
    "pair.template_kwargs": dict,
    "pair.chat_template": str | None,
    "pair.graphs": bool | None,
    "pair.trust_remote_code": bool | None,
    "pair.gated": bool | None,
    "pair.same_added_tokens": bool | None,
    "pair.target_revision": str | None,
    "pair.draft_revision": str | None,
    "pair.stop_ids": list[Natural] | None,
    "pair.draft_layers": Count | None,
    "pair.compile": bool | None,
    "pair.name": str,
    "data.name": str,
    "data.schema": Literal["spec_bench", "turns"] | None,
    "data.split": str | None,
    "data.placeholder": str | None,
    "data.turns": Count | None,
    "data.limit": Count | None,
    "data.path": str | None,
    "data.url": str | None,
    "data.warmup": str | None,
    "task.tasks": dict[str, list[str]],
    "vocab.map": str | None,
    "vocab.size": Count | None,
    "pair.target": str | None,
    "pair.draft": str | None,
    "pair.tokenizer": str | None,
    "pair.parts": dict,
    "pair.packages": dict,
    "pair.dtype": Literal["float32", "bfloat16", "float16"],
    "pair.init": Literal["pretrained", "random", "expanded"],
    "pair.width": Count | None,
    "pair.draft_width": Count | None,
    # Of transformers and accelerate.
    "pair.device_map": Literal["auto", "balanced", "balanced_low_0", "sequential"] | None,
}


@file_errors()
def check(cfg: DictConfig, asks: bool = True) -> RunSpec:
    """Resolves and checks the configuration; adds `settings_source`, the origin of the method's settings: see `tuned`.

    Args:
        cfg: The configuration.
        asks: Whether the questions of its data will be asked.

    Returns:
        The run that it describes.

    Raises:
        UserError: for everything that is known to fail without weights.
    """
    chosen = cast("dict[str, Any]", OmegaConf.to_container(cfg))
    for group in GROUPS:
        if not isinstance(chosen.get(group), dict):
            raise UserError(f"no {group} is chosen: set {group} to the name of a file in conf/{group}/")
    try:
        check_target(cfg.pair)
        if (pair := expand.embedded(cfg.pair)) is not cfg.pair:
            check_retained(cfg.pair, cfg.pair_file)
            cfg.pair = pair
        OmegaConf.resolve(cfg)
        missing = {key for key in OmegaConf.missing_keys(cfg) if not key.startswith("pair_file.")}
    except OmegaConfBaseException as error:
        raise UserError(str(own_error(error) or error)) from error
    if missing:
        raise UserError(f"a value is missing for {', '.join(sorted(missing))}")
    check_values(cfg)
    check_tracker(cfg.tracker)
    spec = check_method(cfg)
    if spec.engine is not None:
        check_read(cfg, spec, chosen["engine"].get("speculative") or {})
    check_folders(cfg, spec.needs)
    if cfg.pair.init == "expanded":
        expand.check(cfg.pair, draft_source(cfg.pair, spec.needs))
    load_questions(cfg.data, cfg.task)
    warmup_questions(cfg.data, cfg.task)
    if asks and cfg.pair.init == "pretrained" and cfg.data.path in embedded_files():
        warn_of_world(cfg.pair_file.name)
    check_warm(spec.drafter, cfg.data, cfg.task)
    with open_dict(cfg):
        # Another engine's draft settings have its own names: they are neither published nor tuned here.
        rule = cfg.decoding.draft_length
        cfg.settings_source = (
            settings_source(spec, cfg.pair_file.name, rule, cfg.vocab) if spec.is_own_code else None
        )
        del cfg["pair_file"]
    return spec


def embedded_files() -> tuple[str, str]:
    """Paths of the embedded models' questions and of their warm-up questions, as a configuration names them."""
    data = group_file("data", EMBEDDED)
    return data["path"], data["warmup"]


@cache  # once for all jobs of a sweep
def warn_of_world(pair: str) -> None:
    """Warns if models outside the embedded family are asked about the world that only this family knows."""
    if benchmark_of(pair) != EMBEDDED:
        warn(
            f"data={EMBEDDED} asks about the invented world of the embedded models, of which pair={pair} knows "
            "nothing: set data=spec_bench, or your own questions"
        )


@file_errors()
def check_command(config_name: str, arguments: list[str]) -> None:
    """Checks a command line as far as possible without importing a method's module, which takes seconds.

    Args:
        config_name: name of the configuration.
        arguments: of the command line. Nothing is checked if one is an option or for Hydra.

    Raises:
        UserError: A key or a choice is unknown, or the target, the tokenizer or the conversations are not there.
    """
    if any(argument.startswith(("-", "hydra")) for argument in arguments):
        return
    check_sources(compose_arguments(config_name, [argument for argument in arguments if "=" in argument]))


def check_sources(cfg: DictConfig) -> None:
    """Checks the inputs of a command that loads a target to train or write with it.

    Raises:
        UserError: A value of `pair` has another type, or its target, its tokenizer or the conversations are not there.
    """
    values.check_all(cfg, {key: kind for key, kind in KEYS.items() if key.startswith("pair.")})
    check_target(cfg.pair)
    pair = expand.embedded(cfg.pair)
    for name in (pair.target, pair.tokenizer):
        if name is not None:
            local_folder(name)
    if "conversations" in cfg:
        values.check("conversations", cfg.conversations, str | None)
        check_source(cfg.conversations, cfg.pair)


def check_target(pair: DictConfig) -> None:
    """Raises UserError if a pair has no target, as `local` by default, or one that is not text."""
    values.check("pair.target", pair.target, KEYS["pair.target"])
    if pair.target is None:
        raise UserError(
            f"pair {pair.name} has no target: set pair.target to a folder, a GGUF file or a hub id"
        )


def check_shapes(pair: DictConfig, usual: DictConfig) -> None:
    """Raises UserError if random weights would have the shape of a model other than the named one.

    Args:
        pair: The configuration in use.
        usual: The pair's own file.
    """
    if pair.init != "random":
        return
    for model in ("target", "draft"):
        name, shape = pair[model], pair[f"{model}_shape"]
        if name in (None, usual.get(model)) or shape is None or packaged(name).exists():
            continue
        if shape == usual[f"{model}_shape"]:
            raise UserError(
                f"pair.{model}={name} would be built in the shape of {usual[model]}: with init=random set "
                f"pair.{model}_shape, too, or name a folder with its config.json"
            )


def check_retained(pair: DictConfig, usual: DictConfig) -> None:
    """Raises UserError for a setting of a pair that its expansion from the embedded family would ignore.

    Args:
        pair: The configuration in use, unresolved.
        usual: The pair's own file.
    """
    ours, theirs = (
        cast("dict[str, Any]", OmegaConf.to_container(one, resolve=False)) for one in (pair, usual)
    )
    for key in sorted(ours.keys() - expand.OWN):
        if ours[key] != theirs.get(key) and theirs.get(key) != "???":
            raise UserError(
                f"pair.{key} is the embedded family's with pair.init=expanded, which would ignore yours: leave it out"
            )


def check_values(cfg: DictConfig) -> None:
    """Raises UserError for a value of the wrong type, see `KEYS`, and for `pair` values that exclude each other."""
    values.check_all(cfg, KEYS)
    check_shapes(cfg.pair, cfg.pair_file)
    for name in ("width", "draft_width"):
        if cfg.pair[name] is not None and cfg.pair.init != "expanded":
            raise UserError(f"pair.{name} applies only to expanded models: set pair.init=expanded")
    if cfg.pair.device_map is not None and cfg.pair.init != "pretrained":
        raise UserError("pair.device_map spreads weights that are loaded: set pair.init=pretrained")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(cfg.pair.device)):
        raise UserError(f"pair.device must be auto, cpu or cuda:0, not {cfg.pair.device!r}")
    if cfg.pair.compile and cfg.pair.graphs is False:
        import torch  # late: it takes seconds

        if torch.cuda.is_available() if cfg.pair.device == "auto" else cfg.pair.device != "cpu":
            raise UserError(
                "on CUDA pair.compile=true needs captured passes, and there are none: set pair.graphs=null or "
                "pair.compile=null"
            )


def check_folders(cfg: DictConfig, needs: Needs) -> None:
    """Raises UserError if a model, tokenizer or part that will be read is a path that does not exist."""
    names = [cfg.pair.target, cfg.pair.tokenizer, draft_source(cfg.pair, needs)]
    if needs.part is not None:
        names.append(cfg.pair.parts.get(needs.part))
    for name in names:
        if name is not None:
            local_folder(name)
            if is_package(name):
                described(name, cfg.pair.packages)
    if cfg.vocab.map is not None and not packaged(cfg.vocab.map).is_dir():
        raise UserError(f"there is no folder '{cfg.vocab.map}' with a vocabulary map")


def check_tracker(tracker: Mapping) -> None:
    """Raises UserError for a setting of `conf/tracker/` that cannot work."""
    if tracker["name"] == "none":
        return
    for key in ("entity", "project", "group"):
        values.check(f"tracker.{key}", tracker[key], str | None)
    values.check("tracker.mode", tracker["mode"], Literal["online", "offline"])
    values.check("tracker.upload_diff", tracker["upload_diff"], bool)
    if type(tracker["timeout"]) not in (int, float) or not 1 <= tracker["timeout"] < float("inf"):
        raise UserError(f"tracker.timeout must be seconds, at least 1, not {tracker['timeout']!r}")
