"""Lets a target write the conversations that its drafters learn from: `specbench converse pair=... [tokens=2000000]`.

No data set is needed. The target is given the opening of a user's turn, continues with a question, and answers it
greedily; other questions come from templates, see `specbench.data.synthesis`. The result is a JSON Lines file that
every trainer takes as `conversations=`. Beside it lies a log with a line for each pool of conversations: what was kept,
and why the rest was not. A run that was stopped continues after its last whole pool, so a pool is smaller where few
tokens are asked for; with a larger `tokens` a finished one continues, too.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from tqdm import tqdm

from specbench.config.checks import check_sources
from specbench.config.compose import program
from specbench.data.contamination import BenchmarkNgrams
from specbench.data.conversations import HELD_OUT_EVERY
from specbench.data.questions import file_questions, questions_sha256
from specbench.data.synthesis import Filters, Kind, Material, kinds_of, loop_start
from specbench.models.weight_files import answer_facts
from specbench.report.cells import console
from specbench.system.errors import UserError, file_errors, stoppable
from specbench.system.files import check_same, file_named, lock_file, make_folder, refuse_foreign, whole_lines
from specbench.system.settings import Count, Natural, Probability, Range, Seed, TopP, check_all, plain

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.data.conversations import Messages
    from specbench.decoding.sampling import SamplingParams
    from specbench.decoding.state import Request
    from specbench.models.pairs import Pair

# Settings that determine the conversations: a file is continued only with the same values.
SAME = {
    "max_new_tokens": Count,
    "question_tokens": Count,
    "temperature": Annotated[float, Range(1e-6)],  # a greedy question would be the same each time
    "top_k": Natural,
    "top_p": TopP,
    "pool": Count,
    "seed": Seed,
    "avoid_benchmark": bool,
    "distinct": Probability,
    "ascii": Probability,
    "question_words": Natural,
    "answer_tokens": Natural,
}
SETTINGS = SAME | {"tokens": Count, "batch_size": Count, "out": str}
FRUITLESS = 8  # consecutive pools in which no conversation is kept
LEAST = 16  # conversations of a pool: in fewer, templates find too little, and fruitless pools mean nothing
FIRST, SECOND = "first turn", "second turn"


@dataclass
class Talk:
    """A conversation that is being written.

    Attributes:
        kind: its kind.
        opening: first words of the user's turn that the target is to write.
        messages: the kept ones, and the question that is being answered.
        tokens: of its answers.
        dropped: why the last text was not kept; None if it was.
    """

    kind: Kind
    opening: str = ""
    messages: Messages = field(default_factory=list)
    tokens: int = 0
    dropped: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it can be continued: everything so far was kept, and the last answer is complete."""
        return self.dropped is None and self.messages[-1].get("complete", True)


def question_of(text: str, has_ended: bool, ending: str) -> str | None:
    """The question in a text that a target wrote as the user; None if it has no end.

    Args:
        text: what it wrote.
        has_ended: whether a stop token ended the text, which may by then hold an answer, too.
        ending: the text after a user's turn in the template; empty if a special token begins it.
    """
    question, ended, _ = text.partition(ending) if ending else (text, "", "")
    return question.strip() if ended or has_ended else None


