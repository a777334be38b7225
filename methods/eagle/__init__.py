"""EAGLE (Li et al., ICML 2024) and EAGLE-2 (EMNLP 2024): one layer drafts on the target's own states."""

from methods.eagle.drafter import Eagle, Eagle2

__all__ = ["Eagle", "Eagle2"]
