"""Layers of a model as a pass uses them: less overhead per call, and the bytes of weights that are read.

On a CPU a pass of a small model is mostly Python and the starting of operations. Nothing here changes what is computed:
the copies of a model's layers give the very bits that the layers give, and weights keep their values.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.functional import rms_norm

from specbench.system.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PARTS = ("self_attn", "mlp")  # of a layer, what families call its attention and its feed-forward part
M = TypeVar("M", bound=torch.nn.Module)


def lean_copy(module: M, config: PretrainedConfig | None = None) -> M:
    """Copies a module, sharing weights and hooks, into one with cheaper calls and attribute look-ups.

    The module itself stays as it is; the copy has a train or eval mode of its own. Three things make it faster, which
    together are a fifth of a pass through the embedded target:

    - `nn.Module.__getattr__` runs only after Python's own look-up has failed and built an error message. The copy has
      parameters and submodules as plain attributes.
    - A call of a module looks for hooks of many kinds; the copy looks for forward hooks alone.
    - `rms_norm` does in one operation what the families' own norms do in seven; it is used where the bits are the same.

    Args:
        module: to copy.
        config: what the copies of modules that keep a config have in its place; None: the same one.
    """
    twin: Any = copy.copy(module)
    parts = {
        name: part if part is None else lean_copy(part, config) for name, part in module._modules.items()
    }
    twin.__dict__.update(module._parameters, _modules=parts, **parts)
    if config is not None and hasattr(module, "config"):
        twin.config = config
    stock: Any = type(module)  # mypy takes no class of modules for hashable
    twin.__class__ = _lean_class(stock, _is_rms_norm(module))
    return twin


@cache
def _lean_class(stock: type[torch.nn.Module], fused: bool) -> type[torch.nn.Module]:
    """The class of the copies of `stock`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks:
            return stock.__call__(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    return type(stock.__name__, (stock,), {"__call__": call} | ({"forward": _rms_norm} if fused else {}))


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:  # any family's norm
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


@torch.inference_mode()
def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Whether `_rms_norm` gives the very bits of this module.

    In fp32 on a CPU it is the same operations in the same order; half precision and CUDA's kernels round elsewhere.
    """
    weight = getattr(module, "weight", None)
    if not hasattr(module, "variance_epsilon") or weight is None or weight.device.type != "cpu":
        return False
    if len(signature(module.forward).parameters) != 1:  # one that is gated, say
        return False
    states = torch.linspace(-3, 5, 8 * weight.numel(), dtype=weight.dtype).sin().view(8, *weight.shape)
    return torch.equal(module(states), _rms_norm(module, states))


class _Nothing(torch.nn.Module):
    """In place of a part of a layer: what it adds to the states is zero."""

    def __init__(self, gives_pair: bool):
        super().__init__()
        self.gives_pair = gives_pair

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """Zeros like the states; in a pair as attention gives them: with the weights that nobody asks for."""
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.gives_pair else nothing


class _Unchanged(torch.nn.Module):
    """In place of a whole layer."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """The states as they come."""
        return hidden_states


def check_parts(layer: torch.nn.Module) -> None:
    """Raises UserError unless a layer has its attention and its feed-forward part as modules, named as in PARTS."""
    if not all(isinstance(getattr(layer, name, None), torch.nn.Module) for name in PARTS):
        raise UserError(f"a {type(layer).__name__} has no {' and '.join(PARTS)} that could be left out")


def thinned(layer: torch.nn.Module, attention: bool, mlp: bool, mlp_gives_pair: bool) -> torch.nn.Module:
    """A layer without some of its parts, sharing the weights of the others.

    Args:
        layer: of a model, as `lean_copy` makes it.
        attention: whether its attention is left out.
        mlp: whether its feed-forward part is.
        mlp_gives_pair: whether that part returns states and scores, as a router's does in some families.

    Raises:
        UserError: as `check_parts`.
    """
    check_parts(layer)
    if not attention and not mlp:
        return layer
    if attention and mlp:
        return _Unchanged()
    twin = copy.copy(layer)
    left_out = {"self_attn": _Nothing(True)} if attention else {"mlp": _Nothing(mlp_gives_pair)}
    twin.__dict__.update(left_out)
    twin.__dict__["_modules"] = layer._modules | left_out
    return twin


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's weights as they are stored: parameters, buffers, and what a quantised layer saves beside."""
    saved = {
        id(value): value for value in module.state_dict(keep_vars=True).values()
    }  # a tied one counts once
    return sum(_stored_bytes(value) for value in saved.values() if isinstance(value, torch.Tensor))


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of one that stands for others, such as a quantised one, of these."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer, of which each token uses a few.

    Attributes:
        bytes: of the weights of all of them.
        count: how many there are.
        chosen: how many a token uses; None where the layer does not say.
    """

    bytes: int
    count: int
    chosen: int | None

    def read(self, tokens: int) -> float:
        """Bytes that a pass of so many tokens is expected to read; NaN where that cannot be known.

        Of the experts each token is taken to choose its own, independent of the others, all with equal chances. A
        router that prefers some, or tokens that choose alike, read fewer.
        """
        if self.chosen is None:
            return math.nan
        if tokens == 1:
            return self.bytes * self.chosen // self.count
        return round(self.bytes * (1 - (1 - self.chosen / self.count) ** tokens))


def experts_of(layer: torch.nn.Module) -> Experts | None:
    """The routed experts of a layer, None where it has none. Those that every token uses are not among them."""
    found = [
        (module, count) for name, module in layer.named_modules() if (count := _experts_in(name, module))
    ]
    if not found:
        return None
    chosen = (getattr(module, "top_k", None) for module in layer.modules())
    return Experts(
        bytes=sum(weight_bytes(module) for module, _ in found),
        count=found[0][1],
        chosen=next((number for number in chosen if isinstance(number, int)), None),
    )


def experts_wait(model: PreTrainedModel) -> bool:
    """Whether the routed experts of a model on CUDA tell the host which of them are used, which no graph can hold.

    It depends on the version of transformers, the data type and the GPU, so that a layer's experts are tried, with
    their router; those that cannot be called alone count as waiting.
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
    """How many experts a module is made of: modules in a list of that name, or parts of tensors; 0 for any other."""
    if isinstance(module, torch.nn.ModuleList):
        return len(module) if name.endswith("experts") else 0
    count = getattr(module, "num_experts", 0)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return count if any(tensor.dim() == 3 and len(tensor) == count for tensor in own) else 0
