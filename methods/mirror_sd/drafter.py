"""Mirror-SD's drafter: the next draft is made while the target still verifies the last one.

When a verification pass leaves the exit layer, its states there go to the draft's side. For every position that is
verified, the target's own norm and head turn them into guesses of the target's decision; the draft model drafts after
each guess while the target runs its other layers (Bhendawade et al. 2025, sections 3.1 and 3.2). If the decision was
guessed, the next draft is ready; else it is drafted then, as in plain speculative sampling. Guesses affect time alone:
what is accepted is the target's decision, as with every drafter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from methods.common.heads import DraftHead, draft_head
from methods.mirror_sd.brancher import Brancher, Plan
from methods.mirror_sd.overlap import overlap, overlap_line
from methods.mirror_sd.streams import load_streams
from methods.mirror_sd.worker import Inline, Process, Thread
from specbench.decoding.cpu.packed_linear import packed_linear
from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.model.anatomy import finished, logit_steps
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams, answer_seed
from specbench.decoding.state import Batch, Draft, Prefill, SequenceState, Verified
from specbench.decoding.trace import Clock
from specbench.models.devices import choose_device
from specbench.models.pairs import Pair, draft_of
from specbench.system.errors import UserError
from specbench.system.settings import Count, Natural, Positive, Probability

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PretrainedConfig, PreTrainedModel

    from specbench.decoding.slots import Slots


class BranchingDrafter(Drafter):
    """Base of the drafters that use a `Brancher`, wherever it runs: the draft model and the brancher's parts.

    Args:
        pair: with a draft model.
        max_draft_tokens: gamma.
        acceptance: as in `MirrorSD`.
        weights: likewise.
        draft_device: likewise.
    """

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: int,
        acceptance: str,
        weights: str | None,
        draft_device: str | None = None,
    ):
        draft: Any = draft_of(pair)
        if draft_device is not None:
            draft = copy.deepcopy(draft).to(choose_device(draft_device, "method.draft_device"))
        self.max_draft_tokens = max_draft_tokens
        self.ratio = acceptance == "ratio"
        self.deterministic = not self.ratio
        self.model = StagedModel(draft, pair.vocab_size)
        self.head = draft_head(pair, self.model)
        streams = None if weights is None else load_streams(weights, draft, pair.draft_expansion)
        self._parts = draft, pair.vocab_size, self.head.target_vocab, self.head.token_ids, streams

    @staticmethod
    def draws(settings: Mapping[str, Any]) -> bool:
        """Whether drafts are drawn, by `acceptance`."""
        return settings.get("acceptance") == "ratio"

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Notes how long a sequence can get."""
        self._capacity = slots.capacity

    def _draws_of(self, sequence: SequenceState) -> tuple[SamplingParams, int]:
        """How draft tokens are chosen, and the seed of their draws.

        The seed is not that of acceptance: with the same numbers, drafts would not be independent of it.
        """
        decoding = sequence.request.decoding
        self._draws = self.ratio and not decoding.greedy
        if not self._draws:
            return decoding.greedily(), 0
        return decoding, answer_seed(sequence.request.seed, 1)

    def _widened(self, probs: torch.Tensor | None) -> torch.Tensor | None:
        """The distributions [n, rows] that a draft was drawn from -> [1, n, vocab]; None if none was drawn."""
        return self.head.widen(probs.unsqueeze(0)) if self._draws else None  # type: ignore[union-attr] # drawn


