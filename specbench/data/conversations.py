"""Conversations to train and calibrate on: from a file, a data set or a pair's own stream, packed into rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import count, dropwhile, islice
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

from specbench.data.contamination import MeasuredTexts, Screen
from specbench.data.questions import MissingQuestionsError, file_questions, find_questions_file
from specbench.system.errors import UserError, warn
from specbench.system.paths import packaged

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from specbench.models.pairs import Pair

Item = TypeVar("Item")

ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
}  # ShareGPT's names
HELD_OUT_EVERY = 50  # one conversation in this many is never trained on
SHUFFLED = 1024  # conversations that a draw is made from
WAITING = 48  # rows to choose from when one is filled: about 3 % of a row stays empty
HUB_SECONDS = 20.0  # for the hub to answer in
SILENT_SECONDS = 2  # work that takes longer shows a progress bar

Messages = list[dict]  # [{"role": ..., "content": ...}], with "complete": False for an answer that was cut
Tokens = tuple[list[int], list[float]]  # ids, and the weight of each in the loss

_screens: dict[tuple[object, ...], Screen] = {}  # of this process, by source and measured texts


def conversations(
    cfg: DictConfig, held_out: bool = False, epochs: int | None = None, needs_answers: bool = True
) -> Iterator[Messages]:
    """Yields conversations in an order drawn with `cfg.seed`; the held-out ones are disjoint from the others.

    They are endless unless `epochs` limits how often a file or data set is read; a pair's own have no end. Those with a
    text of the benchmark `cfg.data` are left out; a process searches each of them once, see `Screen`.

    Args:
        cfg: settings of what reads them. `conversations`: a JSON Lines file or the name of a data set on the hub, whose
            rows have `messages` ({role, content}) or ShareGPT's `conversations` ({from, value}); None for the pair's
            own (`pair.training`). `split`: of a data set. `pair`, `seed`, `data`, `task`.
        held_out: whether to yield the held-out ones or the others.
        epochs: how often a file or data set is read; None: endlessly.
        needs_answers: whether at least one must contain an assistant's message.

    Raises:
        UserError: there is no such source, a line of it is no conversation, or no assistant's message is found.
    """
    measured = measured_texts(cfg)

    def cleared(rows: Iterable[Messages]) -> Iterable[tuple[int, Messages]]:
        return enumerate(rows) if measured is None else screen_of(cfg, measured, held_out).cleared(rows)

    if cfg.conversations is None:
        yield from (messages for _, messages in cleared(own_text(cfg.pair, cfg.seed, held_out)))
        return
    for epoch in count() if epochs is None else range(epochs):
        rows = cleared(read(cfg.conversations, cfg.split))
        chosen = (messages for i, messages in rows if (i % HELD_OUT_EVERY == 0) == held_out)
        answered = 0
        for messages in shuffled(chosen, random.Random(f"{cfg.seed} {epoch}")):
            answered += any(m["role"] == "assistant" and bool(m["content"].strip()) for m in messages)
            yield messages
        if needs_answers and not answered:
            besides = "" if measured is None else f", beside those with a text of {cfg.data.name}"
            raise UserError(
                f"'{cfg.conversations}' holds too few conversations in which the assistant says anything{besides}: "
                "some must be left to be held out"
            )


def measured_texts(cfg: DictConfig) -> MeasuredTexts | None:
    """The texts that no conversation may hold: questions and reference answers of `cfg.data`; None if that is null."""
    return None if cfg.get("data") is None else MeasuredTexts(file_questions(cfg.data, cfg.task))


def screen_of(cfg: DictConfig, measured: MeasuredTexts, held_out: bool = False) -> Screen:
    """The screen of a source, shared within this process; a changed file gets a new one."""
    source: tuple[object, ...]
    if cfg.conversations is None:
        source = (str(cfg.pair.training), cfg.seed, held_out)
    elif is_file(cfg.conversations):
        path = packaged(cfg.conversations).resolve()
        status = path.stat()
        source = (path, status.st_ino, status.st_size, status.st_mtime_ns)
    else:
        source = (cfg.conversations, cfg.split)
    return _screens.setdefault((*source, measured.key), Screen(measured))


def count_left_out(cfg: DictConfig) -> int | None:
    """Counts and prints how many conversations of a file are left out.

    None if `cfg.data` is null, or for a data set on the hub and a pair's own text, which are not read to the end.
    """
    measured = measured_texts(cfg)
    if measured is None or cfg.conversations is None or not is_file(cfg.conversations):
        return None
    screen = screen_of(cfg, measured)
    if not screen.is_complete:
        for _ in screen.cleared(watched(read(cfg.conversations), "looking for questions")):
            pass
    print(f"{len(screen.left_out)} conversations hold a text of {cfg.data.name}: they are left out")
    return len(screen.left_out)


def watched(items: Iterable[Item], label: str, unit: str = "conversation") -> Iterable[Item]:
    """The same items, with a progress bar if they take long."""
    return tqdm(items, desc=label, unit=unit, delay=SILENT_SECONDS, leave=False)


def check_conversations(cfg: DictConfig) -> None:
    """Checks the source of conversations and the file of the questions that they must not hold.

    If that file is missing and cannot be fetched, it prints a warning and sets `cfg.data` to null: nothing is left out.

    Raises:
        UserError: there is no such source, or the questions do not match `cfg.data`.
    """
    check_source(cfg.conversations, cfg.pair)
    if cfg.get("data") is None:
        return
    try:
        find_questions_file(cfg.data)
    except MissingQuestionsError as error:
        warn(f"conversations with a question of {cfg.data.name} are not left out: {error}")
        cfg.data = None


def check_source(source: str | None, pair_cfg: DictConfig) -> None:
    """Checks a source as far as possible without weights: that it exists, and the first row of a file.

    Args:
        source: a file or data set; None: a pair's own text.
        pair_cfg: the pair.

    Raises:
        UserError: there is no such file, it is empty or begins with no conversation, or the pair brings no text.
    """
    if source is not None:
        if is_file(source) and next(read(source), None) is None:
            raise UserError(f"the conversations file '{source}' is empty")
    elif pair_cfg.get("training") is None:
        raise UserError(
            f"pair '{pair_cfg.name}' brings no training text: give conversations=FILE (JSON lines)"
        )


def own_text(pair_cfg: DictConfig, seed: int, held_out: bool = False) -> Iterator[Messages]:
    """A pair's own conversations (`pair.training`), without end. Raises UserError if it has none."""
    check_source(None, pair_cfg)
    from hydra.utils import instantiate  # late: the check of a GPU, which reads methods, does without

    return instantiate(pair_cfg.training, seed=2 * seed + held_out)


