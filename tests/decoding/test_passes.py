"""Passes that are replayed: what a graph may hold, when there is a new one, and when it is gone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from specbench.decoding import engine as engines
from specbench.decoding.cpu import packed_linear as linear
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model import graphs as graphs_module
from specbench.decoding.model import staged_model as targets
from specbench.decoding.model.cost import experts_wait
from specbench.decoding.model.fixed_shape import LONGEST
from specbench.decoding.model.graphs import (
    EagerRunner,
    GraphRunner,
    Options,
    compiled,
    set_options,
    uncollected,
)
from specbench.decoding.model.staged_model import StagedModel, runner_of
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import NORMED, Draft
from specbench.system.errors import JobError, UserError
from tests.support.decoding import random_pair
from tests.support.graphs import PretendedRunner, pretend
from tests.support.models import ARCHITECTURES, FAMILIES, SLIDING, random_model

# Architectures, and families with other windows, caps, angles, heads and routed experts.
WHOLE = [*ARCHITECTURES, "gemma2", "gemma3", "cohere", "granite", "phi3", "qwen3_moe", "gpt_oss"]
PROMPT = [3, 9, 27, 11, 33, 29, 17]


class Memory:
    """What a function works on."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(4)


def test_a_pass_is_captured_once_and_what_it_gives_is_the_callers():
    graphs, owner, calls = PretendedRunner(), Memory(), []

    def double(given: torch.Tensor) -> list[torch.Tensor]:
        calls.append(given)
        owner.numbers.copy_(given)
        return [2 * given]

    with torch.inference_mode():
        ones, threes = (
            graphs.run(owner, "double", double, torch.full((4,), number))[0] for number in (1.0, 3.0)
        )
        assert graphs.captures == 1 and ones.tolist() == [2] * 4 and threes.tolist() == [6] * 4
        assert len({id(given) for given in calls}) == 1, "it is given the same tensors each time"
        assert owner.numbers.tolist() == [3] * 4
        graphs.run(owner, "double", double, torch.ones(4, dtype=torch.float64))
        graphs.run(owner, "again", double, torch.ones(4))
        graphs.run(Memory(), "double", double, torch.ones(4))
        assert graphs.captures == 4, "another dtype, key, or memory is another pass"
        graphs.forget()
        graphs.run(owner, "double", double, torch.ones(4))
        assert graphs.captures == 5


def test_what_was_not_used_for_long_is_dropped_where_graphs_hold_too_much(monkeypatch):
    """The logits of a batch of trees take half a gigabyte, and a pool ends with many sizes of batches."""
    graphs, owner, number = PretendedRunner(), Memory(), torch.ones(4)
    two = 2 * (16 + 16)  # bytes that two passes read and write
    monkeypatch.setattr(graphs_module, "HELD_BYTES", two)

    def captures(key: str) -> int:
        graphs.run(owner, key, lambda given: [2 * given], number)
        return graphs.captures

    with torch.inference_mode():
        assert [captures(key) for key in "ababa"] == [1, 2, 2, 2, 2]
        assert captures("c") == 3, "b goes, which was not used since"
        assert [captures(key) for key in "aca"] == [3, 3, 3] and captures("b") == 4
        with monkeypatch.context() as patch:
            patch.setattr(graphs_module, "is_scarce", lambda device: False)
            assert captures("e") == 5 and captures("a") == 5, "where memory is left, nothing is dropped"
        monkeypatch.setattr(graphs_module, "HELD_BYTES", 1)
        assert captures("d") == 6 and captures("d") == 6, "the one at hand stays"


def test_what_a_captured_function_runs_is_a_part_of_it():
    """With the same graphs and with others; each alone would be captured in the middle of a capture."""
    graphs, others, owner = PretendedRunner(), PretendedRunner(), Memory()

    def both(given: torch.Tensor) -> list[torch.Tensor]:
        (twice,) = graphs.run(owner, "inner", lambda own: [2 * own], given)
        return others.run(owner, "inner", lambda own: [own + 1], twice)

    with torch.inference_mode():
        for number in (1.0, 3.0):
            assert (
                graphs.run(owner, "both", both, torch.full((4,), number))[0].tolist() == [2 * number + 1] * 4
            )
        assert (graphs.captures, graphs.replays) == (1, 2) and (others.captures, others.replays) == (0, 0)
        graphs.run(owner, "inner", lambda own: [2 * own], torch.ones(4))
    assert graphs.captures == 2, "alone it is a pass of its own"


