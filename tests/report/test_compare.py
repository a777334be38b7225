import copy
import random

import numpy as np
import pytest

from specbench.report import compare, formats
from specbench.report.runs import row_names
from tests.report.test_formats import texts
from tests.support.messages import says
from tests.support.samples import PROVENANCE, SUMMARY, batched, changed, run_of
from tests.support.synthetic import by_repeat, generation, record, turn

QUESTIONS = range(40)
TOKENS = 21
NAMES = ("qa", "rag")


def seconds(speedup: float, seed: int, noise: float = 0.03) -> dict[int, tuple[float, float]]:
    """Seconds of autoregressive decoding and of a method by question: what is hard is so in every run, noise is not."""
    draw, hard = np.random.default_rng(seed), np.random.default_rng(0)
    found = {}
    for question in QUESTIONS:
        plain = hard.lognormal(0, 0.5)
        of_method = plain / speedup * (1.2 if question % 2 else 0.8)  # tasks differ in it
        found[question] = (plain * draw.normal(1, noise), of_method * draw.normal(1, noise))
    return found


def records(times: dict[int, tuple[float, float]], machine: float = 1.0, **more) -> list[dict]:
    """A journal of one turn a question; machine: how much slower everything was. more: of each record."""
    return [
        record(
            question,
            NAMES[question % 2],
            turns=[
                turn(
                    baseline=generation([0] * (TOKENS - 1), machine * plain, machine * 0.01, drafted=0),
                    method=generation([3] * 5, machine * method, machine * 0.01),
                )
            ],
            **more,
        )
        for question, (plain, method) in times.items()
    ]


@pytest.fixture
def run(tmp_path):
    def make(name: str, journal: list[dict], summary: dict = SUMMARY, provenance: dict = PROVENANCE):
        return run_of(tmp_path, name, summary | {"method": name}, provenance, journal)

    return make


def test_the_drift_of_a_machine_cancels_out(run):
    times = seconds(1.5, seed=1)
    first, second = run("a", records(times)), run("b", records(times, machine=1.3))
    for found, _, _ in compare.relative(first, second).values():
        assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1), abs=1e-12)


def test_two_runs_of_one_method_are_no_difference(run):
    """An A/A pair with noise of its own, and one machine slower."""
    first = run("a", records(seconds(1.5, seed=1)))
    second = run("b", records(seconds(1.5, seed=2), machine=1.3))
    found, count, _ = compare.relative(first, second)["overall"]
    assert count == len(QUESTIONS) and found.low < 1 < found.high and found.high - found.low < 0.1
    shown = row(compare.difference_table([first, second]), "overall")[1]
    assert shown == f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}], 40 questions"


def test_a_method_that_is_faster_is_found(run):
    first = run("a", records(seconds(1.5, seed=1)))
    second = run("b", records(seconds(1.5 * 1.25, seed=2), machine=0.7))
    found = compare.relative(first, second)
    assert list(found) == ["qa", "rag", "overall"]
    for ratio, count, _ in found.values():
        assert 1 < ratio.low < 1.25 < ratio.high < 1.4
        assert ratio.value == pytest.approx(1.25, abs=0.05) and count in (20, 40)
    back, _, _ = compare.relative(second, first)["overall"]
    assert back.value == pytest.approx(1 / found["overall"][0].value) and back.high < 1
    table = compare.difference_table([first, second])
    shown = row(table, "overall")[1]
    assert shown.startswith(f"{found['overall'][0].value:.2f} [") and shown.endswith("40 questions")
    assert row(table, "qa")[1].endswith("20 questions")
    assert formats.cells(table).heads == ["task", "b"]
    assert formats.cells(table).title == "times as fast as a"


def row(table, name: str) -> list[str]:
    return next(cells for cells in texts(table) if cells[0] == name)


