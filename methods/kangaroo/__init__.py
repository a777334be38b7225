"""Kangaroo (Liu et al., NeurIPS 2024): self-speculation with double early exit."""

from methods.kangaroo.drafter import Kangaroo
from methods.kangaroo.tree import KangarooTree

__all__ = ["Kangaroo", "KangarooTree"]
