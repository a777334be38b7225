"""Drafts that are trees: their paths, and their entries in the cache."""

from tests.faults.fault import ACCEPT, LOSSLESS, D, Fault

FAULTS = (
    Fault(
        "a tree's path goes through a node that does not fit",
        "trees",
        f"{D}/acceptance.py",
        "survives = ~(tree.on_path & ~fits.unsqueeze(1)).any(-1)",
        "survives = fits",
        ACCEPT,
    ),
    Fault(
        "a node attends to its siblings",
        "trees",
        f"{D}/tree.py",
        "return cls(parents, seen[:, 1:, 1:].sum(-1), seen, max_children=max_children)",
        "return cls(parents, seen[:, 1:, 1:].sum(-1), torch.ones_like(seen).tril(), max_children=max_children)",
        LOSSLESS,
    ),
    Fault(
        "depths of trees made on the host are short by one",
        "trees",
        f"{D}/tree.py",
        "return cls(on_device(parents, device), seen[:, 1:, 1:].sum(-1), seen)",
        "return cls(on_device(parents, device), (seen[:, 1:, 1:].sum(-1) - 1).clamp(min=1), seen)",
        ("tests/decoding/test_acceptance.py", "tests/methods/test_lossless.py"),
    ),
    Fault(
        "ancestors reach half as far",
        "trees",
        f"{D}/tree.py",
        "for _ in range(max(k - 1, 0).bit_length()):",
        "for _ in range(max(k - 1, 0).bit_length() // 2):",
        ACCEPT,
    ),
    Fault(
        "an accepted path is not moved to the end",
        "trees",
        f"{D}/kv_layout.py",
        "self.cache.move_entries(batch.seq_lens.unsqueeze(1) + path[:, :n], span(batch.seq_lens, n))",
        "self.cache.move_entries(span(batch.seq_lens, n), span(batch.seq_lens, n))",
        LOSSLESS,
    ),
    Fault(
        "later siblings are tried again with the same share",
        "trees",
        f"{D}/acceptance.py",
        "torch.where(rejected, residual(p / p.sum(-1, keepdim=True), q), p)",
        "torch.where(rejected, p / p.sum(-1, keepdim=True), p)",
        ACCEPT,
    ),
    Fault(
        "a turn leaves out a node that has so many children",
        "trees",
        f"{D}/acceptance.py",
        "if may_look(tokens) else k // (turn + 1)",
        "if may_look(tokens) else max(1, k // (turn + 2))",
        ACCEPT,
    ),
    Fault(
        "only children of the pending token are reached",
        "trees",
        f"{D}/acceptance.py",
        "reached = torch.nn.functional.pad(fits, (1, 0))",
        "reached = torch.nn.functional.pad(fits & (parents == 0), (1, 0))",
        ACCEPT,
    ),
    Fault(
        "a tree leaves out children of likely paths",
        "trees",
        "methods/common/dynamic_trees.py",
        "for rank in range(width // (i + 1))]",
        "for rank in range(max(1, width // (2 * i + 2)))]",
        ("tests/methods/test_dflash.py",),
    ),
)
