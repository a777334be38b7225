"""Judges the answers of any engine by the target: `specbench audit FILE pair=NAME [plain=FILE again=FILE ...]`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from specbench.config.checks import check_sources
from specbench.config.compose import program
from specbench.measure.metrics.drawn import UNLIKELY, is_off, rarities
from specbench.measure.metrics.metrics import VERDICTS, VIOLATION
from specbench.report.cells import console
from specbench.system.errors import UserError
from specbench.system.files import write_json
from specbench.system.paths import existing_file
from specbench.system.settings import (
    Count,
    Natural,
    NotNegative,
    Temperature,
    TopP,
    check_all,
    check_truncation,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.engines.audit import Arm, Likelihoods

SETTINGS = {
    "answers": str,
    "plain": str | None,
    "again": str | None,
    "temperature": Temperature,
    "top_k": Natural,
    "top_p": TopP,
    "max_new_tokens": Count | None,
    "tolerance": NotNegative | None,
    "out": str | None,
}
SHOWN = 10  # departures that are printed


def audit(cfg: DictConfig) -> int:
    """Judges answers as configured (conf/audit.yaml) and prints the findings; returns 1 if any answer is wrong."""
    check_all(cfg, SETTINGS)
    check_sources(cfg)
    named = {"plain": cfg.plain, "plain again": cfg.again, "answers": cfg.answers}
    if cfg.again is not None and cfg.plain is None:
        raise UserError("again= is a second set of plain answers: name the first as plain=FILE")
    files = {name: existing_file(path) for name, path in named.items() if path is not None}
    if cfg.out is not None and (Path(cfg.out).is_dir() or not Path(cfg.out).parent.is_dir()):
        raise UserError(f"out={cfg.out}: name a file in a folder that exists")
    if cfg.out is not None and Path(cfg.out).resolve() in [path.resolve() for path in files.values()]:
        raise UserError(f"out={cfg.out} would replace answers that are judged: name another file")
    check_truncation(cfg)
    # Late: torch takes seconds.
    from specbench.decoding.sampling import SamplingParams
    from specbench.engines.answer_files import read_answers
    from specbench.engines.audit import Referee, arms_of, first_tokens, likelihoods
    from specbench.models.devices import name_of
    from specbench.models.pairs import load_pair

    pair = load_pair(cfg.pair, 0, with_draft=False)
    decoding = SamplingParams.from_settings(cfg, max_new_tokens=pair.context_length)
    referee = Referee(pair, decoding)
    arms = arms_of(
        referee,
        {name: read_answers(path, pair) for name, path in files.items()},
        cfg.max_new_tokens,
        cfg.tolerance,
    )
    out = console()
    drawn = cfg.temperature > 0
    report: dict[str, Any] = {
        "pair": pair.name,
        "dtype": name_of(pair.staged.dtype),
        "temperature": cfg.temperature,
        **decoding.truncation,
        "bound": arms[0].bound,
        "arms": {arm.name: _facts_of(arm, drawn) for arm in arms},
    }
    rounding = "" if drawn else f"; rounding up to {arms[0].bound:.2g} logits"
    out.print(f"{pair.name} in {report['dtype']} is the referee{rounding}", soft_wrap=True)
    if drawn:
        pairs = {arm.name: likelihoods(arms[0], arm) for arm in arms[1:]}
        report["paired"] = {name: None if one is None else asdict(one) for name, one in pairs.items()}
        tests = [(arm.name, *test) for arm in arms for test in first_tokens(referee, arm)]
        report["first_tokens"] = [
            {"arm": name, "id": answer.name, "answers": n, "p": p} for name, answer, n, p in tests
        ]
        out.print(_drawn_table(arms, pairs))
        for name, answer, n, p in tests:
            out.print(f"{name}: first tokens of {n} answers to the prompt of {answer.name}: p = {p:.2g}")
        wrong = any(one["wrong"] for one in report["arms"].values()) or are_unlikely([p for *_, p in tests])
    else:
        out.print(_greedy_table(arms))
        for line in _departures(arms):
            out.print(line, soft_wrap=True)
        wrong = any(arm.verdicts[VIOLATION] for arm in arms)
    if cfg.out is not None:
        write_json(Path(cfg.out), report)
        out.print(cfg.out, soft_wrap=True)
    return int(wrong)


def are_unlikely(p_values: list[float]) -> bool:
    """Whether the lowest p value, Bonferroni-corrected for the number of tests, is below `UNLIKELY`."""
    return any(p * len(p_values) < UNLIKELY for p in p_values)


def _facts_of(arm: Arm, drawn: bool) -> dict[str, Any]:
    """Findings about an arm, in machine-readable form."""
    facts: dict[str, Any] = {
        "answers": len(arm.judged),
        "tokens": arm.tokens,
        "logprob_error": arm.logprob_error,
    }
    if drawn:
        return facts | {
            "logprob": arm.logprob,
            **arm.judgement,
            "wrong_ends": arm.wrong_ends,
            "wrong": is_off(arm.judgement) or arm.wrong_ends > 0,
        }
    departures = [(one.answer.name, arm.verdict(one), arm.departure(one)) for one in arm.judged]
    return facts | {
        "verdicts": dict(arm.verdicts),
        "departures": [
            {"id": name, "verdict": verdict} | asdict(place) for name, verdict, place in departures if place
        ],
    }


def _greedy_table(arms: list[Arm]) -> Table:
    """Table of each arm's verdicts, and of how many answers equal those of the first arm."""
    from specbench.engines.audit import same_answers  # late, as above

    table = Table("", "answers", "tokens", *VERDICTS, "as plain", "error of logprobs")
    for arm in arms:
        as_plain = ""
        if arm is not arms[0]:
            same, both = same_answers(arms[0], arm)
            as_plain = f"{same} of {both}"
        error = arm.logprob_error
        table.add_row(
            arm.name,
            str(len(arm.judged)),
            f"{arm.tokens:,}",
            *(str(arm.verdicts[verdict]) for verdict in VERDICTS),
            as_plain,
            "" if error is None else f"{error:.2g}",
        )
    return table


