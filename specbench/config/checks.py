"""What can be known of a configuration without weights: values, names and combinations that cannot work."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from specbench.config.compose import (
    EMBEDDED,
    benchmark_of,
    check_pair_keys,
    compose_arguments,
    group_file,
    own_error,
)
from specbench.config.engine_settings import check_read
from specbench.config.parts import check_part
from specbench.config.spec import RunSpec, unit_of
from specbench.config.tuned import settings_source
from specbench.data.conversations import check_source
from specbench.data.questions import load_questions, warmup_questions
from specbench.data.warm_start import WARM, check_warm
from specbench.models import expansion as expand
from specbench.models.names import local_folder
from specbench.models.packages import described, is_package
from specbench.system import settings as values
from specbench.system.errors import LackingError, UserError, file_errors, one_line, suggest, warn
from specbench.system.paths import packaged
from specbench.system.settings import LASTING, MEMORY, WRAPPED, Count, Natural, Positive, Seed, Temperature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from specbench.decoding.drafter import Needs

GROUPS = ("method", "drafter", "pair", "vocab", "data", "task", "decoding", "engine", "tracker")
BY_THE_RUN = {"pair", "drafter", "threads", "batch_size"}  # what an engine is made with beside its settings
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
    "threads": Count | None,
    "protocol": Literal["paired", "spec_bench"],
    "run_dir": str | None,
    "runs_root": str,
    "decoding.max_new_tokens": Count,
    "decoding.temperature": Temperature,
    "decoding.verification": Literal["token", "block", "typical"],
    "decoding.draft_length": Literal["constant", "adaptive", "goodput"],
    "decoding.round_costs": list[Positive] | None,
    "decoding.verify_width": Count | None,
    "pair.graphs": bool | None,
    "pair.stop_ids": list[Natural] | None,
    "pair.draft_layers": Count | None,
    "pair.compile": bool | None,
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
    """Resolves the configuration, which then holds `settings_source`, what the method's settings are: see `tuned`.

    Args:
        cfg: The configuration.
        asks: Whether the questions of its data will be asked.

    Returns:
        The run that it is of.

    Raises:
        UserError: for all that can be known to fail without weights.
    """
    chosen = cast("dict[str, Any]", OmegaConf.to_container(cfg))
    for group in GROUPS:
        if not isinstance(chosen.get(group), dict):
            raise UserError(f"no {group} is chosen: set {group} to the name of a file in conf/{group}/")
    try:
        check_target(cfg.pair)
        cfg.pair = expand.embedded(cfg.pair)
        OmegaConf.resolve(cfg)
        missing = {key for key in OmegaConf.missing_keys(cfg) if not key.startswith("pair_file.")}
    except OmegaConfBaseException as error:
        raise UserError(str(own_error(error) or error)) from error
    if missing:
        raise UserError(f"a value is missing for {', '.join(sorted(missing))}")
    check_values(cfg)
    check_tracker(cfg.tracker)
    spec = check_method(cfg)
    check_folders(cfg, spec.needs)
    if cfg.pair.init == "expanded":
        expand.check(cfg.pair, spec.needs.draft_of(cfg.pair))
    load_questions(cfg.data, cfg.task)
    warmup_questions(cfg.data)
    if asks and cfg.pair.init == "pretrained" and cfg.data.path in embedded_files():
        warn_of_world(cfg.pair_file.name)
    check_warm(spec.drafter, cfg.data, cfg.task)
    with open_dict(cfg):
        # What another engine drafts with is in its words: neither published nor tuned here.
        rule = cfg.decoding.draft_length
        cfg.settings_source = (
            settings_source(spec, cfg.pair_file.name, rule, cfg.vocab) if spec.is_own_code else None
        )
        del cfg["pair_file"]
    return spec


def embedded_files() -> tuple[str, str]:
    """The questions of the embedded models' world, and those to warm up with, as a configuration names them."""
    data = group_file("data", EMBEDDED)
    return data["path"], data["warmup"]


@cache  # once for all jobs of a sweep
def warn_of_world(pair: str) -> None:
    """Warns where other models than the embedded ones are asked about the world that only these know."""
    if benchmark_of(pair) != EMBEDDED:
        warn(
            f"data={EMBEDDED} asks about the invented world of the embedded models, of which pair={pair} knows "
            "nothing: set data=spec_bench, or your own questions"
        )


@file_errors()
def check_command(config_name: str, arguments: list[str]) -> None:
    """Checks a command line, as far as that takes no module of a method: importing one takes seconds.

    Args:
        config_name: what the arguments change.
        arguments: those that are no `key=value`, or are for Hydra, are left to the command itself.

    Raises:
        UserError: A key or a choice is unknown, or the target, the tokenizer or the conversations are not there.
    """
    if any(argument.startswith(("-", "hydra")) for argument in arguments):
        return
    check_sources(compose_arguments(config_name, [argument for argument in arguments if "=" in argument]))


