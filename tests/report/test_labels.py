"""What tables and plots call runs, and which of them they set beside one another."""

import pytest

from specbench.report import labels as names
from specbench.report.labels import labels
from specbench.report.runs import latest
from tests.support.samples import ENGINE, SUMMARY, batched, changed, faster, runs_of


def test_labels_say_published_and_tuned_where_that_tells_all_runs_of_a_method_apart():
    published, tuned, other = (
        changed(SUMMARY, settings__exit_layer=layer) | {"settings_source": source}
        for layer, source in ((2, "published"), (3, "tuned"), (4, "changed"))
    )
    assert labels([published, tuned]) == ["kangaroo, published", "kangaroo, tuned"]
    assert labels([published, tuned, other]) == [
        f"kangaroo, {words}" for words in ("published", "tuned", "exit_layer=4")
    ]
    again = changed(tuned, settings__exit_layer=5)
    assert labels([published, tuned, again]) == [
        f"kangaroo, {words}" for words in ("published", "exit_layer=3", "exit_layer=5")
    ]
    trimmed = changed(published, settings__vocab_map="here", settings__vocab_size=4096) | {
        "settings_source": "changed"
    }
    full = changed(published, settings__vocab_map=None, settings__vocab_size=None) | {
        "settings_source": "changed"
    }
    assert labels([trimmed, full]) == ["kangaroo, vocab_size=4096", "kangaroo, vocab_size=None"]
    assert labels([published, published | {"settings_source": "tuned"}])[1] == "kangaroo", "the same settings"
    pld = faster(1.5, method="pld", settings_source="published")
    assert labels([pld, tuned]) == ["pld", "kangaroo, tuned"], "the only row of its method"
    assert labels([pld, tuned, again])[1:] == [f"kangaroo, exit_layer={layer}, tuned" for layer in (3, 5)]
    assert labels([tuned, pld | {"settings_source": "tuned"}]) == ["kangaroo", "pld"]


def test_labels_name_what_runs_differ_in():
    sweep = [changed(SUMMARY, settings__exit_layer=layer) for layer in (2, 3)]
    assert labels([*sweep, faster(1.5, method="pld", settings={"ngram": 3})]) == [
        "kangaroo, exit_layer=2",
        "kangaroo, exit_layer=3",
        "pld",
    ]
    assert labels([SUMMARY, batched()]) == ["kangaroo", "exspec + sps, batch 8"]
    sizes = [batched("ar_batch", "none", size) for size in (1, 4)]
    assert labels(sizes) == ["ar_batch, batch 1", "ar_batch, batch 4"]
    assert labels(sizes, without=("batch_size",)) == ["ar_batch", "ar_batch"]
    pools = [batched("ragged", "sps") | {"pool": pool} for pool in (24, 48)]
    assert labels([*pools, SUMMARY])[:2] == [f"ragged + sps, batch 8, pool={pool}" for pool in (24, 48)]
    older = batched("ragged", "sps") | {"pool": None}
    assert labels([older, pools[1] | {"drafter": "pld"}]) == ["ragged + sps", "ragged + pld"]
    engine = SUMMARY | {"engine": ENGINE}
    other = changed(engine, engine__plain={"cache_type_k": "q8_0"})
    assert labels([engine, other, changed(engine, engine__version="xllamacpp==2")]) == [
        "kangaroo by llama_cpp, xllamacpp==1, cache_type_k=f16",
        "kangaroo by llama_cpp, xllamacpp==1, cache_type_k=q8_0",
        "kangaroo by llama_cpp, xllamacpp==2, cache_type_k=f16",
    ]
    assert labels([engine, changed(other, engine__name="vllm")]) == [
        "kangaroo by llama_cpp",
        "kangaroo by vllm",
    ]
    beside = changed(SUMMARY, baseline__quoted_against="hf_generate")
    assert "against" not in labels([engine, beside])[0]
    against = [changed(SUMMARY, baseline__quoted_against=arm) for arm in ("engine", "hf_generate")]
    assert labels(against) == ["kangaroo, against our loop", "kangaroo, against transformers generate"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pair", "big", "kangaroo, big"),
        ("data", "tiny", "kangaroo, tiny"),
        ("task", "qa", "kangaroo, qa"),
        ("temperature", 0.7, "kangaroo, T=0.7"),
        ("top_k", 20, "kangaroo, top_k=20"),
        ("top_p", 0.95, "kangaroo, top_p=0.95"),
        ("max_new_tokens", 512, "kangaroo, max_new_tokens=512"),
        ("limit", 5, "kangaroo, limit=5"),
        ("seed", 1, "kangaroo, seed=1"),
        ("processor", "H100", "kangaroo, H100"),
        ("dtype", "bfloat16", "kangaroo, bfloat16"),
        ("device", "cuda", "kangaroo, cuda"),
        ("kernels", "no C++ compiler", "kangaroo, torch's kernels (no C++ compiler)"),
        ("protocol", "spec_bench", "kangaroo, protocol spec_bench"),
        ("weights", "random", "kangaroo, random weights"),
        ("experiment", "mirror_sd", "kangaroo, mirror_sd"),
        ("anatomy", "Llama of 12 layers x 512", "kangaroo, Llama of 12 layers x 512"),
        ("prompting", "b" * 64, "kangaroo, prompts bbbbbbbb"),
    ],
)
def test_runs_of_another_kind_do_not_share_a_label(key, value, said):
    usual = SUMMARY | {"prompting": "a" * 64}
    first, second = labels([usual, usual | {key: value}])
    assert second == said and first != second


