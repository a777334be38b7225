"""Parts that measure the machine, and passes of random models. Expected ranges are for an H100 or H200."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from methods.sps import SpeculativeSampling
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.model.graphs import EagerRunner, GraphRunner
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Draft
from specbench.decoding.trace import Clock
from specbench.measure.machine import hardware, provenance
from specbench.measure.machine.bandwidth import bandwidth as measured_bandwidth
from specbench.models.devices import prepare_device
from specbench.models.pairs import Pair, load_pair
from tests.benchmarks.gpu.figures import COMPILING, GB, MS, REPEATS, Check, Figure, seconds

# What a kernel does, by a piece of its name; all others work element by element, or sum.
KERNELS = {
    "products": ("gemm", "gemv", "cutlass", "nvjet", "splitk", "::mm", "addmm"),
    "attention": ("attention", "flash", "fmha", "softmax", "attend"),
    "copies": ("memcpy", "memset", "copy", "index_put", "cat"),
}
OTHER_KERNELS = "other kernels"


# -- the machine


def environment(check: Check) -> None:
    """Versions, the GPU and its clocks."""
    prepare_device(check.device)
    check.say(Figure("versions", json.dumps(provenance.versions())))
    check.say(Figure("CUDA", str(torch.version.cuda), note=f"cuDNN {torch.backends.cudnn.version()}"))
    check.say(Figure("machine", json.dumps(hardware.machine())))
    check.say(Figure("state", json.dumps(hardware.gpus(hardware.GPU_STATE))))
    if check.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(check.device)
        check.say(Figure("free memory", free / GB, "GB", 70, note=f"of {total / GB:.0f}"))
        check.say(
            Figure("cuDNN attention", str(torch.backends.cuda.cudnn_sdp_enabled()), note="must be False")
        )


def bandwidth(check: Check) -> None:
    """How fast memory is read and copied, and what starting an operation costs."""
    check.say(Figure("sum of 8 GiB", _read_rate(check) / GB, "GB/s", 2600, 4700))
    size = 2**26 if check.small else 2**33
    buffer, other = (torch.ones(size // 4, device=check.device) for _ in range(2))
    copied = 2 * size / seconds(check, lambda: other.copy_(buffer)) / GB
    note = "3000 was seen on an H100, 4300 on an H200"
    check.say(Figure("copy of 8 GiB", copied, "GB/s", 2700, 4500, note))
    if not check.small:
        measured = measured_bandwidth(check.device) / GB
        check.say(Figure("as runs measure it", measured, "GB/s", 2600, 4700, "within 2 % of the first"))
    one, n = torch.zeros(1, device=check.device), 20 if check.small else 1000

    def starts() -> None:
        for _ in range(n):
            one.add_(1)

    check.say(Figure("an operation", seconds(check, starts) / n * 1e6, "us", 2, 12, "all of it is its start"))


def _read_rate(check: Check) -> float:
    """Bytes per second at which memory is read."""
    size = 2**26 if check.small else 2**33
    return size / seconds(check, torch.ones(size // 4, device=check.device).sum)


def attention(check: Check) -> None:
    """One query over keys of successive lengths, with cuDNN's attention and without: what a decoded token meets."""
    d, heads, lengths = 128, 32, range(500, 504 if check.small else 530)
    dtype = torch.bfloat16
    query = torch.randn(1, heads, 1, d, device=check.device, dtype=dtype)
    keys = torch.randn(1, heads, 1024, d, device=check.device, dtype=dtype)
    clock = Clock(check.device)

    def first(length: int) -> float:
        clock.synchronize()
        begun = time.perf_counter()
        cut = keys[:, :, :length]
        torch.nn.functional.scaled_dot_product_attention(query, cut, cut)
        clock.synchronize()
        return MS * (time.perf_counter() - begun)

    on = torch.backends.cuda.cudnn_sdp_enabled()
    first(400)
    met = [first(length) for length in lengths]
    check.say(
        Figure(f"a new length, cuDNN {'on' if on else 'off'}", median(met), "ms", note="20 to 40 if it plans")
    )
    check.say(Figure("the same lengths again", median(first(length) for length in lengths), "ms", 0, 0.2))
    prepare_device(check.device)
    first(399)
    met = [first(length + 100) for length in lengths]
    check.say(Figure("a new length, as models are loaded", median(met), "ms", 0, 0.2))


