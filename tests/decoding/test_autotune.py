"""Layouts of weights: what is computed stays the same, and no copy outlives a change."""

from __future__ import annotations

import copy
import io
from dataclasses import asdict

import pytest
import torch

from specbench.decoding.cpu import autotune as layouts
from specbench.decoding.cpu import native
from specbench.decoding.cpu import packed_linear as linear
from specbench.decoding.cpu.autotune import Choice, PassShape, choose_layouts
from specbench.decoding.cpu.packed_linear import LAYOUTS, ONE_TOKEN, PANELS, Panels, packed_linear, product
from specbench.decoding.model.staged_model import StagedModel
from tests.support.layouts import ONE, SIX, has_packed, kind, laid, names_of, needs_packed
from tests.support.models import random_model

pytestmark = pytest.mark.usefixtures("nothing_known")

TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.05, "rtol": 0.05}}
PACKED = {1: "columns", 6: "packed"}


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """Replaces measuring by choices as `PACKED`; holds the groups and passes, or shapes and tokens, asked for."""
    asked: list[tuple] = []

    def choices(tokens):
        return {n: Choice("columns" if n == 1 else "packed", {"columns": 1.0}) for n in tokens}

    def in_place(target, groups, shapes):
        asked.append((tuple(groups), tuple(shapes)))
        tokens = [shape.batch * shape.tokens for shape in shapes]
        return {name: choices(tokens) for name in groups}, {6: {"default": 2.0, "tried": 1.0}}

    def alone(weights, tokens):
        asked.append((tuple(weights[0].shape), tuple(tokens)))
        return choices(tokens)

    monkeypatch.setattr(layouts, "_in_place", in_place)
    monkeypatch.setattr(layouts, "_alone", alone)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_is_that_of_torch_in_any_layout_shape_and_type(layout, dtype):
    if (layout.startswith("packed") and not has_packed(dtype)) or (layout == PANELS and native.reason()):
        pytest.skip("this machine has none")
    sizes = torch.Generator().manual_seed(0)
    for rows, columns in [(1024, 8), (7, 5), *torch.randint(1, 200, (6, 2), generator=sizes).tolist()]:
        weight, bias = torch.randn(rows, columns, dtype=dtype) / columns**0.5, torch.randn(rows, dtype=dtype)
        made = LAYOUTS[layout](weight)
        long = torch.randn(2, 9, columns, dtype=dtype)
        given = [long[:1, :1], long[0, 3], long[1:, 2:3], long[:1, :6], long[:, 2:8], long]
        if layout in ONE_TOKEN:
            assert made.table.shape[1] * made.table.shape[0] % columns == 0
            given = given[:3]
        else:
            assert isinstance(made, Panels) or torch.equal(
                made.to_dense() if made.is_mkldnn else made, weight
            )
        for states in given:
            for b in (None, bias):
                torch.testing.assert_close(
                    product(states, made, b),
                    torch.nn.functional.linear(states, weight, b),
                    **TOLERANCES[dtype],
                )


@needs_packed
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "opt"])  # without and with biases
def test_the_choice_is_applied_to_target_and_model_and_changes_no_logits(measured, tied, arch):
    model = random_model(arch, 0, tie_word_embeddings=tied)
    ids = torch.arange(3, 11).unsqueeze(0)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits[0]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    target = StagedModel(model)
    passed = target.pass_bytes()
    chosen = choose_layouts(target, [ONE, SIX])

    linears = [
        part for layer in target.layers for part in layer.modules() if isinstance(part, torch.nn.Linear)
    ]
    assert linears and all(
        laid(part).several[0][1].is_mkldnn for part in [*linears, target._head, model.lm_head]
    )
    assert not any(laid(part).one_token.is_mkldnn for part in linears)
    shapes = [
        f"layers {rows}x{columns} float32" for rows, columns in (laid(part).weight.shape for part in linears)
    ]
    rows, columns = model.lm_head.weight.shape
    names = {f"head {rows}x{columns} float32", *shapes}
    assert names_of(chosen) == {name: {"1": "columns", "6": "packed"} for name in names}
    assert chosen["pass_ms"] == {"6": {"default": 2.0, "tried": 1.0}}
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, use_cache=False).logits[0], expected, atol=1e-4, rtol=1e-4)
        cache = target.new_cache(8)
        bounds = ((0, 1), (1, 7), (7, ids.shape[1]))
        parts = [target.run_layers(target.embed(ids[:, lo:hi]), cache, lo) for lo, hi in bounds]
        torch.testing.assert_close(target.head(torch.cat(parts, 1))[0], expected, atol=1e-4, rtol=1e-4)

    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(weight.is_mkldnn for weight in after.values()), "checkpoints hold plain tensors"
    assert target.pass_bytes() == passed == StagedModel(model).pass_bytes()
    assert model.get_input_embeddings().weight.stride(1) == 1, "an embedding is read row by row"


