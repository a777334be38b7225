"""llama.cpp: how its parameters are set, and, where it is installed, real runs with a control that is a violation."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.commands.engine import content_of
from specbench.engines import llama_cpp
from specbench.engines.environments import interpreter
from specbench.engines.llama_cpp import SCRIPT, LlamaCpp
from specbench.engines.served import PLAIN, SPECULATIVE
from specbench.engines.standalone.parameters import set_all
from specbench.models.pairs import load_pair
from specbench.report.runs import read_run
from specbench.system.errors import UserError
from tests.support.commands import cli
from tests.support.conf import composed


def is_installed(name: str) -> bool:
    try:
        interpreter(name, content_of(name))
    except UserError:
        return False
    return True


class Kind(enum.IntEnum):
    COMMON_SPECULATIVE_TYPE_NONE = 0
    COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE = 1
    COMMON_SPECULATIVE_TYPE_NGRAM_MOD = 2


class TestParameters:
    @pytest.fixture
    def values(self):
        draft = SimpleNamespace(n_max=16, mparams=SimpleNamespace(path=""))
        kinds = [Kind.COMMON_SPECULATIVE_TYPE_NONE]
        return SimpleNamespace(n_ctx=0, kind=kinds[0], speculative=SimpleNamespace(types=kinds, draft=draft))

    def test_names_lead_into_what_they_hold_and_members_are_found_by_their_end(self, values):
        drafts = {
            "types": ["draft_simple", "ngram-mod"],
            "draft": {"n_max": 4, "mparams": {"path": "a.gguf"}},
        }
        set_all(values, {"n_ctx": 512, "kind": "ngram_mod", "speculative": drafts})
        assert values.n_ctx == 512 and values.kind is Kind.COMMON_SPECULATIVE_TYPE_NGRAM_MOD
        assert values.speculative.types == [Kind(1), Kind(2)]
        assert values.speculative.draft.n_max == 4 and values.speculative.draft.mparams.path == "a.gguf"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"n_ctxt": 1}, "no parameter 'n_ctxt'"),
            ({"speculative": {"draft": {"max": 3}}}, "no parameter 'max'"),
            ({"kind": "eagle9"}, "no member 'eagle9'"),
        ],
    )
    def test_unknown_names_are_refused(self, values, wrong, message):
        with pytest.raises(SystemExit, match=message):
            set_all(values, wrong)


@pytest.mark.slow
def test_servers_get_the_pairs_models_and_the_same_cores(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    pair = load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, 0, with_draft=True)
    monkeypatch.setattr(llama_cpp, "program", lambda *_: (Path("python3"), "xllamacpp==1"))
    options = {"plain": {"n_ubatch": 64}, "install": {"requirements": ["x==1"]}}
    engine = LlamaCpp(pair, {"name": "sps"}, 1, speculative={"sps": {"types": ["draft_simple"]}}, **options)
    plain, speculative = (engine.servers[name] for name in (PLAIN, SPECULATIVE))
    assert plain.cores == speculative.cores and len(plain.cores) == 1
    of_plain, of_speculative = (one.command(8000) for one in (plain, speculative))
    assert of_plain[:3] == ["python3", str(SCRIPT), "8000"]
    assert "tiny-target-F32.gguf" in of_plain[3] and '"n_ubatch": 64' in of_plain[3]
    assert "draft" not in of_plain[3] and "tiny-draft-F32.gguf" in of_speculative[3]
    assert engine.same_weights
    (tmp_path / "q4.gguf").write_bytes(b"")
    quantised = LlamaCpp(
        pair, {"name": "sps"}, 1, speculative={"sps": {}}, target=str(tmp_path / "q4.gguf"), **options
    )
    assert not quantised.same_weights and "q4.gguf" in quantised.servers[PLAIN].command(1)[3]
    with pytest.raises(UserError, match="no file"):
        LlamaCpp(pair, {"name": "sps"}, 1, speculative={"sps": {}}, target="/none.gguf", **options)


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.skipif(not is_installed("llama_cpp"), reason="`specbench engine install llama_cpp` was not run")
class TestForReal:
    RUN = (
        "pair=tiny",
        "engine=llama_cpp",
        "threads=1",
        "data.limit=1",
        "decoding.max_new_tokens=32",
        "remeasure=0",
    )

    def summary_of(self, tmp_path: Path, *words: str, code: int = 0) -> dict:
        done = cli(tmp_path, *self.RUN, *words)
        assert done.returncode == code, done.stderr
        return read_run(Path(tmp_path, done.stdout.splitlines()[-1])).summary

    @pytest.mark.parametrize("method", ["sps", "pld"])
    def test_answers_are_exact(self, tmp_path, method):
        summary = self.summary_of(tmp_path, f"method={method}")
        for counts in (summary["equivalence"], summary["baseline"]["equivalence"]):
            assert counts["exact"] + counts["tie"] == counts["answers"] == 7
        assert summary["engine"]["again_equivalence"]["exact"] == 7
        assert summary["overall"]["acceptance_length"] > (2 if method == "sps" else 1)

    def test_synthetic_acceptance_is_a_violation(self, tmp_path):
        summary = self.summary_of(tmp_path, "method=sps", "+engine.speculative.sps.synth_len=3.0", code=1)
        assert summary["equivalence"]["violation"] >= 5

    def test_drawn_answers_are_likely(self, tmp_path):
        summary = self.summary_of(tmp_path, "method=sps", "decoding=sample", "decoding.max_new_tokens=48")
        likely = summary["likelihood"]
        assert all(abs(one["standard_errors"]) < 4 for one in likely.values())
