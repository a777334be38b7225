"""Figures and their intervals."""

from tests.faults.fault import Fault, M

FAULTS = (
    Fault(
        "an interval uses the normal distribution",
        "statistics",
        f"{M}/metrics/statistics.py",
        "stdtrit(degrees, 0.5 + CONFIDENCE / 2)",
        "stdtrit(10**6, 0.5 + CONFIDENCE / 2)",
        ("tests/measure/test_statistics.py", "tests/measure/test_coverage.py"),
    ),
    Fault(
        "the jackknife divides by n",
        "statistics",
        f"{M}/metrics/statistics.py",
        "return float((len(logs) - 1) / len(logs) * np.square(logs - logs.mean()).sum())",
        "return float(1 / len(logs) * np.square(logs - logs.mean()).sum())",
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
        f"{M}/metrics/statistics.py",
        "return above / (below + decoding * excess)",
        "return above / below",
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
        'emitted, read = rounds["emitted"], rounds["draft_bytes"] + rounds["target_bytes"]',
        'emitted, read = rounds["emitted"], rounds["target_bytes"]',
        ("tests/measure/test_acceptance_metrics.py", "tests/measure/test_metrics.py"),
    ),
    Fault(
        "the shorter answer wins where no prefill was timed",
        "statistics",
        f"{M}/metrics/timing.py",
        "untimed = prefill[METHOD].isna() & with_prefill",
        "untimed = prefill[METHOD].isna() & False",
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
