"""Options of commands that take no `key=value`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from specbench.system.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong options in one line; argparse itself prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises a UserError with the message and the usage."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")
