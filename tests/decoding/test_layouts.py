"""Layouts of weights: what is computed stays the same, what is measured decides, and no copy is left behind."""

from __future__ import annotations

import copy
import io
from weakref import WeakSet

import pytest
import torch

from specbench.decoding import layouts, linear
from specbench.decoding.layouts import choose_layouts, fastest
from specbench.decoding.linear import LAYOUTS, ONE_TOKEN, Layouts, laid_linear, product
from specbench.decoding.target import StagedModel
from tests.support.models import random_model

TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.05, "rtol": 0.05}}
PACKED = Layouts("columns", "packed")


def has_packed(dtype: torch.dtype = torch.float32) -> bool:
    return layouts._made(LAYOUTS["packed"], [torch.ones(32, 16, dtype=dtype)]) is not None


needs_packed = pytest.mark.skipif(not has_packed(), reason="this torch has no packed weights")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No weights and decisions of other tests; small matrices are measured, too."""
    monkeypatch.setattr(linear, "LAID", WeakSet())
    monkeypatch.setattr(layouts, "LAID", linear.LAID)
    monkeypatch.setattr(layouts, "_FASTEST", {})
    monkeypatch.setattr(layouts, "LEAST_BYTES", 0)


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """Replaces measuring by times that favour `PACKED`; holds the shapes and numbers of tokens that were asked for."""
    asked: list[tuple] = []

    def measure(weights, tokens):
        asked.append((tuple(weights[0].shape), tuple(tokens)))
        one = {"rows": 2.0, "columns": 1.0, "packed": 3.0}
        several = {"rows": 2.0, "columns": 2.0, "packed": 1.0}
        return [{name: {n: (one if n == 1 else several)[name] for n in tokens} for name in one}]

    monkeypatch.setattr(layouts, "measure", measure)
    return asked


def laid(module: torch.nn.Module):
    return module._joined.laid if isinstance(module, linear.JoinedLinear) else module.__dict__["_laid"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_is_that_of_torch_in_any_layout_shape_and_type(layout, dtype):
    if layout.startswith("packed") and not has_packed(dtype):
        pytest.skip("this processor has none")
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
            assert torch.equal(made.to_dense() if made.is_mkldnn else made, weight)
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
    chosen = choose_layouts()

    linears = [
        part for layer in target.layers for part in layer.modules() if isinstance(part, torch.nn.Linear)
    ]
    assert linears and all(laid(part).several.is_mkldnn for part in [*linears, target._head, model.lm_head])
    assert not any(laid(part).one_token.is_mkldnn for part in linears)
    matrices = [laid(part).weight for part in [*linears, model.lm_head]]
    shapes = {f"{rows}x{columns} float32" for rows, columns in (matrix.shape for matrix in matrices)}
    assert chosen == {shape: {"one_token": "columns", "several": "packed"} for shape in shapes}
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
    layer = laid_linear(torch.randn(40, 24), None)
    laid(layer).choose(PACKED)
    used = []
    monkeypatch.setattr(
        linear, "product", lambda states, weight, bias: used.append(weight.is_mkldnn) or states
    )
    with torch.inference_mode():
        for shape in [(1, 24), (24,), (1, 1, 24), (2, 1, 24), (1, 6, 24), (4, 6, 24)]:
            layer(torch.randn(shape))
    assert used == [False, False, False, True, True, True]


@needs_packed
def test_copies_of_a_model_and_pickles_choose_for_themselves(measured):
    model = random_model("llama", 0, tie_word_embeddings=True)
    StagedModel(model)
    choose_layouts()
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
    choose_layouts()
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
    layer = laid_linear(torch.randn(40, 24), None)
    choose_layouts()
    states = torch.randn(3, 24, requires_grad=True)
    layer(states).sum().backward()
    assert torch.allclose(states.grad, layer.weight.sum(0).expand(3, -1), atol=1e-5)


def test_weights_that_are_trained_are_left_alone(measured):
    model = random_model("llama", 0).requires_grad_(True)
    StagedModel(model)
    assert choose_layouts() == {} and measured == []
    assert type(model.lm_head) is torch.nn.Linear


def test_each_shape_is_measured_once_for_each_number_of_threads_and_batch_size(measured, monkeypatch):
    layers = [laid_linear(torch.randn(40, 24), None) for _ in range(3)]
    layers += [laid_linear(torch.randn(24, 40), None)]
    choose_layouts()
    choose_layouts()
    assert sorted(measured) == [((24, 40), (1, 6)), ((40, 24), (1, 6))]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    choose_layouts()
    assert len(measured) == 4
    choose_layouts(batch_size=8)
    assert measured[4][1] == (1, 8, 48)
    assert {type(layer) for layer in layers} == {linear.LaidLinear}


def test_what_is_known_is_not_measured_again(measured):
    layer = laid_linear(torch.randn(40, 24), None)
    known = {"40x24 float32": {"one_token": "rows", "several": "rows"}}
    assert choose_layouts(known=known) == known and measured == []
    assert layer.weight.stride() == (24, 1)


def test_defaults_stay_where_matrices_are_small_or_memory_is_short(measured, monkeypatch):
    layer = laid_linear(torch.randn(40, 24), None)
    usual = {"40x24 float32": {"one_token": "columns", "several": "columns"}}
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "LEAST_BYTES", layer.weight.nbytes + 1)
        assert choose_layouts() == usual
    monkeypatch.setattr(layouts, "free_memory", lambda: 15 * 1024)
    assert choose_layouts() == usual and measured == []
    monkeypatch.setattr(layouts, "free_memory", lambda: 16 * 1024)
    assert choose_layouts() != usual and len(measured) == 1


def test_the_default_is_left_for_a_clear_gain_alone():
    def rounds(*packed: float) -> list[dict]:
        return [{"columns": {6: 1.0}, "packed": {6: time}} for time in packed]

    assert fastest(rounds(0.9, 0.9, 0.9), [6], "columns") == "packed"
    assert fastest(rounds(0.97, 0.97, 0.97), [6], "columns") == "columns"
    assert fastest(rounds(0.5, 1.1, 1.1), [6], "columns") == "columns", "one lucky round is no gain"
    both = [{"columns": {8: 1.0, 48: 10.0}, "packed": {8: 1.4, 48: 5.0}, "rows": {8: 0.7, 48: 13.0}}]
    assert fastest(both, [8, 48], "columns") == "columns", "each number of tokens counts alike"
    assert fastest(both, [8], "columns") == "rows" and fastest(both, [48], "columns") == "packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_times_every_layout_that_there_is(dtype):
    found = layouts.measure([torch.randn(64, 48, dtype=dtype) for _ in range(3)], [1, 6])
    packed = set() if has_packed(dtype) else {"packed", "packed_one"}
    assert len(found) >= layouts.FEWEST_ROUNDS
    for times in found:
        assert times.keys() == set(LAYOUTS) - packed
        for name, of in times.items():
            assert of.keys() == ({1} if name in ONE_TOKEN else {1, 6}) and min(of.values()) > 0


def test_a_layout_that_a_processor_lacks_is_left_out(monkeypatch):
    def refuse(weight):
        raise RuntimeError("the fp16 path needs another processor")

    monkeypatch.setitem(LAYOUTS, "packed", refuse)
    monkeypatch.setitem(LAYOUTS, "packed_one", refuse)
    found = layouts.measure([torch.randn(64, 48)], [1, 6])
    assert all(times.keys() == {"rows", "columns", *ONE_TOKEN} for times in found)


def test_a_layout_for_one_token_alone_is_never_chosen_for_several():
    rounds = [{"columns": {1: 1.0, 6: 1.0}, "bags_256": {1: 0.5}}]
    assert fastest(rounds, [1], "columns") == "bags_256" and fastest(rounds, [6], "columns") == "columns"
