"""Timed comparisons, run by hand."""

import specbench  # noqa: F401 - before torch, for how its threads wait