def _drawn_table(arms: list[Arm], pairs: dict[str, Likelihoods | None]) -> Table:
    """Table of the likelihood of each arm's tokens."""
    table = Table("", "answers", "tokens", "mean log p", "standard errors off", "beside plain, by prompt")
    for arm in arms:
        judged = arm.judgement
        off = f"{judged['standard_errors']:+.1f}" + ("  violation" if is_off(judged) else "")
        off += "".join(f": {what}" for what in rarities(judged))
        off += f"  violation: {arm.wrong_ends} do not end where they should" if arm.wrong_ends else ""
        pair = pairs.get(arm.name)
        beside = ""
        if pair is not None:
            interval = "" if pair.low is None else f" [{pair.low:+.3f}, {pair.high:+.3f}]"
            beside = f"{pair.difference:+.3f}{interval}"
        table.add_row(arm.name, str(len(arm.judged)), f"{arm.tokens:,}", f"{arm.logprob:.3f}", off, beside)
    return table


def _departures(arms: list[Arm]) -> list[str]:
    """Descriptions of the first violations of each arm."""
    lines = []
    for arm in arms:
        wrong = [one for one in arm.judged if arm.verdict(one) == VIOLATION]
        for one in wrong[:SHOWN]:
            place = arm.departure(one)
            assert place is not None
            words = f"{arm.name}, {one.answer.name}: token {place.index}: {place.reason}"
            if place.margin is not None:
                words += f" ({place.token}; {place.best} is better by {place.margin:.3g} logits)"
            lines.append(words)
        if len(wrong) > SHOWN:
            lines.append(f"{arm.name}: and {len(wrong) - SHOWN} more")
    return lines


USAGE = "specbench audit FILE pair=NAME [plain=FILE key=value ...]"
main = program("audit", audit, resumes=False, named=("answers", USAGE))