class MirrorSD(BranchingDrafter):
    """Drafts the next tokens during verification; see the module.

    Args:
        pair: with a draft model.
        max_draft_tokens: gamma.
        kappa: decisions guessed for each number of accepted tokens.
        exit_layer: layers of the target before the guesses are made; None: half of them.
        branches: keep only this many of the likeliest guesses; None: all.
        floor: keep only guesses at least this likely, by the draft model's probability of how far its draft is
            accepted.
        candidates: what guesses: the target's "exit"; the "draft" model's own distributions, as in SSD (Kumar et al.
            2026), which needs no exit and starts with the pass; the mean of "both".
        positions: "all": guesses for every number of accepted tokens; "first": only for none accepted, the narrow
            reading of the paper.
        acceptance: when sampling, "exact" accepts a draft token if the target draws that very token, so drafts take
            the likeliest tokens; "ratio" draws drafts and accepts them with probability min(1, p/q). Both are exact;
            greedy decoding has no choice.
        placement: where the draft model works: in a "process" on its own cores (models on the CPU), a "thread" with
            its own stream (CUDA), "inline" (without overlap, for comparison); "auto": process on a CPU, thread on
            CUDA.
        draft_device: device of the draft model; None: the target's.
        draft_cores: cores of a process.
        worker_timeout: seconds to wait for an answer of the worker, without those in which passes are captured.
        weights: folder with the embeddings of the streams that the draft model was trained with; None: it has none.

    Raises:
        UserError: the exit layer, the placement, the streams or the vocabulary map does not fit the pair.
    """

    needs = Needs(draft_model=True, batching=False, any_length=False, trims=True)

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 7,
        kappa: Count = 8,
        exit_layer: Natural | None = None,
        branches: Count | None = None,
        floor: Probability = 0.0,
        candidates: Literal["exit", "draft", "both"] = "exit",
        positions: Literal["all", "first"] = "all",
        acceptance: Literal["exact", "ratio"] = "exact",
        placement: Literal["auto", "process", "thread", "inline"] = "auto",
        draft_device: str | None = None,
        draft_cores: Count = 1,
        worker_timeout: Positive = 60.0,
        weights: str | None = None,
    ):
        target = pair.staged
        layers = len(target.layers)
        if exit_layer is not None and candidates == "draft":
            raise UserError("exit_layer is not used with candidates=draft: leave it out")
        exit_layer = max(1, layers // 2) if exit_layer is None else exit_layer
        if not 0 <= exit_layer <= layers:
            raise UserError(f"exit_layer must lie between 0 and the target's {layers} layers")
        self.taps = (0,) if candidates == "draft" else (exit_layer,)
        super().__init__(pair, max_draft_tokens, acceptance, weights, draft_device)
        plan = Plan(max_draft_tokens, kappa, branches, positions == "first", candidates, floor)
        self.device = target.device
        exit_parts = _exit_parts(target, self.model) if candidates in ("exit", "both") else None
        if placement == "auto":
            placement = "thread" if "cuda" in (target.device.type, self.model.device.type) else "process"
        # A worker drafts while the target verifies.
        self.extra_cores = {"process": draft_cores, "thread": 1, "inline": 0}[placement]
        args = (*self._parts, plan, exit_parts, target.config)
        if placement == "process":
            if (target.device.type, self.model.device.type) != ("cpu", "cpu"):
                raise UserError("placement=process is for models on the CPU: use thread")
            for module in (self.model.model, *(exit_parts or ())):
                module.share_memory() if isinstance(module, torch.nn.Module) else module.share_memory_()
            shape = {
                "longest": target.config.max_position_embeddings,
                "depth": max_draft_tokens,
                "width": target.hidden_size,
                "rows": self.head.rows if self.ratio else 0,
                "dtype": target.dtype,
            }
            self.worker: Inline | Thread | Process = Process(
                shape, make_brancher, args, draft_cores, worker_timeout
            )
        else:
            brancher = make_brancher(*args)
            self.worker = Inline(brancher) if placement == "inline" else Thread(brancher, worker_timeout)

    def open(self, slots: Slots, target: StagedModel) -> None:
        """Notes how long a sequence can get, and makes a clock."""
        super().open(slots, target)
        self._clock = Clock(target.device)

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Prefills the draft model, and asks for the first draft."""
        limit = sequence.remaining - 1
        if limit <= 0:
            return
        self.worker.begin(prefill.ids[0], self._capacity, *self._draws_of(sequence))
        self.worker.settle(0, sequence.tokens[-1], limit)

    def draft(self, batch: Batch) -> Draft:
        """Waits for the draft after the last decision."""
        settled, overlap = self.worker.collect()
        probs = self._widened(settled.probs)
        tokens = settled.tokens.to(self.device).unsqueeze(0)
        self._depth = min(self.max_draft_tokens, batch.sequences[0].remaining - 2)
        probs = None if probs is None else probs.to(self.device)
        self._current = Draft(tokens, probs, bytes_read=settled.bytes_read, stats=overlap)
        self._begun = self._clock.mark()
        return self._current

    def on_hidden(self, layer: int, hidden_states: torch.Tensor) -> None:
        """Hands the exit states over, so that the next draft can begin."""
        self._current.stats["exit_seconds"] = (self._begun, self._clock.mark())
        if self._depth > 0:
            self.worker.launch(self._current.tokens.shape[1], self._depth, hidden_states[0])

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Hands the target's decision over."""
        sequence = batch.sequences[0]
        limit = sequence.remaining - 1
        if limit > 0 and not sequence.done:
            self.worker.settle(verified.counts[0], sequence.tokens[-1], limit)

    @staticmethod
    def summarise(rounds: pd.DataFrame) -> dict[str, Any]:
        """`overlap`: see `methods.mirror_sd.overlap`."""
        return {"overlap": overlap(rounds)}

    @staticmethod
    def describe(stats: dict[str, Any]) -> list[str]:
        """How much of the drafting was hidden."""
        return [overlap_line(stats["overlap"])] if stats.get("overlap") else []

    def end(self, slot: int) -> float:
        """Stops the draft's side until the next answer; counts the branches after the last draft."""
        return self.worker.end()

    def close(self) -> None:
        """Ends the draft's side."""
        self.worker.close()


class StreamingMirrorSD(MirrorSD):
    """Mirror-SD with the pair's part `streaming` as its draft model, which guesses several tokens a pass."""

    needs = Needs(draft_model=True, part="streaming", batching=False, any_length=False, trims=True)


class StreamingSampling(BranchingDrafter):
    """Serial speculative sampling with the pair's part `streaming`, which guesses several tokens a pass.

    Args:
        pair: with the target.
        max_draft_tokens: gamma.
        acceptance: as in `MirrorSD`.
        weights: as in `MirrorSD`.

    Raises:
        UserError: the streams or the vocabulary map does not fit the pair.
    """

    needs = Needs(draft_model=True, part="streaming", batching=False, any_length=False, trims=True)

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 5,
        acceptance: Literal["exact", "ratio"] = "exact",
        weights: str | None = None,
    ):
        super().__init__(pair, max_draft_tokens, acceptance, weights)
        self.brancher = make_brancher(*self._parts, Plan(max_draft_tokens, 1, guesses="none"))

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Prefills the draft model."""
        self.brancher.begin(prefill.ids[0], self._capacity, *self._draws_of(sequence))
        self._decision = 0, sequence.tokens[-1]

    def draft(self, batch: Batch) -> Draft:
        """Drafts after the last decision."""
        settled = self.brancher.settle(*self._decision, batch.max_draft)
        return Draft(settled.tokens.unsqueeze(0), self._widened(settled.probs), bytes_read=settled.bytes_read)

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Notes the target's decision."""
        self._decision = verified.counts[0], batch.sequences[0].tokens[-1]


