"""Engines whose servers are stubs, in this process or in their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import Server
from tests.support import engine_stub
from tests.support.engine_stub import counting

PROMPT, NEW = [3, 9, 27, 11, 33, 29, 17], 16
STOPS: frozenset[int] = frozenset({2})
SCRIPT = Path(engine_stub.__file__)
SILENT, PATIENT = 0.4, 20.0  # s without an event; the longer one for servers that do not hang


def request(n: int = NEW) -> Request:
    return Request(list(PROMPT), SamplingParams(n))


def stopping(prompt: list[int], n: int, stop: int = 2) -> list[int]:
    """An answer that ends at a stop token."""
    return [*counting(prompt, 4), stop]


def engine_of(pair, urls: list[str], dialect: str, silent: float = PATIENT) -> ServedEngine:
    servers = {name: Server(name, url, seconds=5) for name, url in zip((PLAIN, SPECULATIVE), urls)}
    return ServedEngine(pair, servers, dialect, silent)


def process_engine(pair, speculative: dict | None = None, silent: float = PATIENT, **plain) -> ServedEngine:
    """Stubs in processes of their own, in llama.cpp's dialect."""

    def server(name: str, told: dict) -> Server:
        words = json.dumps(told)
        return Server(name, "", lambda port: [sys.executable, str(SCRIPT), str(port), words], seconds=20)

    servers = {
        PLAIN: server(PLAIN, plain),
        SPECULATIVE: server(SPECULATIVE, {"drafts": True} | (speculative or {})),
    }
    return ServedEngine(pair, servers, "llama_cpp", silent)
