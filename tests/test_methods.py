"""Every method of conf/method/ runs on the embedded pair and gives the target's own answers: no method is left out."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from specbench.compose import CONF
from specbench.measure import pairing, provenance, runner, store
from specbench.questions import warmup_questions
from tests.support.conf import composed

pytestmark = pytest.mark.slow

METHODS = sorted(path.stem for path in (CONF / "method").glob("[!_]*.yaml"))
# The second pair for those to which it brings other weights.
ON_PAIRS = [(m, "tiny") for m in METHODS] + [
    (m, "tiny_shallow")
    for m in (
        *("ar", "kangaroo", "kangaroo_tree", "medusa", "hydra_heads", "eagle", "eagle2", "eagle3"),
        *("s2d", "sps", "sps_tree"),
    )
]
# Without a draft: certified against transformers' generate, as the others need not be once more.
PLAIN = ("ar", "ar_batch")
# Those that draft beside the target as `mirror_sd` does, for which one process less is started.
BESIDE = ("mirror_ss", "ssd")
TASKS = ("mt_bench", "summarization", "math_reasoning")  # two turns, a long prompt, a long answer
# What no paper tried: every drafter in a batch method at least once, and a trimmed head.
COMBINATIONS = [
    ("ragged", "kangaroo", "full"),
    ("exspec", "kangaroo", "trim"),
    ("eqspec", "pld", "full"),
    ("exspec", "pld", "full"),
    ("ragged", "s2d", "trim"),
    ("eqspec", "s2d", "full"),
    ("ragged", "sps", "trim"),
    ("ragged", "oracle", "full"),
    ("ragged", "medusa", "trim"),
    ("exspec", "medusa", "full"),
    ("ragged", "hydra_heads", "trim"),
    ("eqspec", "hydra_heads", "full"),
    ("ragged", "eagle", "trim"),
    ("eqspec", "eagle", "full"),
    ("ragged", "eagle2", "full"),
    ("exspec", "eagle2", "trim"),
    ("ragged", "eagle3", "full"),
    ("ragged", "recycling", "full"),
    ("eqspec", "recycling", "full"),
    ("ragged", "lookahead", "full"),
    ("exspec", "lookahead", "full"),
    ("ragged", "samd", "full"),
    ("exspec", "suffix", "full"),
    ("ragged", "rest", "full"),
    ("ragged", "sps_tree", "trim"),
    ("exspec", "sps_tree", "full"),
    ("ragged", "kangaroo_tree", "trim"),
    ("eqspec", "kangaroo_tree", "full"),
]


@pytest.mark.parametrize(
    ("method", "pair"),
    [pytest.param(*both, marks=[pytest.mark.process] * (both[0] == "mirror_sd")) for both in ON_PAIRS],
)
def test_method_on_the_embedded_family(method, pair, tmp_path, monkeypatch):
    settings = [f"method={method}", f"pair={pair}"] + ["method.placement=inline"] * (method in BESIDE)
    check(monkeypatch, tmp_path, *settings, accepts=method not in PLAIN)


@pytest.mark.parametrize(("method", "drafter", "vocab"), COMBINATIONS)
def test_drafters_in_batches(method, drafter, vocab, tmp_path, monkeypatch):
    settings = [f"method={method}", f"drafter={drafter}", f"vocab={vocab}", "batch_size=3"]
    check(monkeypatch, tmp_path, *settings, accepts=True)


def check(monkeypatch, tmp_path, *settings: str, accepts: bool) -> None:
    """A short run of some tasks: every answer is the target's, and the drafts are worth something, if there are any."""
    monkeypatch.setattr(provenance, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(pairing, "WARM_UP_TOKENS", 8)
    monkeypatch.setattr(pairing, "NOISE_TOKENS", 8)
    monkeypatch.setattr(runner, "warmup_questions", lambda data: warmup_questions(data)[:1])
    limits = ["pair.device=cpu", f"runs_root={tmp_path}", "data.limit=1", "repeats=1"]
    limits += ["decoding.max_new_tokens=8", f"generate={not accepts}"]
    cfg = composed("bench", *settings, *limits)
    cfg.task.tasks = {name: cfg.task.tasks[name] for name in TASKS}
    OmegaConf.resolve(cfg)
    run_dir = store.find_or_create(cfg)
    assert runner.run(run_dir) == 0
    summary = store.read_json(run_dir / store.SUMMARY)
    assert set(summary["tasks"]) == set(TASKS)
    for block in [summary["equivalence"]] + [summary["baseline"]["equivalence"]] * cfg.generate:
        assert block["answers"] == len(TASKS) + 1 and block["violation"] == 0
    assert (summary["overall"]["acceptance_length"] > 1) == accepts
