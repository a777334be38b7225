"""Plain autoregressive decoding: the engine with nothing drafted. The baseline of every comparison."""

from __future__ import annotations

import torch

from specbench.decoding.draft import Context, Draft, Drafter, Needs


class Autoregressive(Drafter):
    """Drafts nothing, so that every round is one target pass and one token."""

    needs = Needs(batching=True)

    def __init__(self, pair):
        self._empty = Draft(torch.empty(0, dtype=torch.int64, device=pair.device))

    def draft(self, context: Context) -> Draft:
        return self._empty
