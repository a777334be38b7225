"""The configuration of pairs and methods, read from conf/ without Hydra.

It reads what these files use: `defaults` with other files, and five kinds of `${...}`. A test compares it with what
Hydra composes.
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import replace
from typing import Any

import yaml

from specbench import CONF
from specbench.config.spec import needs_of
from specbench.decoding.drafter import Drafter
from specbench.models.pairs import Pair, load_pair
from specbench.system.settings import parameters

EMBEDDED = "tiny"


class Settings(dict):
    """A configuration: keys are attributes, too."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


def names(group: str) -> list[str]:
    """The choices of a group."""
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def read(group: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A file with those that it builds on, and the choices that it makes of other groups."""
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    merged: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for default in content.pop("defaults", []):
        if isinstance(default, dict):  # "override /vocab@_global_.vocab": trim
            ((key, value),) = default.items()
            chosen[re.sub(r"override /(\w+)@.*", r"\1", key)] = value
        elif default != "_self_":
            base, choices = read(group, default)
            merged, chosen = _merged(merged, base), chosen | choices
    return _merged(merged, content), chosen


def pair_settings(name: str, **changes: Any) -> Settings:
    """A pair's configuration with changes.

    Expanded from the embedded family (`init="expanded"`), it has that family's models and trained parts.
    """
    own = read("pair", name)[0]
    own = {key: _of_the_model(value, own) for key, value in own.items()}
    if changes.get("init") == "expanded" and not own["target"].startswith("specbench/"):
        kept = {key: own[key] for key in ("name", "target_shape", "draft_shape", "dtype")}
        own = read("pair", EMBEDDED)[0] | kept
    return Settings(own | changes, parts=Settings(own["parts"]))


def method_settings(name: str, pair: Settings, group: str = "method", **changes: Any) -> dict[str, Any]:
    """A method's or drafter's configuration for a pair, with changes."""
    own = read(group, name)[0] | changes
    return {key: _resolved(value, own, pair) for key, value in own.items()}


def trimming(name: str, pair: Settings) -> tuple[str, int | None] | None:
    """What the head of a method's drafter is trimmed to, as in `Pair`."""
    vocab = read("vocab", read("method", name)[1].get("vocab", "full"))[0]
    vocab_map = _resolved(vocab["map"], vocab, pair)
    return None if vocab_map is None else (vocab_map, vocab["size"])


class Loaded:
    """A pair whose target is loaded once for all methods.

    Args:
        cfg: its configuration.
        seed: of random weights.
    """

    def __init__(self, cfg: Settings, seed: int = 0):
        self.cfg, self.seed = cfg, seed
        self.pair = self._load(cfg, with_draft=cfg.draft is not None)
        self._parts: dict[str, Pair] = {}

    def drafter(self, name: str, **changes: Any) -> Drafter:
        """The drafter of a method, with changes of its configuration."""
        group = method_settings(name, self.cfg, **changes)
        needs = needs_of(group)
        pair = replace(self.pair, trimmed=trimming(name, self.cfg))
        if needs.draft_model and needs.part is not None:  # a trained part is the draft model
            own = self._part(self.cfg.parts[needs.part])
            pair = replace(pair, draft=own.target, draft_expansion=own.expansion)
        return pkgutil.resolve_name(group["_target_"])(pair=pair, **parameters(group))

    def _part(self, folder: str) -> Pair:
        """A draft model, loaded as if it were a target."""
        if folder not in self._parts:
            shape = self.cfg.draft_shape and {**self.cfg.draft_shape, "num_hidden_layers": None}
            own = {"target": folder, "target_shape": shape, "width": self.cfg.draft_width}
            expands = self.cfg.init == "expanded" and (shape or self.cfg.draft_width)
            init = "expanded" if expands else "pretrained"
            self._parts[folder] = self._load(Settings(self.cfg | own, init=init), with_draft=False)
        return self._parts[folder]

    def _load(self, cfg: Settings, with_draft: bool) -> Pair:
        return load_pair(cfg, self.seed, with_draft)  # type: ignore[arg-type] # it has all keys


def _merged(first: dict, second: dict) -> dict:
    both = dict(first)
    for key, value in second.items():
        deeper = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = _merged(both[key], value) if deeper else value
    return both


def _of_the_model(value: Any, own: dict) -> Any:
    """A setting of a pair that belongs to one model, without `${only_of:...}`."""
    one = re.fullmatch(r"\$\{only_of:\$\{\.(\w+)\},([^,]+),([^,]+)\}", str(value))
    if one is None:
        return value
    return yaml.safe_load(one[3]) if own[one[1]] == one[2] else None


def _resolved(value: Any, own: dict, pair: Settings) -> Any:
    """A value without `${...}`, also in what it holds."""
    if isinstance(value, dict):
        return {key: _resolved(item, value, pair) for key, item in value.items()}
    if not (isinstance(value, str) and value.startswith("${")):
        return value
    if part := re.fullmatch(r"\$\{oc\.select:pair\.parts\.(\w+),null\}", value):
        return pair.parts.get(part[1])
    if choice := re.fullmatch(r"\$\{choice:(\w+),\$\{\.(\w+)\}\}", value):
        name = own[choice[2]]
        return method_settings(name, pair, choice[1] if name == "none" else "method")
    raise ValueError(f"cannot read {value}")
