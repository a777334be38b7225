"""Every YAML of every group composes and says its own name, and its method's class takes what it gives."""

from __future__ import annotations

import re
from functools import cache

import hydra
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specbench.commands.run import Command
from specbench.commands.sweep import Job
from specbench.config.checks import check, check_values, warn_of_world
from specbench.config.combinations import check_method
from specbench.config.compose import CONF
from specbench.config.folders import base_pair
from specbench.config.overrides import check_added, check_overrides, check_pair_keys
from specbench.data.question_files import TASKS
from specbench.decoding.drafter import Drafter
from specbench.decoding.scheduler import Scheduler
from specbench.system.errors import UserError
from specbench.system.settings import parameters, settings
from tests.support.conf import composed, drafters, file_of, names

# All but the search spaces, which belong to the tuner, tuned settings, which belong to methods, and what configures
# Hydra itself.
GROUPS = sorted(
    path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "search", "tuned")
)
NAMES = {group: drafters() if group == "drafter" else names(group) for group in GROUPS}
CHOICES = [(group, choice) for group, choices in NAMES.items() for choice in choices]


@cache  # several tests ask for the same; none changes what it gets
def resolved(*overrides: str):
    cfg = composed("bench", *overrides)
    OmegaConf.resolve(cfg)
    return cfg


@pytest.mark.first_fast
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_composes(group, choice):
    cfg = resolved(f"{group}={choice}")
    assert not OmegaConf.missing_keys(cfg)
    if group in ("experiment", "settings"):
        assert cfg[group] == choice
    elif group != "decoding":
        assert cfg[group].name == choice
    check_values(cfg)


def test_defaults_follow_the_data_and_the_pair():
    cfg = resolved()
    assert set(GROUPS) <= set(cfg)
    assert cfg.decoding.max_new_tokens == cfg.data.max_new_tokens
    assert cfg.method.weights == cfg.pair.parts.kangaroo
    assert resolved("data.max_new_tokens=7").decoding.max_new_tokens == 7


@pytest.mark.parametrize(
    ("data", "limit", "max_new_tokens"),
    [
        ("spec_bench", 3, 128),
        ("jsonl", None, 1024),
        ("speed_bench", None, 4096),
        ("specttsbench", None, 15000),
    ],
)
def test_limits_of_a_pair_are_for_spec_bench_alone(data, limit, max_new_tokens):
    cfg = resolved("pair=smollm2-135m", f"data={data}")
    assert (cfg.data.limit, cfg.decoding.max_new_tokens) == (limit, max_new_tokens)


@pytest.mark.first_fast
@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_entry_point_composes(path):
    OmegaConf.resolve(composed(path.stem))