@needs_packed
def test_which_layout_serves_which_number_of_tokens(monkeypatch):
    layer = packed_linear(torch.randn(40, 24), None)
    laid(layer).choose(PACKED)
    used = []
    monkeypatch.setattr(
        linear, "product", lambda states, weight, bias: used.append(weight.is_mkldnn) or states
    )
    with torch.inference_mode():
        for shape in [(1, 24), (24,), (1, 1, 24), (2, 1, 24), (1, 6, 24), (4, 6, 24)]:
            layer(torch.randn(shape))
    assert used == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (
            {1: "bags_256", 6: "rows", 20: "columns"},
            {1: "bags", 2: "rows", 6: "rows", 13: "rows", 14: "columns", 99: "columns"},
        ),
        (
            {1: "bags_256"},
            {1: "bags", 2: "columns", 6: "columns"},
        ),  # no number but one was measured: the default
        ({6: "rows"}, {1: "columns", 2: "rows", 99: "rows"}),
        ({6: "rows", 1: "rows"}, {1: "rows", 2: "rows"}),
        ({}, {1: "columns", 6: "columns"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed", [False, True])
def test_other_numbers_of_tokens_take_the_nearest_layout(monkeypatch, chosen, expected, fixed):
    layer = torch.nn.Linear(24, 40, bias=False).requires_grad_(False)
    linear.pack_linears(layer, fixed)
    laid(layer).choose(chosen)
    used = []
    monkeypatch.setattr(linear, "product", lambda _, weight, bias: used.append(kind(weight)))
    monkeypatch.setattr(linear, "linear", lambda _, weight, bias: used.append(kind(weight)))
    with torch.inference_mode():
        for tokens in expected:
            layer(torch.randn(1, tokens, 24))
    assert used == [*expected.values()]


@needs_packed
def test_copies_of_a_model_and_pickles_choose_for_themselves(measured):
    model = random_model("llama", 0, tie_word_embeddings=True)
    choose_layouts(StagedModel(model), [ONE, SIX])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    ids = torch.arange(3, 9).unsqueeze(0)
    for other in (copy.deepcopy(model), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)):
        with torch.inference_mode():
            assert torch.allclose(other(ids).logits, model(ids).logits, atol=1e-5)
            other.lm_head.weight.data[7] = float("nan")
            assert other(ids).logits[..., 7].isnan().all() and not model(ids).logits.isnan().any()


@needs_packed
def test_no_copy_outlives_a_change_of_its_weight(measured):
    model = random_model("llama", 0, tie_word_embeddings=False)
    target = StagedModel(model)
    choose_layouts(target, [ONE, SIX])
    hidden = torch.randn(1, 6, target.hidden_size)
    with torch.inference_mode():
        before = target.head(hidden), target.layers[0].mlp.up_proj(hidden)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with torch.inference_mode():
        after = target.head(hidden), target.layers[0].mlp.up_proj(hidden)
    for old, new in zip(before, after):
        torch.testing.assert_close(new, 2 * old, atol=1e-5, rtol=1e-5)


@needs_packed
def test_gradients_pass_through_a_packed_layer(measured):
    layer = packed_linear(torch.randn(40, 24), None)
    choose_layouts()
    states = torch.randn(3, 24, requires_grad=True)
    layer(states).sum().backward()
    assert torch.allclose(states.grad, layer.weight.sum(0).expand(3, -1), atol=1e-5)


def test_weights_that_are_trained_are_left_alone(measured):
    model = random_model("llama", 0).requires_grad_(True)
    target = StagedModel(model)
    assert choose_layouts(target, [ONE, SIX]) == {"groups": {}, "pass_ms": {}} and measured == []
    assert type(model.lm_head) is torch.nn.Linear


def test_each_is_measured_once_for_each_number_of_threads_and_shape_of_passes(measured, monkeypatch):
    layers = [packed_linear(torch.randn(40, 24), None) for _ in range(3)]
    layers += [packed_linear(torch.randn(24, 40), None)]
    target = StagedModel(random_model("llama", 0))
    own = [name for name in choose_layouts(target)["groups"] if not name.startswith("drafter")]
    assert own[0].startswith("head") and all(name.startswith("layers") for name in own[1:]) and own[1:]
    choose_layouts(target)
    assert measured == [(tuple(own), (ONE,)), ((24, 40), (1, 6)), ((40, 24), (1, 6))]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    choose_layouts(target)
    assert len(measured) == 6
    choose_layouts(target, [PassShape(8, 6), ONE, PassShape(8, 1), ONE])
    assert measured[6][1] == (ONE, PassShape(8, 1), PassShape(8, 6))
    assert measured[7][1] == (1, 6, 8, 48), "a drafter's products"
    choose_layouts(StagedModel(target.model, width=8))
    assert measured[9:] == [(tuple(own), (ONE,))], "wider passes"
    assert {type(layer) for layer in layers} == {linear.PackedLinear}


def test_what_is_known_is_not_measured_again(measured):
    layer = packed_linear(torch.randn(40, 24), None)
    chosen = {n: asdict(Choice("rows", {"rows": 1.0})) for n in ("1", "6")}
    known = {"groups": {"drafter 40x24 float32": chosen}, "pass_ms": {"6": {"default": 2.0, "tried": 1.0}}}
    assert choose_layouts(earlier=known) == known and measured == []
    assert layer.weight.stride() == (24, 1)


def test_defaults_stay_where_matrices_are_small_or_memory_is_short(measured, monkeypatch):
    layer = packed_linear(torch.randn(40, 24), None)
    usual = {"drafter 40x24 float32": {"1": "columns"}}
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "LEAST", layer.weight.numel() + 1)
        patched.setattr(layouts, "has_kernel", lambda device, dtype: False)
        assert names_of(choose_layouts()) == usual
        patched.setattr(layouts, "has_kernel", lambda device, dtype: True)
        assert names_of(choose_layouts()) == {"drafter 40x24 float32": {"1": PANELS, "6": PANELS}}
        layouts._FASTEST.clear()
    monkeypatch.setattr(layouts, "free_memory", lambda: 15 * 1024)
    assert names_of(choose_layouts()) == usual and measured == []
    monkeypatch.setattr(layouts, "free_memory", lambda: 16 * 1024)
    assert names_of(choose_layouts()) != usual and len(measured) == 1
