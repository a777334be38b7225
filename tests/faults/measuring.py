"""The order of what is measured, and the certificates of the answers."""

from tests.faults.fault import Fault, M

FAULTS = (
    Fault(
        "arms keep one order",
        "measuring",
        f"{M}/protocol.py",
        "order = orders[7 * (pool + turn + repeat) % len(orders)]",
        "order = orders[0]",
        ("tests/measure/test_runner.py",),
    ),
    Fault(
        "a repeat knows the answer before",
        "measuring",
        f"{M}/conductor.py",
        "            drafter.restore(learnt)  # or it would copy the answer that it has just given\n",
        "",
        ("tests/measure/test_runner.py", "tests/measure/test_remeasure.py"),
    ),
    Fault(
        "of two attempts the disturbed one is kept",
        "measuring",
        f"{M}/remeasure.py",
        'best = min(attempts, key=lambda attempt: attempt.counted()["disturbed"])',
        'best = max(attempts, key=lambda attempt: attempt.counted()["disturbed"])',
        ("tests/measure/test_remeasure.py",),
    ),
    Fault(
        "what follows a tie is not looked at",
        "certificates",
        f"{M}/certify.py",
        "if not after <= limit:",
        "if False:",
        ("tests/measure/test_certify.py",),
    ),
    Fault(
        "drawn drafts have no certificate",
        "certificates",
        f"{M}/certify.py",
        "same_draws = self.setup.served is None and self.setup.drafter.deterministic",
        "same_draws = self.setup.served is None",
        ("tests/measure/test_runner.py",),
    ),
    Fault(
        "a wide margin is a tie",
        "certificates",
        f"{M}/certify.py",
        "if not abs(margin) <= limit or len(answer) > len(ours):",
        "if len(answer) > len(ours):",
        ("tests/measure/test_certify.py",),
    ),
    Fault(
        "a missing end is exact",
        "certificates",
        f"{M}/certify.py",
        "for index, (reference_token, answer_token) in enumerate(zip_longest(theirs, ours)):",
        "for index, (reference_token, answer_token) in enumerate(zip(theirs, ours)):",
        ("tests/measure/test_certify.py",),
    ),
    Fault(
        "the best of the repeats is counted",
        "certificates",
        f"{M}/certify.py",
        "return max(certificates, key=lambda c: VERDICTS.index(c.verdict))",
        "return min(certificates, key=lambda c: VERDICTS.index(c.verdict))",
        ("tests/measure/test_runner.py", "tests/measure/test_certify.py"),
    ),
    Fault(
        "noise is what our verification says",
        "certificates",
        f"{M}/numeric_noise.py",
        "largest = ours if ours <= NOT_ROUNDING * model else model",
        "largest = ours",
        ("tests/methods/test_verify_width.py",),
    ),
)