@pytest.mark.first_fast
@pytest.mark.parametrize("name", ["bench", "parts", "states", "train_kangaroo"])
def test_hydra_itself_writes_nothing(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(name, return_hydra_config=True).hydra
    assert (cfg.output_subdir, cfg.run.dir) == (None, ".")
    assert cfg.runtime.choices["hydra/job_logging"] == cfg.runtime.choices["hydra/hydra_logging"] == "none"


@pytest.mark.first_fast
@pytest.mark.parametrize("method", NAMES["method"])
def test_method(method):
    cfg = resolved(f"method={method}")
    cls = hydra.utils.get_class(cfg.method._target_)
    assert issubclass(cls, Drafter | Scheduler)
    if issubclass(cls, Scheduler):  # a batch, and repeats to tell noise by, since a batch is one measurement
        assert cfg.batch_size > 1 and cfg.repeats > 1
    else:
        assert cfg.batch_size == 1
    check_method(cfg)


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("drafter", NAMES["drafter"])
def test_any_drafter_serves_any_batch_method(drafter):
    for method in ("ragged", "eqspec", "exspec"):
        cfg = resolved(f"method={method}", f"drafter={drafter}", "batch_size=4")
        assert cfg.drafter.name == drafter and check_method(cfg).needs.batching


@pytest.mark.parametrize("engine", ["llama_cpp", "openvino", "vllm"])
def test_an_engine_drafts_as_long_as_the_drafter_alone_and_in_batches(engine):
    def words(*overrides: str) -> str:
        return str(resolved(f"engine={engine}", "settings=published", *overrides).engine.speculative.pld)

    alone = words("method=pld", "method.max_draft_tokens=13")
    assert "13" in alone != words("method=pld")
    assert words("method=ragged", "drafter=pld", "drafter.max_draft_tokens=13") == alone


@pytest.mark.parametrize("pair", NAMES["pair"])
def test_pairs_have_the_same_keys(pair):
    assert set(file_of("pair", pair)) == set(OmegaConf.load(CONF / "pair" / "_base.yaml"))
    check_pair_keys(file_of("pair", pair))


def test_a_pair_of_a_users_models_is_called_after_the_target():
    for target, name in (("/models/Big 8B", "Big-8B"), ("org/Big", "Big"), ("/models/x-Q4.gguf", "x-Q4")):
        pair = resolved("pair=local", f"pair.target='{target}'", "pair.draft=/models/small").pair
        assert (pair.name, pair.target, pair.draft) == (name, target, "/models/small")
        assert not any(pair.parts.values()) and pair.stop_ids is pair.limit is None


def test_a_pair_without_a_target_is_refused():
    for more in ([], ["pair.init=expanded"]):
        with pytest.raises(UserError, match=r"^pair local has no target: set pair\.target to a folder, "):
            check(composed("bench", "pair=local", *more))
    with pytest.raises(UserError, match=r"^pair\.target must be text or null, not 2026"):
        check(composed("bench", "pair=local", "pair.target=2026", "pair.init=expanded"))


@pytest.mark.parametrize("key", ["trust_remote_code", "gated", "same_added_tokens"])
def test_off_is_a_text_for_hydra_and_no_switch(key):
    """A text is true: `off` would run a checkpoint's own code."""
    with pytest.raises(UserError, match=rf"^pair\.{key} must be true or false or null, not 'off'"):
        check(composed("bench", "pair=tiny", f"++pair.{key}=off"))


def test_every_part_of_this_project_is_a_key_of_every_pair():
    """`pair.parts.NAME=FOLDER` needs no `++`."""
    assert base_pair()["parts"].keys() == file_of("pair", "tiny").parts.keys()
    assert composed("bench", "pair=qwen3-32b").pair.parts.keys() == base_pair()["parts"].keys()


@pytest.mark.parametrize(
    "override", ["++pair.part.kangaroo=x", "+pair.part=x", "pair.part=x", "++pair.drafts=null"]
)
def test_a_key_of_a_pair_that_nothing_reads_is_refused(override):
    with pytest.raises(UserError, match=r"^unknown key 'pair\.\w+': did you mean "):
        check_overrides([override])


def test_keys_of_a_pair_that_are_read_are_not_refused():
    check_overrides(
        ["++pair.template_kwargs.thinking=true", "~pair.part", "pair.target_shape.hidden_size=64", "-m"]
    )
    check_overrides(["++pair.packages.name.version=1", "++pair.parts.own=x", "+pair.training.seed=1"])


def test_a_part_of_a_user_is_read_where_a_yaml_or_the_drafter_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair = {"parts": {"mine": "folder"}}
    with pytest.raises(UserError, match=r"^unknown key 'pair\.parts\.mine': "):
        check_pair_keys(pair)
    check_pair_keys(pair, part="mine")
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text("weights: ${oc.select:pair.parts.mine,null}\n")
    check_pair_keys(pair)


def test_data_sets_have_the_same_keys():
    assert len({frozenset(resolved(f"data={name}").data) for name in NAMES["data"]}) == 1


@pytest.mark.slow
def test_tasks_are_those_of_spec_bench():
    assert list(TASKS) == ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert resolved("task=all").task.tasks == TASKS
    for name in TASKS:
        assert resolved(f"task={name}").task.tasks == {name: TASKS[name]}


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in NAMES["drafter"] if name != "oracle"])
def test_a_value_names_the_configuration_of_a_wrapped_drafter(drafter):
    """`${choice:...}` gives what the group's file gives, its interpolations resolved where it stands."""
    cfg = composed("bench", "method=oracle", f"method.cost_of={drafter}", "vocab=trim")
    assert cfg.method.drafter == composed("bench", f"drafter={drafter}", "vocab=trim").drafter
    batch = composed("bench", "method=ragged", "drafter=oracle", f"drafter.cost_of={drafter}", "vocab=trim")
    assert batch.drafter.drafter == cfg.method.drafter


def test_settings_of_a_summary_leave_out_the_wrapped_drafter():
    cfg = composed("bench", "method=oracle")
    assert set(parameters(cfg.method)) - set(settings(cfg.method)) == {"drafter"}
    assert settings(cfg.method)["cost_of"] == "sps"


HEADS = {  # pairs that name their authors' published checkpoints, by method
    "vicuna-7b": ("medusa", "hydra_heads", "eagle", "eagle2"),
    "vicuna-13b": ("medusa", "hydra_heads", "eagle", "eagle2", "eagle3"),
    "vicuna-33b": ("medusa", "hydra_heads", "eagle", "eagle2"),
    "llama-2-70b-chat": ("eagle", "eagle2"),
    "llama-3.1-8b": ("eagle", "eagle2", "eagle3"),
}


