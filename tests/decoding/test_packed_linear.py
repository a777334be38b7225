"""Products of frozen weights are those of torch, alone or fused, in whatever form they are read, and after changes."""

from __future__ import annotations

import copy
import io
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import linear as plain_linear

from specbench.decoding.cpu import native
from specbench.decoding.cpu import packed_linear as linear
from specbench.decoding.cpu.native import MOST_TOKENS
from specbench.decoding.cpu.packed_linear import (
    FusedSlice,
    PackedLinear,
    PackedWeight,
    Panels,
    by_columns,
    forms,
    pack_linears,
    packed_linear,
)
from specbench.decoding.model.staged_model import StagedModel
from tests.support.kernel_passes import needs_kernels
from tests.support.models import random_model

NAMES = ("q_proj", "k_proj", "v_proj")
SIZES = (48, 16, 24)
TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.05, "rtol": 0.05}}


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


@pytest.fixture(params=[pytest.param(True, marks=needs_kernels), False], ids=["our kernels", "torch's"])
def _kernels(request, monkeypatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "_available", lambda: False)


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def attention(request, _kernels) -> Attention:
    torch.manual_seed(0)
    module = Attention(request.param)
    pack_linears(module)
    assert all(type(getattr(module, name)) is FusedSlice for name in NAMES)
    return module


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_that_of_torch_in_any_shape_and_type(dtype):
    sizes = torch.Generator().manual_seed(0)
    for rows, columns in [(1024, 8), (7, 5), *torch.randint(1, 200, (6, 2), generator=sizes).tolist()]:
        weight, bias = torch.randn(rows, columns, dtype=dtype) / columns**0.5, torch.randn(rows, dtype=dtype)
        long = torch.randn(2, 99, columns, dtype=dtype)
        for b in (None, bias):
            layer = packed_linear(weight, b)
            assert torch.equal(layer.weight, weight)
            for states in [long[:1, :1], long[0, 3], long[1:, 2:3], long[:1, :6], long[:, 2:8], long]:
                with torch.inference_mode():
                    torch.testing.assert_close(
                        layer(states), plain_linear(states, weight, b), **TOLERANCES.get(dtype, {})
                    )


@needs_kernels
def test_with_kernels_all_products_read_panels():
    one, several = forms(torch.randn(24, 16))
    assert isinstance(one, Panels) and one is several


def test_without_kernels_one_token_reads_columns_and_several_blocks_of_what_is_large(monkeypatch):
    monkeypatch.setattr(native, "_available", lambda: False)
    weight = torch.randn(40, 24)
    one, several = forms(weight)
    assert one is several
    wide = torch.randn(24, 40)
    assert all(form is wide for form in forms(wide)), "whose rows are read as they are"
    monkeypatch.setattr(linear, "LARGE", weight.numel())
    one, several = forms(weight)
    assert torch.equal(one, weight) and one.stride(0) == 1
    assert several.is_mkldnn and torch.equal(several.to_dense(), weight)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert all(form is weight for form in forms(weight)), "this torch has no blocks"


def test_other_types_and_devices_have_no_copies():
    for weight in (torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, device="meta")):
        assert all(form is weight for form in forms(weight))


def test_which_form_serves_which_number_of_tokens(monkeypatch):
    layer = packed_linear(torch.randn(40, 24), None)
    packed = layer._packed
    one, several = packed._forms = by_columns(packed.weight), packed.weight.clone()
    used = []
    monkeypatch.setattr(linear, "product", lambda states, weight, bias: used.append(weight) or states)
    with torch.inference_mode():
        for shape in [(1, 24), (24,), (1, 1, 24), (2, 1, 24), (1, 6, 24), (4, 32, 24), (4, 33, 24)]:
            layer(torch.randn(shape))
    expected = [one] * 3 + [several] * 3 + [packed.weight]  # of many tokens: torch's own product
    assert all(weight is form for weight, form in zip(used, expected, strict=True))


