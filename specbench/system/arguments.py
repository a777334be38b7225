"""Options of commands that take no `key=value`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from specbench.system.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong with options; argparse itself prints its usage and leaves."""

    def error(self, message: str) -> NoReturn:
        """Raises what is wrong as a UserError, with the usage."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")
