"""Memory that is warmed elsewhere: what it makes a drafter draft, when it comes back, what is refused, losslessness."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from methods.common.suffix_automaton import SuffixAutomaton
from methods.ragged import RaggedBatch
from methods.recycling import TokenRecycling
from methods.samd import SAMDecoding
from methods.suffix import SuffixDecoding
from specbench.config.checks import check
from specbench.data.conversations import tokenizer_of
from specbench.data.warm_start import warm_answers, warm_record, warm_texts
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.conf import composed

TALKS = [
    [
        "Who sails at dawn?",
        "Let me explain. The old man sails at dawn.",
        "Where?",
        "In short, to the far town.",
    ],
    ["Who sleeps?", "Let me explain. We know that the old town sleeps."],
    ["Say nothing."],
]
ASKED = "Does the old man sail at dawn, or to the far island?"
RECYCLING = {"_target_": "methods.recycling.TokenRecycling", "name": "recycling", "nodes": 40}
DRAFTERS = {
    "recycling": lambda pair, **memory: TokenRecycling(pair, 40, **memory),
    "suffix": lambda pair, **memory: SuffixDecoding(pair, min_probability=0.0, **memory),
    "samd": lambda pair, **memory: SAMDecoding(pair, RECYCLING, "recycling", threshold=90, **memory),
}
EVERY_DRAFTER = pytest.mark.parametrize("name", DRAFTERS)


def messages(talk: list[str]) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]


def written(path, talks) -> str:
    path.write_text("".join(json.dumps({"messages": messages(talk)}) + "\n" for talk in talks))
    return str(path)


@pytest.fixture(scope="module")
def pair():
    return load_pair(composed("bench", "pair=tiny", "pair.device=cpu").pair, 0, with_draft=False)


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("warm") / "talk.jsonl", TALKS)


def said(pair, text: str) -> list[int]:
    (stop,) = pair.stop_ids
    return [*pair.tokenizer.encode(text, add_special_tokens=False), stop]


def requests(pair, *texts: str, new: int = 12) -> list[Request]:
    return [Request(pair.prompt_ids(messages([text])), SamplingParams(new)) for text in texts]


def drafts(pair, drafter: Drafter, text: str = ASKED) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of the drafts of every round after a prompt."""
    found, real = [], drafter.draft

    def noted(batch):
        draft = real(batch)
        tree = None if draft.tree is None else draft.tree.parents[0].tolist()
        found.append((draft.tokens[0].tolist(), tree))
        return draft

    drafter.draft = noted
    Engine(StagedModel(pair.target), drafter, frozenset()).generate(requests(pair, text))
    drafter.draft = real
    return found


def with_history(pair, name: str) -> Drafter:
    """A drafter that has lived through the conversations of the file."""
    drafter = DRAFTERS[name](pair, memory="run")
    if name == "suffix":
        drafter.restore([said(pair, text) for talk in TALKS for text in talk[1::2]])
        return drafter
    engine = Engine(StagedModel(pair.target), drafter, frozenset())
    for talk in TALKS:
        for ids, _ in tokenizer_of(pair)(messages(talk)):
            engine.answer(ids, SamplingParams(1))  # no round: the prompt alone is learnt
    return drafter


@pytest.mark.one_in(3)
@pytest.mark.slow
@EVERY_DRAFTER
@pytest.mark.parametrize("memory", ["answer", "run"])
def test_the_first_draft_is_that_of_an_equal_history(pair, warm, name, memory):
    warmed = drafts(pair, DRAFTERS[name](pair, memory=memory, warm=warm))
    assert warmed[0] == drafts(pair, with_history(pair, name))[0]
    assert warmed[0] != drafts(pair, DRAFTERS[name](pair))[0], "the file must matter"


@pytest.mark.slow
@EVERY_DRAFTER
def test_with_memory_of_one_answer_each_begins_warmed(pair, warm, name):
    drafter = DRAFTERS[name](pair, warm=warm)
    first = drafts(pair, drafter)
    drafts(pair, drafter, "Something else.")
    assert drafts(pair, drafter) == first
    drafter.forget()
    assert drafts(pair, drafter) == first


@pytest.mark.slow
@EVERY_DRAFTER
def test_with_memory_of_the_run_it_goes_on_and_comes_back(pair, warm, name):
    drafter = DRAFTERS[name](pair, memory="run", warm=warm)
    first = drafts(pair, drafter)
    before = drafter.snapshot()
    second = drafts(pair, drafter)
    assert second != first, "the first answer is known by now"
    drafter.restore(before)  # as before every repeat
    assert drafts(pair, drafter) == second
    drafter.forget()  # as after the warm-up and before every pass
    assert drafts(pair, drafter) == first == drafts(pair, DRAFTERS[name](pair, warm=warm))


