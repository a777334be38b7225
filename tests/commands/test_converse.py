"""A target writes conversations: greedy answers to its own questions, resumable, none with the benchmark's words."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import pytest

from specbench.commands import converse as command
from specbench.commands.converse import Writer, converse, pool_size
from specbench.data.contamination import words_of
from specbench.data.conversations import read
from specbench.data.synthesis import Material, loop_start
from specbench.decoding.sampling import SamplingParams
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.commands import left_alone_while_another_writes
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers
from tests.support.models import save_pair

pytestmark = pytest.mark.slow

CAP = 24
KINDS = {
    "chat": {"share": 3, "openings": ["", "Who"], "follow_up": 0.5},
    "more": {"share": 2, "templates": ["So: {chat}", "{number}?"]},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converse")
    save_pair(folder, num_hidden_layers=3)
    return folder


def settings(workplace, out, *more: str):
    cfg = composed(
        "converse",
        f"pair.target={workplace}/target",
        f"pair.tokenizer={workplace}/target",
        "pair.device=cpu",
        "pair.name=saved",
        f"pair.stop_ids={list(range(48))}",  # so many that some answers end before the cap
        f"out={out}",
        f"max_new_tokens={CAP}",
        "question_tokens=200",
        "temperature=1.0",
        "batch_size=3",
        "pool=12",
        "tokens=600",
        "avoid_benchmark=false",
        "distinct=0",
        "ascii=0",
        "question_words=0",
        "answer_tokens=1",
        *more,
    )
    cfg.kinds = KINDS
    return cfg


@pytest.fixture(scope="module")
def written(workplace):
    return converse(settings(workplace, workplace / "talk.jsonl"))


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_is_the_targets_own(workplace, written):
    pair = load_pair(settings(workplace, written).pair, 0, with_draft=False)
    talks = rows(written)
    assert {talk["kind"] for talk in talks} == {"chat", "more"}
    assert {len(talk["messages"]) for talk in talks} == {2, 4}
    for talk in talks:
        messages = talk["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        for i in range(1, len(messages), 2):
            ids = generate_with_transformers(
                pair.target, pair.prompt_ids(messages[:i]), CAP, sorted(pair.stop_ids)
            )
            answer = ids[: loop_start(ids)]
            assert messages[i]["content"] == pair.decode(answer)
            assert messages[i].get("complete", True) == (answer[-1] in pair.stop_ids)
    trained = list(read(str(written)))
    assert [len(messages) for messages in trained] == [len(talk["messages"]) for talk in talks]


def test_an_answer_is_cut_where_it_repeats_itself(workplace, tmp_path, monkeypatch):
    written, looping = Writer._decoded, [*range(60, 80), *range(100, 120), *range(100, 120), *range(100, 120)]

    def decoded(self, requests, label):
        answers = written(self, requests, label)
        return [looping for _ in answers] if requests and requests[0].decoding.greedy else answers

    monkeypatch.setattr(Writer, "_decoded", decoded)
    cfg = settings(workplace, tmp_path / "talk.jsonl")
    answers = [m for talk in rows(converse(cfg)) for m in talk["messages"] if m["role"] == "assistant"]
    text = load_pair(cfg.pair, 0, with_draft=False).decode(looping[: loop_start(looping)])
    assert answers == [{"role": "assistant", "content": text, "complete": False}] * len(answers)


def test_questions_are_sampled_as_set_and_answers_are_greedy(workplace, tmp_path, monkeypatch):
    written, seen = Writer._decoded, set()

    def decoded(self, requests, label):
        seen.update((label.rpartition(" ")[2], request.decoding) for request in requests)
        return written(self, requests, label)

    monkeypatch.setattr(Writer, "_decoded", decoded)
    converse(settings(workplace, tmp_path / "talk.jsonl", "tokens=50", "top_k=90", "top_p=0.99"))
    assert seen == {
        ("questions", SamplingParams(200, 1.0, top_k=90, top_p=0.99)),
        ("answers", SamplingParams(CAP)),
    }


def test_questions_begin_with_an_opening_or_come_from_a_template(written):
    for talk in rows(written):
        question = talk["messages"][0]["content"]
        if talk["kind"] == "more":
            assert question.startswith("So: ") or question.rstrip("?").isdigit()
    questions = [m["content"] for talk in rows(written) for m in talk["messages"] if m["role"] == "user"]
    assert any(question.startswith("Who") for question in questions)


def test_the_log_counts_what_was_kept_and_dropped(written):
    header, *pools = rows(written.with_name("talk.log.jsonl"))
    talks = rows(written)
    assert header["settings"]["seed"] == 0 and pools[-1]["bytes"] == written.stat().st_size
    assert sum(sum(pool["conversations"].values()) for pool in pools) == len(talks)
    assert sum(pool["turns"] for pool in pools) == sum(len(talk["messages"]) for talk in talks) // 2
    assert sum(pool["tokens"] for pool in pools) >= 600 > sum(pool["tokens"] for pool in pools[:-1])
    for pool in pools:
        lost = sum(count for reason, count in pool["dropped"].items() if not reason.startswith("second turn"))
        assert sum(pool["conversations"].values()) + lost == 12


def test_a_stopped_run_goes_on_after_its_last_pool(workplace, written, tmp_path):
    out, log = tmp_path / "talk.jsonl", tmp_path / "talk.log.jsonl"
    converse(settings(workplace, out, "tokens=100"))
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) < len(written.with_name("talk.log.jsonl").read_text().splitlines())
    out.write_text(
        out.read_text() + '{"kind": "chat", "messages": []}\n{"kin'
    )  # of a pool that was not finished
    log.write_text("".join(lines) + '{"byt')
    converse(settings(workplace, out, "batch_size=5"))
    assert out.read_text() == written.read_text()
    assert log.read_text() == written.with_name("talk.log.jsonl").read_text()


@pytest.mark.parametrize(
    ("more", "size"),
    [
        (("tokens=2000000",), 512),
        (("tokens=20000",), 105),  # 104.2 answers of 192 tokens
        (("tokens=1",), 16),
        (("tokens=20000", "max_new_tokens=400"), 50),
        (("tokens=20000", "pool=8"), 8),
    ],
)
def test_few_tokens_make_small_pools(more, size):
    assert pool_size(composed("converse", *more)) == size


def test_a_pool_has_as_many_conversations_as_few_tokens_need(workplace, tmp_path):
    converse(settings(workplace, tmp_path / "talk.jsonl", "pool=500", "tokens=30"))
    _, *pools = rows(tmp_path / "talk.log.jsonl")
    for pool in pools:
        lost = sum(count for reason, count in pool["dropped"].items() if not reason.startswith("second turn"))
        assert sum(pool["conversations"].values()) + lost == 16


@pytest.mark.parametrize(
    ("pools", "message"),
    [(0, "^nothing was saved yet"), (1, r"resumes from pool 1, after \d+ tokens of answers$")],
)
def test_a_stop_says_from_which_pool_it_goes_on(workplace, tmp_path, monkeypatch, pools, message):
    written = Writer.pool

    def stopped(self, number):
        if number == pools:
            signal.raise_signal(signal.SIGTERM)
        return written(self, number)

    monkeypatch.setattr(Writer, "pool", stopped)
    with pytest.raises(KeyboardInterrupt, match=message):
        converse(settings(workplace, tmp_path / "talk.jsonl"))


def test_the_bar_advances_within_a_pool_and_tells_questions_from_answers(workplace, tmp_path, monkeypatch):
    """By the tokens of answers, less those that were dropped at the end of the pool."""
    shown: list[tuple[str, int]] = []
    bars: list[Bar] = []

    class Bar(command.tqdm):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            bars.append(self)

        def update(self, n=1):
            super().update(n)
            shown.append((self.postfix or "", n))

    monkeypatch.setattr(command, "tqdm", Bar)
    converse(settings(workplace, tmp_path / "talk.jsonl", "tokens=100"))
    [bar] = bars
    in_pool = [(label, n) for label, n in shown if label.startswith("pool 0 first turn")]
    questions = [n for label, n in in_pool if ", questions, " in label]
    answers = [n for label, n in in_pool if ", answers, " in label]
    assert questions and not any(questions) and sum(n > 0 for n in answers) > 1
    assert bar.n == sum(pool["tokens"] for pool in rows(tmp_path / "talk.log.jsonl")[1:])
    assert bar.smoothing == 0  # its speed is the mean one


def test_a_file_that_is_not_what_the_log_says_stays_as_it_is(workplace, written, tmp_path):
    """One of somebody else's, which has no log; and one that lost what was written."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text("my own\n")
    with pytest.raises(UserError, match="exists without mine.log.jsonl"):
        converse(settings(workplace, mine))
    assert mine.read_text() == "my own\n"
    out = tmp_path / "talk.jsonl"
    log = written.with_name("talk.log.jsonl").read_text()
    (tmp_path / "talk.log.jsonl").write_text(log)
    with pytest.raises(UserError, match=r"lacks \d+ bytes"):
        converse(settings(workplace, out))
    assert not out.exists()


