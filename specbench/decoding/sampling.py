"""How tokens are chosen from logits. One place, so that drafter and target cannot disagree about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.errors import UserError

NOT_DRAWN = -1  # in place of a token, where there was no distribution to draw it from


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: exact cap on new tokens.
        temperature: 0 is greedy, above 0 samples.
    """

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
        """Chooses a token from each row of logits.

        Args:
            logits: [n, vocab].
            generator: to draw with; None for torch's own.
            uniforms: [n] numbers in [0, 1) to draw with, in place of a generator; then a token is `NOT_DRAWN` where its
                logits are NaN or infinite, and the caller has to call `all_drawn`.

        Returns:
            Tokens [n] and, when sampling, the distributions [n, vocab] they were drawn from.
        """
        if self.greedy:
            return likeliest(logits), None
        probs = self.probs(logits)
        if uniforms is not None:
            return invert(probs, uniforms), probs
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1), probs


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., n, vocab] -> tokens [..., n]; the first of several likeliest.

    On a CPU NumPy's argmax is vectorised: over six rows of 16384 it takes a twentieth of the time.
    """
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws by the inverse of the distribution function, in float64, so that no token of weight zero is ever drawn.

    Args:
        weights: [n, vocab], not normalised.
        uniforms: [n] in [0, 1).

    Returns:
        Tokens [n], `NOT_DRAWN` where weights are NaN or infinite.
    """
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    drawn = torch.searchsorted(sums, uniforms.double().unsqueeze(-1) * total, right=True)
    return drawn.clamp(max=weights.shape[-1] - 1).where(total.isfinite(), NOT_DRAWN).squeeze(-1)


def all_drawn(tokens: list[int]) -> list[int]:
    """The tokens, as the host has read them. Raises UserError if `invert` could not draw one of them.

    It is called when the host reads the tokens anyway, so that there is no further wait for the device.
    """
    if NOT_DRAWN in tokens:
        raise UserError(
            "a token cannot be drawn: the logits of the target or of the draft model are NaN or infinite; "
            "set pair.dtype to bfloat16 or float32 where it is float16"
        )
    return tokens