def test_copies_are_made_when_a_short_pass_reads_them():
    layer = packed_linear(torch.randn(40, 24), None)
    with torch.inference_mode():
        layer(torch.randn(MOST_TOKENS + 1, 24))
        assert layer._packed._forms is None, "whoever trains on long passes has no copies"
        layer(torch.randn(2, 24))
    assert layer._packed._forms is not None


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("fused", [True, False])
def test_under_autocast_products_are_torchs(fused):
    """As in training with precision=bf16, on a frozen target: types differ, or should be changed."""
    module = Attention(bias=True)
    if not fused:
        module.k_proj.bias = None
    pack_linears(module)
    for states in (torch.randn(2, 3, 32), torch.randn(2, 3, 32).bfloat16()):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for found, right in zip(module(states), expected(module, states), strict=True):
                assert found.dtype == torch.bfloat16
                torch.testing.assert_close(found, right, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("kernels", "large", "dtype", "copies"),
    [
        (True, 0, torch.float32, 1),
        (False, 0, torch.float32, 2),
        (False, 40 * 24 + 1, torch.float32, 1),
        (True, 0, torch.float64, 0),
    ],
)
def test_room_is_that_of_all_copies(kernels, large, dtype, copies, monkeypatch):
    monkeypatch.setattr(native, "_available", lambda: kernels)
    monkeypatch.setattr(linear, "LARGE", large)
    size = 24 * 40 * dtype.itemsize
    for free, room in ((2 * copies * size + 1, True), (2 * copies * size, not copies)):
        monkeypatch.setattr(linear, "free_memory", lambda free=free: free)
        assert packed_linear(torch.randn(40, 24, dtype=dtype), None)._packed.copies is room


def test_why_passes_are_torchs_is_told(monkeypatch):
    frozen = partial(torch.nn.Parameter, requires_grad=False)
    monkeypatch.setattr(native, "reason", lambda: None)
    assert PackedWeight([frozen(torch.randn(4, 4))]).lacking is None
    assert (
        PackedWeight([frozen(torch.randn(4, 4))], copies=False).lacking == "no room for copies of the weights"
    )
    assert PackedWeight([frozen(torch.randn(4, 4).half())]).lacking == "none of our own for torch.float16"
    monkeypatch.setattr(native, "reason", lambda: "there is no C++ compiler")
    assert PackedWeight([frozen(torch.randn(4, 4))]).lacking == "there is no C++ compiler"


def test_columns_do_not_begin_a_whole_number_of_pages_apart():
    weight = torch.randn(2048, 24)
    packed = by_columns(weight)
    assert torch.equal(packed, weight) and packed.stride(0) == 1 and packed.stride(1) * 4 % 4096
    assert by_columns(torch.randn(24, 2048)).stride() == (1, 24)


def test_without_room_for_copies_weights_stay_as_they_are_and_a_line_says_so(monkeypatch, capsys):
    layers = torch.nn.Sequential(*(torch.nn.Linear(24, 40, bias=False) for _ in range(2))).requires_grad_(
        False
    )
    size = 2 * 24 * 40 * 4  # a copy of each, with kernels or without
    monkeypatch.setattr(linear, "free_memory", lambda: 2 * size)
    pack_linears(layers)
    assert all(part._packed._forms == (part.weight, part.weight) for part in layers)
    said = capsys.readouterr().err
    assert (
        said.startswith("warning: copies of weights for this processor's kernels") and said.count("\n") == 1
    )
    with torch.inference_mode():
        states = torch.randn(6, 24)
        torch.testing.assert_close(layers[0](states), plain_linear(states, layers[0].weight))
    monkeypatch.setattr(linear, "free_memory", lambda: 2 * size + 1)
    other = copy.deepcopy(layers)
    assert other[0]._packed.copies is False, "a copy has no more room"
    fresh = torch.nn.Sequential(*(torch.nn.Linear(24, 40, bias=False) for _ in range(2))).requires_grad_(
        False
    )
    pack_linears(fresh)
    assert fresh[0]._packed.copies and not capsys.readouterr().err


