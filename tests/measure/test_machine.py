import pytest

from specbench.measure.metrics.machine import machine
from specbench.measure.records.migrate import migrated
from tests.support.synthetic import passes, record, turn

GPU = ("gpu_mhz", "gpu_watts", "gpu_celsius")


def test_what_was_seen_of_the_machine():
    """Of the turns, by the seconds that each took at first; a pool's questions share what was counted."""
    records = passes(1, questions=3)
    calm = {"attempts": 1, "disturbed_share": 0.0, "still_disturbed_share": 0.0}
    busy = {"attempts": 2, "disturbed_share": 0.6, "still_disturbed_share": 0.1}
    counters = {"seconds": 10.0, "waited": 1.0, "others": 5.0, "switches": 40, "disturbed": 3.0}
    records[0]["turns"][0]["machine"] = calm | {"counters": counters}
    for one in records[1:]:
        one["pool"] = 1
        one["turns"][0]["machine"] = busy | {"counters": counters | {"seconds": 40.0}}
    found = machine(records)
    assert found == {
        "disturbed_share": pytest.approx(20 * 0.6 / 30),
        "still_disturbed_share": pytest.approx(20 * 0.1 / 30),
        "captured_share": None,  # of a folder of before it was counted
        "measured_again": 1,
        "others_cores": pytest.approx(10 / 50),
        "waited_share": pytest.approx(2 / 50),
        "stolen_share": None,
        "throttled_share": None,
        "switches_per_second": pytest.approx(80 / 50),
        "throttlings_per_second": None,
        **{f"{name}_{end}": None for name in (*GPU, "clock_mhz") for end in ("low", "high")},
    }
    assert machine(passes(1)) == {}
    for one in records:
        one["turns"][0]["machine"]["captured_share"] = 0.25
    assert machine(records)["captured_share"] == 0.25
    unknown = calm | {"disturbed_share": None, "still_disturbed_share": None}
    gpus = [
        {"index": str(i), "clocks.sm": mhz, "power.draw": "[N/A]", "temperature.gpu": "60"}
        for i, mhz in enumerate(("1755", "1980"))
    ]
    more = {"counters": {"seconds": 1.0}, "clock_mhz": 2100.0, "gpus": gpus}
    records[0]["turns"][0]["machine"] = unknown | more
    found = machine(records)
    assert found["disturbed_share"] is None and found["others_cores"] is None
    assert found["clock_mhz_low"] == found["clock_mhz_high"] == 2100.0
    assert [found[f"{name}_{end}"] for name in GPU for end in ("low", "high")] == [
        1755,
        1980,
        None,
        None,
        60,
        60,
    ]


def test_attempts_of_older_folders_are_counted():
    """Which called them goes."""
    watched = {"goes": 2, "disturbed_share": 0.6, "still_disturbed_share": 0.1}
    (new,) = migrated([record(turns=[turn() | {"machine": watched}])])
    assert new["turns"][0]["machine"]["attempts"] == 2
    (same,) = migrated([new])
    assert same["turns"][0]["machine"]["attempts"] == 2
