"""EAGLE-3 (Li et al. 2025): one layer on three depths of the target's states, with a head over a draft vocabulary."""

from methods.eagle3.drafter import Eagle3

__all__ = ["Eagle3"]