class Writer:
    """Writes pools of conversations.

    Args:
        cfg: conf/converse.yaml.
        pair: with the target.
        kinds: kinds of conversation to write.
        filters: decide which messages are kept.
        bar: shows the progress.
    """

    def __init__(self, cfg: DictConfig, pair: Pair, kinds: list[Kind], filters: Filters, bar: tqdm):
        from specbench.decoding.drafter import Drafter  # late: torch takes seconds
        from specbench.decoding.engine import Engine
        from specbench.decoding.sampling import SamplingParams
        from specbench.decoding.scheduler import Scheduler

        self.cfg, self.pair, self.kinds, self.filters, self.bar = cfg, pair, kinds, filters, bar
        self.asking = SamplingParams.from_settings(cfg, max_new_tokens=cfg.question_tokens)
        self.answering = SamplingParams(cfg.max_new_tokens)
        target, scheduler = pair.staged, Scheduler(cfg.batch_size)
        self.engine = Engine(target, Drafter(), pair.stop_ids, scheduler, pair.context_length)
        self.material, self.learned = Material(), 0

    def learn(self, kind: str, messages: Messages) -> None:
        """Records a kept conversation: its questions as asked before, its first answer as material for templates.

        Conversations that trainers hold out are no material: their answers would be trained on as parts of others.
        """
        for message in messages[::2]:
            self.filters.remember(message["content"])
        is_held_out = self.learned % HELD_OUT_EVERY == 0  # they are written in this order
        self.learned += 1
        if messages[1].get("complete", True) and not is_held_out:
            self.material.add(kind, messages[0]["content"], messages[1]["content"])

    def pool(self, number: int) -> tuple[list[Talk], Counter[str]]:
        """Writes the conversations of a pool.

        Returns:
            The kept ones, of one turn or two, and the number of dropped texts by reason.
        """
        rng = random.Random(f"{self.cfg.seed} {number}")
        shares = [kind.share for kind in self.kinds]
        talks = [self._begun(kind, rng) for kind in rng.choices(self.kinds, shares, k=pool_size(self.cfg))]
        self._turn([talk for talk in talks if talk.dropped is None], f"{number} {FIRST}")
        dropped = Counter(talk.dropped for talk in talks if talk.dropped is not None)
        talks = [talk for talk in talks if talk.dropped is None]
        for talk in talks:
            self.learn(talk.kind.name, talk.messages)
        longer = [talk for talk in talks if rng.random() < talk.kind.follow_up and talk.complete]
        for talk in longer:
            talk.opening = ""
        self._turn(longer, f"{number} {SECOND}")
        dropped.update(f"{SECOND}: {talk.dropped}" for talk in longer if talk.dropped is not None)
        return talks, dropped

    def _begun(self, kind: Kind, rng: random.Random) -> Talk:
        """Starts a conversation, with an opening or with a question from a template."""
        beginning = rng.choice([*kind.openings, *kind.templates])
        if beginning in kind.openings:
            return Talk(kind, beginning)
        talk, question = Talk(kind), self.material.fill(beginning, rng)
        if question is None:
            talk.dropped = "template without material yet"
        else:
            self._question(talk, question, self.pair.encode(question))
        return talk

    def _turn(self, talks: list[Talk], label: str) -> None:
        """Lets the target write the missing questions, then the answers."""
        self._ask([talk for talk in talks if len(talk.messages) % 2 == 0], label)
        self._answer([talk for talk in talks if talk.dropped is None], label)

    def _ask(self, talks: list[Talk], label: str) -> None:
        """The target continues the opening of a user's turn in each conversation."""
        turns = [self.pair.user_turn(talk.messages) for talk in talks]
        prompts = [self.pair.encode(before + talk.opening) for talk, (before, _) in zip(talks, turns)]
        endings = [self.pair.encode(after) for _, after in turns]
        special = self.pair.tokenizer.added_tokens_decoder
        stops = [self.pair.stop_ids | {i for i in ending[:1] if i in special} for ending in endings]
        written = self._written(talks, prompts, self.asking, label, stops)
        for talk, ids, stop_ids, ending in zip(talks, written, stops, endings):
            if ids is None:
                continue
            # Decoded as one text, so that the space between them stays.
            text = self.pair.decode(self.pair.encode(talk.opening) + ids)
            words = "" if {*ending[:1]} & special.keys() else self.pair.decode(ending).strip()
            question = question_of(text, ids[-1] in stop_ids, words)
            if question is None:
                talk.dropped = "question without an end"
            else:
                self._question(talk, question, ids)

    def _question(self, talk: Talk, text: str, ids: list[int]) -> None:
        """Adds a question, or records why it is dropped."""
        talk.dropped = self.filters.question(text, ids)
        if talk.dropped is None:
            talk.messages.append({"role": "user", "content": text})

    def _answer(self, talks: list[Talk], label: str) -> None:
        """Lets the target answer the last question of each conversation; drops a question with its answer."""
        prompts = [self.pair.prompt_ids(talk.messages) for talk in talks]
        for talk, ids in zip(talks, self._written(talks, prompts, self.answering, label)):
            if ids is not None:
                ids = ids[: loop_start(ids)]
                text = self.pair.decode(ids)
                talk.dropped = self.filters.answer(text, ids)
            if ids is None or talk.dropped is not None:
                self.filters.forget(talk.messages.pop()["content"])
                continue
            cut = {} if ids[-1] in self.pair.stop_ids else {"complete": False}
            talk.messages.append({"role": "assistant", "content": text} | cut)
            talk.tokens += len(ids)

    def _written(
        self,
        talks: list[Talk],
        prompts: list[list[int]],
        decoding: SamplingParams,
        label: str,
        stops: Sequence[frozenset[int]] | None = None,
    ) -> list[list[int] | None]:
        """Token ids that the target writes after each prompt; None, noted in `dropped`, if the context is full."""
        from specbench.decoding.state import Request  # late, as above

        requests: dict[int, Request] = {}
        for i, (talk, prompt) in enumerate(zip(talks, prompts)):
            if len(prompt) + decoding.max_new_tokens > self.pair.context_length:
                talk.dropped = "longer than the context"
                continue
            seed = random.Random(f"{self.cfg.seed} {label} {i}").getrandbits(62)
            requests[i] = Request(prompt, decoding, seed, stops[i] if stops else None)
        written = "answers" if decoding.greedy else "questions"
        answers = dict(zip(requests, self._decoded(list(requests.values()), f"pool {label}, {written}")))
        return [answers.get(i) for i in range(len(talks))]

    def _decoded(self, requests: list[Request], label: str) -> list[list[int]]:
        """Decodes in batches; the bar shows the number of tokens written and advances by those of answers only."""
        rounds, tokens = self.engine.rounds(requests), 0
        while True:
            try:
                added = next(rounds)
            except StopIteration as end:
                return [answer.tokens for answer in end.value]
            tokens += added
            self.bar.set_postfix_str(f"{label}, {tokens} tokens", refresh=False)
            self.bar.update(added if requests[0].decoding.greedy else 0)