def is_file(source: str) -> bool:
    """Whether conversations are a file, not a data set on the hub. Raises UserError for a file that is not there."""
    if packaged(source).is_file():
        return True
    if packaged(source).suffix in (".json", ".jsonl") or source.count("/") > 1:
        raise UserError(f"no conversations file '{source}'")
    return False


def read(source: str, split: str = "train") -> Iterator[Messages]:
    """One pass over a file or data set, row by row.

    Args:
        source: a file, or a data set on the hub: NAME, or NAME@REVISION for another commit than its newest.
        split: of a data set.
    """
    if is_file(source):
        with open(packaged(source), "rb") as lines:  # bytes that are no text are a fault of their line
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    messages = parse(json.loads(line))
                    if b"\\u" in line:  # half of a surrogate pair is JSON, and no text
                        "".join(message["content"] for message in messages).encode()
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{source}, line {number}: {no_conversation(error)}") from error
                yield messages
        return
    from datasets import load_dataset  # late: it takes a second

    name, revision = data_set_of(source)
    try:
        rows = load_dataset(name, revision=revision, split=split, streaming=True)
    except Exception as error:
        raise UserError(f"no conversations '{source}': neither a file nor a data set ({error})") from error
    for number, row in enumerate(rows, 1):
        try:
            yield parse(row)
        except (KeyError, TypeError) as error:
            raise UserError(f"{source}, row {number}: {no_conversation(error)}") from error


@cache
def data_set_of(source: str) -> tuple[str, str | None]:
    """The name of a data set, and the commit of it that this process reads.

    Where no hub answers, and of one on the disk, it is the revision that was requested; None: none was.

    Args:
        source: as in `read`.
    """
    name, _, requested = source.partition("@")
    revision = requested or None
    if packaged(name).exists():
        return name, revision
    from huggingface_hub import HfApi

    try:
        return name, HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS).sha
    except Exception:  # noqa: BLE001 - whatever is wrong with it, `load_dataset` says so
        return name, revision


def no_conversation(error: Exception) -> str:
    """Describes why `parse` refuses a row: it has another form, or is no JSON at all."""
    if isinstance(error, KeyError | TypeError):
        return (
            'not a conversation: it needs "messages" of {role, content}, or "conversations" of {from, value}'
        )
    return f"not a conversation ({error!r})"


def parse(row: dict) -> Messages:
    """The messages of one row in either form. Raises KeyError or TypeError for another form.

    Templates require user and assistant to alternate: leading answers are dropped, and the conversation ends before a
    message out of turn or without text. A leading system message is kept. `complete: false` marks an answer that was
    cut at its cap.
    """
    # Null in a table that has the column is the same as a missing key.
    if "messages" in row and row["messages"] is not None:
        messages = [(m["role"], m["content"], m.get("complete") is not False) for m in row["messages"]]
    else:
        messages = [(ROLES.get(m["from"], m["from"]), m["value"], True) for m in row["conversations"]]
    parsed: Messages = [
        {"role": role, "content": text}
        for role, text, _ in messages[:1]
        if role == "system" and isinstance(text, str)
    ]
    turns = iter(messages[len(parsed) :])
    for role, text, complete in dropwhile(lambda message: message[0] != "user", turns):
        before = parsed[-1]["role"] if parsed else "system"
        if role != ("assistant" if before == "user" else "user") or not isinstance(text, str):
            break
        parsed.append({"role": role, "content": text} | ({} if complete else {"complete": False}))
    return parsed


