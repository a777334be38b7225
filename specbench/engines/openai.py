"""Servers that somebody else runs as an engine of a run, each named by its URL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from specbench.engines.dialects import DIALECTS, openai
from specbench.engines.served import PLAIN, SPECULATIVE, ServedEngine
from specbench.engines.server import Server
from specbench.models.pairs import Pair
from specbench.system.errors import UserError, suggest
from specbench.system.settings import Positive


def _is_url(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
        (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for a port that is no number, or an invalid name
        return False


class OpenAI(ServedEngine):
    """Two servers at URLs: one decodes plainly, the other one speculates.

    Args:
        pair: whose target they serve.
        drafter: configuration of the run's drafter.
        threads: unused; whoever started the servers chose theirs.
        plain_url: of the plain server; None: `check` refuses it.
        speculative_url: of the speculative one.
        speculative: by method, its known draft settings; for tables only.
        dialect: how they are asked: openai (vLLM), or llama_cpp.
        model: the servers' name of the model, if they require one.
        version: of the engine, for tables.
        start_seconds: time limit until they are ready.
        answer_seconds: time without an event after which a server counts as hung.
        batch_size: requests that a server gets at once.
    """

    same_weights = False  # the servers report neither their dtype nor their device

    def __init__(
        self,
        pair: Pair,
        drafter: dict[str, Any],
        threads: int,
        plain_url: str | None,
        speculative_url: str | None,
        speculative: dict | None,
        dialect: str = "openai",
        model: str | None = None,
        version: str | float = "unknown",
        start_seconds: Positive = 10.0,
        answer_seconds: Positive = 120.0,
        batch_size: int = 1,
    ):
        urls = {PLAIN: plain_url, SPECULATIVE: speculative_url}
        servers = {name: Server(name, url or "", seconds=start_seconds) for name, url in urls.items()}
        super().__init__(pair, servers, dialect, answer_seconds, batch_size)
        if model is not None and dialect == "openai":
            self.dialect = partial(openai, model=model)
        self.version = str(version)

    @classmethod
    def check(cls, settings: Mapping[str, Any], drafter: Mapping[str, Any], batch_size: int) -> None:
        """As in `ServedEngine`. Also raises UserError if a URL is missing or the dialect unknown."""
        super().check(settings, drafter, batch_size)
        for name in (PLAIN, SPECULATIVE):
            url = settings.get(f"{name}_url")
            if not _is_url(url):
                raise UserError(f"set engine.{name}_url to the {name} server, such as http://127.0.0.1:8000")
        if (dialect := settings["dialect"]) not in DIALECTS:
            raise UserError(f"unknown engine.dialect '{dialect}': {suggest(dialect, DIALECTS)}")
        if settings.get("model") is not None and dialect != "openai":
            raise UserError(f"engine.dialect={dialect} names no model in its requests: set engine.model=null")
