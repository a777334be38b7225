import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf

from specbench import ROOT
from specbench.measure.machine import provenance
from specbench.measure.metrics.dataframes import PLACE_COLUMNS, STEP_COLUMNS
from specbench.measure.metrics.summary import SCHEMA
from specbench.measure.records import run_folder as store
from specbench.measure.records import source
from specbench.measure.records.source import MAKING, measuring_files, method_sha256, source_sha256
from specbench.system.errors import UserError
from specbench.system.files import read_json, write_atomic, write_json
from tests.support.folders import hurried  # noqa: F401 - a fixture
from tests.support.messages import says
from tests.support.synthetic import CONFIG, FACTS, answered, by_repeat, full_disk, generation, record, turn
from tests.test_imports import imported

pytestmark = pytest.mark.usefixtures("hurried")


@pytest.fixture
def config(tmp_path) -> dict:
    return CONFIG | {"runs_root": str(tmp_path / "runs")}


@pytest.fixture
def run_dir(config) -> Path:
    """A run folder with facts, and nothing measured yet."""
    folder = store.find_or_create(config)
    write_json(folder / store.FACTS, FACTS)
    return folder


def append(run_dir: Path, *records: dict) -> None:
    with store.open_journal(run_dir) as journal:
        for one in records:
            journal.append(one)


def ids(run_dir: Path) -> list[int]:
    return [r["question_id"] for r in store.read_records(run_dir)]


def contents(run_dir: Path) -> dict:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in run_dir.iterdir()}


# -- finding and making


def test_a_new_folder_is_named_after_what_is_measured(config, run_dir):
    date, clock, *rest = run_dir.name.split("_")
    assert rest == ["sps", "tiny", "all", store.config_hash(config)]
    time.strptime(f"{date}_{clock}", "%Y-%m-%d_%H%M%S")
    assert store.read_config(run_dir) == config


def test_a_hydra_configuration_comes_back_as_it_was(config):
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %} ééé\u2028"
    config = config | {"pair": {"name": "a/b c", "chat_template": template, "stop_ids": [1], "draft": None}}
    run_dir = store.find_or_create(OmegaConf.create(config))
    assert "a-b-c" in run_dir.name
    assert store.read_config(run_dir) == config
    assert store.find_or_create(config) == run_dir


def test_an_unfinished_folder_is_gone_on_with(config, run_dir):
    assert store.find_or_create(config) == run_dir
    append(run_dir, answered(1))
    assert store.find_or_create(config) == run_dir


def test_what_is_not_measured_does_not_make_another_run(config, run_dir):
    assert store.find_or_create(config | {"tracker": {"name": "wandb"}}) == run_dir
    moved = config | {"runs_root": "elsewhere"}
    assert store.config_hash(moved) == store.config_hash(config)


@pytest.mark.parametrize("key", ["seed", "batch_size"])
def test_another_configuration_is_another_run(config, run_dir, key):
    other = store.find_or_create(config | {key: 7})
    assert other != run_dir and other.name[-8:] != run_dir.name[-8:]


def test_other_code_does_not_go_on(config, run_dir, monkeypatch):
    monkeypatch.setattr(store, "source_sha256", lambda: "other")
    other = store.find_or_create(config)
    assert other != run_dir
    assert store.find_or_create(config) == other
    with pytest.raises(UserError, match="code"):
        store.find_or_create(config | {"run_dir": str(run_dir)})


@pytest.mark.slow
def test_a_finished_folder_is_left_and_the_newest_unfinished_is_found(config, run_dir):
    append(run_dir, answered(1))
    store.finalise(run_dir)
    second = store.find_or_create(config)
    assert second != run_dir
    assert store.find_or_create(config) == second


def test_a_folder_that_another_job_has_is_not_found(config, run_dir):
    assert store.find_or_create(config, taken=[run_dir]) != run_dir


