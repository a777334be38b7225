"""No hidden wait for the device: with every method and scheduler the host reads once in a round, but where a method has
to look, and says why."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch
from omegaconf import OmegaConf

from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.mirror_sd import MirrorSD
from methods.ragged import RaggedBatch
from methods.sps import SpeculativeSampling
from specbench.decoding.drafter import Drafter, needs_of
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import Decoding
from specbench.decoding.state import Draft, Request
from specbench.measure.protocol import Bench
from specbench.measure.runner import prepare
from specbench.system.paths import packaged
from tests.support.conf import composed, inline, is_scheduler, lacks_part, names
from tests.support.decoding import random_pair
from tests.support.waits import Waits, watched

# Where a drafter looks, and how often in a round. Each costs the time until all that is queued is done.
CONFIDENCE = {"goes_on_at": 6}  # a draft ends behind a token of low confidence: one look at each
EXITS = {"_next": 2 * 5}  # whether a token goes on to the next of three exits
BRANCHES = {
    "likely": 1
}  # in the draft's thread: which branches there are, to know the target's decision among them
# How many guesses of the streams came true says how many passes there are, and which entries stay.
STREAMS = {"_grown": 2 * 7, "settle": 1, "joined": 1}
LOOKS: dict[str, dict[str, int]] = {
    "kangaroo": CONFIDENCE,
    "kangaroo_tree": CONFIDENCE,
    "s2d": EXITS,
    "swift": {"_look": 12},  # likewise, and how many tokens stand beside it
    "mirror_sd": BRANCHES,
    "mirror_hybrid": BRANCHES,
    "ssd": BRANCHES,
    "sps_ss": STREAMS,
    "mirror_ss": STREAMS | BRANCHES | {"_pick": 1},
}
METHODS = [name for name in names("method") if not is_scheduler(name)]
DRAFTERS = [name for name in names("drafter") if name != "none"]
FAST = ("ar", "pld", "recycling", "sps")
# A text that repeats itself: look-ups find something.
TEXT = [11, 23, 35, 47, 59] * 3


def waits_of(
    monkeypatch, *settings: str, temperatures: Sequence[float] = (0.0,), pair: str = "tiny_shallow"
) -> Iterator[Waits]:
    """What some short answers at each temperature wait for. In bfloat16: fp32 has ways of its own on a CPU.

    On the shallow pair, since layers are all alike.
    """
    fixed = (f"pair={pair}", "pair.device=cpu", "pair.dtype=bfloat16", "generate=false")
    cfg = composed("bench", *settings, *fixed)
    OmegaConf.resolve(cfg)
    bench = prepare(cfg)
    with closing(bench.drafter):
        for temperature in temperatures:
            yield waits_at(monkeypatch, bench, temperature)


def waits_at(monkeypatch, bench: Bench, temperature: float) -> Waits:
    count = 4 if bench.batch_size else 1
    requests = [Request([*TEXT, *TEXT[:i]], Decoding(5 + 2 * i, temperature), i) for i in range(count)]
    requests[0] = Request(TEXT, Decoding(8, temperature))
    bench._foretell(requests)
    with watched(monkeypatch) as waits:
        bench.arms["method"](requests)
    return waits


def assert_one_wait(waits: Waits, looks: dict[str, int], greedy: bool = True) -> None:
    """One read a round, by the engine; one for each sequence that joins; and those that the drafter says.

    greedy: every drafter then comes by all its places; what is drawn may miss every branch.
    """
    assert len(waits.found["round"]) > 1 and waits.found["join"]
    looked = set()
    for found in waits.found["round"]:
        own = [wait for wait in found if wait.endswith(" in _on_host")]
        assert len(own) == 1, found
        rest = [re.sub(".* in ", "", wait) for wait in found if wait not in own]
        assert all(rest.count(place) <= looks.get(place, 0) for place in rest), found
        looked |= set(rest)
    assert looked == set(looks) or not greedy, "what is no longer looked at need not be excused"
    assert all(len(found) == 1 and found[0].startswith("tolist") for found in waits.found["join"])
    assert not any(waits.found["retire"])


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[] if m in FAST else pytest.mark.slow) for m in METHODS],
)
def test_every_method(monkeypatch, method):
    settings = [f"method={method}", *inline(method)]
    samples = needs_of(composed("bench", *settings).method).sampling
    temperatures = (0.0, 0.8) if samples else (0.0,)
    # Only against the deep target do the streams of mirror_ss have to pick a branch so soon.
    pair = "tiny" if method == "mirror_ss" or lacks_part(method, "tiny_shallow") else "tiny_shallow"
    found = waits_of(monkeypatch, *settings, temperatures=temperatures, pair=pair)
    for temperature, waits in zip(temperatures, found, strict=True):
        assert_one_wait(waits, LOOKS.get(method, {}), temperature == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "drafter"),
    [("ar_batch", "none"), ("eqspec", "sps"), ("exspec", "medusa"), *(("ragged", name) for name in DRAFTERS)],
)
def test_every_drafter_in_batches(monkeypatch, method, drafter):
    settings = [f"method={method}", f"drafter={drafter}", "batch_size=3"]
    pair = "tiny" if drafter in METHODS and lacks_part(drafter, "tiny_shallow") else "tiny_shallow"
    (waits,) = waits_of(monkeypatch, *settings, pair=pair)
    assert_one_wait(waits, LOOKS.get(drafter, {}))


def modules_of(thing: object, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Modules that an object of this project holds, directly or not."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.nn.Module):
        yield thing
    elif isinstance(thing, list | tuple | dict):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from modules_of(part, seen)
    elif type(thing).__module__.startswith(("methods.", "specbench.")):
        for part in vars(thing).values() if hasattr(thing, "__dict__") else ():
            yield from modules_of(part, seen)


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "dtype"), [("tiny_shallow", "float16"), ("tiny_shallow_wide", "bfloat16")])
@pytest.mark.parametrize("method", METHODS)
def test_angles_of_positions_are_not_rounded(method, pair, dtype):
    """Trained in float32, a part with other angles drafts worse the longer the text is; nothing else would tell."""
    if lacks_part(method, pair):
        pytest.skip(f"pair {pair} has no weights of {method}")
    settings = [f"method={method}", *inline(method), f"pair={pair}", f"pair.dtype={dtype}"]
    cfg = composed("bench", *settings, "pair.device=cpu", "generate=false")
    OmegaConf.resolve(cfg)
    needs = needs_of(cfg.method)
    folder = None if needs.part is None else packaged(cfg.pair.parts[needs.part])
    if not needs.draft_model and (folder is None or not any(folder.glob("*.safetensors"))):
        pytest.skip(f"{method} brings no weights")
    with closing(prepare(cfg).drafter) as drafter:
        found = [
            module for module in modules_of(drafter, set()) if next(module.parameters(), None) is not None
        ]
        assert found
        for module in found:
            assert {p.dtype for p in module.parameters()} == {getattr(torch, dtype)}
            assert {b.dtype for _, b in module.named_buffers() if b.is_floating_point()} <= {torch.float32}


@pytest.mark.slow
def test_the_targets_thread_never_waits_for_the_drafts(monkeypatch):
    """The watch is of this thread alone: the draft's side reads in its own."""
    (waits,) = waits_of(monkeypatch, "method=mirror_sd", "method.placement=thread")
    assert_one_wait(waits, {})