def check_sources(cfg: DictConfig) -> None:
    """Checks what a command reads that loads a target, and trains or writes with it.

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
    """Raises UserError for a pair without a target, as `local` is by itself, or with one that is no text."""
    values.check("pair.target", pair.target, KEYS["pair.target"])
    if pair.target is None:
        raise UserError(
            f"pair {pair.name} has no target: set pair.target to a folder, a GGUF file or a hub id"
        )


def check_shapes(pair: DictConfig, usual: DictConfig) -> None:
    """Raises UserError where random weights would have the shape of another model than the one that is named.

    Args:
        pair: As it is used.
        usual: As its file has it.
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


def check_values(cfg: DictConfig) -> None:
    """Raises UserError for a value of another type than its key has, see `KEYS`."""
    values.check_all(cfg, KEYS)
    check_shapes(cfg.pair, cfg.pair_file)
    for name in ("width", "draft_width"):
        if cfg.pair[name] is not None and cfg.pair.init != "expanded":
            raise UserError(f"pair.{name} is of expanded models: set pair.init=expanded")
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


def check_method(cfg: DictConfig) -> RunSpec:
    """The run. Raises UserError when pair or decoding lack what its drafter needs, or for an unknown parameter."""
    from specbench.decoding.drafter import Drafter
    from specbench.decoding.scheduler import Scheduler  # late: a misspelt name need not wait for torch

    cls = located(cfg.method, "method", Drafter, Scheduler)
    spec = RunSpec.of(cfg, unit_of(cls))
    *_, (what, group) = spec.groups.items()
    name = group["name"]
    slots = 1
    if spec.scheduler is not None:
        parameters(cls, "method", spec.scheduler)
        # It needs no weights to say what is wrong.
        slots = cls(batch_size=spec.batch_size, **values.parameters(spec.scheduler)).slots
    drafting: Any = located(group, what, Drafter)
    takes = parameters(drafting, what, group)
    if spec.scheduler is None and cfg.drafter.name != "none":
        raise UserError(
            f"method {name} drafts by itself: set drafter=none, or method=ragged drafter={cfg.drafter.name}"
        )

    inner, takes = innermost(group, what, takes)  # first: its class says what it needs
    if spec.engine is not None:
        located(spec.engine, "engine", object)  # likewise: whether it brings weights of its own
    needs = spec.needs
    check_pair_keys(cfg.pair, needs.part)
    check_memory(what, group, inner, takes)
    if needs.draft_model and needs.part is None and cfg.pair.draft is None:
        raise LackingError(
            f"{what} {name} needs a draft model and pair {cfg.pair.name} has none: set pair.draft"
        )
    required = [key for key, parameter in takes.items() if parameter.default is parameter.empty]
    by_hand = required and all(inner.get(key) is not None for key in required)
    if needs.part is not None and cfg.pair.parts.get(needs.part) is None and not by_hand:
        trainer = trainer_of(inner["_target_"].rpartition(".")[0])
        words = f"{trainer} pair={cfg.pair_file.name} {needs.training}"
        train = "" if trainer is None else f"train it with `{words.strip()}`, then "
        raise LackingError(
            f"pair {cfg.pair.name} has no part '{needs.part}', which {what} {name} needs: "
            f"{train}name it with pair.parts.{needs.part}=FOLDER"
        )
    check_part(cfg.pair, needs, (inner.get(key) for key in required))
    check_vocab(cfg, what, inner["name"], needs.trims)
    check_draft_length(cfg, needs, f"{what} {name}", drafting.draft is not Drafter.draft)
    check_batch(cfg, spec, slots)
    check_engine(cfg, spec)
    if cfg.decoding.temperature > 0 and not needs.sampling:
        raise UserError(f"{what} {name} cannot sample: set decoding=greedy")
    check_verification(cfg.decoding, f"{what} {name}", (group, inner))
    return spec


def trainer_of(module: str) -> str | None:
    """The command that trains a method's part: where `methods` lies in the package, `python -m` finds none of it.

    None for a method that brings no trainer.
    """
    try:
        trainer = importlib.util.find_spec(f"{module}.train")
    except ModuleNotFoundError:  # the method is a single file
        trainer = None
    if trainer is None:
        return None
    package, _, name = module.partition(".")
    return f"specbench train {name}" if package == "methods" else f"python -m {module}.train"


