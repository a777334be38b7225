"""Measures one job: `python -m specbench.measure.runner RUN_DIR`, where RUN_DIR holds `config.yaml`.

Per question the arms run one after the other on the same prompt, in an order that rotates from question to question, so
that a machine that drifts slows all of them alike. Every finished question is journalled at once; the summary is
written last.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from transformers import GenerationConfig

from specbench.decoding.draft import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import Decoding
from specbench.decoding.target import Target
from specbench.decoding.trace import Clock, Generation, Step
from specbench.errors import UserError, one_line_errors
from specbench.measure import provenance, store
from specbench.measure.equivalence import VERDICTS, Certificate, certify
from specbench.measure.rounding import margin, shape_noise
from specbench.pairs import Pair, load_pair
from specbench.questions import Question, find_questions_file, load_questions, warmup_questions

WARM_UP_TOKENS = 64  # of each arm on each warm-up question; the rounding noise is measured on as many
BASELINE, METHOD, HF = "baseline", "method", "hf_generate"
Arm = Callable[[list[int], Decoding, int], Generation]


def hf_generate_arm(pair: Pair, **options) -> Arm:
    """transformers' own generate on the same target: the reference that our baseline must not be slower than.

    options: more arguments for `generate`, such as `assistant_model`.
    """
    clock = Clock(pair.device)

    @torch.inference_mode()
    def generate(prompt: list[int], decoding: Decoding, seed: int) -> Generation:
        sampling = {} if decoding.greedy else {"temperature": decoding.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=not decoding.greedy,
            eos_token_id=sorted(pair.stop_ids) or None,
            pad_token_id=min(pair.stop_ids, default=0),
            **sampling,
        )
        torch.manual_seed(seed)
        clock.synchronize()
        start = clock.mark()
        ids = torch.tensor([prompt], device=pair.device)
        output = pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, **options
        )
        tokens = output[0, len(prompt) :].tolist()
        end = clock.mark()
        clock.synchronize()
        finish = "stop" if tokens[-1] in pair.stop_ids else "length"
        return Generation(tokens, None, clock.seconds(start, end), finish)

    return generate


@dataclass(slots=True)
class Bench:
    """Everything one job needs: the loaded pair, the arms by name, and how they decode."""

    pair: Pair
    target: Target
    arms: dict[str, Arm]
    decoding: Decoding
    repeats: int
    protocol: str
    seed: int
    noise: float = 0.0

    def prompt(self, question: Question, answers: list[str]) -> list[int]:
        """Token ids of the conversation up to the turn that follows `answers`."""
        messages = []
        for turn, answer in zip(question.turns, answers):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question.turns[len(answers)]})
        return self.pair.prompt_ids(messages)

    def capped(self, prompt: list[int]) -> Decoding:
        """The decoding with a cap that the context still holds, the same for every arm."""
        room = self.pair.context_length - len(prompt)
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the context only {self.pair.context_length}"
            )
        return Decoding(min(self.decoding.max_new_tokens, room), self.decoding.temperature)

    def measure(self, question: Question, place: int) -> dict:
        """One journal record; `place` chooses the order of the arms."""
        said: dict[str, list[str]] = {name: [] for name in self.arms}
        turns = []
        for turn in range(len(question.turns)):
            prompts = {
                name: self.prompt(question, said[name if self.protocol == "spec_bench" else BASELINE])
                for name in self.arms
            }
            record = self._turn(question, turn, prompts, place)
            for name in self.arms:
                said[name].append(self.pair.decode(record["arms"][name][0]["tokens"]))
            record["text"] = {name: said[name][-1] for name in (BASELINE, METHOD)}
            turns.append(record)
        return {
            "question_id": question.question_id,
            "task": question.task,
            "category": question.category,
            "error": None,
            "turns": turns,
        }

    def _turn(self, question: Question, turn: int, prompts: dict[str, list[int]], place: int) -> dict:
        orders = list(permutations(self.arms))
        answers: dict[str, list[Generation]] = {name: [] for name in self.arms}
        for repeat in range(self.repeats):
            seed = answer_seed(self.seed, question.question_id, turn, repeat)
            for name in orders[(place + repeat) % len(orders)]:
                answers[name].append(self.arms[name](prompts[name], self.capped(prompts[name]), seed))
        prompt = prompts[BASELINE]
        return {
            "turn": turn,
            "prompt_tokens": len(prompt),
            "prompt_sha256": hashlib.sha256(repr(prompt).encode()).hexdigest(),
            "arms": {name: [_journal(g) for g in generations] for name, generations in answers.items()},
            "equivalence": asdict(self._certify(prompts, answers, METHOD)),
            "baseline_equivalence": asdict(self._certify(prompts, answers, HF)) if HF in answers else None,
        }

    def _certify(
        self, prompts: dict[str, list[int]], answers: dict[str, list[Generation]], arm: str
    ) -> Certificate:
        """The worst certificate of an arm's repeats against the baseline's first answer."""
        if not self.decoding.greedy or prompts[arm] != prompts[BASELINE]:
            return Certificate(None, None, None, None)
        prompt, reference = prompts[BASELINE], answers[BASELINE][0].tokens

        def margin_at(index: int, preferred: int, other: int) -> float:
            return margin(self.target, prompt, reference, index, preferred, other)

        others = answers[arm] + answers[BASELINE][1:]
        certificates = [
            certify(reference, a.tokens, self.pair.stop_ids, margin_at, self.noise) for a in others
        ]
        return max(certificates, key=lambda c: VERDICTS.index(c.verdict))

    def warm_up(self, questions: list[Question]) -> None:
        """Runs every arm on each warm-up question, and measures the rounding noise on the baseline's answers."""
        samples = []
        for question in questions:
            prompt = self.prompt(question, [])
            cap = min(self.capped(prompt).max_new_tokens, WARM_UP_TOKENS)
            decoding = Decoding(cap, self.decoding.temperature)
            for name, arm in self.arms.items():
                answer = arm(prompt, decoding, self.seed)
                if name == BASELINE:
                    samples.append((prompt, answer.tokens))
        self.noise = shape_noise(self.target, samples)


