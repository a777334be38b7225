"""Trains EAGLE-3's drafting model: `specbench train eagle3 pair=... [conversations=FILE] [out=FOLDER]`.

Training-time test (`methods.common.step_distillation`) of `draft_steps` steps over the draft vocabulary, with 0.8^j as
the weight of step j. Unlike in the authors' script the loss counts the tokens that the assistant says by the token that
is guessed, and the head begins as the target's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import pad

from methods.common.checkpoints import layer_sizes
from methods.common.initialisation import UNSURE, scale_of, silence
from methods.common.losses import ALL, Distribution, Loss
from methods.common.step_distillation import StepDistillation
from methods.common.training import (
    SETTINGS,
    batches,
    check_length,
    check_like_layer,
    target_pair,
    train_part,
    trainer,
)
from specbench.config.compose import program
from specbench.data.conversations import watched
from specbench.models.pairs import Pair
from specbench.system.errors import UserError
from specbench.system.settings import Count, Natural

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from methods.eagle3.model import Eagle3Model
    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel

DECAY = 0.8
COUNTED_BATCHES = 500  # of training text, for the draft vocabulary
TINY = 1e-30  # instead of no probability at all


class TrainingTimeTest(StepDistillation):
    """`StepDistillation` over the draft vocabulary: a place whose likeliest token is outside it does not count."""

    draft_ids: torch.Tensor
    model: Eagle3Model

    def __init__(self, model: Eagle3Model, target: StagedModel, steps: int, loss: Loss = ALL):
        super().__init__(model, target, steps, DECAY, loss)
        # [vocab] the draft's own id of each of the target's tokens; -1: it has none.
        draft_ids = torch.full((target.vocab_size,), -1, device=target.device)
        draft_ids[model.token_ids] = torch.arange(len(model.token_ids), device=target.device)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.rows = len(model.token_ids)

    def logits(self, states: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs [n, d] of the model -> logits [n, draft vocabulary], or of some rows [c] of its head."""
        return self.model.logits(states, rows)

    def ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the model's head -> token ids of the target."""
        return self.model.token_ids[rows]

    def inside(self, truth: Distribution) -> tuple[Distribution, torch.Tensor]:
        """The target's distributions, cut to the draft vocabulary, and whether its first choice [n] is in that."""
        probs, ids = truth
        if ids is None:
            is_inside = self.draft_ids[probs.argmax(-1)] >= 0
            probs = probs[:, self.model.token_ids]
        else:
            ids = self.draft_ids[ids]
            is_inside = ids.gather(1, probs.argmax(-1, keepdim=True)).squeeze(1) >= 0
            probs, ids = probs * (ids >= 0), ids.clamp(min=0)
        return Distribution(probs / probs.sum(-1, keepdim=True).clamp(min=TINY), ids), is_inside


def frequent_ids(texts: Iterable[Batch], size: int, vocab: int) -> torch.Tensor:
    """[size] ids in ascending order: the assistant's most frequent tokens, filled up with unseen ones."""
    counts: Counter[int] = Counter()
    for batch in watched(texts, "draft vocabulary", "batch"):
        counts.update(batch["input_ids"][batch["loss_weight"] == 1.0].tolist())
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


@torch.no_grad()
def fresh_model(
    target: StagedModel, token_ids: torch.Tensor, like_layer: int | None = None, **variants: Any
) -> Eagle3Model:
    """A drafting model to train, of the target's width and heads.

    g is the state at the deepest tap. Norm and head are the target's, the norm smaller: at first the model repeats the
    next token, and unlearns this sooner if it is less sure. The authors begin with random weights everywhere.

    Args:
        target: model to draft for.
        token_ids: [draft vocabulary] ids that its head scores.
        like_layer: layer of the target that its attention begins as, see `_begin_like`, and further layers add
            nothing yet; None: at random.
        **variants: of `Eagle3Config`.
    """
    from methods.eagle3.model import (
        Eagle3Config,
        Eagle3Model,
        default_taps,
    )  # late: it takes seconds to import

    config = Eagle3Config(**layer_sizes(target) | variants)
    model = Eagle3Model(config, default_taps(len(target.layers)), token_ids).to(target.device)
    model.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1)
    if like_layer is not None:
        _begin_like(cast("Any", model.midlayer), cast("Any", target.layers[like_layer]))
        for layer in model.layers.values():
            silence(layer)
    model.norm.weight.copy_(UNSURE * scale_of(target.norm))
    head = target.lm_head.weight  # of a target that is spread over devices, on another one
    model.lm_head.weight.copy_(head[token_ids.to(head.device)])
    return model


