"""Do sampled answers lean towards the draft? A faulty acceptance rule shows here first; likelihood hardly detects it.

Let q be the distribution that a draft token was drawn from, p the target's at that place, and f = log(q / p), clipped
at `LARGEST`. If the rule is lossless, the token x emitted there is drawn from p, whatever was drafted. Then f(x) minus
its mean under p is 0 on average, and its variance is known. A rule that accepts draft tokens too readily, or draws from
p instead of the residual distribution, makes the sum over many places large.

p and q are taken from the rounds themselves, so rounding plays no part. They exist only within a round: the requests
are answered once more, untimed and observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specbench.decoding.acceptance import Accepted
    from specbench.decoding.engine import Engine
    from specbench.decoding.state import Batch, Draft, Request

LARGEST = 3.0  # of f: one place alone proves nothing


@dataclass(slots=True)
class Lean:
    """How far an answer leans towards its drafts: a sum that is 0 on average, and its variance."""

    total: float = 0.0
    variance: float = 0.0


def leans(engine: Engine, requests: list[Request]) -> list[Lean]:
    """Answers some requests and evaluates every place at which a drawn chain was verified.

    The drafter's state is restored afterwards.

    Args:
        engine: with a drafter that draws.
        requests: as they were measured: their seeds reproduce the answers.

    Returns:
        One for each request; a draft that is a tree, or verified as a block, adds nothing.
    """
    answers = [Lean() for _ in requests]

    def look(batch: Batch, draft: Draft, logits: torch.Tensor, accepted: Accepted) -> None:
        if draft.probs is None or draft.tree is not None:
            return
        k = draft.tokens.shape[1]
        p, q = batch.decoding.probs(logits[:, :k]).double(), draft.probs.double()
        f = (q / p).log().nan_to_num(0.0).clamp(-LARGEST, LARGEST)
        mean, square = (p * f).sum(-1), (p * f.square()).sum(-1)
        emitted = accepted.tokens[:, :k].clamp(min=0).unsqueeze(-1)
        apart = f.gather(-1, emitted).squeeze(-1) - mean
        # The accepted tokens, and the one in place of the first that was not.
        judged = torch.arange(k, device=q.device) <= accepted.count.unsqueeze(1)
        sums = torch.stack([apart, square - mean.square()]).where(judged, 0.0).sum(-1).tolist()
        for one, total, variance in zip(batch.sequences, *sums):
            of_answer = answers[one.request_index]
            of_answer.total += total
            of_answer.variance += variance

    learnt = engine.drafter.snapshot()
    engine.observe = look
    try:
        engine.generate(requests)
    finally:
        engine.observe = None
        engine.drafter.restore(learnt)
    return answers
