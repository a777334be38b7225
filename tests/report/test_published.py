import re

import pandas as pd
import pytest
from yaml.constructor import ConstructorError

from specbench import ROOT
from specbench.data.question_files import TASKS
from specbench.report import published as module
from specbench.report.published import Published, all_rows, beside, rows_of

OUR_METHODS = {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")}
MINIMAL = {"method": "pld", "paper": "A 2024", "source": "there", "hand": "first"}
PLAUSIBLE = {
    "speedup": (0.5, 6),
    "acceptance_length": (1, 7),
    "acceptance_rate": (0.1, 0.9),
    "mbsu": (1, 4),
    "tokens_per_second": (50, 300),
    "exact_share": (0.9, 1),
    "alignment_share": (0.05, 0.5),
    "group_rate": (0.01, 1),
    "ratio": (1, 3),
    "parameters_millions": (30, 600),
}


def published(method) -> list[Published]:
    """The rows of a method, ablations included."""
    return [row for row in all_rows() if row.method == method]


def one(method, *, paper="", setting="", **fields) -> Published:
    """The only row of a method with these fields, and these texts in its paper and its setting."""
    found = [
        row
        for row in published(method)
        if paper in row.paper
        and setting in (row.setting or "")
        and all(getattr(row, k) == v for k, v in fields.items())
    ]
    assert len(found) == 1, found
    return found[0]


def test_numbers_are_plausible_and_tasks_are_known():
    rows = all_rows()
    assert len(rows) == 1159
    assert set(module.NUMBERS) == set(PLAUSIBLE)
    for row in rows:
        assert row.method and row.paper and row.source and row.hand in ("first", "second")
        assert row.task in (None, "overall", *TASKS)
        assert row.task is None or row.data in ("spec_bench", "MT-Bench")
        for name, (low, high) in PLAUSIBLE.items():
            value = getattr(row, name)
            assert value is None or low <= value <= high, (name, row)


def test_no_row_stands_twice():
    what = [
        f for f in Published.__dataclass_fields__ if f not in (*module.NUMBERS, "note", "hand", "ablation")
    ]
    frame = pd.DataFrame(all_rows())
    twice = frame[frame.duplicated(what, keep=False)]
    assert twice.empty, twice[what].to_string()


@pytest.mark.parametrize(
    ("method", "which", "number", "value"),
    [
        # Kangaroo: abstracts, and tables 1, 2 and 4
        ("kangaroo", {"paper": "v1, abstract"}, "speedup", 1.68),
        ("kangaroo", {"paper": "v1, abstract"}, "parameters_millions", 67),
        ("Medusa-1", {"paper": "v1, abstract"}, "parameters_millions", 591),
        ("kangaroo_tree", {"paper": "(NeurIPS 2024), abstract"}, "speedup", 2.04),
        (
            "kangaroo",
            {"paper": "Table 1", "target": "Vicuna-7B v1.3", "setting": "chain", "task": "mt_bench"},
            "speedup",
            1.68,
        ),
        (
            "kangaroo_tree",
            {"paper": "Table 1", "target": "Vicuna-13B v1.3", "setting": "tree", "task": "math_reasoning"},
            "acceptance_length",
            2.82,
        ),
        ("sps", {"paper": "Table 1", "target": "Vicuna-7B v1.3", "task": "overall"}, "speedup", 1.56),
        ("kangaroo", {"paper": "Table 4", "task": "rag"}, "acceptance_length", 2.05),
        ("kangaroo", {"paper": "Fig. 7b", "setting": "gamma 6, threshold 0.6"}, "speedup", 1.50),
        ("kangaroo", {"paper": "Fig. 6", "target": "Vicuna-33B", "setting": "layer 5"}, "speedup", 1.49),
        # Sequoia
        ("sps_tree", {"setting": "Sequoia, draws without replacement, temperature 0.6"}, "speedup", 3.18),
        # Spec-Bench's board
        ("sps", {"paper": "leaderboard", "hardware": "A100"}, "acceptance_length", 2.28),
        ("hydra_heads", {"hardware": "RTX 3090", "task": "translation"}, "speedup", 1.79),
        ("hydra_heads", {"target": "Vicuna-33B", "task": "overall"}, "acceptance_length", 3.24),
        ("hydra_heads", {"paper": "README", "target": "Vicuna-13B", "setting": "Hydra++"}, "speedup", 2.50),
        ("medusa", {"hardware": "A100", "target": "Vicuna-7B", "task": "overall"}, "acceptance_length", 2.31),
        ("lookahead", {"hardware": "RTX 3090", "task": "overall"}, "speedup", 1.13),
        ("lookahead", {"hardware": "A100", "task": "math_reasoning"}, "speedup", 1.57),
        ("eagle", {"hardware": "RTX 3090", "task": "overall"}, "acceptance_length", 3.57),
        ("eagle", {"target": "Vicuna-13B", "task": "rag"}, "speedup", 2.01),
        ("eagle2", {"target": "Vicuna-33B", "task": "math_reasoning"}, "speedup", 3.30),
        # Lookahead: sampling
        ("lookahead", {"data": "CNN/Daily Mail", "setting": "temperature 1"}, "acceptance_length", 1.64),
        # S2D: mean over targets and temperatures, MT-Bench, Spec-Bench, tree
        ("s2d", {"setting": "temperatures 0 and 1"}, "speedup", 1.55),
        (
            "s2d",
            {"target": "Llama-2-70B-chat", "data": "MT-Bench", "setting": "chain, temperature 1"},
            "acceptance_length",
            2.44,
        ),
        (
            "s2d",
            {"target": "Vicuna-13B v1.5", "task": "rag", "setting": "temperature 0", "paper": "plot data"},
            "speedup",
            1.26,
        ),
        (
            "s2d_exit2",
            {
                "target": "Vicuna-7B v1.5",
                "task": "mt_bench",
                "setting": "temperature 0",
                "paper": "plot data",
            },
            "speedup",
            1.24,
        ),
        ("s2d", {"target": "Vicuna-13B v1.5", "setting": "adaptive attention tree"}, "speedup", 1.69),
        # VocabTrim
        ("vocabtrim", {"paper": "abstract"}, "ratio", 1.16),
        ("vocabtrim", {"data": "coding"}, "mbsu", 1.945),
        ("EAGLE", {"data": "math", "hand": "second"}, "mbsu", 1.640),
        ("sps", {"draft": "314M model"}, "parameters_millions", 131.3),
        # Mirror-SD
        ("mirror_sd", {"against": "speedup of EAGLE-3"}, "ratio", 1.30),
        (
            "mirror_sd",
            {"target": "Qwen3-32B", "task": "math_reasoning", "setting": "temperature 0"},
            "speedup",
            5.84,
        ),
        (
            "EAGLE-3",
            {"target": "Qwen3-14B", "task": "summarization", "setting": "temperature 1"},
            "speedup",
            2.84,
        ),
        ("mirror_sd", {"task": "overall"}, "speedup", 3.78),
        # EQSPEC and EXSPEC
        ("EQSPEC/EXSPEC", {"against": "throughput at batch 1"}, "ratio", 3),
        ("EQSPEC/EXSPEC", {"paper": "abstract", "against": None}, "exact_share", 0.95),
        ("EQSPEC/EXSPEC", {"target": "Vicuna", "hand": "second"}, "exact_share", 0.973),
        ("eqspec", {"setting": "batch 4"}, "alignment_share", 0.277),
        ("exspec", {}, "tokens_per_second", 156.5),
        (
            "FR-Spec",
            {"data": "RAG", "setting": "32k tokens counted on SlimPajama"},
            "acceptance_length",
            3.85,
        ),
    ],
)
def test_figures_as_their_papers_print_them(method, which, number, value):
    assert getattr(one(method, **which), number) == value


def test_what_is_known_at_second_hand_says_so():
    papers = {row.paper.split(",")[0] for row in all_rows() if row.hand == "first"}
    assert "SlimSpec" not in papers and "Goel et al. 2024" not in papers
    assert [row.mbsu for row in published("vocabtrim") if row.hand == "first"] == [None]  # its abstract
    assert {row.hand for row in published("sps") if row.paper.endswith("plot data")} == {"first", "second"}


def test_doubts_are_noted():
    average = one("kangaroo_tree", paper="Table 1", target="Vicuna-7B v1.3", setting="tree", task="overall")
    assert average.speedup == 1.72 and "1.757" in average.note
    doubtful = one(
        "s2d_exit1", target="Vicuna-13B v1.5", data="MT-Bench", setting="chain, layer 6 alone, temperature 1"
    )
    assert doubtful.acceptance_length == 2.87 and "slip" in doubtful.note
    assert all("±" in row.note for row in published("kangaroo") if "Fig." in row.paper)
    assert "not stated" in one("Hydra", target="Qwen3-14B", task="qa", setting="temperature 0").note


def test_a_method_is_published_under_our_name():
    names = {row.method for row in all_rows()}
    ours = {"kangaroo", "s2d", "s2d_exit1", "vocabtrim", "mirror_sd", "ssd", "eqspec", "exspec"}
    ours |= {"pld", "sps", "lookahead"}
    assert ours <= names & OUR_METHODS
    assert module.ALIASES.keys() <= OUR_METHODS
    assert {name for others in module.ALIASES.values() for name in others} <= names
    plain = {re.sub(r"\W|_", "", name.lower()): name for name in OUR_METHODS}
    for name in names - OUR_METHODS:  # a method of ours by another spelling
        if (same := plain.get(re.sub(r"\W|_", "", name.lower()))) is not None:
            assert name in module.ALIASES[same]
    assert {"Medusa", "Medusa-1"} <= {row.method for row in beside(["medusa"])}
    assert {row.method for row in beside(["hydra_heads"])} == {"hydra_heads", "Hydra"}


def test_beside_measured_rows_stands_the_method_as_all_rows():
    rows = beside(["pld", "kangaroo", "ragged"])
    assert list(dict.fromkeys(row.method for row in rows)) == ["pld", "kangaroo"]  # `ragged` is in no paper
    assert len(rows) == 31 + 24
    assert not any(row.ablation for row in rows) and any(row.ablation for row in published("kangaroo"))
    assert beside(["mirror_ss"]) == beside(["mirror_sd"]) == published("mirror_sd")
    assert [row.method for row in beside(["eqspec", "exspec"])].count("EQSPEC/EXSPEC") == 5
    assert beside(["ragged"]) == []


def test_nodes_pass_on_their_fields_to_what_is_within():
    node = MINIMAL | {
        "setting": "batch 1",
        "numbers": "acceptance_length/speedup",
        "columns": ["qa", {"task": "rag", "draft": "small"}, "overall"],
        "rows": [
            {"target": "A", "setting": "chain", "cells": ["2.5/1.5", {"is": "2/1.2", "note": "odd"}, "/1.3"]},
            {"target": "B", "hand": "second", "cells": [None, "3/2", None]},
            {"task": "qa", "mbsu": 1.4},
        ],
    }
    common = {"paper": "A 2024", "source": "there", "method": "pld"}
    a = common | {"hand": "first", "target": "A", "setting": "batch 1, chain"}
    b = common | {"setting": "batch 1"}
    assert list(rows_of(node, {})) == [
        Published(**a, task="qa", acceptance_length=2.5, speedup=1.5),
        Published(**a, task="rag", draft="small", acceptance_length=2.0, speedup=1.2, note="odd"),
        Published(**a, task="overall", speedup=1.3),
        Published(
            **b, hand="second", target="B", task="rag", draft="small", acceptance_length=3.0, speedup=2.0
        ),
        Published(**b, hand="first", task="qa", mbsu=1.4),
    ]


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"hand": "third", "speedup": 1.5}, ValueError, "hand.*first"),
        ({"task": "maths", "speedup": 1.5}, ValueError, "maths"),
        ({}, ValueError, "at least"),
        ({"speedup": -1.5}, ValueError, "positive"),
        ({"speedup": "1.5"}, ValueError, "positive"),
        ({"ratio": 2.0}, ValueError, "ratio"),
        ({"speed": 1.5}, TypeError, "speed"),
        ({"columns": ["qa", "rag"], "numbers": "speedup", "cells": [1.5]}, ValueError, "shorter"),
        ({"columns": ["qa"], "numbers": "speedup", "cells": ["2.1/1.5"]}, ValueError, "longer"),
        ({"columns": ["qa"], "numbers": "speedup", "cells": ["1,5"]}, ValueError, "1,5"),
    ],
)
def test_a_malformed_node_is_refused(wrong, error, said):
    with pytest.raises(error, match=said):
        list(rows_of(MINIMAL | wrong, {}))


def test_a_key_that_stands_twice_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "published.yaml"
    file.write_text("- {method: pld, paper: A, source: there, hand: first, speedup: 1.5, speedup: 1.6}\n")
    monkeypatch.setattr(module, "FILE", file)
    with pytest.raises(ConstructorError, match="speedup"):
        module.all_rows.__wrapped__()
