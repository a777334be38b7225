"""Which method, drafter, engine, decoding and vocabulary go together: what can be known of a run without weights."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.config.folders import group_file
from specbench.config.overrides import check_pair_keys
from specbench.config.parts import check_part
from specbench.config.spec import RunSpec, unit_of
from specbench.data.warm_start import WARM
from specbench.system import settings as values
from specbench.system.errors import LackingError, UserError, one_line, suggest, warn
from specbench.system.settings import LASTING, MEMORY, WRAPPED

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.decoding.drafter import Needs

DRAFTED = ("max_draft_tokens", "nodes")  # settings that determine the size of buffers
NO_DRAFTER = "none"  # file of conf/drafter/
BY_THE_RUN = {"pair", "drafter", "threads", "batch_size"}  # parameters of an engine that are no settings


def check_method(cfg: DictConfig) -> RunSpec:
    """Returns the run. Raises UserError if pair or decoding lack what it needs, or for an unknown parameter."""
    from specbench.decoding.drafter import Drafter
    from specbench.decoding.scheduler import Scheduler  # late: a misspelt name need not wait for torch

    cls = located(cfg.method, "method", Drafter, Scheduler)
    if issubclass(cls, Scheduler) and not cls.drafts and cfg.drafter.name != NO_DRAFTER:
        # A sweep over schedulers may have a drafter for the others.
        warn(f"{cfg.method.name} drafts nothing: drafter={cfg.drafter.name} is not used")
        cfg.drafter = group_file("drafter", NO_DRAFTER)
    spec = RunSpec.of(cfg, unit_of(cls))
    *_, (what, group) = spec.groups.items()
    name = group["name"]
    slots = 1
    if spec.scheduler is not None:
        parameters(cls, "method", spec.scheduler)
        # Its constructor checks the parameters without weights.
        slots = cls(batch_size=spec.batch_size, **values.parameters(spec.scheduler)).slots
    drafting: Any = located(group, what, Drafter)
    takes = parameters(drafting, what, group)
    if spec.scheduler is None and cfg.drafter.name != NO_DRAFTER:
        raise UserError(
            f"method {name} drafts by itself: set drafter=none, or method=ragged drafter={cfg.drafter.name}"
        )

    inner, takes = innermost(group, what, takes)  # first: its class declares what it needs
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
    values.check_truncation(cfg.decoding, "decoding.")
    check_verification(cfg.decoding, f"{what} {name}", (group, inner))
    return spec


def trainer_of(module: str) -> str | None:
    """The command that trains a method's part; None if the method has no trainer.

    `specbench train` also works for an installed package, whose `methods` `python -m` does not find.
    """
    try:
        trainer = importlib.util.find_spec(f"{module}.train")
    except ModuleNotFoundError:  # the method is a single file
        trainer = None
    if trainer is None:
        return None
    package, _, name = module.partition(".")
    return f"specbench train {name}" if package == "methods" else f"python -m {module}.train"


def check_verification(decoding: DictConfig, drafter: str, groups: Sequence[Mapping]) -> None:
    """Checks the rule that accepts drafts.

    Args:
        decoding: The configuration of decoding.
        drafter: "method sps", for messages.
        groups: The configurations of the drafter, and of the innermost one that it wraps.

    Raises:
        UserError: The rule does not apply to such drafts.
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
    classes = [pkgutil.resolve_name(group["_target_"]) for group in groups]
    if not classes[-1].draws(groups[-1]):
        raise UserError(
            f"decoding.verification=block is for sampled drafts, and those of {drafter} are not sampled: "
            f"set it to {values.TOKEN}"
        )
    if any(cls.draws_trees(group) for cls, group in zip(classes, groups)):
        raise UserError(
            f"decoding.verification=block is for chains; {drafter} samples trees: set it to {values.TOKEN}"
        )


def check_draft_length(cfg: DictConfig, needs: Needs, drafter: str, drafts: bool) -> None:
    """Raises UserError if the drafter does not support the lengths of a rule, or `round_costs` do not fit the rule."""
    rule, costs = cfg.decoding.draft_length, cfg.decoding.round_costs
    if rule != values.CONSTANT and not (drafts and needs.any_length):
        why = "has drafts of one length" if drafts else "drafts nothing"
        raise UserError(f"{drafter} {why}: set decoding.draft_length={values.CONSTANT}")
    if costs is not None and (rule != values.GOODPUT or len(costs) < 2):
        raise UserError(
            f"decoding.round_costs needs decoding.draft_length={values.GOODPUT}, and the costs of rounds with no draft "
            "token, with one, ...: set it to null to have them measured"
        )


