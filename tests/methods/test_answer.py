"""Text to train on: every turn is the target's own greedy answer, and a run that was stopped goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from methods import answer as module
from methods.answer import answer
from specbench.data.conversations import read
from specbench.models.pairs import load_pair
from specbench.system.errors import UserError
from tests.support.commands import left_alone_while_another_writes
from tests.support.conf import composed
from tests.support.decoding import generate_with_transformers
from tests.support.models import save_pair

pytestmark = pytest.mark.slow

TALKS = [["Hello.", "And then?"], ["One turn."], ["A", "B", "C"], ["x" * 490, "This does not fit."]]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answer")
    save_pair(folder, num_hidden_layers=3)
    rows = []
    for number in range(60):
        turns = TALKS[number % len(TALKS)]
        told = [
            ({"role": "user", "content": t}, {"role": "assistant", "content": f"old {number}"}) for t in turns
        ]
        rows.append({"messages": [message for turn in told for message in turn]})
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(workplace, out, *more: str):
    overrides = [
        f"pair.target={workplace}/target",
        f"pair.tokenizer={workplace}/target",
        "pair.device=cpu",
        f"conversations={workplace}/talk.jsonl",
        f"out={out}",
        "max_new_tokens=8",
        "batch_size=3",
        *more,
    ]
    return composed("answer", *overrides)


def test_a_stop_says_from_where_it_resumes(workplace, tmp_path, monkeypatch):
    """SIGTERM, as a scheduler sends it, like Ctrl-C."""
    cfg, batches = settings(workplace, tmp_path / "new.jsonl", "count=30"), []
    answered = module.answered

    def stopped(*arguments):
        if batches:
            os.kill(os.getpid(), signal.SIGTERM)
        batches.append(answered(*arguments))
        return batches[-1]

    monkeypatch.setattr(module, "answered", stopped)
    with pytest.raises(KeyboardInterrupt, match="resumes from conversation 24"):
        answer(cfg)
    monkeypatch.setattr(module, "answered", answered)
    assert len(list(read(str(answer(cfg))))) == 30


def test_every_turn_is_answered_by_the_target(workplace, tmp_path):
    cfg = settings(workplace, tmp_path / "new.jsonl", "count=30")
    found = list(read(str(answer(cfg))))
    assert len(found) == 30 and {len(messages) for messages in found} == {2, 4, 6}
    pair = load_pair(cfg.pair, 0, with_draft=False)
    for messages in found[:12]:
        for i in range(1, len(messages), 2):
            prompt = pair.prompt_ids(messages[:i])
            room = min(8, pair.context_length - len(prompt))
            ids = generate_with_transformers(pair.target, prompt, room, sorted(pair.stop_ids))
            # Of one that was cut, trainers learn no stop token.
            cut = {} if ids[-1] in pair.stop_ids else {"complete": False}
            assert messages[i] == {"role": "assistant", "content": pair.decode(ids)} | cut


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_answers_of_other_files_at_the_same_path_are_not_mixed(workplace, tmp_path, name):
    """A target that was trained on, or another tokenizer, gives other answers."""
    shutil.copytree(workplace / "target", tmp_path / "target")
    target = [f"pair.target={tmp_path}/target", f"pair.tokenizer={tmp_path}/target"]
    out = tmp_path / "new.jsonl"
    answer(settings(workplace, out, "count=2", *target))
    before = out.read_bytes()
    with (tmp_path / "target" / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(
        UserError, match=r"was begun with (target|tokenizer)_files=\w{16}, not \w{16}: .*another out="
    ):
        answer(settings(workplace, out, "count=4", *target))
    assert out.read_bytes() == before


def test_only_the_likeliest_tokens_are_sampled(workplace, tmp_path):
    """With top_k or top_p low enough, this is the greedy answer at any temperature."""
    greedy = answer(settings(workplace, tmp_path / "greedy.jsonl", "count=8")).read_text()
    for cut in ("top_k=1", "top_p=1e-6"):
        out = tmp_path / f"{cut.partition('=')[0]}.jsonl"
        assert answer(settings(workplace, out, "count=8", "temperature=2.0", cut)).read_text() == greedy
        with pytest.raises(UserError, match=r"top_\w=.* another out="):
            answer(settings(workplace, out, "count=16", "temperature=2.0"))
    sampled = answer(settings(workplace, tmp_path / "all.jsonl", "count=8", "temperature=2.0")).read_text()
    assert sampled != greedy
    with pytest.raises(UserError, match="top_k and top_p are for sampled answers: set temperature above 0"):
        answer(settings(workplace, tmp_path / "none.jsonl", "top_k=1"))


def test_prompts_alone_are_answered(workplace, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(7)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings(workplace, tmp_path / "new.jsonl", f"conversations={tmp_path}/prompts.jsonl")
    found = list(read(str(answer(cfg))))
    assert len(found) == 6 and all(
        messages[-1]["role"] == "assistant" for messages in found
    )  # one is held out


def test_a_file_is_answered_once(workplace, tmp_path, capsys):
    """A second time would bring greedy answers again, among them those that trainers hold out."""
    found = list(read(str(answer(settings(workplace, tmp_path / "new.jsonl", "count=1000")))))
    assert len(found) < 61 and "all but those that are held out" in "".join(capsys.readouterr())


def test_a_stopped_run_goes_on_behind_its_last_whole_line(workplace, tmp_path):
    whole = answer(settings(workplace, tmp_path / "whole.jsonl", "count=30")).read_text()
    part = tmp_path / "part.jsonl"
    answer(settings(workplace, part, "count=24"))
    part.write_text(part.read_text() + '{"messages": [{"ro')
    assert answer(settings(workplace, part, "count=30")).read_text() == whole


def test_a_file_does_not_go_on_with_other_settings(workplace, tmp_path):
    out = answer(settings(workplace, tmp_path / "new.jsonl", "count=8"))
    before = out.read_bytes()
    with pytest.raises(UserError, match="begun with max_new_tokens=.*not 7: give the same settings"):
        answer(settings(workplace, out, "count=16", "max_new_tokens=7"))
    assert out.read_bytes() == before
    out.unlink()
    answer(settings(workplace, out, "count=8", "max_new_tokens=7"))  # it begins anew


def test_nothing_to_do(workplace, tmp_path):
    with pytest.raises(UserError, match="^count .*1.*0"):
        answer(settings(workplace, tmp_path / "new.jsonl", "count=0"))


def test_a_file_of_somebody_else_stays_as_it_is(workplace, tmp_path):
    """Also one that has as many lines as are asked for, and one without a line's end."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"messages": []}\n' * 9 + "my own")
    with pytest.raises(UserError, match="exists without mine.settings.json"):
        answer(settings(workplace, mine, "count=8"))
    assert mine.read_text() == '{"messages": []}\n' * 9 + "my own"


