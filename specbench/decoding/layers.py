"""The same layers with less around them: what decoding token by token spends beside arithmetic.

On a CPU a pass of a small model is mostly Python and the starting of operations. Nothing here changes what is computed:
twins of a model's layers give the very bits that the layers give, and weights keep their values.
"""

from __future__ import annotations

import copy
from functools import cache
from inspect import signature

import torch
from torch.nn.functional import rms_norm
from torch.utils.weak import WeakIdKeyDictionary


def quick(module: torch.nn.Module) -> torch.nn.Module:
    """A twin of a module, with the same weights and hooks, that is called faster and finds its attributes faster. The
    module itself stays as it is; the twin has its train or eval mode to itself.

    torch keeps parameters and parts where Python's own look-up does not find them: it fails first, and writes an error
    message that no one reads. The twin has them as plain attributes. A call of a module looks for hooks of many kinds,
    which a twin, whose passes are all forward, does not. And `rms_norm` says in one operation what the families' own
    norms say in seven; it stands in where it gives the same bits. All this is a fifth of a pass through the embedded
    target.
    """
    twin = copy.copy(module)
    parts = {name: part if part is None else quick(part) for name, part in module._modules.items()}
    twin.__dict__.update(module._parameters, _modules=parts, **parts)
    twin.__class__ = _kind(type(module), _is_rms_norm(module))
    return twin


@cache
def _kind(stock: type[torch.nn.Module], fused: bool) -> type[torch.nn.Module]:
    """The class of the twins of `stock`."""

    def call(self, *args, **kwargs):
        if self._forward_hooks or self._forward_pre_hooks:
            return stock.__call__(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    return type(stock.__name__, (stock,), {"__call__": call} | ({"forward": _rms_norm} if fused else {}))


def _rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


@torch.inference_mode()
def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Whether `_rms_norm` gives the very bits of this module. In fp32 on a CPU it is the same operations in the same
    order; half precision and CUDA's kernels round elsewhere.
    """
    weight = getattr(module, "weight", None)
    if not hasattr(module, "variance_epsilon") or weight is None or weight.device.type != "cpu":
        return False
    if len(signature(module.forward).parameters) != 1:  # one that is gated, say
        return False
    states = torch.linspace(-3, 5, 8 * weight.numel(), dtype=weight.dtype).sin().view(8, -1)
    return torch.equal(module(states), _rms_norm(module, states))


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, in] with the same values, laid out in memory as the product with it is read fastest.

    In fp32 on a CPU that is column after column: for one position a head of 16384 x 128 then takes a third of the
    time, and six positions through the layers of the embedded target a fifth less. Columns that begin a whole number
    of pages apart compete for the same places in the CPU's caches; a gap of two cache lines between them takes off
    another tenth. Elsewhere it is the weight itself.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.stride(0) == 1:
        return weight
    rows, columns = weight.shape
    gap = 32 if rows % 1024 == 0 else 0
    with torch.inference_mode(False), torch.no_grad():  # gradients may pass through a frozen weight
        return weight.new_empty(columns, rows + gap)[:, :rows].copy_(weight.detach().t()).t()


def lay_out(module: torch.nn.Module) -> None:
    """Lays out the frozen linear weights of a module, in place, for decoding: see `by_columns`."""
    for part in module.modules():
        if type(part) is torch.nn.Linear and not part.weight.requires_grad:
            part.weight.data = by_columns(part.weight)


# Of a head that is tied to the embedding, whose rows must stay rows: the weight -> its version and a copy by columns.
_HEADS = WeakIdKeyDictionary()


def head_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a head's weight by columns, made once for all who use the weight, and again when it was changed."""
    version, laid = _HEADS.get(weight, (None, None))
    if version != weight._version:
        laid = by_columns(weight)
        if laid is not weight:
            _HEADS[weight] = (weight._version, laid)
    return laid


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters."""
    return sum(p.nbytes for p in module.parameters())
