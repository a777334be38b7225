"""Training heads that guess tokens further ahead: the loss, how often they are right, the tree of their ranks.

Head i at position t guesses token t + 2 + i. It learns the target's own distribution of that token. A guess counts in
the loss if the guessed token is the assistant's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from methods.common.losses import ALL, CHUNK, Guess, Head, Loss, choices_ahead, teacher_of
from methods.common.rank_trees import best_tree, counted_paths, ranks_in
from methods.common.training import batches_on, finals_of, held_out_figures, train_part

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel
    from specbench.models.pairs import Pair

RANKS, COUNTED_BATCHES = 10, 40  # of a tree: the lowest ranks, and batches that they are counted on


class Guesses(torch.nn.Module):
    """Base of the losses of models that guess several tokens ahead of a frozen target."""

    def __init__(self, target: StagedModel):
        super().__init__()
        self.target, self.head = target, Head.of(target.model)

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [k, n] of k guesses and of the target, at positions that enough assistant tokens follow."""
        raise NotImplementedError

    def rank_paths(self, batch: Batch) -> Counter[tuple[int, ...]]:
        """Counts how often the assistant's tokens had each path of ranks, prefixes of paths included."""
        raise NotImplementedError


class HeadDistillation(Guesses):
    """batch -> cross-entropy of K heads against the frozen target.

    Args:
        count: K.
        target: frozen.
        decay: head i weighs decay^i in the loss.
        loss: what of a batch is judged.
    """

    def __init__(self, count: int, target: StagedModel, decay: float = 1.0, loss: Loss = ALL):
        super().__init__(target)
        self.count, self.decay, self.loss = count, decay, loss

    def states(self, batch: Batch, finals: torch.Tensor) -> list[torch.Tensor]:
        """Returns each head's states for its output matrix, at the positions it can guess from.

        Args:
            batch: of B rows of T tokens.
            finals: [B, T, d] the target's states after its final norm.

        Returns:
            Of head i [B, T - 1 - i, d].
        """
        raise NotImplementedError

    def output(self, _i: int) -> Head:
        """Returns the output matrix of head i: the target's own head, unless it has another."""
        return self.head

    def logits(self, states: torch.Tensor, i: int) -> torch.Tensor:
        """States [n, d] of head i -> logits [n, vocab]."""
        return self.output(i)(states)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the cross-entropies of a batch."""
        finals = finals_of(self.target, batch)
        guesses = [
            Guess(self.decay**i, states, self.output(i), 2 + i)
            for i, states in enumerate(self.states(batch, finals))
        ]
        truth = teacher_of(batch, self.head, finals)
        return self.loss(batch, self.loss.goals(batch, ahead=1 + self.count), guesses, truth)

    def choices(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """First choices [K, n] of the heads and of the target, at positions that K more assistant tokens follow."""
        finals = finals_of(self.target, batch)
        heads = [self.output(i) for i in range(self.count)]
        return choices_ahead(batch, self.states(batch, finals), heads, finals, self.head)

    @torch.no_grad()
    def rank_paths(self, batch: Batch) -> Counter[tuple[int, ...]]:
        """As in `Guesses`."""
        states = self.states(batch, finals_of(self.target, batch))
        return count_ranks(states, self.logits, batch, self.count)


def count_ranks(
    states: Iterable[torch.Tensor],
    logits: Callable[[torch.Tensor, int], torch.Tensor],
    batch: Batch,
    count: int,
) -> Counter[tuple[int, ...]]:
    """Counts the paths of ranks that the assistant's tokens had among the guesses.

    Args:
        states: of each of `count` guesses [B, at least T - 2 - i, d]; guess i at position t is of token t + 2 + i.
        logits: states [n, d] and i -> logits [n, vocab].
        batch: of B rows of T tokens.
        count: levels of the paths.
    """
    ids, is_assistant = batch["input_ids"], batch["loss_weight"] == 1.0
    b, t = ids.shape
    ranks = torch.full((b, t, count), RANKS, device=ids.device)
    for i, guess in enumerate(states):
        batch_index, positions = is_assistant[:, 2 + i :].nonzero().unbind(1)
        for batch_chunk, position_chunk in zip(batch_index.split(CHUNK), positions.split(CHUNK)):
            scores = logits(guess[batch_chunk, position_chunk], i)
            of_tokens = ranks_in(scores, ids[batch_chunk, position_chunk + 2 + i])
            ranks[batch_chunk, position_chunk, i] = of_tokens.clamp(max=RANKS)
    # The pending token and all after it are the assistant's.
    batch_index, positions = is_assistant[:, 1 : t - count].nonzero().unbind(1)
    return counted_paths(ranks[batch_index, positions].tolist(), RANKS)


def train_heads(
    module: Guesses,
    cfg: DictConfig,
    pair: Pair,
    save: Callable[..., None],
    begins: str,
    name: str = "head",
) -> Path:
    """Trains as configured; at the end the `cfg.nodes` most frequent paths of ranks become a tree.

    Args:
        module: with what is trained.
        cfg: settings of the trainer.
        pair: with the target.
        save: called with a folder, a dtype and, by name, entries of config.json: tree, its counts, figures.
        begins: description of the initial weights, for the record.
        name: of a guess, in the names of figures.

    Returns:
        The folder of what was trained.
    """

    def finish(out: Path, dtype: torch.dtype, **figures: float) -> None:
        path_counts: Counter[tuple[int, ...]] = Counter()
        for batch in islice(batches_on(cfg, pair), COUNTED_BATCHES):
            path_counts += module.rank_paths(batch)
        tree = best_tree(path_counts, cfg.nodes)
        notes: dict[str, Any] = {"tree": tree, "tree_counts": [path_counts[path] for path in tree]}
        save(out, dtype, **notes, **figures)

    return train_part(module, held_out_figures(module.choices, name), finish, cfg, pair, begins)