# -- passes


def passes(check: Check) -> None:
    """Passes of random models, without graphs: one token, and the verification of several."""
    rate = _read_rate(check)
    for name in ("vicuna-7b", "llama-3.1-8b")[: 1 if check.small else 2]:
        check.go_on(name)
        cfg = check.settings(name, init="random", graphs=False)
        begun = time.perf_counter()
        pair = load_pair(cfg, 0, with_draft=True)  # type: ignore[arg-type] # it has all keys
        check.say(Figure(f"{name}: building", time.perf_counter() - begun, "s", 0, 20))
        target, draft = StagedModel(pair.target), StagedModel(pair.draft)  # type: ignore[arg-type] # loaded
        least = target.pass_bytes() / rate * MS
        check.say(
            Figure(f"{name}: reading the weights", least, "ms", note=f"{target.pass_bytes() / GB:.2f} GB")
        )
        one = _pass_ms(check, target, 1, 256)
        share = 100 * least / one
        check.say(Figure(f"{name}: a token at 256", one, "ms", least, 25, f"{share:.0f} % of the bandwidth"))
        check.say(Figure(f"{name}: a token at 1500", _pass_ms(check, target, 1, 1500), "ms", least, 25))
        for n in (2,) if check.small else (2, 4, 6, 8, 16):
            ratio = _pass_ms(check, target, n, 256) / one
            check.say(
                Figure(f"{name}: {n} tokens against one", ratio, "times", 0.8, 2.2, "the host starts them")
            )
        drafted = _pass_ms(check, draft, 1, 256)
        least = draft.pass_bytes() / rate * MS
        check.say(
            Figure(f"{name}: a token of the draft model", drafted, "ms", least, 12, f"weights {least:.2f} ms")
        )
        check.say(Figure(f"{name}: draft model against target", drafted / one, "times", 0.02, 0.6))
        del target, draft, pair


@torch.inference_mode()
def _pass_ms(check: Check, model: StagedModel, n: int, context: int) -> float:
    """Milliseconds of a pass of n tokens after so many others."""
    cache, ctx = model.new_cache(2048), ForwardContext.consecutive(context, n)
    ids = torch.ones(1, n, dtype=torch.int64, device=check.device)
    return MS * seconds(check, lambda: model.head(model.run_layers(model.embed(ids), cache, ctx)))


def graphs(check: Check, compiles: bool = False) -> None:
    """Passes of random models that are captured once and replayed, and first compiled, if asked for."""
    rate = _read_rate(check)
    for name in ("vicuna-7b", "llama-3.1-8b")[: 1 if check.small or compiles else 2]:
        # What one pass costs where the host starts a graph in place of a thousand operations.
        most = 4.7 if compiles else 10.0  # an H100 took 8.0 to 9.5, docs/results/h100.md
        pair = load_pair(check.settings(name, init="random", compile=compiles), 0, with_draft=True)  # type: ignore[arg-type] # as above
        for label, model, tokens in (
            ("one token", StagedModel(pair.target), 1),
            ("six tokens", StagedModel(pair.target), 6),
            ("one token, padded to 8", StagedModel(pair.target, width=8), 1),
            ("six tokens, padded to 8", StagedModel(pair.target, width=8), 6),
            ("a token of the draft model", StagedModel(pair.draft), 1),  # type: ignore[arg-type] # loaded
        ):
            check.go_on(f"{name}: {label}", COMPILING if compiles else 0)
            least = model.pass_bytes() / rate * MS
            first, spent, differing = _replayed(check, model, tokens)
            share = f"{100 * least / spent:.0f} % of the bandwidth"
            high = most if "draft" not in label else most / 2
            check.say(Figure(f"{name}: {label}", spent, "ms", least, high, share))
            check.say(Figure(f"{name}: {label}: the first time", first, "s", 0, COMPILING if compiles else 3))
            if not compiles:  # what is compiled adds in another order
                check.say(Figure(f"{name}: {label}: logits that differ", differing, "", 0, 0))
        if not compiles:
            spent, differing = _drafted(check, pair)
            check.say(Figure(f"{name}: five tokens of the draft model as one", spent, "ms", 0, 5 * most / 2))
            check.say(Figure(f"{name}: tokens drafted as one that differ", differing, "", 0, 0))
        del model, pair


