"""Drafters that look up draft inside vLLM what they draft in our own engine."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods.pld import PromptLookup
from methods.samd import SAMDecoding
from methods.suffix import SuffixDecoding
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Batch, Draft, Request
from specbench.decoding.tree import Tree
from specbench.decoding.wrapped import WrappedDrafter
from specbench.engines import vllm_proposer
from specbench.engines.vllm_proposer import Proposer, Row
from tests.support.decoding import random_pair, random_prompt

NEW, LONGEST = 40, 8
MAKERS = {
    "pld": lambda pair: PromptLookup(pair, LONGEST),
    "pld, latest": lambda pair: PromptLookup(pair, LONGEST, match="latest"),
    "samd": lambda pair: SAMDecoding(pair, max_draft_tokens=LONGEST),
    "suffix": lambda pair: SuffixDecoding(pair, "chain", LONGEST),
}


class Noted(WrappedDrafter):
    """Keeps what the inner drafter drafts."""

    def __init__(self, inner: Drafter):
        super().__init__(inner)
        self.drafts: list[list[int]] = []

    def draft(self, batch: Batch) -> Draft:
        draft = super().draft(batch)
        self.drafts.append(draft.tokens[0, : batch.limits[0]].tolist())
        return draft


@pytest.fixture(scope="module")
def pair():
    return random_pair("llama", vocab_size=12)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [random_prompt(rng, 12) for _ in range(4)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("pld, latest", "samd"))) for n in MAKERS]
)
def test_it_drafts_as_in_the_engine(pair, prompts, name):
    noted = Noted(MAKERS[name](pair))
    engine = Engine(pair.staged, noted, pair.stop_ids)
    row = Row(MAKERS[name](pair), LONGEST, max(map(len, prompts)) + NEW)
    count = 0
    for prompt in prompts:  # one after the other in the same row
        noted.drafts.clear()
        row.context = len(prompt) + NEW
        [answer] = engine.generate([Request(prompt, SamplingParams(NEW))])
        text, drafts = [*prompt], []
        for tokens in passes(answer):
            text += tokens
            draft = row.propose([*text], len(tokens))
            if len(text) + 1 < row.context:  # there is room for a draft and the target's own token
                drafts.append(draft)
        # vLLM asks once more after a stop token, which it looks for later.
        assert drafts[: len(noted.drafts)] == noted.drafts and len(drafts) - len(noted.drafts) <= 1
        count += sum(map(len, noted.drafts))
    assert count > 20


def passes(answer) -> list[list[int]]:
    """The tokens of each pass of an answer, the prompt's first."""
    ends = itertools.accumulate([1, *(step.emitted for step in answer.steps)], initial=0)
    return [answer.tokens[begin:end] for begin, end in itertools.pairwise(ends)]


def test_a_text_that_does_not_go_on_is_another_one():
    row = Row(SuffixDecoding(None, "chain", 4), 4, 64)
    assert row.propose([5, 6, 7, 8, 9, 1], 1) == []
    assert row.propose([5, 6, 7, 8, 9, 1, 5, 6], 2) == [7, 8]  # as many as match
    # The same text, but for a question in between: what is new is more than what was said.
    assert row.propose([5, 6, 7, 8, 9, 1, 5, 6, 3, 3, 1], 1)[:1] == [5]
    assert row.sequence.request.prompt == [5, 6, 7, 8, 9, 1, 5, 6, 3, 3]


def test_of_a_tree_the_path_of_first_children_is_drafted():
    tree = Tree.of_lists([[-1, -1, 0, 0, 2, 1]], torch.device("cpu"))
    draft = Draft(torch.tensor([[10, 11, 12, 13, 14, 15]]), tree=tree)
    assert vllm_proposer._chain(draft) == [10, 12, 14]


def test_rows_draft_alone_and_a_prompt_that_is_not_read_waits(monkeypatch):
    monkeypatch.setenv(
        vllm_proposer.DRAFTER,
        '{"_target_": "methods.pld.PromptLookup", "name": "pld", "max_draft_tokens": 3}',
    )
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: None)
    proposer = Proposer(
        SimpleNamespace(
            model_config=SimpleNamespace(model="m", tokenizer="t", max_model_len=32),
            speculative_config=SimpleNamespace(num_speculative_tokens=2),
            scheduler_config=SimpleNamespace(max_num_seqs=3),
        )
    )
    proposer.load_model()
    texts = np.zeros((3, 32), dtype=np.int32)
    texts[0, :9] = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    texts[1, :9] = [3, 4, 5, 6, 7, 8, 9, 3, 4]
    lengths = np.array([9, 9, 5], dtype=np.int32)
    assert proposer.propose([[2], [4], []], lengths, texts) == [[3, 4], [5, 6], []]
    texts[0, 9:12] = [3, 4, 5]
    assert proposer.propose([[3, 4, 5]], lengths[:1] + 3, texts, slot_mappings=None) == [[6, 7]]
