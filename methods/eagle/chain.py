"""Chained steps of a drafting model over a whole text, as drafts take them: for its training, and to look at it.

Row t is the draft behind the true pairs up to t. Its step 0 is pair t; step j is the pair of its own output of step
j - 1 and the text's token t + 1 + j. So a row sees the true pairs up to t, and of its own steps all so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from methods.eagle.layer import DraftingModel


class Steps:
    """Keys and values of all steps so far, with gradients; it stands where attention expects a cache."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds those of a step, [b, kv_heads, n, head_dim]; returns those of all, one behind the other."""
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def chained(
    model: DraftingModel, features: torch.Tensor, embeds: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Takes chained steps at every row of some texts.

    Args:
        model: the drafting model.
        features: [b, n, h] of the true pairs.
        embeds: [b, n, e] of the tokens of these pairs.
        steps: how many.

    Yields:
        Of each step the outputs [b, n, h]. Behind row n - 1 - j there is no token for step j: what the last j rows of
        it hold is of no use.
    """
    n, device = features.shape[1], features.device
    cache, diagonal = Steps(), torch.eye(n, dtype=torch.bool, device=device)
    visible = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    for j in range(steps):
        rope = model.rope(torch.arange(j, n + j, device=device).unsqueeze(0), features)
        own = torch.nn.functional.pad(embeds[:, j:], (0, 0, 0, j))
        features = model(features, own, rope, visible.view(1, 1, n, -1), cache)
        yield features
        visible = torch.cat([visible, diagonal], dim=1)
