"""Published and tuned settings: a method's YAML is its published setting, and a run says which of the two it had."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from specbench import CONF
from specbench.config import checks
from specbench.config.combinations import check_method, located
from specbench.config.compose import compose_arguments
from specbench.config.resolvers import tuned_on
from specbench.config.spec import RunSpec
from specbench.config.tuned import settings_source
from specbench.measure.metrics.summary import summarise
from specbench.system.settings import parameters
from tests.support import conf
from tests.support.commands import run_main
from tests.support.synthetic import CONFIG, FACTS, answered

METHODS = sorted(path.stem for path in (CONF / "method").glob("[!_]*.yaml"))
TUNED = sorted((CONF / "tuned").glob("*/*.yaml"))


def composed(*overrides: str):
    return conf.composed("bench", *overrides)


def variant(method: str) -> set[str]:
    """The settings that make a method of another one, on whose YAML its own builds; none of any other."""
    own = yaml.safe_load((CONF / "method" / f"{method}.yaml").read_text(encoding="utf-8"))
    builds_on = {base for base in own.get("defaults", []) if isinstance(base, str)} - {"_self_"}
    return set(parameters(own)) - {"defaults"} if builds_on else set()


def unlike_the_class(group, cls: type, own: set[str]) -> list[str]:
    """The parameters of an unresolved configuration whose value is not the default of the class.

    One without a default may only hold what the pair brings.
    """
    takes = inspect.signature(cls).parameters
    return [
        key
        for key, value in parameters(group).items()
        if key not in own
        and not (
            isinstance(value, str)
            and value.startswith("${")
            and takes[key].default in (None, takes[key].empty)
        )
        and value != takes[key].default
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_defaults_of_its_class(method):
    group = OmegaConf.to_container(conf.file_of("method", method))
    cls = located(OmegaConf.create(group), "method", object)
    assert unlike_the_class(group, cls, variant(method)) == []
    for key, value in parameters(group).items():  # each fault is found
        if not (isinstance(value, str) and value.startswith("${")) and key not in variant(method):
            assert unlike_the_class(group | {key: "another"}, cls, set()) != []


def test_variants_are_what_their_names_say():
    assert {method: variant(method) for method in METHODS if variant(method)} == {
        "mirror_hybrid": {"candidates"},
        "mirror_ss": {"weights"},
        "s2d_exit1": {"only"},
        "s2d_exit2": {"only"},
        "s2d_exit3": {"only"},
        "samd_eagle2": {"auxiliary", "drafter"},
        "ssd": {"candidates", "kappa"},
    }


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("path", TUNED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_tuned_file(path):
    text = path.read_text(encoding="utf-8")
    values, method, pair = yaml.safe_load(text), path.stem, path.parent.name
    assert (CONF / "pair" / f"{pair}.yaml").is_file() and method in METHODS
    assert text.startswith("# ") and (
        f"make tune METHOD={method} PAIR={pair}" in text or "As for `tiny`" in text
    )
    vocab = values.pop("vocab", "full")
    run = composed(f"method={method}", f"pair={pair}")
    assert run.vocab.name == vocab
    tuned = parameters(run.method)
    published = composed(f"method={method}", f"pair={pair}", "settings=published", f"vocab={vocab}").method
    changed = {key for key in tuned if str(tuned[key]) != str(published[key])}
    assert changed == set(values), "each value differs from the published one"
    assert set(tuned) == set(parameters(published))


@pytest.mark.one_in(4)
@pytest.mark.first_fast
@pytest.mark.parametrize("method", METHODS)
def test_both_settings_of_every_method_can_run(method):
    for settings in ("published", "tuned"):
        cfg = composed(f"method={method}", "pair=tiny", f"settings={settings}")
        checks.check(cfg)
        has_file = settings == "tuned" and tuned_on("tiny", method)
        source = cfg.settings_source
        assert source is None or source["source"] == ("tuned" if has_file else "published")
        assert (source or {}).get("pair") == (has_file or None)


@pytest.mark.one_in(7)
@pytest.mark.first_fast
@pytest.mark.parametrize("method", METHODS)
def test_a_pair_that_was_not_tuned_has_the_published_settings(method):
    named = re.findall(
        r"pair\.parts\.(\w+)", (CONF / "method" / f"{method}.yaml").read_text(encoding="utf-8")
    )
    part = RunSpec.of(composed(f"method={method}", "pair=tiny")).needs.part
    weights = [f"++pair.parts.{name}=someone/something" for name in {*named, part, "vocab_map"} - {None}]
    found = []
    for settings in ("published", "tuned"):
        cfg = composed(
            f"method={method}", "pair=vicuna-7b", "pair.init=random", f"settings={settings}", *weights
        )
        OmegaConf.resolve(cfg)
        spec = check_method(cfg)
        assert (settings_source(spec, "vicuna-7b") or {"source": "published"})["source"] == "published"
        found.append((cfg.method, cfg.drafter))
    assert found[0] == found[1]


@pytest.mark.slow
def test_what_the_papers_have():
    def of(method: str, *keys: str) -> tuple:
        group = composed(f"method={method}", "pair=vicuna-7b").method
        return tuple(group[key] for key in keys)

    for method in ("eagle2", "eagle3"):
        assert of(method, "nodes", "width", "max_draft_tokens") == (59, 10, 6)
    assert (
        of("eagle", "nodes") == (25,) and of("recycling", "nodes") == (80,) and of("rest", "nodes") == (64,)
    )
    assert of("lookahead", "window", "ngram", "guesses") == (15, 5, 15)
    assert of("kangaroo", "max_draft_tokens", "confidence_threshold") == (6, 0.6)
    assert of("kangaroo_tree", "width", "confidence_threshold") == (10, 0.4)
    assert of("mirror_sd", "max_draft_tokens", "kappa", "candidates", "branches", "floor") == (
        7,
        8,
        "exit",
        None,
        0.0,
    )


@pytest.mark.slow
def test_an_override_wins_over_what_was_tuned():
    assert composed("method=eagle2").method.nodes == 3
    assert composed("method=eagle2", "++method.nodes=7").method.nodes == 7
    assert composed("method=eagle2", "++method.nodes=7", "settings=published").method.width == 10
    batch = composed("method=ragged", "drafter=eagle2", "++drafter.width=3").drafter
    assert (batch.nodes, batch.width, batch.max_draft_tokens) == (3, 3, 3)
    assert composed("method=ragged", "drafter=eagle2", "settings=published").drafter.nodes == 59
    assert composed("experiment=mirror_exits").method.kappa == 8


def test_a_study_begins_with_the_published_settings():
    assert conf.composed("tune", "method=eagle2").method.nodes == 59
    assert conf.composed("tune", "method=eagle2", "settings=tuned").method.nodes == 3


def test_pairs_share_what_was_tuned_on_the_one_that_they_build_on():
    for pair in ("tiny_wide", "tiny_wide_draft", "tiny_shallow", "tiny_shallow_wide"):
        assert tuned_on(pair, "eagle2") == "tiny"
    assert tuned_on("tiny_shallow_wide", "mirror_hybrid") == "tiny_shallow"
    assert tuned_on("tiny_wide", "mirror_hybrid") == "tiny"
    assert tuned_on("vicuna-7b", "eagle2") is None and tuned_on("no_pair", "eagle2") is None


@pytest.mark.slow
def test_a_wrapped_drafter_has_its_tuned_settings():
    for settings, nodes in (("tuned", 16), ("published", 80)):
        cfg = composed("method=samd", "method.auxiliary=recycling", f"settings={settings}")
        assert cfg.method.drafter.nodes == nodes


@pytest.mark.first_fast
@pytest.mark.parametrize(
    ("overrides", "source", "published"),
    [
        (["method=eagle2", "method.nodes=16"], "changed", {"nodes": 59, "width": 10, "max_draft_tokens": 6}),
        (["method=recycling", "method.nodes=80"], "published", {}),
        (["method=recycling", "settings=published", "method.nodes=16"], "tuned", {"nodes": 80}),
        (["method=recycling", "settings=published", "method.memory=run"], "published", {}),
        (["method=sps", "vocab=trim"], "changed", {"vocab": "full"}),
        (["method=vocabtrim"], "published", {}),
        (["method=vocabtrim", "vocab.size=1024"], "changed", {"vocab": "trim", "vocab.size": 4096}),
        (["method=ragged", "drafter=medusa"], "tuned", {"drafter.nodes": None}),
        (["method=ragged", "drafter=sps"], "published", {}),
        (["method=exspec", "drafter=medusa", "method.window=8"], "changed", {"window": 32, "drafter.nodes": None}),
        (["method=exspec", "drafter=sps", "drafter.max_draft_tokens=3"], "changed", {"drafter.max_draft_tokens": 5}),
        (["method=samd_eagle2"], "published", {}),  # with another tree than eagle2's, tuned or not
        (["method=samd_eagle2", "method.drafter.nodes=59"], "changed", {"drafter.nodes": 62}),
        (["method=ragged", "drafter=samd_eagle2", "drafter.drafter.width=10"], "changed", {"drafter.drafter.width": 8}),
        (["method=samd", "method.auxiliary=recycling"], "changed",
         {"auxiliary": "none", "max_draft_tokens": 39, "drafter.nodes": 80}),
        (["method=samd", "method.auxiliary=recycling", "settings=published"], "changed", {"auxiliary": "none"}),
    ],
)  # fmt: skip
def test_the_source_follows_from_the_values(overrides, source, published):
    cfg = composed(*overrides)
    checks.check(cfg)
    assert (cfg.settings_source.source, cfg.settings_source.published) == (source, published)


MTP = ["method=mtp", "pair=smollm2-135m"]  # tuned: one token, a trimmed head


@pytest.mark.parametrize(
    ("overrides", "vocab", "source", "published"),
    [
        (MTP, "trim", "tuned", {"max_draft_tokens": 3, "vocab": "full"}),
        (["method=ragged", "drafter=mtp", MTP[1]], "trim", "tuned", {"drafter.max_draft_tokens": 3, "vocab": "full"}),
        ([*MTP, "method.max_draft_tokens=3"], "trim", "changed", {"vocab": "full"}),
        ([*MTP, "vocab.size=1024"], "trim", "changed", {"max_draft_tokens": 3, "vocab": "full"}),
        ([*MTP, "vocab=full"], "full", "changed", {"max_draft_tokens": 3}),
        ([*MTP, "vocab=full", "method.max_draft_tokens=3"], "full", "published", {}),
        ([*MTP, "settings=published"], "full", "published", {}),
        (["method=eagle2", "method.nodes=59", "method.width=10", "method.max_draft_tokens=6", MTP[1]],
         "trim", "changed", {"vocab": "full"}),
    ],
)  # fmt: skip
def test_tuned_settings_choose_a_vocabulary_and_vocab_wins(overrides, vocab, source, published):
    cfg = composed(*overrides)
    trimmed = checks.check(cfg).trimmed
    assert cfg.vocab.name == vocab and trimmed == (
        (cfg.vocab.map, cfg.vocab.size) if vocab == "trim" else None
    )
    assert (cfg.settings_source.source, cfg.settings_source.published) == (source, published)


def test_another_engine_has_no_vocabulary_of_the_tuned_settings():
    assert composed(*MTP, "engine=vllm").vocab.name == "full"


@pytest.mark.parametrize("name", ["tiny", "mine", "qwen3-8b"])
def test_what_tables_call_a_pair_changes_no_setting(name):
    cfg = composed("method=samd", "method.auxiliary=recycling", f"pair.name={name}")
    checks.check(cfg)
    assert (cfg.method.drafter.nodes, cfg.pair.name) == (16, name)
    cfg = composed("method=eagle2", "pair=tiny_wide", f"pair.name={name}")
    checks.check(cfg)
    assert (cfg.settings_source.source, cfg.settings_source.pair) == ("tuned", "tiny")
    checks.check(composed("method=pld", "engine=llama_cpp", f"pair.name={name}"))
    own = ["pair=local", "pair.target=specbench/tiny/weights/target", f"pair.name={name}"]
    cfg = composed("method=pld", *own)
    checks.check(cfg)
    assert cfg.settings_source.source == "published" and "pair_file" not in cfg


def test_a_pair_may_leave_its_target_to_the_command(tmp_path, monkeypatch):
    (tmp_path / "conf/pair").mkdir(parents=True)
    (tmp_path / "conf/pair/mine.yaml").write_text("defaults: [_base, _self_]\nname: mine\n")
    monkeypatch.chdir(tmp_path)
    cfg = compose_arguments("bench", ["pair=mine", "method=pld", "pair.target=specbench/tiny/weights/target"])
    assert checks.check(cfg).drafter["name"] == "pld"


def test_the_summary_has_it():
    source = {"source": "changed", "pair": None, "published": {"nodes": 80}}
    found = summarise([answered(1)], FACTS, CONFIG | {"settings_source": source})
    assert (found["settings_source"], found["settings_published"]) == ("changed", {"nodes": 80})
    for without in (CONFIG, CONFIG | {"settings_source": None}):
        found = summarise([answered(1)], FACTS, without)
        assert (found["settings_source"], found["settings_tuned_on"], found["settings_published"]) == (
            None,
            None,
            {},
        )


def test_a_file_of_ones_own_that_is_not_read_is_told(tmp_path, monkeypatch, capsys):
    """One of the same content does no harm, as in another checkout."""
    for name, text in (
        ("pld", "max_draft_tokens: 3\n"),
        ("eagle", (CONF / "tuned/tiny/eagle.yaml").read_text()),
    ):
        file = tmp_path / f"conf/tuned/tiny/{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        compose_arguments("bench", ["method=pld"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: conf/tuned/tiny/pld.yaml is not read")


@pytest.mark.slow
def test_tuned_files_of_ones_own(tmp_path, monkeypatch, capfd):
    """A conf/ in the working directory; a key that the method lacks is one line."""
    (tmp_path / "conf/tuned/tiny").mkdir(parents=True)
    (tmp_path / "conf/pair").mkdir()
    (tmp_path / "conf/pair/mine.yaml").write_text("defaults: [tiny, _self_]\nname: mine\n")
    (tmp_path / "conf/tuned/mine").mkdir()
    (tmp_path / "conf/tuned/mine/sps.yaml").write_text("max_draft_tokens: 4\n")
    (tmp_path / "conf/tuned/tiny/sps.yaml").write_text("max_draft_token: 4\n")
    monkeypatch.chdir(tmp_path)
    sys.modules["specbench.config.resolvers"]._as_it_stands.cache_clear()
    code, _, err = run_main(monkeypatch, capfd, "method=sps", "pair=tiny")
    assert code == 2 and err.startswith("error: method sps has no parameter 'max_draft_token'")
    assert "max_draft_tokens" in err and err.count("\n") == 1

    measured = []
    monkeypatch.setattr("specbench.commands.run.measure", lambda folder: measured.append(folder) or 1)
    run_main(monkeypatch, capfd, "method=sps", "pair=mine", "data.limit=1")
    config = yaml.safe_load((measured[0] / "config.yaml").read_text())
    assert config["method"]["max_draft_tokens"] == 4
    assert config["settings_source"] == {
        "source": "tuned",
        "pair": "mine",
        "published": {"max_draft_tokens": 5},
    }
    run_main(
        monkeypatch,
        capfd,
        "-m",
        "method=sps,kangaroo",
        "pair=mine",
        "settings=tuned,published",
        "data.limit=1",
    )
    swept = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in measured[1:]]
    assert sorted((c["method"]["name"], c["method"]["max_draft_tokens"], c["settings"]) for c in swept) == [
        *(("kangaroo", 6, "published"), ("kangaroo", 6, "tuned")),
        *(("sps", 4, "tuned"), ("sps", 5, "published")),
    ]