def test_the_order_of_the_questions_does_not_matter(run):
    one, other = records(seconds(1.5, seed=1)), records(seconds(1.8, seed=2))
    shuffled = random.Random(0).sample(other, len(other))
    first = run("a", one)
    straight, mixed = compare.relative(first, run("b", other)), compare.relative(first, run("c", shuffled))
    assert straight == mixed and straight["overall"][0].low > 1


def test_a_question_in_only_one_run_does_not_count(run):
    times = seconds(1.5, seed=1)
    more = times | {100: (50.0, 1.0), 101: (1.0, 50.0)}
    kept = {question: pair for question, pair in times.items() if question < 30}
    first, second = run("a", records(more)), run("b", records(kept))
    found, count, _ = compare.relative(first, second)["overall"]
    assert count == 30 and found.value == pytest.approx(1, abs=1e-12)
    assert compare.differing_questions([first, second]) == [
        "b answered 30 turns, a 42: only the 30 in both count"
    ]
    assert compare.differing_questions([second, first]) == [
        "a answered 42 turns, b 30: only the 30 in both count"
    ]


def test_a_failed_question_does_not_count(run):
    times = seconds(1.5, seed=1)
    broken = records(times)
    broken[3] = record(broken[3]["question_id"], broken[3]["task"], error="no memory")
    _, count, _ = compare.relative(run("a", records(times)), run("b", broken))["overall"]
    assert count == len(QUESTIONS) - 1


def test_runs_without_a_common_question(run):
    first = run("a", records({1: (1.0, 2.0), 2: (1.0, 2.0)}))
    second = run("b", records({3: (1.0, 2.0), 4: (1.0, 2.0)}))
    empty = run("c", [])
    found = compare.relative(first, second)
    assert [(ratio.value, count) for ratio, count, _ in found.values()] == [(None, 0)] * len(found)
    assert row(compare.difference_table([first, second, empty]), "overall") == ["overall", "–", "–"]


def test_other_prompts_are_told(run):
    times = seconds(1.5, seed=1)
    changed_prompts = records(times)
    for one in changed_prompts[:5]:
        one["turns"][0]["prompt_sha256"] = "1" * 64
    first, second = run("a", records(times)), run("b", changed_prompts)
    assert compare.differing_questions([first, second]) == ["b had other prompts than a in 5 of 40 turns"]
    assert compare.differing_questions([first, run("c", records(times))]) == []


def test_prompts_are_compared_repeat_by_repeat(run):
    """A drawn answer is part of the next turn's prompt: another repeat has another one."""
    times = seconds(1.5, seed=1)
    again = [copy.deepcopy(one) | {"repeat": 1} for one in records(times)]
    for one in again:
        one["turns"][0]["prompt_sha256"] = "1" * 64
    first, both = run("a", records(times)), run("b", records(times) + again)
    assert compare.differing_questions([first, both]) == []
    other = run("c", again[:1] + records(times)[1:] + [records(times)[0]])
    assert compare.differing_questions([both, other]) == []
    again[1]["turns"][0]["prompt_sha256"] = "2" * 64
    assert "in 1 of 40 turns" in compare.differing_questions([both, run("d", records(times) + again)])[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"threads__torch": 1}, "threads.torch 2 against 1"),
        ({"versions__torch": "2.0"}, "versions.torch 2.13 against 2.0"),
        ({"config__pair__dtype": "bfloat16"}, "config.pair.dtype float32 against bfloat16"),
        ({"questions__sha256": "0" * 64}, f"questions.sha256 {'e' * 8} against {'0' * 8}"),
        ({"machine__cpu": "other"}, "machine.cpu EPYC against other"),
    ],
)
def test_why_runs_may_not_compare_is_said_first(run, capsys, change, said):
    journal = records(seconds(1.5, seed=1))
    first, second = run("a", journal), run("b", journal, provenance=changed(PROVENANCE, **change))
    compare.print_comparison([first, second])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"not comparable with a: b ({said}) ")
    assert "all runs, over all their questions" in text and "times as fast as a" in text