def test_a_capture_that_fails_is_over():
    graphs, owner = PretendedRunner(), Memory()

    def failing(given: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("for some reason")

    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="for some reason"):
            graphs.run(owner, "failing", failing, torch.ones(4))
        graphs.run(owner, "double", lambda given: [2 * given], torch.ones(4))
    assert graphs.captures == 1


@pytest.mark.parametrize("error", [RuntimeError("a look at the device"), torch.OutOfMemoryError("no room")])
def test_what_breaks_a_capture_is_reported_and_its_stream_is_left(monkeypatch, error):
    """As torch does it: the end of a broken capture raises before its stream is left."""
    own = SimpleNamespace(priority=0, wait_stream=lambda other: None)
    streams, calls = [own], []

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        before = streams[:]
        streams.append(one)
        try:
            yield
        finally:
            streams[:] = before

    class Broken:
        def __init__(self, graph: object, stream: object, **options: object):
            self.stream = stream

        def __enter__(self) -> None:
            streams.append(self.stream)

        def __exit__(self, *raised: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def failing(given: torch.Tensor) -> list[torch.Tensor]:
        calls.append(streams[-1] is own)
        if len(calls) > graphs_module.WARM_UPS:
            raise error
        return [given]

    made = SimpleNamespace(priority=0, wait_stream=lambda other: None)
    replaced = {
        "Stream": lambda device, priority: made,
        "current_stream": lambda device: streams[-1],
        "stream": stream,
        "graph": Broken,
        "CUDAGraph": lambda: None,
        "graph_pool_handle": lambda: None,
    }
    for name, double in replaced.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else JobError
    with pytest.raises(kind, match=str(error)):
        GraphRunner(torch.device("cuda", 0)).capture(failing, [torch.ones(2)])
    assert streams == [own] and calls == [False] * (graphs_module.WARM_UPS + 1)


def test_a_table_that_grows_within_a_capture_does_not_lose_it():
    graphs, owner = PretendedRunner(), Memory()

    def growing(given: torch.Tensor) -> list[torch.Tensor]:
        if not graphs.captures:  # as `StagedModel._make_angles` of a draft model does
            graphs.forget()
        return [2 * given]

    with torch.inference_mode():
        for _ in range(2):
            graphs.run(owner, "growing", growing, torch.ones(4))
    assert graphs.captures == 1


def test_without_graphs_a_function_of_a_batch_is_called_as_it_is():
    """The same batch and tensors, also where all passes have one width."""
    pair, batch, given = random_pair("llama"), object(), torch.ones(2)
    for width in (None, 4):
        target, calls = StagedModel(pair.target, width=width), []
        with torch.inference_mode():
            target.run_batch(
                batch, target, "key", lambda *own, calls=calls: calls.append(own) or [], given, entries=3
            )
        assert len(calls) == 1 and calls[0][0] is batch and calls[0][1] is given


def test_what_was_captured_goes_with_its_memory():
    graphs, owner = PretendedRunner(), Memory()
    with torch.inference_mode():
        graphs.run(owner, "double", lambda given: [2 * given], torch.ones(4))
    assert len(graphs._captured) == 1
    del owner
    gc.collect()
    assert len(graphs._captured) == 0


def test_memory_that_moves_is_found():
    """The double would prove nothing if it let through what a graph cannot do."""
    graphs, owner = PretendedRunner(), Memory()

    def add(given: torch.Tensor) -> list[torch.Tensor]:
        return [given + owner.numbers]

    with torch.inference_mode():
        graphs.run(owner, "add", add, torch.ones(4))
        owner.numbers = torch.ones(4)
        with pytest.raises(AssertionError, match="a graph would"):
            graphs.run(owner, "add", add, torch.ones(4))


@pytest.mark.slow
def test_an_answer_captures_a_pass_for_each_reach(monkeypatch):
    pair = random_pair("llama")
    expected = (
        Engine(StagedModel(pair.target), Drafter(), frozenset()).answer(PROMPT, SamplingParams(40)).tokens
    )
    made = pretend(monkeypatch)
    engine = Engine(StagedModel(pair.target), Drafter(), frozenset())
    (graphs,) = made
    assert engine.answer(PROMPT, SamplingParams(40)).tokens == expected
    # The first token comes from the prompt's pass; the others attend to 8 to 46 entries, that is 16, 32 or 48.
    assert (graphs.captures, graphs.replays) == (3, 39)
    other = [token + 1 for token in PROMPT]
    assert engine.answer(other, SamplingParams(40)).tokens != expected
    assert (graphs.captures, graphs.replays) == (3, 78)


def test_caches_and_tables_of_angles_that_grow_are_captured_anew(monkeypatch):
    pair = random_pair("llama")
    plain = Engine(StagedModel(pair.target), Drafter(), frozenset())
    prompts = [(PROMPT * 4)[:n] for n in (3, 18, 9, 40, 3)]
    made = pretend(monkeypatch)
    monkeypatch.setattr(engines, "FIXED_STEP", 16)
    monkeypatch.setattr(targets, "ROPE_STEP", 16)
    engine = Engine(StagedModel(pair.target), Drafter(), frozenset())
    (graphs,) = made
    captures = []
    for prompt in prompts:
        expected = plain.answer(prompt, SamplingParams(10)).tokens
        assert engine.answer(prompt, SamplingParams(10)).tokens == expected
        captures.append(graphs.captures)
    assert captures == [1, 2, 3, 5, 6]
    assert len(graphs._captured) == 1, "those of the caches before are gone"


def test_an_answer_that_fails_leaves_nothing_behind_that_is_not_finite(monkeypatch):
    """Masked entries are multiplied by zero, and NaN stays NaN."""
    pair = random_pair("llama")
    pretend(monkeypatch)
    engine = Engine(StagedModel(pair.target), Drafter(), frozenset())
    expected = engine.answer(PROMPT[:2], SamplingParams(6)).tokens
    inner = StagedModel.verify

    def failing(self, pending, draft, cache, *given):
        cache.segments[0].fill_(float("nan"))
        raise RuntimeError("for some reason")

    monkeypatch.setattr(StagedModel, "verify", failing)
    with pytest.raises(RuntimeError, match="for some reason"):
        engine.answer(PROMPT, SamplingParams(12))
    monkeypatch.setattr(StagedModel, "verify", inner)
    assert engine.answer(PROMPT[:2], SamplingParams(6)).tokens == expected


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_on_hidden_is_called_at_every_tap(monkeypatch, arch, split, width):
    """Where the pass is split, each tap is reached before the layers after it have run, so that a drafter can begin
    beside them. Otherwise the states are outputs of one graph."""
    pair = random_pair(arch)
    depth = pair.target.config.num_hidden_layers
    taps, ids = (depth, 0, 3, NORMED, 1), torch.tensor([PROMPT])

    def told(target: StagedModel) -> tuple[list[tuple[int, torch.Tensor, set[int]]], torch.Tensor]:
        found, ran, cache = [], set(), target.new_cache(32)
        for i, layer in enumerate(target.layers):
            target.layers[i] = partial(
                lambda layer, i, *given, **named: ran.add(i) or layer(*given, **named), layer, i
            )
        with torch.inference_mode():
            target.prefill(ids[:, :4], cache)
            ran.clear()
            logits = target.verify(
                ids[:, 4:5],
                Draft(ids[:, 5:]),
                cache,
                4,
                taps,
                lambda layer, states: found.append((layer, states, {*ran})),
                split,
            )
        return found, logits

    plain, logits = told(StagedModel(pair.target))
    (graphs,), target = _graphs_of(monkeypatch, arch, width)
    found, own_logits = told(target)
    assert graphs.replays == (3 if split else 1)
    assert [layer for layer, *_ in found] == [0, 1, 3, depth, NORMED]
    for (layer, states, ran), (same_layer, others, same_ran) in zip(found, plain, strict=True):
        assert layer == same_layer and same_ran == {*range(depth if layer == NORMED else layer)}
        assert ran == (same_ran if split else {*range(depth)})
        torch.testing.assert_close(states, others, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(own_logits, logits, rtol=1e-3, atol=1e-4)
    assert len({states.data_ptr() for _, states, _ in found}) == 5


def test_prompts_and_whatever_needs_gradients_are_not_captured(monkeypatch):
    (graphs,), target = _graphs_of(monkeypatch, "llama")
    cache, ids = target.new_cache(512), torch.zeros(1, LONGEST + 1, dtype=torch.int64)
    with torch.inference_mode():
        target.prefill(ids[:, :1], cache)
        target.run_layers(target.embed(ids), cache, 100)
    target.run_layers(target.embed(ids[:, :2]), cache, 100)
    assert graphs.captures == 0


def _graphs_of(monkeypatch, arch: str, width: int | None = None) -> tuple[list[GraphRunner], StagedModel]:
    made = pretend(monkeypatch)
    return made, StagedModel(random_pair(arch).target, width=width)


def test_a_cpu_runs_passes_as_they_come():
    """No work beyond a look at one attribute."""
    target = StagedModel(random_pair("llama").target)
    assert not target.fixed_shapes and not isinstance(runner_of(target.model), GraphRunner)
    assert target.padding == 0
    assert EagerRunner().run(target, "key", lambda given: [given], torch.ones(2))[0].tolist() == [1, 1]


def test_graphs_are_for_a_whole_plain_model_on_one_gpu():
    """A model whose tensors say that they are on CUDA stands for one there."""

    def found(**changes) -> bool:
        return isinstance(runner_of(_Stand(**changes)), GraphRunner)

    assert found()
    assert not found(devices=("cuda:0", "cuda:1"))
    assert not found(quantised=True)
    assert not found(hooked=True)
    assert not found(experts=8), "experts that are nowhere to be found cannot be tried"
    assert not found(devices=("cpu",))


@pytest.mark.parametrize(
    ("changes", "graphs", "why"),
    [
        ({"devices": ("cuda:0", "cuda:1")}, True, "spread over devices"),
        ({"quantised": True}, True, "quantised weights"),
        ({"experts": 8}, True, "routed experts"),
        ({}, False, "pair.graphs=false"),
    ],
)
def test_what_is_not_captured_cannot_be_compiled(changes, graphs, why):
    """On CUDA; the setting would have no effect, and a run would say that it had."""
    model = _Stand(**changes)
    set_options(model, Options(graphs, compile=True))
    with pytest.raises(UserError, match=rf"captured.*{why}.*set pair\.compile=null"):
        runner_of(model)
    assert not isinstance(runner_of(_Stand(devices=("cpu",))), GraphRunner)


def test_options_belong_to_a_model():
    """Not to the process: two pairs may be loaded that are to run otherwise."""
    one, other, third = _Stand(), _Stand(), _Stand()
    set_options(one, Options(graphs=False))
    set_options(other, Options(compile=True))
    assert not isinstance(runner_of(one), GraphRunner)
    assert runner_of(other).compile and not runner_of(third).compile


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_graphs_hold_experts_that_do_not_wait_for_the_host(monkeypatch, arch):
    """What CUDA does when it is told to raise at a wait is done here by the experts themselves."""
    model, modes = random_model(arch, 0), ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert not experts_wait(model)
    assert modes == ["default", "error", "default"]

    def wait(*_) -> None:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    first = next(module for name, module in model.named_modules() if name.endswith("experts"))
    with first.register_forward_pre_hook(wait):
        assert experts_wait(model)
    assert modes == ["default", "error", "default", "error", "default"]


class _Stand:
    def __init__(self, devices=("cuda:0",), quantised=False, hooked=False, experts=0):
        self.weights = [SimpleNamespace(device=torch.device(device)) for device in devices]
        self.device = self.weights[0].device
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(num_experts=experts),
            quantization_config={} if quantised else None,
        )
        self.module = SimpleNamespace(_hf_hook=None) if hooked else SimpleNamespace()

    def parameters(self):
        return self.weights

    def buffers(self):
        return []

    def modules(self):
        return [self.module]

    def named_modules(self):
        return []


def test_garbage_waits_for_the_end_of_a_capture():
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [p if place == 0 else pytest.param(p, marks=pytest.mark.slow) for place, p in enumerate(WHOLE)]
)
def test_a_pass_can_be_compiled_as_a_whole(monkeypatch, arch):
    """Whatever breaks a graph of torch.compile raises here; with it, what is computed is the same."""
    monkeypatch.setattr(linear, "LEAST_JOINED", 0)  # the joint products of real models, too
    layers = {"num_hidden_layers": 2}  # one of each kind
    if "layer_types" in FAMILIES.get(arch, ("", {}))[1]:
        layers["layer_types"] = SLIDING[:2]
    target = StagedModel(random_model(arch, 0, **layers), width=4)
    cache, ids = target.new_cache(64), torch.arange(14).unsqueeze(0)
    compared = []

    class Both(EagerRunner):
        def run(self, owner, key, function, *inputs):
            torch._dynamo.reset()
            own = function(*inputs)
            for one, other in zip(own, compiled(function, "eager")(*inputs), strict=True):
                torch.testing.assert_close(other, one)
                compared.append(other.shape[:2])
            return own

    with torch.inference_mode():
        target.prefill(ids[:, :10], cache)
        target.runner = Both()
        target.verify(ids[:, 10:11], Draft(ids[:, 11:13]), cache, 10)
    assert compared == [(1, 4)]


@pytest.mark.slow
def test_what_cannot_be_compiled_is_found():
    def looking(given: torch.Tensor) -> list[torch.Tensor]:
        return [given] if given.sum() > 0 else [-given]

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(looking, "eager")(torch.ones(2))