@pytest.mark.slow
def test_measured_is_what_this_code_completed_without_failures(config, run_dir, monkeypatch):
    weights = {"target": {"files": {"model.safetensors": "of the training before"}}}
    monkeypatch.setattr(provenance, "weights", lambda pair, drafter, engine: weights)
    assert not store.is_measured(run_dir, config)
    append(run_dir, answered(1))
    store.finalise(run_dir)
    write_json(run_dir / store.PROVENANCE, provenance.around() | {"weights": weights})
    assert store.is_measured(run_dir, config)
    assert not store.is_measured(run_dir, config | {"seed": 7})
    failed = store.find_or_create(config)
    write_json(failed / store.FACTS, FACTS)
    append(failed, answered(1), record(2, error="out of memory"))
    store.finalise(failed)
    assert not store.is_measured(failed, config)
    assert says(store.why_failed(failed), "1 of 2 ... 2 ... out of memory")
    again = {"target": {"files": {"model.safetensors": "of another training"}}}
    for module, name, other, said in (
        (store, "source_sha256", "other", "the code has changed since"),
        (provenance, "weights", again, "something has changed since it was measured .weights"),
        (provenance, "versions", {"torch": "0.1"}, "something has changed since it was measured .versions"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, other=other: other)
            assert not store.is_measured(run_dir, config)
            with pytest.raises(UserError, match=f"cannot resume run_dir=.*: {said}"):
                store.find_or_create(config | {"run_dir": str(run_dir)})
    assert store.find_or_create(config | {"run_dir": str(run_dir)}) == run_dir
    monkeypatch.setattr(store, "questions_sha256", lambda data: "other")
    assert not store.is_measured(run_dir, config)


def test_other_questions_do_not_go_on(config, run_dir, monkeypatch):
    """Records of the questions as they were would be taken for answers to those of today."""
    monkeypatch.setattr(store, "questions_sha256", lambda data: "other")
    assert store.find_or_create(config) != run_dir
    with pytest.raises(UserError, match="cannot resume run_dir=.*: the questions have changed since"):
        store.find_or_create(config | {"run_dir": str(run_dir)})


def test_what_ended_an_attempt_is_one_line(run_dir):
    assert store.why_failed(run_dir) is None
    store.note_failure(run_dir, "two\n  lines")
    assert store.why_failed(run_dir) == "two lines"


def test_a_given_folder_is_used(config, tmp_path):
    given = config | {"run_dir": str(tmp_path / "mine")}
    run_dir = store.find_or_create(given)
    assert run_dir == tmp_path / "mine"
    assert store.find_or_create(given) == run_dir
    with pytest.raises(UserError, match="another configuration"):
        store.find_or_create(given | {"seed": 1})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError, match="full"):
        store.find_or_create(config | {"run_dir": str(tmp_path / "full")})


def test_a_folder_that_was_given_up_is_not_found_but_by_its_name(config, run_dir):
    store.give_up(run_dir, "begun on another machine")
    other = store.find_or_create(config)
    assert other != run_dir and store.find_or_create(config) == other
    given = config | {"run_dir": str(run_dir)}
    write_json(run_dir / store.CODE, store._code(given))
    write_atomic(run_dir / store.CONFIG, yaml.safe_dump(given))
    assert store.find_or_create(given) == run_dir


