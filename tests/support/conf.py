"""What lies in conf/: the names of a group, single files, and configurations that are composed of them, quickly.

Tests that walk a group take its names from here, and what they must know of a choice from what it declares.
"""

from __future__ import annotations

import copy
import pkgutil
import re
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from specbench.config.compose import CONF
from specbench.config.folders import choices_of
from specbench.config.spec import needs_of
from specbench.decoding.drafter import Drafter
from specbench.decoding.scheduler import Scheduler


def names(group: str) -> list[str]:
    """The choices of a group."""
    return sorted(choices_of(group))


def drafters() -> list[str]:
    """The drafters that serve schedulers."""
    return [name for name in names("drafter") if name == "none" or batches(name)]


def batches(method: str) -> bool:
    """Whether schedulers take a method as drafter."""
    return method in names("drafter") and not is_scheduler(method) and _class_of(method).needs.batching


@cache
def file_of(group: str, name: str) -> DictConfig:
    """A file of a group, merged with the files that it builds on; nothing in it is resolved."""
    own = OmegaConf.load(CONF / group / f"{name}.yaml")
    defaults = own.pop("defaults", [])  # with the choices that it makes of other groups
    bases = [file_of(group, base) for base in defaults if isinstance(base, str) and base != "_self_"]
    return OmegaConf.merge(*bases, own)


def is_hub_id(model: str) -> bool:
    """Whether a pair names a model of the hub, not a folder."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) is not None


def is_scheduler(method: str) -> bool:
    """Whether a method is a scheduler, for which `drafter` chooses what drafts."""
    return issubclass(_class_of(method), Scheduler)


def drafts(method: str) -> bool:
    """Whether a method drafts at all, which the baseline, alone and in batches, does not."""
    if is_scheduler(method):
        return composed("bench", f"method={method}").drafter.name != "none"
    return _class_of(method).draft is not Drafter.draft


def inline(method: str) -> list[str]:
    """The settings with which a method works in this thread alone."""
    return ["method.placement=inline"] * ("placement" in file_of("method", method))


def lacks_part(method: str, pair: str) -> bool:
    """Whether a pair comes without the trained weights that a method needs."""
    part = None if is_scheduler(method) else needs_of(composed("bench", f"method={method}").method).part
    return part is not None and file_of("pair", pair).parts.get(part) is None


def _class_of(method: str) -> type:
    return pkgutil.resolve_name(file_of("method", method)["_target_"])


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
    for value in map(_parsed, values):
        OmegaConf.update(cfg, value.key_or_group, value.value())
    return cfg


@cache
def _parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


def _is_value(override: str) -> bool:
    key = override.partition("=")[0]
    return key[0].isalpha() and not (CONF / key.replace(".", "/")).is_dir() and "/" not in key
