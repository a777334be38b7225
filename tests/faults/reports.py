"""What a report recommends."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "a report takes a method whose answers are violations",
        "reports",
        "specbench/report/decision.py",
        "return NONE if one.faults else OF_VERDICT",
        "return OF_VERDICT",
        ("tests/report/test_decision.py",),
    ),
    Fault(
        "a schedule drafts where no gain is shown",
        "reports",
        "specbench/report/schedule.py",
        '== "faster"',
        '!= "slower"',
        ("tests/report/test_schedule.py",),
    ),
    Fault(
        "a drafter that stops by itself drafts on in a replay",
        "reports",
        "specbench/report/replay.py",
        "ends[place : place + accepted + 1] = place + drafted",
        "pass",
        ("tests/report/test_replay.py",),
    ),
    Fault(
        "a failed question cannot be compared",
        "reports",
        "specbench/report/gate.py",
        "FAILED if wrong else INCOMPARABLE if hindrances",
        "INCOMPARABLE if hindrances else FAILED if wrong",
        ("tests/report/test_gate.py",),
    ),
    Fault(
        "what a baseline has against itself explains no gain",
        "reports",
        "specbench/report/verdicts.py",
        "margin = max(high, 1 / low)",
        "margin = 1.0",
        ("tests/report/test_tables_remarks.py",),
    ),
    Fault(
        "any file of questions decides a claim",
        "reports",
        "specbench/report/claims.py",
        '    "questions_sha256": [*QUESTIONS.values()],\n',
        "",
        ("tests/report/test_claims_measures.py", "tests/report/test_claims.py"),
    ),
    Fault(
        "a claim counts one violation where each of several runs has another",
        "reports",
        "specbench/report/claims.py",
        "by_answer[*group, *answer] += some",
        "by_answer[group] += some",
        ("tests/report/test_claims.py",),
    ),
)