class Output:
    """The file of conversations, and the log beside it, which records how much of the file is complete.

    Args:
        path: of the file.
        settings: those that determine the conversations.

    Attributes:
        log: path of the log.
        lines: one for each complete pool.

    Raises:
        UserError: the file was begun with other settings, or does not match the log.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.log = path, log_of(path)
        size = path.stat().st_size if path.exists() else 0
        if not whole_lines(self.log):
            refuse_foreign(path, self.log, "what of it is whole")
            self.log.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        header, *self.lines = map(json.loads, self.log.read_text(encoding="utf-8").splitlines())
        check_same(header["settings"], settings, str(path))
        counted_bytes = self.lines[-1]["bytes"] if self.lines else 0
        if size < counted_bytes:
            raise UserError(
                f"{path} lacks {counted_bytes - size} bytes that {self.log.name} counts: "
                "remove both, or give another out=FILE"
            )
        path.touch()
        os.truncate(path, counted_bytes)  # a pool that was not finished is written anew

    @property
    def tokens(self) -> int:
        """Tokens of the answers so far."""
        return sum(line["tokens"] for line in self.lines)

    def conversations(self) -> list[dict]:
        """The conversations so far."""
        return [json.loads(line) for line in self.path.read_bytes().split(b"\n") if line]

    @property
    def saved(self) -> str | None:
        """Where a stopped run resumes; None if it starts over."""
        return f"pool {len(self.lines)}, after {self.tokens:,} tokens of answers" if self.lines else None

    def add(self, talks: list[Talk], dropped: Counter[str]) -> None:
        """Writes a pool. Raises UserError if it cannot be written."""
        rows = [{"kind": talk.kind.name, "messages": talk.messages} for talk in talks]
        with file_errors(writing=self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        line: dict[str, Any] = {
            "bytes": self.path.stat().st_size,
            "tokens": sum(talk.tokens for talk in talks),
            "conversations": Counter(talk.kind.name for talk in talks),
            "turns": sum(len(talk.messages) // 2 for talk in talks),
            "cut": sum(not message.get("complete", True) for talk in talks for message in talk.messages),
            "dropped": dropped,
        }
        with file_errors(writing=self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)

    def table(self) -> Table:
        """Table of what was kept, by kind, and what was dropped, by reason."""
        table = Table(box=None, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("tokens of answers", f"{self.tokens:,}", style="bold")
        for key, label in (("turns", "turns kept"), ("cut", "of these with an answer that was cut")):
            table.add_row(label, f"{sum(line[key] for line in self.lines):,}", style="bold")
        for key in ("conversations", "dropped"):
            counts = counted(self.lines, key)
            table.add_row(key, f"{counts.total():,}", style="bold")
            for name, count in counts.most_common():
                table.add_row(f"  {name}", f"{count:,}")
        return table


def log_of(path: Path) -> Path:
    """The log beside a file of conversations."""
    return path.with_name(f"{path.stem}.log.jsonl")


def pool_size(cfg: DictConfig) -> int:
    """Number of conversations in a pool: no more than `cfg.tokens` takes if every answer has the maximum length.

    It depends on settings only, so that the same command writes the same pools wherever it was stopped.
    """
    return min(cfg.pool, max(LEAST, -(-cfg.tokens // cfg.max_new_tokens)))


def counted(lines: list[dict], key: str) -> Counter[str]:
    """Sum of a count over the lines of a log: "conversations" by kind, or "dropped" by reason."""
    return sum((Counter(line[key]) for line in lines), Counter())


def converse(cfg: DictConfig) -> Path:
    """Writes conversations as configured (conf/converse.yaml) and returns the file.

    Raises:
        UserError: a setting is wrong, the benchmark's questions are not available, the file was begun with other
            settings, or nothing that the target writes is kept.
    """
    check_all(cfg, SETTINGS)
    check_sources(cfg)
    kinds = kinds_of(cfg.kinds)
    benchmark = benchmark_of(cfg) if cfg.avoid_benchmark else None
    path = file_named(cfg.out)
    make_folder(path.parent)
    settings = {name: cfg[name] for name in SAME} | answer_facts(cfg.pair) | {"kinds": plain(cfg.kinds)}
    settings["questions"] = questions_sha256(cfg.data) if cfg.avoid_benchmark else None
    with lock_file(path):
        output = Output(path, settings)
        if output.tokens < cfg.tokens:
            filters = Filters(cfg.distinct, cfg.ascii, cfg.question_words, cfg.answer_tokens, benchmark)
            with stoppable(lambda: output.saved):
                write(cfg, kinds, filters, output)
    console().print(output.table())
    print(path)
    return path


def benchmark_of(cfg: DictConfig) -> BenchmarkNgrams:
    """N-grams that no message may contain. Raises UserError if the benchmark's questions are not available."""
    try:
        questions = file_questions(cfg.data, cfg.task)
    except UserError as error:
        raise UserError(f"{error}; avoid_benchmark=false skips the search for benchmark questions") from error
    return BenchmarkNgrams(questions)


