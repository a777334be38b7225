"""The YAMLs of this project and the user's own, as they stand in the folders `conf`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from specbench import CONF
from specbench.system.errors import UserError, warn


def own_conf() -> Path | None:
    """The folder `conf` of the working directory, for YAMLs of a user of the package; None if there is none."""
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder != CONF else None


def conf_folders() -> list[Path]:
    """The folders `conf`: this project's, and the user's own if there is one."""
    user_conf = own_conf()
    return [CONF, user_conf] if user_conf else [CONF]


@lru_cache(maxsize=16)  # once for all jobs of a command
def warn_of_hidden(user_conf: Path) -> None:
    """Warns of the user's YAMLs that are not read because `CONF` has different ones of the same names."""
    names = [path.relative_to(user_conf) for path in sorted(user_conf.rglob("*.yaml"))]
    for name in names:
        ours = CONF / name
        if ours.is_file() and ours.read_bytes() != (user_conf / name).read_bytes():
            warn(f"conf/{name} is not read: specbench brings a file of that name, so give yours another one")


def is_group(key: str) -> bool:
    """Whether `key` names a group of the configuration, such as method."""
    return any((folder / key).is_dir() for folder in conf_folders())


def choices_of(group: str) -> list[str]:
    """The names of the choices of a configuration group.

    A drafter has the name of its method; a method that overrides another group, as schedulers do, is no drafter.
    """
    files = [path for folder in conf_folders() for path in (folder / group).glob("*.yaml")]
    if group == "drafter":
        methods = [path for folder in conf_folders() for path in (folder / "method").glob("*.yaml")]
        files += [path for path in methods if "override /" not in path.read_text(encoding="utf-8")]
    names = dict.fromkeys(path.stem for path in files)  # a user's folder may have some of the same names
    return [name for name in names if not name.startswith("_")]


def group_file(group: str, name: str) -> dict[str, Any]:
    """The content of a group's YAML, without the files that it builds on; {} if there is none.

    Raises UserError for a file that is no YAML.
    """
    paths = (folder / group / f"{name}.yaml" for folder in conf_folders())
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return {}
    try:
        with path.open("rb") as file:  # errors then name it
            return yaml.safe_load(file) or {}
    except yaml.YAMLError as error:
        raise UserError(no_yaml(error)) from error


def no_yaml(error: yaml.YAMLError) -> str:
    """Describes a YAML error, with file and line."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    return str(error)


def base_pair() -> dict[str, Any]:
    """The keys that every pair has; `parts` lists the parts of this project's methods."""
    return group_file("pair", "_base")
