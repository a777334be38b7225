"""Asks a server over HTTP, and reads its answer event by event."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from specbench.system.errors import UserError

NO_DATA = (b":", b"event:", b"id:", b"retry:")  # comments, and other fields of server-sent events
DONE = "[DONE]"
# HTTP's codes from 400 to below 500 refuse a request; all others than 200 are a failure of the server.
BAD_REQUEST, TOO_MANY, FAILED = 400, 429, 500
SHOWN = 200  # characters of a server's error message
READY_SECONDS = 2.0  # time limit of a readiness check


class EngineError(Exception):
    """A failure of a server, in one line."""


class RefusedError(UserError):
    """A request that a working server refuses, such as one that is too long for it."""


def events(url: str, path: str, body: Mapping, timeout: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Posts a request and yields each event of the stream as it arrives; closing the generator closes the connection.

    Args:
        url: of the server.
        path: of the request.
        body: becomes JSON.
        timeout: most seconds without an event.

    Yields:
        `time.perf_counter()` of the arrival, and the event.

    Raises:
        EngineError: The server fails, sends nothing for too long, breaks off or sends invalid JSON.
    """
    with closing(_connection(url, timeout)) as connection:
        try:
            connection.request("POST", _at(url, path), json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                message = " ".join(response.read(SHOWN).decode(errors="replace").split())
                refused = BAD_REQUEST <= response.status < FAILED and response.status != TOO_MANY
                raise (RefusedError if refused else EngineError)(
                    f"{path} answers {response.status}: {message}"
                )
            heard = time.perf_counter()
            while line := response.readline():
                arrived = time.perf_counter()
                content = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if content == DONE:
                    return
                if content and not line.startswith(NO_DATA):
                    heard = arrived
                    yield arrived, _event(content)
                elif arrived - heard > timeout:  # comments alone, which keep a connection open
                    raise TimeoutError
        except TimeoutError as error:
            raise EngineError(
                f"{path} was silent for {timeout:.0f} s: if it only needs longer, raise engine.answer_seconds"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{path} broke off: {type(error).__name__} {error}".rstrip()) from error


def is_ready(url: str, path: str) -> bool:
    """Whether a server answers a GET request with 200, in time."""
    with closing(_connection(url, READY_SECONDS)) as connection:
        try:
            connection.request("GET", _at(url, path))
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False


def _connection(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout)


def _at(url: str, path: str) -> str:
    """A path below that of a URL, such as a gateway's; a trailing /v1 of the URL is dropped, since `path` has it."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1") + path


def _event(content: str) -> dict[str, Any]:
    """Parses one event. Raises EngineError for a malformed one, or for an error that the server reports in it."""
    try:
        event = json.loads(content)
    except ValueError as error:
        raise EngineError(f"an event is not JSON: {content[:SHOWN]}") from error
    if not isinstance(event, dict):
        raise EngineError(f"an event is not a JSON object: {content[:SHOWN]}")
    if event.get("error") is not None:
        raise EngineError(f"the server says: {json.dumps(event['error'])[:SHOWN]}")
    return event
