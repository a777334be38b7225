import errno
import signal
from types import SimpleNamespace

import pytest
import torch

from specbench.decoding.model.anatomy import drivable
from specbench.system.errors import UserError, file_errors, one_line_errors, stoppable, suggest


def test_near_names_the_closest_and_all_that_are_known():
    assert suggest("kangaro", ["sps", "kangaroo"]) == "did you mean kangaroo? (known: kangaroo, sps)"
    assert suggest("KANGAROO", ["sps", "kangaroo"]).startswith("did you mean kangaroo?")
    assert suggest("xyz", ["sps", "kangaroo"]) == "known: kangaroo, sps"
    assert suggest("xyz", []) == "known: none"
    assert suggest("math", ["math_reasoning", "rag"]).startswith("did you mean math_reasoning?")
    assert (
        suggest("m", ["math_reasoning", "rag"])
        == suggest("", ["rag", "math_reasoning"])
        == "known: math_reasoning, rag"
    )


def test_a_user_error_is_one_line_and_exit_code_2(capsys):
    @one_line_errors()
    def main():
        raise UserError("first\nsecond")

    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "error: first second\n"
    assert captured.out == ""


def test_a_full_gpu_is_one_line(capsys):
    full = (
        "CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which"
    )
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        raise torch.OutOfMemoryError(full)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: CUDA out of memory. Tried to allocate 100.00 MiB: a smaller batch_size")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_a_full_machine_is_one_line_and_no_fault_of_a_model(error, capsys):
    with pytest.raises(SystemExit) as exit_, one_line_errors(), drivable(SimpleNamespace()):
        raise error
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("error: the machine has not enough free memory: a smaller")


def test_ctrl_c_is_one_line_unless_an_outer_one_tells_more(capsys):
    for place, line in (((), "stopped"), (("goes on",), "stopped; goes on")):
        with pytest.raises(SystemExit) as exit_, one_line_errors():
            raise KeyboardInterrupt(*place)
        assert exit_.value.code == 130 and capsys.readouterr().err == f"\n{line}\n"
    with pytest.raises(KeyboardInterrupt), one_line_errors(stops=False):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="no memory"), one_line_errors():
        raise RuntimeError("no memory")
    with pytest.raises(ZeroDivisionError), one_line_errors():
        1 / 0  # noqa: B018


def test_what_the_system_refuses_names_the_file(tmp_path):
    with pytest.raises(UserError, match=f"^{tmp_path}/none: No such file or directory$"), file_errors():
        (tmp_path / "none").read_text()
    with pytest.raises(ZeroDivisionError), file_errors():
        1 / 0  # noqa: B018


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("saved", "message"),
    [("step 3", "^the same command resumes from step 3$"), (None, "^nothing was saved yet: .* starts over$")],
)
def test_a_stop_tells_what_the_same_command_will_do(number, saved, message):
    """Of either signal alike; what SIGTERM did before, it does afterwards."""
    interrupts, before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt, match=message), stoppable(lambda: saved):
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, interrupts)
    assert signal.getsignal(signal.SIGTERM) == before
