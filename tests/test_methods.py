"""Every method of conf/method/ runs on the embedded pair and gives the target's own answers: no method is left out."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specbench.bench import CONF
from specbench.measure import provenance, runner, store

METHODS = sorted(path.stem for path in (CONF / "method").glob("[!_]*.yaml"))
PAIRS = ["tiny", "tiny_shallow"]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_method_on_the_embedded_family(method, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "bandwidth", lambda device: 1e9)
    settings = [f"method={method}", f"pair={pair}", "pair.device=cpu", f"runs_root={tmp_path}"]
    limits = ["data.limit=1", "decoding.max_new_tokens=16"]
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose("bench", overrides=settings + limits)
    OmegaConf.resolve(cfg)
    run_dir = store.find_or_create(cfg)
    assert runner.run(run_dir) == 0
    summary = store.read_json(run_dir / store.SUMMARY)
    assert set(summary["tasks"]) == set(cfg.task.tasks)
    for block in (summary["equivalence"], summary["baseline"]["equivalence"]):
        assert block["answers"] == 7 and block["violation"] == 0
    if method != "ar":
        assert summary["overall"]["acceptance_length"] > 1
