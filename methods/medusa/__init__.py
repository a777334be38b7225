"""Medusa-1 (Cai et al. 2024): heads on the target's own states, one for each token further ahead."""

from methods.medusa.drafter import Medusa

__all__ = ["Medusa"]
