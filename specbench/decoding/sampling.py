"""How tokens are chosen from logits. One place, so that drafter and target cannot disagree about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.errors import UserError

NOT_DRAWN = -1  # in place of a token, where there was no distribution to draw it from


@dataclass(frozen=True, slots=True)
class Decoding:
    """max_new_tokens: exact cap on new tokens. temperature: 0 is greedy, above 0 samples."""

    max_new_tokens: int
    temperature: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] -> the distribution to sample from, float32."""
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def select(
        self,
        logits: torch.Tensor,
        generator: torch.Generator | None = None,
        uniforms: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, vocab] -> tokens [n] and, when sampling, the distribution [n, vocab] they were drawn from.

        uniforms: [n] numbers in [0, 1) to draw with, in place of a generator; then a token is `NOT_DRAWN` where its
        logits are NaN or infinite, and the caller asks `all_drawn`.
        """
        if self.greedy:
            return likeliest(logits), None
        probs = self.probs(logits)
        if uniforms is not None:
            return invert(probs, uniforms), probs
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1), probs


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., n, vocab] -> tokens [..., n], of several likeliest the first. On a CPU NumPy looks at several
    numbers at once: over six rows of 16384 that takes a twentieth of the time.
    """
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws by the inverse of the distribution function: weights [n, vocab], not normalised, and uniforms [n] in [0, 1)
    -> tokens [n], `NOT_DRAWN` where weights are NaN or infinite. In float64, so that no token of weight zero is ever
    reached.
    """
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    drawn = torch.searchsorted(sums, uniforms.double().unsqueeze(-1) * total, right=True)
    return drawn.clamp(max=weights.shape[-1] - 1).where(total.isfinite(), NOT_DRAWN).squeeze(-1)


def all_drawn(tokens: list[int]) -> list[int]:
    """The tokens, as the host has read them. Raises UserError if `invert` could not draw one of them.

    The host asks when it reads the tokens anyway, so that the device is not waited for once more.
    """
    if NOT_DRAWN in tokens:
        raise UserError(
            "a token cannot be drawn: the logits of the target or of the draft model are NaN or infinite; "
            "set pair.dtype to bfloat16 or float32 where it is float16"
        )
    return tokens
