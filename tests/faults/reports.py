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
)
