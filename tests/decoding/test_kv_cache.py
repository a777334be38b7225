"""The cache against plain lists of entries, one for each slot."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.kv_cache import ForwardContext, KVCache

LAYERS, SLOTS, CAPACITY = 2, 3, 32
CPU = torch.device("cpu")
# The same place under two names, as far as a cache can know two devices.
SPREAD = [CPU, torch.device("cpu:0")]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("truncate"), st.integers(0, CAPACITY)),
        st.tuples(st.just("keep"), st.integers(0, 2**16)),
        st.tuples(st.just("swap"), st.integers(0, SLOTS - 1)),
    ),
    max_size=20,
)


@given(operations, st.sampled_from([[CPU] * LAYERS, SPREAD]), st.booleans())
@settings(max_examples=80)
def test_cache_behaves_like_lists(ops, devices, indexed):
    """indexed: entries are named one by one, as where sequences have ends of their own."""
    cache = KVCache(devices, 2, 3, SLOTS, CAPACITY, torch.float32)
    assert len(cache.segments) == len(set(devices))
    rows: list[list[float]] = [[] for _ in range(SLOTS)]
    stamp = 0.0
    for op, number in ops:
        length = len(rows[0])
        if op == "append" and length + number <= CAPACITY:
            values = stamp + torch.arange(SLOTS * number).view(SLOTS, 1, number, 1)
            values = values.expand(SLOTS, 2, number, 3)
            stamp += SLOTS * number
            for slot in range(SLOTS):
                rows[slot] += values[slot, 0, :, 0].tolist()
            ctx = ForwardContext.consecutive(length, number)
            if indexed:
                entries = torch.arange(length, length + number) + CAPACITY * torch.arange(SLOTS).unsqueeze(1)
                ctx = ForwardContext(length + number, entries.flatten())
            cache.begin_pass(0, LAYERS, ctx, SLOTS, number)
            for layer in range(LAYERS):
                keys, held = cache.update(values + layer, -values, layer)
                assert keys[:, 0, :, 0].tolist() == [[entry + layer for entry in row] for row in rows]
                assert held[:, 1, :, 2].tolist() == [[-entry for entry in row] for row in rows]
        elif op == "truncate":
            rows = [row[:number] for row in rows]
        elif op == "keep" and length:
            start = number % length
            path = [i for i in range(length - start) if number >> i & 1]
            sources = start + torch.tensor(path, dtype=torch.int64).expand(SLOTS, -1)
            cache.move_entries(sources, start + torch.arange(len(path)).expand(SLOTS, -1))
            rows = [row[:start] + [row[start + i] for i in path] for row in rows]
        elif op == "swap":
            other = (number + 1) % SLOTS
            cache.copy_slots(torch.tensor([number, other]), torch.tensor([other, number]), length)
            rows[number], rows[other] = rows[other], rows[number]
        held = torch.cat(cache.segments)[:, 0, :, : len(rows[0]), 0, 0]
        assert held.tolist() == [[[entry + i for entry in row] for row in rows] for i in range(LAYERS)]


def test_a_pass_through_some_layers_touches_no_other():
    cache = KVCache([CPU] * 3, 1, 1, 1, 8, torch.float32)
    row = torch.ones(1, 1, 4, 1)
    cache.begin_pass(1, 2, ForwardContext.consecutive(2, 4), 1, 4)
    cache.update(row, row, 1)
    assert cache.segments[0].sum((1, 2, 4, 5)).tolist() == [
        [0.0] * 8,
        [0.0] * 2 + [2.0] * 4 + [0.0] * 2,
        [0.0] * 8,
    ]


def test_a_slot_is_a_view():
    cache = KVCache([CPU], 1, 1, 2, 4, torch.float32)
    slot, row = cache.slot(1), torch.ones(1, 1, 2, 1)
    slot.begin_pass(0, 1, ForwardContext.consecutive(0, 2), 1, 2)
    slot.update(row, row, 0)
    assert cache.segments[0][0, 0, :, :, 0, 0].tolist() == [[0.0] * 4, [1.0, 1.0, 0.0, 0.0]]
    assert (slot.slots, slot.capacity, slot.layers, cache.slots) == (1, 4, 1, 2)


def test_indices_count_whole_slots():
    cache = KVCache([CPU], 1, 1, 3, 4, torch.float32)
    assert cache.indices(torch.tensor([[1, 2]])).tolist() == [1, 2]
    assert cache.indices(torch.tensor([[1, 2], [0, 3]])).tolist() == [1, 2, 4, 7]
