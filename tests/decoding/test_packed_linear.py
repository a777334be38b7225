"""Joint products: layers that read the same states give what each gives by itself, also after changes."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import linear as plain_linear

from specbench.decoding.cpu import packed_linear as linear
from specbench.decoding.cpu.autotune import choose_layouts
from specbench.decoding.cpu.packed_linear import JoinedLinear, PackedLinear, pack_linears
from specbench.decoding.model.staged_model import StagedModel
from tests.support.models import random_model

NAMES = ("q_proj", "k_proj", "v_proj")
SIZES = (48, 16, 24)
LAYOUTS = [
    {1: "rows", 6: "rows"},
    {1: "columns", 6: "columns"},
    {1: "packed_one", 6: "packed"},
    {1: "columns", 6: "packed"},
    {1: "bags_256", 6: "packed"},
]


class Attention(torch.nn.Module):
    """Three projections of one input, as a family's attention calls them."""

    def __init__(self, bias: bool, dtype: torch.dtype = torch.float32):
        super().__init__()
        for name, size in zip(NAMES, SIZES):
            setattr(self, name, torch.nn.Linear(32, size, bias, dtype=dtype))
        self.requires_grad_(False)

    def forward(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(self, name)(states) for name in NAMES]


def expected(module: Attention, states: torch.Tensor) -> list[torch.Tensor]:
    """What each layer gives by itself."""
    layers = [getattr(module, name) for name in NAMES]
    return [plain_linear(states, layer.weight.clone(), layer.bias) for layer in layers]


def assert_right(module: Attention, tolerance: float = 1e-5) -> None:
    for shape in [(1, 1, 32), (1, 6, 32), (3, 2, 32), (32,)]:
        states = torch.randn(shape, dtype=module.q_proj.weight.dtype)
        with torch.inference_mode():
            for found, right in zip(module(states), expected(module, states), strict=True):
                torch.testing.assert_close(found, right, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(linear, "LEAST_JOINED", 0)


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def attention(request) -> Attention:
    torch.manual_seed(0)
    module = Attention(request.param)
    pack_linears(module)
    assert all(type(getattr(module, name)) is JoinedLinear for name in NAMES)
    return module


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_joint_layers_give_what_each_gives_by_itself(attention, layouts):
    attention.q_proj._joined.laid.choose(layouts)
    assert_right(attention)


def test_one_product_computes_all(attention, monkeypatch):
    products = []
    monkeypatch.setattr(linear, "linear", lambda *of: products.append(of[1].shape) or plain_linear(*of))
    with torch.inference_mode():
        attention(torch.randn(1, 4, 32))
    assert products == [(sum(SIZES), 32)]
    assert attention.q_proj._joined._outputs == (), "nothing is kept once all have had their output"


def test_weights_stay_the_layers_own(attention):
    state = attention.state_dict()
    assert [state[f"{name}.weight"].shape[0] for name in NAMES] == list(SIZES)
    storages = {getattr(attention, name).weight.untyped_storage().data_ptr() for name in NAMES}
    assert len(storages) == 1, "no second copy of a weight"
    assert sum(p.numel() for p in attention.parameters()) == sum(SIZES) * (32 + ("q_proj.bias" in state))


def test_layers_that_read_other_states_compute_by_themselves(attention):
    ours, others = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    with torch.inference_mode():
        attention.q_proj(ours)
        for name in reversed(NAMES):  # in another order, too
            layer = getattr(attention, name)
            right = plain_linear(others, layer.weight, layer.bias)
            torch.testing.assert_close(layer(others), right, atol=1e-5, rtol=1e-5)
        equal = others.clone()  # the same values elsewhere are no reason to trust what is kept
        torch.testing.assert_close(
            attention.k_proj(equal), expected(attention, equal)[1], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_changes_of_a_weight_are_seen(attention, layouts, name):
    attention.q_proj._joined.laid.choose(layouts)
    layer = getattr(attention, name)
    with torch.no_grad():
        layer.weight.mul_(3)
    assert_right(attention)
    layer.weight.data = torch.randn_like(layer.weight)  # as a change of device or type does
    assert_right(attention)
    if layer.bias is not None:
        layer.bias.data = torch.randn_like(layer.bias)
        assert_right(attention)
    layer.bias = torch.nn.Parameter(torch.randn(len(layer.weight)), requires_grad=False)
    assert_right(attention)
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)
    assert_right(attention)
    attention.double()
    assert_right(attention, 1e-9)


@pytest.mark.parametrize("fixed", [False, True])
def test_what_serves_for_a_weight_is_read_from_the_first_product_on(fixed):
    """Also of a tied head that was not used before: its copies are made when it first is."""

    class Zeros:
        def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return states.new_zeros(*states.shape[:-1], 40)

    layer = torch.nn.Linear(24, 40, bias=False).requires_grad_(False)
    pack_linears(layer, fixed)
    layer._laid.serve(Zeros())
    with torch.inference_mode():
        for tokens in (1, 6):
            assert not layer(torch.randn(tokens, 24)).any()
        layer._laid.serve(None)
        states = torch.randn(6, 24)
        torch.testing.assert_close(layer(states), plain_linear(states, layer.weight))


def test_copies_and_pickles_are_independent(attention):
    buffer = io.BytesIO()
    torch.save(attention, buffer)
    before = [layer.clone() for layer in attention.parameters()]
    for other in (copy.deepcopy(attention), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)):
        with torch.no_grad():
            other.k_proj.weight.mul_(2)
        assert_right(other)
        assert all(torch.equal(ours, old) for ours, old in zip(attention.parameters(), before))


