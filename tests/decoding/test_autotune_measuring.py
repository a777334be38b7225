"""Layouts of weights: what is measured, in passes as the loop makes them, decides."""

from __future__ import annotations

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
    packed_linear,
    packed_weights,
    product,
)
from specbench.decoding.model.staged_model import StagedModel
from tests.support.layouts import ONE, SIX, has_packed, kind, laid, names_of, needs_packed
from tests.support.models import random_model

pytestmark = pytest.mark.usefixtures("nothing_known")


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
    lacking = set() if has_packed(dtype) else {"packed", "packed_one"}
    lacking |= {PANELS} if native.reason() else set()
    assert found.keys() == {1, 6}
    for n, times in found.items():
        assert times.keys() == set(LAYOUTS) - lacking - (set() if n == 1 else set(ONE_TOKEN))
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
    target = StagedModel(random_model("llama", 0, num_hidden_layers=2), width=width)
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
    target = StagedModel(random_model("llama", 0, num_hidden_layers=2))
    monkeypatch.setattr(layouts, "SECONDS", 1e9)
    choose_layouts(target, [SIX])
    counts = {of: sum(one == of for one, _ in world.products) for of in ("rows", "packed")}
    of_a_turn = 2 * len(packed_weights([*target.layers, target.lm_head]))
    assert counts["rows"] - counts["packed"] == of_a_turn * (layouts.ROUNDS - layouts.FEWEST_ROUNDS)
