"""Look-up drafters of this project inside vLLM: its speculative kind `custom_class`, with the class `Proposer`.

vLLM imports this module in its own process and environment, where `DRAFTER` holds the drafter's configuration as JSON.
It verifies chains: of a draft that is a tree, the path of first children is taken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from specbench.config.spec import make_drafter
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Draft, Prefill, Request, SequenceState, Verified

if TYPE_CHECKING:
    import numpy as np

    from specbench.decoding.drafter import Drafter

DRAFTER = "SPECBENCH_DRAFTER"  # an environment variable
DEVICE = torch.device("cpu")


class Proposer:
    """Makes drafts for vLLM, once a round for all its rows; each row has a drafter of its own.

    Args:
        vllm_config: of vLLM.
    """

    def __init__(self, vllm_config: Any):
        from transformers import AutoTokenizer  # late: it takes a second, and tests need none

        model, longest = vllm_config.model_config, vllm_config.speculative_config.num_speculative_tokens
        pair = SimpleNamespace(
            name=model.model, tokenizer=AutoTokenizer.from_pretrained(model.tokenizer), device=DEVICE
        )
        group = json.loads(os.environ[DRAFTER])
        rows = vllm_config.scheduler_config.max_num_seqs
        self.rows = [Row(make_drafter(group, pair=pair), longest, model.max_model_len) for _ in range(rows)]

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts to follow the text of every row.

        Args:
            sampled_token_ids: the new tokens of each row; empty while its prompt is not read completely.
            num_tokens_no_spec: [rows] known tokens of each, the new ones included.
            token_ids_cpu: [rows, capacity] these tokens.
            slot_mappings: not used.

        Returns:
            Draft tokens of each row.
        """
        return [
            row.propose(text[:length].tolist(), len(new)) if new else []
            for row, new, length, text in zip(self.rows, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        ]

    def load_model(self, *_: object, **__: object) -> None:
        """Has no model."""


class Row:
    """A drafter that follows the texts of one row, one after the other.

    Args:
        drafter: a look-up drafter.
        longest: draft tokens at most.
        context: tokens of a text at most.
    """

    def __init__(self, drafter: Drafter, longest: int, context: int):
        self.drafter, self.longest, self.context = drafter, longest, context
        self.sequence: SequenceState | None = None
        self.draft = Draft(torch.zeros(1, 0, dtype=torch.int64))
        drafter.open(Slots(1, context + longest + 1, DEVICE), None)  # type: ignore[arg-type] # it looks at no target

    def propose(self, text: list[int], new: int) -> list[int]:
        """Draft tokens after a text, whose last `new` tokens came since the last call."""
        sequence = self.sequence
        if sequence is None or text[:-new] != sequence.tokens:
            sequence = self.sequence = self._begin(text, new)
        else:
            batch, added = self._batch(sequence), text[-new:]
            sequence.tokens += added
            self.drafter.commit(batch, _verified(self.draft, added))
        batch = self._batch(sequence)
        if batch.max_draft < 1:
            self.draft = Draft(batch.tokens[:, :0])
            return []
        self.draft = self.drafter.draft(batch)
        return _chain(self.draft)[: batch.max_draft]

    def _begin(self, text: list[int], new: int) -> SequenceState:
        """Begins a new text in place of the previous one."""
        if self.sequence is not None:
            self.drafter.end(0)
        prompt = text[:-new]
        request = Request(prompt, SamplingParams(self.context))
        sequence = SequenceState(0, request, frozenset(), list(text))
        self.drafter.begin(0, sequence, Prefill(torch.tensor([prompt]), torch.empty(1, 0)))
        return sequence

    def _batch(self, sequence: SequenceState) -> Batch:
        limit = min(self.longest, self.drafter.max_draft_tokens, self.context - sequence.length - 1)
        return Batch(
            [sequence],
            [sequence.length],
            [limit],
            self.drafter.max_nodes or limit,
            torch.zeros(1, 1, dtype=torch.int64),
            sequence.request.decoding,
            None,  # type: ignore[arg-type] # there is no cache of ours
        )


def _verified(draft: Draft, new: list[int]) -> Verified:
    """The outcome of a draft, from which all new tokens but the last one were accepted."""
    count = len(new) - 1
    return Verified(torch.empty(1, 0), {}, torch.tensor([count]), None, [count], [new], draft)


def _chain(draft: Draft) -> list[int]:
    """The tokens of a chain, or those on a tree's path of first children."""
    [tokens] = draft.tokens.tolist()
    if draft.candidates is not None:
        tokens = tokens[: int(draft.candidates)]
    if draft.tree is None:
        return tokens
    path, at = [], -1
    for node, (token, parent) in enumerate(zip(tokens, draft.tree.parents[0].tolist())):
        if parent == at:
            path.append(token)
            at = node
    return path
