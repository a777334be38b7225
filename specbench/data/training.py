"""One loop for everything that is trained here: the embedded targets, draft models, trained parts of methods.

Several GPUs: `accelerate launch -m specbench train NAME ...`; each process then reads its own share of the batches.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from specbench.data.contamination import stages
from specbench.data.conversations import count_left_out
from specbench.data.questions import questions_sha256
from specbench.system.errors import UserError, file_errors
from specbench.system.files import file_sha256, finite, lock_folder, make_folder, read_json, write_json
from specbench.system.paths import packaged
from specbench.system.settings import plain
from specbench.system.threads import Threads, use_threads

if TYPE_CHECKING:
    from accelerate import Accelerator
    from omegaconf import DictConfig

    Batches = Callable[..., Iterator["Batch"]]

Batch = dict[str, torch.Tensor]

LOG, CONDITIONS, RECORD = "train_log.jsonl", "conditions.json", "training.json"
DATASTORE = "datastore.json"  # the record of a part that is a text to look up in, not weights
STATES = "states.json"  # the record of a target's stored states
# Settings that may change before a training resumes; of the text, only the content matters, not the path.
FREE = ("out", "save_every", "save_dtype", "conversations", "states", "data", "task")
# Likewise, keys of the pair: those for device and speed, and the parts trained so far.
FREE_OF_PAIR = ("parts", "limit", "max_new_tokens", "graphs", "compile", "device", "device_map")
PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")  # accelerate's names
WARMUP = 20  # the learning rate rises over 1 / WARMUP of the steps


def adamw(module: torch.nn.Module, cfg: DictConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all trainable parameters."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [torch.optim.AdamW(parameters, lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)]


def rise_and_fall(step: int, steps: int) -> float:
    """The share of the learning rate in a step, from 0 on: it rises over 5 % of the steps and then falls to 0."""
    warmup = max(1, steps // WARMUP)
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def train(
    module: torch.nn.Module,
    batches: Batches,
    evaluate: Callable[[], dict[str, float]],
    save: Callable[[Path, dict[str, float]], None],
    cfg: DictConfig,
    begins: str,
    earlier: str | Path | None = None,
    optimizers: Callable[[torch.nn.Module, DictConfig], Sequence[torch.optim.Optimizer]] = adamw,
    rate: Callable[[int, int], float] = rise_and_fall,
) -> Path:
    """Trains `module` in place, as configured in conf/train.yaml.

    A step divides the loss by the weight of its batches in all processes, so that each token counts the same. A stopped
    training resumes from its last state with the next batch; a finished one is not repeated. A record of its data and
    figures (`RECORD`) is written last, beside the result.

    Args:
        module: batch -> the sum of the weighted losses.
        batches: called with `start` and `stride`: every `stride`th of endless batches, from the batch `start` on.
        evaluate: returns figures on held-out text; called and logged whenever a state is saved, and at the end.
        save: writes the trained module with its figures to a folder; called by only one of several processes.
        cfg: settings of the trainer.
        begins: what `module` is before the first step, for the record.
        earlier: folder of the initial weights if they were trained here: their stages become part of the record.
        optimizers: makes the optimizers of a module.
        rate: (step, steps) -> share of each optimizer's learning rate.

    Returns:
        The folder of what was trained.

    Raises:
        UserError: the kind of parallelism is not supported; the folder holds another training, or another process
            trains in it, or it cannot be written; the loss is no longer finite.
    """
    out = Path(cfg.out)
    if is_finished(cfg):
        return out
    from accelerate import Accelerator  # late: it takes seconds to import

    first_parameter = next(p for p in module.parameters() if p.requires_grad)
    accelerator = Accelerator(mixed_precision=cfg.precision, cpu=first_parameter.device.type == "cpu")
    _check_kind(accelerator)
    main, world = accelerator.is_main_process, accelerator.num_processes
    checkpoints = make_folder(out / "checkpoints")
    with lock_folder(checkpoints, "trained") if main else nullcontext():
        began_with = conditions(cfg)  # now: a file may change while it is trained on
        left_out = _left_out(cfg) if main else None
        figures = _steps(accelerator, module, batches, evaluate, cfg, began_with, optimizers, rate)
        if main:
            with file_errors(writing=out, others=(SafetensorError,)):
                save(out, finite(figures))
            write_json(out / CONDITIONS, began_with | {"save_dtype": cfg.get("save_dtype")})
            record = _record(cfg, began_with, left_out, world, figures, begins, stages_of(earlier))
            record["weights"] = sorted(path.name for path in out.glob("*.safetensors"))
            write_json(out / RECORD, record)
            shutil.rmtree(checkpoints, ignore_errors=True)  # of no use once the part itself is there
            print(", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items()))
            print(out)
        accelerator.wait_for_everyone()
    return out


def _steps(
    accelerator: Accelerator,
    module: torch.nn.Module,
    batches: Batches,
    evaluate: Callable[[], dict[str, float]],
    cfg: DictConfig,
    began_with: dict[str, Any],
    optimizers: Callable[[torch.nn.Module, DictConfig], Sequence[torch.optim.Optimizer]],
    rate: Callable[[int, int], float],
) -> dict[str, float]:
    """Runs the remaining steps; returns the last figures."""
    out = Path(cfg.out)
    checkpoints = out / "checkpoints"
    parameters = [p for p in module.parameters() if p.requires_grad]
    made = optimizers(module, cfg)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: rate(step, cfg.steps)) for one in made]
    wrapped, *prepared = accelerator.prepare(module, *made)
    accelerator.register_for_checkpointing(*schedules)
    done = _resume(accelerator, checkpoints, began_with)
    world, rank = accelerator.num_processes, accelerator.process_index
    mine: Iterator[Batch] = batches(start=done * cfg.accumulate * world + rank, stride=world)
    main = accelerator.is_main_process
    if not done:
        first = next(mine)
        mine = chain([first], mine)
        chosen = _use_threads(cfg.threads, accelerator, wrapped, first)
        if main:
            (out / LOG).unlink(missing_ok=True)  # of a training that was given up
            print(f"{chosen.threads} threads of torch, by {chosen.chosen_by}")
    bar = tqdm(total=cfg.steps, initial=done, desc=out.name, unit="step", disable=not main)
    figures: dict[str, float] = {}
    losses: list[torch.Tensor] = []
    for step in range(done + 1, cfg.steps + 1):
        wrapped.train()
        losses += _accumulated(accelerator, wrapped, list(islice(mine, cfg.accumulate)))
        accelerator.clip_grad_norm_(parameters, 1.0)
        for one, schedule in zip(prepared, schedules):
            one.step()
            schedule.step()
            one.zero_grad()
        bar.update()
        if step % cfg.save_every != 0 and step != cfg.steps:
            continue
        module.eval()
        with accelerator.autocast():
            loss = accelerator.reduce(torch.stack(losses).sum(), "mean") * cfg.accumulate / len(losses)
            figures = {"loss": loss.item(), **evaluate()}
        if not math.isfinite(figures["loss"]):
            raise UserError(
                f"{out}: the loss is {figures['loss']} at step {step}: set a smaller learning_rate and another out="
            )
        losses.clear()
        bar.set_postfix_str(_shown(figures))
        if main:
            _log(out / LOG, {"step": step, "threads": torch.get_num_threads(), **figures})
        if step < cfg.steps:
            _save_state(accelerator, checkpoints, began_with, step)
        bar.unpause()  # looking at held-out text and saving do not count as time of steps
    bar.close()
    return figures


def _shown(figures: dict[str, float]) -> str:
    """Loss and first agreement, for a bar that has room for no more."""
    agreement = [value for name, value in figures.items() if name.startswith("held_out_agreement")][:1]
    named = zip(("loss", "agreement"), (figures["loss"], *agreement))
    return ", ".join(f"{name} {value:.3f}" for name, value in named)


def _check_kind(accelerator: Accelerator) -> None:
    """Raises UserError for a kind of parallelism that is not supported."""
    if accelerator.distributed_type not in PLAIN:
        raise UserError(
            f"{accelerator.distributed_type} is not supported: launch without it (plain data parallelism)"
        )


def _save_state(accelerator: Accelerator, checkpoints: Path, began_with: dict[str, Any], step: int) -> None:
    """Writes a state to resume from, in place of the previous one."""
    with file_errors(writing=checkpoints, others=(SafetensorError, RuntimeError)):  # the last one is torch's
        accelerator.save_state(str(checkpoints / "state.new"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with_threads = began_with | {"torch_threads": torch.get_num_threads()}
        write_json(checkpoints / "state.new" / CONDITIONS, with_threads)
        _replace(checkpoints, step)
    accelerator.wait_for_everyone()


def _record(
    cfg: DictConfig,
    began_with: dict[str, Any],
    left_out: int | None,
    processes: int,
    figures: dict[str, float],
    begins: str,
    earlier: list[dict],
) -> dict:
    """The record of a training's data and figures; only trainings on the same data, over all stages, are comparable."""
    tokens = cfg.steps * cfg.accumulate * processes * cfg.batch_size * cfg.length
    return {
        "begins": begins,
        "data": began_with["conversations"],
        "questions": began_with["questions"],
        "left_out": left_out,
        "states": began_with["states"],
        "steps": cfg.steps,
        "tokens": tokens,
        "tokens_in_all": tokens + sum(stage["tokens"] for stage in earlier),
        "loss_tokens": cfg.get("loss_tokens"),
        "vocab_sample": cfg.get("vocab_sample"),
        "prompt_weight": cfg.prompt_weight,
        "seed": cfg.seed,
        **figures,
        "earlier": earlier,
    }