def test_joint_layers_give_what_each_gives_by_itself(attention):
    assert_right(attention)


def test_one_product_computes_all(attention, monkeypatch):
    products = []
    inner = linear.product
    monkeypatch.setattr(linear, "product", lambda *of: products.append(of) or inner(*of))
    with torch.inference_mode():
        outputs = attention(torch.randn(1, 4, 32))
    assert len(products) == 1 and [output.shape[-1] for output in outputs] == [*SIZES]
    assert attention.q_proj._fused._outputs == (), "nothing is kept once all have had their output"


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


@pytest.mark.parametrize("name", NAMES)
def test_changes_of_a_weight_are_seen(attention, name):
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


def test_a_model_keeps_its_logits_and_its_checkpoint_also_where_head_and_embedding_are_one():
    model = random_model("llama", 0, tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    target = StagedModel(model)
    passed = target.pass_bytes()
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(weight.is_mkldnn for weight in after.values()), "checkpoints hold plain tensors"
    assert target.pass_bytes() == passed == StagedModel(model).pass_bytes()
    hidden = torch.randn(1, 2, target.hidden_size)
    with torch.inference_mode():
        assert torch.allclose(target.unembed(hidden), model.lm_head(hidden), atol=1e-5)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # a weight that is trained on must not leave a stale copy after
    with torch.inference_mode():
        changed = target.unembed(hidden)
        assert torch.allclose(changed, plain_linear(hidden, model.lm_head.weight), atol=1e-5)


def test_copies_and_pickles_are_independent(attention):
    buffer = io.BytesIO()
    torch.save(attention, buffer)
    before = [layer.clone() for layer in attention.parameters()]
    for other in (copy.deepcopy(attention), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)):
        with torch.no_grad():
            other.k_proj.weight.mul_(2)
        assert_right(other)
        assert all(torch.equal(ours, old) for ours, old in zip(attention.parameters(), before))


def test_weights_that_lie_side_by_side_are_one_matrix_already(attention):
    """As where processes share them: fused once more, each process would have a copy of its own."""
    weights = [attention.q_proj.weight, attention.k_proj.weight]
    again = PackedWeight(weights)
    assert again.weight.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
    torch.testing.assert_close(again.weight, torch.cat(weights))
    apart = PackedWeight([attention.q_proj.weight, attention.v_proj.weight])  # with k_proj's in between
    torch.testing.assert_close(apart.weight, torch.cat([attention.q_proj.weight, attention.v_proj.weight]))


def test_gradients_pass_through(attention):
    states = torch.randn(2, 32, requires_grad=True)
    sum(output.sum() for output in attention(states)).backward()
    right = sum(getattr(attention, name).weight.sum(0) for name in NAMES)
    assert torch.allclose(states.grad, right.expand(2, -1), atol=1e-5)


def test_layers_of_different_kinds_are_not_joined():
    def packed(change) -> Attention:
        module = Attention(bias=False)
        change(module)
        pack_linears(module)
        assert not any(type(getattr(module, name)) is FusedSlice for name in NAMES)
        assert_right(module)
        return module

    def set_bias(module):
        module.k_proj = torch.nn.Linear(32, 16, bias=True).requires_grad_(False)

    def set_trained(module):
        module.v_proj.requires_grad_(True)

    def set_hook(module):
        module.q_proj._hf_hook = object()

    packed(set_bias)
    assert type(packed(set_trained).q_proj) is PackedLinear
    packed(set_hook)
    nothing = torch.nn.Module()
    nothing.k_proj = torch.nn.Linear(4, 4).requires_grad_(False)
    pack_linears(nothing)
    assert type(nothing.k_proj) is PackedLinear


def test_small_layers_are_not_joined(monkeypatch):
    for least, kind in [
        (16 * 32, FusedSlice),
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
    fused = [part for part in model.modules() if type(part) is FusedSlice]
    assert len(fused) >= 3 * len(target.layers)
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
    assert_right(module)
    with torch.no_grad():
        module.k_proj.weight.mul_(2)
    assert_right(module)