@torch.inference_mode()
def profile(check: Check) -> None:
    """Where the time of a captured pass goes: how long the kernels of each kind run, and how many there are."""
    pair = load_pair(check.settings("llama-3.1-8b", init="random"), 0, with_draft=False)  # type: ignore[arg-type] # as above
    for n in (1, 6):
        model, repeats = StagedModel(pair.target), 3 if check.small else REPEATS
        cache, clock = model.new_cache(2048), Clock(check.device)
        ids = torch.ones(1, n, dtype=torch.int64, device=check.device)
        work = partial(model.verify, ids[:, :1], Draft(ids[:, 1:]), cache, 300)
        spent = MS * seconds(check, work)
        with torch.profiler.profile() as watched:
            for _ in range(repeats):
                work()
            clock.synchronize()
        on_gpu = check.device.type == "cuda"
        took: Counter[str] = Counter()  # us of a kind's kernels
        count: Counter[str] = Counter()
        for event in watched.key_averages():
            spent_here = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if spent_here and on_gpu == (event.device_type == torch.autograd.DeviceType.CUDA):
                name = event.key.lower()
                kinds = (kind for kind, pieces in KERNELS.items() if any(piece in name for piece in pieces))
                kind = next(kinds, OTHER_KERNELS)
                took[kind] += spent_here
                count[kind] += event.count
        label = "one token" if n == 1 else f"{n} tokens"
        for kind in (*KERNELS, OTHER_KERNELS):
            note = f"{count[kind] / repeats:.0f} a pass"
            check.say(Figure(f"{label}: {kind}", took[kind] / repeats / MS, "ms", note=note))
        busy = took.total() / repeats / MS
        check.say(Figure(f"{label}: between kernels", spent - busy, "ms", note=f"of {spent:.2f} ms"))


@torch.inference_mode()
def _drafted(check: Check, pair: Pair, context: int = 300) -> tuple[float, int]:
    """Ms of a draft of five tokens, and those of them that are other ones without graphs."""
    drafter, target = SpeculativeSampling(pair, 5), StagedModel(pair.target)
    drafter.open(Slots(1, 2048, check.device), target)
    drafter._fed[0] = context - 1
    tokens = torch.ones(1, 2048, dtype=torch.int64, device=check.device)
    layout = RaggedLayout(target.new_cache(2048))
    batch = Batch([], [context], [5], 5, tokens, SamplingParams(5), layout)
    drafter.draft(batch)
    spent = MS * seconds(check, lambda: drafter.draft(batch))
    replayed = drafter.draft(batch).tokens
    if isinstance(drafter.model.runner, GraphRunner):  # the same kernels, started one by one
        drafter.model.runner = Uncaptured(check.device)
    return spent, int((drafter.draft(batch).tokens != replayed).sum())


class Uncaptured(GraphRunner):
    """Runs what would be captured as it is."""

    def run(
        self, memory: object, key: Hashable, function: Callable[..., Any], *inputs: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """As `EagerRunner.run`."""
        return function(*inputs)


@torch.inference_mode()
def _replayed(check: Check, model: StagedModel, n: int, context: int = 300) -> tuple[float, float, int]:
    """Seconds of the first verification of n tokens, ms of others, and logits that are other ones without graphs."""
    cache = model.new_cache(2048)
    ids = torch.ones(1, n, dtype=torch.int64, device=check.device)
    clock = Clock(check.device)

    def work() -> torch.Tensor:
        return model.verify(ids[:, :1], Draft(ids[:, 1:]), cache, context)

    clock.synchronize()
    begun = time.perf_counter()
    replayed = work()
    clock.synchronize()
    first = time.perf_counter() - begun
    spent = MS * seconds(check, work)
    replayed = work()
    captured = model.runner
    if captured is not None:
        model.runner = EagerRunner()
    differing = int((work() != replayed).sum())
    model.runner = captured
    return first, spent, differing
