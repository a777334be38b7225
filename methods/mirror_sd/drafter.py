"""Mirror-SD's drafter: the next draft is made while the target still verifies the last one.

When a verification pass leaves the exit layer, its states there go to the draft's side. The target's own norm and head
make guesses of them, for every position that is verified, at what the target will decide; the draft model drafts behind
each guess while the target goes on through its other layers (Bhendawade et al. 2025, sections 3.1 and 3.2). If the
decision was guessed, the next draft is there; else it is drafted then, as in plain speculative sampling. Guesses decide
about time alone: what the target keeps is up to it, as with every drafter.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch

from methods.heads import DraftHead, draft_head
from methods.mirror_sd.brancher import Brancher, Plan
from methods.mirror_sd.link import Inline, Process, Thread
from methods.mirror_sd.streams import load_streams
from specbench.decoding.draft import Context, Draft, Drafter, Needs
from specbench.decoding.layers import weight_bytes
from specbench.decoding.linear import laid_linear
from specbench.decoding.target import Prefill, Target
from specbench.errors import UserError
from specbench.pairs import Pair, draft_of
from specbench.questions import packaged
from specbench.values import Count, Positive, Probability, Range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.decoding.kv_cache import KVCache


class MirrorSD(Drafter):
    """Drafts the next tokens during verification; see the module.

    Args:
        pair: with a draft model.
        max_draft_tokens: gamma.
        kappa: decisions guessed for each number of accepted tokens.
        exit_layer: layers of the target in front of the guesses; None: half of them.
        branches: of all guesses only so many, the likeliest; None: all.
        floor: and only those that are as likely as this, by the draft model's probability of how far its draft is
            accepted.
        candidates: guess from the target's "exit"; from the "draft" model's own distributions, as SSD does (Kumar et
            al. 2026), which needs no exit and is launched with the pass; from the mean of "both"; "none": every draft
            is made after the decision, as in plain speculative sampling.
        positions: "all" guesses for every number of accepted tokens, "first" for none accepted alone, the narrow
            reading of the paper.
        acceptance: when sampling, "exact" keeps a draft token if the target draws that very token, so the draft takes
            the likeliest ones; "ratio" draws drafts and keeps them with min(1, p/q). Both are exact; greedy decoding
            has no choice.
        placement: where the draft model works: in a "process" on cores of its own (models on the CPU), a "thread" with
            a stream of its own (CUDA), "inline" (without overlap, to compare with); "auto": process on a CPU, thread on
            CUDA.
        draft_device: device of the draft model; None: the target's.
        draft_cores: cores of a process.
        patience: seconds to wait for an answer of the worker.
        streams: folder with the embeddings of the streams that the draft model was trained with; None: it has none.
        vocab_map: folder of a vocabulary map, for a trimmed head; see `methods.heads`.
        vocab_size: the size of the trimmed head; None for all tokens of the map.

    Raises:
        UserError: the exit layer, the placement, the streams or the vocabulary map does not fit the pair.
    """

    needs = Needs(draft_model=True)

    def __init__(
        self,
        pair: Pair,
        max_draft_tokens: Count = 7,
        kappa: Count = 8,
        exit_layer: Annotated[int, Range(0)] | None = None,
        branches: Count | None = None,
        floor: Probability = 0.0,
        candidates: Literal["exit", "draft", "both", "none"] = "exit",
        positions: Literal["all", "first"] = "all",
        acceptance: Literal["exact", "ratio"] = "exact",
        placement: Literal["auto", "process", "thread", "inline"] = "auto",
        draft_device: str | None = None,
        draft_cores: Count = 1,
        patience: Positive = 60.0,
        streams: str | None = None,
        vocab_map: str | None = None,
        vocab_size: Count | None = None,
    ):
        target = Target(pair.target)
        layers = len(target.layers)
        self.launch_layer = layers // 2 if exit_layer is None else exit_layer
        if not 0 <= self.launch_layer <= layers:
            raise UserError(f"method.exit_layer must lie between 0 and the target's {layers} layers")
        if candidates in ("draft", "none"):
            self.launch_layer = 0 if candidates == "draft" else None
        self.max_draft_tokens = max_draft_tokens
        self.ratio = acceptance == "ratio"
        self.certain = not self.ratio
        plan = Plan(max_draft_tokens, kappa, branches, positions == "first", candidates, floor)

        draft: Any = draft_of(pair)
        if draft_device is not None:
            draft = copy.deepcopy(draft).to(draft_device)
        self.model = Target(draft, pair.vocab_size)
        self.head = draft_head(pair, self.model, vocab_map, vocab_size)
        self.device = target.device
        exit_parts = _exit_parts(target, self.model) if candidates in ("exit", "both") else None
        self._pass_bytes = self.model.pass_bytes(head=False) + self.head.bytes
        self._guess_bytes = sum(_bytes(part) for part in exit_parts or ())

        if placement == "auto" and candidates == "none":
            placement = "inline"
        elif placement == "auto":
            placement = "thread" if "cuda" in (target.device.type, self.model.device.type) else "process"
        # A worker drafts while the target verifies, on cores of its own.
        self.uninterrupted = placement != "inline"
        guessing = None if streams is None else load_streams(packaged(streams), draft, pair.draft_expansion)
        made = (draft, pair.vocab_size, self.head.vocab_size, self.head.kept, exit_parts, plan, guessing)
        if placement == "process":
            if (target.device.type, self.model.device.type) != ("cpu", "cpu"):
                raise UserError("method.placement=process is for models on the CPU: use thread")
            for part in (draft, *(exit_parts or ())):
                part.share_memory() if isinstance(part, torch.nn.Module) else part.share_memory_()
            shape = {
                "longest": target.config.max_position_embeddings,
                "depth": max_draft_tokens,
                "width": target.hidden_size,
                "rows": self.head.rows if self.ratio else 0,
                "dtype": target.dtype,
            }
            self.link: Inline | Thread | Process = Process(shape, make_brancher, made, draft_cores, patience)
        else:
            brancher = make_brancher(*made)
            self.link = Inline(brancher) if placement == "inline" else Thread(brancher, patience)

    def begin(self, context: Context, prefill: Prefill, target: Target, cache: KVCache) -> None:
        """Prefills the draft model, and asks for the first draft."""
        decoding = context.decoding
        limit = decoding.max_new_tokens - 2
        if limit <= 0:
            return
        self._draws = self.ratio and not decoding.greedy
        temperature, seed = 0.0, 0
        if self._draws:
            # Numbers of its own: drawn from the very ones that acceptance uses, drafts would not be independent of it.
            temperature = decoding.temperature
            seed = int(np.random.SeedSequence([context.seed, 1]).generate_state(1)[0])
        self.link.begin(context.known()[:-1], context.tokens.shape[0], temperature, seed)
        self.link.settle(0, context.following, limit)

    def launch(self, context: Context, draft: Draft, states: torch.Tensor) -> None:
        """Hands the exit states [1 + k, d] over, so that the next draft can begin."""
        depth = min(self.max_draft_tokens, context.max_draft - 1)
        if depth > 0:
            self.link.launch(draft.tokens.shape[0], depth, states)

    def commit(self, context: Context, accepted: int) -> None:
        """Hands the target's decision over."""
        limit = context.max_draft - accepted - 1
        if limit > 0:
            self.link.settle(accepted, context.following, limit)

    def draft(self, context: Context) -> Draft:
        """Waits for the draft behind the last decision."""
        reply = self.link.collect()
        probs = self.head.spread([reply.probs]).to(self.device) if self._draws else None  # type: ignore[union-attr] # drawn
        read = sum(reply.passes) * self._pass_bytes
        if reply.beside.hit is not None:
            read += self._guess_bytes + self._pass_bytes  # of the guesses, and of looking ahead for them
        return Draft(reply.tokens.to(self.device), probs, bytes_read=read, beside=reply.beside)

    def end(self) -> None:
        """Stops the draft's side until the next answer."""
        self.link.end()

    def close(self) -> None:
        """Ends the draft's side."""
        self.link.close()


