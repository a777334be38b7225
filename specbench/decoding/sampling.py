"""How tokens are chosen from logits. One place, so that drafter and target cannot disagree about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

        uniforms: [n] numbers in [0, 1) to draw with, in place of a generator.
        """
        if self.greedy:
            return likeliest(logits), None
        probs = self.probs(logits)
        if uniforms is not None:
            return invert(probs, uniforms), probs
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1), probs


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., n, vocab] -> tokens [..., n], of several likeliest the first. On a CPU NumPy looks at several
    numbers at once: over six rows of 16384 that takes a twentieth of the time."""
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws by the inverse of the distribution function: weights [n, vocab], not normalised, and uniforms [n] in [0, 1)
    -> tokens [n]. In float64, so that no token of weight zero is ever reached."""
    sums = weights.double().cumsum(-1)
    aim = uniforms.double().unsqueeze(-1) * sums[:, -1:]
    return torch.searchsorted(sums, aim, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
