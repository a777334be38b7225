"""Grouped query heads as tokens of one head, against transformers' own attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specbench.decoding.cpu import grouped_attention as attention
from specbench.decoding.cpu.grouped_attention import NAME, SHORT, attend, fold_mask
from specbench.decoding.cpu.native import MOST_TOKENS
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.tree import Tree
from tests.support.models import random_model


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def unwanted(*args, **kwargs):
    raise AssertionError("a short pass is not transformers' business")


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize(
    ("n", "masked"),
    [(1, "none"), *((n, masked) for n in (1, 2, 7, SHORT) for masked in ("each its own", "one for all"))],
)
def test_attention_is_that_of_transformers(heads, kv_heads, n, masked):
    b, kv_len, groups = 3, SHORT + 9, heads // kv_heads
    query, key, value = (
        states(b, heads, n, 16),
        states(b, kv_heads, kv_len, 16),
        states(b, kv_heads, kv_len, 16),
    )
    mask = torch.zeros(1 if masked == "one for all" else b, 1, n, kv_len)
    mask.masked_fill_(states(*mask.shape) > 0.7, float("-inf"))[..., 0] = 0.0
    if masked == "none":
        mask = None
    layer = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.4)
    found, _ = attend(
        unwanted, layer, query, key, value, fold_mask(mask, groups), scaling=0.4, sliding_window=5
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.shape == (b, n, heads, 16) and found.is_contiguous()


@pytest.mark.parametrize("n", [1, 5])
def test_a_kernel_may_lay_its_result_out_as_it_likes(monkeypatch, n):
    """Those of GPUs put the heads of a token side by side."""

    def kernel(*args, **kwargs):
        attended = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
        return attended.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(attention, "has_kernel", lambda device, dtype: False)
    query, key, value = states(2, 6, n, 16), states(2, 3, 40, 16), states(2, 3, 40, 16)
    mask = torch.zeros(2, 1, n, 40).masked_fill_(states(2, 1, n, 40) > 0.7, float("-inf"))
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    found, _ = attend(unwanted, layer, query, key, value, fold_mask(mask, 2))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("n", "kernel", "masked", "options"),
    [
        (SHORT + 1, False, True, {}),
        (MOST_TOKENS + 1, True, True, {}),
        (9, True, False, {}),
        (1, True, True, {"softcap": 2.0}),
        (1, True, False, {"position_bias": states(1)}),
    ],
)
def test_other_passes_are_left_to_transformers(n, kernel, masked, options, monkeypatch):
    """A long pass with a mask, a prefill without one, and scores that are changed on the way."""
    monkeypatch.setattr(attention, "has_kernel", lambda device, dtype: kernel)
    asked = []
    mask = fold_mask(torch.zeros(1, 1, n, n), 2) if masked else None
    query, key = states(1, 4, n, 8), states(1, 2, n, 8)
    attend(lambda *args, **kwargs: asked.append((args, kwargs)), None, query, key, key, mask, 0.5, **options)
    ((args, kwargs),) = asked
    assert args == (None, query, key, key, mask)
    assert kwargs == {"scaling": 0.5, "dropout": 0.0, **options}


@torch.inference_mode()
def test_nothing_is_copied_in_short_passes(monkeypatch):
    """Keys and values reach torch's kernel as they lie in the cache: of a token, a chain and a tree."""
    monkeypatch.setattr(attention, "has_kernel", lambda device, dtype: False)
    seen = []

    def kernel(query, key, value, *args, **kwargs):
        seen.append((key.data_ptr(), value.data_ptr(), query.shape[-2]))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    target = StagedModel(random_model("llama", 0))
    cache, ids = target.new_cache(64), torch.arange(3, 23).unsqueeze(0)
    target.prefill(ids, cache)
    assert not seen, "a prefill is transformers' own"
    tree = Tree.of(torch.tensor([-1, -1, 0]))
    for ctx, n in ((20, 1), (20, 4), (ForwardContext.nodes(20, tree.offsets()[0], tree.visible[0]), 4)):
        target.run_layers(target.embed(ids[:, :n]), cache, ctx)
        (segment,) = cache.segments
        there = [(layer[0].data_ptr(), layer[1].data_ptr(), 2 * n) for layer in segment]
        assert seen == there
        seen.clear()


def test_the_model_itself_keeps_its_attention(monkeypatch):
    monkeypatch.setattr(attention, "has_kernel", lambda device, dtype: False)
    model = random_model("llama", 0)
    target = StagedModel(model)
    assert target.layers[0].self_attn.config._attn_implementation == NAME
    configs = {id(part.config) for part in model.modules() if hasattr(part, "config")}
    assert configs == {id(model.config)} and model.config._attn_implementation == "sdpa"
    for arch, own in (
        ("llama", {"num_key_value_heads": 4}),
        ("gemma2", {}),
    ):  # no groups; scores that are capped
        model = random_model(arch, 0, **own)
        assert StagedModel(model).layers[0].self_attn.config is model.config
