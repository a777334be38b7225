"""Types of settings: a signature or a table names them as data, and values are checked before a weight is loaded.

omegaconf is imported where a configuration of Hydra's is at hand: models are decoded without either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from specbench.system.errors import UserError, suggest

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both included unless `above` leaves out the lower one."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"equal to {self.low}"
        if self.high < math.inf:
            return f"above {self.low}, up to {self.high}" if self.above else f"from {self.low} to {self.high}"
        return f"above {self.low}" if self.above else f"of at least {self.low}"


Count = Annotated[int, Range(1)]
Threads = Annotated[int, Range(1, 1024)]  # more than a machine has cores; torch crashes with very many
DraftLength = Annotated[int, Range(1, 10_000)]  # or nodes of a tree
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1)]
TopP = Annotated[float, Range(0, 1, above=True)]
# 0 is greedy; logits divided by less than the lowest temperature for sampling can overflow: no distribution is left.
Temperature = Annotated[float, Range(0, 0)] | Annotated[float, Range(1e-6)]
Seed = Annotated[
    int, Range(0, 2**63 - 1)
]  # torch takes less than 2**64, and the draft model's seed is one higher

NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    list: "a list",
    dict: "a dictionary",
}

# Keys of a group that are no parameters of the method or drafter: names, and defaults of keys at the top.
NO_PARAMETERS = ("name", "_target_", "batch_size", "repeats", "vocab")
TRIMMING = ("vocab_map", "vocab_size")  # names of the two parts of `Pair.trimmed` in summaries
WRAPPED = "drafter"  # of a wrapper: the configuration of the wrapped drafter
# decoding.verification: how drafts are verified. The last one is lossy: a control that the certificate must find.
TOKEN, BLOCK, TYPICAL = "token", "block", "typical"
CONSTANT, ADAPTIVE, GOODPUT = "constant", "adaptive", "goodput"  # decoding.draft_length
# Share of the time with fewer threads that more threads must stay below: their gain on a quiet machine is lost several
# times over on a busy one.
WORTH = 0.9
# The setting of a drafter that learns, and its value if the memory outlives an answer.
MEMORY, LASTING = "memory", "run"


def parameters(group: Mapping) -> dict:
    """The constructor parameters in the configuration of a method or drafter."""
    return {key: value for key, value in group.items() if key not in NO_PARAMETERS}


def settings(group: Mapping) -> dict:
    """The parameters that a user sets: without the configuration of a wrapped drafter."""
    return {key: value for key, value in group.items() if key not in (*NO_PARAMETERS, WRAPPED)}


def check(name: str, value: object, kind: Any) -> None:
    """Checks a setting against the type that it should have.

    Args:
        name: The key as the user writes it, such as "method.max_draft_tokens".
        value: The value.
        kind: int, float, bool, str, list[...], dict[str, ...], a Literal, a union of these or with None, or an
            Annotated number with a `Range`. A float may be written as a whole number, but is finite; a bool is no
            number. A value of any other type passes.

    Raises:
        UserError: The value is not of that type.
    """
    from omegaconf import OmegaConf

    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if _fits(value, kind):
        return
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    if literals:
        raise UserError(f"unknown {name} '{value}': {suggest(str(value), get_args(literals[0]))}")
    raise UserError(f"{name} must be {_describe(kind)}, not {'null' if value is None else repr(value)}")


def check_all(cfg: DictConfig, kinds: Mapping[str, Any]) -> None:
    """Checks settings of a configuration, each named by its dotted key, as `check` does; a missing one is null."""
    from omegaconf import OmegaConf

    for key, kind in kinds.items():
        check(key, OmegaConf.select(cfg, key), kind)


def check_truncation(decoding: Mapping, prefix: str = "") -> None:
    """Raises UserError if greedy decoding is given top_k or top_p; `prefix` stands before the names of its settings."""
    if decoding["temperature"] == 0 and (decoding["top_k"] > 0 or decoding["top_p"] < 1):
        raise UserError(
            f"{prefix}top_k and {prefix}top_p are for sampled answers: set {prefix}temperature above 0"
        )


def plain(cfg: Mapping) -> dict[str, Any]:
    """A configuration as a plain dictionary, its interpolations resolved; of one that is a dictionary, a copy."""
    if isinstance(cfg, dict):
        return dict(cfg)
    from omegaconf import OmegaConf

    return cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))


def flat(values: Mapping[Any, Any], separator: str = ".", lists: bool = False) -> dict[str, Any]:
    """Nested settings by the names that lead to them, joined; with `lists` also the items of lists, by their index.

    An empty list is a value of its own.
    """
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if lists and value and isinstance(value, list) else value
        if isinstance(inner, dict):
            leaves = flat(inner, separator, lists)
            flattened |= {f"{key}{separator}{name}": leaf for name, leaf in leaves.items()}
        else:
            flattened[str(key)] = value
    return flattened


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fits(value, arguments[0]) and all(value in bound for bound in arguments[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind if kind in NAMES else True  # other types are checked by the method


def _describe(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([_describe(arguments[0]), *map(str, arguments[1:])])
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, arguments))
    if origin is list:
        return f"a list, each item {_describe(arguments[0])}"
    if origin is dict:
        return f"a dictionary, each value {_describe(arguments[1])}"
    return NAMES.get(kind, str(kind))