def stages_of(folder: str | Path | None) -> list[dict]:
    """The records of all training stages of a folder's content, the first one first; [] if there are none."""
    path = None if folder is None else packaged(folder) / RECORD
    if path is None or not path.is_file():
        return []
    return stages(read_json(path))


def data_of(cfg: DictConfig) -> str:
    """Identifies a training's text: a file's sha256, a data set's name and split, or a stream's settings."""
    if cfg.conversations is None:
        settings = plain(cfg.pair.training)
        name = settings.pop("_target_")
        return (
            f"{name}({', '.join(f'{key}={value}' for key, value in settings.items())})" if settings else name
        )
    path = packaged(cfg.conversations)
    return f"sha256:{file_sha256(path)}" if path.is_file() else f"{cfg.conversations}:{cfg.split}"


def training_pair(pair_cfg: DictConfig) -> DictConfig:
    """The pair as trainers load it: in bfloat16 instead of float16, in which gradients through the head vanish."""
    from omegaconf import OmegaConf  # late: as in `conversations`

    changed = {"dtype": "bfloat16"} if pair_cfg.dtype == "float16" else {}
    return cast("DictConfig", OmegaConf.merge(pair_cfg, changed))


def questions_of(cfg: DictConfig) -> str | None:
    """sha256 of the questions that conversations must not hold; None: there are none to look for."""
    return None if cfg.get("data") is None else questions_sha256(cfg.data)