def test_what_trainers_hold_out_is_quoted_in_no_other_conversation():
    """Else its answer is trained on."""
    writer = object.__new__(Writer)
    writer.filters, writer.material, writer.learned = (
        SimpleNamespace(remember=lambda text: None),
        Material(),
        0,
    )
    answers = [f"Answer {i} has a number of words of its own." for i in range(120)]
    for answer in answers:
        writer.learn("chat", [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}])
    held_out = [answers[i] for i in (0, 50, 100)]
    assert writer.material._answers["chat"] == [answer for answer in answers if answer not in held_out]


def test_other_settings_need_another_file(workplace, written):
    before = written.read_text()
    with pytest.raises(UserError, match="begun with temperature=1.0, not 0.5: .*another out="):
        converse(settings(workplace, written, "temperature=0.5"))
    assert written.read_text() == before


def test_a_file_goes_on_beside_the_same_benchmark_alone(workplace, tmp_path):
    benchmark, out = tmp_path / "question.jsonl", tmp_path / "talk.jsonl"
    more = ("avoid_benchmark=true", f"data.path={benchmark}", "data.sha256=null", "tokens=100")

    def asking(*turns):
        rows = [{"question_id": i, "category": "qa", "turns": [turn]} for i, turn in enumerate(turns)]
        benchmark.write_text("".join(json.dumps(row) + "\n" for row in rows))

    asking("Which river runs past the old town?")
    written = converse(settings(workplace, out, *more)).read_text()
    asking("Which river runs past the old town?", "And another one?")
    with pytest.raises(UserError, match="begun with questions="):
        converse(settings(workplace, out, *more, "tokens=600"))
    with pytest.raises(UserError, match="begun with avoid_benchmark=True, not False"):
        converse(settings(workplace, out, "tokens=600"))
    assert out.read_text() == written


