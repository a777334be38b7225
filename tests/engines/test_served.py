"""Servers as arms: they fail, are started again, wait for one another, and none is left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from specbench import WAITING
from specbench.decoding.engine import exhaust
from specbench.engines import client
from specbench.engines import served as module
from specbench.engines import server as module_server
from specbench.engines.openai import OpenAI
from specbench.engines.served import PLAIN, SPECULATIVE
from specbench.engines.server import _pin, own_environment
from specbench.system.errors import JobError, UserError
from tests.support.commands import wait_for
from tests.support.engine_stub import Stub, counting, serving
from tests.support.served import (
    NEW,
    PROMPT,
    SCRIPT,
    SILENT,
    engine_of,
    process_engine,
    request,
)


@pytest.mark.parametrize("fault", ["refuses", "hangs", "cuts", "half"])
def test_a_server_of_somebody_else_that_fails_costs_its_question(pair, fault):
    """Asked once more; the run ends when it has failed too often."""
    stub = Stub(counting, drafts=True, fault=fault, after=3)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "llama_cpp", SILENT)
        engine.open([request()])
        exhaust(engine.speculative([request()]))
        for _ in range(1 + module.RESTARTS):
            with pytest.raises(UserError, match="speculative server failed twice") as raised:
                exhaust(engine.speculative([request()]))
            assert not isinstance(raised.value, JobError)
        assert len(engine.faults) == 2 * (1 + module.RESTARTS)
        with pytest.raises(JobError, match="speculative server failed"):
            exhaust(engine.speculative([request()]))


def test_a_server_of_somebody_else_that_is_gone_ends_the_run(pair):
    stub = Stub(counting, drafts=True, fault="leaves", after=2)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        engine.open([request()])
        with pytest.raises(JobError, match="speculative server failed"):
            exhaust(engine.speculative([request()]))
    assert len(engine.faults) == 1


@pytest.mark.process
@pytest.mark.parametrize("fault", ["dies", "hangs", "refuses"])
def test_a_server_of_ours_that_fails_is_started_again_once(pair, fault):
    engine = process_engine(pair, {"fault": fault, "after": 3}, SILENT)
    try:
        engine.open([request()])
        answers = [exhaust(engine.speculative([request()]))[0].tokens for _ in range(2)]
        assert answers == [counting(PROMPT, NEW)] * 2
        assert engine.servers[SPECULATIVE].starts == 2 and engine.servers[PLAIN].starts == 1
        [told] = engine.faults
        assert told.startswith("speculative: ") and ("; it ended with 3: " in told) == (fault == "dies")
    finally:
        engine.close()


@pytest.mark.process
def test_a_server_that_fails_at_once_again_costs_its_question(pair, tmp_path):
    engine = process_engine(pair, {"fault": "refuses", "after": 2, "marker": str(tmp_path / "started")})
    try:
        engine.open([request()])
        with pytest.raises(UserError, match="failed twice: .*500") as raised:
            exhaust(engine.speculative([request()]))
        assert not isinstance(raised.value, JobError)  # other questions may fare better
        assert len(engine.faults) == 2
    finally:
        engine.close()


@pytest.mark.process
def test_a_server_that_does_not_start_says_why(pair):
    with pytest.raises(UserError, match=r"ended with 4: no such model"):
        process_engine(pair, {"fails": True}).open([request()])
    with pytest.raises(UserError, match=r"ended with SIGFPE: it printed nothing"):
        process_engine(pair, {"crashes": True}).open([request()])
    slow = process_engine(pair, loads=30.0)
    slow.servers[PLAIN].seconds = 0.5
    with pytest.raises(UserError, match="not ready after"):
        slow.open([request()])


@pytest.mark.process
def test_servers_are_waited_for_and_none_is_left_behind(pair):
    engine = process_engine(pair, {"loads": 0.5, "helper": True})
    engine.open([request()])
    started = [one for server in engine.servers.values() for one in family(server._process.pid)]
    assert len(started) == 5  # a supervisor and a server each, and a helper
    assert all(alive(one) for one in started)
    engine.close()
    assert not any(alive(one) for one in started)
    engine.close()  # once more does no harm


def family(number: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    parent = psutil.Process(number)
    return [parent, *parent.children(recursive=True)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.process
def test_a_killed_run_leaves_no_server(tmp_path):
    words = json.dumps({"helper": True})
    script = (
        "import sys, time; from specbench.engines.server import Server, wait_for\n"
        f"s = Server('plain', '', lambda port: [sys.executable, {str(SCRIPT)!r}, str(port), {words!r}])\n"
        "s.start(); wait_for([s]); print(s._process.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    started = family(int(parent.stdout.readline()))
    assert len(started) == 3
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(map(alive, started)))


def test_a_restart_is_no_time_of_a_batch_and_costs_one_of_the_restarts(pair, monkeypatch):
    def failing(engine, name, request, several):
        asked.append(name)
        if len(asked) == 2:  # the second of two, while the first is answered
            engine.servers[name].starts += 1
            time.sleep(0.3)
        return real(engine, name, request, several)

    asked, real = [], module.ServedEngine._answer
    with serving(Stub(counting), Stub(counting, drafts=True)) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        engine.batch_size = 2
        engine.open([request()])
        monkeypatch.setattr(module.ServedEngine, "_answer", failing)
        answers = exhaust(engine.speculative([request(), request()]))
    assert len(asked) == 4 and sum(answer.seconds for answer in answers) < 0.3


@pytest.mark.process
def test_a_process_that_ends_while_cores_are_given_is_left_alone(monkeypatch):
    """As those that an engine compiles with."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    of_ended = psutil.Process(ended.pid)
    ended.wait()
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [of_ended])
    try:
        _pin(running, [core])
        assert os.sched_getaffinity(running.pid) == {core}
    finally:
        running.kill()
        running.wait()