def test_gradients_pass_through(attention):
    states = torch.randn(2, 32, requires_grad=True)
    sum(output.sum() for output in attention(states)).backward()
    right = sum(getattr(attention, name).weight.sum(0) for name in NAMES)
    assert torch.allclose(states.grad, right.expand(2, -1), atol=1e-5)


def test_layers_of_different_kinds_are_not_joined():
    def laid(change) -> Attention:
        module = Attention(bias=False)
        change(module)
        pack_linears(module)
        assert not any(type(getattr(module, name)) is JoinedLinear for name in NAMES)
        assert_right(module)
        return module

    def set_bias(module):
        module.k_proj = torch.nn.Linear(32, 16, bias=True).requires_grad_(False)

    def set_trained(module):
        module.v_proj.requires_grad_(True)

    def set_hook(module):
        module.q_proj._hf_hook = object()

    laid(set_bias)
    assert type(laid(set_trained).q_proj) is PackedLinear
    laid(set_hook)
    nothing = torch.nn.Module()
    nothing.k_proj = torch.nn.Linear(4, 4).requires_grad_(False)
    pack_linears(nothing)
    assert type(nothing.k_proj) is PackedLinear


def test_small_layers_are_not_joined(monkeypatch):
    for least, kind in [
        (16 * 32, JoinedLinear),
        (16 * 32 + 1, PackedLinear),
    ]:  # the smallest is of 16 x 32
        monkeypatch.setattr(linear, "LEAST_JOINED", least)
        module = Attention(bias=False)
        pack_linears(module)
        assert {type(getattr(module, name)) for name in NAMES} == {kind}


@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "qwen3", "opt"])
def test_a_model_has_joint_products_and_its_logits(arch):
    model = random_model(arch, 0)
    ids = torch.arange(3, 15).unsqueeze(0)
    with torch.inference_mode():
        right = model(ids, use_cache=False).logits[0]
    target = StagedModel(model)
    choose_layouts(target)
    joined = [part for part in model.modules() if type(part) is JoinedLinear]
    assert len(joined) >= 3 * len(target.layers)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, use_cache=False).logits[0], right, atol=1e-4, rtol=1e-4)
        cache = target.new_cache(16)
        bounds = [0, 1, 7, 8, 12]
        parts = [target.run_layers(target.embed(ids[:, lo:hi]), cache, lo) for lo, hi in pairwise(bounds)]
        torch.testing.assert_close(target.head(torch.cat(parts, 1))[0], right, atol=1e-4, rtol=1e-4)


def test_what_was_laid_out_under_inference_mode_is_no_different():
    with torch.inference_mode(False):
        module = Attention(bias=False)
    with torch.inference_mode():
        pack_linears(module)
        module.q_proj._joined.laid.choose({1: "rows", 6: "columns"})
    assert_right(module)
    with torch.no_grad():
        module.k_proj.weight.mul_(2)
    assert_right(module)
