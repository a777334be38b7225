"""A server that is one configuration of an engine: a process of this run, or a URL that somebody else serves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from specbench import WAITING
from specbench.engines.client import is_ready
from specbench.system.errors import UserError
from specbench.system.processes import own_cores

HOST = "127.0.0.1"
POLL_SECONDS = 0.05  # between two readiness checks
END_SECONDS = 10.0  # for a server to end when it is asked to
SUPERVISOR = Path(__file__).with_name("supervise.py")
STANDALONE = Path(__file__).with_name(
    "standalone"
)  # the folder of scripts that run in environments of engines
LAST_LINES = 3  # of what a server printed, when it failed
_ports: set[int] = set()  # that `free_port` has returned


@dataclass(slots=True)
class Server:
    """A server: `start` it, `wait_for` it until it is ready.

    Attributes:
        name: of the arm that it serves, for errors.
        url: its address.
        command: makes the command that starts it, from the URL's port; None: somebody else starts it.
        ready: the path that answers 200 when it is ready.
        seconds: time limit for starting.
        cores: that it runs on once it is ready; empty: all. Until then it may use all, to compile.
        environment: variables that it gets in addition to those of this process.
        starts: how often it was started.
    """

    name: str
    url: str
    command: Callable[[int], list[str]] | None = None
    ready: str = "/health"
    seconds: float = 120.0
    cores: Collection[int] = ()
    environment: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    _process: subprocess.Popen | None = None
    _log: IO[bytes] | None = None

    def start(self) -> None:
        """Starts the process, if it is ours."""
        if self.command is None:
            return
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self.starts += 1

        self._process = subprocess.Popen(
            [sys.executable, str(SUPERVISOR), *self.command(port)],
            stdin=subprocess.PIPE,  # which closes with this process, however that ends
            stdout=self._log,
            stderr=self._log,
            env=own_environment() | self.environment,
            start_new_session=True,
        )

    def is_up(self) -> bool:
        """Whether the server is ready; it then gets its cores. Raises UserError if it has ended."""
        if ended := self.how_it_ended():
            raise UserError(f"the {self.name} server {ended}")
        if not is_ready(self.url, self.ready):
            return False
        if self._process is not None and self.cores:
            _pin(self._process, self.cores)
        return True

    def how_it_ended(self, seconds: float = 0.0) -> str:
        """How the process ended, and what it printed last; empty if it runs on for some seconds, or is not ours."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return ""
        return f"ended with {_name_of(code)}: {self._printed()}"

    @property
    def is_ours(self) -> bool:
        """Whether this process starts and ends it."""
        return self.command is not None

    def revive(self) -> bool:
        """Starts the server anew; if somebody else started it, returns whether it is still ready.

        Raises UserError as `wait_for`.
        """
        self.starts += self.command is None  # an attempt, too
        if self.command is None:
            return is_ready(self.url, self.ready)
        self.close()
        self.start()
        wait_for([self])
        return True

    def close(self) -> None:
        """Ends the server, and all processes that it has started."""
        if self._process is not None:
            _end(self._process)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _printed(self) -> str:
        """The last lines that the server printed, as one."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = filter(None, (line.decode(errors="replace").strip() for line in self._log))
        return " | ".join(deque(lines, LAST_LINES)) or "it printed nothing"


def wait_for(servers: Iterable[Server]) -> None:
    """Waits until all servers are ready, or one fails. Raises UserError if one ends or takes too long."""
    begun, waiting = time.monotonic(), [*servers]
    while waiting := [server for server in waiting if not server.is_up()]:
        for server in waiting:
            if time.monotonic() - begun > server.seconds:
                raise UserError(
                    f"the {server.name} server at {server.url} was not ready after {server.seconds:.0f} s: if it only "
                    "needs longer, raise engine.start_seconds"
                )
        time.sleep(POLL_SECONDS)


def own_environment() -> dict[str, str]:
    """The environment that a server inherits, without how our threads wait: other engines choose that themselves."""
    return {name: value for name, value in os.environ.items() if WAITING.get(name) != value}


def scripted(
    program: Path,
    script: Path,
    settings: Mapping[str, dict[str, Any]],
    threads: int,
    seconds: float,
    environment: dict[str, str],
) -> dict[str, Server]:
    """Servers by arm, run on the same cores by a script in an engine's environment: `python SCRIPT PORT JSON`.

    Arguments as in `Server`; `settings` of each server are by its arm.
    """
    cores = shared_cores(threads)

    def command(of_arm: dict[str, Any], port: int) -> list[str]:
        return [str(program), str(script), str(port), json.dumps(of_arm)]

    return {
        arm: Server(arm, "", partial(command, one), seconds=seconds, cores=cores, environment=environment)
        for arm, one in settings.items()
    }


def shared_cores(threads: int) -> list[int]:
    """The cores of the servers of a run, the same for all: one waits while the other works.

    One hardware thread of each core is taken first, the others only if these are not enough.
    """
    taken: set[str] = set()
    cores: list[int] = []
    others: list[int] = []
    for core in sorted(own_cores(), reverse=True):
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        shared = siblings.read_text().strip() if siblings.exists() else str(core)
        (others if shared in taken else cores).append(core)
        taken.add(shared)
    return sorted([*cores, *others][:threads])


def free_port() -> int:
    """A port that nothing listens on now, and that no server of this process was given: it may not listen yet."""
    while True:
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            port = listener.getsockname()[1]
        if port not in _ports:
            _ports.add(port)
            return port


def _family(process: subprocess.Popen) -> list[psutil.Process]:
    """A process and all that it has started. Raises NoSuchProcess if it has ended."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def _pin(process: subprocess.Popen, cores: Collection[int]) -> None:
    """Pins all threads of a process, and of those that it has started, to cores."""
    for one in _family(process):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or one of its threads
            for thread in one.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)


def _name_of(code: int) -> str:
    """An exit code, or the signal that it stands for."""
    return next((one.name for one in signal.Signals if code == 128 + one), str(code))


def _end(process: subprocess.Popen) -> None:
    """Ends a process and its group: asked first, then killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has left behind, too
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
