"""What drafting and verification hand to each other: requests, sequences, `Batch`, `Draft`, `Prefill`, `Verified`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.device import on_device, span
from specbench.decoding.tree import Tree
from specbench.system.settings import BLOCK

if TYPE_CHECKING:
    from specbench.decoding.kv_layout import RaggedLayout
    from specbench.decoding.sampling import SamplingParams
    from specbench.decoding.trace import Step, Timestamp

UNKNOWN = 2**62  # a length on the host that only the device knows: code that reads it fails
NORMED = -1  # among taps: the output of the final norm


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids.
        decoding: how tokens are chosen, and how many at most.
        seed: of the sampling; greedy decoding draws nothing.
        stop_ids: in place of the engine's; None for those.
    """

    prompt: list[int]
    decoding: SamplingParams
    seed: int = 0
    stop_ids: frozenset[int] | None = None


@dataclass(slots=True)
class SequenceState:
    """A sequence that is being decoded, on the host.

    Attributes:
        request_index: its index in the input.
        request: what to decode.
        stop_ids: token ids that end it.
        tokens: the prompt and all new tokens; the last one is pending: no layer of the target has processed it.
        steps: of each round that it took part in; their times and bytes are noted once every sequence is done.
        prefill: marks in time around its prefill.
        ended: whether the drafter knows that it is complete.
    """

    request_index: int
    request: Request
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prefill: tuple[Timestamp, ...] = ()
    ended: bool = False

    @property
    def length(self) -> int:
        """Known tokens, the pending one included."""
        return len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def emitted(self) -> int:
        """The number of its new tokens."""
        return max(0, len(self.tokens) - len(self.request.prompt))

    @property
    def remaining(self) -> int:
        """New tokens that it may still get."""
        return len(self.request.prompt) + self.request.decoding.max_new_tokens - len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether it has ended, by a stop token or at its cap."""
        return self.tokens[-1] in self.stop_ids or self.remaining == 0


@dataclass(frozen=True, slots=True)
class Resume:
    """The target's first layers, which the drafter has already run over the pending token and every draft token.

    Attributes:
        layer: how many layers were run.
        hidden: [b, 1 + k, hidden_size] the states after them.
    """

    layer: int
    hidden: torch.Tensor


@dataclass(slots=True)
class Draft:
    """Tokens to verify, k of each of the b running sequences.

    Attributes:
        tokens: [b, k] int64.
        probs: [b, k, vocab] the distribution that each token was drawn from; None when the tokens were chosen without
            chance (greedy, prompt lookup): acceptance then treats each as having probability 1 under the drafter.
        tree: None for a chain.
        candidates: [b] leading nodes of each sequence that may be accepted; the rest only produce logits
            (`Verified.logits`), or are padding. None: all.
        resume: None unless the drafter has already run the target's first layers.
        bytes_read: bytes of weights read to make this draft; NaN where that cannot be known.
        report: computes from the verification's logits [b, 1 + k, vocab] whole numbers [b, m] that the drafter needs on
            the host; they return as `Verified.report`, in the only copy of the round.
        stats: the drafter's own numbers for this round, which the trace keeps as they are; it may add some until
            `Drafter.commit` returns. Values: whole numbers, floats, texts, None, lists with an entry for each sequence,
            tensors [b] or [b, n], pairs of marks of the engine's clock (kept as seconds).
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    _: KW_ONLY
    tree: Tree | None = None
    candidates: torch.Tensor | None = None
    resume: Resume | None = None
    bytes_read: float = 0
    report: Callable[[torch.Tensor], torch.Tensor] | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokens: Sequence[list[int]],
        device: torch.device,
        parents: Sequence[list[int]] | None = None,
    ) -> Draft:
        """A draft of tokens chosen deterministically on the host, of different lengths.

        Args:
            tokens: of each sequence.
            device: that they are verified on.
            parents: of trees, as in `Tree`; None for chains.
        """
        counts = [len(some) for some in tokens]
        k = max(counts)
        padded = on_device([[*some, *[0] * (k - len(some))] for some in tokens], device)
        candidates = None if min(counts) == k else on_device(counts, device)
        tree = None
        if parents is not None and k:
            # Padding hangs on the pending token and is not accepted.
            filled = [[*some, *[-1] * (k - len(some))] for some in parents]
            tree = Tree.of_lists(filled, device)
        return cls(padded.view(len(counts), k), tree=tree, candidates=candidates)

    def acceptable(self) -> torch.Tensor | None:
        """[b, k] which tokens are candidates; None: all."""
        if self.candidates is None:
            return None
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.candidates.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The outcome of a prompt's pass.

    Attributes:
        ids: [1, n] the prompt.
        logits: [1, vocab] after the prompt's last token.
        hidden_states: of each tapped layer [1, n, d].
    """

    ids: torch.Tensor
    logits: torch.Tensor
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Verified:
    """The outcome of a verification.

    Attributes:
        logits: [b, 1 + k, vocab] after the pending token and each node.
        hidden_states: of each tapped layer [b, 1 + k, d], of the same tokens. Layers below the one that the draft
            resumed at are missing.
        count: [b] draft tokens that were accepted.
        path: of a tree [b, k]: the first `count` are the indices of the accepted nodes from the root down, the rest
            those of any nodes; None for a chain.
        counts: `count` on the host.
        tokens: the new tokens of each sequence on the host, cut after a stop token.
        draft: the verified draft; in a wrapped drafter it may be the wrapper's.
        report: the result of `Draft.report`, on the host.
        own_counts: `counts` of the drafter's own draft: 0 for a sequence whose draft a wrapper has replaced.
    """

    logits: torch.Tensor
    hidden_states: dict[int, torch.Tensor]
    count: torch.Tensor
    path: torch.Tensor | None
    counts: list[int]
    tokens: list[list[int]]
    draft: Draft
    report: list[list[int]] | None = None
    own_counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own_counts = self.own_counts or self.counts

    def accepted_states(self, states: torch.Tensor) -> torch.Tensor:
        """States or logits [b, 1 + k, d] -> [b, 1 + m, d], those of the pending token and the accepted nodes, in order.

        m is the most that any sequence has accepted; only the first 1 + counts[i] of sequence i are valid.
        """
        most = max(self.counts)
        if self.path is None:
            return states[:, : 1 + most]
        nodes = torch.nn.functional.pad(self.path[:, :most] + 1, (1, 0))
        return states.gather(1, nodes.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """States or logits [b, 1 + k, d] -> [b, d], those of the last accepted token, or else of the pending one."""
        return self.accepted_states(states)[torch.arange(states.shape[0], device=states.device), self.count]


@dataclass(slots=True)
class Batch:
    """A drafter's input in one round: the b running sequences, which have the first slots of every buffer.

    Attributes:
        sequences: on the host.
        lengths: known tokens of each, the pending one included.
        limits: the longest path of a draft that each can still use, at most the drafter's `max_draft_tokens`.
        max_nodes: the most nodes that a draft may have.
        tokens: [slots, capacity] int64 on the device.
        decoding: how tokens are chosen.
        layout: of the target's cache.
        uniforms: [slots, capacity, 1 + 2 * columns] the numbers of `position_uniforms` by sequence and position; None
            when greedy. A sequence's samples depend on its seed alone, not on batch composition or scheduling.
        kv_bucket: set inside a captured function: the KV length to attend to. `lengths` is then unavailable on the
            host, see `seq_lens`. None elsewhere.
    """

    sequences: list[SequenceState]
    lengths: list[int]
    limits: list[int]
    max_nodes: int
    tokens: torch.Tensor
    decoding: SamplingParams
    layout: RaggedLayout
    uniforms: torch.Tensor | None = None
    kv_bucket: int | None = None
    _seq_lens: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Running sequences."""
        return len(self.lengths)

    @property
    def is_over(self) -> bool:
        """Whether all of its sequences end with this round."""
        return all(sequence.done for sequence in self.sequences)

    @property
    def max_draft(self) -> int:
        """The largest of `limits`."""
        return max(self.limits)

    @property
    def seq_lens(self) -> torch.Tensor:
        """[b] `lengths` on the device."""
        if self._seq_lens is None:
            self._seq_lens = on_device(self.lengths, self.tokens.device)
        return self._seq_lens

    def window(self, buffer: torch.Tensor, offset: int, n: int) -> torch.Tensor:
        """Selects n entries of each sequence from a buffer with an entry for each position.

        Args:
            buffer: [slots, capacity, ...].
            offset: of the first of them, from the end of the known tokens; the pending token is at -1. Before the start
                of a sequence its first entry is repeated.
            n: entries.

        Returns:
            [b, n, ...]
        """
        if self.kv_bucket is None and len({*self.lengths}) == 1 and (start := self.lengths[0] + offset) >= 0:
            return buffer[: self.size, start : start + n]
        at = span(self.seq_lens + offset, n)
        at = at.clamp(min=0) if offset < 0 else at
        at = at.view(self.size, n, *[1] * (buffer.dim() - 2))
        return buffer[: self.size].gather(1, at.expand(-1, -1, *buffer.shape[2:]))

    def last_tokens(self, n: int) -> torch.Tensor:
        """[b, n] the last n known tokens of each sequence, a shorter one padded with its first token in front."""
        return self.window(self.tokens, -n, n)

    def draws(self, offset: int, siblings: int | None = None) -> torch.Tensor | None:
        """Random numbers to draw the draft tokens at the position `offset` with; None when greedy.

        Args:
            offset: 0 for the first draft token.
            siblings: for a tree, how many tokens are drawn there after the same token.

        Returns:
            [b], or [b, siblings].
        """
        if self.uniforms is None:
            return None
        numbers = self.window(self.uniforms, offset, 1)[:, 0]
        first = 1 + numbers.shape[-1] // 2  # after the target's own and those to accept with
        if self.decoding.verification == BLOCK:
            return numbers[:, first + offset]
        return numbers[:, first] if siblings is None else numbers[:, first : first + siblings]

    def device_only(
        self, kv_bucket: int, seq_lens: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor | None
    ) -> Batch:
        """A device-only copy of this batch.

        Args:
            kv_bucket: as the attribute.
            seq_lens: [b].
            tokens: [b, capacity].
            uniforms: [b, capacity, ...], or None.
        """
        return replace(
            self,
            sequences=[],
            lengths=[UNKNOWN] * self.size,
            limits=[],
            max_nodes=UNKNOWN,
            tokens=tokens,
            layout=None,  # type: ignore[arg-type] # that of the target may know more on the host than lengths
            uniforms=uniforms,
            kv_bucket=kv_bucket,
            _seq_lens=seq_lens,
        )