def test_a_file_that_another_process_writes_is_left_alone(workplace, tmp_path):
    out = tmp_path / "talk.jsonl"
    left_alone_while_another_writes(out, lambda: converse(settings(workplace, out)))


def test_words_of_the_benchmark_are_dropped(workplace, written, tmp_path):
    questions = [m["content"] for talk in rows(written) for m in talk["messages"] if m["role"] == "user"]
    benchmark = tmp_path / "question.jsonl"
    asked = [
        {"question_id": i, "category": "qa", "turns": [text]}
        for i, text in enumerate(questions[:5])
        if words_of(text)
    ]
    benchmark.write_text("".join(json.dumps(row) + "\n" for row in asked))
    more = ("avoid_benchmark=true", f"data.path={benchmark}", "data.sha256=null")
    out = converse(settings(workplace, tmp_path / "talk.jsonl", *more))
    left = [m["content"] for talk in rows(out) for m in talk["messages"]]
    assert asked and not {row["turns"][0] for row in asked} & set(left)
    dropped = [pool["dropped"] for pool in rows(tmp_path / "talk.log.jsonl")[1:]]
    assert any("words of the benchmark" in reason for counts in dropped for reason in counts)


def test_a_target_that_writes_nothing_to_keep_is_one_line(workplace, tmp_path):
    with pytest.raises(UserError, match=r"nothing that the target writes is kept: short answer \(\d+\)"):
        converse(settings(workplace, tmp_path / "talk.jsonl", "answer_tokens=1000"))


def test_without_the_benchmark_the_way_out_is_named(workplace, tmp_path):
    more = ("avoid_benchmark=true", "data.path=/nowhere/question.jsonl")
    with pytest.raises(UserError, match=r"no file '/nowhere/question\.jsonl'; avoid_benchmark=false"):
        converse(settings(workplace, tmp_path / "talk.jsonl", *more))


@pytest.mark.parametrize(
    ("text", "has_ended", "ending", "question"),
    [
        ("Why? ", True, "", "Why?"),
        ("Why is an assistant", False, "", None),  # a special token ends the turn, and none came
        ("What is 3+4? ASSISTANT: 7.", True, "ASSISTANT:", "What is 3+4?"),
        ("What is 3+4? ASSISTANT: it", False, "ASSISTANT:", "What is 3+4?"),
        ("Why", False, "ASSISTANT:", None),
        ("Why?", True, "ASSISTANT:", "Why?"),
    ],
)
def test_a_question_ends_where_the_users_turn_does(text, has_ended, ending, question):
    """A target that ends its turn with text may go on to answer itself."""
    assert command.question_of(text, has_ended, ending) == question
