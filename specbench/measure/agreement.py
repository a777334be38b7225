"""Compares the staged forward with the model's own, relative to how far the model's own ways differ.

Each order of summation rounds differently, so a model has no exact logits in its dtype: they change with the attention
kernel, or if the prompt is processed in parts. The size of these changes is the model's noise. It depends on the model,
the text and the dtype, from 1e-6 of the logits' scale in fp32 to some percent in bf16; on tokens that a model was never
trained on it can be as large as the logits themselves. No fixed bound fits all of them: a bound for the worst hides
faults in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.cpu.grouped_attention import attending
from specbench.decoding.model import fixed_shape
from specbench.decoding.model.anatomy import drivable
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.state import Draft
from specbench.models.devices import name_of
from specbench.system.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.decoding.model.staged_model import StagedModel

# Largest accepted distance of the staged forward, in multiples of the noise. In half precision a fault barely exceeds
# the noise; of 27 families, with and without passes of fixed shapes, none was further off than 0.75 times the noise.
# In fp32 the noise is a millionth of what a fault changes, and with few positions chance matters: up to 1.3.
MULTIPLE_FP32, MULTIPLE_HALF = 8.0, 1.5
# Ways can agree to the bit. Lower bound of the noise, in units in the last place of the logits.
LEAST_ULPS = 1.0
# Upper bound of the limit: above it the ways compute different things and prove nothing. A model's own ways differ by
# 1e-6 in fp32, by a few percent in half precision. In units of the logits' scale; unrelated logits differ by 1.4.
MOST_FP32, MOST_HALF = 1e-4, 0.3
# Tokens of the checked text; tokens after a layer's window; the longest window that is filled.
CHECKED, BEYOND, LONGEST_FILLED = 72, 32, 512
PIECE = 64  # positions whose logits are compared at once: large vocabularies take much memory in fp32


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measured distances, as shares of the logits' scale: the RMS of their deviation from the mean.

    Attributes:
        distance: of the staged forward from the nearest of the model's own ways.
        noise: between the model's own ways.
        limit: the largest distance that is accepted.
    """

    distance: float
    noise: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the distance is within the limit; False if a number is NaN."""
        return self.distance <= self.limit


def own_ways(model: PreTrainedModel, ids: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Returns the model's own logits [n, vocab] of ids [1, n], in three ways, or two if eager attention adds none.

    In parts between `cuts` with transformers' own cache; whole; whole with eager attention. They differ in everything
    that the staged forward may differ in.
    """

    def full_pass() -> torch.Tensor:
        return model(ids, use_cache=False).logits[0]

    cache: Any = None
    parts = []
    for start, end in pairwise(cuts):
        output = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits[0])
    ways = [torch.cat(parts), full_pass()]
    config = model.config.get_text_config()
    if config._attn_implementation != "eager":
        with attending(config, "eager"):
            eager = full_pass()
        if eager.isfinite().all():  # in fp16 products of queries and keys can overflow before they are scaled
            ways.append(eager)
    return ways


def agreement(
    staged: torch.Tensor, ways: Sequence[torch.Tensor], groups: Sequence[tuple[int, int]]
) -> Agreement:
    """Judges the staged forward.

    The distance of two ways is the median over positions, so that a token whose logits depend on rounding (a router
    that chooses another expert, say) rejects no model. It is the maximum over groups of positions, so that a fault of
    one kind of pass is not outvoted by the others.

    Args:
        staged: [n, vocab] its logits.
        ways: [n, vocab] logits of the model's own ways, in the model's dtype.
        groups: range of positions [start, end) of each kind of pass.
    """
    dtype = ways[0].dtype
    scale = _rms(ways[0]).square().mean().sqrt()
    size = torch.cat([piece.float().square().mean(-1) for piece in ways[0].split(PIECE)]).mean().sqrt()

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        apart = _rms(one, other) / scale
        return torch.stack([apart[start:end].median() for start, end in groups]).max().item()

    noise = max(distance(one, other) for one, other in combinations(ways, 2))
    ulp = torch.finfo(dtype).eps * (size / scale).item()
    exact = dtype == torch.float32
    multiple, most = (MULTIPLE_FP32, MOST_FP32) if exact else (MULTIPLE_HALF, MOST_HALF)
    limit = min(multiple * max(noise, LEAST_ULPS * ulp), most)
    return Agreement(min(distance(staged, way) for way in ways), noise, limit)


def _rms(one: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
    """The root mean square [n] over the vocabulary of logits [n, vocab], or of their difference from others.

    The mean is subtracted first: a constant added to all logits changes no probability.
    """
    pieces = (piece.float() for piece in one.split(PIECE))
    if other is not None:
        pieces = (piece - piece_of_other.float() for piece, piece_of_other in zip(pieces, other.split(PIECE)))
    return torch.cat([piece.std(-1, correction=0) for piece in pieces])


def filled(ids: Sequence[int], length: int) -> list[int]:
    """The first `length` token ids of a text, which is repeated as often as needed."""
    return (list(ids) * -(-length // len(ids)))[:length]


@torch.inference_mode()
def check_staged(target: StagedModel, text: Sequence[int]) -> Agreement:
    """Compares the staged forward with the model's own.

    It takes four passes of `_checked_length` tokens, three of them the model's own, and ten short ones.

    Args:
        target: the model.
        text: token ids of a text that the model can continue, see `Pair.sample_ids`; the first ones are used.

    Returns:
        What was measured.

    Raises:
        UserError: the logits are not finite, or differ by more than the model's noise allows.
    """
    length = _checked_length(target)
    ids = torch.tensor([filled(text, length)], device=target.device)
    # The prompt, two verifications, and single tokens: each has masks, positions and kernels of its own.
    ends = [0, *(length - after for after in (19, 11, 3, 2, 1, 0))]
    with drivable(target.model):
        ways = [way[:, : target.vocab_size].to(target.device) for way in own_ways(target.model, ids, ends)]
        cache = target.new_cache(length + target.padding)
        parts = [target.head(target.run_layers(target.embed(ids[:, : ends[1]]), cache, 0))]
        for start, end in pairwise(ends[1:]):
            draft = Draft(ids[:, start + 1 : end])
            parts.append(target.verify(ids[:, start : start + 1], draft, cache, start))
        staged = torch.cat([part[0] for part in parts])
    if not ways[0].isfinite().all():
        raise UserError(
            f"model type '{target.config.model_type}' gives logits that are not finite in "
            f"{name_of(target.dtype)}: set another pair.dtype"
        )
    measured = agreement(staged, ways, [(0, ends[1]), (ends[1], ends[3]), (ends[3], length)])
    if not measured.holds:
        raise UserError(
            f"model type '{target.config.model_type}' cannot be driven layer by layer: its logits differ from the "
            f"model's own by {measured.distance:.1e} of their scale, and the model's own by {measured.noise:.1e} among "
            f"themselves, in {name_of(target.dtype)}; {measured.limit:.1e} would be accepted"
        )
    return measured


def _checked_length(target: StagedModel) -> int:
    """Number of tokens for `check_staged`: more than the short windows of layers and, with graphs, than a bucket.

    A pass as long as a window needs memory for the logits of each of its tokens, so long windows are not filled.
    """
    windows = [
        window + BEYOND for window, _ in target.stack.kinds_there if window and window <= LONGEST_FILLED
    ]
    captured = isinstance(target.runner, GraphRunner)
    length = max(CHECKED, *windows, fixed_shape.KV_BUCKET + 11 if captured else 0)
    return min(length, target.config.max_position_embeddings)
