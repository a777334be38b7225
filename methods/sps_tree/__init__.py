"""Token trees of a draft model, one pass a level (SpecInfer, Sequoia)."""

from methods.sps_tree.drafter import DraftModelTree

__all__ = ["DraftModelTree"]
