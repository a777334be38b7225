"""One loop for everything that is trained here: the embedded targets, draft models, trained parts of methods.

Several GPUs: `accelerate launch -m specbench train NAME ...`; each process then reads its own share of the batches.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from specbench.data.training_folder import (
    CONDITIONS,
    LOG,
    RECORD,
    check_same_training,
    conditions,
    is_finished,
    left_out_of,
    newest_state,
    record_of,
    stages_of,
    steps_of,
)
from specbench.system.errors import UserError, file_errors
from specbench.system.files import finite, lock_folder, make_folder, write_json
from specbench.system.threads import Threads, use_threads

if TYPE_CHECKING:
    from accelerate import Accelerator
    from omegaconf import DictConfig

    Batches = Callable[..., Iterator["Batch"]]

Batch = dict[str, torch.Tensor]

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
        left_out = left_out_of(cfg) if main else None
        figures = _steps(accelerator, module, batches, evaluate, cfg, began_with, optimizers, rate)
        if main:
            with file_errors(writing=out, others=(SafetensorError,)):
                save(out, finite(figures))
            write_json(out / CONDITIONS, began_with | {"save_dtype": cfg.get("save_dtype")})
            record = record_of(cfg, began_with, left_out, world, figures, begins, stages_of(earlier))
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


def training_pair(pair_cfg: DictConfig) -> DictConfig:
    """The pair as trainers load it: in bfloat16 instead of float16, in which gradients through the head vanish."""
    from omegaconf import OmegaConf  # late: as in `conversations`

    changed = {"dtype": "bfloat16"} if pair_cfg.dtype == "float16" else {}
    return cast("DictConfig", OmegaConf.merge(pair_cfg, changed))


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


def _resume(accelerator: Accelerator, checkpoints: Path, now: dict[str, Any]) -> int:
    """Loads the newest complete state, if any, and sets its number of threads, which affects the rounding of sums.

    Returns:
        Number of steps that led to it; 0 if there is none.

    Raises:
        UserError: it is the state of another training.
    """
    state = newest_state(checkpoints)
    if state is None:
        return 0
    then = check_same_training(checkpoints, state / CONDITIONS, now)
    accelerator.load_state(str(state))
    torch.set_num_threads(then["torch_threads"])
    return steps_of(state)
