"""Runs a command until it ends, or until standard input does: then everything that it has started is ended.

`python supervise.py COMMAND ...`, as the leader of a process group, with a pipe as standard input. The pipe closes
whatever ends the process that holds its other end, so that no server outlives a run that was killed. Only the standard
library is used: it starts in a moment.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 3.0  # seconds to end in
CLOSED = threading.Event()  # set when standard input has ended


def main() -> int:
    """Runs the command; returns its exit code, as a shell does: 128 and its number where a signal ended it."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the command, which may take its time
    threading.Thread(target=_end_with_input, daemon=True).start()
    code = process.wait()
    if CLOSED.is_set():
        os.killpg(0, signal.SIGKILL)  # what the command has left behind
    return code if code >= 0 else 128 - code


def _end_with_input() -> None:
    # Not through sys.stdin, whose lock a thread that waits would still hold when this process ends.
    while os.read(0, 1024):
        pass
    CLOSED.set()
    os.killpg(0, signal.SIGTERM)  # so that it can remove what it shares, such as vLLM's memory in /dev/shm
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
