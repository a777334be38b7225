"""SWIFT (Xia et al. 2025, arXiv 2410.06916): the target drafts with some of its own sublayers left out."""

from methods.swift.drafter import Swift

__all__ = ["Swift"]
