"""Runs as commands make them, and what no paper tried. (Every method by itself: `test_conformance.py`.)"""

from __future__ import annotations

from contextlib import closing

import pytest
from omegaconf import OmegaConf

from specbench.data.questions import warmup_questions
from specbench.measure import certify, runner, warm_up
from specbench.measure.machine import bandwidth
from specbench.measure.records import run_folder as store
from specbench.measure.runner import prepare
from specbench.system.files import read_json
from tests.support.conf import composed, drafts, inline

pytestmark = pytest.mark.slow

# What a run has of its own: a process beside the target's, a scheduler.
RUNS = ("mirror_sd", "exspec")
WITH_PROCESS = "mirror_sd"
TASKS = ("mt_bench", "summarization")  # two turns, a long prompt
# What no paper tried: trimmed heads in batches, on the deep target.
COMBINATIONS = [
    ("exspec", "kangaroo", "trim"),
    ("ragged", "s2d", "trim"),
    ("ragged", "sps", "trim"),
    ("ragged", "medusa", "trim"),
    ("ragged", "hydra_heads", "trim"),
    ("eqspec", "eagle", "trim"),
    ("ragged", "eagle3", "full"),
    ("exspec", "eagle2", "trim"),
    ("ragged", "sps_tree", "trim"),
    ("ragged", "kangaroo_tree", "trim"),
]


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.process] * (m == WITH_PROCESS)) for m in RUNS],
)
def test_a_run(method, tmp_path, monkeypatch):
    """A method without drafts is certified against transformers' generate, as the others need not be once more."""
    placed = [] if method == WITH_PROCESS else inline(method)
    check(monkeypatch, tmp_path, f"method={method}", "pair=tiny", *placed, accepts=drafts(method))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("method", "drafter", "vocab"), COMBINATIONS)
def test_drafters_in_batches(method, drafter, vocab):
    settings = [f"method={method}", f"drafter={drafter}", f"vocab={vocab}", "batch_size=3"]
    check_answers(*settings, "pair=tiny", accepts=True)


def check_answers(*settings: str, accepts: bool) -> None:
    """Some answers, without a run around them, are the target's; and drafts are worth something, if there are any."""
    cfg = composed("bench", *settings, "pair.device=cpu", "generate=false")
    OmegaConf.resolve(cfg)
    bench = prepare(cfg)
    questions = [question for question in warmup_questions(cfg.data) if question.task in TASKS][:4]
    bench.protocol.warmup = questions
    requests = bench.protocol.warm_up_requests(24)
    bench.setup.set_reference_answers(requests)
    with closing(bench.setup.drafter):
        right, given = (bench.setup.answers(arm, requests) for arm in ("baseline", "method"))
    assert [answer.tokens for answer in given] == [answer.tokens for answer in right]
    assert (sum(sum(step.accepted for step in answer.steps) for answer in given) > 0) == accepts


def check(monkeypatch, tmp_path, *settings: str, accepts: bool) -> None:
    """A short run of some tasks: every answer is the target's, and the drafts are worth something, if there are any."""
    monkeypatch.setattr(bandwidth, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(warm_up, "TOKENS", 8)
    monkeypatch.setattr(certify, "NOISE_TOKENS", 8)
    monkeypatch.setattr(runner, "warmup_questions", lambda *of: warmup_questions(*of)[:1])
    limits = ["pair.device=cpu", f"runs_root={tmp_path}", "data.limit=1", "repeats=1", "remeasure=0"]
    limits += ["decoding.max_new_tokens=12", f"generate={not accepts}"]
    cfg = composed("bench", *settings, *limits)
    cfg.task.tasks = {name: cfg.task.tasks[name] for name in TASKS}
    OmegaConf.resolve(cfg)
    run_dir = store.find_or_create(cfg)
    assert runner.run(run_dir) == 0
    summary = read_json(run_dir / store.SUMMARY)
    assert set(summary["tasks"]) == set(TASKS)
    for block in [summary["equivalence"]] + [summary["baseline"]["equivalence"]] * cfg.generate:
        assert block["answers"] == len(TASKS) + 1 and block["violation"] == 0
    assert (summary["overall"]["acceptance_length"] > 1) == accepts
