"""Figures and their intervals."""

from tests.faults.fault import Fault, M

FAULTS = (
    Fault(
        "an interval uses the normal distribution",
        "statistics",
        f"{M}/metrics/statistics.py",
        "squares = [variance * stdtrit(freedom, 0.5 + CONFIDENCE / 2) ** 2 for variance, freedom in estimates]",
        "squares = [variance * stdtrit(10**6, 0.5 + CONFIDENCE / 2) ** 2 for variance, freedom in estimates]",
        ("tests/measure/test_statistics.py", "tests/measure/test_coverage.py"),
    ),
    Fault(
        "the jackknife divides by n",
        "statistics",
        f"{M}/metrics/statistics.py",
        "return float((count - 1) / count * np.square(logs - logs.mean()).sum()), count - 1",
        "return float(1 / count * np.square(logs - logs.mean()).sum()), count - 1",
        ("tests/measure/test_statistics.py",),
    ),
    Fault(
        "what differs between processes is left out",
        "statistics",
        f"{M}/metrics/statistics.py",
        "if parts.ndim == 2 and parts.shape[1] >= LEAST_PASSES:",
        "if False:",
        ("tests/measure/test_statistics.py",),
    ),
    Fault(
        "a shorter answer wins by being short",
        "statistics",
        f"{M}/metrics/timing.py",
        'decoding = (seconds["method"] - prefill["method"]) * factor.where(~equal, 1.0)',
        'decoding = seconds["method"] - prefill["method"]',
        ("tests/measure/test_metrics.py",),
    ),
    Fault(
        "the bonus token is not in the acceptance length",
        "statistics",
        f"{M}/metrics/acceptance.py",
        'return ratio(rounds["emitted"].sum(), len(rounds))',
        'return ratio(rounds["accepted"].sum(), len(rounds))',
        ("tests/measure/test_acceptance_metrics.py", "tests/measure/test_metrics.py"),
    ),
    Fault(
        "MBSU counts no draft",
        "statistics",
        f"{M}/metrics/acceptance.py",
        'read = ((rounds["draft_bytes"] + rounds["target_bytes"]) / rounds["sequences"]).sum(skipna=False)',
        'read = (rounds["target_bytes"] / rounds["sequences"]).sum(skipna=False)',
        ("tests/measure/test_acceptance_metrics.py", "tests/measure/test_metrics.py"),
    ),
    Fault(
        "the shorter answer wins where no prefill was timed",
        "statistics",
        f"{M}/metrics/timing.py",
        'every = seconds["method"] * tokens[reference] / tokens["method"]',
        'every = seconds["method"]',
        ("tests/measure/test_metrics.py",),
    ),
    Fault(
        "a question counts with some of its turns",
        "statistics",
        f"{M}/metrics/timing.py",
        'complete = turns.notna().all(axis=1).groupby(level=levels).transform("all")',
        "complete = turns.notna().all(axis=1)",
        ("tests/measure/test_metrics.py",),
    ),
    Fault(
        "a round counts in the stretch before its own",
        "statistics",
        f"{M}/metrics/acceptance.py",
        'side="right") - 1',
        'side="left") - 1',
        ("tests/measure/test_metrics.py",),
    ),
)