@pytest.mark.parametrize("key", ["anatomy", "prompting"])
def test_what_every_pair_has_of_its_own_is_no_difference_between_pairs(key):
    pairs = [SUMMARY | {"pair": name, key: name * 8} for name in ("big", "small")]
    assert labels(pairs, without=("pair",)) == ["kangaroo", "kangaroo"]


def test_a_source_of_settings_does_not_hide_what_is_no_setting():
    published, tuned = (
        changed(SUMMARY, settings__memory=memory, settings__weights=f"/{source}", settings__depth=depth)
        | {"settings_source": source}
        for source, memory, depth in (("published", "run", 1), ("tuned", "answer", 2))
    )
    assert labels([published, tuned]) == [
        "kangaroo, published, memory=run, weights=/published",
        "kangaroo, tuned, memory=answer, weights=/tuned",
    ]


def test_settings_that_were_tuned_on_each_pair_are_called_tuned():
    def on(pair: str, source: str, depth: int) -> dict:
        return changed(SUMMARY, settings__depth=depth) | {"pair": pair, "settings_source": source}

    runs = [on("a", "published", 1), on("b", "published", 1), on("a", "tuned", 2), on("b", "tuned", 3)]
    called = ["kangaroo, published"] * 2 + ["kangaroo, tuned"] * 2
    assert labels(runs, without=("pair",)) == called
    several = labels([*runs, on("b", "tuned", 4)], without=("pair",))
    assert several[2:] == [f"kangaroo, depth={depth}" for depth in (2, 3, 4)]


def test_settings_are_varied_where_two_runs_of_a_method_on_a_pair_differ():
    one, other = faster(1.0, settings={"a": 1, "b": 1}), faster(1.0, settings={"a": 2, "b": 1})
    elsewhere = faster(1.0, settings={"a": 1, "b": 9}, pair="big")
    assert names.varied_settings([one, other, elsewhere]) == [{"a": 1}, {"a": 2}, {"a": 1}]
    drafters = [
        batched("ragged", "sps"),
        batched("ragged", "kangaroo") | {"settings": {"drafter.exit_layer": 2}},
    ]
    assert names.varied_settings(drafters) == [{}, {}]  # another drafter is another method


def test_of_runs_that_share_a_label_the_last_counts():
    found = latest(runs_of(a=faster(1.2), b=faster(1.4, method="pld"), c=faster(1.6)))
    assert [(label, run.name) for label, run in found] == [("kangaroo", "c"), ("pld", "b")]


def test_a_grid_holds_the_last_run_of_each_cell():
    def run(a, b, speedup, **more):
        return faster(speedup, settings={"a": a, "b": b, "c": 0}, **more)

    summaries = [run(1, 1, 1.1), run(1, 2, None), run(2, 1, 1.3), run(1, 1, 1.4), run(2, 1, 9.0, pair="big")]
    (grid,) = names.grids(summaries)
    assert (grid.down, grid.across, grid.rows, grid.columns) == ("a", "b", [1, 2], [1, 2])
    assert grid.cells == {(1, 1): 1.4, (1, 2): None, (2, 1): 1.3}
    assert names.grids([run(1, 1, 1.0), run(1, 2, 1.0)]) == []


def test_numbers_on_an_axis_stand_by_size():
    """However a sweep was continued; None, which switches a setting off, is in front."""
    lengths = (3, 7, None, 5)
    summaries = [faster(1.0, settings={"k": k, "form": form}) for k in lengths for form in ("b", "a")]
    (grid,) = names.grids(summaries)
    assert {*map(tuple, (grid.rows, grid.columns))} == {(None, 3, 5, 7), ("b", "a")}


def test_costs_of_rounds_that_were_set_tell_runs_apart():
    rule = {"draft_length": "goodput"}
    one, other, measured = (
        SUMMARY | rule | more
        for more in ({"set_round_costs": [1.0, 1.05]}, {"set_round_costs": [1.0, 3.0]}, {})
    )
    assert labels([one, other, measured]) == [
        "kangaroo, goodput draft length, round_costs=[1.0, 1.05]",
        "kangaroo, goodput draft length, round_costs=[1.0, 3.0]",
        "kangaroo, goodput draft length",
    ]


def test_settings_that_are_lists_make_a_grid():
    summaries = [faster(1.0, settings={"thresholds": t, "n": n}) for t in ([0.5], [0.6, 0.7]) for n in (1, 2)]
    assert names.grids(summaries)[0].rows == ["[0.5]", "[0.6, 0.7]"]


def test_other_questions_of_one_name_are_told_apart():
    """Such as two files of `data=jsonl`, or splits; the checksums of differently named ones are noise."""
    files = [SUMMARY | {"data": "jsonl", "questions_sha256": digit * 64} for digit in "ab"]
    assert labels(files) == ["kangaroo, questions aaaaaaaa", "kangaroo, questions bbbbbbbb"]
    splits = [summary | {"split": split} for summary, split in zip(files, ("throughput_1k", "throughput_8k"))]
    assert labels(splits) == ["kangaroo, split=throughput_1k", "kangaroo, split=throughput_8k"]
    assert labels([SUMMARY, files[0]]) == ["kangaroo, spec_bench", "kangaroo, jsonl"]


def test_older_runs_do_not_tell_their_draft_model():
    older, first, second = SUMMARY, SUMMARY | {"draft": "a"}, SUMMARY | {"draft": "b"}
    for runs in ([older, first], [first, older]):
        assert labels(runs) == ["kangaroo", "kangaroo"]
    assert labels([older, first, second]) == ["kangaroo", "kangaroo, draft=a", "kangaroo, draft=b"]
