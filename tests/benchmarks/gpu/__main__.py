"""The check on a GPU: every part in a process of its own, figures as JSON lines as they come, a report at the end.

It needs torch, transformers and this checkout: no network, no Hydra. What is done survives whatever happens later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

import specbench  # noqa: F401 - before torch, for how its threads wait
from tests.benchmarks.gpu.report import markdown

RESULTS, REPORT = "results.jsonl", "report.md"


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; 1 if a part failed or a figure is not as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu with --small")
    parser.add_argument(
        "--small", action="store_true", help="narrow models and few tokens: tries the script itself"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of results.jsonl and report.md"
    )
    parser.add_argument("--parts", nargs="*", help="only these parts, by name or its beginning")
    parser.add_argument("--minutes", type=float, default=9.5, help="after which no further part runs")
    parser.add_argument("--together", action="store_true", help="all parts in this process")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # the process of one part
    options = parser.parse_args(arguments)
    if options.part:
        measure(options.part, options.device, options.small, sys.stdout)
        return 0
    from specbench.measure.machine import provenance
    from tests.benchmarks.gpu.parts import PARTS

    machine = provenance.machine()
    chosen = [name for name in PARTS if not options.parts or name.startswith(tuple(options.parts))]
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with (options.out / RESULTS).open("w", encoding="utf-8") as file:
        name = (
            ", ".join(gpu["name"] for gpu in machine["gpus"]) if options.device != "cpu" else machine["cpu"]
        )
        write(file, {"machine": name, "small": options.small, "time": time.strftime("%Y-%m-%d %H:%M %Z")})
        for name in chosen:
            left = 60 * options.minutes - (time.monotonic() - begun)
            if left < 10:
                write(file, {"part": name, "failed": "not run: no time was left"})
            elif options.together:
                measure(name, options.device, options.small, file)
            else:
                own = ["--device", options.device, *(["--small"] if options.small else [])]
                run(name, own, min(left, PARTS[name].limit), file)
    lines = [json.loads(line) for line in (options.out / RESULTS).read_text(encoding="utf-8").splitlines()]
    text, fine = markdown(lines)
    (options.out / REPORT).write_text(text, encoding="utf-8")
    print(text)
    return 0 if fine else 1


def run(name: str, own: list[str], limit: float, file: TextIO) -> None:
    """Runs a part in a process, for `limit` seconds at most, and passes its lines on as they come."""
    command = [sys.executable, "-u", "-m", "tests.benchmarks.gpu", "--part", name, *own]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    late = threading.Timer(limit, process.kill)
    late.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):
                write(file, json.loads(line))
        code = process.wait()
    finally:
        late.cancel()
        process.kill()
    reader.join(5)
    spent = time.monotonic() - begun
    ended: dict[str, object] = {"part": name, "seconds": round(spent, 1)}
    if code:
        why = f"ended after {limit:.0f} s" if code < 0 and spent >= limit else f"exit code {code}"
        said = [line.strip() for line in errors if line.strip()]
        ended["failed"] = f"{why}: {said[-1]}" if said else why
    write(file, ended)


def measure(name: str, device: str, small: bool, file: TextIO) -> None:
    """Runs a part in this process."""
    from specbench.models.pairs import choose_device, prepare_device
    from tests.benchmarks.gpu.figures import Check, Figure
    from tests.benchmarks.gpu.parts import PARTS

    def say(figure: Figure) -> None:
        if small and figure.unit:  # times of narrow models on a CPU tell nothing
            figure = replace(figure, low=None, high=None)
        write(file, {"part": name, **asdict(figure)})

    where = choose_device(device)
    if name != "attention":  # which compares
        prepare_device(where)
    PARTS[name].work(Check(where, small, say))


def write(file: TextIO, line: dict) -> None:
    """Writes a line at once."""
    file.write(json.dumps(line) + "\n")
    file.flush()
    if file is not sys.stdout:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
