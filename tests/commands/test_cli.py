"""The console command: what each subcommand calls, its help, and how fast bad input is answered."""

import os
import re
import signal
import subprocess
import sys

import pytest

from specbench import __version__
from specbench.commands import cli, export
from specbench.config import checks
from specbench.system.errors import UserError
from tests.support.commands import exit_code

HEAVY = (
    *("torch", "transformers", "pandas", "pyarrow", "matplotlib", "scipy", "hydra", "accelerate"),
    *("datasets", "huggingface_hub", "wandb"),
)
# What any command refuses that loads a target, and any that reads conversations.
OF_PAIRS = (
    "pair=tinny",
    "unknown_key=3",
    "pair.target=/nowhere",
    "pair.tokenizer=/nowhere",
    "pair.dtype=float31",
)
NAMES_NOTHING = (*OF_PAIRS, "conversations=/nowhere.jsonl", "pair=qwen3-8b")


def imported_by(code: str) -> set[str]:
    """Which heavy packages are imported once `code` has run, in a process of its own."""
    tell = f"import sys\n{code}\nprint('imported:', *(name for name in {HEAVY} if name in sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", tell], capture_output=True, text=True, timeout=300, check=True
    )
    return set(said.stdout.splitlines()[-1].split()[1:])


@pytest.fixture
def called(monkeypatch):
    """What a command would have run: (module, arguments). Its main returns 3."""
    found = []

    def take(module: str):
        class Module:
            @staticmethod
            def main() -> int:
                found.append((module, sys.argv[1:]))
                return 3

        return Module

    monkeypatch.setattr(checks, "check_command", lambda *_: None)  # Hydra imports modules, too
    monkeypatch.setattr(cli.importlib, "import_module", take)
    monkeypatch.setattr(sys, "argv", ["specbench"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return found


@pytest.mark.parametrize(
    ("words", "module", "passed"),
    [
        ("run method=pld", "specbench.commands.run", ["method=pld"]),
        ("sweep method=pld,sps", "specbench.commands.run", ["-m", "method=pld,sps"]),
        ("tune trials=3", "specbench.commands.tune", ["trials=3"]),
        ("report runs/A", "specbench.report.__main__", ["runs/A"]),
        ("compare A B --json", "specbench.report.__main__", ["compare", "A", "B", "--json"]),
        ("claims runs", "specbench.report.__main__", ["claims", "runs"]),
        ("log A", "specbench.commands.log", ["log", "A"]),
        ("train s2d steps=3", "methods.s2d.train", ["steps=3"]),
        ("answer count=3", "methods.answer", ["count=3"]),
        ("calibrate source=raw_text", "methods.vocab_trim.calibrate", ["source=raw_text"]),
        ("states taps=[2,-1]", "methods.states", ["taps=[2,-1]"]),
        ("parts steps=3", "methods.parts", ["steps=3"]),
    ],
)
def test_a_command_runs_its_module_and_returns_its_exit_code(called, words, module, passed):
    assert cli.run(words.split()) == 3
    assert called == [(module, passed)]


@pytest.mark.parametrize("command", ["report", "compare A B", "audit answers.jsonl"])
def test_ctrl_c_is_one_line_also_while_modules_are_imported(called, monkeypatch, capsys, command):
    def stop(_module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", stop)
    sys.argv[1:] = command.split()
    assert exit_code(cli.main) == 130
    assert capsys.readouterr().err == "\nstopped\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_module_with_a_main_function(name):
    import importlib

    for trainer in cli.trainers() if name == "train" else [""]:
        module = importlib.import_module(cli.COMMANDS[name].module.format(name=trainer))
        assert callable(module.main)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_examples_and_calls_nothing(called, capsys, name):
    assert cli.run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: specbench {name} ") and f"  specbench {name} " in text
    assert not called


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("converse", ["tokens: 2000000 ", "question_tokens: 128 ", "  chat:"]),
        ("train", ["steps: 400 ", "length: 512 "]),
        ("train kangaroo", ["exit_layer: 2\n", "learning_rate: 3.0e-3 ", "steps: 400 ", "length: 512 "]),
        ("audit", ["tolerance: null "]),
        ("serve", ["port: 8000 "]),
        (
            "run",
            [
                "precision: null ",
                "  engine=     llama_cpp, ",
                "  pair=       glm-4-9b, ",
                "  task=       all, ",
            ],
        ),
        ("tune", ["  drafter=    ar, "]),
    ],
)
def test_help_shows_keys_and_defaults(called, capsys, words, shown):
    assert cli.run([*words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{line}" in text for line in shown)
    assert not any(f"\n{block}:" in text for block in ("defaults", "hydra"))


@pytest.mark.parametrize("trainer", cli.trainers())
def test_help_of_a_trainer_shows_each_key_once(capsys, trainer):
    assert cli.run(["train", trainer, "--help"]) == 0
    keys = re.findall(r"^(\w+): ", capsys.readouterr().out.partition("keys and defaults")[2], re.MULTILINE)
    assert {"conversations", "out"} <= set(keys) and len(keys) == len(set(keys))


def test_help_of_all_and_version(capsys):
    assert cli.run([]) == 0 and cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(text.count(command.purpose) == 2 for command in cli.COMMANDS.values())
    assert cli.run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("rum", "run"),
        ("bench", r"unknown command 'bench': did you mean run\?"),
        ("train kangaro", "kangaroo"),
        ("train", "name a trainer: .*sps"),
        ("train pair=tiny", "name a trainer: .*sps"),
    ],
)
def test_an_unknown_name_is_told_with_near_ones(called, words, right):
    with pytest.raises(UserError, match=right):
        cli.run(words.split())
    assert not called


@pytest.mark.process
def test_help_imports_nothing_heavy():
    asked = [[name, "--help"] for name in cli.COMMANDS]
    assert imported_by(f"from specbench.commands import cli\nfor words in {asked}: cli.run(words)") == set()


@pytest.mark.process
@pytest.mark.parametrize(
    ("inputs", "allowed"),
    [
        (["run method=kangarooo", "run decoding.max_new_tokenz=3", "run seed=x"], {"hydra"}),
        ([f"train {name} pair=tinny" for name in cli.trainers()], {"hydra"}),
        ([f"{name} {words}" for name in ("train eagle", "lengthen") for words in NAMES_NOTHING], {"hydra"}),
        (
            [
                *(f"converse {words}" for words in (*OF_PAIRS, "tokens=x", "data.path=/nowhere")),
                *("answer pair=tinny", "answer conversations=/nowhere.jsonl", "calibrate soorce=raw_text"),
                *("export gguf pair.target=/nowhere", "fetch tinny", "fetch tiny pair.target=/nowhere"),
                *("tune method=kangarooo", "tune trials=x"),
            ],
            {"hydra"},
        ),
        ([f"audit x.jsonl {words}" for words in (*OF_PAIRS, "pair=tiny")], {"hydra", "pandas", "pyarrow"}),
        (
            [
                "run method=mirror_sd method.max_draft_tokens=x",
                "run method=kangaroo method.exit_layer=x",
                "run method=ragged drafter=s2d pair.target=/nowhere",
                *(f"train {name} steps=x" for name in cli.trainers()),
            ],
            {"hydra", "torch", "huggingface_hub"},
        ),
    ],
)
def test_bad_input_is_answered_before_more_is_imported(inputs, allowed):
    """Each of pandas, transformers, accelerate and scipy takes a second or more to import."""
    code = f"""
from specbench.commands import cli
for words in {inputs}:
    sys.argv = ["specbench", *words.split()]
    try:
        code = cli.main()
    except SystemExit as leave:
        code = leave.code
    assert code == 2, words
"""
    assert imported_by(code) <= allowed


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("audit x.jsonl task=all", "task"),
        ("audit x.jsonl decoding=greedy task=qa", "decoding"),
        ("fetch tiny method=sps", "method"),
        ("export gguf data=spec_bench", "data"),
        ("run methud=sps task=qa", "methud"),
    ],
)
def test_a_group_that_a_command_has_not_is_one_line(monkeypatch, capsys, words, key):
    monkeypatch.setattr(sys, "argv", ["specbench", *words.split()])
    assert exit_code(cli.main) == 2
    assert f"error: unknown key '{key}': " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "has_method"), [("part method=pld", True), ("gguf", False), ("folder out=part", False)]
)
def test_a_part_is_exported_with_the_settings_of_a_run(monkeypatch, words, has_method):
    seen = []
    monkeypatch.setattr(export, "export", seen.append)
    monkeypatch.setattr(sys, "argv", ["export", *words.split(), "pair=tiny"])
    assert exit_code(export.main) == 0
    (cfg,) = seen
    assert (cfg.form, "method" in cfg) == (words.split()[0], has_method)


def test_a_reader_that_has_seen_enough_is_no_error():
    """As in `specbench --help | head -1`, whose pipe is closed before all is written."""
    command = "import sys; sys.argv = ['specbench', '--help']; from specbench.commands import cli; sys.exit(cli.main())"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-c", command], stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_broken_pipe_of_a_worker_is_no_reader_that_has_seen_enough(monkeypatch):
    def broken(_: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "run", broken)
    with pytest.raises(BrokenPipeError):
        cli.main()