def test_a_users_own_method_is_known_by_its_code(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_bigram.py").write_text("class Bigram: gamma = 3")
    own = config | {"method": config["method"] | {"drafter": {"_target_": "my_bigram.Bigram"}}}
    assert method_sha256(config) is None
    first, run_dir = method_sha256(own), store.find_or_create(own)
    (tmp_path / "my_bigram.py").write_text("class Bigram: gamma = 3  # three")
    assert method_sha256(own) == first and store.find_or_create(own) == run_dir
    (tmp_path / "my_bigram.py").write_text("class Bigram: gamma = 4")
    assert method_sha256(own) != first and store.find_or_create(own) != run_dir
    before = method_sha256(own)
    (tmp_path / "helpers.py").write_text("gamma = 5")
    assert method_sha256(own) != before, "what it imports lies beside it"


def test_a_method_in_a_folder_without_init_is_known_by_its_code(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "bigram.py").write_text("class Bigram: gamma = 3")
    own = config | {"method": config["method"] | {"drafter": {"_target_": "my_methods.bigram.Bigram"}}}
    first, run_dir = method_sha256(own), store.find_or_create(own)
    assert first is not None
    (tmp_path / "my_methods" / "bigram.py").write_text("class Bigram: gamma = 4")
    assert method_sha256(own) != first and store.find_or_create(own) != run_dir


def test_the_code_is_known_by_its_content():
    digest = source_sha256()
    assert len(digest) == 64 and digest == source_sha256()


def test_only_what_code_does_tells_it_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(source, "METHODS", tmp_path / "methods")
    file = tmp_path / "methods" / "mine.py"
    file.parent.mkdir()

    def digest(text: str) -> str:
        file.write_text(text)
        return source_sha256()

    first = digest('"""Mine."""\n\ndef draft(n):\n    """Drafts."""\n    return n + 1\n')
    assert digest("# a comment\ndef draft(n):\n    'Other words.'\n\n    return (n + 1)\n") == first
    assert digest("def draft(n):\n    return n + 2\n") != first
    assert digest('def draft(n):\n    """Drafts."""\n') != first
    assert digest("def draft(:\n") != first  # what cannot be read counts as it is


def test_other_kernels_are_other_code(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "KERNELS", tmp_path)
    (tmp_path / "product.cpp").write_text("x += 1;\n")
    first = source_sha256()
    (tmp_path / "product.cpp").write_text("x += 2;\n")
    assert source_sha256() != first


def test_what_trains_or_tunes_may_change_while_a_run_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(source, "METHODS", tmp_path / "methods")

    def digest(file: str, text: str) -> str:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return source_sha256()

    first = digest("methods/mine/drafter.py", "k = 1\n")
    assert digest("methods/mine/train.py", "rate = 1\n") == first
    assert digest("methods/common/training.py", "rate = 2\n") == first
    assert digest("specbench/commands/tune.py", "trials = 3\n") == first
    assert digest("methods/mine/layer.py", "k = 4\n") != first


def test_no_file_that_measures_imports_one_that_may_change():
    """Else a run could go on with other code."""
    files = measuring_files()
    every = [path for package in ("specbench", "methods") for path in (ROOT / package).rglob("*.py")]
    making = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in every
        if any(path.match(pattern) for pattern in MAKING)
    }
    assert {"methods.sps.train", "methods.common.training", "specbench.commands.tune"} <= making
    for file in files:
        assert not imported(file) & making, file


# -- the journal


def test_records_come_back(run_dir):
    first, second = answered(1), record(2, error="out of memory")
    append(run_dir, first)
    append(run_dir, second)
    found = store.read_records(run_dir)
    assert [{k: v for k, v in r.items() if k != "tstamp"} for r in found] == [first, second]
    assert all(abs(r["tstamp"] - time.time()) < 60 for r in found)


