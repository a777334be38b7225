"""What Hydra composes from a command line, and one line for what it cannot compose.

Every command that takes `key=value` goes through `with_hydra`: `specbench run`, `tune`, the trainers.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
import tempfile
from contextlib import nullcontext
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench import CONF
from specbench.models.expansion import layer_at
from specbench.system.errors import UserError, one_line_errors, print_stopped, suggest, warn

NO_KEY = re.compile(r"Could not override '([\w.]+)'")  # as Hydra says it
PART = re.compile(r"\bpair\.parts\.(\w+)")  # as a YAML reads one
AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*)'")  # as Hydra says it
EMBEDDED = "tiny"  # the pair that the embedded family begins with, and its questions
# Configurations with a method, whose `check` refuses parts that nothing reads.
OF_METHODS = ("bench", "tune", "serve", "export_part")
# In which keys may be new: what reads these groups checks their keys, or takes any.
OPEN = ("method", "drafter", "pair", "engine", "tracker", "search", "parts", "kinds", "task.tasks")
NOT_COMPOSED = (HydraException, OmegaConfBaseException, yaml.YAMLError)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def expanded_layers(count: int, old: int, *, _root_: DictConfig) -> int:
    """`${expanded_layers:5,24}`: 5 of the 24 layers of a target, or what they have become where it is expanded."""
    pair = _root_.pair
    if pair.init != "expanded" or pair.target_shape is None:
        return count
    return layer_at(count, old, pair.target_shape.num_hidden_layers)


OmegaConf.register_new_resolver("expanded_layers", expanded_layers, replace=True)


def drafter_setting(key: str, default: Any, *, _root_: DictConfig) -> Any:
    """`${drafter_setting:max_draft_tokens,5}`: what the run's drafter has, a batch method's, too; or the default."""
    for group in ("drafter", "method"):
        if (value := OmegaConf.select(_root_, f"{group}.{key}")) is not None:
            return value
    return default


OmegaConf.register_new_resolver("drafter_setting", drafter_setting, replace=True)


def benchmark_of(pair: str) -> str:
    """`- data: ${benchmark:${pair}}` in a defaults list: the questions that what is made for a pair must not know.

    They are those of the embedded family for its pairs, and Spec-Bench's for all others.
    """
    return EMBEDDED if EMBEDDED in _lineage(pair) else "spec_bench"


OmegaConf.register_new_resolver("benchmark", benchmark_of, replace=True)


def model_name(path: str | None, default: str) -> str:
    """`${model_name:${.target},local}`: the last part of a model's name, for tables; the default without one."""
    return default if path is None else re.sub(r"[^\w.-]+", "-", Path(path.removesuffix(".gguf")).name)


OmegaConf.register_new_resolver("model_name", model_name, replace=True)


def only_of(model: str | None, usual: str, value: Any) -> Any:
    """`${only_of:${.draft},MODEL,2}`: a setting that belongs to a pair's own model; null where another one is named."""
    return value if model == usual else None


OmegaConf.register_new_resolver("only_of", only_of, replace=True)


# -- tuned settings: conf/tuned/PAIR/METHOD.yaml


def tuned_on(pair: str, method: str) -> str | None:
    """The pair whose tuned settings a method or drafter has on `pair`; None where there are none.

    It is the pair itself, or the nearest one that its YAML builds on: `tiny_wide` has those of `tiny`.
    """
    for name in _lineage(pair):
        if any((folder / "tuned" / name / f"{method}.yaml").is_file() for folder in _folders()):
            return name
    return None


def _lineage(pair: str) -> Iterator[str]:
    """A pair and those that its YAML builds on, the nearest first."""
    names = [pair]
    for name in names:  # which grows
        yield name
        bases = group_file("pair", name).get("defaults", [])
        names += [base for base in bases if isinstance(base, str) and base != "_self_"]