def test_prompts_are_not_answered_into_their_own_file(workplace, tmp_path):
    talk = tmp_path / "talk.jsonl"
    before = (workplace / "talk.jsonl").read_text()
    talk.write_text(before)
    with pytest.raises(UserError, match="is the file of the prompts"):
        answer(settings(workplace, tmp_path / "." / "talk.jsonl", f"conversations={talk}"))
    assert talk.read_text() == before and [path.name for path in tmp_path.iterdir()] == ["talk.jsonl"]


def test_a_file_does_not_go_on_with_other_prompts(workplace, tmp_path):
    talk = tmp_path / "talk.jsonl"
    talk.write_text((workplace / "talk.jsonl").read_text())
    out = answer(settings(workplace, tmp_path / "new.jsonl", "count=8", f"conversations={talk}"))
    talk.write_text(talk.read_text() * 2)
    with pytest.raises(UserError, match="begun with data=sha256:"):
        answer(settings(workplace, out, "count=16", f"conversations={talk}"))


def test_questions_of_the_benchmark_are_not_answered(workplace, tmp_path):
    question = {"question_id": 1, "category": "qa", "turns": ["One turn."]}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    cfg = settings(workplace, tmp_path / "new.jsonl", "count=1000", f"data.path={tmp_path}/q.jsonl")
    talks = [messages[0]["content"] for messages in read(str(answer(cfg)))]
    assert "Hello." in talks and "One turn." not in talks


def test_a_file_that_another_process_writes_is_left_alone(workplace, tmp_path):
    out = tmp_path / "new.jsonl"
    left_alone_while_another_writes(out, lambda: answer(settings(workplace, out)))
