"""A drafter around another one: what it does not do itself, the inner drafter does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any, ClassVar

from specbench.decoding.drafter import Drafter


class WrappedDrafter(Drafter):
    """Base of a drafter that wraps another one: every method of a `Drafter` is passed on to the inner drafter.

    The exception is `draft_limit`, which depends on the wrapper's own `max_draft_tokens`.

    A subclass overrides what it does itself, and calls `super()` where the inner drafter takes part. `summarise` and
    `describe` belong to classes: a run asks those of the outer and of the inner class, see `RunSpec.owners`.

    Args:
        inner: the drafter that is wrapped; see `config.spec.make_drafter`.

    Attributes:
        fixes: parameters of the inner drafter that the wrapper sets, regardless of its configuration.
        inner: as given. The other attributes of a `Drafter` are copied from it; a subclass sets those that differ.
    """

    fixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.needs = self.needs.around(inner.needs)
        self.taps, self.siblings, self.deterministic = inner.taps, inner.siblings, inner.deterministic
        self.max_draft_tokens, self.max_nodes = inner.max_draft_tokens, inner.max_nodes
        self.upkeep_bytes, self.extra_cores = inner.upkeep_bytes, inner.extra_cores


def _passed_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method that calls the inner drafter's method of that name."""

    @wraps(method)
    def passed_on(self: WrappedDrafter, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return passed_on


for _name, _method in vars(Drafter).items():
    if isfunction(_method) and _name not in ("__init__", "draft_limit"):
        setattr(WrappedDrafter, _name, _passed_on(_name, _method))
