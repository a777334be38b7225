"""Which entries a token attends to."""

from tests.faults.fault import BATCHES, LOSSLESS, D, Fault

FAULTS = (
    Fault(
        "a token does not see itself",
        "masks",
        f"{D}/model/layer_stack.py",
        "allowed = kv_positions <= positions\n",
        "allowed = (kv_positions < positions) | (kv_positions == 0)\n",
        ("tests/decoding/test_staged_model.py", *LOSSLESS),
    ),
    Fault(
        "a window is one position too wide",
        "masks",
        f"{D}/model/layer_stack.py",
        "allowed &= kv_positions > positions - window",
        "allowed &= kv_positions >= positions - window",
        ("tests/decoding/test_staged_model.py", "tests/decoding/test_families.py"),
    ),
    Fault(
        "query heads see each other's masks",
        "masks",
        f"{D}/cpu/grouped_attention.py",
        "mask.repeat(1, 1, groups, 1)",
        "mask.repeat_interleave(groups, -2)",
        ("tests/decoding/test_grouped_attention.py", *LOSSLESS),
    ),
    Fault(
        "in a batch a tree sees the pending token's entry twice",
        "masks",
        f"{D}/kv_layout.py",
        "sees = self._entries[:, :kv_len] < (batch.seq_lens - 1).unsqueeze(1)",
        "sees = self._entries[:, :kv_len] < (batch.seq_lens - 2).unsqueeze(1)",
        BATCHES,
    ),
    Fault(
        "a mask has the token that stands there",
        "masks",
        "methods/peagle/drafter.py",
        "_replaced(embeds, mask_embeds, masked)",
        "_replaced(embeds, mask_embeds, masked & (places >= n).view(1, -1, 1))",
        ("tests/methods/test_peagle.py",),
    ),
    Fault(
        "a convolution sums a place with the one after it",
        "masks",
        "methods/dflash/layers.py",
        "torch.cat([torch.zeros_like(blocks[:, :back]), blocks[:, :-back]], dim=1)",
        "torch.cat([blocks[:, back:], torch.zeros_like(blocks[:, :back])], dim=1)",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a place of a block sees none after it",
        "masks",
        "methods/dflash/drafter.py",
        "torch.ones(1, places, places, dtype=torch.bool, device=device)",
        "torch.ones(1, places, places, dtype=torch.bool, device=device).tril()",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a block guesses the token before it",
        "masks",
        "methods/dflash/drafter.py",
        "return states[:, config.fills_in : config.fills_in + k]",
        "return states[:, :k]",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a node of a further level does not see itself",
        "masks",
        "methods/common/dynamic_trees.py",
        "seen = torch.cat([seen_above, itself], dim=2)",
        "seen = torch.cat([seen_above, torch.zeros_like(itself)], dim=2)",
        ("tests/methods/test_dynamic_trees.py", "tests/methods/test_eagle.py"),
    ),
)
