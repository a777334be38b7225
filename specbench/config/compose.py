"""Composes the configuration of a command line with Hydra.

Every command that accepts `key=value` uses `with_hydra`: `specbench run`, `tune`, the trainers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from specbench import CONF
from specbench.config import resolvers  # noqa: F401 - registers them
from specbench.config.folders import own_conf, warn_of_hidden
from specbench.config.overrides import (
    NOT_COMPOSED,
    check_added,
    check_overrides,
    explain,
    own_searchpath,
    quoted,
    with_parts_added,
)
from specbench.system.errors import UserError, file_errors, one_line_errors, print_stopped

# Configurations with a method, whose `check` refuses parts that nothing reads.
OF_METHODS = ("bench", "tune", "serve", "export_part")

if TYPE_CHECKING:
    from omegaconf import DictConfig


def compose_arguments(config_name: str, overrides: list[str]) -> DictConfig:
    """Composes the configuration of `key=value` arguments before their command runs.

    Raises:
        UserError: as `with_hydra`.
    """
    check_overrides(overrides)
    if user_conf := own_conf():
        warn_of_hidden(user_conf)
    try:
        check_added(config_name, overrides)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name, [*overrides, *own_searchpath()])
    except NOT_COMPOSED as error:
        raise UserError(explain(error, config_name, overrides)) from error


def positional(key: str, arguments: list[str], usage: str) -> list[str]:
    """Turns the only argument without `=`, or else the only file, into the value of a key; returns all arguments.

    Raises UserError unless there is exactly one.
    """
    words = [argument for argument in arguments if "=" not in argument]
    words = words or [argument for argument in arguments if Path(argument).is_file()]
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"usage: {usage}")
    return [f"{key}={quoted(words[0])}", *(argument for argument in arguments if argument != words[0])]


def with_hydra(config_name: str, task: Callable[[DictConfig], object], resumes: bool = False) -> int:
    """Calls `task` with the configuration of the command line; Hydra prints lines of its own around a task's errors.

    Args:
        config_name: name of the configuration.
        task: the function to call.
        resumes: whether the same command resumes where it was stopped; the message on Ctrl-C then mentions it.

    Returns:
        0, or 130 when Ctrl-C has stopped it.

    Raises:
        UserError: the command line names something unknown or impossible.
    """
    # The parser requires all key=value arguments in a row; the user may write `-m` anywhere.
    sys.argv[1:] = overrides = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    check_overrides(overrides)
    if config_name in OF_METHODS:
        sys.argv[1:] = overrides = with_parts_added(overrides)
    if (user_conf := own_conf()) and "--config-dir" not in overrides:
        sys.argv[1:1] = ["--config-dir", str(user_conf)]
        warn_of_hidden(user_conf)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and exiting
    try:
        check_added(config_name, overrides)
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["SPECBENCH_SCRATCH"] = scratch
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)()
    except NOT_COMPOSED as error:
        raise UserError(explain(error, config_name, overrides)) from error
    except KeyboardInterrupt as stop:
        return print_stopped(str(stop) or ("the same command resumes from here" if resumes else ""))
    return 0


def program(
    config_name: str,
    task: Callable[[DictConfig], object],
    resumes: bool = True,
    named: tuple[str, str] | None = None,
) -> Callable[[], int]:
    """Makes the `main` of a module: `with_hydra`, with each user error as one line.

    Args:
        config_name: as in `with_hydra`.
        task: likewise; a number that it returns is the exit code.
        resumes: likewise.
        named: a key whose value is given without `key=`, and the usage, as in `positional`.
    """

    @one_line_errors()
    def main() -> int:
        """Does what the command line says; returns the exit code."""
        if named is not None:
            sys.argv[1:] = positional(named[0], sys.argv[1:], named[1])
        codes = [0]

        @wraps(task)  # Hydra names the job after the wrapped function
        @one_line_errors(stops=False)
        @file_errors()
        def counted(cfg: DictConfig) -> None:
            if isinstance(code := task(cfg), int):
                codes.append(code)

        return with_hydra(config_name, counted, resumes) or max(codes)

    return main


def words_of_pair(name: str) -> list[str]:
    """The words of the command line that choose the pair, with `pair=NAME` if none names it."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    words = [word for word in overrides if word.lstrip("+").startswith("pair")]
    return words if any(word.startswith("pair=") for word in words) else [f"pair={name}", *words]