def test_alike_runs_compare_without_a_warning(run, capsys):
    journal = records(seconds(1.5, seed=1))
    compare.print_comparison([run("a", journal), run("b", journal)])
    assert capsys.readouterr().out.startswith("all runs")


def test_runs_of_one_label_are_named_by_their_folders(tmp_path):
    journal = records(seconds(1.5, seed=1))
    runs = [run_of(tmp_path, name, records=journal) for name in ("first", "second")]
    table = formats.cells(compare.difference_table(runs))
    assert table.title == "times as fast as first" and table.heads == ["task", "second"]


# -- batches


def batch(
    plain: list[list[float]], method: list[list[float]], single: float = 6.0, members: int = 3
) -> list[dict]:
    """A journal of pools of `members` questions; seconds of a question by pool and repeat, and of one by one, which a
    repeat changes by 1 %."""
    records = [
        record(
            members * pool + i,
            pool=pool,
            turns=[
                turn(
                    baseline=[generation([0] * (TOKENS - 1), s, 0.01, drafted=0) for s in plain[pool]],
                    method=[generation([3] * 5, s, 0.01) for s in method[pool]],
                    single=[
                        generation([0] * (TOKENS - 1), single * (1 + i / 100), 0.01, drafted=0)
                        for i in range(len(method[pool]))
                    ],
                )
            ],
        )
        for pool in range(len(plain))
        for i in range(members)
    ]
    return by_repeat(records)


def test_a_batch_against_single_sequences_gives_no_number(run, capsys):
    single = run("a", records(seconds(1.5, seed=1)))
    many = run("b", batch([[2.0, 2.1]], [[1.0, 1.1]]), batched())
    assert compare.relative(single, many) == {} == compare.relative(many, single)
    compare.print_comparison([single, many])
    assert says(capsys.readouterr().out, "no difference ... b ... a ... batches")
    third = run("c", records(seconds(1.5, seed=1)))
    assert row(compare.difference_table([single, many, third]), "overall")[1] == "–"


@pytest.mark.slow
def test_batches_of_other_sizes_compare_by_what_they_gain_over_one_by_one(run):
    """The larger batch decodes four times as fast as the small one; so does autoregressive decoding in it."""
    small = batch([[4.0, 4.4], [4.2, 4.0]], [[2.0, 2.1], [2.1, 2.0]])
    large = batch([[1.0, 1.1], [1.05, 1.0]], [[0.5, 0.52], [0.52, 0.505]])
    first, second = run("a", small, batched(batch_size=2)), run("b", large, batched(batch_size=8))
    found, count, unit = compare.relative(first, second)["overall"]
    assert found.value == pytest.approx(8.2 / 2.045) and (count, unit) == (2, "pool")
    assert 3.5 < found.low < found.value < found.high < 4.5
    slower = batch([[1.3, 1.43], [1.365, 1.3]], [[0.65, 0.676], [0.676, 0.6565]], single=7.8)
    found, _, _ = compare.relative(second, run("c", slower, batched()))["overall"]
    assert (found.value, found.low, found.high) == pytest.approx(
        (1, 1, 1)
    )  # the machine was 1.3 times slower
    assert row(compare.difference_table([first, second]), "overall")[1].endswith("2 pools")


def test_an_interval_over_repeats_of_one_pool_says_so(run):
    plain, times = [[2.0, 2.1, 2.0]], {"a": [[1.0, 1.0, 1.1]], "b": [[0.5, 0.5, 0.55]]}
    first, second = (run(name, batch(plain, method), batched()) for name, method in times.items())
    shown = row(compare.difference_table([first, second]), "overall")[1]
    assert shown.startswith("2.00 [") and shown.endswith("], 3 repeats of one pool: timing noise only")
    # Repeats count the same, which tells nothing of how far other questions would differ.
    counted, _, unit = compare.relative(first, second, "acceptance_length")["overall"]
    assert (counted.value, counted.low, counted.high, unit) == (1.0, None, None, "repeat")


