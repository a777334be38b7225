"""The line below a table that says how a CPU ran the passes."""

from __future__ import annotations

import pytest

from specbench.measure.metrics.summary import OF_NEWER_FACTS
from specbench.report.remarks import layouts_line

GROUPS = {"groups": {"head 8x4 float32": {"1": {"layout": "panels"}, "6": {"layout": "panels"}}}}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "weights: head panels"),
        ({"compiled": True, "kernels": None}, "weights: head panels; layers compiled"),
        ({"compiled": False, "kernels": "no compiler"}, "weights: head panels; torch's kernels: no compiler"),
    ],
)
def test_the_line_says_what_is_compiled_and_whose_kernels_run(facts, expected):
    assert layouts_line({"layouts": GROUPS} | facts) == expected
    assert facts.keys() <= {*OF_NEWER_FACTS}
