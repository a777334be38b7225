"""P-EAGLE (arXiv 2602.01469): EAGLE-3's drafting model, tuned to fill several masks in one pass."""

from methods.peagle.drafter import ParallelEagle

__all__ = ["ParallelEagle"]
