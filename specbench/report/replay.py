"""What other draft lengths would have given: `specbench replay RUNS`, from the rounds that runs recorded.

The rounds of a chain show for almost every place of an answer whether the drafter guesses its token: it does if a token
was accepted, and does not if one was rejected. Only the target's token after a draft that was accepted whole was never
guessed; whether it would have been is drawn, with the rate at which the first guess after such a draft is right. If a
drafter stopped by itself (a look-up without a match, a guess that it is unsure of), a replayed draft stops, too. Any
length up to the recorded one, and any rule that chooses lengths, can then be played over the same answers.

Apart from these draws this is exact if a guess depends on the text alone (a draft model, token by token). If a drafter
guesses better in the first place of a draft than in the fourth, its shorter drafts are better than replayed.

Costs are means of the recorded rounds by their number of draft tokens, each in rounds of the same run's baseline, which
has no draft; between measured lengths they are interpolated. So one run with long drafts yields lengths, and a second
with short ones makes speedups accurate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from specbench.config.spec import BASELINE, METHOD, POOL
from specbench.measure.draft_length import Adaptive, Constant, Goodput, costs_by_length, listed_costs
from specbench.measure.metrics.dataframes import steps_frame
from specbench.measure.metrics.statistics import speedup
from specbench.measure.metrics.timing import ARMS
from specbench.report.cells import NUMBER, PlainTable, console, number_text
from specbench.report.compare import warnings
from specbench.report.decision import beside_length, draft_length, in_words, setting_key
from specbench.report.labels import as_text
from specbench.report.tables import print_notes, runs_of_command
from specbench.system.errors import UserError, file_errors, one_line_errors
from specbench.system.settings import ADAPTIVE, CONSTANT, GOODPUT

if TYPE_CHECKING:
    from rich.table import Table

    from specbench.report.runs import Run

DRAWS = 20  # of the places that were not guessed
LEAST_ROUNDS = 20  # of a length, for a mean of their costs
ORACLE = "oracle"
ANSWER = ["process", "repeat", "question_id", "pool", "turn"]


@dataclass(frozen=True)
class Answer:
    """The places of an answer after its first token.

    Attributes:
        right: [n] 1 if the drafter guesses the token, 0 if it does not, NaN if that is unknown.
        ends: [n] the place in front of which a draft that begins here stops by itself; n or more: it does not.
        limited: whether it ended at its limit: drafts were no longer than what was left of it.
        baseline_seconds: that autoregressive decoding took for it, prompt included.
        prefill_seconds: that the method took for its prompt.
        baseline_tokens: after the first one.
    """

    right: np.ndarray
    ends: np.ndarray
    limited: bool
    baseline_seconds: float
    prefill_seconds: float
    baseline_tokens: int


@dataclass(frozen=True)
class Played:
    """The result of a rule on some answers.

    Attributes:
        length: acceptance length; None if nothing was drafted.
        speedup: None without costs.
    """

    length: float | None
    speedup: float | None


NOTHING = Played(None, None)


class Recorded:
    """The rounds of one run.

    Args:
        run: of one question at a time.

    Attributes:
        longest: most draft tokens of a round.
        most: that a round could have had; None if that is no setting.
        rule: that chose lengths (`decoding.draft_length`).
        is_chain: whether it drafted chains, and nothing else.
        baseline_round: seconds of a round of the baseline.
        after_full: rate at which the first guess after a draft that was accepted whole is made and right.
        answers: of the method.
    """

    def __init__(self, run: Run):
        self.run, self.rule = run, run.summary["draft_length"]
        steps = steps_frame(run.records)
        self._rounds = steps[steps["arm"] == METHOD].copy()
        self.longest, self.most = int(self._rounds["drafted"].max()), draft_length(run.summary)
        # Fewer than `max_new_tokens` where the context ends.
        caps = {key: len(answer["tokens"]) for key, _, answer in self._methods() if _is_limited(answer)}
        keys = zip(*(self._rounds[name] for name in ANSWER))
        tokens = np.array([caps.get(key, run.summary["max_new_tokens"]) for key in keys])
        left = tokens - self._rounds["place"] - 1  # the last token belongs to the target alone
        # The length that a rule allowed is not recorded: it is assumed to be the draft's.
        limit = left.clip(upper=self.longest) if self.rule == CONSTANT else self._rounds["drafted"]
        self._rounds["limit"] = limit
        self.is_chain = self.longest > 0 and bool((self._rounds["depth"] == self._rounds["drafted"]).all())
        self.baseline_round = float(_seconds(steps[steps["arm"] == BASELINE]).mean())
        self.after_full = self._after_full()
        self.answers = [*self._answers()]

    @property
    def measured(self) -> Played:
        """The run's own figures."""
        overall = self.run.summary["overall"]
        return Played(overall["acceptance_length"], overall["speedup"])

    def costs(self) -> pd.DataFrame:
        """`sum` and `size` of the rounds' seconds by draft tokens, in rounds of the baseline."""
        costs = _seconds(self._rounds) / self.baseline_round
        return costs.groupby(self._rounds["drafted"]).agg(["sum", "size"])

    def _after_full(self) -> float:
        """As the attribute; drafts that stopped by themselves do not count as whole."""
        drafted = self._rounds[self._rounds["limit"] > 0]
        accepted_all = drafted["accepted"] == drafted["limit"]
        full = accepted_all.groupby([drafted[key] for key in ANSWER]).shift()
        after = drafted[full.fillna(False).astype(bool)]
        return float((after["accepted"] > 0).mean()) if len(after) else 1.0

    def _methods(self) -> Iterable[tuple[tuple, dict, dict]]:
        """Each answer of the method, with its key and its turn in front."""
        for record in self.run.records:
            for turn in record["turns"]:
                for answer in turn["arms"].get(METHOD, ()):  # one, or none of a turn that failed
                    yield tuple((record | turn)[name] for name in ANSWER), turn, answer

    def _answers(self) -> Iterable[Answer]:
        rounds, none = {key: part for key, part in self._rounds.groupby(ANSWER)}, self._rounds.iloc[:0]
        quoted = self.run.summary["baseline"]["quoted_against"]  # what the measured speedup is against, too
        for key, turn, answer in self._methods():
            [plain] = turn["arms"][ARMS[quoted]]
            if key in rounds or len(answer["tokens"]) == 1:  # one token takes no round
                right, ends = _guesses(rounds.get(key, none), len(answer["tokens"]))
                limited, prefill = _is_limited(answer), answer["prefill_seconds"] or 0.0
                yield Answer(right, ends, limited, plain["seconds"], prefill, len(plain["tokens"]) - 1)


