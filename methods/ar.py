"""Autoregressive decoding: the baseline of every comparison. As a method it is measured against itself (A/A)."""

from __future__ import annotations

from specbench.decoding.drafter import Drafter, Needs
from specbench.models.pairs import Pair


class Autoregressive(Drafter):
    """Drafts nothing: every round is one target pass and emits one token."""

    needs = Needs(text_alone=True)
    deterministic = True

    def __init__(self, pair: Pair):
        """Ignores the pair: the engine has its target."""
