"""Numbers that a method keeps of its rounds (`Draft.stats`, `Scheduler.stats`), summarised by the method itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd


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
