"""Chained steps of a drafting model over a whole text, as drafts take them: for its training, and to look at it.

Row t is the draft after the true pairs up to t. Its step 0 is pair t; step j is the pair of its own output of step
j - 1 and the text's token t + 1 + j. So a row sees the true pairs up to t, and all its own steps so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from specbench.decoding.cpu.grouped_attention import attending

if TYPE_CHECKING:
    from methods.common.draft_layer import CachedLayer


ATTENTION = "chained_steps"  # what transformers calls `_attention`


def _attention(
    _module: torch.nn.Module,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of row t to the true pairs up to t and, of every later step, only to its own pair.

    Scores of a later step are products row by row, not of matrices: full scores of s steps would cost s^2.

    Args:
        module: not used.
        queries: [b, heads, n, head_dim] of the newest step.
        keys: [b, kv_heads, steps * n, head_dim] of all steps, one after the other.
        values: of the same shape.
        attention_mask: [1, 1, 1, n, n] true where a true pair is visible.
        scaling: of the scores.
        kwargs: not used.

    Returns:
        [b, n, heads, head_dim], and no weights.
    """
    b, heads, n, width = queries.shape
    kv_heads = keys.shape[1]
    q = queries.view(b, kv_heads, heads // kv_heads, n, width) * scaling
    (k, *ks), (v, *vs) = (tensor.unsqueeze(2).split(n, dim=3) for tensor in (keys, values))
    among = (q @ k.transpose(-1, -2)).masked_fill(~attention_mask, float("-inf"))
    scores = torch.cat([among, *((q * step_keys).sum(-1, keepdim=True) for step_keys in ks)], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
    out = weights[..., :n] @ v
    for j, step_values in enumerate(vs):
        out = out + weights[..., n + j : n + j + 1] * step_values
    return out.flatten(1, 2).transpose(1, 2), None


class Steps:
    """In place of a cache: keys and values of all steps so far, with gradients."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds those of a step, [b, kv_heads, n, head_dim]; returns those of all, concatenated."""
        all_keys, all_values = self._layers.setdefault(layer_idx, ([], []))
        all_keys.append(keys)
        all_values.append(values)
        return torch.cat(all_keys, dim=2), torch.cat(all_values, dim=2)


def chained(
    model: CachedLayer, features: torch.Tensor, embeds: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Takes chained steps at every row of some texts.

    Args:
        model: the drafting model.
        features: [b, n, h] of the true pairs.
        embeds: [b, n, e] of the tokens of these pairs.
        steps: how many.

    Yields:
        The outputs [b, n, h] of each step. Step j has no token after row n - 1 - j: its last j rows are not valid.
    """
    from transformers import AttentionInterface  # late: it takes seconds to import

    AttentionInterface.register(ATTENTION, _attention)
    n, device = features.shape[1], features.device
    cache = Steps()
    visible = torch.ones(1, 1, 1, n, n, dtype=torch.bool, device=device).tril()
    for j in range(steps):
        positions = torch.arange(j, n + j, device=device).unsqueeze(0)
        context = {"position_embeddings": model.rope(positions, features), "attention_mask": visible}
        step_embeds = torch.nn.functional.pad(embeds[:, j:], (0, 0, 0, j))
        with attending(model.config, ATTENTION):
            features = model(features, step_embeds, **context, past_key_values=cache)
        yield features
