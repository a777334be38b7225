"""Slots: what belongs to a sequence moves with it."""

from __future__ import annotations

import torch

from specbench.decoding.slots import Slots


def test_of_an_entry_for_each_token_those_in_use_move():
    slots = Slots(3, 8, torch.device("cpu"))
    whole, by_token = slots.tensor(2), slots.tensor(2, by_token=True)
    assert by_token.shape == (3, 8, 2)
    for slot in range(3):
        whole[slot], by_token[slot] = slot, slot
    slots.move([2, 0], [0, 2], kv_len=5)
    assert whole[:, 0].tolist() == [2, 1, 0]
    assert by_token[:, :5, 0].tolist() == [[2] * 5, [1] * 5, [0] * 5]
    assert by_token[:, 5:, 0].tolist() == [[0] * 3, [1] * 3, [2] * 3]