def test_a_url_that_is_a_number_is_one_line():
    with pytest.raises(UserError, match="set engine.plain_url to the plain server"):
        OpenAI.check({"dialect": "openai", "plain_url": 8000, "speculative_url": 8001}, {"name": "sps"}, 1)
    urls = {"plain_url": "http://127.0.0.1:8000", "speculative_url": "http://127.0.0.1:8001"}
    with pytest.raises(UserError, match="engine.dialect=llama_cpp names no model .*: set engine.model=null"):
        OpenAI.check(urls | {"dialect": "llama_cpp", "model": "big"}, {"name": "sps"}, 1)


def test_fields_of_events_that_hold_no_data_are_skipped(monkeypatch):
    lines = b': ping\nevent: message\nid: 7\nretry: 100\ndata: {"a": 1}\n\ndata: [DONE]\n'

    class Stream(io.BytesIO):
        status = 200

    class Connection:
        def request(self, *_): ...
        def close(self): ...

        def getresponse(self):
            return Stream(lines)

    monkeypatch.setattr(client, "_connection", lambda *_: Connection())
    assert [event for _, event in client.events("http://127.0.0.1:1", "/x", {}, 1.0)] == [{"a": 1}]


def test_restarts_have_an_end(pair, monkeypatch):
    monkeypatch.setattr(module, "RESTARTS", 0)
    stub = Stub(counting, drafts=True, fault="refuses", after=3)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "llama_cpp")
        engine.open([request()])
        engine.servers[SPECULATIVE].command = lambda _port: []
        engine.servers[SPECULATIVE].starts = 1
        exhaust(engine.speculative([request()]))
        with pytest.raises(JobError):
            exhaust(engine.speculative([request()]))


def test_a_server_waits_as_its_own_engine_does(monkeypatch):
    """How our threads wait is not handed on; what the user has set is."""
    for name, value in WAITING.items():
        monkeypatch.setenv(name, value)
    assert not WAITING.keys() & own_environment().keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert own_environment()["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_batch_ends_with_its_last_answer(pair):
    long = [*PROMPT, 5]

    def slow(prompt: list[int], n: int) -> list[int]:
        time.sleep(0.3 if prompt == long else 0.0)
        return counting(prompt, n)

    with serving(Stub(slow), Stub(counting, drafts=True)) as urls:
        engine = engine_of(pair, urls, "openai")
        engine.batch_size = 2
        engine.open([request()])
        requests = [request(), replace(request(), prompt=long), request()]
        assert sum(answer.seconds for answer in exhaust(engine.plain(requests))) >= 0.3


def test_a_request_that_is_refused_costs_its_question_alone(pair):
    """A server that answers 400 is in good order: no restart mends that, and the run goes on."""
    stub = Stub(counting, drafts=True, fault="rejects requests", after=2, times=1)
    with serving(Stub(counting), stub) as urls:
        engine = engine_of(pair, urls, "openai")
        engine.open([request()])
        with pytest.raises(UserError, match="answers 400") as raised:
            exhaust(engine.speculative([request()]))
        assert not isinstance(raised.value, JobError) and engine.faults == []
        exhaust(engine.speculative([request()]))


def test_servers_of_somebody_else_on_this_machine_are_known_by_their_ports(pair, monkeypatch):
    urls = ["http://localhost:8123", "http://10.0.0.9:8124"]
    assert engine_of(pair, urls, "openai").ports == {8123}
    with monkeypatch.context() as patch:
        patch.setattr(module.psutil, "net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="10.0.0.9")]})
        assert engine_of(pair, urls, "openai").ports == {8124}
    assert process_engine(pair).ports == set() and process_engine(pair).is_ours
    assert not engine_of(pair, urls, "openai").is_ours


def test_servers_get_ports_of_their_own_though_none_listens_yet(monkeypatch):
    ports = iter([5, 5, 6])

    class Listener:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            """As of a socket."""

        def bind(self, _):
            self.port = next(ports)

        def getsockname(self):
            return "", self.port

    monkeypatch.setattr(module_server, "_ports", set())
    monkeypatch.setattr(module_server.socket, "socket", Listener)
    assert [module_server.free_port(), module_server.free_port()] == [5, 6]


def test_one_thread_of_each_core_is_taken_first(monkeypatch, tmp_path):
    """Where threads of a core are numbered one after the other the last ones would be half of the cores."""
    real = module_server.Path

    def siblings(text: str):
        core = re.search(r"cpu(\d+)/", text)
        path = tmp_path / f"{core[1]}"
        path.write_text(f"{int(core[1]) // 2 * 2}-{int(core[1]) // 2 * 2 + 1}\n")
        return real(path)

    monkeypatch.setattr(module_server, "own_cores", lambda: set(range(8)))
    monkeypatch.setattr(module_server, "Path", siblings)
    assert [module_server.shared_cores(n) for n in (1, 2, 4)] == [[7], [5, 7], [1, 3, 5, 7]]
    assert module_server.shared_cores(5) == [1, 3, 5, 6, 7]
