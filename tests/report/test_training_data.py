"""What drafters were trained on: a table, and a warning where it differs."""

import json

import pytest

from specbench.data.training_folder import DATASTORE, RECORD
from specbench.measure.machine import provenance
from specbench.report import compare, formats
from specbench.report.__main__ import report
from specbench.report.training_data import SAME, differing_training, training_table
from tests.report.test_formats import texts
from tests.support.samples import SUMMARY, run_of

TRAINED = {
    "source": "somewhere",
    "data": "sha256:0123456789abcdef",
    "tokens": 1_024_000,
    "steps": 500,
    "loss": 1.25,
    "held_out_agreement": 0.75,
}


def summary(method: str, **training: dict) -> dict:
    return SUMMARY | {"method": method, "training": training}


def test_the_table_has_a_row_for_each_trained_part():
    sorted_draft = {key: value for key, value in TRAINED.items() if key != "held_out_agreement"}
    sorted_draft |= {"held_out_agreement_2": 0.5, "held_out_agreement_4": 0.625}
    found = training_table(
        [summary("sps", draft=TRAINED), summary("s2d", draft=sorted_draft), summary("pld")]
    )
    text = formats.markdown(found)
    assert "| 01234567 |" in text and "1,024,000" in text and "0.500, 0.625" in text
    assert SAME in text and "pld" not in text
    assert training_table([SUMMARY]) is None  # older runs do not tell


@pytest.mark.parametrize(
    ("data", "cell"),
    [
        ("specbench.tiny.world.training_examples", "training_examples"),
        ("specbench.tiny.world.training_examples(seed=1.5)", "training_examples(seed=1.5)"),
        ("someone/ultrachat_v1.1:train", "ultrachat_v1.1:train"),
        ("there/talk.jsonl", "talk.jsonl"),
    ],
)
def test_the_table_names_a_text_by_its_last_part(data, cell):
    first = {"data": data, "tokens": 3_072_000}
    (row,) = texts(training_table([summary("sps", draft=TRAINED | {"earlier": [first]})]))
    assert row[3] == f"3,072,000 of {cell}, then 1,024,000 of 01234567"


def test_other_data_and_other_amounts_are_named():
    alike = [
        summary("sps", draft=TRAINED),
        summary("kangaroo", adapter=TRAINED | {"loss": 2.0, "steps": 250}),
    ]
    assert differing_training(alike) == []
    assert differing_training([SUMMARY, SUMMARY]) == []
    more = summary("s2d", draft=TRAINED | {"tokens": 5})
    (line,) = differing_training([*alike, more])
    assert "5 tokens, sha256:01234567: s2d" in line and "1,024,000 tokens, sha256:01234567: " in line
    other = summary("s2d", draft=TRAINED | {"data": "specbench.tiny.data.conversations"})
    (line,) = differing_training([*alike, other])
    assert line.startswith("drafters saw equally many tokens, but different text")
    assert "1,024,000 tokens, specbench.tiny.data.conversations: s2d" in line
    assert SAME not in formats.markdown(training_table([*alike, other]))


def test_what_is_unknown_is_not_called_alike():
    published = SUMMARY | {"method": "eagle3", "training": {}, "trained_weights": {"weights": "theirs"}}
    (line,) = differing_training([published, summary("medusa", weights=TRAINED)])
    assert line == "how these were trained is unknown: eagle3"
    for runs in ([published], [published, summary("medusa", weights=TRAINED)]):
        assert SAME not in formats.markdown(training_table(runs))
    looked_up = summary("rest", datastore={"data": TRAINED["data"], "tokens": 5, "questions": "x"})
    assert SAME not in formats.markdown(training_table([looked_up]))


def test_a_text_that_is_looked_up_counts_like_one_that_was_trained_on(tmp_path):
    record = {"data": TRAINED["data"], "tokens": 5, "rows": 2, "questions": "x"}
    (tmp_path / DATASTORE).write_text(json.dumps(record))
    found = provenance.trained({"draft": None}, {"name": "rest", "datastore": str(tmp_path)}, False)
    assert found == {"datastore": {"source": str(tmp_path)} | record}
    runs = [summary("sps", draft=TRAINED), summary("rest", **found)]
    (line,) = differing_training(runs)
    assert line == "some look text up (5 tokens, sha256:01234567: rest)"
    text = formats.markdown(training_table(runs))
    assert "rest" in text and SAME not in text