def unusual(decoding: DictConfig) -> list[str]:
    """The settings of this project's draft-verify loop that differ from the usual ones."""
    usual = {"verify_width": None, "draft_length": values.CONSTANT, "verification": values.TOKEN}
    return [f"decoding.{key}" for key, value in usual.items() if decoding[key] != value]


def check_engine(cfg: DictConfig, spec: RunSpec) -> None:
    """Raises UserError if another engine cannot decode as configured, or one of its settings has the wrong type."""
    if spec.engine is None:
        return
    name, drafts = spec.engine["name"], spec.engine["speculative"]
    signature = signature_of(located(spec.engine, "engine", object), f"engine {name}")
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
    ours = ["vocab=trim"] if cfg.vocab.name != "full" else []
    if chosen := [*ours, *unusual(cfg.decoding)]:
        raise UserError(f"engine {name} does not support {', '.join(chosen)}: leave that out")


def check_batch(cfg: DictConfig, spec: RunSpec, slots: int) -> None:
    """Checks a batch.

    Args:
        cfg: The configuration.
        spec: The run.
        slots: Sequences that its scheduler holds at once; 1 without one.

    Raises:
        UserError: Pool, devices or drafter do not suit a batch, or there is no scheduler for one.
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
    """Finds the drafter whose weights and head are used: the drafter itself, or the one that it wraps.

    Args:
        group: The drafter's configuration.
        what: "method" or "drafter".
        takes: The parameters of its class.

    Returns:
        The configuration, and the parameters of its class.

    Raises:
        UserError: The wrapped drafter wraps another one, or its configuration has an unknown parameter.
    """
    from specbench.decoding.drafter import Drafter

    if WRAPPED not in group:
        return group, takes
    inner, name = group[WRAPPED], f"{what}.{WRAPPED}"
    if WRAPPED in inner:
        raise UserError(f"{what} {group['name']} cannot wrap {inner['name']}, which wraps a drafter itself")
    return inner, parameters(located(inner, name, Drafter), name, inner)


def check_memory(what: str, group: Mapping, inner: Mapping, takes: dict) -> None:
    """Checks that the memory settings of a drafter agree with those of the drafter that it wraps, if any.

    Args:
        what: "method" or "drafter".
        group: Its configuration.
        inner: The configuration of the wrapped drafter, or its own.
        takes: The parameters of the inner drafter's class.

    Raises:
        UserError: It should learn or be warmed, but the wrapped drafter has no memory; or only the wrapped one should
            learn.
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
    """Checks that the `vocab` settings are possible.

    Args:
        cfg: The configuration.
        what: "method" or "drafter".
        name: Its name.
        trims: Whether its head, or that of the drafter that it wraps, can be trimmed.

    Raises:
        UserError: They are not.
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
        raise UserError(f"{what}._target_={target} is not a {' or '.join(kind.__name__ for kind in kinds)}")
    return cls


def signature_of(cls: type, what: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class, with their types.

    Raises UserError, which begins with `what`, if a type cannot be resolved.
    """
    try:
        return inspect.signature(cls, eval_str=True).parameters
    except NameError as error:
        raise UserError(
            f"{what}: {error}, in the annotations of __init__: import it outside of `if TYPE_CHECKING`"
        ) from error


def parameters(cls: type, what: str, group: Mapping) -> dict[str, inspect.Parameter]:
    """The constructor parameters of a method or drafter.

    Raises:
        UserError: The configuration has an unknown parameter, or a value whose type is not that of the signature.
    """
    takes = {k: p for k, p in signature_of(cls, f"{what} {group['name']}").items() if k != "pair"}
    for key, value in values.parameters(group).items():
        if key not in takes:
            raise UserError(f"{what} {group['name']} has no parameter '{key}': {suggest(key, takes)}")
        required = takes[key].default is inspect.Parameter.empty
        if value is not None or not required:  # a missing required one is reported with the drafter's needs
            values.check(f"{what}.{key}", value, takes[key].annotation)
        if key in DRAFTED and type(value) is int:
            values.check(f"{what}.{key}", value, values.DraftLength)
    return takes
