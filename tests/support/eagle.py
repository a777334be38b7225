"""EAGLE's drafting model on the true pairs of a text, by transformers' target and without a cache."""

from __future__ import annotations

import torch

from methods.eagle.model import EagleModel
from specbench.decoding.state import NORMED
from tests.support.methods import true_states


def pairs_of(pair, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and embedded tokens [1, n - 1, h] of the true pairs of n tokens."""
    ids = torch.tensor([tokens])
    states = true_states(pair, ids, (NORMED,))[NORMED]
    return states[:, :-1], pair.target.get_input_embeddings()(ids[:, 1:])


def outputs(model: EagleModel, features: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """Outputs [1, n, h] of pairs that follow one another, in one pass without a cache."""
    return model(
        features,
        embeds,
        position_embeddings=model.rope(torch.arange(features.shape[1]).unsqueeze(0), features),
    )


@torch.no_grad()
def by_chain(model: EagleModel, pair, tokens: list[int], path: list[int]) -> torch.Tensor:
    """The output [h] after known tokens and drafted ones that follow them, a token at a time."""
    features, embeds = pairs_of(pair, tokens)
    for token in path:
        last = outputs(model, features, embeds)[:, -1:]
        features = torch.cat([features, last], dim=1)
        embeds = torch.cat([embeds, pair.target.get_input_embeddings()(torch.tensor([[token]]))], dim=1)
    return outputs(model, features, embeds)[0, -1]