@pytest.mark.first_fast
@pytest.mark.parametrize(("pair", "method"), [(p, m) for p, methods in HEADS.items() for m in methods])
def test_a_pair_names_the_published_weights_of_its_target(pair, method):
    cfg = resolved(f"pair={pair}", f"method={method}")
    needs = check_method(cfg).needs  # it has the part that the method needs
    name = cfg.pair.parts[needs.part]
    owner, _, model = name.partition("/")
    assert name.count("/") == 1 and owner in ("FasterDecoding", "ankner", "yuhuili")
    (size,) = re.findall(r"\d+b", pair)
    assert size in model.lower(), "the size of the target"
    assert name == cfg.method.weights


def test_a_pair_without_published_weights_names_none():
    for pair in ("vicuna-7b", "vicuna-33b"):
        with pytest.raises(UserError, match="has no part 'eagle3'"):
            check_method(resolved(f"pair={pair}", "method=eagle3"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+data.limitt=3", r"^unknown key 'data\.limitt': did you mean limit\?"),
        (
            "++decoding.max_new_token=5",
            r"^unknown key 'decoding\.max_new_token': did you mean max_new_tokens\?",
        ),
        ("+thread=1", "^unknown key 'thread': did you mean threads\\?"),
        ("+search.k=[1,2]", "^unknown key 'search': "),
    ],
)
def test_an_added_key_that_nothing_reads_is_refused(override, message):
    with pytest.raises(UserError, match=message):
        check_added("bench", ["method=pld", override])


def test_added_keys_that_are_read_are_not_refused(tmp_path, monkeypatch):
    more = ("+engine.speculative.sps.synth_len=3.0", "+task.tasks.mine=[qa]", "+method.gamma=3", "++seed=1")
    check_added(
        "bench", [*more, "+hydra.launcher.setup=[exit]", "+experiment=smoke", "+hydra/launcher=ray", "-m"]
    )
    check_added("tune", ["++trials=2", "+search.k=[1,2]"])
    check_added("converse", ["+kinds.poetry={share: 5}"])
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "mine.yaml").write_text("{name: mine, path: questions.jsonl, mine: 1}")
    monkeypatch.chdir(tmp_path)
    check_added("bench", ["data=mine", "+data.limit=3", "++data.mine=2"])


def test_a_sweep_in_the_folder_of_one_run_is_refused():
    with pytest.raises(UserError, match="^run_dir=x is the folder of one run, .*: set runs_root instead$"):
        check_overrides(["-m", "method=sps,pld", "run_dir=x"])
    check_overrides(["method=sps", "run_dir=x"])
    check_overrides(["-m", "method=sps,pld", "run_dir=null"])
    jobs = [
        Job([], OmegaConf.create({"runs_root": "runs", "run_dir": "x"}))
    ] * 2  # of a preset that is a sweep
    with pytest.raises(UserError, match="^run_dir=x is the folder of one run, .*: set runs_root instead$"):
        Command().sweep(jobs, lambda *_: iter(()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=[qa,rag]"], r"^task takes a name, not a list: `specbench sweep task=A,B` measures each$"),
        (["-m", "method=[sps,pld]"], "^method takes a name, not a list"),
        (["-m", "experiment=kangaroo,vocab_trim"], "^kangaroo,vocab_trim: a preset is a sweep of its own"),
        (["-m", "experiment=glob(*)"], "a preset is a sweep of its own"),
    ],
)
def test_choices_of_which_hydra_would_take_only_some_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        check_overrides(words)


def test_a_batch_that_drafts_nothing_takes_no_drafter(capsys):
    """In a sweep over schedulers, others may have one."""
    cfg = composed("bench", "method=ar_batch", "drafter=kangaroo")
    assert check_method(cfg).drafter["name"] == cfg.drafter.name == "none"
    assert capsys.readouterr().err == "warning: ar_batch drafts nothing: drafter=kangaroo is not used\n"
    assert check_method(composed("bench", "method=ragged", "drafter=pld")).drafter["name"] == "pld"


@pytest.mark.parametrize("key", ["data.name", "pair.name"])
def test_a_name_is_text(key):
    with pytest.raises(UserError, match=f"{key} must be text, not 20261203"):
        check_values(composed("bench", f"{key}=20261203"))


def test_a_launcher_without_a_sweep_is_told_what_is_missing():
    with pytest.raises(UserError, match=r"^hydra/launcher needs a sweep: use specbench sweep$"):
        check_overrides(["hydra/launcher=ray", "method=sps"])
    check_overrides(["-m", "hydra/launcher=ray", "method=sps"])


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["pair=llama-3.2-1b"], True),
        (["pair=llama-3.2-1b", "data.path=specbench/warmup.jsonl"], False),
        (["pair=llama-3.2-1b", "pair.init=random"], False),
        (["pair=tiny_wide"], False),
    ],
)
def test_strangers_to_the_embedded_world_are_not_asked_about_it_in_silence(words, warned, capsys):
    warn_of_world.cache_clear()
    for _ in range(2):
        check(composed("bench", "method=pld", *words))
    assert capsys.readouterr().err.count("invented world") == warned
