"""How tokens are chosen from logits, and where an answer ends. One place, so that nobody disagrees about it.

Random numbers belong to positions: the token at a position is drawn with the number of that position, whatever the
rounds, the batch and the drafter. Autoregressive decoding and a drafter that drafts without chance then give the same
text from the same seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from specbench.decoding.cpu import native
from specbench.system.errors import UserError
from specbench.system.settings import TOKEN

# Columns of random numbers: the target's draw, acceptance; the drafter's draws come after them.
TARGET, ACCEPT = range(2)
FEW = 256  # tokens, which mostly have the probability top_p together
NOT_DRAWN = -1  # in place of a token if there was no distribution to draw it from
NO_NUMBERS = "are NaN or infinite; set pair.dtype to bfloat16 or float32 where it is float16"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: exact cap on new tokens.
        temperature: 0 is greedy, above 0 samples.
        verification: how drafts are verified: `TOKEN` by token; a drawn chain as one `BLOCK`; in greedy decoding, by
            `TYPICAL` acceptance, which is lossy.
        top_k: only this many of the likeliest tokens are drawn; 0: all.
        top_p: of those, only the likeliest ones that together have this probability; 1: all.
    """

    max_new_tokens: int
    temperature: float = 0.0
    verification: str = TOKEN
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def from_settings(cls, settings: Mapping, **others: Any) -> SamplingParams:
        """Those among `settings`, of runs or of a command; `others` take precedence."""
        return cls(**{one.name: settings[one.name] for one in fields(cls) if one.name in settings} | others)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def truncation(self) -> dict[str, float]:
        """top_k and top_p by name, where they leave out tokens."""
        cut: dict[str, float] = {"top_k": self.top_k} if self.top_k > 0 else {}
        return cut if self.top_p == 1.0 else cut | {"top_p": self.top_p}

    @property
    def distribution(self) -> tuple[float, int, float]:
        """What makes a distribution of logits: temperature, top_k and top_p."""
        return self.temperature, self.top_k, self.top_p

    def greedily(self) -> SamplingParams:
        """The same number of tokens, the likeliest ones."""
        return SamplingParams(self.max_new_tokens)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] -> the distribution to sample from, float32.

        The order is that of transformers and vLLM: temperature, top_k, then top_p of what is left. Tokens as likely as
        the last one are drawn as well: in half precision many logits are equal, and their order means nothing.
        """
        scaled = logits.float() / self.temperature
        indices = None
        if self.top_k > 0:
            largest, indices = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1)
            scaled = scaled.masked_fill_(scaled < largest[..., -1:], -torch.inf)
        probs = torch.softmax(scaled, dim=-1)
        if self.top_p < 1.0:
            # Tokens that top_k leaves in beyond the first `top_k` are all as likely as the last of these.
            likeliest = likeliest_probs(probs, self.top_p) if indices is None else probs.gather(-1, indices)
            left_out = probs < least_of_top_p(likeliest, self.top_p)
            # Not by division: a sum of one long row is rounded otherwise than one of several.
            probs = torch.softmax(scaled.masked_fill_(left_out, -torch.inf), dim=-1)
        return probs

    def select(
        self, logits: torch.Tensor, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses a token from each row of logits.

        Args:
            logits: [..., vocab].
            uniforms: [...] numbers in [0, 1) to draw with; None when greedy.

        Returns:
            Tokens [...] and, when sampling, the distributions [..., vocab] they were drawn from. A token is `NOT_DRAWN`
            where its logits are NaN or infinite: the caller has to call `check_sampled`.
        """
        if self.greedy:
            return argmax_token(logits), None
        assert uniforms is not None  # given whenever tokens are drawn
        probs = self.probs(logits)
        return sample_inverse_cdf(probs, uniforms), probs


def likeliest_probs(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Of probabilities [..., vocab] at least the largest ones that together have `top_p`, in descending order."""
    vocab = probs.shape[-1]
    # Sorting a vocabulary takes far longer than a softmax. Where the host may look, a few tokens are tried first.
    for count in (min(FEW, vocab), vocab) if probs.device.type == "cpu" else (vocab,):
        likeliest = probs.topk(count, dim=-1).values
        if count == vocab or (likeliest.cumsum(-1)[..., -1] >= top_p).all():
            break
    return likeliest


def least_of_top_p(likeliest: torch.Tensor, top_p: float) -> torch.Tensor:
    """The last [..., 1] of the probabilities that together have `top_p`, of [..., n] in descending order."""
    before = likeliest.cumsum(-1) - likeliest
    return likeliest.gather(-1, (before < top_p).sum(-1, keepdim=True).clamp(min=1) - 1)


def answer_seed(*parts: int) -> int:
    """A seed for one answer that any of its parts changes; the same on every machine."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def position_uniforms(seed: int, positions: int, columns: int, device: torch.device) -> torch.Tensor:
    """The random numbers of each position of an answer: for the target's draw, for acceptance and for the drafter.

    Args:
        seed: of the answer.
        positions: new tokens at most.
        columns: numbers of a position for acceptance, and for the drafter. In a tree one for each sibling, in a chain
            1. In block verification one for each place that the position can have in a draft: a failed test of a block
            makes its numbers no longer uniform, so a position must not use one in two drafts.
        device: where they are used.

    Returns:
        [positions, 1 + 2 * columns] float64 in [0, 1): `TARGET`, then those from `ACCEPT` on, then the drafter's. The
        first column is the same whatever the drafter.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def uniforms(n: int) -> torch.Tensor:
        return torch.rand(positions, n, generator=generator, device=device, dtype=torch.float64)

    return torch.cat([uniforms(1), uniforms(2 * columns)], dim=1)


def argmax_token(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., n, vocab] -> tokens [..., n]; the first of several likeliest."""
    return native.argmax(logits) if logits.device.type == "cpu" else logits.argmax(-1)


def sample_inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws by the inverse of the distribution function, in float64, so that no token of weight zero is ever drawn.

    Args:
        weights: [..., vocab], not normalised.
        uniforms: [...] in [0, 1).

    Returns:
        Tokens [...], `NOT_DRAWN` where weights are NaN or infinite.
    """
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    drawn = torch.searchsorted(sums, uniforms.double().unsqueeze(-1) * total, right=True)
    drawn = drawn.clamp(max=weights.shape[-1] - 1)
    return drawn.masked_fill_(~total.isfinite(), NOT_DRAWN).squeeze(-1)


def truncate_at_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: i + 1])
    return list(tokens)


def check_sampled(tokens: list[int]) -> list[int]:
    """Returns the tokens unchanged. Raises UserError if `sample_inverse_cdf` could not draw one of them.

    It is called when the host reads the tokens anyway, so that it adds no wait for the device.
    """
    if NOT_DRAWN in tokens:
        raise UserError(
            f"a token cannot be drawn: the logits of the target or of the draft model {NO_NUMBERS}"
        )
    return tokens


def check_numbers(are_nan: list[torch.Tensor]) -> None:
    """Raises UserError if one of the flags [] on the device is set, each of which marks logits with NaN.

    A greedy choice from them would silently be an arbitrary token.
    """
    if are_nan and torch.stack(are_nan).any():
        raise UserError(f"no token can be chosen: the logits of the target {NO_NUMBERS}")
