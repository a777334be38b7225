"""Finds where the host waits for the device, on a CPU: what would wait on a GPU is told by what is called."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specbench import ROOT
from specbench.decoding import acceptance
from specbench.decoding.engine import Engine

CODE = (ROOT / "specbench", ROOT / "methods")
# Values of the device that the host asks for.
READS = {
    *("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("__array__", "__iter__", "equal", "allclose", "is_nonzero", "__format__", "__repr__"),
}
# Results whose sizes depend on values.
SIZES = {"nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere", "combinations"}
# Numbers of the host that become tensors, which waits unless `on_device` does it.
COPIES = {"tensor", "as_tensor", "from_numpy", "asarray", "cuda"}
KERNELS_READ = {
    *("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"),
    *("aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default"),
    *("aten.unique_dim.default", "aten.unique_consecutive.default", "aten.bincount.default"),
    *("aten.repeat_interleave.Tensor",),
}
# Made of others, none of which reads a value: most of what a pass does, and slow to take apart.
PRODUCTS = {"aten.linear.default", "aten.matmul.default"}
# Where numbers of the host are handled: pinned copies; messages between threads, in tensors of the host.
OF_THE_HOST = (("specbench/decoding/device.py", None), ("methods/mirror_sd/channel.py", {"put", "take"}))


class Waits:
    """What waits for the device, by the call of the engine that it happens in: "round", "join", "retire".

    Attributes:
        found: for each call of such a kind the waits within, as "tolist at methods/x.py:12 in draft".
    """

    def __init__(self) -> None:
        self.found: dict[str, list[list[str]]] = defaultdict(list)
        self._allocate: list[str] | None = None
        self._within = False  # an operation that was noted already

    def note(self, what: str) -> None:
        """Notes a wait, if it is in the loop and not of the host's own numbers."""
        if self._allocate is None or self._within:
            return
        file, line, function = _caller()
        if not any(file == own and (names is None or function in names) for own, names in OF_THE_HOST):
            self._allocate.append(f"{what} at {file}:{line} in {function}")

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """A call of the engine."""
        self._allocate = own = []
        self.found[kind].append(own)
        try:
            yield
        finally:
            self._allocate = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An operation whose inner ones are no waits of their own."""
        before, self._within = self._within, True
        try:
            yield
        finally:
            self._within = before


class _Functions(TorchFunctionMode):
    """Calls from Python, also those that no dispatcher sees."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        waits = name in READS | SIZES | COPIES
        if name in ("__getitem__", "__setitem__"):
            waits = any(_is_from_host(part) for part in _parts(args[1]))
        if name == "__setitem__" and not isinstance(args[2], torch.Tensor):
            # Through an index of tensors a number becomes a tensor of the host, which is copied.
            waits = waits or any(isinstance(part, torch.Tensor) for part in _parts(args[1]))
        if name == "where":  # a number becomes a tensor of the host, which is copied
            waits = not all(isinstance(given, torch.Tensor) for given in args)
        if name == "repeat_interleave" and "output_size" not in kwargs:
            waits = any(isinstance(given, torch.Tensor) for given in args[1:])
        if not waits:
            return func(*args, **kwargs)
        self.waits.note(name)
        with self.waits.noted():
            return func(*args, **kwargs)


class _Kernels(TorchDispatchMode):
    """What operations do within; those that are made of others, down to these."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs, (name, composite) = kwargs or {}, _known(func)
        if composite:
            with self:  # in inference mode composite operations come as they are
                return func.decompose(*args, **kwargs)
        masked = name.startswith(("aten.index.", "aten.index_put")) and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if masked or name in KERNELS_READ:
            self.waits.note(name)
        return func(*args, **kwargs)


@cache
def _known(func: Any) -> tuple[str, bool]:
    """The name of an operation, and whether it is made of others that could wait."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    made = key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return str(func), made and str(func) not in PRODUCTS


@contextmanager
def watched(monkeypatch) -> Iterator[Waits]:
    """Watches all engines of this thread, which do what they would do on a GPU."""
    monkeypatch.setattr(acceptance, "may_look", lambda _: False)
    waits = Waits()
    for name, kind in (("_round", "round"), ("_prefill", "join"), ("_remove_finished", "retire")):
        inner = getattr(Engine, name)

        def outer(self, *args, inner=inner, kind=kind) -> Any:
            with waits.call(kind):
                return inner(self, *args)

        monkeypatch.setattr(Engine, name, outer)
    with _Functions(waits), _Kernels(waits):
        yield waits


def _parts(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def _is_from_host(index: Any) -> bool:
    """Whether an index is copied to or from the device first, or is a mask, whose entries have to be counted."""
    if isinstance(index, slice):
        return any(isinstance(part, torch.Tensor) for part in (index.start, index.stop, index.step))
    if isinstance(index, torch.Tensor):
        return index.dtype == torch.bool
    return isinstance(index, list | np.ndarray)


def _caller() -> tuple[str, int, str]:
    """File, line and function of this project that the call comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(folder) for folder in CODE):
            return str(path.relative_to(ROOT)), frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "elsewhere", 0, ""
