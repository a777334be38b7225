"""The cache against a plain list of rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.kv_cache import KVCache

LAYERS, CAPACITY = 2, 32
CPU = torch.device("cpu")
SPREAD = [
    CPU,
    torch.device("cpu:0"),
]  # the same place under two names, as far as a cache can know two devices

operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("truncate"), st.integers(0, CAPACITY)),
        st.tuples(st.just("keep"), st.integers(0, 2**16)),
    ),
    max_size=20,
)


@given(operations, st.sampled_from([[CPU] * LAYERS, SPREAD]))
@settings(max_examples=200)
def test_cache_behaves_like_a_list(ops, devices):
    cache = KVCache(devices, 2, 3, CAPACITY, torch.float32)
    assert len(cache.parts) == len(set(devices))
    rows: list[float] = []
    stamp = 0.0
    for op, number in ops:
        if op == "append" and len(rows) + number <= CAPACITY:
            new = [stamp + i for i in range(number)]
            stamp += number
            values = torch.tensor(new).view(1, 1, number, 1).expand(1, 2, number, 3)
            rows += new
            for layer in range(LAYERS):
                keys, held = cache.update(values + layer, -values, layer)
                assert keys[0, 0, :, 0].tolist() == [r + layer for r in rows]
                assert held[0, 1, :, 2].tolist() == [-r for r in rows]
        elif op == "truncate":
            cache.truncate(number)
            rows = rows[:number]
        elif op == "keep" and rows:
            start = number % len(rows)
            path = [i for i in range(len(rows) - start) if number >> i & 1]
            cache.keep(start, torch.tensor(path, dtype=torch.int64))
            rows = rows[:start] + [rows[start + i] for i in path]
        assert cache.lengths == [len(rows)] * LAYERS
        assert torch.cat(cache.parts)[:, 0, 0, 0, : len(rows), 0].tolist() == [
            [r + i for r in rows] for i in range(LAYERS)
        ]


def test_rolling_back_moves_no_data_and_layers_may_differ():
    cache = KVCache([CPU] * 3, 1, 1, 8, torch.float32)
    row = torch.ones(1, 1, 4, 1)
    cache.update(row, row, 0)
    cache.update(row[:, :, :2], row[:, :, :2], 1)
    (data,) = cache.parts
    before = data.data_ptr(), data.clone()
    cache.truncate(3)
    assert cache.lengths == [3, 2, 0]
    assert cache.parts[0].data_ptr() == before[0] and torch.equal(data, before[1])


def test_a_pass_after_a_roll_back_that_ends_where_the_last_one_ended():
    """Two positions, one taken back, one new: the views of the first pass do not fit the second."""
    cache = KVCache([CPU], 2, 4, 16, torch.float32)
    first, last = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 1, 4)
    cache.update(first, first, 0)
    cache.truncate(1)
    keys, values = cache.update(last, last, 0)
    assert torch.equal(keys, torch.cat([first[:, :, :1], last], dim=2)) and torch.equal(keys, values)
    assert cache.lengths == [2]
