"""Numbers that a method keeps of its rounds (`Draft.stats`, `Scheduler.stats`), summarised by the method itself."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from specbench.system.settings import WRAPPED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd


def classes(config: Mapping, batched: bool) -> list[type]:
    """The classes of a run's method, in batches of its drafter, and of the drafter that one of them wraps.

    Those that this installation does not have, such as a user's own in a folder from elsewhere, are left out: the run
    can still be read, without numbers of their own.
    """
    groups = [config[key] for key in (("method", "drafter") if batched else ("method",))]
    found = []
    for group in [*groups, *(group[WRAPPED] for group in groups if group.get(WRAPPED))]:
        try:
            found.append(pkgutil.resolve_name(group["_target_"]))
        except (ImportError, AttributeError):
            continue
    return found


def of_method(owners: Sequence[type], rounds: pd.DataFrame) -> dict[str, Any]:
    """The numbers of all owners, by name.

    Args:
        owners: classes of drafters and schedulers.
        rounds: rows of `dataframes.steps_frame` of one arm.
    """
    return {name: value for owner in owners for name, value in owner.summarise(rounds).items()}  # type: ignore[attr-defined] # of both


def describe(owners: Sequence[type], stats: dict[str, Any]) -> list[str]:
    """Lines about such numbers, for the foot of a run's table."""
    return [line for owner in owners for line in owner.describe(stats)]  # type: ignore[attr-defined] # as above
