"""Drafters that fill a whole block in one pass: DFlash, trees of its guesses (DDTree), and DSpark."""

from methods.dflash.drafter import DDTree, DFlash, DSpark

__all__ = ["DDTree", "DFlash", "DSpark"]