def _bytes(module: torch.nn.Module | torch.Tensor) -> int:
    return weight_bytes(module) if isinstance(module, torch.nn.Module) else module.nbytes


def _exit_parts(target: StagedModel, model: StagedModel) -> tuple[Any, ...]:
    """The target's norm and its head's weight and bias, over the ids that the draft model can be given."""
    head, device = target.lm_head, model.device
    weight = head.weight[: model.vocab_size].to(device)
    bias = [] if head.bias is None else [head.bias[: model.vocab_size].to(device)]
    norm = copy.deepcopy(target.norm)
    # Accelerate's, of a target on several devices: it moves states to the old one.
    norm.__dict__.pop("forward", None)
    return norm.to(device), weight, *bias


def make_brancher(
    draft: PreTrainedModel,
    vocab_size: int,
    target_vocab: int,
    token_ids: torch.Tensor | None,
    streams: torch.Tensor | None,
    plan: Plan,
    exit_parts: tuple[Any, ...] | None = None,
    exit_config: PretrainedConfig | None = None,
) -> Brancher:
    """Makes the draft's side; called in the process or thread where it works.

    Args:
        draft: the draft model.
        vocab_size: ids of the tokenizer.
        target_vocab: ids of the target.
        token_ids: ids of a trimmed head; None for a whole one.
        streams: [s, d] embeddings of stream states; None for none.
        plan: what is drafted ahead of the target's decision.
        exit_parts: from `_exit_parts`; None when nothing is guessed from an exit.
        exit_config: the target's, for the scaling of its logits; needed with `exit_parts`.
    """
    model = StagedModel(draft, vocab_size, target_vocab)
    exit_head = None
    if exit_parts is not None:
        assert exit_config is not None
        norm, weight, *bias = exit_parts
        head = packed_linear(weight, bias[0] if bias else None)
        steps = logit_steps(exit_config)

        def exit_head(states: torch.Tensor) -> torch.Tensor:
            return finished(head(norm(states)), steps)

    with torch.inference_mode():  # no answer should include the packing and compiling of a first pass
        first = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model.prefill(first, model.new_cache(1 + model.padding))
        if exit_head is not None:
            exit_head(weight.new_zeros(1, weight.shape[1]))
    exit_bytes = sum(_bytes(part) for part in exit_parts or ())
    return Brancher(model, DraftHead(model, target_vocab, token_ids), exit_head, plan, streams, exit_bytes)