def test_records_and_summaries_are_on_the_disk(run_dir, tmp_path, monkeypatch):
    """Not only in the system's memory, which a power cut empties."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    append(run_dir, answered(1))
    assert synced == [str(run_dir / store.RECORDS)]
    write_json(tmp_path / "a.json", {})
    assert len(synced) == 2


def test_a_question_is_recorded_once(run_dir):
    append(run_dir, answered(1))
    with store.open_journal(run_dir) as journal, pytest.raises(ValueError, match="question 1"):
        journal.append(answered(1))
    assert ids(run_dir) == [1]


def test_what_is_not_a_number_becomes_null(run_dir):
    certificate = {
        "verdict": "violation",
        "first_divergence": 1,
        "margin": float("nan"),
        "noise": float("inf"),
    }
    append(run_dir, record(1, turns=[turn(0, certificate, method=generation())]))
    assert (
        "NaN" not in (run_dir / store.RECORDS).read_text()
        and "Infinity" not in (run_dir / store.RECORDS).read_text()
    )
    assert store.read_records(run_dir)[0]["turns"][0]["equivalence"]["margin"] is None


def test_a_journal_cut_anywhere_in_its_last_line_keeps_every_finished_question(run_dir):
    append(run_dir, answered(1), answered(2), record(3, error="é\u2028"))
    path = run_dir / store.RECORDS
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(whole) + 1):
        path.write_bytes(whole[:end])
        kept = [1, 2, 3] if end == len(whole) else [1, 2]
        assert ids(run_dir) == kept
        with store.open_journal(run_dir) as journal:
            assert [r["question_id"] for r in journal.records] == kept
            journal.append(record(4, error="later"))
        assert ids(run_dir) == [*kept, 4]
        assert path.read_bytes().startswith(whole[:begin])


def test_an_append_that_a_full_disk_cuts_leaves_the_journal_as_it_was(run_dir):
    append(run_dir, answered(1))
    path = run_dir / store.RECORDS
    before = path.read_bytes()
    with store.open_journal(run_dir) as journal:
        with full_disk() as room, pytest.raises(UserError, match=f"{path}: File too large"):
            room(len(before) + 50)
            journal.append(answered(2), answered(3))
        assert path.read_bytes() == before and [r["question_id"] for r in journal.records] == [1]
        journal.append(answered(2), answered(3))
    assert ids(run_dir) == [1, 2, 3]


@pytest.mark.parametrize("line", ["5", "[]", '{"a": 1}', '{"question_id": 7}'])
def test_a_line_that_is_no_record_is_named(run_dir, line):
    append(run_dir, answered(1))
    with open(run_dir / store.RECORDS, "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"line 2: no record of a question; the journal is damaged$"):
        store.read_records(run_dir)


@pytest.mark.parametrize("name", [store.CODE, store.CONFIG])
@pytest.mark.parametrize("content", ["", "{", "a: b: c", "5"])
def test_a_folder_with_a_damaged_file_is_passed_over(config, name, content):
    damaged = store.find_or_create(config)
    (damaged / name).write_text(content)
    assert store.find_or_create(config) != damaged
    given = {**store.plain(config), "run_dir": str(damaged)}
    with pytest.raises(UserError, match=rf"cannot resume run_dir=.*: .*{name}.* damaged"):
        store.find_or_create(given)


def test_a_torn_journal_is_mended_on_a_full_disk(run_dir):
    append(run_dir, answered(1), answered(2))
    path = run_dir / store.RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    with full_disk() as room:
        room(0)
        with store.open_journal(run_dir) as journal:
            assert path.read_bytes() == whole
            journal.keep_first(1)
            assert [r["question_id"] for r in journal.records] == ids(run_dir) == [1]
    append(run_dir, answered(2))
    assert ids(run_dir) == [1, 2]


@pytest.mark.parametrize("garbage", [b'{"question_id": 3, "te\xff', b"\0\0\0\0", b"\0\0\n"])
def test_a_garbled_last_line_is_dropped(run_dir, garbage):
    append(run_dir, answered(1))
    path = run_dir / store.RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole + garbage)
    append(run_dir)
    assert path.read_bytes() == whole


def test_damage_in_the_middle_is_an_error(run_dir):
    append(run_dir, answered(1), answered(2))
    path = run_dir / store.RECORDS
    path.write_bytes(b"{broken\n" + path.read_bytes())
    with pytest.raises(UserError, match=r"records\.jsonl, line 1"), store.open_journal(run_dir):
        pass
    assert path.read_bytes().startswith(b"{broken\n")


HOLD = """
import sys, time
from pathlib import Path
from specbench.measure.records.run_folder import open_journal
with open_journal(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.process
def test_two_processes_never_share_a_folder(run_dir):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, run_dir], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process"), store.open_journal(run_dir):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    append(run_dir, answered(1))
    assert ids(run_dir) == [1]


