"""The scripts beside the documentation, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType

from specbench import ROOT


@cache
def load_script(name: str) -> ModuleType:
    """The module docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
