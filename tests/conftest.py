"""Set-up of every test: no network but a test's own, reproducible draws, few threads."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client
os.environ["WANDB_MODE"] = "offline"
# Also of the processes that tests start: for models this small threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import specbench  # noqa: F401, I001 - before torch, for how its threads wait
import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("specbench", deadline=None, derandomize=True)
hypothesis.settings.load_profile("specbench")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
