"""A benchmark harness for speculative decoding: is this speedup real, on my models and my machine?"""

import os
import sys
from pathlib import Path

__version__ = "0.5.0"

ROOT = Path(__file__).resolve().parents[1]  # of a checkout; where an installed package lies, site-packages
# A wheel has the configuration inside the package, a checkout beside it.
CONF = ROOT / "specbench" / "conf" if (ROOT / "specbench" / "conf").is_dir() else ROOT / "conf"
# A wheel has the methods inside the package, too: in site-packages `methods` would be a name taken from everybody.
BUNDLED = ROOT / "specbench" / "bundled"
METHODS = (BUNDLED if BUNDLED.is_dir() else ROOT) / "methods"
sys.path.insert(0, str(METHODS.parent))  # a module of that name in the user's folder must not hide them

# What decides how threads compute and wait; every process of a run must have the same.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}

# OpenMP reads this once, when torch is imported. By default its idle threads spin for milliseconds; on a machine that
# others use, too, a spinning thread keeps the one that all wait for from running, and passes take ten times as long.
# Threads that sleep at once are woken for every product, which takes half as long again as a pass of a small model. So
# they spin for a tenth of a millisecond (libgomp makes 100,000 rounds in one); other libraries let them sleep.
if not any(name in os.environ for name in THREAD_VARIABLES[1:]):
    os.environ |= WAITING