@pytest.fixture(scope="module")
def plain(pair) -> tuple[list[Request], list[list[int]]]:
    """Some requests, and what the target says to them."""
    asked = requests(pair, ASKED, "Who?", TALKS[0][0], "The old man sails", ASKED)
    answers = Engine(StagedModel(pair.target), Drafter(), pair.stop_ids).generate(asked)
    return asked, [answer.tokens for answer in answers]


@pytest.mark.slow
@pytest.mark.one_in(5)
@EVERY_DRAFTER
@pytest.mark.parametrize("memory", ["answer", "run"])
@pytest.mark.parametrize("size", [1, 3])
def test_lossless(pair, warm, plain, name, memory, size):
    (asked, expected), target = plain, StagedModel(pair.target)
    drafter = DRAFTERS[name](pair, memory=memory, warm=warm)
    engine = Engine(target, drafter, pair.stop_ids, RaggedBatch(size))
    for _ in range(2):
        answers = engine.generate(asked)
        assert [answer.tokens for answer in answers] == expected
    assert any(step.accepted for answer in answers for step in answer.steps)


def test_what_is_read_are_conversations_and_their_answers(pair, warm):
    answers = [said(pair, text) for talk in TALKS for text in talk[1::2]]
    assert len(answers) == 3 and list(warm_answers(warm, pair)) == answers
    texts = list(warm_texts(warm, pair))
    assert texts == [ids for talk in TALKS for ids, _ in tokenizer_of(pair)(messages(talk))] and all(texts)
    record = warm_record({"warm": warm}, pair)["warm"]
    rows = [ids for talk in TALKS for ids, _ in tokenizer_of(pair)(messages(talk))]
    assert record["tokens"] == sum(map(len, rows)) and record["data"].startswith("sha256:")
    assert warm_record({"name": "samd", "drafter": {"warm": warm}}, pair)["warm"] == record
    assert warm_record({"name": "recycling", "warm": None}, pair) == {}


def test_a_copied_automaton_grows_apart():
    first = SuffixAutomaton(8)
    first.add([1, 2, 3, 1, 2])
    second = first.copy()
    known = vars(first).copy(), [behind.copy() for behind in first.following], [*first.occurrences]
    second.add([1, 2, 3, 4])
    assert (vars(first), first.following, first.occurrences) == known
    whole = SuffixAutomaton(8)
    for text in ([1, 2, 3, 1, 2], [1, 2, 3, 4]):
        whole.add(text)
    assert vars(second) == vars(whole)


# -- what is refused


@pytest.fixture
def asked(tmp_path):
    question = {
        "question_id": 1,
        "category": "qa",
        "turns": ["What is the name of the old man by the sea?"],
        "reference": ["He is called Santiago, and he lives in a small village."],
    }
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    return question


def checked(tmp_path, talks, *more: str) -> None:
    more = more or ("method=recycling",)
    what = "drafter" if any(one.startswith("drafter=") for one in more) else "method"
    file = written(tmp_path / "talk.jsonl", talks)
    cfg = composed(
        "bench",
        "pair=tiny",
        f"data.path={tmp_path}/q.jsonl",
        "data.sha256=null",
        *more,
        f"{what}.warm={file}",
    )
    check(OmegaConf.create(OmegaConf.to_container(cfg)))


GROUPS = [
    ("method=recycling",),
    ("method=suffix",),
    ("method=samd", "method.auxiliary=recycling"),
    ("method=ragged", "drafter=recycling"),
]


@pytest.mark.first_fast
@pytest.mark.parametrize("group", GROUPS)
def test_a_file_that_holds_what_is_measured_is_refused(tmp_path, asked, group):
    checked(tmp_path, TALKS, *group)
    for leak in (asked["turns"][0], f"Well: {asked['reference'][0]}"):
        with pytest.raises(UserError, match="conversation 2 of .*talk.jsonl holds a measured") as told:
            checked(tmp_path, [TALKS[0], ["Tell me.", leak]], *group)
        assert "\n" not in str(told.value)


def test_what_cannot_be_warmed_is_refused(tmp_path, asked):
    for group in (("method=samd",), ("method=samd", "method.auxiliary=sps")):
        with pytest.raises(UserError, match="keeps nothing between answers"):
            checked(tmp_path, TALKS, *group)
    with pytest.raises(UserError, match="keeps nothing between answers"):
        check(composed("bench", "pair=tiny", "method=samd", "method.memory=run"))
    with pytest.raises(UserError, match=r"there is no file 'nowhere\.jsonl'"):
        check(composed("bench", "pair=tiny", "method=suffix", "method.warm=nowhere.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"text": "no conversation"}\n')
    with pytest.raises(UserError, match="line 1: not a conversation"):
        check(composed("bench", "pair=tiny", "method=suffix", f"method.warm={tmp_path}/other.jsonl"))
