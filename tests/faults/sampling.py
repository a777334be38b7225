"""What is drawn, with which number, from which distribution."""

from tests.faults.fault import ACCEPT, D, Fault

FAULTS = (
    Fault(
        "more is accepted than p / q",
        "sampling",
        f"{D}/acceptance.py",
        "leading(uniforms * q < p, valid_mask)",
        "leading(uniforms * q < 1.2 * p, valid_mask)",
        (*ACCEPT, "tests/methods/test_sampling.py"),
    ),
    Fault(
        "after a rejection the target's own distribution is drawn from",
        "sampling",
        f"{D}/acceptance.py",
        "rest = (p - q).clamp_(min=0.0)",
        "rest = p.clone()",
        (*ACCEPT, "tests/methods/test_sampling.py"),
    ),
    Fault(
        "after a draft's end the residual is taken",
        "sampling",
        f"{D}/acceptance.py",
        "drafted = count < k\n",
        "drafted = count <= k\n",
        ACCEPT,
    ),
    Fault(
        "a distribution's last token is lost",
        "sampling",
        f"{D}/sampling.py",
        "drawn = drawn.clamp(max=weights.shape[-1] - 1)",
        "drawn = drawn.clamp(max=weights.shape[-1] - 2)",
        ("tests/decoding/test_sampling.py",),
    ),
    Fault(
        "the temperature multiplies",
        "sampling",
        f"{D}/sampling.py",
        "return torch.softmax(logits.float() / self.temperature, dim=-1)",
        "return torch.softmax(logits.float() * self.temperature, dim=-1)",
        ("tests/decoding/test_sampling.py",),
    ),
    Fault(
        "every position has the first one's number",
        "sampling",
        f"{D}/engine.py",
        "self._uniforms[slot, n : n + positions] = numbers",
        "self._uniforms[slot, n : n + positions] = numbers[:1]",
        (
            "tests/decoding/test_sampling.py",
            "tests/decoding/test_lossless.py",
            "tests/methods/test_sampling.py",
        ),
    ),
    Fault(
        "NaN gives a token",
        "sampling",
        f"{D}/sampling.py",
        "if NOT_DRAWN in tokens:",
        "if False:",
        ("tests/decoding/test_sampling.py", "tests/decoding/test_engine.py"),
    ),
    Fault(
        "an estimate of acceptance sees the token that it is of",
        "sampling",
        "methods/dflash/drafter.py",
        "before = torch.cat([batch.last_tokens(1), chosen[0][:, :-1]], dim=1)",
        "before = chosen[0]",
        ("tests/methods/test_dflash.py",),
    ),
)
