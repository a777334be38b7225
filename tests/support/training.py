"""A small pair with a few conversations, and a training that stops when it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from specbench.data.training_folder import LOG
from tests.support.conf import composed
from tests.support.models import save_pair

if TYPE_CHECKING:
    from specbench.data.training import Batch, Batches

# The same few words over and over, so that the held-out conversations can be learnt from the others.
WORDS = ["".join(word) for n in (1, 2) for word in product("ab", repeat=n)] * 20
SORTED = ("layers=[0,2,3]", "exits=[1,3]", "learning_rate=1e-2")  # of the sorted draft model


class Stopped(Exception):
    """What a training is stopped with."""


def training_workplace(folder: Path) -> Path:
    """Saves a pair and `talk.jsonl`, in which the assistant repeats a word three times."""
    save_pair(folder, num_hidden_layers=4)
    talks = [[("user", f"say {word}"), ("assistant", f"{word} {word} {word}")] for word in WORDS]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def saved_pair(workplace: Path) -> list[str]:
    """The overrides that name the pair and the conversations of a workplace."""
    return [
        f"pair.target={workplace}/target",
        f"pair.draft={workplace}/draft",
        f"pair.tokenizer={workplace}/target",
        "pair.device=cpu",
        f"conversations={workplace}/talk.jsonl",
    ]


def training_overrides(workplace: Path, out: Path, *more: str) -> list[str]:
    """The arguments of a trainer on that pair: 40 small steps, a state every 15."""
    small = ["steps=40", "batch_size=4", "length=20", "save_every=15", "save_dtype=float32"]
    chosen = {override.partition("=")[0] for override in more}
    return [
        *saved_pair(workplace),
        *(s for s in small if s.partition("=")[0] not in chosen),
        f"out={out}",
        *more,
    ]


def training_settings(name: str, workplace: Path, out: Path, *more: str) -> DictConfig:
    """The configuration of a trainer with those arguments."""
    return composed(name, *training_overrides(workplace, out, *more))


def batch_of(ids: list[list[int]], said: list[list[float]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(ids), "loss_weight": torch.tensor(said, dtype=torch.float32)}


def strided(batches: Iterable[Batch]) -> Batches:
    """What `train` takes batches by, of some that are there."""
    return lambda start, stride: islice(batches, start, None, stride)


def log(folder: Path) -> list[dict]:
    """The log of a training."""
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def stop_after(monkeypatch, module: type, calls: int) -> None:
    """Makes a module raise `Stopped` when it is asked for a loss once more than `calls` times."""
    forward, left = module.forward, iter(range(calls))

    def limited(self, batch):
        if next(left, None) is None:
            raise Stopped
        return forward(self, batch)

    monkeypatch.setattr(module, "forward", limited)
