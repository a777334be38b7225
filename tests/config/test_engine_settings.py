"""Settings of a method that nothing of another engine reads are refused: a sweep over them would measure one thing."""

from __future__ import annotations

import pytest

from specbench.config import checks
from specbench.config.engine_settings import READ
from specbench.config.folders import group_file
from specbench.system.errors import UserError
from tests.support.conf import composed
from tests.support.messages import says


def checked(*words: str) -> None:
    checks.check(composed("bench", "pair=tiny", *words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["method=pld", "engine=llama_cpp", "method.min_ngram=2"],
            "llama_cpp does not read method.min_ngram: of pld it reads max_draft_tokens, max_ngram; ... .pld",
        ),
        (
            ["method=pld", "engine=llama_cpp", "method.match=earliest"],  # `latest` is tuned
            "method.match: of pld it reads max_draft_tokens, max_ngram;",
        ),
        (
            ["method=sps", "engine=openvino", "method.confidence_threshold=0.4"],
            "method.confidence_threshold: of sps it reads max_draft_tokens;",
        ),
        (
            ["method=eagle3", "engine=vllm", "method.max_draft_tokens=3"],
            "method.max_draft_tokens: of eagle3 it reads weights;",
        ),
        (
            ["method=medusa", "engine=vllm", "method.nodes=9"],
            "vllm does not read method.nodes: of medusa it reads no setting;",
        ),
        (
            ["method=sps", "engine=openai", "method.max_draft_tokens=3"],
            "openai does not read method.max_draft_tokens: of sps it reads no setting;",
        ),
        (
            ["method=ragged", "drafter=pld", "engine=llama_cpp", "drafter.min_ngram=2"],
            "drafter.min_ngram: of pld it reads max_draft_tokens, max_ngram;",
        ),
        (
            ["method=exspec", "drafter=sps", "engine=llama_cpp", "method.window=8"],
            "method.window: of exspec it reads no setting;",
        ),
        (
            ["method=exspec", "drafter=suffix", "engine=vllm", "method.window=8"],
            "method.window: of exspec it reads no setting;",
        ),
        (
            ["method=suffix", "engine=llama_cpp", "+engine.speculative.suffix={n: 1}", "method.factor=3"],
            "method.factor: of suffix it reads no setting;",
        ),
        (  # what a run sets in place of the preset reads nothing
            [
                "method=pld",
                "engine=vllm",
                "engine.speculative.pld.num_speculative_tokens=5",
                "method.max_draft_tokens=3",
            ],
            "method.max_draft_tokens: of pld it reads ",
        ),
    ],
)
def test_settings_that_an_engine_does_not_read_are_refused(words, said):
    with pytest.raises(UserError) as raised:
        checked(*words)
    assert says(str(raised.value), said) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        ["method=sps", "engine=llama_cpp", "method.max_draft_tokens=3", "method.confidence_threshold=0.4"],
        ["method=pld", "engine=vllm", "method.min_ngram=2", "method.max_ngram=4"],
        ["method=ragged", "drafter=sps", "engine=openvino", "drafter.max_draft_tokens=3"],
        ["method=suffix", "engine=vllm", "method.factor=2", "method.max_match=8"],
        ["method=ragged", "drafter=samd", "engine=vllm"],
        ["method=pld", "engine=llama_cpp", "settings=published"],
        ["method=pld", "engine=llama_cpp", "settings=published", "method.match=earliest"],
        ["method=pld", "engine=llama_cpp", "settings=tuned"],  # `match`, which it does not read
        ["method=eagle3", "engine=vllm"],
        ["method=medusa", "engine=vllm"],
    ],
)
def test_what_it_reads_and_what_nobody_changed_is_taken(words):
    checked(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine=llama_cpp", "engine.plain=null"], "engine.plain must be a dictionary, not null"),
        (
            ["engine=vllm", "engine.start_seconds=2m"],
            "engine.start_seconds must be a number above 0, not '2m'",
        ),
        (
            ["engine=llama_cpp", "engine.speculative=null"],
            "engine.speculative must be a dictionary, not null",
        ),
        (["engine=vllm", "engine.speculative=null"], "engine.speculative must be a dictionary, not null"),
        (
            ["engine=vllm", "engine.speculative.sps=null"],
            "engine.speculative.sps must be a dictionary, not null",
        ),
        (
            ["engine=llama_cpp", "engine.speculative.sps=true"],
            "engine.speculative.sps must be a dictionary, not True",
        ),
        (["engine=llama_cpp", "engine.speculative=5"], "engine.speculative must be a dictionary, not 5"),
        (["engine=openai", "engine.plain_url=8000"], "engine.plain_url must be text or null, not 8000"),
        (["engine=openvino", "+engine.threads=2"], "engine openvino has no parameter 'threads'"),
    ],
)
def test_a_setting_of_another_type_than_the_engines_own_is_refused(words, said):
    with pytest.raises(UserError) as raised:
        checked("method=sps", *words)
    assert str(raised.value).startswith(said)


def test_servers_of_somebody_else_may_draft_in_an_unknown_way_and_have_a_number_as_version():
    checked("method=sps", "engine=openai", "engine.version=0.32")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pair.target_shape=5", "pair.target_shape must be a dictionary or null, not 5"),
        ("pair.template_kwargs=5", "pair.template_kwargs must be a dictionary, not 5"),
        ("pair.chat_template=5", "pair.chat_template must be text or null, not 5"),
    ],
)
def test_a_setting_of_a_pair_of_another_type_is_refused(word, message):
    with pytest.raises(UserError, match=message):
        checked("method=pld", word)


def test_types_that_a_drafter_imports_for_the_type_checker_alone_are_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checked_alone.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from specbench.decoding.drafter import Drafter\n"
        "if TYPE_CHECKING:\n    from specbench.models.pairs import Pair\n"
        "class Mine(Drafter):\n    def __init__(self, pair: Pair): ...\n"
    )
    with pytest.raises(
        UserError, match="method .*name 'Pair' is not defined, .*import it outside of `if TYPE"
    ):
        checked("method=pld", "method._target_=checked_alone.Mine")


def test_a_preset_of_the_users_own(monkeypatch, tmp_path):
    (tmp_path / "conf/engine").mkdir(parents=True)
    preset = 'name: mine\nspeculative: {sps: {n: "${method.max_draft_tokens}"}}\n'
    (tmp_path / "conf/engine/mine.yaml").write_text(preset)
    monkeypatch.chdir(tmp_path)
    assert group_file("engine", "mine")["name"] == "mine" and group_file("engine", "none") == {}
    assert READ.findall(str(group_file("engine", "mine"))) == ["max_draft_tokens"]