def _stored_states(cfg: DictConfig) -> dict[str, Any] | None:
    """The record of the states that a training reads; None if it computes them."""
    return None if cfg.get("states") is None else read_json(Path(cfg.states) / STATES)


def _left_out(cfg: DictConfig) -> int | None:
    """Number of conversations left out of a training's text; None if that was not counted."""
    record = _stored_states(cfg)
    return count_left_out(cfg) if record is None else record.get("left_out")


def _accumulated(
    accelerator: Accelerator, module: torch.nn.Module, batches: list[Batch]
) -> list[torch.Tensor]:
    """Adds the gradients of the batches of one step; returns the loss [] of each, as it counts in the step."""
    parts = [{k: v.to(accelerator.device) for k, v in batch.items()} for batch in batches]
    weight = accelerator.reduce(sum(part["loss_weight"][:, 1:].sum() for part in parts))
    losses = []
    for number, part in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else accelerator.no_sync(module):
            # Gradients are averaged over the processes.
            loss = module(part) * (accelerator.num_processes / weight)
            accelerator.backward(loss)
        losses.append(loss.detach())
    return losses


def _use_threads(
    requested_threads: int | None, accelerator: Accelerator, module: torch.nn.Module, batch: Batch
) -> Threads:
    """Sets torch's threads for a new training: as requested, or the number with which a step on `batch` is fastest.

    Several processes would disturb each other's measurement: they keep torch's default.
    """

    def work() -> None:
        with torch.random.fork_rng(devices=[]):
            accelerator.backward(module({k: v.to(accelerator.device) for k, v in batch.items()}))
        module.zero_grad(set_to_none=True)

    alone_on_a_cpu = accelerator.num_processes == 1 and accelerator.device.type == "cpu"
    return use_threads(requested_threads, work if alone_on_a_cpu else None)


def _log(path: Path, row: dict) -> None:
    """Adds a line; one for the same step, written before a stop, stays above it."""
    with file_errors(writing=path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite(row)) + "\n")


def _replace(checkpoints: Path, step: int) -> None:
    """Puts the state just written in place of the older ones; a kill at any moment leaves one whole state."""
    fresh = checkpoints / "state.new"
    fresh.rename(checkpoints / f"state-{step}")
    for old in checkpoints.glob("state-*"):
        if old.name != f"state-{step}":
            for file in old.iterdir():
                file.unlink()
            old.rmdir()