def test_what_processes_differ_by_widens_the_interval(run):
    """Questions vary by nothing, processes by 5 %: their interval alone would call equal runs different."""
    times = dict([*seconds(1.5, seed=1, noise=0).items()][:16])

    def measured(name, *factors):
        journal = []
        for process, factor in enumerate(factors):
            shifted = {question: (plain, factor * method) for question, (plain, method) in times.items()}
            journal += [one | {"process": process} for one in records(shifted)]
        return run(name, journal, SUMMARY | {"processes": len(factors)})

    first, second = measured("a", 1.0, 1.05, 0.95), measured("b", 1.06, 1.06 * 0.95, 1.06 * 1.05)
    alone = measured("c", 1.0)
    single = compare.relative(alone, measured("d", 1.06))["overall"].ratio
    assert (single.low, single.high) == pytest.approx((1 / 1.06, 1 / 1.06))
    for ratio, _, _ in compare.relative(first, second).values():
        assert ratio.value == pytest.approx(1 / 1.06, abs=1e-3)
        # Of each run Student's t of two degrees of freedom, times the standard error of three processes.
        assert np.log(ratio.high / ratio.value) == pytest.approx(2**0.5 * 4.303 * 0.05 / 3**0.5, rel=0.02)
    counted = compare.relative(first, second, "acceptance_length")["overall"].ratio
    assert counted.low == counted.high == pytest.approx(1)
    assert not compare.difference_table([first, second]).caption.plain
    assert "processes=3" in compare.difference_table([first, alone]).caption.plain


def test_labels_are_no_markup(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    journal = records(seconds(1.5, seed=1))
    maps = [
        changed(SUMMARY, settings={"vocab_map": f"/m/[{name}]/map"}, pair="[/x]") for name in ("old", "new")
    ]
    compare.print_comparison([run_of(tmp_path, name, one, records=journal) for name, one in zip("ab", maps)])
    text = " ".join(capsys.readouterr().out.split())
    assert "times as fast as kangaroo, vocab_map=/m/[old]/map" in text and text.count("/m/[new]/map") == 2


def test_other_pools_are_not_compared(run):
    first = run("a", batch([[2.0], [2.0]], [[1.0], [1.0]], members=3), batched())
    second = run("b", batch([[2.0], [2.0], [2.0]], [[1.0], [1.0], [1.0]], members=2), batched())
    assert compare.relative(first, second) == {}
    assert compare.without_difference([first, second]) == [
        "no difference for b: its pools are not those of a"
    ]


def test_runs_whose_arms_took_turns_in_different_ways_are_named(run):
    journal = records(seconds(1.5, seed=1))
    sliced, whole = (
        run(name, journal, SUMMARY | {"slice_seconds": s}) for name, s in (("a", 0.05), ("b", None))
    )
    old = run("c", journal)
    assert compare.differing_turns([whole, old]) == compare.differing_turns([sliced, sliced]) == []
    [line] = compare.differing_turns([sliced, whole])
    assert says(line, "whole answers ... b ... 50 ms ... a")


def test_runs_whose_folders_have_one_name_are_told_apart(run):
    """Such as A/main and B/main."""
    journal = records(seconds(1.5, seed=1))
    runs = [
        run(f"{where}/main", journal, SUMMARY | {"slice_seconds": s})
        for where, s in (("A", 0.05), ("B", None))
    ]
    assert len({*row_names(runs)}) == 2 and all(name.endswith("/main") for name in row_names(runs))
    assert len(compare.differing_turns(runs)) == 1


def test_a_run_that_stayed_disturbed_is_named(run, capsys):
    journal = records(seconds(1.5, seed=1))
    calm, busy = (
        run(name, journal, SUMMARY | {"machine": {"still_disturbed_share": share}})
        for name, share in (("a", 0.02), ("b", 0.4))
    )
    compare.print_comparison([calm, busy])
    assert says(" ".join(capsys.readouterr().out.split()), "b: DISTURBED: ... 40% of the measured time")
