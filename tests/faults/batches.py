"""Sequences that are decoded together, and where each of them ends."""

from tests.faults.fault import BATCHES, LOSSLESS, D, Fault

FAULTS = (
    Fault(
        "holes count as tokens",
        "batches",
        "methods/common/aligned_layout.py",
        "self._held[:b, end : end + width].masked_fill_(gone, EMPTY)",
        "self._held[:b, end : end + width].masked_fill_(gone, 0)",
        ("tests/methods/test_schedules.py", "tests/methods/test_batches.py"),
    ),
    Fault(
        "alignment forgets the order",
        "batches",
        "methods/common/aligned_layout.py",
        "keys = held.masked_fill(held == EMPTY, -1)",
        "keys = held.masked_fill(held == EMPTY, -1).neg()",
        ("tests/methods/test_schedules.py", "tests/methods/test_batches.py"),
    ),
    Fault(
        "a group of unequal lengths counts as grouped",
        "batches",
        "methods/exspec.py",
        'self.stats = {"grouped": len({held[slot].length for slot in chosen}) == 1} if b > 1 else {}',
        'self.stats = {"grouped": True} if b > 1 else {}',
        ("tests/methods/test_batches.py", "tests/decoding/test_schedules.py"),
    ),
    Fault(
        "sequences starve",
        "batches",
        "methods/exspec.py",
        "if all(self._skipped[one.request_index] < self.max_skipped_rounds for one in held):",
        "if True:",
        ("tests/methods/test_batches.py", "tests/decoding/test_schedules.py"),
    ),
    Fault(
        "a drafter's state is lost when a sequence moves",
        "batches",
        f"{D}/engine.py",
        "        self._slots.move(sources, destinations, kv_len)\n",
        "",
        (*BATCHES, "tests/methods/test_schedules.py"),
    ),
    Fault(
        "an answer continues after its stop token",
        "batches",
        f"{D}/engine.py",
        "new_tokens = truncate_at_stop(check_sampled(of_one.tokens[: of_one.accepted + 1]), one.stop_ids)",
        "new_tokens = check_sampled(of_one.tokens[: of_one.accepted + 1])",
        ("tests/decoding/test_engine.py", *LOSSLESS),
    ),
    Fault(
        "a draft may run over the cap",
        "batches",
        f"{D}/engine.py",
        "min(one.remaining - 1, most, wished(slot))",
        "min(one.remaining, most, wished(slot))",
        ("tests/decoding/test_engine.py", *LOSSLESS),
    ),
    Fault(
        "a mask takes the place of a sequence's last true pair",
        "batches",
        "methods/peagle/drafter.py",
        "masked = (places > last)",
        "masked = (places >= last)",
        ("tests/methods/test_peagle.py",),
    ),
    Fault(
        "the outputs of a draft are those of the longest sequence of a batch",
        "batches",
        "methods/eagle/base.py",
        "wanted = span(count, self.outputs)",
        "wanted = span(count * 0 + n - 1, self.outputs)",
        ("tests/methods/test_peagle.py", "tests/methods/test_mtp.py"),
    ),
)