def conditions(cfg: DictConfig) -> dict[str, Any]:
    """The settings and the text, which must be the same for a training to resume."""
    settings = {key: value for key, value in plain(cfg).items() if key not in FREE}
    settings["pair"] = {key: value for key, value in settings["pair"].items() if key not in FREE_OF_PAIR}
    states = _stored_states(cfg)
    text = {
        "conversations": data_of(cfg),
        "questions": questions_of(cfg) if states is None else states.get("questions"),
        # Stored states have another order of rows, and keep only the `top` tokens of the target's distributions.
        "states": None if states is None else {key: states.get(key) for key in ("precision", "rows", "top")},
    }
    return settings | text | {"processes": int(os.environ.get("WORLD_SIZE", 1))}


def is_finished(cfg: DictConfig) -> bool:
    """Whether the folder of a training holds its result; prints the folder if so.

    Raises:
        UserError: it holds the result of another training, an incomplete result, or a model that no training has made.
    """
    out = Path(cfg.out)
    if not (out / RECORD).exists():
        if (out / "config.json").exists() and not (out / "checkpoints").exists():
            raise UserError(f"{out} holds a model that no training run wrote: name another folder with out=")
        return False
    if not (out / CONDITIONS).exists():
        raise UserError(
            f"{out} holds a finished training without {CONDITIONS}, which records its settings: "
            "remove it to start anew, or name another folder with out="
        )
    now = conditions(cfg)
    if "save_dtype" in read_json(out / CONDITIONS):  # older files do not tell
        now["save_dtype"] = cfg.get("save_dtype")
    _check_same(out, out / CONDITIONS, now)
    missing = [name for name in read_json(out / RECORD).get("weights", ()) if not (out / name).is_file()]
    if missing:
        raise UserError(
            f"{out} holds a finished training without {', '.join(missing)}: remove it to start anew, or name another "
            "folder with out="
        )
    print(f"already there: {out}")
    return True


def check_stopped(cfg: DictConfig) -> None:
    """Raises UserError if the folder of a training holds a state of another one; for use before weights are loaded."""
    state = _newest_state(Path(cfg.out) / "checkpoints")
    if state is not None:
        _check_same(state.parent, state / CONDITIONS, conditions(cfg))


def _check_same(folder: Path, file: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Returns the conditions in a file. Raises UserError if they differ from `now`."""
    then = read_json(file)
    if isinstance(then.get("pair"), dict):  # older files hold the whole pair
        then["pair"] = {key: value for key, value in then["pair"].items() if key not in FREE_OF_PAIR}
    keys = sorted((then.keys() | now.keys()) - {"torch_threads"})
    differing = [key for key in keys if then.get(key) != now.get(key)]
    if foreign := [key for key in differing if key in then.keys() ^ now.keys()]:
        raise UserError(
            f"{folder} holds a training of another trainer or version (only one of the two has {', '.join(foreign)}): "
            "remove it to start anew, or name another folder with out="
        )
    if differing:
        key = differing[0]
        had, has = then.get(key), now.get(key)
        if isinstance(had, dict) and isinstance(has, dict):  # of the pair: the setting that differs
            inner = next(name for name in sorted(had.keys() | has.keys()) if had.get(name) != has.get(name))
            key, had, has = f"{key}.{inner}", had.get(inner), has.get(inner)
        raise UserError(
            f"{folder} holds a training with {key}={had}, not {has}: "
            "give its settings to continue, remove it to start over, or name another folder with out="
        )
    return then


def saved(cfg: DictConfig) -> str | None:
    """Where a stopped training resumes; None if it starts over."""
    state = _newest_state(Path(cfg.out) / "checkpoints")
    return None if state is None else f"step {_steps_of(state)}"


def _newest_state(checkpoints: Path) -> Path | None:
    """The newest complete state of a stopped training; None if there is none."""
    return max(checkpoints.glob("state-*"), key=_steps_of, default=None)


def _steps_of(state: Path) -> int:
    """Number of steps that led to a state."""
    return int(state.name.removeprefix("state-"))


def _resume(accelerator: Accelerator, checkpoints: Path, now: dict[str, Any]) -> int:
    """Loads the newest complete state, if any, and sets its number of threads, which affects the rounding of sums.

    Returns:
        Number of steps that led to it; 0 if there is none.

    Raises:
        UserError: it is the state of another training.
    """
    state = _newest_state(checkpoints)
    if state is None:
        return 0
    then = _check_same(checkpoints, state / CONDITIONS, now)
    accelerator.load_state(str(state))
    torch.set_num_threads(then["torch_threads"])
    return _steps_of(state)