class StreamingMirrorSD(MirrorSD):
    """The same with the pair's part `streaming` as its draft model, which guesses several tokens a pass."""

    needs = Needs(draft_model=True, part="streaming")


def _bytes(part: torch.nn.Module | torch.Tensor) -> int:
    return weight_bytes(part) if isinstance(part, torch.nn.Module) else part.nbytes


def _exit_parts(target: Target, model: Target) -> tuple[Any, ...]:
    """The target's norm and its head's weight and bias, over the ids that the draft model can be given."""
    head, device = target.lm_head, model.device
    weight = head.weight[: model.vocab_size].to(device)
    bias = [] if head.bias is None else [head.bias[: model.vocab_size].to(device)]
    return copy.deepcopy(target.norm).to(device), weight, *bias


def make_brancher(
    draft: PreTrainedModel,
    vocab_size: int,
    width: int,
    kept: torch.Tensor | None,
    exit_parts: tuple[Any, ...] | None,
    plan: Plan,
    streams: torch.Tensor | None,
) -> Brancher:
    """Makes the draft's side; called in the process or thread where it works.

    Args:
        draft: the draft model.
        vocab_size: ids of the tokenizer.
        width: ids of the target.
        kept: ids of a trimmed head; None for a whole one.
        exit_parts: as `_exit_parts` gives them; None when nothing is guessed from an exit.
        plan: what is drafted ahead of the target's decision.
        streams: [s, d] embeddings of stream states; None for none.
    """
    model = Target(draft, vocab_size, width)
    exit_head = None
    if exit_parts is not None:
        norm, weight, *bias = exit_parts
        head = laid_linear(weight, bias[0] if bias else None)

        def exit_head(states: torch.Tensor) -> torch.Tensor:
            return head(norm(states))

    return Brancher(model, DraftHead(model, width, kept), exit_head, plan, streams)
