import functools
import hashlib
import http.server
import json
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from specbench.data.question_files import TASKS
from specbench.data.questions import find_questions_file, load_questions, warmup_questions
from specbench.system.errors import UserError
from specbench.system.paths import packaged

SPEC_BENCH_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
ALL = {"name": "all", "tasks": TASKS}


def data(path=None, **more) -> dict:
    return {
        "name": "spec_bench",
        "path": path,
        "url": None,
        "sha256": None,
        "warmup": None,
        "limit": None,
    } | more


def line(question_id=1, category="qa", turns=("why?",), **more) -> str:
    fields = {"question_id": question_id, "category": category, "turns": list(turns)} | more
    return json.dumps(fields, ensure_ascii=False)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path, request):
    if "real_file" not in request.fixturenames:
        monkeypatch.delenv("SPEC_BENCH_QUESTIONS", raising=False)
    monkeypatch.delenv("SPECBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    def write(*lines: str) -> Path:
        path = tmp_path / "questions.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def test_later_turns_are_left_out(file):
    path = file(line(1, turns=("first", "second")), line(2))
    asked = {n: [q.turns for q in load_questions(data(path, turns=n), ALL)] for n in (None, 1, 2)}
    assert asked[1] == [("first",), ("why?",)] and asked[None] == asked[2] == [("first", "second"), ("why?",)]


@pytest.fixture
def served(file):
    """A server on this machine that holds one questions file; yields (url, path)."""
    path = file(line(1), line(2, "rag"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=path.parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{path.name}", path
    server.shutdown()
    thread.join()
    server.server_close()


def test_questions_keep_the_order_of_the_file_and_know_their_task(file):
    path = file(
        line(9, "rag"), line(3, "writing", ["a", "b"], reference=["r"]), "", line(4, text="one\u2028line")
    )
    questions = load_questions(data(path), ALL)
    assert [(q.question_id, q.task, q.turns) for q in questions] == [
        (9, "rag", ("why?",)),
        (3, "mt_bench", ("a", "b")),
        (4, "qa", ("why?",)),
    ]
    assert questions[1].reference == ["r"] and questions[0].reference is None


def test_a_task_selects_its_categories(file):
    path = file(line(1), line(2, "math"), line(3, "rag"))
    only = load_questions(data(path), {"name": "mt_bench", "tasks": {"mt_bench": TASKS["mt_bench"]}})
    assert [q.question_id for q in only] == [2]
    assert [q.question_id for q in load_questions(data(path), {"name": "rag", "tasks": TASKS})] == [3]


def test_a_new_task_is_data(file):
    path = file(line(1, "law"), line(2), line(3, "medicine"))
    task = {"name": "advice", "tasks": {"advice": ["law", "qa"], "clinic": ["medicine"]}}
    assert [(q.question_id, q.task) for q in load_questions(data(path), task)] == [
        (1, "advice"),
        (2, "advice"),
    ]


@pytest.mark.parametrize("limit", [1, 3, 8, 11, 100])
def test_a_limit_is_per_task_and_even_over_categories(file, limit):
    categories = [c for pooled in TASKS.values() for c in pooled]
    path = file(*(line(i, categories[i // 4]) for i in range(4 * len(categories))))
    questions = load_questions(data(path, limit=limit), ALL)
    per_task = Counter(q.task for q in questions)
    assert per_task == {task: min(limit, 4 * len(pooled)) for task, pooled in TASKS.items()}
    conversations = Counter(q.category for q in questions if q.task == "mt_bench")
    assert max(conversations.values()) - min(conversations.get(c, 0) for c in TASKS["mt_bench"]) <= 1
    assert [q.question_id for q in questions] == sorted(q.question_id for q in questions)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ('{"question_id": 1,', "not valid JSON"),
        (
            json.dumps({"question_id": 1, "category": "qa", "turns": ["\ud800"]}),
            "surrogates not allowed",
        ),
        ("[1]", "expected a JSON object"),
        (json.dumps({"category": "qa", "turns": ["x"]}), "'question_id' is missing"),
        (json.dumps({"question_id": 1, "turns": ["x"]}), "'category' is missing"),
        (json.dumps({"question_id": 1, "category": "qa"}), "'turns' is missing"),
        (line("1"), "'question_id' must be int, not str"),
        (line(True), "'question_id' must be int, not bool"),
        (line(-1), "'question_id' must be from 0 to 9223372036854775807, not -1"),
        (line(2**63), "'question_id' must be from 0 to"),
        (json.dumps({"question_id": 1, "category": "qa", "turns": "x"}), "'turns' must be list"),
        (line(category="qaa"), "unknown category 'qaa': did you mean qa?"),
        (line(category=3), "'category' must be str"),
        (line(turns=[]), "at least one text"),
        (line(turns=["x", " "]), "at least one text"),
        (line(turns=["x", 3]), "at least one text"),
        (line(reference="r"), "'reference' must be a list"),
        (line(7), "question_id 7 is a duplicate of line 1"),
    ],
)
def test_a_malformed_line_is_named(file, broken, says):
    path = file(line(7), broken, line(8))
    with pytest.raises(UserError) as error:
        load_questions(data(path), ALL)
    assert f"{path}, line 2" in str(error.value) and says in str(error.value)


def test_bytes_that_are_not_utf8_are_named(file):
    path = file(line(7))
    path.write_bytes(path.read_bytes() + b'{"question_id": 1, "category": "\xff"}\n')
    with pytest.raises(UserError, match="line 2"):
        load_questions(data(path), ALL)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_question_is_an_error(file, limit):
    with pytest.raises(UserError, match="no questions"):
        load_questions(data(file(line(1)), limit=limit), ALL)
    with pytest.raises(UserError, match="task=rag"):
        load_questions(data(file(line(1))), {"name": "rag", "tasks": {"rag": ["rag"]}})


def test_the_path_comes_before_the_environment(file, monkeypatch, tmp_path):
    path = file(line(1))
    monkeypatch.setenv("SPEC_BENCH_QUESTIONS", str(tmp_path / "other.jsonl"))
    assert find_questions_file(data(path)) == path
    with pytest.raises(UserError, match=r"SPEC_BENCH_QUESTIONS.*other\.jsonl"):
        find_questions_file(data())
    with pytest.raises(UserError, match=r"data\.path"):
        find_questions_file(data(tmp_path / "none.jsonl"))


def test_another_checksum_is_refused_with_both_named(file):
    path = file(line(1))
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert find_questions_file(data(path, sha256=right)) == path
    with pytest.raises(UserError, match=f"{right}.*{'0' * 64}"):
        find_questions_file(data(path, sha256="0" * 64))


def test_a_download_is_kept_and_not_repeated(served, tmp_path):
    url, path = served
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    found = find_questions_file(data(url=url, sha256=right))
    assert found == tmp_path / "cache/specbench/spec_bench/question.jsonl"
    assert found.read_bytes() == path.read_bytes()
    assert os.listdir(found.parent) == ["question.jsonl"]
    assert find_questions_file(data(url="http://127.0.0.1:1/gone", sha256=right)) == found


def test_a_download_without_a_checksum_is_that_of_its_address(served, tmp_path):
    """Another commit in the address is another version: the file of the first would be measured under its name."""
    url, path = served
    found = find_questions_file(data(url=url))
    assert found.read_bytes() == path.read_bytes() and find_questions_file(data(url=url)) == found
    with pytest.raises(UserError, match="cannot download"):
        find_questions_file(data(url="http://127.0.0.1:1/gone"))


def test_a_split_of_a_download_is_refused(served):
    """Else all of the file would be asked, under the name of a part of it."""
    with pytest.raises(UserError, match=r"data.split=x is part of a folder: .* data.split=null"):
        find_questions_file(data(url=served[0], split="x"))


def test_a_wrong_download_leaves_nothing_behind(served, tmp_path):
    with pytest.raises(UserError, match="0" * 64):
        find_questions_file(data(url=served[0], sha256="0" * 64))
    assert not list(tmp_path.glob("cache/**/*.jsonl"))


def test_without_a_network_the_error_says_how_to_get_the_file():
    for url in ("http://127.0.0.1:1/question.jsonl", "not a url"):
        with pytest.raises(UserError) as error:
            find_questions_file(data(url=url))
        for part in (url, "SPEC_BENCH_QUESTIONS=", "data.path="):
            assert part in str(error.value)
    with pytest.raises(UserError, match="path.*url"):
        find_questions_file(data())
    with pytest.raises(UserError, match=r"set SPEC_BENCH_QUESTIONS=FOLDER or .* own script prepares"):
        find_questions_file(data() | {"placeholder": "FULL DATA"})


def test_packaged_paths_do_not_depend_on_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert packaged("specbench/data/questions.py").is_file()
    assert packaged("mine.jsonl") == Path("mine.jsonl")


def test_warmup_questions_may_be_of_the_categories_that_the_task_names(file):
    warmup = file(line(5, "rust"))
    [question] = warmup_questions(data(warmup=warmup), {"name": "code", "tasks": {"code": ["rust"]}})
    assert question.task == "code"
    with pytest.raises(UserError, match="unknown category 'rust'"):
        warmup_questions(data(warmup=warmup))


def test_warmup_questions_come_from_their_own_file(file):
    assert [q.question_id for q in warmup_questions(data(warmup=file(line(5))))] == [5]
    with pytest.raises(UserError, match=r"data\.warmup: .* holds no question"):
        warmup_questions(data(warmup=file("")))


@pytest.fixture
def real_file() -> Path:
    if "SPEC_BENCH_QUESTIONS" not in os.environ:
        pytest.skip(
            "SPEC_BENCH_QUESTIONS is not set: Spec-Bench's question.jsonl is not part of this repository"
        )
    return Path(os.environ["SPEC_BENCH_QUESTIONS"])


def test_the_real_file(real_file):
    questions = load_questions(data(sha256=SPEC_BENCH_SHA256), ALL)
    assert [q.question_id for q in questions] == list(range(81, 561))
    assert Counter(q.task for q in questions) == dict.fromkeys(TASKS, 80)
    assert sum(len(q.turns) for q in questions) == 560
    assert Counter(
        q.category for q in load_questions(data(limit=8), ALL) if q.task == "mt_bench"
    ) == dict.fromkeys(TASKS["mt_bench"], 1)


def test_warmup_questions_in_english_hold_nothing_of_the_benchmark(real_file):
    """Settings are chosen on them: each task has some, and no eight words in a row are Spec-Bench's."""
    measured = {
        tuple(words[i : i + 8])
        for question in load_questions(data(sha256=SPEC_BENCH_SHA256), ALL)
        for turn in question.turns
        for words in [turn.lower().split()]
        for i in range(len(words) - 7)
    }
    english = warmup_questions(data(warmup="specbench/warmup.jsonl"))
    assert Counter(q.task for q in english) == dict.fromkeys(TASKS, 2)
    for question in english:
        for turn in question.turns:
            words = turn.lower().split()
            assert not {tuple(words[i : i + 8]) for i in range(len(words) - 7)} & measured


# -- other benchmarks


def open_data(path, **more) -> dict:
    return data(path, name="jsonl", schema="turns", **more)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_turns_alone_are_questions_whose_categories_are_tasks(file):
    path = file(
        json.dumps({"turns": ["one", "two"], "answer": "4"}),
        "",
        json.dumps({"question_id": "9f" * 16, "category": "math", "turns": ["three"]}),
        json.dumps({"question_id": 70, "category": "qa", "messages": [{"role": "user", "content": "four"}]}),
        json.dumps({"question_id": 2**63, "category": "math", "turns": ["five"]}),
        json.dumps({"question_id": -1, "category": "math", "turns": ["six"]}),
    )
    questions = load_questions(open_data(path), ALL)
    assert [(q.question_id, q.category, q.task, q.turns) for q in questions] == [
        (1, "questions", "questions", ("one", "two")),  # not pooled as Spec-Bench pools its categories
        (3, "math", "math", ("three",)),
        (70, "qa", "qa", ("four",)),
        (5, "math", "math", ("five",)),
        (6, "math", "math", ("six",)),
    ]
    assert [q.question_id for q in load_questions(open_data(path), ALL | {"name": "math"})] == [3, 5, 6]


@pytest.mark.parametrize(
    ("before", "turns", "after"),
    [
        ([], ["why?", "how?"], []),
        ([message("system", "be brief")], ["why?", "how?"], []),
        ([message("user", "hm?"), message("assistant", "ah")], ["why?"], ["so"]),
        ([message(r, r) for r in ("system", "user", "assistant", "user", "assistant")], ["why?", "how?"], []),
    ],
)
def test_the_last_messages_of_the_user_are_asked_after_all_others(file, before, turns, after):
    asked, answers = (
        [message(role, text) for text in texts] for role, texts in (("user", turns), ("assistant", after))
    )
    path = file(json.dumps({"messages": [*before, *asked, *answers], "reference": "4"}))
    [question] = load_questions(open_data(path), ALL)
    assert (list(question.history), list(question.turns)) == (before, turns)
    assert question.reference == ["4", *after]
    assert question.texts == [one["content"] for one in before if one["role"] == "user"] + turns


def test_own_questions_are_warmed_up_with_rows_of_their_own_schema(file):
    warmup = file(json.dumps({"messages": [message("system", "be brief"), message("user", "why?")]}))
    [question] = warmup_questions(open_data(None, warmup=warmup))
    assert question.turns == ("why?",) and len(question.history) == 1
    with pytest.raises(UserError, match="'question_id' is missing"):
        warmup_questions(data(warmup=warmup))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "why?", "answer": "so"}, "neither 'turns' nor 'messages', but answer, prompt"),
        ({"turns": []}, "'turns' must hold at least one text"),
        ({"turns": "why?"}, "'turns' must hold at least one text"),
        ({"messages": [message("system", "be brief")]}, "must end with one of the user"),
        ({"messages": [message("user", "why?"), message("tool", "4")]}, "with role 'tool'"),
        ({"messages": []}, "'messages' must hold at least one text"),
        ({"messages": ["why?"]}, "must be a list of objects"),
        ({"messages": [{"role": "user"}]}, "'messages' must hold at least one text"),
        ({"turns": ["why?"], "category": 3}, "'category' must be a name"),
        ({"turns": ["why?"], "category": "overall"}, "give the category another name"),
        ({"turns": ["NOT HERE: fetch it"]}, "a placeholder instead of the question"),
    ],
)
def test_a_row_that_is_no_question_is_named(file, row, says):
    path = file(json.dumps({"turns": ["fine"]}), json.dumps(row))
    with pytest.raises(UserError, match=says) as caught:
        load_questions(open_data(path, placeholder="NOT HERE"), ALL)
    assert f"{path}, line 2" in str(caught.value) and "\n" not in str(caught.value)


def test_nulls_are_fields_that_a_row_lacks(file):
    """As a table writes them that has every column in every row."""
    messages = [{"role": "user", "content": "why?"}]
    path = file(json.dumps({"turns": None, "category": None, "question_id": None, "messages": messages}))
    [question] = load_questions(open_data(path), ALL)
    assert (question.turns, question.category) == (("why?",), "questions")


def test_an_id_that_meets_a_line_number_is_a_duplicate(file):
    path = file(json.dumps({"question_id": 2, "turns": ["a"]}), json.dumps({"turns": ["b"]}))
    with pytest.raises(UserError, match="line 2: question_id 2 is a duplicate of line 1"):
        load_questions(open_data(path), ALL)


def test_a_task_that_the_file_lacks_is_refused(file):
    path = file(json.dumps({"turns": ["a"], "category": "math"}))
    with pytest.raises(UserError, match=r"task.name=maths: data=jsonl has the tasks math"):
        load_questions(open_data(path), ALL | {"name": "maths"})


def test_a_category_may_be_called_all(file):
    path = file(*(json.dumps({"turns": ["a"], "category": name}) for name in ("all", "math")))
    assert [q.task for q in load_questions(open_data(path), ALL)] == ["all", "math"]


def test_a_folder_holds_splits_as_both_scripts_write_them(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question_id": "ab" * 16, "category": "low_entropy", "turns": ["parquet"], "source": None}]
    (tmp_path / "throughput_1k").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "throughput_1k" / "test.parquet")
    (tmp_path / "qualitative.jsonl").write_text(json.dumps({"turns": ["jsonl"], "category": "coding"}))
    (tmp_path / "README.md").write_text("not questions")
    of = {
        split: load_questions(open_data(tmp_path, split=split), ALL)[0]
        for split in ("qualitative", "throughput_1k")
    }
    assert of["throughput_1k"].turns == ("parquet",) and of["throughput_1k"].task == "low_entropy"
    assert of["qualitative"].turns == ("jsonl",) and of["qualitative"].task == "coding"
    (more := tmp_path / "throughput_1k" / "more.jsonl").write_text("")
    with pytest.raises(UserError, match="split throughput_1k of .* is 2 files: join them, or name one"):
        load_questions(open_data(tmp_path, split="throughput_1k"), ALL)
    more.unlink()
    with pytest.raises(UserError, match="has no split throughput_2k: set data.split to one of"):
        load_questions(open_data(tmp_path, split="throughput_2k"), ALL)
    with pytest.raises(UserError, match="sha256"):
        load_questions(open_data(tmp_path, split="qualitative", sha256="0" * 64), ALL)


def test_a_split_is_not_that_of_a_file(tmp_path):
    for file in (
        tmp_path / "any.jsonl",
        tmp_path / "qualitative.jsonl",
        tmp_path / "qualitative" / "test.jsonl",
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"turns": ["one"]}))
        if "qualitative" in str(file):
            assert load_questions(open_data(file, split="qualitative"), ALL)
    for split in ("throughput_2k", "qualitative"):
        with pytest.raises(UserError, match=f"any.jsonl is a file, .* split {split}: set data.split=null"):
            load_questions(open_data(tmp_path / "any.jsonl", split=split), ALL)


def test_a_task_that_there_is_not_is_refused(file):
    """Such as a category of another task: all questions would be asked under its name."""
    for name in ("coding", "maths"):
        with pytest.raises(UserError, match=f"task.name={name}: data=spec_bench has the tasks mt_bench, "):
            load_questions(data(file(line())), ALL | {"name": name})


def test_a_parquet_file_that_is_none_is_one_line(tmp_path):
    (tmp_path / "questions.parquet").write_text("{}")
    with pytest.raises(UserError, match="not a Parquet file") as caught:
        load_questions(open_data(tmp_path / "questions.parquet"), ALL)
    assert "\n" not in str(caught.value)


def test_a_schema_that_is_none_names_those_that_are(file):
    with pytest.raises(UserError, match="data.schema=turn: did you mean turns"):
        load_questions(data(file(line()), schema="turn"), ALL)


def test_answers_beside_other_questions_are_kept_for_what_must_not_know_them(file):
    path = file(line(1, reference=["so"]), line(2, reference="thus"), line(3, reference={"a": 1}), line(4))
    found = [question.reference for question in load_questions(open_data(path), ALL)]
    assert found == [["so"], ["thus"], None, None]
