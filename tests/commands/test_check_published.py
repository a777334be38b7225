"""Published acceptance measured again: every check composes, and a stand-in is run, met, missed and refused."""

from __future__ import annotations

import pytest
import yaml

from specbench.commands import check_published
from specbench.commands.check_published import Check, check_table, checks, compared, main, overview
from specbench.config import checks as config_checks
from tests.support import commands
from tests.support.conf import composed
from tests.support.messages import shown

OVERALL = {"acceptance_length": 2.2, "acceptance_by_position": [0.65, 0.39]}


@pytest.mark.first_fast
@pytest.mark.parametrize("name", checks())
def test_every_check_is_a_run(monkeypatch, name):
    """Of MT-bench alone, with the drafter's checkpoint named, greedy or at a temperature."""
    monkeypatch.setattr(
        config_checks, "load_questions", lambda data, task: []
    )  # there need be no file of them
    check = checks()[name]
    cfg = composed("bench", *check.overrides)
    spec = config_checks.check(cfg)
    assert spec.needs.part in cfg.pair.parts and "/" in cfg.pair.parts[spec.needs.part]
    assert cfg.task.name == "mt_bench" and cfg.data.limit is None and not cfg.generate
    assert (cfg.data.turns == 1) == (cfg.decoding.temperature == 0)
    length = cfg.method.max_draft_tokens
    assert check.by_place is None or len(check.by_place) == length
    assert check.source and 0 < check.tolerance < 0.2


def test_the_regression_of_vllm_is_a_chain_of_three_that_thinks():
    cfg = composed("bench", *checks()["qwen3-8b-eagle3"].overrides)
    assert (cfg.method.nodes, cfg.method.width, cfg.method.max_draft_tokens) == (3, 1, 3)
    assert cfg.decoding.max_new_tokens == 256 and cfg.pair.template_kwargs.enable_thinking is True


def test_a_figure_is_met_within_its_tolerance():
    check = Check((), 2.26, (0.66, 0.45, 0.2), 0.05, "somewhere")
    rows = compared(check, OVERALL)
    assert [within for *_, within in rows] == [True, True, False, None]
    text = shown(check_table("one", check, rows), 100)
    assert "2.260" in text and "0.97" in text and "not measured" in text and "somewhere" in text
    assert compared(check, OVERALL | {"acceptance_by_position": None})[1][2:] == (None, None)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Checks of a small random pair, whose figures a run of it meets or misses."""
    place = commands.small_pair_and_questions(tmp_path)
    more = [*place, "method=sps", "method.max_draft_tokens=3", "task=all", "data.limit=2", "data.turns=null"]
    more += ["decoding.max_new_tokens=20", "data.sha256=null"]
    check = {"run": more, "by_place": None, "tolerance": 0.05, "source": "here"}
    names = {"met": 1.0, "missed": 3.9}
    file = tmp_path / "checks.yaml"
    file.write_text(yaml.safe_dump({n: check | {"acceptance_length": length} for n, length in names.items()}))
    monkeypatch.chdir(tmp_path)
    commands.measure_here(monkeypatch)
    monkeypatch.setattr(check_published, "checks", lambda: checks(file))
    return file


@pytest.mark.slow
def test_a_check_is_run_and_judged(stand_in, monkeypatch, capfd):
    measured = {}
    for name in ("met", "missed"):
        monkeypatch.setattr("sys.argv", ["specbench check-published", name])
        code = main()
        out, err = capfd.readouterr()
        assert code < 2, err
        *_, row = (line.split() for line in out.splitlines() if line.startswith("acceptance length"))
        published, ours = map(float, row[2:4])
        measured[name] = (ours, code)
        assert code == int(abs(ours - published) > 0.05 * published)
        assert row[5:] == (["yes"] if code == 0 else ["no"])
    (ours, _), (again, code) = measured["met"], measured["missed"]
    assert ours == again and code == 1


def test_what_there_is_and_what_there_is_not(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["specbench check-published"])
    assert main() == 0 and "llama-3.1-8b-eagle3" in capfd.readouterr().out
    heading, *rows, _, how = overview(checks()).splitlines()
    assert heading.split() == ["name", "published", "acceptance", "length", "source"] and how.endswith(
        " ...]"
    )
    lengths = {row.split()[0]: row.split()[1] for row in rows}
    assert lengths.keys() == checks().keys() and lengths["llama-3.1-8b-eagle3"] == "2.60"
    monkeypatch.setattr("sys.argv", ["specbench check-published", "qwen3-8b-eagel3"])
    with pytest.raises(SystemExit):
        main()
    assert "qwen3-8b-eagle3" in capfd.readouterr().err
