"""The parts of the check, each a function that prints figures as it goes. Expected ranges are for an H100 or H200."""

from __future__ import annotations

import json
import pkgutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from methods.sps import SpeculativeSampling
from specbench.data.questions import warmup_questions
from specbench.decoding.device import prepare_device
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.kv_layout import RaggedLayout
from specbench.decoding.model.graphs import EagerRunner, GraphRunner
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.slots import Slots
from specbench.decoding.state import Batch, Draft, Request
from specbench.decoding.trace import Clock, Generation
from specbench.measure.arms import hf_generate
from specbench.measure.certify import certify
from specbench.measure.machine import provenance
from specbench.measure.numeric_noise import next_logits, shape_noise
from specbench.models.pairs import Pair, load_pair
from specbench.system.errors import UserError, one_line
from tests.benchmarks.gpu.settings import Loaded, Settings, method_settings, names, pair_settings, read

GB, MS = 1e9, 1e3
# They look at confidences, exits or branches: LOOKS of tests/test_conformance.py. Torch counts those of all threads.
LOOK_OFTEN = (
    *("kangaroo", "kangaroo_tree", "s2d", "swift"),
    *("sps_ss", "mirror_sd", "mirror_hybrid", "mirror_ss", "ssd"),
)
# Where there is no time for every method.
SOME = ("sps", "pld", "recycling", "medusa", "kangaroo")
REPEATS = 20
# What a kernel does, by a piece of its name; all others work element by element, or sum.
KERNELS = {
    "products": ("gemm", "gemv", "cutlass", "nvjet", "splitk", "::mm", "addmm"),
    "attention": ("attention", "flash", "fmha", "softmax", "attend"),
    "copies": ("memcpy", "memset", "copy", "index_put", "cat"),
}
OTHER_KERNELS = "other kernels"
# On a CPU, to try the script itself: narrow models, few tokens.
SMALL_TARGET = {
    "model_type": "llama",
    "hidden_size": 160,
    "intermediate_size": 400,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 40,
    "vocab_size": 16400,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SMALL_DRAFT = SMALL_TARGET | {"num_hidden_layers": 4}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Attributes:
        name: what was measured.
        value: the figure; None where it could not be measured.
        unit: of it.
        low: at least as much is expected; None: no expectation.
        high: at most so much is expected.
        note: what else was seen.
    """

    name: str
    value: float | int | str | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """What a part is given.

    Attributes:
        device: to measure.
        small: whether only the script is tried.
        say: takes each figure as soon as it is there.
    """

    device: torch.device
    small: bool
    say: Callable[[Figure], None]

    @property
    def tokens(self) -> int:
        """New tokens of an answer."""
        return 6 if self.small else 64

    def settings(self, name: str, **changes: Any) -> Settings:
        """A pair's configuration on this device; small where the script is tried."""
        if self.small and name != "tiny":
            changes |= {"target_shape": SMALL_TARGET, "draft_shape": SMALL_DRAFT}
        return pair_settings(name, device=str(self.device), **changes)

    def prompts(self, pair: Pair, count: int) -> list[list[int]]:
        """Prompts that nothing else is measured on."""
        questions = warmup_questions({"warmup": None})[:count]
        return [pair.prompt_ids([{"role": "user", "content": q.turns[0]}]) for q in questions]


def seconds(check: Check, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of some work, after three calls to warm up, by marks between which nothing waits."""
    repeats = 3 if check.small else repeats
    clock = Clock(check.device)
    for _ in range(1 if check.small else 3):
        work()
    clock.synchronize()
    marks = [clock.mark()]
    for _ in range(repeats):
        work()
        marks.append(clock.mark())
    clock.synchronize()
    return median(clock.seconds(a, z) for a, z in pairwise(marks))


# -- the machine


def environment(check: Check) -> None:
    """Versions, the GPU and its clocks."""
    prepare_device(check.device)
    check.say(Figure("versions", json.dumps(provenance.versions())))
    check.say(Figure("CUDA", str(torch.version.cuda), note=f"cuDNN {torch.backends.cudnn.version()}"))
    check.say(Figure("machine", json.dumps(provenance.machine())))
    check.say(Figure("state", json.dumps(provenance.gpus(provenance.GPU_STATE))))
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
        found = provenance.bandwidth(check.device) / GB
        check.say(Figure("as runs measure it", found, "GB/s", 2600, 4700, "within 2 % of the first"))
    one, n = torch.zeros(1, device=check.device), 20 if check.small else 1000

    def starts() -> None:
        for _ in range(n):
            one.add_(1)

    check.say(Figure("an operation", seconds(check, starts) / n * 1e6, "us", 2, 8, "all of it is its start"))


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
        cfg = check.settings(name, init="random", graphs=False)
        begun = time.perf_counter()
        pair = load_pair(cfg, 0, with_draft=True)  # type: ignore[arg-type] # it has all keys
        check.say(Figure(f"{name}: building", time.perf_counter() - begun, "s", 0, 20))
        target, draft = StagedModel(pair.target), StagedModel(pair.draft)  # type: ignore[arg-type] # loaded
        least = target.pass_bytes() / rate * MS
        check.say(
            Figure(f"{name}: reading the weights", least, "ms", note=f"{target.pass_bytes() / GB:.2f} GB")
        )
        one = _pass(check, target, 1, 256)
        share = 100 * least / one
        check.say(Figure(f"{name}: a token at 256", one, "ms", least, 25, f"{share:.0f} % of the bandwidth"))
        check.say(Figure(f"{name}: a token at 1500", _pass(check, target, 1, 1500), "ms", least, 25))
        for n in (2,) if check.small else (2, 4, 6, 8, 16):
            ratio = _pass(check, target, n, 256) / one
            check.say(
                Figure(f"{name}: {n} tokens against one", ratio, "times", 0.8, 2.2, "the host starts them")
            )
        drafted = _pass(check, draft, 1, 256)
        least = draft.pass_bytes() / rate * MS
        check.say(
            Figure(f"{name}: a token of the draft model", drafted, "ms", least, 12, f"weights {least:.2f} ms")
        )
        check.say(Figure(f"{name}: draft model against target", drafted / one, "times", 0.02, 0.6))
        del target, draft, pair


@torch.inference_mode()
def _pass(check: Check, model: StagedModel, n: int, behind: int) -> float:
    """Milliseconds of a pass of n tokens after so many others."""
    cache, ctx = model.new_cache(2048), ForwardContext.consecutive(behind, n)
    ids = torch.ones(1, n, dtype=torch.int64, device=check.device)
    return MS * seconds(check, lambda: model.head(model.run_layers(model.embed(ids), cache, ctx)))


def graphs(check: Check, compiles: bool = False) -> None:
    """Passes of random models that are captured once and replayed, and first compiled, if asked for."""
    rate = _read_rate(check)
    for name in ("vicuna-7b", "llama-3.1-8b")[: 1 if check.small or compiles else 2]:
        # What one pass costs where the host starts a graph in place of a thousand operations.
        most = 4.7 if compiles else 7.0
        pair = load_pair(check.settings(name, init="random", compile=compiles), 0, with_draft=True)  # type: ignore[arg-type] # as above
        for label, model, tokens in (
            ("one token", StagedModel(pair.target), 1),
            ("six tokens", StagedModel(pair.target), 6),
            ("one token, padded to 8", StagedModel(pair.target, width=8), 1),
            ("six tokens, padded to 8", StagedModel(pair.target, width=8), 6),
            ("a token of the draft model", StagedModel(pair.draft), 1),  # type: ignore[arg-type] # loaded
        ):
            least = model.pass_bytes() / rate * MS
            first, spent, differing = _replayed(check, model, tokens)
            share = f"{100 * least / spent:.0f} % of the bandwidth"
            high = most if "draft" not in label else most / 2
            check.say(Figure(f"{name}: {label}", spent, "ms", least, high, share))
            check.say(Figure(f"{name}: {label}: the first time", first, "s", 0, 150 if compiles else 3))
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
def _drafted(check: Check, pair: Pair, known: int = 300) -> tuple[float, int]:
    """Ms of a draft of five tokens, and those of them that are other ones without graphs."""
    drafter, target = SpeculativeSampling(pair, 5), StagedModel(pair.target)
    drafter.open(Slots(1, 2048, check.device), target)
    drafter._fed[0] = known - 1
    tokens = torch.ones(1, 2048, dtype=torch.int64, device=check.device)
    layout = RaggedLayout(target.new_cache(2048))
    batch = Batch([], [known], [5], 5, 5, tokens, SamplingParams(5), layout)
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
def _replayed(check: Check, model: StagedModel, n: int, behind: int = 300) -> tuple[float, float, int]:
    """Seconds of the first verification of n tokens, ms of others, and logits that are other ones without graphs."""
    cache = model.new_cache(2048)
    ids = torch.ones(1, n, dtype=torch.int64, device=check.device)
    clock = Clock(check.device)

    def work() -> torch.Tensor:
        return model.verify(ids[:, :1], Draft(ids[:, 1:]), cache, behind)

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


# -- answers


class Judge:
    """Autoregressive answers of a target, and verdicts on others."""

    def __init__(self, check: Check, pair: Pair, prompts: list[list[int]]):
        self.pair, self.target, self.prompts = pair, StagedModel(pair.target), prompts
        self.decoding = SamplingParams(check.tokens)
        self.engine = Engine(self.target, Drafter(), pair.stop_ids, context_length=pair.context_length)
        self._noise: float | None = None
        self.answers = self.said_by(self.engine)

    def said_by(self, engine: Engine) -> list[Generation]:
        """Answers of an engine, the first one also to warm up; all of them where passes are captured."""
        if isinstance(self.target.runner, GraphRunner):
            for prompt in self.prompts:
                engine.answer(prompt, self.decoding)
        engine.answer(self.prompts[0], SamplingParams(min(8, self.decoding.max_new_tokens)))
        return [engine.answer(prompt, self.decoding) for prompt in self.prompts]

    def noise(self) -> float:
        """The rounding noise of the target."""
        if self._noise is None:
            samples = [(p, a.tokens) for p, a in zip(self.prompts[:2], self.answers)]
            self._noise = shape_noise(self.target, samples)
        return self._noise

    def verdicts(self, answers: list[Generation]) -> dict[str, int]:
        """How many are exact, ties, violations."""
        counts = {"exact": 0, "tie": 0, "violation": 0}
        for prompt, own, answer in zip(self.prompts, self.answers, answers):

            def margin_at(
                index: int, preferred: int, other: int, prompt: list[int] = prompt, own: Generation = own
            ) -> float:
                logits = next_logits(self.target, prompt, own.tokens, index)
                return float(logits[preferred] - logits[other])

            found = certify(own.tokens, answer.tokens, self.pair.stop_ids, margin_at, self.noise)
            counts[str(found.verdict)] += 1
        return counts

    @property
    def seconds(self) -> float:
        """Of decoding, without prefill, of all its answers."""
        return decode_seconds(self.answers)


def decode_seconds(answers: list[Generation]) -> float:
    """Seconds of all rounds."""
    return sum(answer.seconds - (answer.prefill_seconds or 0.0) for answer in answers)


def accepted(answers: list[Generation]) -> float:
    """Tokens per round."""
    steps = [step for answer in answers for step in answer.steps]
    return sum(step.emitted for step in steps) / max(1, len(steps))


def told(check: Check, label: str, judge: Judge, engine: Engine) -> None:
    """Measures a method's answers: verdicts, speed, acceptance, waits."""
    answers = judge.said_by(engine)
    counts = judge.verdicts(answers)
    verdicts = "/".join(map(str, counts.values()))
    check.say(
        Figure(f"{label}: violations", counts["violation"], "", 0, 0, f"exact/tie/violation {verdicts}")
    )
    ratio = judge.seconds / decode_seconds(answers)
    check.say(
        Figure(f"{label}: decode speedup", ratio, "times", note=f"{accepted(answers):.2f} tokens a round")
    )
    if check.device.type == "cuda":
        waits = waits_in(judge, engine)
        high = None if any(word.rstrip(",") in LOOK_OFTEN for word in label.split()) else 1.0
        check.say(Figure(f"{label}: waits a round", waits, "", 1.0, high))


def waits_in(judge: Judge, engine: Engine) -> float:
    """Waits for the device per round but the first, as torch counts them; what the trace reads at the end is none."""
    request = Request(judge.prompts[0], SamplingParams(min(24, judge.decoding.max_new_tokens)))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            waited = [
                sum("synchroniz" in str(one.message) for one in caught) for _ in engine.rounds([request])
            ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return (waited[-1] - waited[0]) / max(1, len(waited) - 1)


def methods(check: Check, loaded: Loaded, chosen: list[str], prompts: int) -> None:
    """Methods on a pair: losslessness first, then how fast they are."""
    pair, label = loaded.pair, f"{loaded.pair.name} {str(loaded.pair.dtype).removeprefix('torch.')}"
    judge = Judge(check, pair, check.prompts(pair, prompts))
    rounds = sum(len(answer.steps) for answer in judge.answers)
    check.say(Figure(f"{label}: autoregressive", MS * judge.seconds / rounds, "ms a token"))
    for name in chosen:
        try:
            with closing(loaded.drafter(name, **_inline(check, loaded, name))) as drafter:
                if drafter.needs.reference_answer:
                    drafter.set_reference_answers(judge.prompts, [answer.tokens for answer in judge.answers])
                engine = Engine(judge.target, drafter, pair.stop_ids, context_length=pair.context_length)
                told(check, f"{label} {name}", judge, engine)
        except UserError as error:  # the method is not for this pair
            check.say(Figure(f"{label} {name}: not measured", None, note=one_line(error)))
        except Exception as error:  # noqa: BLE001 - a figure, too: the next method may do
            check.say(Figure(f"{label} {name}: failed", 1, "", 0, 0, one_line(error)))
            Clock(
                check.device
            ).synchronize()  # raises where the device itself has failed: nothing more can be measured


def _inline(check: Check, loaded: Loaded, name: str) -> dict[str, Any]:
    """On a CPU a method that overlaps does not: to start a process takes longer than all the rest."""
    overlaps = check.device.type == "cpu" and "placement" in method_settings(name, loaded.cfg)
    return {"placement": "inline"} if overlaps else {}


def alone() -> list[str]:
    """Every method that decodes one sequence at a time."""
    classes = {name: pkgutil.resolve_name(read("method", name)[0]["_target_"]) for name in names("method")}
    return [name for name, one in classes.items() if not issubclass(one, Scheduler) and name != "ar"]


def embedded(check: Check, dtype: str) -> None:
    """Every method on the embedded pair."""
    some = ["sps", "pld", "kangaroo", "medusa", "mirror_sd"] if check.small else alone()
    methods(check, Loaded(check.settings("tiny", dtype=dtype)), some, 1 if check.small else 3)


def expanded(check: Check, name: str, every: bool = False) -> None:
    """Methods on the embedded family's function at the dimensions of real models, in their dtype."""
    begun = time.perf_counter()
    loaded = Loaded(check.settings(name, init="expanded"))
    check.say(Figure(f"{name}: building", time.perf_counter() - begun, "s", 0, 30))
    chosen = SOME[:1] if check.small else alone() if every else SOME
    methods(check, loaded, [*chosen], 1 if check.small else 2)


def oracle(check: Check) -> None:
    """Speculative sampling at chosen acceptances: its passes take their time, whatever the models say."""
    loaded = Loaded(check.settings("llama-3.1-8b", init="expanded"))
    pair = loaded.pair
    judge = Judge(check, pair, check.prompts(pair, 1 if check.small else 4))
    for acceptance in (0.8,) if check.small else (0.6, 0.8, 0.9):
        drafter = loaded.drafter("oracle", acceptance=acceptance)
        drafter.set_reference_answers(judge.prompts, [answer.tokens for answer in judge.answers])
        engine = Engine(judge.target, drafter, pair.stop_ids, context_length=pair.context_length)
        answers = judge.said_by(engine)
        rounds = sum(len(answer.steps) for answer in answers)
        expected = (1 - acceptance**6) / (1 - acceptance)
        note = f"{accepted(answers):.2f} tokens a round, {expected:.2f} in theory; {judge.verdicts(answers)}"
        speed = judge.seconds / decode_seconds(answers)
        low, high = {0.6: (0.7, 1.4), 0.8: (1.2, 1.8), 0.9: (1.4, 2.4)}[acceptance]
        check.say(Figure(f"sps at {acceptance}: decode speedup", speed, "times", low, high, note))
        per_round = MS * decode_seconds(answers) / max(1, rounds)
        check.say(Figure(f"sps at {acceptance}: a round", per_round, "ms"))


def batches(check: Check) -> None:
    """Batches of growing size: autoregressive, and speculative sampling, each sequence with an end of its own."""
    loaded = Loaded(check.settings("llama-3.1-8b", init="expanded"))
    pair, target = loaded.pair, StagedModel(loaded.pair.target)
    prompts = check.prompts(pair, 4)
    alone_ = Engine(target, Drafter(), pair.stop_ids, context_length=pair.context_length)
    decoding = SamplingParams(min(check.tokens, 32))
    expected = [alone_.answer(prompt, decoding).tokens for prompt in prompts]
    for b in (1, 3) if check.small else (1, 4, 16, 64):
        for label, drafter in (("ar", Drafter()), ("sps", loaded.drafter("sps"))):
            engine = Engine(target, drafter, pair.stop_ids, Scheduler(b), pair.context_length)
            requests = [Request(prompts[i % len(prompts)], decoding) for i in range(b)]
            warm = decoding if isinstance(target.runner, GraphRunner) else SamplingParams(4)
            engine.generate([Request(r.prompt, warm) for r in requests])
            provenance.reset_peak_memory(check.device)
            answers = engine.generate(requests)
            peak = (provenance.peak_memory(check.device) or 0) / GB
            spent = decode_seconds(answers)
            tokens = sum(len(a.tokens) - 1 for a in answers)
            same = sum(a.tokens == expected[i % len(prompts)] for i, a in enumerate(answers))
            note = f"{same} of {b} answers as alone, {peak:.1f} GB at most"
            check.say(Figure(f"{label}, {b} sequences", tokens / spent, "tokens/s", note=note))
            rounds = max(len(a.steps) for a in answers)
            check.say(Figure(f"{label}, {b} sequences: a round", MS * spent / rounds, "ms"))


def overlap(check: Check) -> None:
    """Mirror-SD on two streams, beside drafting in turn with the target."""
    loaded = Loaded(check.settings("llama-3.1-8b", init="expanded"))
    pair = loaded.pair
    judge = Judge(check, pair, check.prompts(pair, 1 if check.small else 4))
    for name, placement in (
        ("sps", None),
        ("mirror_sd", "inline"),
        ("mirror_sd", "thread"),
        ("ssd", "thread"),
    ):
        changes = {} if placement is None else {"placement": placement}
        with closing(loaded.drafter(name, **changes)) as drafter:
            engine = Engine(judge.target, drafter, pair.stop_ids, context_length=pair.context_length)
            label = name if placement is None else f"{name}, {placement}"
            told(check, label, judge, engine)
            steps = engine.answer(judge.prompts[0], judge.decoding).steps
            for key in (
                "exit_seconds",
                "overlapped_behind_exit_seconds",
                "exposed_seconds",
                "idle_seconds",
                "ipc_seconds",
            ):
                found = [step.stats[key] for step in steps if key in step.stats]
                if found:
                    check.say(Figure(f"{label}: {key}", MS * sum(found) / len(found), "ms a round"))


def generate(check: Check) -> None:
    """Transformers' own generate, as it comes and with a static cache and a compiled step, beside our loop."""
    loaded = Loaded(check.settings("llama-3.1-8b", init="expanded"))
    pair = loaded.pair
    judge = Judge(check, pair, check.prompts(pair, 1 if check.small else 2))
    rounds = sum(len(answer.steps) for answer in judge.answers)
    check.say(Figure("our loop", MS * judge.seconds / rounds, "ms a token", 3.5, 8))
    requests = [Request(prompt, judge.decoding) for prompt in judge.prompts]
    for label, options in (("generate", {}), ("generate, static cache", {"cache_implementation": "static"})):
        if check.small and options:
            continue  # it compiles for minutes
        answer = hf_generate(pair, pass_bytes=judge.target.pass_bytes(), **options)
        begun = time.perf_counter()
        answer(requests[:1], lambda tokens: None)
        check.say(Figure(f"{label}: first answer", time.perf_counter() - begun, "s"))
        answers = answer(requests, lambda tokens: None)
        tokens = sum(len(answer.tokens) - 1 for answer in answers)
        note = str(judge.verdicts(answers))
        check.say(Figure(label, MS * decode_seconds(answers) / tokens, "ms a token", 4, 20, note))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check, which runs in a process of its own.

    Attributes:
        work: measures.
        limit: seconds after which the process is ended.
    """

    work: Callable[[Check], None]
    limit: int


# What would invalidate the rest comes first.
PARTS: dict[str, Part] = {
    "environment": Part(environment, 25),
    "bandwidth": Part(bandwidth, 25),
    "embedded-float32": Part(partial(embedded, dtype="float32"), 80),
    "passes": Part(passes, 40),
    "graphs": Part(graphs, 35),
    "profile": Part(profile, 25),
    "attention": Part(attention, 20),
    "oracle": Part(oracle, 45),
    "expanded-llama-3.1-8b": Part(partial(expanded, name="llama-3.1-8b", every=True), 130),
    "overlap": Part(overlap, 60),
    "batches": Part(batches, 50),
    "compiled": Part(partial(graphs, compiles=True), 80),
    "generate": Part(generate, 80),
    "embedded-bfloat16": Part(partial(embedded, dtype="bfloat16"), 80),
    "expanded-vicuna-7b": Part(partial(expanded, name="vicuna-7b"), 30),
    "expanded-qwen3-8b": Part(partial(expanded, name="qwen3-8b"), 30),
}