def check_verification(decoding: DictConfig, drafter: str, groups: Iterable[Mapping]) -> None:
    """Checks the rule that accepts drafts.

    Args:
        decoding: The configuration of it.
        drafter: "method sps", for messages.
        groups: The configurations of the drafter, and of one that it wraps.

    Raises:
        UserError: The rule is not for such drafts.
    """
    rule, samples = decoding.verification, decoding.temperature > 0
    if rule == values.TYPICAL and samples:
        raise UserError(
            "decoding.verification=typical, which is lossy, is for greedy decoding: set decoding=greedy"
        )
    if rule != values.BLOCK:
        return
    if not samples:
        raise UserError("decoding.verification=block is for sampled drafts: set decoding=sample")
    if any(pkgutil.resolve_name(group["_target_"]).draws_trees(group) for group in groups):
        raise UserError(
            f"decoding.verification=block is for chains; {drafter} samples trees: set it to {values.TOKEN}"
        )


def check_draft_length(cfg: DictConfig, needs: Needs, drafter: str, drafts: bool) -> None:
    """Raises UserError where a rule chooses lengths that the drafter does not have, or what goes with it is missing."""
    rule, costs = cfg.decoding.draft_length, cfg.decoding.round_costs
    if rule != values.CONSTANT and not (drafts and needs.any_length):
        why = "has drafts of one length" if drafts else "drafts nothing"
        raise UserError(f"{drafter} {why}: set decoding.draft_length={values.CONSTANT}")
    if costs is not None and (rule != values.GOODPUT or len(costs) < 2):
        raise UserError(
            f"decoding.round_costs needs decoding.draft_length={values.GOODPUT}, and the costs of rounds with no draft "
            "token, with one, ...: set it to null to have them measured"
        )


def check_engine(cfg: DictConfig, spec: RunSpec) -> None:
    """Raises UserError where another engine cannot decode what is asked for, or a setting of it has another type."""
    if spec.engine is None:
        return
    name, drafts = spec.engine["name"], spec.engine["speculative"]
    signature = inspect.signature(located(spec.engine, "engine", object), eval_str=True).parameters
    takes = {key: one.annotation for key, one in signature.items() if key not in BY_THE_RUN}
    for key, value in values.parameters(spec.engine).items():
        if key not in takes:
            raise UserError(f"engine {name} has no parameter '{key}': {suggest(key, takes)}")
        values.check(f"engine.{key}", value, takes[key])
    if drafts is not None:
        method = spec.drafter["name"]
        if method not in drafts:
            raise UserError(
                f"engine {name} does not draft as {method}: {suggest(method, drafts)}; or say how it does with "
                f"+engine.speculative.{method}={{...}}"
            )
        values.check(f"engine.speculative.{method}", drafts[method], dict)
    decoding = cfg.decoding
    ours = {
        "vocab=trim": cfg.vocab.name != "full",
        "decoding.verify_width": decoding.verify_width is not None,
        "decoding.draft_length": decoding.draft_length != values.CONSTANT,
        "decoding.verification": decoding.verification != values.TOKEN,
    }
    if chosen := [key for key, is_set in ours.items() if is_set]:
        raise UserError(f"engine {name} does not support {', '.join(chosen)}: leave that out")
    check_read(cfg, spec)


def check_batch(cfg: DictConfig, spec: RunSpec, slots: int) -> None:
    """Checks a batch.

    Args:
        cfg: The configuration.
        spec: The run.
        slots: Sequences that its scheduler holds at once; 1 without one.

    Raises:
        UserError: Pool, devices or drafter do not suit a batch, or nothing schedules one.
    """
    name = spec.drafter["name"]
    if spec.scheduler is None:
        if cfg.batch_size > 1:
            ragged = f"use method=ragged drafter={name} batch_size={cfg.batch_size}"
            way = ragged if spec.needs.batching else "set batch_size=1"
            raise UserError(f"method {name} decodes one sequence at a time: {way}")
        return
    if cfg.pool < cfg.batch_size:
        raise UserError(
            f"pool={cfg.pool} questions cannot fill batch_size={cfg.batch_size} slots: set pool higher"
        )
    if cfg.pair.device_map is not None:
        raise UserError(
            f"method {spec.scheduler['name']} needs the whole target on one device: set pair.device_map=null"
        )
    if not spec.needs.batching:
        raise UserError(f"drafter {name} cannot batch")
    inner = spec.drafter.get(WRAPPED) or spec.drafter
    if slots > 1 and spec.needs.one_memory and inner.get(MEMORY) != LASTING:
        raise UserError(
            f"{inner['name']} has one memory for all sequences, which cannot be reset while any is running: "
            f"set drafter.{MEMORY}={LASTING}"
        )