def answer_seed(*parts: int) -> int:
    """A seed for one answer that any of its parts changes; the same on every machine."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _journal(generation: Generation) -> dict:
    """A generation as the journal holds it: steps by column."""
    columns = {name: [getattr(step, name) for step in generation.steps] for name in Step.__dataclass_fields__}
    return {
        "tokens": generation.tokens,
        "prefill_seconds": generation.prefill_seconds,
        "seconds": generation.seconds,
        "finish": generation.finish,
        "steps": columns,
    }


def prepare(cfg: DictConfig) -> Bench:
    """Loads the pair and builds the arms."""
    method = hydra.utils.get_class(cfg.method._target_)
    needs = method.needs
    pair_cfg = OmegaConf.merge(cfg.pair, {"draft": needs.draft_of(cfg.pair)}) if needs.part else cfg.pair
    pair = load_pair(pair_cfg, cfg.seed, with_draft=needs.draft_model)
    target = Target(pair.target)
    target.check()
    settings = {key: value for key, value in cfg.method.items() if key not in ("name", "_target_")}
    # Not hydra's instantiate, which would wrap what the method says is wrong.
    drafter = method(pair=pair, **settings)
    arms: dict[str, Arm] = {
        BASELINE: Engine(target, Drafter(), pair.stop_ids, pair.context_length).generate,
        METHOD: Engine(target, drafter, pair.stop_ids, pair.context_length).generate,
        HF: hf_generate_arm(pair),
    }
    decoding = Decoding(cfg.decoding.max_new_tokens, cfg.decoding.temperature)
    return Bench(pair, target, arms, decoding, cfg.repeats, cfg.protocol, cfg.seed)


def attempt(bench: Bench, question: Question, place: int) -> dict:
    """Measures a question; whatever goes wrong with it is recorded, and leaves the other questions alone."""
    try:
        return bench.measure(question, place)
    except Exception as error:  # noqa: BLE001 - recorded, reported, and the exit code tells
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        tqdm.write(f"question {question.question_id} failed: {reason}", file=sys.stderr)
        return {
            "question_id": question.question_id,
            "task": question.task,
            "category": question.category,
            "error": reason,
            "turns": [],
        }


def run(run_dir: Path) -> int:
    """Measures what the folder still lacks and writes its summary; returns 1 if a question failed, else 0."""
    cfg = OmegaConf.create(store.read_config(run_dir))
    questions = load_questions(cfg.data, cfg.task)
    with store.open_journal(run_dir) as journal:
        done = {record["question_id"] for record in journal.records}
        places = [(place, q) for place, q in enumerate(questions) if q.question_id not in done]
        if places:
            bench = prepare(cfg)
            source = find_questions_file(cfg.data)
            provenance.record(run_dir, provenance.collect(OmegaConf.to_container(cfg), source))
            bench.warm_up(warmup_questions(cfg.data))
            store.write_json(run_dir / store.FACTS, facts(bench))
            gc.collect()
            gc.freeze()  # what is loaded by now stays: the collector need not walk it between two questions
            for place, question in tqdm(places, desc=cfg.method.name, unit="question", initial=len(done)):
                journal.append(attempt(bench, question, place))
        summary = store.finalise(run_dir)
    return 1 if summary["status"] != "complete" else 0


def facts(bench: Bench) -> dict:
    """What the summary needs to know of the run beside its records."""
    pair = bench.pair
    return {
        "target_pass_bytes": bench.target.pass_bytes(),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "device": str(pair.device),
        "bandwidth_bytes_per_second": provenance.bandwidth(pair.device),
        "noise": bench.noise,
        "weights": pair.init,
    }


@one_line_errors()
def main() -> int:
    """The command line: one argument, the run folder."""
    if len(sys.argv) != 2:
        raise UserError("usage: python -m specbench.measure.runner RUN_DIR")
    return run(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
