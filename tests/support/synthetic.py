"""Journal records made by hand, strategies for them, and a disk without room for them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from hypothesis import strategies as st

from specbench.config.spec import RunSpec
from specbench.measure.machine.speed import BANDWIDTH, OPERATIONS, PRODUCT
from specbench.measure.metrics.dataframes import generations_frame, steps_frame
from specbench.measure.metrics.metrics import METRICS, MetricInput, numbers
from specbench.measure.records.migrate import LATER_OF_FACTS, migrated_config

FACTS = LATER_OF_FACTS | {
    "target_pass_bytes": 1000,
    "dtype": "float32",
    "device": "cpu",
    "processor": "EPYC",
    "questions": "e" * 64,
    "bandwidth_bytes_per_second": 1e6,
    "noise": 1e-4,
    "weights": "pretrained",
    "unit": "question",
    "peak_memory_bytes": None,
}
CONFIG = migrated_config(
    {
        "method": {"_target_": "methods.sps.SpeculativeSampling", "name": "sps", "max_draft_tokens": 5},
        "drafter": {"_target_": "methods.ar.Autoregressive", "name": "none"},
        "pair": {"name": "tiny", "chat_template": "{{ messages }}\n{% if x %}"},
        "data": {"name": "tiny", "path": "specbench/tiny/questions.jsonl", "sha256": None},
        "task": {"name": "all", "tasks": {"qa": ["qa"]}},
        "decoding": {"max_new_tokens": 64, "temperature": 0.0},
        "batch_size": 1,
        "repeats": 1,
        "protocol": "paired",
        "seed": 0,
        "tracker": {"name": "none"},
        "experiment": None,
        "runs_root": "runs",
        "run_dir": None,
    }
)
# Figures of a probe: 30 GB/s, 100 GFLOP/s, 2 us for each operation.
QUIET = {BANDWIDTH: 30e9, PRODUCT: 100e9, OPERATIONS: 5e5}
EXACT = {"verdict": "exact", "first_divergence": None, "margin": None, "noise": 1e-4}
TIE = {"verdict": "tie", "first_divergence": 4, "margin": 1e-5, "noise": 1e-4}
VIOLATION = {"verdict": "violation", "first_divergence": 2, "margin": 0.5, "noise": 1e-4}


def columns(rounds: list[dict]) -> dict:
    """Rounds as the journal holds them; `accepted` alone makes a round of a chain of 5."""
    full = [
        {
            "drafted": 5,
            "emitted": r["accepted"] + 1,
            "depth": r.get("drafted", 5),
            "draft_seconds": 0.01,
            "verify_seconds": 0.02,
            "other_seconds": 0.005,
            "draft_bytes": (r.get("drafted", 5) or 0) * 100,
            "target_bytes": 1000,
            "sequences": 1,
            "align_seconds": 0.0,
            "stats": None,
        }
        | r
        for r in rounds
    ]
    names = ("drafted", "accepted", "emitted", "depth", "draft_seconds", "verify_seconds", "other_seconds",
             "draft_bytes", "target_bytes", "sequences", "align_seconds", "stats")  # fmt: skip
    return {name: [r[name] for r in full] for name in names}


def generation(accepted=(), seconds=None, prefill=0.1, tokens=None, drafted=5) -> dict:
    """One generation whose rounds accepted so many draft tokens each."""
    rounds = [{"accepted": a, "drafted": drafted} for a in accepted]
    count = 1 + sum(a + 1 for a in accepted) if tokens is None else tokens
    spent = 0.1 + 0.035 * len(rounds) if seconds is None else seconds
    return {
        "tokens": list(range(100, 100 + count)),
        "prefill_seconds": prefill,
        "seconds": spent,
        "finish": "length",
        "steps": columns(rounds),
    }


def turn(number=0, equivalence=EXACT, **arms) -> dict:
    """One turn; each arm is a generation, or a list of repeats, which `by_repeat` takes apart."""
    return {
        "turn": number,
        "prompt_tokens": 10,
        "prompt_sha256": "0" * 64,
        "arms": {name: g if isinstance(g, list) else [g] for name, g in arms.items()},
        "text": {"baseline": f"plain {number}\u2028", "method": f"drafted {number}\u2028"},
        "equivalence": equivalence,
    }


def record(question_id=1, task="qa", category=None, turns=(), error=None, pool=None) -> dict:
    return {
        "question_id": question_id,
        "task": task,
        "category": category or task,
        "pool": question_id if pool is None else pool,
        "repeat": 0,
        "process": 0,
        "error": error,
        "turns": list(turns),
    }


def by_repeat(records: Iterable[dict]) -> list[dict]:
    """Records of one repeat each, from those whose arms hold all repeats."""
    apart = []
    for whole in records:
        counts = [len(arm) for turn in whole["turns"] for arm in turn["arms"].values()]
        for i in range(max(counts, default=1)):
            turns = [
                turn | {"arms": {name: [arm[i]] for name, arm in turn["arms"].items() if i < len(arm)}}
                for turn in whole["turns"]
            ]
            apart.append(whole | {"repeat": i, "turns": turns})
    return apart


def answered(question_id=1, task="qa", accepted=(2, 3), slow=2.0, turns=1, **more) -> dict:
    """A question that the baseline answered `slow` times as slowly as the method."""
    method = generation(accepted)
    count = len(method["tokens"])
    plain = generation([0] * (count - 1), seconds=method["seconds"] * slow, drafted=0)
    return record(
        question_id, task, turns=[turn(i, baseline=plain, method=method) for i in range(turns)], **more
    )


def passes(count: int, processes: int = 1, questions: int = 7) -> list[dict]:
    """Records of a run whose method is 2, 2.1, 2.2, ... times as fast in its passes."""
    return [
        answered(i, slow=2 + repeat / 10) | {"repeat": repeat, "process": repeat * processes // count}
        for repeat in range(count)
        for i in range(questions)
    ]


def slowed(**shares: float) -> dict[str, float]:
    """Figures of a probe that are by a share below those of QUIET: slowed(product=0.3)."""
    names = {"bandwidth": BANDWIDTH, "product": PRODUCT, "operations": OPERATIONS}
    return QUIET | {names[name]: QUIET[names[name]] * (1 - share) for name, share in shares.items()}


def probed(records: list[dict], *probes: dict[str, float]) -> list[dict]:
    """The same records with probes in the first and, of several, the others in the last of them."""
    first, *others = probes
    records = [record | {"speed": []} for record in records]
    records[0]["speed"] = [first]
    records[-1]["speed"] = records[-1]["speed"] + others
    return records


accepted = st.lists(st.integers(0, 5), min_size=1, max_size=8)


slowness = st.floats(0.1, 10)


@st.composite
def questions(draw, min_size=1, max_size=6, slow=slowness):
    """Finished questions with answers of equal length in both arms."""
    return [
        answered(i, draw(st.sampled_from(["qa", "rag"])), draw(accepted), draw(slow), draw(st.integers(1, 2)))
        for i in range(draw(st.integers(min_size, max_size)))
    ]


class Numbers(Mapping[str, object]):
    """The metrics of what was measured, each made when it is first looked at: all of them take 0.1 s."""

    def __init__(self, measured: MetricInput):
        self._measured, self._made = measured, {}

    def __getitem__(self, name: str) -> object:
        if name not in self._made:
            self._made |= numbers(self._measured, [name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(METRICS)

    def __len__(self) -> int:
        return len(METRICS)


def overall(records, facts=FACTS) -> Numbers:
    """The numbers over all questions of some records."""
    generations, steps = generations_frame(records), steps_frame(records)
    spec = RunSpec.of(CONFIG, facts["unit"])
    return Numbers(MetricInput(records, generations, steps, facts, "baseline", spec))


def scaled(records: list[dict], factor: float) -> list[dict]:
    """The same records with every time multiplied."""

    def walk(node):
        if isinstance(node, list):
            return [walk(item) for item in node]
        if isinstance(node, dict):
            return {k: times(v) if k.endswith("seconds") else walk(v) for k, v in node.items()}
        return node

    def times(value):
        if isinstance(value, list):
            return [None if v is None else v * factor for v in value]
        return value * factor

    return walk(records)


def batched_run(seconds: list[list[tuple[float, float]]]) -> list[dict]:
    """One question per pool; for each repeat the seconds of the baseline and of the method, two rows a round."""
    records = []
    for pool, repeats in enumerate(seconds):
        rounds = [
            {"accepted": 1, "sequences": 2, "align_seconds": 0.1, "stats": {"grouped": i == 0}}
            for i in range(4)
        ]
        method = [generation([1] * 4, seconds=m) | {"steps": columns(rounds)} for _, m in repeats]
        plain = [generation([0] * 8, seconds=b, drafted=0) for b, _ in repeats]
        single = [generation([0] * 8, seconds=9.0 + i, drafted=0) for i in range(len(repeats))]
        records.append(record(pool, pool=pool, turns=[turn(baseline=plain, method=method, single=single)]))
    return by_repeat(records)


@contextmanager
def full_disk() -> Iterator[Callable[[int], None]]:
    """Gives a function of a number of bytes, beyond which from then on no file of this process grows: the same errors
    as on a full disk, but for their names. The end lifts it, for pytest writes files, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
