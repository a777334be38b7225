"""MTP heads: a layer on the target's state and the next token, chained, for dense targets."""

from methods.mtp.drafter import Mtp

__all__ = ["Mtp"]
