"""Passes over all questions: how many a run makes, in which process each, and when the figure is sharp enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_FOR_PRECISION = 3  # passes, for an interval over them to be meaningful


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run; the remaining work follows from its journal alone, so that a killed run resumes.

    Attributes:
        repeats: least number of passes.
        processes: fresh processes that share them.
        precision: passes are added until the interval over them is this narrow; None: none are.
        max_minutes: of measuring, after which no pass is added.
    """

    repeats: int
    processes: int = 1
    precision: float | None = None
    max_minutes: float = float("inf")

    @classmethod
    def of(cls, cfg: Mapping[str, Any]) -> RunPlan:
        """The plan that a configuration asks for; every process measures one pass at least."""
        least = 1 if cfg["precision"] is None else LEAST_FOR_PRECISION
        return cls(
            max(cfg["repeats"], cfg["processes"], least),
            cfg["processes"],
            cfg["precision"],
            cfg["max_minutes"],
        )

    def process_of(self, repeat: int) -> int:
        """The number of the process that measures a pass; with several, each added pass has a fresh one."""
        if self.processes == 1:
            return 0
        if repeat < self.repeats:
            return repeat * self.processes // self.repeats
        return self.processes + repeat - self.repeats

    def next(
        self, done: Mapping[int, int], questions: int, width: float | None, seconds: float
    ) -> int | None:
        """The next pass to measure; None if the run needs no more.

        Args:
            done: by pass, how many questions were tried.
            questions: of a whole pass.
            width: of the interval over the whole passes, high - low; None without one.
            seconds: spent on measuring so far.
        """
        repeat = next(r for r in range(len(done) + 1) if done.get(r, 0) < questions)
        if repeat < self.repeats or done.get(repeat):
            return repeat
        if self.precision is None or width is None or width <= self.precision:
            return None  # width None: nothing was answered; more passes would not help
        return repeat if seconds * (1 + 1 / repeat) <= self.max_minutes * 60 else None