def _begin_like(midlayer: Any, layer: Any) -> None:
    """Makes the layer attend as one of the target's does, one token further on.

    Pair j holds the state of token j and the embedding of token j + 1. Queries and values have the matrices of the
    target's layer, and read the embedding; keys have its query matrix, and read the state. So an attention that looks
    for a token and copies what followed looks for the newest token among the states, and copies the token after it,
    which the pair holds, too. The rest adds nothing yet.
    """
    asks, takes = layer.self_attn.q_proj.weight, layer.self_attn.v_proj.weight
    width, rows = asks.shape[1], takes.shape[0]
    # If queries share keys, the key matrix is the mean of their matrices.
    size = layer.self_attn.head_dim
    finds = asks.unflatten(0, (rows // size, -1, size)).mean(1).flatten(0, 1)
    midlayer.self_attn.q_proj.weight.copy_(pad(asks, (0, width)))
    midlayer.self_attn.k_proj.weight.copy_(pad(finds, (width, 0)))
    midlayer.self_attn.v_proj.weight.copy_(pad(takes, (0, width)))
    midlayer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    for norm in (midlayer.input_layernorm, midlayer.hidden_norm):
        norm.weight.copy_(scale_of(layer.input_layernorm))
    midlayer.mlp.down_proj.weight.zero_()


def _has_biases(layer: Any) -> bool:
    """Whether a layer's attention has biases. Raises UserError if `_begin_like` cannot follow it."""
    attention = getattr(layer, "self_attn", None)
    parts = {} if attention is None else dict(attention.named_parameters())
    biases = {f"{name}_proj.bias" for name in "qkvo"}
    # A norm of queries and keys also affects attention.
    if parts.keys() - biases != {f"{name}_proj.weight" for name in "qkvo"} or not hasattr(
        layer, "input_layernorm"
    ):
        raise UserError("this target's attention is not built like a Llama's: set like_layer=null")
    return bool(parts.keys() & biases)


VOCABULARY = {"draft_vocab": Count, "like_layer": Natural | None}


def begin(cfg: DictConfig, pair: Pair, **variants: Any) -> tuple[Eagle3Model, str]:
    """A drafting model to train as configured, over the most frequent tokens, and how it begins."""
    check_like_layer(cfg.like_layer, pair.staged)
    biased = False
    if cfg.like_layer is not None:
        biased = _has_biases(pair.staged.layers[cfg.like_layer])
    vocab = min(cfg.draft_vocab, pair.vocab_size)
    token_ids = frequent_ids(islice(batches(cfg, pair, arrays=()), COUNTED_BATCHES), vocab, pair.vocab_size)
    model = fresh_model(pair.staged, token_ids, cfg.like_layer, **variants)
    attention = "random weights"
    if cfg.like_layer is not None:
        attention = (
            f"attention of the target's layer {cfg.like_layer}{' without its biases' if biased else ''}"
        )
        attention += ", further layers silent" if model.depth > 1 else ""
    return model, f"{attention}, the target's norm and head"


@trainer(SETTINGS | VOCABULARY | {"draft_steps": Count})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_eagle3.yaml) and returns the folder of the finished drafting model."""
    check_length(cfg, "draft_steps")
    pair = target_pair(cfg)
    model, begins = begin(cfg, pair)
    from methods.eagle3.checkpoint import save_eagle3  # late, as above

    module = TrainingTimeTest(model, pair.staged, cfg.draft_steps, Loss.of(cfg))
    return train_part(module, module.figures, partial(save_eagle3, model), cfg, pair, begins, model.taps)


main = program("train_eagle3", train)
