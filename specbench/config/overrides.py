"""Checks of `key=value` arguments that Hydra would misread, and one-line messages for those it cannot compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench import CONF
from specbench.config import resolvers  # noqa: F401 - registers them
from specbench.config.folders import (
    base_pair,
    choices_of,
    conf_folders,
    group_file,
    is_group,
    no_yaml,
    own_conf,
)
from specbench.system.errors import UserError, suggest

NO_KEY = re.compile(r"Could not override '([\w.]+)'")  # as in Hydra's message
PART = re.compile(r"\bpair\.parts\.(\w+)")  # as a YAML refers to one
AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*)'")  # as in Hydra's message
# Groups in which keys may be new: their readers check the keys, or accept any.
OPEN = ("method", "drafter", "pair", "engine", "tracker", "search", "parts", "kinds", "task.tasks")
PRESET = "experiment"  # the group of presets
NOT_COMPOSED = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def overridden_key(override: str) -> str:
    """The key that an override of the command line sets."""
    return override.lstrip("+").partition("=")[0]


def check_overrides(arguments: list[str]) -> None:
    """Checks the command line for arguments that Hydra would silently ignore or misread.

    Raises:
        UserError: A group is chosen twice, or as a list (Hydra would use the last choice); a choice is no name, such as
            null; there are several presets (Hydra would read none of their sweeps); a launcher is chosen without a
            sweep, or a run folder with one; a pair has no such key.
    """
    overrides: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if key == "drafter" and "glob(" in value:  # Hydra would look into conf/drafter/ alone
            raise UserError("drafter takes names, not glob(...)")
        if equals and key in overrides and is_group(key):
            raise UserError(f"{key} is given twice: {overrides[key]} and {value}")
        if is_group(key):
            check_choice(key, value)
        overrides[key] = value
        group, _, inside = key.partition(".")
        if equals and group == "pair" and inside:
            check_pair_keys({inside.partition(".")[0]: None})
    sweep = {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments)
    launcher = [key for key in overrides if re.match(r"hydra[./]launcher\b", key)]
    if launcher and not sweep:
        raise UserError(f"{launcher[0]} needs a sweep: use specbench sweep")
    run_dir = overrides.get("run_dir", "null")
    if sweep and run_dir != "null":
        check_no_run_dir(run_dir, "job of a sweep")


def check_choice(group: str, value: str) -> None:
    """Raises UserError for a choice of a group that Hydra would misread; its text is as on the command line."""
    if value.startswith("["):
        raise UserError(f"{group} takes a name, not a list: `specbench sweep {group}=A,B` measures each")
    if group == PRESET and re.search(r",|\bglob\(|\bchoice\(", value):
        raise UserError(f"{value}: a preset is a sweep of its own, so give each in a command of its own")
    for choice in value.split(","):
        # Hydra requires text, and its message names no key.
        if re.fullmatch(r"null|true|false|[\d.+-]*", choice, re.IGNORECASE):
            raise UserError(f"unknown {group} '{choice}': {suggest(choice, choices_of(group))}")


def check_no_run_dir(run_dir: str | None, part: str) -> None:
    """Raises UserError for a `run_dir` where each part of a command has one: a job of a sweep, a trial."""
    if run_dir is not None:
        raise UserError(
            f"run_dir={run_dir} is the folder of one run, and each {part} has its own: set runs_root instead"
        )


def check_added(config_name: str, overrides: list[str]) -> None:
    """Raises UserError for a key added with `+` that nothing reads; Hydra would accept it."""
    for override in overrides:
        key = overridden_key(override)
        if not override.startswith("+") or is_group(key) or re.search(r"^hydra\b|[/@]", key):
            continue
        # In a group whose keys may be new, only the group is checked.
        key = next((name for name in OPEN if key.startswith(f"{name}.")), key)
        # The user's own data may lack keys that the usual ones have.
        if _unknown_part(key, _composed_of(config_name, [], key)):
            unknown = _unknown_part(key, _chosen(config_name, overrides, key))
            if unknown is not None:
                raise UserError(unknown)


def check_pair_keys(pair: Mapping[str, Any], part: str | None = None) -> None:
    """Checks for keys that nothing reads, which a user may have added.

    Args:
        pair: all of its configuration, or some keys of it.
        part: the one that the drafter reads; it need not be in a YAML.

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
    """The arguments, with `++` before a part that no pair lists, such as that of a user's own method."""
    listed = base_pair()["parts"]
    return [
        f"++{override}" if (part := PART.match(override)) and part[1] not in listed else override
        for override in overrides
    ]


def _parts_of_yamls() -> set[str]:
    """The parts that YAMLs of pairs list, or that YAMLs of methods and vocabularies refer to."""
    names: set[str] = set()
    for folder in conf_folders():
        for path in (folder / "pair").glob("*.yaml"):
            names |= (group_file("pair", path.stem).get("parts") or {}).keys()
        for path in (*(folder / "method").glob("*.yaml"), *(folder / "vocab").glob("*.yaml")):
            names |= set(PART.findall(path.read_text(encoding="utf-8")))
    return names


def explain(
    error: HydraException | OmegaConfBaseException | yaml.YAMLError, config_name: str, overrides: list[str]
) -> str:
    """Condenses an error of Hydra's into one line."""
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
        list_of = "" if is_group(overridden_key(values[1])) else "; a list is key=[a,b]"
        return f"{values[1]} has several values: `specbench sweep` measures each{list_of}"
    if isinstance(error, OverrideParseException):
        word = error.override
        name, equals, value = word.partition("=")
        if equals and value.startswith("~"):
            return f"{word} cannot be read: write {name}=$HOME{value[1:]}"
        if equals:
            return f"{word} cannot be read: quote the text, {name}={shlex.quote(quoted(value))}, or close its brackets"
        near = f": did you mean method={word}?" if word in choices_of("method") else ""
        return f"'{word}' is not key=value{near}"
    return f"{error} {error.__cause__ or ''}"


def own_error(error: BaseException | None) -> UserError | None:
    """The UserError of our own resolver that Hydra or OmegaConf has wrapped; None for their own errors."""
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def unknown_key(key: str, config_name: str, overrides: list[str]) -> str:
    """One line about a key that is missing in the configuration of the overrides' group choices."""
    node = _chosen(config_name, overrides, key)
    if unknown := _unknown_part(key, node):
        return unknown
    for part in key.split("."):
        node = node[part]
    if isinstance(node, dict):  # in which a value is new
        return f"a value of '{key}' is new: add it with +{key}.NAME=VALUE"
    return f"key '{key}' does not exist for every choice of this sweep"


def _unknown_part(key: str, node: Any) -> str | None:
    """One line about the first part of a key that a configuration does not have; None if it has all."""
    for part in key.split("."):
        children = node if isinstance(node, dict) else {}
        if part not in children:
            return f"unknown key '{key}': {suggest(part, children)}"
        node = children[part]
    return None


def _chosen(config_name: str, overrides: list[str], key: str) -> Any:
    """The configuration of the overrides' group choices only, to look up a key in."""
    pairs = [override.split("=", 1) for override in overrides if "=" in override]
    choices = [
        f"{group}={value.split(',')[0]}" for group, value in pairs if is_group(group) and "(" not in value
    ]
    choices += own_searchpath()
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


def quoted(text: str) -> str:
    """Quotes a text for Hydra's grammar, which accepts some characters of paths only in quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def own_searchpath() -> list[str]:
    """The override that lets Hydra look in the user's own folder, too."""
    user_conf = own_conf()
    return [] if user_conf is None else [f"hydra.searchpath=[{quoted(f'file://{user_conf}')}]"]
