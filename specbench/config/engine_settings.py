"""Which settings of a method another engine reads."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.config.folders import group_file
from specbench.config.resolvers import tuned_on
from specbench.config.tuned import TUNED
from specbench.system.errors import UserError
from specbench.system.settings import settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.config.spec import RunSpec

READ = re.compile(r"\$\{(?:drafter_setting:|drafter\.|method\.)(\w+)")  # a setting of the method, in a preset


def check_read(cfg: DictConfig, spec: RunSpec, speculative: Mapping[str, Any]) -> None:
    """Refuses settings that another engine does not read: all runs of a sweep over one would be the same.

    Args:
        cfg: of the run.
        spec: the run, of another engine.
        speculative: how the engine drafts, by method, unresolved: with references to settings of the method.

    Raises:
        UserError: Such a setting differs from its usual value.
    """
    assert spec.engine is not None
    engine, method = spec.engine["name"], spec.drafter["name"]
    preset = speculative.get(method)
    for group, chosen in spec.groups.items():
        drafts = chosen is spec.drafter
        if drafts and spec.is_own_code:  # which reads all of them
            continue
        read = sorted(set(READ.findall(str(preset)))) if drafts else []
        if unread := [key for key in _changed(cfg, chosen) if key not in read]:
            raise UserError(
                f"engine {engine} does not read {group}.{unread[0]}: of {chosen['name']} it reads "
                f"{', '.join(read) or 'no setting'}; set engine.speculative.{method}, under the engine's own names"
            )


def _changed(cfg: DictConfig, group: Mapping[str, Any]) -> list[str]:
    """Settings of a method that differ from the published ones (in a tuned run: the tuned ones); not the pair's."""
    name, takes = group["name"], inspect.signature(pkgutil.resolve_name(group["_target_"])).parameters
    usual = {key: parameter.default for key, parameter in takes.items()} | group_file("method", name)
    if cfg.get("settings") == TUNED:
        usual |= group_file(f"tuned/{tuned_on(cfg.pair_file.name, name)}", name)
    brought = {key for key, value in usual.items() if value is inspect.Parameter.empty or "${" in str(value)}
    return [key for key, value in settings(group).items() if key not in brought and value != usual[key]]