@pytest.mark.first_fast
@pytest.mark.parametrize("scheduler", [RaggedBatch, EqSpec, ExSpec])
def test_schedulers_move_without_a_wait(monkeypatch, scheduler):
    """Drafts of different lengths, so that sequences are moved, aligned and replaced."""
    pair = random_pair("llama")
    engine = Engine(
        StagedModel(pair.target),
        SpeculativeSampling(pair, 3),
        frozenset(),
        scheduler(3),
    )
    moved = []
    inner = engine._move
    monkeypatch.setattr(engine, "_move", lambda *given: moved.append(given) or inner(*given))
    requests = [Request([3 + i, 9, 27][: 1 + i % 3], Decoding(4 + 3 * (i % 4))) for i in range(7)]
    with watched(monkeypatch) as waits:
        engine.generate(requests)
    assert moved and len(waits.found["join"]) == 7
    # In fp32 the likeliest token is found by NumPy, on a CPU alone.
    for found in waits.found["round"]:
        assert [wait for wait in found if "in likeliest" not in wait] == [found[-1]]
        assert found[-1].endswith(" in _on_host")
    assert not any(waits.found["retire"])


FAULTS = {
    "item": lambda batch: batch.tokens[0, 0].item(),
    "__bool__": lambda batch: bool(batch.tokens[0, 0] > 3),
    "__index__": lambda batch: range(batch.tokens[0, 0]),
    "__int__": lambda batch: int(batch.tokens[0, 0]),
    "cpu": lambda batch: batch.tokens.cpu(),
    "numpy": lambda batch: batch.tokens.numpy(),
    "nonzero": lambda batch: batch.tokens.nonzero(),
    "__getitem__": lambda batch: batch.tokens[batch.tokens > 3],
    "__getitem__ of a list": lambda batch: batch.tokens[[0]],
    "__getitem__ of a slice": lambda batch: batch.tokens[:, batch.tokens[0, 0] * 0 :],
    "__setitem__": lambda batch: batch.tokens.__setitem__([0], 3),
    "tensor": lambda batch: torch.tensor([1, 2], device=batch.tokens.device),
    "aten._local_scalar_dense.default": lambda batch: torch.arange(batch.tokens[0, 0]),
    "aten._local_scalar_dense.default of an index": lambda batch: batch.tokens[batch.tokens[0, 0] * 0],
    "equal": lambda batch: torch.equal(batch.tokens, batch.tokens),
    "repeat_interleave": lambda batch: batch.tokens[0].repeat_interleave(batch.tokens[0] * 0, 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_is_found(monkeypatch, fault):
    class Faulty(Drafter):
        max_draft_tokens = 1

        def draft(self, batch) -> Draft:
            FAULTS[fault](batch)
            return Draft(batch.newest(1))

    engine = Engine(StagedModel(random_pair("llama").target), Faulty(), frozenset())
    with watched(monkeypatch) as waits:
        engine.answer([5, 7, 9], Decoding(4))
    named = fault.partition(" of ")[0] + " at "
    assert any(wait.startswith(named) for found in waits.found["round"] for wait in found), waits.found


@pytest.mark.first_fast
@pytest.mark.parametrize("make", [SpeculativeSampling, lambda pair: MirrorSD(pair, 4, placement="inline")])
def test_no_draft_is_kept_beyond_its_round(make):
    """Probabilities of 128k words and states would pile up until the answer ends."""
    pair = random_pair("llama")
    drafter = make(pair)
    kept: list[weakref.ref] = []
    alive: list[int] = []
    inner = drafter.draft

    def draft(batch) -> Draft:
        gc.collect()
        alive.append(sum(one() is not None for one in kept))
        made = inner(batch)
        kept.extend(weakref.ref(part) for part in (made.tokens, made.probs) if part is not None)
        return made

    drafter.draft = draft
    Engine(StagedModel(pair.target), drafter, frozenset()).answer([3, 9, 27], Decoding(12, 1.0))
    assert len(alive) > 3 and max(alive) <= 1