def group_file(group: str, name: str) -> dict[str, Any]:
    """A YAML of a group as it stands, without those that it builds on; {} where there is none.

    Raises UserError for a file that is no YAML.
    """
    paths = (folder / group / f"{name}.yaml" for folder in _folders())
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return {}
    try:
        with path.open("rb") as file:  # errors then name it
            return yaml.safe_load(file) or {}
    except yaml.YAMLError as error:
        raise UserError(no_yaml(error)) from error


def no_yaml(error: yaml.YAMLError) -> str:
    """What is no YAML, with the file and the place of it."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    return str(error)


def tuned_choice(group: str, *, _root_: DictConfig) -> str:
    """`- optional tuned@method: ${tuned:method}` in a defaults list: the file of tuned settings in conf/tuned/.

    Where there is none, or `settings=published`, it names a file that does not exist, which `optional` skips.

    Args:
        group: "method" or "drafter".
        _root_: the choices of all groups.
    """
    pair, chosen, settings = (_root_.get(key) for key in ("pair", group, "settings"))
    tuned_pair = tuned_on(pair, chosen) if settings == "tuned" and pair and chosen else None
    return f"{tuned_pair}/{chosen}" if tuned_pair else "none"


OmegaConf.register_new_resolver("tuned", tuned_choice, replace=True)


def tuned_vocab(usual: str, *, _root_: DictConfig) -> str:
    """`- vocab: ${tuned_vocab:full}` in a defaults list: what tuned settings of the run's drafter choose, or `usual`.

    A trimmed head is of this project's engine alone.
    """
    if _root_.get("engine") != "own":
        return usual
    files = [group_file("tuned", tuned_choice(group, _root_=_root_)) for group in ("drafter", "method")]
    return next((file["vocab"] for file in files if "vocab" in file), usual)


OmegaConf.register_new_resolver("tuned_vocab", tuned_vocab, replace=True)


def own_conf() -> Path | None:
    """The folder `conf` of the working directory, where a user of the package keeps YAMLs of his own; None without."""
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder != CONF else None


@lru_cache(maxsize=16)  # once for all jobs of a command
def warn_of_hidden(user_conf: Path) -> None:
    """Warns of the user's YAMLs that nothing reads, as `CONF` has others of the same names."""
    names = [path.relative_to(user_conf) for path in sorted(user_conf.rglob("*.yaml"))]
    for name in names:
        ours = CONF / name
        if ours.is_file() and ours.read_bytes() != (user_conf / name).read_bytes():
            warn(f"conf/{name} is not read: specbench brings a file of that name, so give yours another one")


def is_group(key: str) -> bool:
    """Whether `key` names a group of the configuration, such as method."""
    return any((folder / key).is_dir() for folder in _folders())


def check_overrides(arguments: list[str]) -> None:
    """Checks the command line for what Hydra would silently ignore or take amiss.

    Raises:
        UserError: A group is chosen twice, of which Hydra takes the last; a choice is no name, such as null; a launcher
            is chosen where there is no sweep to launch, or a run folder where there is one; a pair has no such key.
    """
    overrides: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if key == "drafter" and "glob(" in value:  # Hydra would look into conf/drafter/ alone
            raise UserError("drafter takes names, not glob(...)")
        if equals and key in overrides and is_group(key):
            raise UserError(f"{key} is given twice: {overrides[key]} and {value}")
        overrides[key] = value
        group, _, inside = key.partition(".")
        if equals and group == "pair" and inside:
            check_pair_keys({inside.partition(".")[0]: None})
        for choice in value.split(",") if is_group(key) else []:
            # Hydra wants text, and says no key.
            if re.fullmatch(r"null|true|false|[\d.+-]*", choice, re.IGNORECASE):
                raise UserError(f"unknown {key} '{choice}': {suggest(choice, choices_of(key))}")
    sweep = {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments)
    launcher = [key for key in overrides if re.match(r"hydra[./]launcher\b", key)]
    if launcher and not sweep:
        raise UserError(f"{launcher[0]} needs a sweep: use specbench sweep")
    if sweep and overrides.get("run_dir", "null") != "null":
        raise UserError(
            f"run_dir={overrides['run_dir']} is the folder of one run, and each job of a sweep has its own: set "
            "runs_root instead"
        )


