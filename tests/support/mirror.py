"""Mirror-SD on random pairs, and the drafts that every variant is compared with."""

from __future__ import annotations

from functools import cache

from methods.mirror_sd import MirrorSD
from methods.sps import SpeculativeSampling
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from tests.support.decoding import PROMPT, random_pair
from tests.support.methods import drafts


def mirror(pair, placement: str = "inline", **settings) -> MirrorSD:
    return MirrorSD(pair, placement=placement, **{"max_draft_tokens": 4, **settings})


def steps(pair, drafter, cap: int = 60) -> list:
    return Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(cap)).steps


def tokens_of(found: list) -> list[list[int]]:
    return [tokens.tolist() for tokens, _ in found]


@cache
def plain_drafts(arch: str) -> list[list[int]]:
    """What the draft model alone drafts greedily: what every variant is compared with."""
    pair = random_pair(arch)
    return tokens_of(drafts(SpeculativeSampling(pair, 4), pair, 0.0))
