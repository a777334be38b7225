"""Drafters that fill a whole block in one pass: DFlash, trees of its guesses (DDTree), DSpark, and DFlash2."""

from methods.dflash.drafter import DDTree, DFlash, DFlash2, DSpark

__all__ = ["DDTree", "DFlash", "DFlash2", "DSpark"]
