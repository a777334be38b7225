"""Secrets in what leaves a run folder, or is shown: blanked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"(?:^|[.\s_-])(?:(?:api|access|secret|private|auth|client|refresh|bearer)_?)?"
    r"(?:key|token|secret|password|passwd|passphrase|credentials?|auth|authorization|bearer|signature)$",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(
    # keys that are known by their form
    r"(?<![A-Za-z0-9])(?:(?:hf_|gh[pousr]_)[A-Za-z0-9]{16,}|(?:github_pat_|glpat-|sk-|AIza)[\w-]{16,}"
    r"|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{8,}(?:\.[\w-]+)+)"
    # credentials in a header; of `Basic` base64 alone, which is no lower-case word
    r"|(?i:\bbearer\s+)[^\s\"',]+|(?i:\bbasic\s+)(?=[a-z+/_-]*[A-Z0-9=])[\w+/=-]{4,}"
)
URL = re.compile(r"(?<=://)(\S*@)?([^\s?#@]*)(\S*)")  # user and password, address, query
BLANK = "***"


def without_secrets(value: Any, name: str = "") -> Any:
    """The same value without secrets; whatever leaves a run folder, or is shown, must pass through here.

    Blanked are values that are named like a secret, texts that look like one, and of every URL user, password, query
    and fragment.
    """
    if SECRET_NAME.search(name) and value is not None and not isinstance(value, bool):
        return BLANK
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    return SECRET_TEXT.sub(BLANK, URL.sub(_without_credentials, value)) if isinstance(value, str) else value


def _without_credentials(url: re.Match) -> str:
    user, address, query = url.groups(default="")
    if "?" in user or "#" in user:  # in a password, or in front of an @ in the query: nobody can tell
        return BLANK
    return (user and f"{BLANK}@") + address + (query and query[0] + BLANK)


def without_secret_value(argument: str) -> str:
    """A command-line argument, `name=secret` blanked."""
    name, equals, _ = argument.partition("=")
    return f"{name}={BLANK}" if equals and SECRET_NAME.search(name) else without_secrets(argument)
