"""Operations that a pass or a round starts at the dimensions of real models: with fake tensors, that hold no data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding.cpu import lean_modules as layers
from specbench.decoding.engine import Engine, exhaust
from tests.support.graphs import choose_as_on_a_gpu

# Nothing is computed: memory is reserved, a shape is named anew.
FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh"),
    *("detach", "detach_", "alias", "_reshape_alias", "device", "split_with_sizes"),
}


class Kernels(TorchDispatchMode):
    """Counts operations that start at least one kernel: no views.

    Attributes:
        counted: by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Operations so far."""
        return self.counted.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        name = func._schema.name.partition("::")[2]
        if name not in FREE and not any(views):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def without_data(monkeypatch) -> Iterator[None]:
    """Models that are made within hold no numbers; what the host reads is 1 everywhere.

    Norms are those of a GPU: the fused ones give the same bits on a CPU alone.
    """
    monkeypatch.setattr(layers, "_is_rms_norm", lambda module: False)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: np.ones(tensor.shape, dtype=int).tolist())
    choose_as_on_a_gpu(monkeypatch)
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


class Enough(Exception):
    """As many rounds were counted as were asked for."""


def counts_by_round(monkeypatch, engine: Engine, requests: list, rounds: int) -> list[Counter[str]]:
    """The operations of each of the first rounds."""
    found: list[Counter[str]] = []
    inner = engine._round

    def counted(*given) -> Any:
        with Kernels() as kernels:
            done = inner(*given)
        found.append(kernels.counted)
        if len(found) == rounds:
            raise Enough
        return done

    monkeypatch.setattr(engine, "_round", counted)
    # Not under inference mode, in which composite operations are not told apart.
    monkeypatch.setattr(Engine, "reserve", Engine.reserve.__wrapped__)  # type: ignore[attr-defined]
    with suppress(Enough):
        exhaust(Engine.rounds.__wrapped__(engine, requests))  # type: ignore[attr-defined]
    return found