def write(cfg: DictConfig, kinds: list[Kind], filters: Filters, output: Output) -> None:
    """Writes pools until the answers have `cfg.tokens` tokens. Raises UserError if nothing is kept any more."""
    from specbench.models.pairs import load_pair  # late: torch takes seconds

    pair = load_pair(cfg.pair, cfg.seed, with_draft=False)
    # Shown every second, with the mean speed: a pool begins with questions, which do not count.
    by_time: dict[str, Any] = {"smoothing": 0, "miniters": 0, "mininterval": 1}
    with tqdm(total=cfg.tokens, initial=output.tokens, unit="token", unit_scale=True, **by_time) as bar:
        writer, fruitless = Writer(cfg, pair, kinds, filters, bar), 0
        for row in output.conversations():
            writer.learn(row["kind"], row["messages"])
        while output.tokens < cfg.tokens:
            talks, dropped = writer.pool(len(output.lines))
            output.add(talks, dropped)
            bar.update(output.tokens - bar.n)  # less what was dropped
            fruitless = 0 if talks else fruitless + 1
            if fruitless == FRUITLESS:
                reasons = ", ".join(f"{reason} ({count})" for reason, count in dropped.most_common(3))
                raise UserError(f"nothing that the target writes is kept: {reasons}")


main = program("converse", converse)
