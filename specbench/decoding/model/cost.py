"""What a pass costs: the bytes of the weights that it reads, those of routed experts by expectation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a config calls the number of its routed experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's weights as they are stored: parameters, buffers, and what a quantised layer saves beside."""
    # By identity: a tied one counts once.
    saved = {id(value): value for value in module.state_dict(keep_vars=True).values()}
    return sum(_stored_bytes(value) for value in saved.values() if isinstance(value, torch.Tensor))


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; for a wrapper of other tensors, such as a quantised one, bytes of these."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer, of which each token uses a few.

    Attributes:
        bytes: of the weights of all of them.
        count: how many there are.
        chosen: how many a token uses; None if the layer does not state it.
    """

    bytes: int
    count: int
    chosen: int | None

    def read(self, tokens: int) -> float:
        """Bytes that a pass of `tokens` tokens is expected to read; NaN if unknown.

        Each token is assumed to choose its experts independently of the others, all with equal chances. If the router
        prefers some, or tokens choose alike, fewer bytes are read.
        """
        if self.chosen is None:
            return math.nan
        return round(self.bytes * (1 - (1 - self.chosen / self.count) ** tokens))


NO_EXPERTS = Experts(0, 1, 0)


def experts_of(layer: torch.nn.Module) -> Experts:
    """The routed experts of a layer, `NO_EXPERTS` if it has none. Those that every token uses are excluded."""
    expert_modules = [
        (module, count) for name, module in layer.named_modules() if (count := _experts_in(name, module))
    ]
    if not expert_modules:
        return NO_EXPERTS
    chosen = (getattr(module, "top_k", None) for module in layer.modules())
    return Experts(
        bytes=sum(weight_bytes(module) for module, _ in expert_modules),
        count=expert_modules[0][1],
        chosen=next((number for number in chosen if isinstance(number, int)), None),
    )


def experts_wait(model: PreTrainedModel) -> bool:
    """Whether the routed experts of a model on CUDA wait for the host, which no graph can hold.

    It depends on the version of transformers, the dtype and the GPU, so a layer's experts are run with their router;
    those that cannot be called alone count as waiting.
    """
    experts = [name for name, module in model.named_modules() if _experts_in(name, module)]
    if not experts:
        return True
    mixture = model.get_submodule(experts[0].rpartition(".")[0])
    weight = next(mixture.parameters())
    states = weight.new_zeros(1, 2, model.config.get_text_config().hidden_size)
    watched = torch.cuda.get_sync_debug_mode()
    try:
        with torch.inference_mode():
            mixture(states)  # the first call sets things up, and may wait for that
            torch.cuda.set_sync_debug_mode("error")
            mixture(states)
    except (RuntimeError, TypeError):
        return True
    finally:
        torch.cuda.set_sync_debug_mode(watched)
    return False


def _experts_in(name: str, module: torch.nn.Module) -> int:
    """Number of experts in a module: modules in a list of that name, or slices of tensors; 0 for any other."""
    if isinstance(module, torch.nn.ModuleList):
        return len(module) if name.endswith("experts") else 0
    count = getattr(module, "num_experts", 0)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return count if any(tensor.dim() == 3 and len(tensor) == count for tensor in tensors) else 0