# -- the end


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A finished folder, of which each test has a copy."""
    run_dir = store.find_or_create(CONFIG | {"runs_root": str(tmp_path_factory.mktemp("ended"))})
    write_json(run_dir / store.FACTS, FACTS)
    repeats = [generation([1, 1], seconds=s) for s in (1.0, 1.1)]
    records = [
        answered(2, "rag", accepted=[5, 0, 3]),
        record(3, error="out of memory"),
        record(1, "mt_bench", "writing", [turn(i, baseline=repeats, method=repeats) for i in range(2)]),
    ]
    append(run_dir, *by_repeat(records))
    store.finalise(run_dir)
    return run_dir


@pytest.fixture
def finished(ended, tmp_path) -> Path:
    return shutil.copytree(ended, tmp_path / "finished")  # with the times of its files


def test_a_finished_folder_never_changes(finished, config, monkeypatch):
    monkeypatch.setattr(store, "changed_since", lambda *_: [])
    before = contents(finished)
    assert not [name for name in before if name.endswith(".tmp")]
    summary = store.finalise(finished)
    assert summary == read_json(finished / store.SUMMARY)
    store.find_or_create(config | {"run_dir": str(finished)})
    assert contents(finished) == before


def test_a_crash_before_the_summary_is_made_good(finished):
    before = contents(finished)
    (finished / store.SUMMARY).unlink()
    (finished / store.ANSWERS["method"]).unlink()
    assert not store.is_complete(finished)
    store.finalise(finished)
    assert {name: content for name, (content, _) in contents(finished).items()} == {
        name: content for name, (content, _) in before.items()
    }


def test_the_summary_is_last_and_strict_json(finished):
    def refuse(constant):
        raise AssertionError(constant)

    summary = json.loads((finished / store.SUMMARY).read_text(), parse_constant=refuse)
    assert (summary["status"], summary["failed"]) == ("failed", 1)
    last_tokens = max(finished.iterdir(), key=lambda p: p.stat().st_mtime_ns)
    assert last_tokens.name == store.SUMMARY


def test_nothing_measured_still_ends(run_dir):
    append(run_dir, record(1, error="no memory"))
    summary = store.finalise(run_dir)
    assert summary["overall"]["speedup"] is None
    assert pq.read_table(run_dir / store.STEPS).num_rows == 0


def test_steps_are_one_row_per_round(finished):
    table = pq.read_table(finished / store.STEPS)
    assert table.schema.metadata[b"specbench_schema"] == str(SCHEMA).encode()
    frame = table.to_pandas()
    assert list(frame.columns) == [
        *("question_id", "task", "category", "pool", "turn", "arm", "repeat", "process"),
        *PLACE_COLUMNS,
        *STEP_COLUMNS,
    ]
    assert frame["draft_seconds"].dtype == frame["draft_bytes"].dtype == np.float64
    assert frame["drafted"].dtype == np.int64
    assert str(table.schema.field("step").type) == "int64"
    one = frame[(frame["question_id"] == 2) & (frame["arm"] == "method")]
    assert one["step"].tolist() == [0, 1, 2] and one["accepted"].tolist() == [5, 0, 3]
    assert len(frame[frame["question_id"] == 1]) == 2 * 2 * 2 * 2  # turns x arms x repeats x rounds


# -- Spec-Bench's own readers: the accesses of its evaluation/speed.py and evaluation/equal.py


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_spec_bench_schema(finished):
    for name in store.ANSWERS.values():
        answers = lines(finished / name)
        assert [a["question_id"] for a in answers] == [1, 2]  # sorted; the failed one is in neither file
        for answer in answers:
            assert list(answer) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
            assert isinstance(answer["tstamp"], float) and isinstance(answer["answer_id"], str)
            for i, choice in enumerate(answer["choices"]):
                assert list(choice) == [
                    *("index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
                ]
                assert choice["index"] == i
                turns = len(choice["turns"])
                assert (
                    turns
                    == len(choice["decoding_steps"])
                    == len(choice["new_tokens"])
                    == len(choice["wall_time"])
                )
                assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
                assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - turns
    first, second = lines(finished / store.ANSWERS["method"])
    assert len(first["choices"]) == 2 and first["choices"][1]["wall_time"] == [1.1, 1.1]
    assert second["choices"][0]["accept_lengths"] == [6, 1, 4]
    assert second["choices"][0]["turns"] == ["drafted 0\u2028"]
    assert first["model_id"] == "tiny-sps"


def test_spec_bench_readers_find_what_they_need(finished):
    def data(name):
        with open(finished / name, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    method, plain = (data(store.ANSWERS[arm]) for arm in ("method", "baseline"))
    # speed.py: per question, tokens over seconds of all turns; accept_lengths pooled
    speeds = [sum(d["choices"][0]["new_tokens"]) / sum(d["choices"][0]["wall_time"]) for d in method]
    accepted = [count for d in method for count in d["choices"][0]["accept_lengths"]]
    # ... and for the baseline the words of each text, here in place of its tokenizer
    baseline = [
        sum(len(text.split()) for text in d["choices"][0]["turns"]) / sum(d["choices"][0]["wall_time"])
        for d in plain
    ]
    assert np.mean(speeds) / np.mean(baseline) > 0
    assert {d["category"] for d in method} == {"writing", "rag"}
    # equal.py: the texts of the first choice, line by line
    assert len([str(d["choices"][0]["turns"]) for d in method]) == len(plain)
    pooled = np.mean(accepted)
    summary = read_json(finished / store.SUMMARY)["tasks"]
    assert (
        pooled == pytest.approx((11 - 0 + 4 * 2) / (3 + 4)) and summary["rag"]["acceptance_length"] == 11 / 3
    )


def test_writes_leave_no_half_file(tmp_path, monkeypatch):
    target = tmp_path / "summary.json"
    write_json(target, {"a": 1})

    def crash(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(UserError, match=f"{target}: No space left on device"):
        write_json(target, {"a": 2})
    assert read_json(target) == {"a": 1} and os.listdir(tmp_path) == ["summary.json"]
