"""The resolvers of OmegaConf that conf/ uses, and the tuned settings that they look up; importing it registers them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from specbench import CONF
from specbench.config.folders import choices_of, conf_folders, group_file
from specbench.models.expansion import EMBEDDED, layer_at
from specbench.system.errors import UserError, suggest

Resolver = TypeVar("Resolver", bound="Callable[..., Any]")


def resolver(name: str) -> Callable[[Resolver], Resolver]:
    """Registers a function as `${name:...}`."""

    def register(function: Resolver) -> Resolver:
        OmegaConf.register_new_resolver(name, function, replace=True)
        return function

    return register


@resolver("expanded_layers")
def expanded_layers(count: int, old: int, *, _root_: DictConfig) -> int:
    """`${expanded_layers:5,24}`: 5 of the 24 layers of a target, or their equivalent if it is expanded."""
    pair = _root_.pair
    if pair.init != "expanded" or pair.target_shape is None:
        return count
    return layer_at(count, old, pair.target_shape.num_hidden_layers)


@resolver("drafter_setting")
def drafter_setting(key: str, default: Any, *, _root_: DictConfig) -> Any:
    """`${drafter_setting:max_draft_tokens,5}`: the value of the run's drafter, in a batch, too; or the default."""
    for group in ("drafter", "method"):
        if (value := OmegaConf.select(_root_, f"{group}.{key}")) is not None:
            return value
    return default


@resolver("benchmark")
def benchmark_of(pair: str) -> str:
    """`- data: ${benchmark:${pair}}` in a defaults list: the questions that parts made for a pair must not know.

    They are those of the embedded family for its pairs, and Spec-Bench's for all others.
    """
    return EMBEDDED if EMBEDDED in _lineage(pair) else "spec_bench"


@resolver("model_name")
def model_name(path: str | None, default: str) -> str:
    """`${model_name:${.target},local}`: the last part of a model's name, for tables; the default without one."""
    return default if path is None else re.sub(r"[^\w.-]+", "-", Path(path.removesuffix(".gguf")).name)


@resolver("only_of")
def only_of(model: str | None, usual: str, value: Any) -> Any:
    """`${only_of:${.draft},MODEL,2}`: a setting that belongs to a pair's own model; null if another one is named."""
    return value if model == usual else None


@resolver("checked")
def checked_choice(group: str, name: str) -> str:
    """Returns the name. Raises UserError if the group has no such choice.

    `- optional method@drafter: ${checked:drafter,...}` in a defaults list gives a drafter the file of a method.
    """
    choices = choices_of(group)
    if name not in choices:
        raise UserError(f"unknown {group} '{name}': {suggest(str(name), choices)}")
    return name


@resolver("choice")
def choice(group: str, name: str, *, _parent_: DictConfig, _root_: DictConfig) -> DictConfig:
    """The file `name` of a group: in a YAML, `${choice:drafter,${.cost_of}}` is the file that `cost_of` names.

    A drafter has its tuned settings if the run has. Interpolations are resolved at the place of insertion.

    Raises:
        UserError: the group has no such file.
    """
    checked_choice(group, name)
    tuned = OmegaConf.select(_root_, "settings") == "tuned"
    pair = tuned_on(_root_.pair_file.name, name) if tuned else None
    return OmegaConf.create(as_it_stands(group, name, pair), parent=_parent_)


def as_it_stands(group: str, name: str, pair: str | None) -> dict[str, Any]:
    """The configuration of a method or drafter in conf/, with interpolations unresolved.

    Args:
        group: "method" or "drafter".
        name: of its file.
        pair: whose tuned settings to use; None for the published ones.
    """
    return copy.deepcopy(_as_it_stands(group, name, pair, Path.cwd()))


@lru_cache(maxsize=256)
def _as_it_stands(group: str, name: str, pair: str | None, _working_folder: Path) -> dict[str, Any]:
    settings = ["settings=published"] if pair is None else ["settings=tuned", f"pair={pair}"]
    # Within a command, Hydra is initialised and searches the command's folders.
    searched = GlobalHydra.instance().is_initialized()
    with nullcontext() if searched else initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("bench", [f"{group}={name}", *settings])[group]
    return cast("dict[str, Any]", OmegaConf.to_container(composed))


# -- tuned settings: conf/tuned/PAIR/METHOD.yaml


def tuned_on(pair: str, method: str) -> str | None:
    """The pair whose tuned settings apply to a method or drafter on `pair`; None if there are none.

    It is the pair itself, or the nearest one that its YAML builds on: `tiny_wide` uses those of `tiny`.
    """
    for name in _lineage(pair):
        if any((folder / "tuned" / name / f"{method}.yaml").is_file() for folder in conf_folders()):
            return name
    return None


def _lineage(pair: str) -> Iterator[str]:
    """Yields a pair and the pairs that its YAML builds on, nearest first."""
    names = [pair]
    for name in names:  # which grows
        yield name
        bases = group_file("pair", name).get("defaults", [])
        names += [base for base in bases if isinstance(base, str) and base != "_self_"]


@resolver("tuned")
def tuned_choice(group: str, *, _root_: DictConfig) -> str:
    """`- optional tuned@method: ${tuned:method}` in a defaults list: the file of tuned settings in conf/tuned/.

    If there is none, or with `settings=published`, it names a file that does not exist, which `optional` skips.

    Args:
        group: "method" or "drafter".
        _root_: the choices of all groups.
    """
    pair, chosen, settings = (_root_.get(key) for key in ("pair", group, "settings"))
    tuned_pair = tuned_on(pair, chosen) if settings == "tuned" and pair and chosen else None
    return f"{tuned_pair}/{chosen}" if tuned_pair else "none"


@resolver("tuned_vocab")
def tuned_vocab(usual: str, *, _root_: DictConfig) -> str:
    """`- vocab: ${tuned_vocab:full}` in a defaults list: the choice of the drafter's tuned settings, or `usual`.

    Only this project's own engine supports a trimmed head.
    """
    if _root_.get("engine") != "own":
        return usual
    files = [group_file("tuned", tuned_choice(group, _root_=_root_)) for group in ("drafter", "method")]
    return next((file["vocab"] for file in files if "vocab" in file), usual)