def shuffled(rows: Iterable, rng: random.Random) -> Iterator:
    """Yields every row once, each drawn from the next `SHUFFLED` ones."""
    rows = iter(rows)
    waiting = list(islice(rows, SHUFFLED))
    for row in rows:
        index = rng.randrange(len(waiting))
        yield waiting[index]
        waiting[index] = row
    rng.shuffle(waiting)
    yield from waiting


def check_prompt_weight(prompt_weight: float) -> None:
    """Raises UserError for a weight of 1 or more: the weight 1 identifies the assistant's tokens."""
    if prompt_weight >= 1:
        raise UserError(
            f"prompt_weight must be less than 1, the weight of what the assistant says, not {prompt_weight}"
        )


def tokenizer_of(pair: Pair, prompt_weight: float = 0.0) -> Callable[[Messages], list[Tokens]]:
    """Makes a function that turns messages into rows of ids, as the pair prompts them, each with its weight.

    The weight is 1 for the assistant's tokens, including the stop token unless the answer was cut; `prompt_weight` for
    the rest; 0 for the first id, which is never predicted.

    One row holds the whole conversation, unless the template rewrites earlier turns (Qwen3 drops reasoning): then each
    turn that does not continue the last one begins a new row, in which only the answers from there on count.

    Raises:
        UserError: as `check_prompt_weight`.
    """
    check_prompt_weight(prompt_weight)
    stop = end_of_answer(pair)

    def tokenize(messages: Messages) -> list[Tokens]:
        rows: list[Tokens] = []
        ids: list[int] = []
        weights: list[float] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = pair.prompt_ids(messages[:i])
            answer = pair.tokenizer.encode(message["content"], add_special_tokens=False)
            answer += stop if message.get("complete", True) else []
            if prompt[: len(ids)] != ids:
                rows.append((ids, weights))
                ids, weights = [], []
            weights = weights + [prompt_weight] * (len(prompt) - len(ids)) + [1.0] * len(answer)
            ids = prompt + answer
        rows.append((ids, weights))
        return [(ids, [0.0, *weights[1:]]) for ids, weights in rows if ids]

    return tokenize


def whole_ids(rows: list[Tokens]) -> list[int]:
    """The ids of a whole conversation, of the rows that `tokenizer_of` makes of it: the last one holds all turns."""
    return rows[-1][0] if rows else []


def end_of_answer(pair: Pair) -> list[int]:
    """The stop token that the template writes after an answer, which need not be the tokenizer's own (GLM-4, Gemma).

    If the template writes none, it is the tokenizer's, or else any that the pair has; [] if there is none.
    """
    talk = [("user", "Is it?"), ("assistant", "Yes."), ("user", "Why?")]
    messages = [{"role": role, "content": text} for role, text in talk]
    begun = pair.prompt_ids(messages[:1]) + pair.tokenizer.encode("Yes.", add_special_tokens=False)
    written = pair.prompt_ids(messages)
    if written[: len(begun)] == begun and written[len(begun)] in pair.stop_ids:
        return [written[len(begun)]]
    eos = pair.tokenizer.eos_token_id
    return [eos] if eos in pair.stop_ids else sorted(pair.stop_ids)[:1]


def packed_rows(rows: Iterable[Tokens], length: int, pad_id: int) -> Iterator[Tokens]:
    """Yields rows of exactly `length`, packed from whole rows; longer rows are left out."""
    stream = iter(rows)
    waiting: list[Tokens] = []
    exhausted = False
    while True:
        while len(waiting) < WAITING and not exhausted:
            row = next(stream, None)
            exhausted = row is None
            if row is not None and len(row[0]) <= length:
                waiting.append(row)
        if not waiting:
            return
        ids, weights = waiting.pop(0)
        ids, weights = list(ids), list(weights)
        while True:  # best fit: the longest waiting row that still has room
            fitting = [i for i, (more, _) in enumerate(waiting) if len(ids) + len(more) <= length]
            if not fitting:
                break
            more_ids, more_weights = waiting.pop(max(fitting, key=lambda i: len(waiting[i][0])))
            ids += more_ids
            weights += more_weights
        empty = length - len(ids)
        yield ids + [pad_id] * empty, weights + [0.0] * empty


def batched(rows: Iterator[Tokens], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches {"input_ids": [B, T] int64, "loss_weight": [B, T] float32} of rows of one length.

    loss_weight[b, t] weighs the prediction of token t from the tokens before it.
    """
    import torch  # late: a source is checked without it

    while batch := list(islice(rows, batch_size)):
        ids, weights = zip(*batch)
        yield {"input_ids": torch.tensor(ids), "loss_weight": torch.tensor(weights)}
