"""Heads of Hydra for tests, and what they and their prefix layer compute, in other ways."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import LlamaModel

from methods.hydra_heads.checkpoint import load_heads, save_heads
from methods.hydra_heads.heads import Heads
from methods.hydra_heads.train import fresh_heads
from specbench.decoding.model.staged_model import StagedModel
from tests.support.decoding import random_pair

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 2]]
KINDS = {"hydra": (False, False), "hydra++": (True, False), "hydra++, own heads": (True, True)}


def heads_for(pair, prefix: bool, own: bool = False, layers: int = 3, noise: float = 0.05) -> Heads:
    """Heads that begin as the trainer's do, with noise on every weight."""
    torch.manual_seed(3)
    heads, _ = fresh_heads(StagedModel(pair.target), 3, layers, prefix, own)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return heads


def saved_heads(pair, folder, prefix: bool, own: bool = False, **notes) -> str:
    save_heads(heads_for(pair, prefix, own), folder, torch.float32, **({"tree": TREE} | notes))
    return str(folder)


def loaded(folder, pair=None) -> Heads:
    pair = pair or random_pair("llama")
    return load_heads(folder, StagedModel(pair.target), pair.expansion)[0]


def prefix_model(folder, config) -> LlamaModel:
    """The prefix layer as transformers' own Llama of one layer: an independent way to compute it."""
    model = LlamaModel(config)
    state = load_file(f"{folder}/model.safetensors")
    name = "prefix_embeding_layer."
    own = {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    return model.eval()


def finals(pair, tokens: list[int]) -> torch.Tensor:
    """The target's states [1, n, d] after its final norm, from transformers' own pass."""
    return pair.target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state


def by_hand(state: dict, i: int, read: torch.Tensor, step: int) -> torch.Tensor:
    """Head i's states of its input, from a checkpoint's tensors; step: between the indices of two blocks."""
    first = step - 1
    wide = f"hydra_mlp.{i}.{first}"
    z = read @ state[f"{wide}.res_connection.weight"].T + state[f"{wide}.res_connection.bias"]
    z = z + silu(read @ state[f"{wide}.linear.weight"].T + state[f"{wide}.linear.bias"])
    for j in (1, 2):
        square = f"hydra_mlp.{i}.{first + step * j}.linear"
        z = z + silu(z @ state[f"{square}.weight"].T + state[f"{square}.bias"])
    return z