def innermost(
    group: Mapping, what: str, takes: dict[str, inspect.Parameter]
) -> tuple[Mapping, dict[str, inspect.Parameter]]:
    """Whose weights and head a drafter drafts with: its own, or those of the drafter that it wraps.

    Args:
        group: The drafter's configuration.
        what: "method" or "drafter".
        takes: The parameters of its class.

    Returns:
        The configuration, and the parameters of its class.

    Raises:
        UserError: It wraps a drafter itself, or has a parameter that it lacks.
    """
    from specbench.decoding.drafter import Drafter

    if WRAPPED not in group:
        return group, takes
    inner, name = group[WRAPPED], f"{what}.{WRAPPED}"
    if WRAPPED in inner:
        raise UserError(f"{what} {group['name']} cannot wrap {inner['name']}, which wraps a drafter itself")
    return inner, parameters(located(inner, name, Drafter), name, inner)


def check_memory(what: str, group: Mapping, inner: Mapping, takes: dict) -> None:
    """Checks whether the memory that a drafter is to have is that of the drafter which it wraps, if it does.

    Args:
        what: "method" or "drafter".
        group: Its configuration.
        inner: That of the drafter that it wraps, or its own.
        takes: The parameters of that one's class.

    Raises:
        UserError: It is to learn, or to be warmed, and the wrapped drafter has no memory; or it is not to learn, and
            the wrapped one is.
    """
    if inner.get(MEMORY) == LASTING != group.get(MEMORY, LASTING):
        raise UserError(
            f"{what}.{MEMORY}={group[MEMORY]}, but {what}.{WRAPPED}.{MEMORY}={LASTING}: set both to one value"
        )
    for key, is_set in ((MEMORY, group.get(MEMORY) == LASTING), (WARM, group.get(WARM) is not None)):
        if is_set and key not in takes:
            raise UserError(
                f"{what}.{key}={group[key]}: what {group['name']} wraps ({inner['name']}) keeps nothing between answers"
            )


def check_vocab(cfg: DictConfig, what: str, name: str, trims: bool) -> None:
    """Checks that what `vocab` says can be.

    Args:
        cfg: The configuration.
        what: "method" or "drafter".
        name: Of it.
        trims: Whether its head, or that of the drafter that it wraps, can be trimmed.

    Raises:
        UserError: It cannot.
    """
    is_full = cfg.vocab.name == "full"
    if is_full and (cfg.vocab.map is not None or cfg.vocab.size is not None):
        raise UserError("vocab.map and vocab.size need a trimmed head: set vocab=trim too")
    if not is_full and not trims:
        raise UserError(f"{what} {name} has no head to trim: set vocab=full")
    if not is_full and cfg.vocab.map is None:
        raise UserError(
            f"pair {cfg.pair.name} has no vocabulary map: make one with `specbench calibrate "
            f"pair={cfg.pair_file.name}`, then name it with vocab.map=FOLDER"
        )


def located(group: Mapping, what: str, *kinds: type) -> type:
    """The class that `_target_` of a method, drafter or engine names.

    Raises:
        UserError: It cannot be imported, or is no subclass of one of `kinds`.
    """
    if "_target_" not in group:
        folder = "engine" if what == "engine" else "method"
        file = f"conf/{folder}/{group.get('name', 'NAME')}.yaml"
        raise UserError(f"{file} has no _target_: name the class there, such as mine.Mine")
    target = group["_target_"]
    try:
        cls = pkgutil.resolve_name(str(target))  # not hydra's get_class, which prints what it raises
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{what}._target_={target} cannot be imported: {one_line(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        raise UserError(f"{what}._target_={target} is no {' or '.join(kind.__name__ for kind in kinds)}")
    return cls


def parameters(cls: type, what: str, group: Mapping) -> dict[str, inspect.Parameter]:
    """What a method or drafter can be made with.

    Raises:
        UserError: The configuration has a parameter that it lacks, or a value of another type than its signature names.
    """
    takes = {k: p for k, p in inspect.signature(cls, eval_str=True).parameters.items() if k != "pair"}
    for key, value in values.parameters(group).items():
        if key not in takes:
            raise UserError(f"{what} {group['name']} has no parameter '{key}': {suggest(key, takes)}")
        required = takes[key].default is inspect.Parameter.empty
        if value is not None or not required:  # one that is required and missing is told with what it needs
            values.check(f"{what}.{key}", value, takes[key].annotation)
    return takes


def check_folders(cfg: DictConfig, needs: Needs) -> None:
    """Raises UserError when a model, tokenizer or part that will be read is a path where no folder is."""
    names = [cfg.pair.target, cfg.pair.tokenizer, needs.draft_of(cfg.pair)]
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
