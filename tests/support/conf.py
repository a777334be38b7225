"""Configurations composed from conf/, quickly: Hydra composes each choice of groups once."""

from __future__ import annotations

import copy
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from specbench.compose import CONF


@cache
def _of_groups(name: str, overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def composed(name: str, *overrides: str) -> DictConfig:
    """What Hydra composes for an entry point.

    Plain values ("a.b=1") are parsed by Hydra and set afterwards, which is what Hydra itself does with them; whatever
    chooses a group, adds or removes goes through Hydra.
    """
    values = [given for given in overrides if _is_value(given)]
    cfg = copy.deepcopy(_of_groups(name, tuple(given for given in overrides if given not in values)))
    for value in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(cfg, value.key_or_group, value.value())
    return cfg


def _is_value(override: str) -> bool:
    key = override.partition("=")[0]
    return key[0].isalpha() and not (CONF / key.replace(".", "/")).is_dir() and "/" not in key
