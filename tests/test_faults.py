"""The list of planted faults: each can be planted in the code as it is now."""

from __future__ import annotations

from collections import Counter

import pytest

from specbench import ROOT
from tests.faults import FAULTS
from tests.faults.fault import Fault, planted

AREAS = {
    "acceptance",
    "caches",
    "masks",
    "trees",
    "batches",
    "sampling",
    "statistics",
    "stores",
    "contamination",
}


def test_there_are_enough_of_them():
    assert len(FAULTS) >= 40
    assert Counter(fault.area for fault in FAULTS).keys() >= AREAS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_can_be_planted(fault: Fault, tmp_path):
    (tmp_path / fault.file).parent.mkdir(parents=True)
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    (tmp_path / fault.file).write_text(source, encoding="utf-8")
    planted(fault, tmp_path)
    assert (tmp_path / fault.file).read_text(encoding="utf-8") != source
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)


def test_text_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("one one")
    for before in ("two", "one"):
        with pytest.raises(ValueError, match="found"):
            planted(Fault("x", "y", "a.py", before, "", ()), tmp_path)
