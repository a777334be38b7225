"""The check on a GPU: every part in a process of its own, figures as JSON lines as they come, a report at the end.

It needs torch, transformers and this checkout: no network, no Hydra. What is done survives whatever happens later:
results are added to those of earlier checks, whose methods are measured last.
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
GRACE = 60.0  # seconds that a step of a part may take beyond the part's time


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
    parser.add_argument("--methods", nargs="*", help="only these, in the parts that measure methods")
    parser.add_argument("--minutes", type=float, default=9.0, help="which the parts share")
    parser.add_argument("--together", action="store_true", help="all parts in this process")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # the process of one part
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # which it has
    options = parser.parse_args(arguments)
    if options.part:
        measure(options.part, options, options.seconds, sys.stdout)
        return 0
    from specbench.measure.machine import hardware
    from tests.benchmarks.gpu.answers import alone
    from tests.benchmarks.gpu.parts import PARTS

    if unknown := {*(options.methods or ())} - {*alone()}:
        parser.error(f"no method of one sequence is called {', '.join(sorted(unknown))}")
    machine = hardware.machine()
    chosen = [name for name in PARTS if not options.parts or name.startswith(tuple(options.parts))]
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with (options.out / RESULTS).open("a", encoding="utf-8") as file:
        name = (
            ", ".join(gpu["name"] for gpu in machine["gpus"]) if options.device != "cpu" else machine["cpu"]
        )
        write(file, {"machine": name, "small": options.small, "time": time.strftime("%Y-%m-%d %H:%M %Z")})
        for place, name in enumerate(chosen):
            left = 60 * options.minutes - (time.monotonic() - begun)
            # What earlier parts did not need is shared by those that follow.
            limit = left * PARTS[name].share / sum(PARTS[other].share for other in chosen[place:])
            if limit < PARTS[name].least:
                least = f"it takes {PARTS[name].least} s, and its share was {max(limit, 0.0):.0f} s"
                write(file, {"part": name, "left_out": f"all of it: {least}"})
            elif options.together:
                measure(name, options, limit, file)
            else:
                own = ["--device", options.device, "--out", str(options.out)]
                own += ["--small"] if options.small else []
                own += ["--methods", *options.methods] if options.methods else []
                run(name, own, limit, file)
    text, fine = markdown(lines_of(options.out)[-1])
    (options.out / REPORT).write_text(text, encoding="utf-8")
    print(text)
    return 0 if fine else 1


def run(name: str, own: list[str], limit: float, file: TextIO) -> None:
    """Runs a part in a process, which has `limit` seconds, and passes its lines on as they come."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "tests.benchmarks.gpu",
        "--part",
        name,
        "--seconds",
        str(limit),
        *own,
    ]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    late = threading.Timer(limit + GRACE, process.kill)
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
        late_by = f"ended after {spent:.0f} s, of which it had {limit:.0f}"
        why = late_by if code < 0 and spent >= limit + GRACE else f"exit code {code}"
        said = [line.strip() for line in errors if line.strip()]
        ended["failed"] = f"{why}: {said[-1]}" if said else why
    write(file, ended)


def measure(name: str, options: argparse.Namespace, limit: float, file: TextIO) -> None:
    """Runs a part in this process, for `limit` seconds and what its last step takes."""
    end = time.monotonic() + limit
    from specbench.models.devices import choose_device, prepare_device
    from tests.benchmarks.gpu.figures import Check, Figure, TimeUp
    from tests.benchmarks.gpu.parts import PARTS

    def say(figure: Figure) -> None:
        if options.small and figure.unit:  # times of narrow models on a CPU tell nothing
            figure = replace(figure, low=None, high=None)
        write(file, {"part": name, **asdict(figure)})

    where = choose_device(options.device)
    if name != "attention":  # which compares
        prepare_device(where)
    try:
        measured = measured_methods(lines_of(options.out), name)
        PARTS[name].work(Check(where, options.small, say, end, options.methods, measured))
    except TimeUp as left:
        write(file, {"part": name, "left_out": f"no time for {left}"})


def lines_of(out: Path) -> list[list[dict]]:
    """The lines of each check in a folder, the last one at the end."""
    checks: list[list[dict]] = []
    for line in (out / RESULTS).read_text(encoding="utf-8").splitlines():
        content = json.loads(line)
        if "machine" in content:
            checks.append([])
        checks[-1].append(content)
    return checks


def measured_methods(checks: list[list[dict]], part: str) -> list[str]:
    """The methods of which a part has figures, by when it had the last one."""
    figures = [
        line["name"] for lines in checks for line in lines if line.get("part") == part and "name" in line
    ]
    methods = (figure.partition(":")[0].split()[-1] for figure in reversed(figures))
    return [*dict.fromkeys(methods)][::-1]


def write(file: TextIO, line: dict) -> None:
    """Writes a line at once."""
    file.write(json.dumps(line) + "\n")
    file.flush()
    if file is not sys.stdout:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
