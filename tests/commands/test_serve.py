"""`specbench serve`: what cannot be served is one line, and what is served says what a run says."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from specbench.commands import serve
from specbench.engines.client import is_ready
from specbench.engines.server import free_port
from specbench.engines.standalone.completions import CompletionServer
from specbench.measure.draft_length import Goodput
from specbench.report.runs import read_run
from tests.support.commands import cli, exit_code, wait_for


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["port=0"], "port must be"),
        (["method=ragged", "drafter=sps"], "one answer at a time"),
        (["method=oracle"], "one answer at a time"),
        (["method=sps", "engine=llama_cpp"], "one answer at a time"),
        (["method=spss"], "sps"),
    ],
)
def test_what_cannot_be_served_is_one_line(monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["serve", *words])
    assert exit_code(serve.main) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_one_line(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["serve", "method=pld", f"port={port}"])
        assert exit_code(serve.main) == 2
    assert f"cannot listen on port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_served_is_warmed_up_as_in_a_run_and_has_forgotten_it(monkeypatch, capsys):
    decoders = []
    monkeypatch.setattr(CompletionServer, "run", lambda self, decode: decoders.append((decode, self.url)))
    port = free_port()
    words = ["method=suffix", "method.memory=run", "pair=tiny", "threads=1", f"port={port}"]
    monkeypatch.setattr(sys, "argv", ["serve", *words, "decoding.draft_length=goodput"])
    before = torch.get_num_threads()
    try:
        assert exit_code(serve.main) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    [(decoder, url)] = decoders
    drafter = decoder.arm.__self__.drafter  # of the engine whose rounds it is
    assert drafter.snapshot() == [] and isinstance(drafter.rule, Goodput)
    assert capsys.readouterr().out == f"suffix on tiny at {url}/v1/completions\n"


@contextmanager
def served(*words: str):
    """The URL of a method that is served by a process of its own."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "specbench", "serve", "pair=tiny", "threads=1", f"port={port}", *words]
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: process.poll() is not None or is_ready(url, "/health"))
        assert process.poll() is None
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.mark.nightly
@pytest.mark.process
def test_our_own_engine_agrees_with_itself(tmp_path):
    """As a server in another process: the same ids, and the same acceptance."""
    words = ("method=sps", "pair=tiny", "threads=1", "data.limit=1", "remeasure=0", "generate=false")

    def summary(*more: str) -> dict:
        done = cli(tmp_path, *words, *more)
        assert done.returncode == 0, done.stderr
        return read_run(Path(tmp_path, done.stdout.splitlines()[-1])).summary

    here = summary()
    with served("method=ar") as plain, served("method=sps") as speculative:
        there = summary("engine=openai", f"engine.plain_url={plain}", f"engine.speculative_url={speculative}")
    assert there["equivalence"]["exact"] == there["equivalence"]["answers"] == 7
    assert there["baseline"]["equivalence"]["exact"] == there["engine"]["again_equivalence"]["exact"] == 7
    for name in ("acceptance_length", "acceptance_rate"):
        assert there["overall"][name] == pytest.approx(here["overall"][name])
