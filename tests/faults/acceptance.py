"""Which tokens of a draft are accepted, and which token follows them."""

from tests.faults.fault import ACCEPT, BATCHES, D, Fault

FAULTS = (
    Fault(
        "a block's ratio may pass 1",
        "acceptance",
        f"{D}/acceptance.py",
        "(sums - sums.cummax(-1).values.clamp(min=0.0)).exp()",
        "sums.exp()",
        ("tests/decoding/test_block_verification.py",),
    ),
    Fault(
        "a block is accepted with the numbers of the one before it",
        "acceptance",
        f"{D}/acceptance.py",
        "uniforms[:, :k, ACCEPT : ACCEPT + k].diagonal(dim1=1, dim2=2)",
        "uniforms[:, :k, ACCEPT]",
        ("tests/decoding/test_block_verification.py",),
    ),
    Fault(
        "a block is drafted with the numbers of the one before it",
        "acceptance",
        f"{D}/state.py",
        "return numbers[:, first + offset]",
        "return numbers[:, first]",
        ("tests/decoding/test_block_verification.py",),
    ),
    Fault(
        "a block's next token is drawn from the residual of one token",
        "acceptance",
        f"{D}/acceptance.py",
        "residual(_at(joint, count).unsqueeze(-1) * _row(probs, count), _row(q, count))",
        "residual(_row(probs, count), _row(q, count))",
        ("tests/decoding/test_block_verification.py",),
    ),
    Fault(
        "a rejected token is kept",
        "acceptance",
        f"{D}/acceptance.py",
        "return (fits if valid_mask is None else fits & valid_mask).cumprod(-1).sum(-1)",
        "return (fits if valid_mask is None else fits & valid_mask).sum(-1)",
        ACCEPT,
    ),
    Fault(
        "a rejected draft token follows in place of the target's own",
        "acceptance",
        f"{D}/acceptance.py",
        "return Accepted(leading(choices[..., :-1] == tokens, valid_mask), choices)",
        "return Accepted(leading(choices[..., :-1] == tokens, valid_mask), torch.cat([tokens, choices[..., -1:]], -1))",
        ACCEPT,
    ),
    Fault(
        "limits let one token too many through",
        "acceptance",
        f"{D}/acceptance.py",
        "within = depths <= limits.unsqueeze(1)",
        "within = depths <= 1 + limits.unsqueeze(1)",
        (*ACCEPT, "tests/decoding/test_engine.py"),
    ),
    Fault(
        "padding is accepted",
        "acceptance",
        f"{D}/state.py",
        "device=self.tokens.device) < self.candidates.unsqueeze(1)",
        "device=self.tokens.device) <= self.candidates.unsqueeze(1)",
        (*ACCEPT, *BATCHES),
    ),
    Fault(
        "a lossy rule keeps what the target finds unlikely",
        "acceptance",
        f"{D}/acceptance.py",
        ".clamp(max=THRESHOLD)",
        ".clamp(max=0.0)",
        ("tests/decoding/test_acceptance.py",),
    ),
)
