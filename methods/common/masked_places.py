"""Rows of a text with masks after some of their places, in one pass: for the training of drafters that fill masks.

Position t with j masks after it guesses tokens further on. All are learnt in one pass over the row and its masks; a
mask sees the row up to its position and the masks before it there (PARD, arXiv 2504.18583, section 3.2; P-EAGLE,
arXiv 2602.01469). Not every position keeps every mask: each is kept at a share of the positions that have the one
before.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch

from specbench.system.settings import Natural, Probability, Range

# Of a training that fills masks.
MASKED_SETTINGS = {
    "tokens_ahead": Annotated[int, Range(2)],
    "retention": Annotated[float, Range(0, 1, above=True)],
    "least_retention": Probability,
    "mask_token": Natural | None,
}
JUDGED = 4  # in held-out text every `JUDGED`-th place has all masks


class Places(NamedTuple):
    """The inputs of a pass over a row and its masks: S of them, the row's own T tokens first.

    Attributes:
        places: [S] position in the row of each token, or of each mask's token.
        masks: [S] number of each mask at its place, from 1; 0: a token.
    """

    places: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def of(cls, by_masks: list[torch.Tensor]) -> Places:
        """From the places [n_j] that have j masks or more, for each j from 0 on."""
        return cls(
            torch.cat(by_masks), torch.cat([torch.full_like(some, j) for j, some in enumerate(by_masks)])
        )

    def attention(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the additive mask [S, S]: 0 if an input sees another, else the least number of `dtype`."""
        place, mask = self.places.unsqueeze(1), self.masks.unsqueeze(1)
        tokens = (self.masks == 0) & (self.places <= place)
        masks = (self.masks > 0) & (self.places == place) & (self.masks <= mask)
        return torch.zeros(tokens.shape, dtype=dtype, device=place.device).masked_fill(
            ~(tokens | masks), torch.finfo(dtype).min
        )


def shares_of(ahead: int, retention: float, least: float) -> list[float]:
    """The share of places that keep j masks or more, for each j below `ahead`: retention^j, at least `least`."""
    return [max(retention**j, least) for j in range(ahead)]


def places_by_masks(length: int, shares: list[float], device: torch.device) -> list[torch.Tensor]:
    """Draws which of `length` places keep how many masks.

    Args:
        length: of a row.
        shares: as of `shares_of`.
        device: of the places.

    Returns:
        For each j the places [n_j] that have j masks or more, ascending, without the last: they have nothing to guess.
    """
    order = torch.randperm(length, device=device)
    by_masks = [order[: round(share * length)].sort().values for share in shares]
    return [some[some < length - 1 - j] for j, some in enumerate(by_masks)]
