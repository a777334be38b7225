"""What the timed comparisons print; they themselves are run by hand."""

from __future__ import annotations

from functools import partial

from specbench.measure.metrics.statistics import speedup
from tests.benchmarks import host
from tests.benchmarks.common import print_ratios


def test_ratios_of_too_few_repeats_are_printed_without_an_interval(capsys):
    seconds = {"ar": [3.0, 3.0], "fast": [1.5, 1.0]}
    for repeats in (1, 2):
        cut = {name: own[:repeats] for name, own in seconds.items()}
        print_ratios(cut, (("ar", "fast"),), partial(speedup, pools=[0] * repeats))
    print_ratios(seconds | {"ar": [0.0, 0.0]}, (("ar", "fast"),), speedup)
    once, twice, none = capsys.readouterr().out.splitlines()
    assert once == "fast against ar: times as fast: 2.00 (too few for an interval)"
    assert twice.startswith("fast against ar: times as fast: 2.40 [") and none.endswith("no ratio")


def test_what_counts_as_the_devices_time_is_there_and_put_back():
    before = [getattr(owner, name) for owner, name in host.DEVICE]
    with host.Watch().active():
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(host.DEVICE, before))
    assert [getattr(owner, name) for owner, name in host.DEVICE] == before