def _is_limited(answer: Mapping) -> bool:
    """As `Answer.limited`, of a recorded answer."""
    return answer["finish"] == "length"


def _seconds(rounds: pd.DataFrame) -> pd.Series:
    return rounds["draft_seconds"] + rounds["verify_seconds"] + rounds["other_seconds"]


def _guesses(rounds: pd.DataFrame, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """`Answer.right` and `Answer.ends` of an answer of so many tokens."""
    right, ends = np.full(tokens, np.nan), np.full(tokens, tokens)
    columns = (rounds[name] for name in ("place", "drafted", "accepted", "limit"))
    for place, drafted, accepted, limit in zip(*columns):
        right[place : place + accepted] = 1.0
        if accepted < drafted:
            right[place + accepted : place + accepted + 1] = 0.0
        if drafted < limit:
            ends[place : place + accepted + 1] = place + drafted
    return right[1:], ends[1:] - 1


def rounds_of(
    right: np.ndarray, ends: np.ndarray, rule: Constant, limited: bool = True
) -> list[tuple[int, int]]:
    """Plays a rule over an answer.

    Args:
        right: [n] whether each place is guessed.
        ends: as in `Answer`.
        rule: chooses the lengths, as it does in `draft_length.VariableLength`.
        limited: as in `Answer`; if not, its end is unknown when the last draft is made.

    Returns:
        Draft tokens and accepted ones of each round.
    """
    rounds, at, length, counts = [], 0, rule.initial, np.zeros(2)
    wrong = np.append(np.flatnonzero(right == 0), len(right))
    next_wrong = wrong[np.searchsorted(wrong, np.arange(len(right)))].tolist()  # of each place
    offered = (ends - np.arange(len(right))).tolist()
    while at < len(right):
        drafted = min(length, offered[at]) if offered[at] < len(right) - at else length
        if limited:
            drafted = min(drafted, len(right) - at - 1)
        accepted = min(drafted, next_wrong[at] - at)
        rounds.append((drafted, accepted))
        at += accepted + 1
        if drafted:
            length = rule.next_length(length, drafted, accepted, counts)
    return rounds


def play(recorded: Recorded, costs: Sequence[float] | None, rule: Constant, oracle: bool = False) -> Played:
    """Plays a rule over the answers of a run.

    Args:
        recorded: the run.
        costs: of a round by draft tokens, in rounds of the baseline; None: not measured.
        rule: chooses the lengths.
        oracle: whether only tokens that will be accepted are drafted.
    """
    rng = np.random.default_rng(0)
    by_length = None if costs is None else costs_by_length(costs, recorded.longest)
    tokens = baseline_tokens = passes = 0
    prefill = decoding = baseline = 0.0
    for answer in recorded.answers:
        for _ in range(DRAWS):
            drawn = rng.random(len(answer.right)) < recorded.after_full
            right = np.where(np.isnan(answer.right), drawn, answer.right)
            rounds = rounds_of(right, answer.ends, rule, answer.limited)
            tokens += len(answer.right)
            passes += len(rounds)
            if by_length is not None:
                drafted = [accepted if oracle else drafted for drafted, accepted in rounds]
                prefill += answer.prefill_seconds
                decoding += by_length[drafted].sum() * recorded.baseline_round
                baseline += answer.baseline_seconds
                baseline_tokens += answer.baseline_tokens
    length = tokens / passes if passes else None
    sums = ([part] for part in (baseline, prefill + decoding, decoding, baseline_tokens, tokens))
    return Played(length, speedup(*sums).value)


def mean_costs(recorded: Iterable[Recorded]) -> dict[int, float]:
    """Costs of a round by draft tokens, in rounds of the baseline: means of all such rounds of the runs.

    One without a draft costs 1 where too few were measured.
    """
    every = pd.concat([one.costs() for one in recorded]).groupby(level=0).sum()
    usual = every[every["size"] >= LEAST_ROUNDS]
    means = usual["sum"] / usual["size"]
    return {0: 1.0} | {int(length): float(cost) for length, cost in means.items()}


def replay_table(recorded: Sequence[Recorded], title: str) -> tuple[Table, str]:
    """Replays other lengths and rules.

    Args:
        recorded: runs that differ in their draft lengths alone.
        title: of the table.

    Returns:
        A row for each length up to the longest recorded one, and for each rule that the drafter can follow, with
        measured figures beside them; the settings of a run with these costs.
    """
    constant = [one for one in recorded if one.rule == CONSTANT]
    base = max(reversed(constant or recorded), key=lambda one: one.longest)  # of equal runs the last counts
    means = mean_costs(recorded)
    costs = listed_costs(means)
    beside = [one for one in recorded if one.rule == CONSTANT or one.most == base.longest]
    measured = {one.longest if one.rule == CONSTANT else one.rule: one.measured for one in beside}
    rules: dict[str | int, Constant] = {length: Constant(length) for length in range(1, base.longest + 1)}
    any_length = base.run.summary["any_length"] is not False  # unknown in older runs
    if any_length:
        rules[ADAPTIVE] = Adaptive(base.longest)
    if any_length and costs is not None:
        # A run of the rule measured its costs on warm-up questions: the rule is played with these.
        of_runs = (one.run.summary["round_costs"] for one in beside if one.rule == GOODPUT)
        rules[GOODPUT] = Goodput(base.longest, next(of_runs, costs))
    rows = [(str(name), play(base, costs, rule), measured.get(name, NOTHING)) for name, rule in rules.items()]
    rows.append((ORACLE, play(base, costs, Constant(base.longest), oracle=True), NOTHING))
    by_length = ", ".join(f"{length}: {cost:.2f}" for length, cost in means.items() if length)
    table = PlainTable(
        title,
        f"from the drafts of {base.longest} tokens in {base.run.name}; a round costs, in rounds of the baseline, by "
        f"draft tokens: {by_length or 'not measured'}",
    )
    table.add_columns("draft length")
    table.add_columns("accept. length\nreplayed", "measured", "speedup\nreplayed", "measured", **NUMBER)
    for name, played, had in rows:
        numbers = (played.length, had.length, played.speedup, had.speedup)
        table.add_row(name, *(number_text(number, 2) for number in numbers))
    if costs is None or not any_length:
        return table, ""
    words = ",".join(f"{cost:.2f}" for cost in costs)
    return table, f"decoding.draft_length={GOODPUT} decoding.round_costs=[{words}]"


def groups(runs: Iterable[Run]) -> dict[str, list[Recorded]]:
    """The runs that can be replayed, by what they share but for their draft length."""
    alike: dict[tuple[str, tuple[str, ...]], list[Recorded]] = {}
    for run in runs:
        summary = run.summary
        other = summary["unit"] == POOL or summary["temperature"] or summary["engine"] is not None
        if other or summary["overall"]["acceptance_rate"] is None or not (recorded := Recorded(run)).is_chain:
            continue
        words = ", ".join(as_text(beside_length(summary)))
        name = f"{summary['method']}{f' ({words})' if words else ''}"
        alike.setdefault((name, setting_key(summary)), []).append(recorded)
    settings = {setting for _, setting in alike}
    return {f"{name}: {in_words(setting, settings)}": of_it for (name, setting), of_it in alike.items()}


@one_line_errors()
@file_errors()
def main() -> int:
    """Prints a table for each drafter and setting of the runs of the command line; returns the exit code."""
    runs = runs_of_command("specbench replay", __doc__, with_records=True)
    if not (alike := groups(runs)):
        raise UserError(
            "a replay needs a greedy run of chains, one question at a time: "
            "specbench sweep method=sps method.max_draft_tokens=2,8"
        )
    print_notes(warnings(runs))
    for name, recorded in alike.items():
        table, settings = replay_table(recorded, f"what other draft lengths would have given: {name}")
        console().print(table)
        print(f"{settings}\n" if settings else "")  # in one piece, to be copied
    return 0


if __name__ == "__main__":
    sys.exit(main())
