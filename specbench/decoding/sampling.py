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
        self, logits: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, vocab] -> tokens [n] and, when sampling, the distribution [n, vocab] they were drawn from."""
        if self.greedy:
            return logits.argmax(-1), None
        probs = self.probs(logits)
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1), probs
