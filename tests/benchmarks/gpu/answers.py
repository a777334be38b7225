"""Parts that measure answers: methods on the embedded pair and on expanded ones, batches, overlap, generate.

Expected ranges are for an H100 or H200.
"""

from __future__ import annotations

import pkgutil
import time
import warnings
from contextlib import closing
from typing import Any

import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine, exhaust
from specbench.decoding.model.graphs import GraphRunner
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.decoding.trace import Clock, Generation
from specbench.measure.arms import hf_generate_arm
from specbench.measure.certify import certify
from specbench.measure.machine import hardware
from specbench.measure.numeric_noise import next_logits, shape_noise
from specbench.models.pairs import Pair
from specbench.system.errors import UserError, one_line
from tests.benchmarks.gpu.figures import COMPILING, GB, MS, Check, Figure
from tests.benchmarks.gpu.settings import Loaded, method_settings, names, read

# They look at confidences, exits or branches: LOOKS of tests/test_conformance.py. Torch counts those of all threads.
LOOK_OFTEN = (
    *("kangaroo", "kangaroo_tree", "s2d", "swift"),
    *("sps_ss", "mirror_sd", "mirror_hybrid", "mirror_ss", "ssd"),
)
# Where there is no time for every method.
SOME = ("sps", "pld", "recycling", "medusa", "kangaroo")


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

            certificate = certify(own.tokens, answer.tokens, self.pair.stop_ids, margin_at, self.noise)
            counts[str(certificate.verdict)] += 1
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
    check.go_on(", ".join(chosen))
    pair, label = loaded.pair, f"{loaded.pair.name} {str(loaded.pair.dtype).removeprefix('torch.')}"
    judge = Judge(check, pair, check.prompts(pair, prompts))
    rounds = sum(len(answer.steps) for answer in judge.answers)
    check.say(Figure(f"{label}: autoregressive", MS * judge.seconds / rounds, "ms a token"))
    for place, name in enumerate(chosen):
        check.go_on(", ".join(chosen[place:]))
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
    loaded = Loaded(check.settings("tiny", dtype=dtype))
    methods(check, loaded, check.chosen(some), 1 if check.small else 3)


def expanded(check: Check, name: str, every: bool = False) -> None:
    """Methods on the embedded family's function at the dimensions of real models, in their dtype."""
    begun = time.perf_counter()
    loaded = Loaded(check.settings(name, init="expanded"))
    check.say(Figure(f"{name}: building", time.perf_counter() - begun, "s", 0, 30))
    some = SOME[:1] if check.small else alone() if every or check.methods is not None else SOME
    methods(check, loaded, check.chosen(some), 1 if check.small else 2)


def oracle(check: Check) -> None:
    """Speculative sampling at chosen acceptances: its passes take their time, whatever the models say."""
    loaded = Loaded(check.settings("llama-3.1-8b", init="expanded"))
    pair = loaded.pair
    judge = Judge(check, pair, check.prompts(pair, 1 if check.small else 4))
    for acceptance in (0.8,) if check.small else (0.6, 0.8, 0.9):
        check.go_on(f"sps at {acceptance}")
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
            check.go_on(f"{label}, {b} sequences")
            engine = Engine(target, drafter, pair.stop_ids, Scheduler(b), pair.context_length)
            requests = [Request(prompts[i % len(prompts)], decoding) for i in range(b)]
            warm = decoding if isinstance(target.runner, GraphRunner) else SamplingParams(4)
            engine.generate([Request(r.prompt, warm) for r in requests])
            hardware.reset_peak_memory(check.device)
            answers = engine.generate(requests)
            peak = (hardware.peak_memory(check.device) or 0) / GB
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
        label = name if placement is None else f"{name}, {placement}"
        check.go_on(label)
        with closing(loaded.drafter(name, **changes)) as drafter:
            engine = Engine(judge.target, drafter, pair.stop_ids, context_length=pair.context_length)
            told(check, label, judge, engine)
            steps = engine.answer(judge.prompts[0], judge.decoding).steps
            for key in (
                "exit_seconds",
                "overlapped_behind_exit_seconds",
                "exposed_seconds",
                "idle_seconds",
                "ipc_seconds",
            ):
                values = [step.stats[key] for step in steps if key in step.stats]
                if values:
                    check.say(Figure(f"{label}: {key}", MS * sum(values) / len(values), "ms a round"))


def generate(check: Check) -> None:
    """Transformers' own generate, as it comes and with a static cache and a compiled step, beside our loop."""
    loaded = Loaded(check.settings("llama-3.1-8b", init="expanded"))
    pair = loaded.pair
    judge = Judge(check, pair, check.prompts(pair, 1 if check.small else 2))
    rounds = sum(len(answer.steps) for answer in judge.answers)
    check.say(Figure("our loop", MS * judge.seconds / rounds, "ms a token", 3.5, 10))
    requests = [Request(prompt, judge.decoding) for prompt in judge.prompts]
    try:
        import greenlet  # noqa: F401 - an arm of generate runs in one
    except ModuleNotFoundError:
        print("generate is not timed: that needs greenlet (`make gpu-bundle` fetches it)", flush=True)
        return
    for label, options in (("generate", {}), ("generate, static cache", {"cache_implementation": "static"})):
        if check.small and options:
            continue  # it compiles for minutes
        check.go_on(label, COMPILING if options else 0)
        arm = hf_generate_arm(pair, pass_bytes=judge.target.pass_bytes(), **options)
        begun = time.perf_counter()
        exhaust(arm(requests[:1]))
        check.say(Figure(f"{label}: first answer", time.perf_counter() - begun, "s"))
        answers = exhaust(arm(requests))
        tokens = sum(len(answer.tokens) - 1 for answer in answers)
        note = str(judge.verdicts(answers))
        check.say(Figure(label, MS * decode_seconds(answers) / tokens, "ms a token", 4, 30, note))
