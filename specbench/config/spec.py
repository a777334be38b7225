"""What a run is, whichever of its two spellings the configuration has: `method=sps`, or `method=ragged drafter=sps`."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.system import settings as values
from specbench.system.settings import LEARNS, WRAPPED

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class RunSpec:
    """A drafter, and a scheduler where sequences are decoded together.

    Attributes:
        drafter: configuration of what drafts.
        scheduler: of what chooses the sequences of a round; None: one sequence at a time.
        batch_size: sequences of a round; None without a scheduler.
    """

    drafter: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None = None
    batch_size: int | None = None

    @classmethod
    def of(cls, config: Mapping, batched: bool | None = None) -> RunSpec:
        """The run of a configuration.

        Args:
            config: as it is composed.
            batched: whether its method is a scheduler; None: the class tells, which imports it.
        """
        if batched is None:
            from specbench.decoding.scheduler import Scheduler  # late: reading a run folder needs no torch

            batched = issubclass(pkgutil.resolve_name(config["method"]["_target_"]), Scheduler)
        if not batched:
            return cls(config["method"])
        return cls(config["drafter"], config["method"], config["batch_size"])

    @property
    def what(self) -> str:
        """What the configuration calls the drafter: "method" or "drafter"."""
        return "method" if self.scheduler is None else "drafter"

    @property
    def unit(self) -> str:
        """What has times of its own: a "question", or a "pool" of them."""
        return "question" if self.scheduler is None else "pool"

    @property
    def settings(self) -> dict[str, Any]:
        """What a user sets of the method, and of a scheduler's drafter as `drafter.NAME`."""
        if self.scheduler is None:
            return values.settings(self.drafter)
        of_drafter = values.settings(self.drafter)
        return values.settings(self.scheduler) | {f"drafter.{name}": of_drafter[name] for name in of_drafter}

    @property
    def learns(self) -> bool:
        """Whether state of the drafter, or of one that it wraps, outlives an answer."""
        name, value = LEARNS
        return any(group.get(name) == value for group in (self.drafter, self.drafter.get(WRAPPED) or {}))

    @property
    def owners(self) -> list[type]:
        """The classes that have numbers of their own: of the scheduler, the drafter, and one that it wraps.

        Those that this installation does not have, such as a user's own in a folder from elsewhere, are left out: the
        run can still be read, without numbers of their own.
        """
        groups = [group for group in (self.scheduler, self.drafter) if group is not None]
        found = []
        for group in [*groups, *(group[WRAPPED] for group in groups if group.get(WRAPPED))]:
            try:
                found.append(pkgutil.resolve_name(group["_target_"]))
            except (ImportError, AttributeError):
                continue
        return found
