"""Hydra and Hydra++: files as the authors write them, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaModel

from methods.common.checkpoints import layer_sizes
from methods.hydra_heads import HydraHeads
from methods.hydra_heads.checkpoint import save_heads
from specbench.system.errors import UserError
from tests.support.checkpoints import RunsCode, spoil
from tests.support.decoding import PROMPT, random_pair
from tests.support.hydra import TREE, finals, loaded, saved_heads


class Block(torch.nn.Module):
    """A block of the authors' heads, with their names."""

    def __init__(self, inputs: int):
        super().__init__()
        self.linear = torch.nn.Linear(inputs, 64)
        self.res_connection = torch.nn.Linear(inputs, 64) if inputs > 64 else torch.nn.Identity()

    def forward(self, x):
        return self.res_connection(x) + silu(self.linear(x))


class Authors(torch.nn.Module):
    """The authors' modules by the names and the order of their checkpoints, at a small size."""

    def __init__(self, target, arch: str, layers: int = 4):
        super().__init__()
        dropout = [torch.nn.Dropout(0.2)] * (arch == "prefix-mlp")
        if dropout:
            self.prefix_embeding_layer = LlamaModel(LlamaConfig(**layer_sizes(target)))
        self.input_embed_fn = target.model.embed_tokens
        heads = [[*dropout, Block(64 * (2 + i)), *[*dropout, Block(64)] * (layers - 1)] for i in range(2)]
        self.hydra_mlp = torch.nn.ModuleList(torch.nn.Sequential(*blocks) for blocks in heads)
        outputs = [torch.nn.Linear(64, target.config.vocab_size) for _ in range(2)]
        self.hydra_lm_head = torch.nn.ModuleList(
            torch.nn.Sequential(*dropout, output) if dropout else output for output in outputs
        )


def authors_checkpoint(folder, arch: str, layers: int = 4, change=None, **settings) -> Authors:
    torch.manual_seed(5)
    authors = Authors(random_pair("llama").target, arch, layers).eval()
    state = {name: tensor.clone() for name, tensor in authors.state_dict().items()}
    if change is not None:
        change(state)
    torch.save(state, folder / "hydra_lm_head.pt")
    config = {"hydra_num_heads": 2, "hydra_num_layers": layers, "hydra_head_arch": arch}
    config |= {"grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "x", **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return authors


@torch.inference_mode()
@pytest.mark.parametrize(("arch", "layers"), [("mlp", 1), ("mlp", 3), ("prefix-mlp", 1), ("prefix-mlp", 4)])
def test_the_authors_files(arch, layers, tmp_path):
    """What is read says what the authors' own modules say; written and read again it is the same."""
    pair = random_pair("llama")
    authors = authors_checkpoint(tmp_path, arch, layers)
    heads = loaded(tmp_path)
    assert (heads.heads, heads.layers, heads.prefix is not None) == (2, layers, arch == "prefix-mlp")
    states = finals(pair, PROMPT)
    if heads.prefix is not None:
        expected = authors.prefix_embeding_layer(inputs_embeds=states, use_cache=False).last_hidden_state
        rope = heads.prefix.rope(torch.arange(len(PROMPT)).unsqueeze(0), states)
        own = heads.prefix(states, position_embeddings=rope)
        torch.testing.assert_close(own, expected)
    for i in range(2):
        read = torch.randn(3, 64 * (2 + i))
        expected = authors.hydra_lm_head[i](authors.hydra_mlp[i](read))
        torch.testing.assert_close(heads.output[i](heads(i, read)), expected)
    save_heads(heads, tmp_path / "again", torch.float32, tree=TREE[:5])
    state = load_file(tmp_path / "again" / "model.safetensors")
    dropped = {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    assert set(state) == set(authors.state_dict()) - dropped
    assert all(torch.equal(tensor, authors.state_dict()[name]) for name, tensor in state.items())
    again = loaded(tmp_path / "again")
    assert all(map(torch.equal, again.state_dict().values(), heads.state_dict().values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("hydra_mlp.1.1.linear.bias"), "missing hydra_mlp.1.1.linear.bias"),
        (lambda s: s.pop("hydra_lm_head.0.1.bias"), "missing hydra_lm_head.0.1.bias"),
        (lambda s: s.update({"lm_head.weight": torch.ones(2)}), "unknown lm_head.weight"),
        (
            lambda s: s["hydra_mlp.1.5.linear.weight"].add_(1),
            "hydra_mlp.1.5.linear.weight differs from hydra_mlp.1.3",
        ),
        (
            lambda s: s["hydra_mlp.0.7.linear.bias"].add_(1),
            "hydra_mlp.0.7.linear.bias differs from hydra_mlp.0.3",
        ),
        (lambda s: s["input_embed_fn.weight"].mul_(1.5), "made for another target: input_embed_fn.weight"),
        (
            lambda s: [s.pop(n) for n in list(s) if n.startswith("hydra_mlp.1")],
            "hydra_num_heads=2, .* are of 1",
        ),
        (lambda s: [s.pop(n) for n in list(s) if ".7." in n], "hydra_num_layers=4, .* are of 3"),
        (lambda s: s.pop("prefix_embeding_layer.norm.weight"), "missing prefix_embeding_layer.norm.weight"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, message, tmp_path):
    authors_checkpoint(tmp_path, "prefix-mlp", change=change)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hydra_num_heads": 3}, "hydra_num_heads=3, the tensors are of 2"),
        ({"hydra_num_heads": None}, "hydra_num_heads is None"),
        ({"hydra_num_layers": 2}, "hydra_num_layers=2, the tensors are of 4"),
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch is 'eagle-attn', not 'mlp' or 'prefix-mlp'"),
        ({"hydra_head_arch": "mlp"}, "missing hydra_mlp.0.0.linear.bias.*unknown hydra_mlp.0.1"),
        ({"grounded_heads": False}, "grounded_heads is not true"),
        ({"hidden_state_offset": 1}, "hidden_state_offset is not 0"),
        ({"prefix": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}, "'dynamic'"),
    ],
)
def test_heads_of_another_kind_are_refused(settings, message, tmp_path):
    authors_checkpoint(tmp_path, "prefix-mlp", **settings)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


def test_other_faults_of_a_checkpoint(tmp_path):
    folder = saved_heads(
        random_pair("llama"), tmp_path / "a", True, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    )
    with pytest.raises(UserError, match="4 levels, but there are 3 heads"):
        HydraHeads(random_pair("llama"), folder)
    saved_heads(random_pair("llama"), tmp_path / "a", True, tree=[[0], [1, 0]])
    with pytest.raises(UserError, match=r"tree of the heads is broken: \[1, 0\] has no parent"):
        HydraHeads(random_pair("llama"), folder)
    narrow = random_pair("llama", hidden_size=48, head_dim=12)
    with pytest.raises(UserError, match=r"64 wide.*48.*another target"):
        loaded(folder, narrow)
    spoil(folder, lambda s: s.clear())
    with pytest.raises(UserError, match="hydra_num_heads=3, the tensors are of 0"):
        loaded(folder)
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match=r"config.json is missing"):
        loaded(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model.safetensors, hydra_lm_head.pt is missing"):
        loaded(tmp_path / "b")


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"hydra_mlp.0.0.linear.bias": RunsCode()}, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(UserError, match="[Ww]eights.only"):
        loaded(tmp_path)