def test_all_stages_count(tmp_path):
    """A drafter that began as something trained has seen that text, too."""
    first = {"data": "stream", "tokens": 3_072_000, "steps": 1500, "begins": "random weights"}
    later = TRAINED | {"begins": "draft", "earlier": [first]}
    long = TRAINED | {"tokens": 4_096_000}
    (line,) = differing_training([summary("sps", draft=later), summary("eagle", part=TRAINED)])
    assert line.startswith("drafters were not trained alike")
    assert "4,096,000 tokens, 3,072,000 of stream, then 1,024,000 of sha256:01234567: sps" in line
    (line,) = differing_training([summary("sps", draft=later), summary("eagle", part=long)])
    assert line.startswith("drafters saw equally many tokens, but different text")
    text = formats.markdown(training_table([summary("sps", draft=later)]))
    assert "4,096,000" in text and "| draft |" in text and SAME in text


def test_what_a_text_was_cleared_of_is_shown_and_unknown_where_no_record_tells():
    """A part that was trained elsewhere, a record without the questions, and one whose first stage lacks them."""
    cleared = TRAINED | {"questions": "4b6d33e79484", "held_out_agreement": None}
    staged = cleared | {"earlier": [{"data": "stream", "tokens": 5}]}
    elsewhere = summary("eagle3") | {"trained_weights": {"weights": {}}, "draft": "hub/draft"}
    runs = [
        summary("sps", draft=cleared) | {"draft": "ours"},
        summary("s2d", draft=staged),
        summary("kangaroo", weights=TRAINED) | {"trained_weights": {"weights": {}}},
        elsewhere,
    ]
    shown = {(row[0], row[1]): [*row[4:]] for row in texts(training_table(runs))}
    assert shown["sps", "draft"] == ["4b6d33e7", "1,024,000", "500", "1.250", "–"]
    assert shown["s2d", "draft"][0] == shown["kangaroo", "weights"][0] == "–"
    assert shown["eagle3", "weights"] == shown["eagle3", "draft"] == ["–"] * 5 and len(shown) == 5


@pytest.mark.slow
def test_a_warmed_memory_is_told_of_and_not_set_beside_another_in_silence(tmp_path, capsys):
    def began(method: str, data: str | None, **more: str) -> dict:
        file = None if data is None else "there/talk.jsonl"
        record = {"source": file, "data": f"sha256:{data}", "tokens": 1_024_000}
        settings = {"warm": file} | more
        return summary(method, **({} if data is None else {"warm": record})) | {"settings": settings}

    cold, warm, other = began("recycling", None), began("recycling", "0123"), began("suffix", "4567")
    assert differing_training([cold, summary("sps")]) == differing_training([warm, summary("sps")]) == []
    assert differing_training([warm, warm]) == differing_training([cold, cold]) == []
    (line,) = differing_training([cold, warm])
    assert line == (
        "some drafters began with a warmed memory, others with an empty one "
        "(warmed: recycling, warm=there/talk.jsonl; empty: recycling, warm=None)"
    )
    assert "1,024,000 tokens, sha256:4567: suffix" in differing_training([warm, other])[0]
    batched = cold | {"method": "ragged", "drafter": "suffix", "settings": {"drafter.warm": None}}
    assert "empty: ragged + suffix" in differing_training([warm, batched])[0]
    runs = [run_of(tmp_path, name, one) for name, one in (("a", warm), ("b", other), ("c", cold))]
    page = report(runs, [], tmp_path / "report", []).read_text()
    assert "memory warmed with talk.jsonl: a, b" in page and "began with a warmed memory, others" in page
    compare.print_comparison(runs)
    assert "began with a warmed memory, others" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
def test_report_and_compare_warn(tmp_path, capsys):
    runs = [
        run_of(tmp_path, "a", summary("sps", draft=TRAINED)),
        run_of(tmp_path, "b", summary("s2d", draft=TRAINED | {"data": "other", "tokens": 5})),
    ]
    page = report(runs, [], tmp_path / "report", []).read_text()
    assert "drafters were not trained alike" in page and "what drafters were trained on" in page
    compare.print_comparison(runs)
    assert "drafters were not trained alike" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("with_draft", [True, False])
def test_records_are_those_of_the_parts_that_are_used(tmp_path, with_draft):
    for name in ("draft", "adapter", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text(json.dumps({"data": name}))
    (tmp_path / "plain").mkdir()
    pair = {"draft": str(tmp_path / "draft"), "parts": {"other": str(tmp_path / "unused")}}
    drafting = {"name": "x", "empty": "", "map": str(tmp_path / "plain"), "none": None, "length": 4}
    drafting["drafter"] = {"adapter": str(tmp_path / "adapter")}
    found = provenance.trained(pair, drafting, with_draft)
    assert found.pop("drafter.adapter") == {"source": str(tmp_path / "adapter"), "data": "adapter"}
    assert found == ({"draft": {"source": str(tmp_path / "draft"), "data": "draft"}} if with_draft else {})
