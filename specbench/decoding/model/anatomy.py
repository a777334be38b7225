"""What differs between model families, read from a model and its config: no family is named here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from specbench.system.errors import UserError, one_line, out_of_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NORMS = ("norm", "final_layer_norm", "final_layernorm")  # what families call the norm in front of the head
CACHES = ("past_key_values", "layer_past")  # what layers call the cache
POSITIONS = ("rotary_emb", "embed_positions")  # the angles of positions, or their embeddings
EMBEDDING_SCALE = "embedding_multiplier"  # a config's factor of token embeddings that their module leaves out
# Operations on the products of states and head that a config can request, by the key of their number.
LOGIT_STEPS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "logit_scale": lambda logits, scale: logits * scale,
    "logits_scaling": lambda logits, scale: logits / scale,
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
}
LogitSteps = list[tuple["Callable[[torch.Tensor, float], torch.Tensor]", float]]
# Kinds of rotary scaling whose angles depend on the position alone, so that one table serves every pass.
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
# Common to layers of one kind: the window that they attend to (None for all positions), and the type that names their
# angles in a model with several tables of them (None with one table).
Kind = tuple[int | None, str | None]


def logit_steps(config: PretrainedConfig) -> LogitSteps:
    """Operations that a model applies to the products of its states and its head, in order; see `LOGIT_STEPS`."""
    named = ((step, getattr(config, name, None)) for name, step in LOGIT_STEPS.items())
    return [(step, number) for step, number in named if number is not None and number != 1]


def finished(products: torch.Tensor, steps: LogitSteps) -> torch.Tensor:
    """Applies the steps to products of any shape; returns the logits."""
    for step, number in steps:
        products = step(products, number)
    return products


@contextmanager
def drivable(model: PreTrainedModel) -> Iterator[None]:
    """Turns the errors that an unsupported anatomy causes into a UserError that names the model type.

    Out-of-memory errors are not changed.
    """
    try:
        yield
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
        if out_of_memory(error):
            raise
        raise UserError(
            f"model type '{model.config.model_type}' cannot be driven layer by layer: {one_line(error)}"
        ) from error


def check_rope(config: PretrainedConfig) -> None:
    """Raises UserError for rotary positions whose angles depend on more than the position.

    With "longrope" and "dynamic" transformers chooses the angles of a whole pass by the largest position in it. A draft
    that reaches over a threshold would change the angles of the target's own tokens too, and the longest sequence of a
    batch those of all others: no answer would equal that of autoregressive decoding.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Some configs have one for each layer type.
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if (name := kind.get("rope_type", "default")) not in STATIC_ROPE:
            raise UserError(
                f"model type '{config.model_type}' has rotary positions of type '{name}', whose angles may change with "
                "the length of a pass, so that drafts would change the answer: use a checkpoint whose rope_type is one "
                f"of {', '.join(sorted(STATIC_ROPE))}"
            )


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """The number of positions that a layer attends to, its own included; None for all.

    Raises UserError for attention of another type, which a short check might miss.
    """
    kind = (getattr(config, "layer_types", None) or ["sliding_attention"] * (layer + 1))[layer]
    if kind not in ("sliding_attention", "full_attention"):
        raise UserError(
            f"model type '{config.model_type}' cannot be driven layer by layer: it has layers of type '{kind}'"
        )
    return getattr(config, "sliding_window", None) if kind == "sliding_attention" else None


def device_of(module: torch.nn.Module) -> torch.device:
    """The device that a module runs on: that of accelerate's hook if it has one, else that of its weights."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return next(module.parameters()).device if device is None else torch.device(device)