def check_added(config_name: str, overrides: list[str]) -> None:
    """Raises UserError for a key that is added with `+` and that nothing reads, which Hydra would take."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if not override.startswith("+") or is_group(key) or re.search(r"^hydra\b|[/@]", key):
            continue
        # Of a group where keys may be new, the group itself.
        key = next((name for name in OPEN if key.startswith(f"{name}.")), key)
        # Data of the user's may leave out keys that the usual ones have.
        if _unknown_part(key, _composed_of(config_name, [], key)):
            unknown = _unknown_part(key, _chosen(config_name, overrides, key))
            if unknown is not None:
                raise UserError(unknown)


def check_pair_keys(pair: Mapping[str, Any], part: str | None = None) -> None:
    """Checks for keys that nothing reads, which a user may have added.

    Args:
        pair: all of its configuration, or some keys of it.
        part: that the drafter at hand reads; it need not stand in a YAML.

    Raises:
        UserError: `pair`, or `pair.parts`, has such a key.
    """
    base = base_pair()
    for key in pair:
        if key not in base:
            raise UserError(f"unknown key 'pair.{key}': {suggest(key, base)}")
    for key in pair.get("parts") or {}:
        if key not in base["parts"] and key != part and key not in (names := _parts_of_yamls()):
            names |= set() if part is None else {part}
            raise UserError(f"unknown key 'pair.parts.{key}': {suggest(key, names)}")


def with_parts_added(overrides: list[str]) -> list[str]:
    """The arguments, with `++` for a part that no pair lists: one that a method of the user's needs."""
    listed = base_pair()["parts"]
    return [
        f"++{override}" if (part := PART.match(override)) and part[1] not in listed else override
        for override in overrides
    ]


def base_pair() -> dict[str, Any]:
    """What every pair has: its keys, and in `parts` the parts that methods of this project have."""
    return group_file("pair", "_base")


def _parts_of_yamls() -> set[str]:
    """The parts that the YAMLs of pairs list, or that those of methods and vocabularies read."""
    names: set[str] = set()
    for folder in _folders():
        for path in (folder / "pair").glob("*.yaml"):
            names |= (group_file("pair", path.stem).get("parts") or {}).keys()
        for path in (*(folder / "method").glob("*.yaml"), *(folder / "vocab").glob("*.yaml")):
            names |= set(PART.findall(path.read_text(encoding="utf-8")))
    return names


def choices_of(group: str) -> list[str]:
    """The names that a group of the configuration has.

    A drafter is named as the method; one that makes a choice of another group, as schedulers do, is none.
    """
    files = [path for folder in _folders() for path in (folder / group).glob("*.yaml")]
    if group == "drafter":
        methods = [path for folder in _folders() for path in (folder / "method").glob("*.yaml")]
        files += [path for path in methods if "override /" not in path.read_text(encoding="utf-8")]
    return [path.stem for path in files if not path.stem.startswith("_")]


def checked_choice(group: str, name: str) -> str:
    """The name. Raises UserError where a group of the configuration does not have it.

    `- optional method@drafter: ${checked:drafter,...}` in a defaults list gives a drafter the file of a method.
    """
    choices = choices_of(group)
    if name not in choices:
        raise UserError(f"unknown {group} '{name}': {suggest(str(name), choices)}")
    return name


OmegaConf.register_new_resolver("checked", checked_choice, replace=True)


