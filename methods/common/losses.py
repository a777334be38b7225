"""What trainers share about a loss: the tokens that are judged, a teacher's distributions, and what a guess costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from specbench.decoding.model.anatomy import finished, logit_steps

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch
    from specbench.decoding.model.anatomy import LogitSteps

CHUNK = 512  # positions whose logits are computed at a time
# Logits of a batch that the backward pass may keep, 2 GiB with their gradient; more are computed again.
KEPT_LOGITS = 2**28
LIKELIEST, PROBS = "likeliest", "probs"  # keys of the target's stored distributions in a batch


@dataclass(frozen=True)
class Goals:
    """Tokens of a batch whose prediction is judged.

    Attributes:
        batch_index: [n] of the row that each is in.
        positions: [n] in that row.
        weights: [n] of each in the loss.
    """

    batch_index: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, count: int | None, ahead: int = 1) -> Goals:
        """Returns the tokens with weight that are at least `ahead` tokens after the start of their row.

        Args:
            batch: tokens and their weights in the loss.
            count: how many of them, drawn in proportion to their weights and with the same sum of weights, so that the
                expected loss is the same; all if None, or if there are no more.
            ahead: the most tokens that a guess looks ahead.
        """
        weights = batch["loss_weight"][:, ahead:]
        batch_index, positions = weights.nonzero().unbind(1)
        return cls(batch_index, positions + ahead, weights[batch_index, positions]).drawn(count)

    def drawn(self, count: int | None) -> Goals:
        """Draws `count` of them in proportion to their weights, with the same sum; all if there are no more."""
        if count is None or count >= len(self.weights):
            return self
        drawn = torch.multinomial(self.weights, count, replacement=True)
        weights = (self.weights.sum() / count).expand(count)
        return Goals(self.batch_index[drawn], self.positions[drawn], weights)

    def before(self, states: torch.Tensor, ahead: int = 1) -> torch.Tensor:
        """States [B, at least T - ahead, d] -> [n, d], `ahead` tokens in front of each."""
        return states[self.batch_index, self.positions - ahead]

    def split(self, guesses: int = 1) -> Iterator[Goals]:
        """Yields parts of at most `CHUNK` guesses, `guesses` of each token, to bound the size of logits."""
        tensors, size = (self.batch_index, self.positions, self.weights), max(1, CHUNK // guesses)
        yield from (Goals(*chunk) for chunk in zip(*(tensor.split(size) for tensor in tensors)))


class Distribution(NamedTuple):
    """Probabilities [n, k] of tokens `ids` [n, k], or of all tokens if ids is None."""

    probs: torch.Tensor
    ids: torch.Tensor | None = None


@dataclass(frozen=True)
class Head:
    """An output matrix [vocab, d], its bias [vocab], and what the model does with their products."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    steps: LogitSteps = field(default_factory=list)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """A model's own head, for states after its final norm."""
        layer: Any = model.get_output_embeddings()
        return cls(layer.weight, layer.bias, logit_steps(model.config.get_text_config()))

    def __call__(self, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """States [n, d] -> logits [n, vocab], or [n, c] of the tokens `ids` [c]; in the dtype of the head.

        The head of a target that is spread over devices may be on another one than the states.
        """
        weight, bias = self.weight, self.bias
        if ids is not None:
            ids = ids.to(weight.device)
            weight, bias = weight[ids], None if bias is None else bias[ids]
        products = linear(states.to(weight.device, weight.dtype), weight, bias)
        return finished(products.to(states.device), self.steps)


class Guess(NamedTuple):
    """Guesses of tokens: states [B, at least T - ahead, d], each of the token `ahead` on, and their head."""

    share: float
    states: torch.Tensor
    head: Head
    ahead: int = 1


class Scored(NamedTuple):
    """The tokens, or rows of a head, whose logits are computed: `ids` [c] with `shifts` [c] on them; None: all."""

    ids: torch.Tensor | None = None
    shifts: torch.Tensor | None = None

    def raised(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [n, c] -> float32, raised for drawn tokens so that the softmax is that of the whole vocabulary."""
        return logits.float() if self.shifts is None else logits.float() + self.shifts


def teacher_of(
    batch: Batch, head: Head, states: torch.Tensor, ahead: int = 1
) -> Callable[[Goals], Distribution]:
    """Returns a function of goals -> the target's distributions.

    Args:
        batch: its stored distributions are used, if any.
        head: the target's.
        states: [B, at least T - ahead, d] its states to compute them from, each of the token `ahead` on.
        ahead: see `states`.
    """

    @torch.no_grad()
    def computed(goals: Goals) -> Distribution:
        return Distribution(torch.softmax(head(goals.before(states, ahead)).float(), dim=-1))

    def stored(goals: Goals) -> Distribution:
        probs = goals.before(batch[PROBS]).float()
        return Distribution(probs / probs.sum(-1, keepdim=True), goals.before(batch[LIKELIEST]).long())

    return stored if LIKELIEST in batch else computed


def text_of(batch: Batch) -> Callable[[Goals], Distribution]:
    """Returns a function of goals -> their one-hot distributions."""

    def text(goals: Goals) -> Distribution:
        ids = batch["input_ids"][goals.batch_index, goals.positions].unsqueeze(1)
        return Distribution(torch.ones(ids.shape, device=ids.device), ids)

    return text


@dataclass(frozen=True)
class Loss:
    """How much of a batch is judged.

    Attributes:
        tokens: of it; None: all. See `Goals.of`.
        vocab_sample: tokens that represent all but the target's likeliest ones of any goal; None: the logits of the
            whole vocabulary are computed.
    """

    tokens: int | None = None
    vocab_sample: int | None = None

    @classmethod
    def of(cls, cfg: DictConfig) -> Loss:
        """As configured."""
        return cls(cfg.loss_tokens, cfg.vocab_sample)

    def goals(self, batch: Batch, ahead: int = 1) -> Goals:
        """As `Goals.of`."""
        return Goals.of(batch, self.tokens, ahead)

    def scored(
        self, truth: Distribution, vocab: int, likeliest: torch.Tensor | None = None
    ) -> tuple[Scored, Distribution]:
        """Returns what is computed of a vocabulary, and the truth over it; see `sampled`."""
        if self.vocab_sample is None:
            return Scored(), truth
        return sampled(truth, vocab, self.vocab_sample, likeliest)

    def __call__(
        self,
        batch: Batch,
        goals: Goals,
        guesses: Sequence[Guess],
        truth: Callable[[Goals], Distribution],
    ) -> torch.Tensor:
        """Weighted sum [] of the cross-entropies of guesses against the truth of each goal.

        Args:
            batch: that the goals are of.
            goals: tokens that are judged.
            guesses: of them; either side may be padded to a larger vocabulary than the other.
            truth: the distributions of some goals.
        """
        vocab = len(guesses[0].head.weight)
        keeps = self.vocab_sample is not None or len(goals.weights) * len(guesses) * vocab <= KEPT_LOGITS

        def cost(chunk: Goals, *states: torch.Tensor) -> torch.Tensor:
            likeliest = None if self.vocab_sample is None else chunk.before(batch[LIKELIEST]).long()
            scored, expected = self.scored(truth(chunk), vocab, likeliest)
            logits = [scored.raised(guess.head(some, scored.ids)) for guess, some in zip(guesses, states)]
            losses = [chunk.weights @ cross_entropies(each, expected) for each in logits]
            return torch.stack([guess.share * loss for guess, loss in zip(guesses, losses)]).sum()

        total = torch.zeros((), device=goals.weights.device)
        for chunk in goals.split():
            states = [chunk.before(guess.states, guess.ahead) for guess in guesses]
            one: Any = (
                cost(chunk, *states) if keeps else checkpoint(cost, chunk, *states, use_reentrant=False)
            )
            total = total + one
        return total


ALL = Loss()


def first_choices(head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """States [n, d] -> the likeliest token or row [n] of each, by a head."""
    return torch.cat([head(chunk).argmax(-1) for chunk in states.split(CHUNK)])


def choices_ahead(
    batch: Batch,
    states: Iterable[torch.Tensor],
    heads: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    finals: torch.Tensor,
    target_head: Head,
    places: torch.Tensor | None = None,
    ahead: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """First choices [k, n] of k guesses and of the target, at places whose k guessed tokens are all the assistant's.

    Args:
        batch: of B rows of T tokens.
        states: of each guess [B, P or more, d]; guess i at a place is of the token `ahead` + i further on.
        heads: of each guess: states [n, d] -> logits [n, vocab].
        finals: [B, T, D] the target's states after its final norm.
        target_head: for these.
        places: [P] in the rows; None: all that the guessed tokens follow.
        ahead: see `states`.
    """
    k = len(heads)
    if places is None:
        places = torch.arange(finals.shape[1] - ahead - k + 1, device=finals.device)
    is_assistant, goals = batch["loss_weight"] == 1.0, [places + ahead + i for i in range(k)]
    among = torch.stack([is_assistant[:, goal] for goal in goals]).all(0)
    guesses = zip(heads, states, strict=True)
    student = [first_choices(head, guess[:, : len(places)][among]) for head, guess in guesses]
    teacher = [first_choices(target_head, finals[:, goal - 1][among]) for goal in goals]
    return torch.stack(student), torch.stack(teacher)


def sampled(
    truth: Distribution, vocab: int, count: int, likeliest: torch.Tensor | None = None
) -> tuple[Scored, Distribution]:
    """Selects the part of a vocabulary from which its softmax is estimated.

    It has the likeliest tokens of all positions, and `count` drawn ones that represent the rest: their logits are
    raised by the log of how many each represents, so that the sum of exponentials is unbiased (importance sampling
    with uniform proposals; Bengio and Senécal 2008).

    Args:
        truth: distributions of n positions with ids.
        vocab: size of the vocabulary.
        count: of drawn tokens.
        likeliest: [n, k] ids; None: those of the truth.

    Returns:
        c tokens, and the truth with indices of these instead of ids.
    """
    assert truth.ids is not None
    likely = truth.ids.flatten() if likeliest is None else torch.cat([truth.ids, likeliest], dim=1).flatten()
    likely = likely.unique()
    is_rest = torch.ones(vocab, dtype=torch.bool, device=likely.device)
    is_rest[likely] = False
    rest = is_rest.nonzero().squeeze(1)
    drawn = rest[torch.randperm(len(rest), device=rest.device)[:count]]
    ids = torch.cat([likely, drawn])
    shifts = torch.zeros(len(ids), device=ids.device)
    if len(drawn):
        shifts[len(likely) :] = log(len(rest) / len(drawn))
    places = torch.empty(vocab, dtype=torch.long, device=ids.device)
    places[ids] = torch.arange(len(ids), device=ids.device)
    return Scored(ids, shifts), Distribution(truth.probs, places[truth.ids])


def cross_entropies(logits: torch.Tensor, truth: Distribution) -> torch.Tensor:
    """The cross-entropies [n] of logits [n, vocab] against distributions."""
    probs, ids = truth
    if ids is not None:
        return logits.logsumexp(-1) - (probs * logits.gather(1, ids)).sum(-1)
    if logits.shape[-1] < probs.shape[-1]:
        probs = probs[:, : logits.shape[-1]]
        probs = probs / probs.sum(-1, keepdim=True)
    logits = logits[:, : probs.shape[-1]]
    return logits.logsumexp(-1) - (probs * logits).sum(-1)
