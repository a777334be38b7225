"""Whether sampled answers follow the target's own distribution: a chi-square test against exact enumeration."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from scipy.stats import chisquare
from transformers import TopKLogitsWarper, TopPLogitsWarper

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.system.settings import TOKEN

VOCAB, ANSWERS, LENGTH = 5, 500, 4
PROMPT = [1, 3, 4, 1, 3]
# Of the pairs of random models one on which wrong rules move the distribution most, so that few answers show it.
SHAPE = {"seed": 108, "vocab_size": VOCAB, "num_hidden_layers": 3}


@torch.inference_mode()
def expected_counts(model, top_k: int = VOCAB, top_p: float = 1.0) -> torch.Tensor:
    """Expected counts of tokens 2 and 3 of the answer together (token 1 comes from the prefill), exactly enumerated."""

    def following(prefixes):
        logits = TopKLogitsWarper(top_k)(prefixes, model(prefixes, use_cache=False).logits[:, -1].float())
        return torch.softmax(TopPLogitsWarper(top_p)(prefixes, logits), dim=-1)

    ids, weights = torch.tensor([PROMPT]), torch.ones(1)
    for _ in range(3):
        probs = following(ids)
        weights = (weights[:, None] * probs).flatten()
        ids = torch.cat(
            [ids.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(ids))[:, None]], dim=1
        )
    return weights.view(VOCAB, VOCAB * VOCAB).sum(0) * ANSWERS


def counted(answers: Iterable[list[int]]) -> torch.Tensor:
    """How often each pair of tokens 1 and 2 was said."""
    counts = torch.zeros(VOCAB * VOCAB)
    for tokens in answers:
        counts[tokens[1] * VOCAB + tokens[2]] += 1
    return counts


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The chi-square test's p-value."""
    rare = expected < 5  # the chi-square approximation wants at least five a cell: pool the rest
    observed = torch.cat([observed[~rare], observed[rare].sum(0, keepdim=True)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)]).double()
    filled = expected > 0
    observed, expected = observed[filled], expected[filled]
    return chisquare(observed.numpy(), (expected / expected.sum() * observed.sum()).numpy()).pvalue


def answered_pairs(pair, drafter: Drafter, decoding: SamplingParams) -> torch.Tensor:
    """Counts of tokens 1 and 2 after the first of answers that are decoded one by one."""
    engine = Engine(StagedModel(pair.target), drafter, frozenset())
    return counted(engine.answer(PROMPT, decoding, seed=seed).tokens for seed in range(ANSWERS))


def p_value_alone(
    pair, drafter: Drafter, verification: str = TOKEN, top_k: int = VOCAB, top_p: float = 1.0
) -> float:
    """How well tokens 1 and 2 after the first follow the target when each answer is decoded alone."""
    decoding = SamplingParams(LENGTH, 1.0, verification, top_k % VOCAB, top_p)
    return p_value(answered_pairs(pair, drafter, decoding), expected_counts(pair.target, top_k, top_p))


def p_value_in_a_batch(pair, drafter: Drafter, scheduler: Scheduler) -> float:
    """The same when the answers are decoded in batches."""
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), scheduler)
    requests = [Request(PROMPT, SamplingParams(LENGTH, 1.0), seed) for seed in range(ANSWERS)]
    answers = (answer.tokens for answer in engine.generate(requests))
    return p_value(counted(answers), expected_counts(pair.target))