def explain(
    error: HydraException | OmegaConfBaseException | yaml.YAMLError, config_name: str, overrides: list[str]
) -> str:
    """One line for what Hydra says in many."""
    if isinstance(error, yaml.YAMLError):
        return no_yaml(error)
    if raised := own_error(error):
        return str(raised)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if group == "search" and not any(override.startswith("search=") for override in overrides):
            return f"no bounds for tuning {choice}: write conf/search/{choice}.yaml"
        choices = [option for option in error.options if not option.startswith("_")]
        return f"unknown {group} '{choice}': {suggest(choice, choices)}"
    if isinstance(error, ConfigCompositionException) and (key := NO_KEY.match(str(error))):
        return unknown_key(key[1], config_name, overrides)
    if isinstance(error, ConfigCompositionException) and (values := AMBIGUOUS.match(str(error))):
        return f"{values[1]} has several values: `specbench sweep` measures each; a list is key=[a,b]"
    if isinstance(error, OverrideParseException):
        word = error.override
        name, equals, value = word.partition("=")
        if equals:
            return f"{word} cannot be read: quote the text, {name}={shlex.quote(quoted(value))}, or close its brackets"
        near = f": did you mean method={word}?" if word in choices_of("method") else ""
        return f"'{word}' is not key=value{near}"
    return f"{error} {error.__cause__ or ''}"


def own_error(error: BaseException | None) -> UserError | None:
    """What a resolver of ours raised, where Hydra or OmegaConf made another error of it; None for their own errors."""
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def unknown_key(key: str, config_name: str, overrides: list[str]) -> str:
    """One line about a key that is not in the configuration which the overrides' group choices give."""
    node = _chosen(config_name, overrides, key)
    if unknown := _unknown_part(key, node):
        return unknown
    for part in key.split("."):
        node = node[part]
    if isinstance(node, dict):  # in which a value is new
        return f"a value of '{key}' is new: add it with +{key}.NAME=VALUE"
    return f"key '{key}' does not exist for every choice of this sweep"


def _unknown_part(key: str, node: Any) -> str | None:
    """One line about the first part of a key that a configuration does not have; None where it has all."""
    for part in key.split("."):
        children = node if isinstance(node, dict) else {}
        if part not in children:
            return f"unknown key '{key}': {suggest(part, children)}"
        node = children[part]
    return None


def _chosen(config_name: str, overrides: list[str], key: str) -> Any:
    """The configuration that the overrides' group choices give, to look for a key in."""
    pairs = [override.split("=", 1) for override in overrides if "=" in override]
    choices = [
        f"{group}={value.split(',')[0]}" for group, value in pairs if is_group(group) and "(" not in value
    ]
    choices += _own_searchpath()
    return _composed_of(config_name, [one for one in choices if not one.startswith(f"{key}=")], key)


def _composed_of(config_name: str, choices: list[str], key: str) -> Any:
    """The configuration of some choices, to look for a key in; choices of groups that it does not have are left out."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        while True:
            try:
                composed = compose(config_name, choices, return_hydra_config=key.startswith("hydra."))
                return OmegaConf.to_container(composed)
            except ConfigCompositionException as error:
                group = NO_KEY.match(str(error))
                rest = [one for one in choices if group is None or not one.startswith(f"{group[1]}=")]
                if len(rest) == len(choices):
                    raise
                choices = rest


def choice(group: str, name: str, *, _parent_: DictConfig, _root_: DictConfig) -> DictConfig:
    """The file `name` of a group: in a YAML, `${choice:drafter,${.cost_of}}` is what the value of `cost_of` names.

    A drafter has its tuned settings where the run has. Interpolations in it are resolved where it then stands.

    Raises:
        UserError: the group has no such file.
    """
    checked_choice(group, name)
    tuned = OmegaConf.select(_root_, "settings") == "tuned"
    pair = tuned_on(_root_.pair_file.name, name) if tuned else None
    return OmegaConf.create(as_it_stands(group, name, pair), parent=_parent_)


OmegaConf.register_new_resolver("choice", choice, replace=True)


def as_it_stands(group: str, name: str, pair: str | None) -> dict[str, Any]:
    """What conf/ has for a method or drafter, interpolations as they stand.

    Args:
        group: "method" or "drafter".
        name: of its file.
        pair: whose tuned settings it has; None: as published.
    """
    return copy.deepcopy(_as_it_stands(group, name, pair, Path.cwd()))


@lru_cache(maxsize=256)
def _as_it_stands(group: str, name: str, pair: str | None, _working_folder: Path) -> dict[str, Any]:
    settings = ["settings=published"] if pair is None else ["settings=tuned", f"pair={pair}"]
    # Within a command its own folders are searched.
    searched = GlobalHydra.instance().is_initialized()
    with nullcontext() if searched else initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("bench", [f"{group}={name}", *settings])[group]
    return cast("dict[str, Any]", OmegaConf.to_container(composed))


def quoted(text: str) -> str:
    """A text as a value in Hydra's grammar, which takes some characters of paths only in quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _own_searchpath() -> list[str]:
    """The override that lets Hydra look in the user's own folder, too."""
    user_conf = own_conf()
    return [] if user_conf is None else [f"hydra.searchpath=[{quoted(f'file://{user_conf}')}]"]


