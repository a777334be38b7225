"""S2D: one sorted draft model for several targets."""

from methods.s2d.drafter import SortedDraft

__all__ = ["SortedDraft"]
