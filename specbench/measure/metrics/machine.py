"""Load by other processes while a run was measured, and the machine's speed, from the journal records."""

from __future__ import annotations

import re
import statistics

from specbench.measure.machine.speed import NAMES, Figures, below
from specbench.measure.metrics.acceptance import ratio


def machine(records: list[dict]) -> dict[str, float | int | None]:
    """Load by other processes during a run; None for what cannot be counted here, {} for older folders.

    - disturbed_share: share of all arms' time in slices that others disturbed, in first attempts.
    - still_disturbed_share: the same for the times that were kept after measuring again.
    - captured_share: the share of those times in slices in which a pass was captured as a graph.
    - measured_again: number of turns that were.
    - others_cores: cores that other processes computed on, on average.
    - waited_share, stolen_share, throttled_share: seconds per second in which a thread had no core.
    - switches_per_second: involuntary context switches; throttlings_per_second: of cores, for heat.
    - clock_mhz_low, clock_mhz_high: the mean frequency of the cores, read after each turn; likewise the GPUs' clocks,
      watts and degrees Celsius.
    """
    of_pools = {  # questions of a pool share what was counted
        (record["pool"], record["repeat"], turn["turn"]): turn["machine"]
        for record in records
        for turn in record["turns"]
        if turn.get("machine")
    }
    watched = [*of_pools.values()]
    seconds = sum(one["counters"]["seconds"] for one in watched)
    if not seconds:
        return {}
    first = [one["counters"]["seconds"] / one["attempts"] for one in watched]

    def share(name: str) -> float | None:
        if any(one.get(name) is None for one in watched):
            return None
        return ratio(sum(one[name] * of for one, of in zip(watched, first)), sum(first))

    def rate(name: str) -> float | None:
        is_counted = all(name in one["counters"] for one in watched)
        return sum(one["counters"][name] for one in watched) / seconds if is_counted else None

    def gpus(field: str) -> list[float]:
        """The driver's readings of the GPU; skips unknown ones, which are words."""
        readings = [gpu[field] for one in watched for gpu in one.get("gpus", [])]
        return [float(text) for text in readings if re.fullmatch(r"\d+(\.\d+)?", text)]

    clocks = [one["clock_mhz"] for one in watched if one.get("clock_mhz")]
    return {
        "disturbed_share": share("disturbed_share"),
        "still_disturbed_share": share("still_disturbed_share"),
        "captured_share": share("captured_share"),
        "measured_again": sum(one["attempts"] > 1 for one in watched),
        "others_cores": rate("others"),
        "waited_share": rate("waited"),
        "stolen_share": rate("stolen"),
        "throttled_share": rate("throttled"),
        "switches_per_second": rate("switches"),
        "throttlings_per_second": rate("throttlings"),
        **_ends("clock_mhz", clocks),
        **_ends("gpu_mhz", gpus("clocks.sm")),
        **_ends("gpu_watts", gpus("power.draw")),
        **_ends("gpu_celsius", gpus("temperature.gpu")),
    }


def speed(records: list[dict], facts: dict) -> dict | None:
    """How fast the machine was, by the probes of a run; None for older folders, which have none.

    - machine: the key of runs that can be compared; see `speed.machine_key`.
    - probes: their number.
    - first, last, worst, median: of the probes, by figure.
    - best: by figure, the highest that the machine had shown, this run included.
    - below: by figure, the share by which the worst is below the best.
    - changed: by figure, the share by which it is below the run's own highest.

    Args:
        records: of the journal, in its order.
        facts: of the run.
    """
    probes: list[Figures] = [figures for record in records for figures in record.get("speed", ())]
    if not probes:
        return None
    by_name = {name: [figures[name] for figures in probes] for name in NAMES}
    worst, highest = ({name: end(values) for name, values in by_name.items()} for end in (min, max))
    machine_facts = facts["speed"]
    best = {name: max(highest[name], machine_facts["best"].get(name, 0.0)) for name in NAMES}
    return {
        "machine": machine_facts["machine"],
        "probes": len(probes),
        "first": probes[0],
        "last": probes[-1],
        "worst": worst,
        "median": {name: statistics.median(values) for name, values in by_name.items()},
        "best": best,
        "below": below(worst, best),
        "changed": below(worst, highest),
    }


def _ends(name: str, values: list[float]) -> dict[str, float | None]:
    return {f"{name}_low": min(values, default=None), f"{name}_high": max(values, default=None)}
