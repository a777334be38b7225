"""What methods draft, from which states, and how many tokens."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "prompt lookup copies one token late",
        "drafting",
        "methods/pld.py",
        "start = ends_by_length[n][0 if self.earliest else -1] + 1",
        "start = ends_by_length[n][0 if self.earliest else -1] + 2",
        ("tests/methods/test_pld.py",),
    ),
    Fault(
        "shallow nodes overwrite accepted ones in the table",
        "drafting",
        "methods/recycling.py",
        "priority = torch.where(accepted[:, : 1 + k], deepest + depths, deepest - depths)",
        "priority = deepest - depths",
        ("tests/methods/test_recycling.py",),
    ),
    Fault(
        "a state that is split is not the one of the earlier occurrence",
        "drafting",
        "methods/common/suffix_automaton.py",
        "self.link[shorter], self.link[longer] = self.link[longer], shorter",
        "self.link[shorter] = self.link[longer]",
        ("tests/methods/test_suffix_structures.py",),
    ),
    Fault(
        "a trimmed head gives rows for ids",
        "drafting",
        "methods/common/heads.py",
        "return rows if self.token_ids is None else self.token_ids[rows]",
        "return rows",
        ("tests/methods/test_heads.py", "tests/methods/test_vocab_trim.py"),
    ),
    Fault(
        "an MTP head reads the state that it was given in every step",
        "states",
        "methods/mtp/drafter.py",
        "                    out = self._level(",
        "                    _ = self._level(",
        ("tests/methods/test_mtp.py",),
    ),
    Fault(
        "a selector looks at the token that the block begins with, at every place",
        "states",
        "methods/dflash/drafter.py",
        "selector.scores(projected[:, j], before, successors[:, j])",
        "selector.scores(projected[:, j], batch.last_tokens(1)[:, 0], successors[:, j])",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "an answer's first draft is as long as the last one of another answer",
        "schedules",
        "specbench/measure/draft_length.py",
        "self._lengths[slot], self._counts[slot] = self.rule.initial, 0.0",
        "self._lengths[slot], self._counts[slot] = max(self._lengths[slot], 1), 0.0",
        ("tests/methods/test_draft_length.py",),
    ),
    Fault(
        "a rejected token counts as one that was not judged",
        "schedules",
        "specbench/measure/draft_length.py",
        "counts += accepted, min(accepted + 1, last)",
        "counts += accepted, accepted",
        ("tests/methods/test_draft_length.py",),
    ),
    Fault(
        "a sequence of a batch drafts as many tokens as the longest draft beside it",
        "schedules",
        "specbench/decoding/engine.py",
        "limits = [min(one.remaining - 1, most, wished(slot)) for slot, one in enumerate(running)]",
        "limits = [min(one.remaining - 1, most, max(map(wished, range(len(running))))) for one in running]",
        ("tests/methods/test_draft_length.py",),
    ),
)
