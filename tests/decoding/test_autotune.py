"""Layouts of weights: what is computed stays the same, what is measured decides, and no copy is left behind."""

from __future__ import annotations

import copy
import io
from dataclasses import asdict
from weakref import WeakSet

import pytest
import torch

from specbench.decoding.cpu import autotune as layouts
from specbench.decoding.cpu import native
from specbench.decoding.cpu import packed_linear as linear
from specbench.decoding.cpu.autotune import Choice, PassShape, choose_layouts, fastest
from specbench.decoding.cpu.packed_linear import (
    LAYOUTS,
    ONE_TOKEN,
    PANELS,
    EmbeddingBagGemv,
    Panels,
    packed_linear,
    packed_weights,
    product,
)
from specbench.decoding.model.staged_model import StagedModel
from tests.support.models import random_model

TOLERANCES = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.05, "rtol": 0.05}}
PACKED = {1: "columns", 6: "packed"}


def has_packed(dtype: torch.dtype = torch.float32) -> bool:
    return layouts._made(LAYOUTS["packed"], [torch.ones(32, 16, dtype=dtype)]) is not None


needs_packed = pytest.mark.skipif(not has_packed(), reason="this torch has no packed weights")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No weights and decisions of other tests; small matrices are measured, too."""
    monkeypatch.setattr(linear, "PACKED", WeakSet())
    monkeypatch.setattr(layouts, "PACKED", linear.PACKED)
    monkeypatch.setattr(layouts, "_FASTEST", {})
    monkeypatch.setattr(layouts, "LEAST", 0)


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


ONE, SIX = PassShape(1, 1), PassShape(1, 6)


def names_of(choices: dict) -> dict:
    """The layouts alone."""
    return {name: {n: choice["layout"] for n, choice in of.items()} for name, of in choices["groups"].items()}


def laid(module: torch.nn.Module):
    return module._joined.laid if isinstance(module, linear.JoinedLinear) else module.__dict__["_laid"]


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


def kind(weight) -> str:
    """How a matrix lies in memory."""
    if isinstance(weight, EmbeddingBagGemv):
        return "bags"
    if weight.is_mkldnn:
        return "packed"
    return "rows" if weight.stride(1) == 1 else "columns"


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


def test_the_default_is_left_for_a_clear_gain_alone():
    def chosen(packed: list[float], columns: list[float]) -> str:
        return fastest({"columns": columns, "packed": packed}, "columns").layout

    assert chosen([0.9] * 5, [1.0] * 5) == "packed"
    assert chosen([1.0] * 5, [1.0] * 5) == "columns", "a tie"
    assert chosen([0.97] * 5, [1.0] * 5) == "columns", "so little is not worth a copy"
    assert chosen([0.5, 1.1, 1.1], [1.0] * 3) == "columns", "one lucky round is no gain"
    assert chosen([0.9, 9.0, 0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 8.0, 1.0]) == "packed", (
        "one bad round is no loss"
    )
    noisy = [1.0, 3.0, 1.5, 2.5, 4.0]
    assert chosen([1.2, 2.9, 1.6, 2.2, 2.1], noisy) == "columns", "within the noise"
    found = fastest({"rows": [0.5] * 5, "columns": [1.0] * 5, "packed": [0.7] * 3}, "columns")
    assert found == Choice("rows", {"rows": 500.0, "columns": 1000.0, "packed": 700.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_times_every_layout_that_there_is(dtype):
    found = layouts.measure([torch.randn(64, 48, dtype=dtype) for _ in range(3)], [1, 6])
    packed = set() if has_packed(dtype) else {"packed", "packed_one"}
    assert found.keys() == {1, 6}
    for n, times in found.items():
        assert times.keys() == set(LAYOUTS) - packed - (set() if n == 1 else set(ONE_TOKEN))
        for of in times.values():
            assert len(of) >= layouts.FEWEST_ROUNDS and min(of) > 0


def test_a_layout_that_a_processor_lacks_is_left_out(monkeypatch):
    def refuse(weight):
        raise RuntimeError("the fp16 path needs another processor")

    monkeypatch.setitem(LAYOUTS, "packed", refuse)
    monkeypatch.setitem(LAYOUTS, "packed_one", refuse)
    monkeypatch.setitem(LAYOUTS, PANELS, refuse)
    assert layouts.measure([torch.randn(64, 48)], [1])[1].keys() == {"rows", "columns", *ONE_TOKEN}
    chosen = choose_layouts(StagedModel(random_model("llama", 0)), [ONE])
    assert all("packed" not in of["1"]["ms"] for of in chosen["groups"].values())


CACHED = 6


class World:
    """A clock that products, sweeps and passes move on: nothing here is measured.

    Args:
        costs: seconds of a product by kind of layout, of a matrix in memory and of one in the cache, which holds the
            last `CACHED` matrices.
    """

    def __init__(self, monkeypatch, costs: dict[str, tuple[float, float]]):
        self.costs, self.now = costs, 0.0
        self.recent: list = []
        self.events: list[str] = []
        self.products: list[tuple[str, int]] = []

        def refuse(weight):
            raise RuntimeError("one kind of packed weights is enough")

        monkeypatch.setattr(layouts, "clock", lambda: self.now)
        monkeypatch.setitem(LAYOUTS, "packed_one", refuse)
        monkeypatch.setitem(LAYOUTS, PANELS, refuse)
        for module in (layouts, linear):
            monkeypatch.setattr(module, "product", self.product)
        monkeypatch.setattr(layouts, "sweep", self.sweep)
        monkeypatch.setattr(layouts.TimedPasses, "run", lambda passes, shape: self.run(passes, shape))

    def product(self, states, weight, bias):
        if not isinstance(weight, layouts.Timed):
            of, tokens = kind(weight), states.numel() // weight.shape[1] if kind(weight) != "bags" else 1
            self.products.append((of, tokens))
            cached = any(weight is other for other in self.recent)
            self.now += self.costs[of][cached]
            others = [other for other in self.recent if other is not weight]
            self.recent = [*others[1 - CACHED :], weight]
        return product(states, weight, bias)

    def sweep(self, size: int) -> None:
        self.events.append("sweep")
        self.recent = []

    def run(self, passes, shape, run=layouts.TimedPasses.run):
        self.events.append(f"pass of {shape.tokens}")
        return run(passes, shape)


ALIKE = {"rows": (4.0, 4.0), "columns": (4.0, 4.0), "packed": (4.0, 4.0), "bags": (4.0, 4.0)}


@needs_packed
def test_what_is_faster_alone_and_slower_in_place_is_not_chosen(monkeypatch):
    """A head that is read again and again lies in the cache, where packed weights are the fastest; in a pass it does
    not."""
    world = World(monkeypatch, ALIKE | {"packed": (6.0, 1.0)})
    target = StagedModel(random_model("llama", 0, tie_word_embeddings=False))
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "sweep", lambda size: None)
        times = layouts.measure([target.lm_head.weight], [1, 6])
        assert [fastest(times[n], "columns").layout for n in times] == ["packed", "packed"]
    chosen = choose_layouts(target, [ONE, SIX])
    head = next(choices for name, choices in names_of(chosen).items() if name.startswith("head"))
    assert head == {"1": "columns", "6": "columns"}
    ms = next(of for name, of in chosen["groups"].items() if name.startswith("head"))["1"]["ms"]
    assert ms["columns"] == 4000 and ms["packed"] == 6000, "of the one product in the pass that is timed"
    assert {of for of, _ in world.products} == {"rows", "columns", "packed", "bags"}


@needs_packed
def test_a_weight_that_is_alone_of_its_shape_is_not_left_in_the_cache(monkeypatch):
    World(monkeypatch, ALIKE | {"packed": (6.0, 1.0)})
    layer = packed_linear(torch.randn(64, 48), None)
    assert names_of(choose_layouts()) == {"drafter 64x48 float32": {"1": "columns", "6": "columns"}}
    assert kind(layer.weight) == "columns"


@pytest.mark.slow
@needs_packed
def test_what_costs_elsewhere_in_the_pass_is_not_chosen(monkeypatch):
    world = World(monkeypatch, ALIKE | {"packed": (2.0, 2.0)})
    target = StagedModel(random_model("llama", 0))
    chosen = choose_layouts(target, [ONE, SIX])
    assert {of for choices in names_of(chosen).values() for of in choices.values()} == {"packed"}
    for elsewhere, expected in [(1.9, "packed"), (2.1, "columns")]:
        layouts._FASTEST.clear()

        def run(passes, shape, elsewhere=elsewhere, run=world.run):
            done = len(world.products)
            seconds = run(passes, shape)
            more = elsewhere * sum(of == "packed" for of, _ in world.products[done:])
            world.now += more
            return seconds + more

        monkeypatch.setattr(layouts.TimedPasses, "run", run)
        chosen = choose_layouts(target, [ONE, SIX])
        assert {of for choices in names_of(chosen).values() for of in choices.values()} == {expected}
        assert chosen["pass_ms"].keys() == {"1", "6"}


@pytest.mark.first_fast
@needs_packed
@pytest.mark.parametrize("width", [None, 8])
def test_each_number_of_tokens_is_tried_in_passes_as_the_run_makes_them(monkeypatch, width):
    """Packed is best for the passes of six and of seventeen tokens, bags for those of one."""
    world = World(monkeypatch, ALIKE | {"bags": (2.0, 2.0)})
    cost = world.product

    def by_tokens(states, weight, bias):
        before = world.now
        outputs = cost(states, weight, bias)
        if world.products[-1][0] == "packed" and not isinstance(weight, layouts.Timed):
            world.now = before + (2.0 if world.products[-1][1] > 1 else 8.0)
        return outputs

    for module in (layouts, linear):
        monkeypatch.setattr(module, "product", by_tokens)
    target = StagedModel(random_model("llama", 0), width=width)
    shapes = [ONE, SIX] if width else [ONE, SIX, PassShape(1, 17), PassShape(3, 1), PassShape(3, 6)]
    chosen = choose_layouts(target, shapes)
    tokens = (
        {"8": "packed"} if width else {"1": "bags_256", **dict.fromkeys(["3", "6", "17", "18"], "packed")}
    )
    assert all(of == tokens for of in names_of(chosen).values())
    head = laid(target.lm_head)
    assert kind(head.one_token) == ("columns" if width else "bags")
    assert {kind(matrix) for _, matrix in head.several} == {"packed"}


def test_what_is_in_the_caches_is_what_the_loop_leaves_there(monkeypatch):
    """Nothing is read between two passes of the baseline; between two verifications, a drafter's weights are."""
    world = World(monkeypatch, ALIKE)
    target = StagedModel(random_model("llama", 0, num_hidden_layers=3))
    choose_layouts(target, [ONE, SIX])
    one = world.events.index("pass of 6")
    assert set(world.events[:one]) == {"pass of 1"} and one % 2 == 0
    assert world.events[one:] == ["pass of 6", "sweep", "pass of 6"] * ((len(world.events) - one) // 3)


@needs_packed
def test_of_a_large_target_the_last_layers_are_measured_and_all_are_laid_out(monkeypatch):
    world = World(monkeypatch, ALIKE | {"packed": (2.0, 2.0)})
    target = StagedModel(random_model("llama", 0, num_hidden_layers=3))
    monkeypatch.setattr(layouts, "PART_BYTES", target.pass_bytes(1))
    assert layouts.TimedPasses(target, [ONE]).first == 1
    chosen = choose_layouts(target, [ONE, SIX])
    assert world.events == ["sweep", "pass of 1"] * world.events.count("pass of 1") + [
        "sweep",
        "pass of 6",
    ] * world.events.count("pass of 6")
    linears = [part for part in target.layers[0].modules() if isinstance(part, torch.nn.Linear)]
    assert linears and all(kind(laid(part).one_token) == "packed" for part in [*linears, target.lm_head])
    assert {of for choices in names_of(chosen).values() for of in choices.values()} == {"packed"}


@needs_packed
def test_measuring_leaves_the_logits_and_no_copy_behind(monkeypatch):
    World(monkeypatch, ALIKE)
    model = random_model("llama", 0)
    ids = torch.arange(3, 15).unsqueeze(0)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits[0]
    target = StagedModel(model)
    chosen = choose_layouts(target, [ONE, SIX])
    assert {of for choices in names_of(chosen).values() for of in choices.values()} == {"columns"}
    laid = packed_weights([*target.layers, target.lm_head])
    assert laid and not any(isinstance(one.one_token, layouts.Timed) for one in laid)
    assert all(one.fixed or one.one_token is None for one in laid)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, use_cache=False).logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_measurement_that_fails_leaves_the_weights_themselves(monkeypatch):
    target = StagedModel(random_model("llama", 0))
    runs = iter([1.0, 1.0, 1.0])
    monkeypatch.setattr(layouts.TimedPasses, "run", lambda passes, shape: next(runs))
    with pytest.raises(StopIteration):
        choose_layouts(target, [ONE, SIX])
    laid = packed_weights([*target.layers, target.lm_head])
    assert laid and all(one.one_token is None for one in laid)


@needs_packed
def test_a_hopeless_layout_is_not_tried_to_the_end(monkeypatch):
    world = World(monkeypatch, ALIKE | {"packed": (9.0, 9.0)})
    target = StagedModel(random_model("llama", 0))
    monkeypatch.setattr(layouts, "SECONDS", 1e9)
    choose_layouts(target, [SIX])
    counts = {of: sum(one == of for one, _ in world.products) for of in ("rows", "packed")}
    of_a_turn = 2 * len(packed_weights([*target.layers, target.lm_head]))
    assert counts["rows"] - counts["packed"] == of_a_turn * (layouts.ROUNDS - layouts.FEWEST_ROUNDS)
