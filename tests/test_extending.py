"""What CONTRIBUTING and the docs promise: methods, pairs, a task and data, written by their letter, pass the tests.

They are added to a copy of the checkout, and every test that takes one of their names is run there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbench import ROOT
from specbench.report.runs import finished_runs
from tests.faults.runner import EVERY

pytestmark = [pytest.mark.slow, pytest.mark.process]

# What a test needs of a checkout.
COPIED = ("conf", "docs", "hydra_plugins", "methods", "notebooks", "specbench", "tests")
# By the letter of CONTRIBUTING; methods, a pair without shapes and a task are the examples of the docs.
LLAMA = "model_type: llama, vocab_size: 32000, max_position_embeddings: 4096"
ADDED = {
    "conf/pair/shaped-new.yaml": f"""
defaults: [_base, _self_]
name: shaped-new
target: someone/Shaped-3B
draft: someone/Shaped-68M
target_shape: {{{LLAMA}, hidden_size: 3072, intermediate_size: 8192, num_hidden_layers: 28, num_attention_heads: 24,
  num_key_value_heads: 8}}
draft_shape: {{{LLAMA}, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 2, num_attention_heads: 12,
  num_key_value_heads: 12}}
""",
    "conf/pair/of-the-hub-new.yaml": """
defaults: [_base, _self_]
name: of-the-hub-new
target: someone/Target-1B
""",
    "conf/data/data-new.yaml": (ROOT / "conf" / "data" / "tiny.yaml")
    .read_text(encoding="utf-8")
    .replace("name: tiny", "name: data-new"),
    "conf/search/bigram.yaml": "method:\n  max_draft_tokens: {low: 1, high: 6}\n",
}
# Tests that walk a whole group at once.
WHOLE = (
    "test_data_sets_have_the_same_keys",
    "test_every_claim_names_what_there_is",
    "test_every_entry_point",
)
# A walk as it should not be: what it knows of a pair stands in a list of names.
LISTING = """
import pytest

from tests.support.conf import names

LAYERS = {"tiny": 24, "vicuna-7b": 32}


@pytest.mark.parametrize("pair", [name for name in names("pair") if name in LAYERS or name.endswith("-new")])
def test_layers(pair):
    assert LAYERS[pair]
"""


EXAMPLE = re.compile(r"^`((?:methods|conf)/[\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """By path, the content of every example of a module or a YAML in the docs, but those with a trainer."""
    lookups, cached, on_states, *choices = (
        (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for page in ("adding-a-method", "drafting-models", "drafting-layers", "own-models", "questions")
    )
    found = EXAMPLE.findall(lookups + cached + on_states)
    for content in re.findall(r"^```yaml\n(.*?)^```", "".join(choices), flags=re.MULTILINE | re.DOTALL):
        group = "task" if "\ntasks:" in content else "pair"
        [name] = re.findall(r"^name: (\S+)", content, flags=re.MULTILINE)
        found.append((f"conf/{group}/{name}.yaml", content))
    return dict(found)


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the checkout with what was added."""
    copy = tmp_path_factory.mktemp("extended") / "checkout"
    for folder in COPIED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    for path, content in (examples() | ADDED).items():
        assert not (copy / path).exists(), f"{path} would be replaced"
        (copy / path).write_text(content, encoding="utf-8")
    return copy


def run(copy: Path, chosen: str, *paths: str) -> tuple[str, dict[str, int]]:
    """The output of the tests with some words in their names, and how many there were of each outcome."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--assert=plain",
        "--tb=short",
        "--ignore=tests/test_extending.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", EVERY, "-k", chosen, *paths],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    last = done.stdout.rstrip().rpartition("\n")[2]
    return done.stdout + done.stderr, {how: int(n) for n, how in re.findall(r"(\d+) (\w+)", last)}


def test_what_is_added_by_the_letter_passes_every_test(extended):
    assert {Path(path).stem for path in examples()} == {
        "bigram",
        "bigram_tree",
        "early_exit",
        "on_states",
        "my-pair",
        "code",
    }
    names = {Path(path).stem for path in examples() | ADDED}
    # A name begins a test's parameters, or follows another one.
    parameters = [f"{before}{name}" for name in sorted(names) for before in "[-"]
    output, counts = run(extended, " or ".join([*parameters, *WHOLE]))
    assert counts.get("passed", 0) >= 40 and not {"failed", "error", "errors"} & counts.keys(), output


def test_a_part_is_trained_and_drafts_by_the_letter(extended, tmp_path):
    """In a copy of its own: tests of every method want a part of the embedded pair, and get it in the end."""
    page = (ROOT / "docs" / "training-a-part.md").read_text(encoding="utf-8")
    found = dict(EXAMPLE.findall(page))
    assert len(found) == 5
    copy = tmp_path / "checkout"
    shutil.copytree(extended, copy)
    for path, content in found.items():
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text(content, encoding="utf-8")

    def specbench(*words: str) -> str:
        command = [sys.executable, "-m", "specbench", *words]
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    few = ["steps=100", "length=256", "batch_size=4", "save_every=100"]
    specbench("train", "ahead", "pair=tiny_shallow", *few, "out=ahead")
    short = ["data.limit=1", "decoding.max_new_tokens=24", "threads=1", "generate=false", "remeasure=0"]
    for more in ("method=ahead", "method=ahead decoding=sample", "method=ragged drafter=ahead batch_size=3"):
        words = [*more.split(), "pair=tiny_shallow", "pair.parts.ahead=ahead", "runs_root=runs", *short]
        specbench("run", *words)
    runs, left_out = finished_runs([tmp_path / "runs"])
    assert len(runs) == 3 and not left_out
    for one in runs:
        answers = one.summary["equivalence"]
        judged = answers["exact"] if one.summary["temperature"] == 0 else answers["answers"]
        assert judged == answers["answers"] and not answers["violation"], one.name
        assert (
            one.summary["overall"]["acceptance_length"] > 1.08
            and one.summary["training"]["weights"]["steps"] == 100
        )
    with (copy / "conf" / "pair" / "tiny_shallow.yaml").open("a", encoding="utf-8") as pair:
        pair.write(f"  ahead: {tmp_path / 'ahead'}\n")
    output, counts = run(copy, "[ahead", "tests/test_conformance.py")
    assert counts.get("passed", 0) >= 8 and not {"failed", "error", "errors"} & counts.keys(), output


def test_a_list_of_names_in_a_test_is_found(extended):
    listing = extended / "tests" / "test_listing.py"
    listing.write_text(LISTING)
    output, counts = run(extended, "test_layers", "tests/test_listing.py")
    listing.unlink()
    assert counts.get("failed") == 2 and counts.get("passed") == 2, output
    assert "KeyError: 'shaped-new'" in output
