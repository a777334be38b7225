"""Fixtures of the tests of measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from methods.kangaroo.adapter import Adapter, adapter_config, save_adapter
from tests.support.models import save_pair
from tests.support.runs import CATEGORIES


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A saved pair, an adapter for it, questions and warm-up questions."""
    folder = tmp_path_factory.mktemp("workplace")
    save_pair(folder, num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder / "target")
    save_adapter(Adapter(adapter_config(config)), folder / "kangaroo", torch.float32, exit_layer=2)
    for name, first in (("questions", 1), ("warmup", 100)):
        lines = [
            {
                "question_id": first + i,
                "category": category,
                "turns": [f"Say something about {category}.", "Say more."][: 2 if i < 2 else 1],
            }
            for i, category in enumerate(CATEGORIES if name == "questions" else CATEGORIES[-1:])
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