def compose_arguments(config_name: str, overrides: list[str]) -> DictConfig:
    """What Hydra composes of `key=value` arguments, before the command runs that it is for.

    Raises:
        UserError: as `with_hydra`.
    """
    check_overrides(overrides)
    if user_conf := own_conf():
        warn_of_hidden(user_conf)
    try:
        check_added(config_name, overrides)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name, [*overrides, *_own_searchpath()])
    except NOT_COMPOSED as error:
        raise UserError(explain(error, config_name, overrides)) from error


def positional(key: str, arguments: list[str], usage: str) -> list[str]:
    """Arguments, the only one of them without `=`, or else the only file, as the value of a key.

    Raises UserError unless there is just one.
    """
    words = [argument for argument in arguments if "=" not in argument]
    words = words or [argument for argument in arguments if Path(argument).is_file()]
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"usage: {usage}")
    return [f"{key}={quoted(words[0])}", *(argument for argument in arguments if argument != words[0])]


def with_hydra(config_name: str, task: Callable[[DictConfig], object], goes_on: bool = False) -> int:
    """Gives `task` what Hydra composes from the command line; around what a task raises Hydra prints lines of its own.

    Args:
        config_name: of the configuration.
        task: what gets it.
        goes_on: whether the same command goes on where it was stopped, which is then said.

    Returns:
        0, or 130 when Ctrl-C has stopped it.

    Raises:
        UserError: the command line names what is not there or cannot be.
    """
    # The parser wants all key=value arguments in a row; `-m` may stand anywhere.
    sys.argv[1:] = overrides = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    check_overrides(overrides)
    if config_name in OF_METHODS:
        sys.argv[1:] = overrides = with_parts_added(overrides)
    if (user_conf := own_conf()) and "--config-dir" not in overrides:
        sys.argv[1:1] = ["--config-dir", str(user_conf)]
        warn_of_hidden(user_conf)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and leaving
    try:
        check_added(config_name, overrides)
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["SPECBENCH_SCRATCH"] = scratch
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)()
    except NOT_COMPOSED as error:
        raise UserError(explain(error, config_name, overrides)) from error
    except KeyboardInterrupt as stop:
        return print_stopped(str(stop) or ("the same command resumes from here" if goes_on else ""))
    return 0


def program(
    config_name: str,
    task: Callable[[DictConfig], object],
    goes_on: bool = True,
    named: tuple[str, str] | None = None,
) -> Callable[[], int]:
    """The `main` of a module: `with_hydra`, which says in one line what its user did wrong.

    Args:
        config_name: as in `with_hydra`.
        task: likewise; a number that it returns is the exit code.
        goes_on: likewise.
        named: a key whose value the command line gives without it, and the usage, as in `positional`.
    """

    @one_line_errors()
    def main() -> int:
        """Does what the command line says; returns the exit code."""
        if named is not None:
            sys.argv[1:] = positional(named[0], sys.argv[1:], named[1])
        codes = [0]

        @wraps(task)  # Hydra names the job by what is wrapped
        @one_line_errors(stops=False)
        def counted(cfg: DictConfig) -> None:
            if isinstance(code := task(cfg), int):
                codes.append(code)

        return with_hydra(config_name, counted, goes_on) or max(codes)

    return main


def _folders() -> list[Path]:
    user_conf = own_conf()
    return [CONF, user_conf] if user_conf else [CONF]
