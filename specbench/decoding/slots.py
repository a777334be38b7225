"""What is kept for each sequence, by its slot: a drafter says what it needs, the engine makes room and moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from specbench.decoding.device import move_slots
from specbench.decoding.kv_layout import RaggedLayout

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache

T = TypeVar("T")


class Slots:
    """Buffers with one entry per slot, which move together when sequences change their slots.

    Args:
        count: slots.
        capacity: tokens of the longest sequence, with what a draft may need after its end.
        device: of tensors.
    """

    def __init__(self, count: int, capacity: int, device: torch.device):
        self.count, self.capacity, self.device = count, capacity, device
        self._moves: list[Callable[[list[int], list[int], int], None]] = []

    def tensor(
        self, *shape: int, dtype: torch.dtype = torch.int64, fill: float = 0, by_token: bool = False
    ) -> torch.Tensor:
        """A tensor [count, *shape] of `fill`; by_token: [count, capacity, *shape], an entry for each token."""
        shape = (self.capacity, *shape) if by_token else shape
        made = torch.full((self.count, *shape), fill, dtype=dtype, device=self.device)

        def move(sources: list[int], destinations: list[int], kv_len: int) -> None:
            move_slots(made[:, :kv_len] if by_token else made, sources, destinations)

        self._moves.append(move)
        return made

    def array(self, *shape: int, dtype: Any = np.int64) -> np.ndarray:
        """An array [count, *shape] on the host."""
        made = np.zeros((self.count, *shape), dtype=dtype)

        def move(sources: list[int], destinations: list[int], _kv_len: int) -> None:
            made[destinations] = made[sources]

        self._moves.append(move)
        return made

    def values(self, make: Callable[[], T]) -> list[T]:
        """A list with one value per slot, each made by `make`. Set its entries; never replace the list."""
        made = [make() for _ in range(self.count)]

        def move(sources: list[int], destinations: list[int], _kv_len: int) -> None:
            moved = [made[source] for source in sources]
            for destination, value in zip(destinations, moved):
                made[destination] = value

        self._moves.append(move)
        return made

    def cache(self, cache: KVCache) -> RaggedLayout:
        """A layout of a cache with `count` slots."""
        layout = RaggedLayout(cache)
        self._moves.append(layout.move)
        return layout

    def move(self, sources: list[int], destinations: list[int], kv_len: int) -> None:
        """Copies all that belongs to the slots `sources` to the slots `destinations`, all at once.

        Args:
            sources: slots to copy from.
            destinations: slots to copy to, as many.
            kv_len: a bound on the lengths of the sequences there.
        """
        for move in self._moves:
            move(sources, destinations, kv_len)
