"""Training on chained steps: a drafting model learns on its own outputs, as drafts take them (training-time test).

At each position of a text some steps of a draft are taken on the tokens that follow (`methods.common.chained_steps`).
Step j costs the cross-entropy against the target's own distribution, times decay^j (Li et al. 2025, section 3.2). A
step counts in the loss if the guessed token is the assistant's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from methods.common.chained_steps import chained
from methods.common.losses import (
    ALL,
    Distribution,
    Goals,
    Head,
    Loss,
    choices_ahead,
    cross_entropies,
    teacher_of,
)
from methods.common.training import agreements, target_states
from specbench.decoding.state import NORMED

if TYPE_CHECKING:
    from methods.common.draft_layer import CachedLayer
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


class StepDistillation(torch.nn.Module):
    """batch -> cross-entropy of the steps of drafts against the frozen target.

    Args:
        model: is trained.
        target: frozen; its head makes tokens of the model's outputs.
        steps: of a draft.
        decay: of the weight of each further step.
        loss: what of a batch is judged.
    """

    def __init__(self, model: CachedLayer, target: StagedModel, steps: int, decay: float, loss: Loss = ALL):
        super().__init__()
        self.model, self.target, self.steps, self.decay, self.loss = model, target, steps, decay, loss
        self.head = Head.of(target.model)
        self.rows = len(self.head.weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the cross-entropies of a batch."""
        outputs, finals = self.outputs(batch)
        steps, teacher = [*outputs], teacher_of(batch, self.head, finals)
        total = torch.zeros((), device=finals.device)
        for goals in self.loss.goals(batch, ahead=1 + self.steps).split(self.steps):
            guesses = [goals.before(output, 2 + j) for j, output in enumerate(steps)]
            total = total + self.judged(teacher, goals, guesses)
        return total

    def judged(
        self, teacher: Callable[[Goals], Distribution], goals: Goals, guesses: list[torch.Tensor]
    ) -> torch.Tensor:
        """The weighted sum [] of the losses of guesses of some goals.

        Distributions and logits are recomputed for the gradient: those of a whole batch would fill the memory.

        Args:
            teacher: the target's distributions of some goals.
            goals: n tokens.
            guesses: outputs [n, d] of the model that guess them; the j-th weighs decay^j.
        """

        def cost(*outputs: torch.Tensor) -> torch.Tensor:
            truth, is_inside = self.inside(teacher(goals))
            weights = goals.weights * is_inside
            scored, truth = self.loss.scored(truth, self.rows)
            logits = [scored.raised(self.logits(states, scored.ids)) for states in outputs]
            losses = [self.decay**j * (weights @ cross_entropies(one, truth)) for j, one in enumerate(logits)]
            return torch.stack(losses).sum()

        loss: Any = checkpoint(cost, *guesses, use_reentrant=False)
        return loss

    def outputs(self, batch: Batch) -> tuple[Iterator[torch.Tensor], torch.Tensor]:
        """The draft's outputs [B, T - 1, d] of each step, and the target's states [B, T, D] after its final norm."""
        features, embeds, finals = self.pairs(batch)
        return chained(self.model, features, embeds, self.steps), finals

    def pairs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features and embedded tokens [B, T - 1, d] of true pairs; the target's states [B, T, D] after its norm."""
        dtype = next(self.model.parameters()).dtype
        by_tap = target_states(self.target, batch, {*self.model.taps, NORMED})
        with torch.no_grad():
            states = {tap: by_tap[tap][:, :-1].to(dtype) for tap in self.model.taps}
            embeds = self.model.embed(batch["input_ids"][:, 1:], self.target).to(dtype)
        return self.model.features(states), embeds, by_tap[NORMED]

    def logits(self, states: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs [n, d] of the model -> logits [n, rows] of some rows [c] of its head, or of all."""
        return self.head(states, rows)

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the logits -> token ids of the target."""
        return rows

    def inside(self, truth: Distribution) -> tuple[Distribution, torch.Tensor]:
        """The target's distributions over the rows of the logits, and which of them [n] count."""
        return truth, torch.ones(len(truth.probs), device=truth.probs.device)

    @torch.no_grad()
    def hits(self, batch: Batch) -> torch.Tensor:
        """[steps, n] whether the draft's and the target's first choices agree.

        At the n positions at which the `steps` tokens beyond the next one are the assistant's.
        """
        outputs, finals = self.outputs(batch)
        rows, teacher = choices_ahead(batch, outputs, [self.logits] * self.steps, finals, self.head)
        return self.ids(rows) == teacher

    def figures(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Returns figures of held-out text: agreement by step, and the mean number of steps in a row that agree."""
        hits = torch.cat([self.hits(batch) for batch in batches], dim=1).float()
        run = hits.cumprod(0).sum(0).mean().item()
        return agreements("step", hits.mean(1).tolist()) | {"held_out_run": run}
