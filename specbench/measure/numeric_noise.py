"""How much of a logit is rounding on this machine, in this dtype, at the shapes in use.

A token computed one row at a time (autoregressive decoding) or within a block (verification) goes through different
kernels, which sum in different orders. The resulting change is measured here in the run itself, so that a near-tie can
be distinguished from a fault.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specbench.decoding.cpu import native
from specbench.decoding.kv_cache import ForwardContext
from specbench.decoding.model.graphs import Options, set_options, uncaptured
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.state import Draft
from specbench.decoding.tree import Tree
from specbench.measure.truncation import odds_apart, truncated_margin
from specbench.system.processes import free_memory

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import KVCache
    from specbench.decoding.sampling import SamplingParams

BLOCKS = (2, 4, 6, 8)  # rows per verification pass that are compared with one row, beside the widest one
ENGINE_NOISE = 0.5  # logits: largest deviation of another engine that rounding explains
NOT_ROUNDING = 4  # times the change in the model's own forward; on CPUs ours is 1.0 to 1.5 times as large


@torch.inference_mode()
@uncaptured()
def begin(target: StagedModel, prompt: list[int], room: int) -> tuple[KVCache, torch.Tensor]:
    """Returns the cache of a prompt, with room for more tokens, and the logits [1, vocab] after it.

    An answer may be fed to it several times, in different ways: a pass attends to nothing after its own tokens.
    """
    cache = target.new_cache(len(prompt) + room + target.padding)
    return cache, target.prefill(torch.tensor([prompt], device=target.device), cache).logits


@torch.inference_mode()
@uncaptured()
def forced_logits(
    target: StagedModel,
    prompt: list[int],
    answer: list[int],
    block: int,
    begun: tuple[KVCache, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The target's logits [len(answer), vocab] of each token of `answer`, fed `block` rows at a time.

    The prompt is one pass, as in a generation; block 1 repeats the arithmetic of autoregressive decoding. No pass is
    wider than the target's width, as in a generation. begun: result of `begin` for the prompt.
    """
    block = min(block, target.width or block)
    ids = torch.tensor([prompt + answer], device=target.device)
    cache, first = begun or begin(target, prompt, len(answer))
    logits = [first]
    for start in range(len(prompt), ids.shape[1] - 1, block):
        rows = ids[:, start : min(start + block, ids.shape[1] - 1)]
        logits.append(target.verify(rows[:, :1], Draft(rows[:, 1:]), cache, start)[0])
    return torch.cat(logits).float()


@torch.inference_mode()
@uncaptured()
def tree_logits(
    target: StagedModel,
    prompt: list[int],
    answer: list[int],
    widest: int = max(BLOCKS),
    begun: tuple[KVCache, torch.Tensor] | None = None,
) -> torch.Tensor:
    """As `forced_logits`, with each token as a tree's last node, after siblings that it does not attend to.

    The pass has `widest` rows, or the target's width, if that is less.
    The token's keys and values are then at a later entry than in a chain, and attention sums them in another order.
    """
    n = min(widest, target.width or widest)  # the token's parent, siblings, and itself
    tree = Tree.of(torch.full((n - 1,), -1, device=target.device))
    ids = torch.tensor([prompt + answer], device=target.device)
    cache, logits_of_prompt = begun or begin(target, prompt, len(answer) + n)
    first = ids[:, len(prompt) : len(prompt) + 1]
    logits = [logits_of_prompt, target.verify(first, Draft(ids[:, :0]), cache, len(prompt))[0]]
    for start in range(len(prompt), ids.shape[1] - 2):
        parent, token = ids[:, start : start + 1], ids[:, start + 1 : start + 2]
        draft = Draft(torch.cat([parent.expand(-1, n - 2), token], dim=1))
        ctx = ForwardContext.nodes(start, tree.offsets()[0], tree.visible[0])
        logits.append(target.verify(parent, draft, cache, ctx)[0, -1:])
    return torch.cat(logits).float()


@torch.inference_mode()
@uncaptured()
def next_logits(target: StagedModel, prompt: list[int], answer: list[int], index: int) -> torch.Tensor:
    """Logits [vocab] of token `index` of `answer`, decoded token by token.

    Unlike `forced_logits` it keeps no others: those of a long answer over a large vocabulary take gigabytes.
    """
    ids = torch.tensor([prompt + answer[:index]], device=target.device)
    cache = target.new_cache(ids.shape[1] + target.padding)
    logits = target.prefill(ids[:, : len(prompt)], cache).logits
    for start in range(len(prompt), ids.shape[1]):
        token = ids[:, start : start + 1]
        logits = target.verify(token, Draft(token[:, :0]), cache, start)[0]
    return logits[-1].float()


def drawn_margin(logits: torch.Tensor, other: int, decoding: SamplingParams, uniform: float) -> float:
    """The smallest change of logits [vocab] with which the number `uniform` draws `other` instead.

    A draw selects the token whose interval of the distribution function F contains the number u. Moving logits apart by
    d moves F within logit(F) +- d / temperature. So the distance is temperature x |logit(u) - logit(F)| at the end of
    the other token's interval that is nearer to u: a distance between logits, as in greedy decoding.
    With top_k or top_p, d also decides which tokens have an interval.
    """
    if decoding.truncation:
        return truncated_margin(logits, other, decoding, uniform)
    scaled = logits.double() / decoding.temperature
    return decoding.temperature * odds_apart(scaled, scaled, other, uniform)


class ShapeChanges(NamedTuple):
    """Changes of logits between passes of several shapes.

    Attributes:
        values: [n] absolute changes of the distance of the target's first two choices, in logits.
        firsts: result of `first_two` for each sample.
        blocks: widths of the passes that were compared with passes of one token.
    """

    values: torch.Tensor
    firsts: list[tuple[torch.Tensor, torch.Tensor]]
    blocks: set[int]


def shape_noise(
    target: StagedModel,
    samples: list[tuple[list[int], list[int]]],
    trees: bool = False,
    widest: int = max(BLOCKS),
    rows: int = 1,
    changes: ShapeChanges | None = None,
) -> float:
    """Twice the largest change, between block shapes, of the distance of the target's first two choices.

    Twice, because the largest of some hundred positions is a sample itself. A fault in our verification changes logits,
    too, and must not widen the noise that it is judged by: a change above `NOT_ROUNDING` times that of the model's own
    forward is not rounding, and the model's own is used instead.

    Args:
        target: Whose passes are compared.
        samples: (prompt, answer) token ids.
        trees: also compare a tree's nodes, which are at other entries of the cache than the tokens of a chain.
        widest: tokens of a sequence in the widest pass in use.
        rows: sequences in that pass.
        changes: result of `shape_changes` for these arguments; None: it is called.

    Returns:
        Logits; 0 if no shape changes any, as in passes of our own kernels alone.
    """
    changes = changes or shape_changes(target, samples, trees, widest)
    ours = changes.values.max().item()
    if ours == 0.0:
        # In our own kernels no shape rounds differently, but short samples may miss passes that are too wide for them;
        # of other kernels, the few nodes of trees that round differently.
        own_kernels = target.device.type == "cpu" and target.uses_torch is None
        may_be_missed = rows * widest > native.MOST_TOKENS if own_kernels else trees
        if not may_be_missed:
            return 0.0
        passes = (forced_logits(target, *sample, max(BLOCKS)) for sample in samples)
        step = 2 * max((logit_step(target, logits) for logits in passes), default=0.0)
        return max(step, foreign_noise(target, samples)) if own_kernels else step
    model, step = model_change(target, samples, changes.firsts, changes.blocks)
    largest = ours if ours <= NOT_ROUNDING * model else model
    return 2 * (max(largest, step) if trees else largest)


def logit_step(target: StagedModel, logits: torch.Tensor) -> float:
    """A step of the dtype at the largest logit: the rounding of a logit itself."""
    return torch.finfo(target.dtype).eps * logits.abs().max().item()


def shape_changes(
    target: StagedModel,
    samples: list[tuple[list[int], list[int]]],
    trees: bool = False,
    widest: int = max(BLOCKS),
) -> ShapeChanges:
    """All changes, of which `shape_noise` uses the largest; same arguments."""
    blocks = {min(block, target.width or block) for block in (*BLOCKS, widest)}
    values, firsts = [], []
    for prompt, answer in samples:
        begun = begin(target, prompt, len(answer) + max(blocks))
        top, gap = first_two(target, prompt, answer, begun)
        passes = [forced_logits(target, prompt, answer, n, begun) for n in blocks]
        passes += [tree_logits(target, prompt, answer, max(blocks), begun)] if trees else []
        values += [(logits.gather(-1, top).diff() - gap).abs().flatten() for logits in passes]
        firsts.append((top, gap))
    return ShapeChanges(torch.cat(values), firsts, blocks)


def tie_chance(target: StagedModel, prompt: list[int], answer: list[int], changes: torch.Tensor) -> float:
    """Probability that rounding makes an answer depart from that of token-by-token decoding.

    It departs at the first place where the target's first two choices are closer than a change in the direction that
    swaps them, which half of the changes have.

    Args:
        target: that was decoded with.
        prompt: token ids.
        answer: token ids of autoregressive decoding.
        changes: [n] in logits, as `shape_changes` measures them.
    """
    if not changes.any():
        return 0.0
    # That the gap itself is off by a change averages out, and wide passes are fewer.
    gap = forced_logits(target, prompt, answer, max(BLOCKS)).topk(2).values.diff().abs()
    swaps = (changes[None] > gap).float().mean(-1) / 2
    return 1.0 - float((1.0 - swaps).prod())


def model_noise(target: StagedModel, samples: list[tuple[list[int], list[int]]]) -> float:
    """As `shape_noise`, between autoregressive decoding of ours and of the model's own forward.

    If our kernels replace the model's, no shape of ours changes a bit, but the two still round differently.
    """
    firsts = [first_two(target, prompt, answer) for prompt, answer in samples]
    ours = max(
        change(forced_rows(target, prompt, answer, 1, 1)[0], top, gap)
        for (prompt, answer), (top, gap) in zip(samples, firsts)
    )
    model, _ = model_change(target, samples, firsts)
    return 2 * (ours if ours <= NOT_ROUNDING * model else model)


def foreign_noise(target: StagedModel, samples: list[tuple[list[int], list[int]]]) -> float:
    """As `shape_noise`, between our passes and those of another program with the same weights and dtype.

    That is `model_noise`. But on a CPU in half precision the model's own forward may take seconds a pass. There a
    float32 copy of the weights, if it fits in memory, serves as exact arithmetic: each program is assumed to be off by
    as much as ours, independently, so that the two differ by sqrt(2) times that. The result is at most `NOT_ROUNDING`
    steps of the dtype at the largest logit.
    """
    if not (target.device.type == "cpu" and target.dtype != torch.float32 and _has_exact_copy(target)):
        return model_noise(target, samples)
    model = copy.deepcopy(target.model).float()
    set_options(model, Options(graphs=False, compile=False))
    exact = StagedModel(model, target.vocab_size)
    largest = step = 0.0
    for prompt, answer in samples:
        logits = forced_logits(exact, prompt, answer, block=1)
        step = max(step, logit_step(target, logits))
        largest = max(largest, change(logits, *first_two(target, prompt, answer)))
    return min(2 * math.sqrt(2) * largest, NOT_ROUNDING * step)


def _has_exact_copy(target: StagedModel) -> bool:
    """Whether a model can be copied in float32: it is not quantized, and two copies fit in memory."""
    free, copied = free_memory(), 4 * sum(weight.numel() for weight in target.model.parameters())
    # Two: one of them in the order of our kernels.
    return not getattr(target.model, "is_quantized", False) and (free is None or 2 * copied < free)


def engine_noise(
    target: StagedModel, answers: Sequence[tuple[list[int], list[int], list[dict[int, float]]]]
) -> float:
    """As `shape_noise`, between our passes and those of another engine; at most `ENGINE_NOISE`.

    The engine's log-probabilities give the distance of its first two choices. Without them, the observable noise is
    how far its greedy tokens fall short of the target's best.

    Args:
        target: that both decode with.
        answers: prompt, answer, and the engine's log-probabilities by id at each place of the answer.
    """
    largest = 0.0
    for prompt, answer, tops in answers:
        logits = forced_logits(target, prompt, answer, block=1)
        chosen = torch.tensor(answer, device=logits.device)[:, None]
        short = (logits.amax(-1, keepdim=True) - logits.gather(-1, chosen)).squeeze(-1).tolist()
        for place, likeliest in enumerate(tops[: len(answer)]):
            if len(likeliest) < 2:  # a server may return fewer than requested
                continue
            first, second = sorted(likeliest, key=lambda token: -likeliest[token])[:2]
            gap = float(logits[place, first] - logits[place, second])
            short[place] = abs(gap - (likeliest[first] - likeliest[second]))
        largest = max(largest, *(value for value in short if value <= ENGINE_NOISE), 0.0)
    return min(2 * largest, ENGINE_NOISE)


def model_change(
    target: StagedModel,
    samples: list[tuple[list[int], list[int]]],
    firsts: list[tuple[torch.Tensor, torch.Tensor]],
    blocks: Collection[int] = BLOCKS,
) -> tuple[float, float]:
    """The largest change, between block shapes of the model's own forward, of the distance of the first two choices.

    A logit is itself rounded, so the change is at least one step of the model's dtype.

    Args:
        target: whose model it is.
        samples: as in `shape_noise`.
        firsts: result of `first_two` for each.
        blocks: rows of the passes that are compared with one row.

    Returns:
        That change, in logits; a step of the dtype at the largest logit.
    """
    model = step = 0.0
    for (prompt, answer), (top, _) in zip(samples, firsts):
        single = forced_rows(target, prompt, answer, 1, 1)[0]
        step = max(step, logit_step(target, single))
        gap = single.gather(-1, top).diff()
        model = max(model, *(change(forced_rows(target, prompt, answer, n, 1)[0], top, gap) for n in blocks))
    return max(model, step), step


def batch_noise(
    target: StagedModel, samples: list[tuple[list[int], list[int]]], rows: int, widest: int = max(BLOCKS)
) -> float:
    """As `shape_noise`, between a sequence alone and among `rows` copies of it, fed by tokens or by blocks."""
    largest = 0.0
    for prompt, answer in samples:
        top, gap = two_likeliest(forced_rows(target, prompt, answer, 1, 1)[0])
        for block in {1, *(min(block, target.width or block) for block in (*BLOCKS, widest))}:
            for logits in forced_rows(target, prompt, answer, block, rows):
                largest = max(largest, change(logits, top, gap))
    return 2 * largest


def change(logits: torch.Tensor, top: torch.Tensor, gap: torch.Tensor) -> float:
    """The largest change of the distance `gap` [n, 1] between the logits of the two tokens `top` [n, 2]."""
    return (logits.gather(-1, top).diff() - gap).abs().max().item()


def first_two(
    target: StagedModel,
    prompt: list[int],
    answer: list[int],
    begun: tuple[KVCache, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's first two choices for each token of an answer, in autoregressive decoding.

    Returns:
        Ids [n, 2] and the distance [n, 1] of their logits.
    """
    return two_likeliest(forced_logits(target, prompt, answer, 1, begun))


def two_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two largest of logits [n, vocab]: ids [n, 2] and their distance [n, 1]."""
    top = logits.topk(2).indices
    return top, logits.gather(-1, top).diff()


@torch.inference_mode()
def forced_rows(
    target: StagedModel, prompt: list[int], answer: list[int], block: int, rows: int
) -> torch.Tensor:
    """As `forced_logits`, for a batch of `rows` copies: logits [2, len(answer), vocab] of the first and the last.

    It uses the model's own forward and cache: a fault in our batches must not widen the noise that it is judged by.
    """
    ids = torch.tensor([prompt + answer], device=target.device).expand(rows, -1)
    out = target.model(ids[:, : len(prompt)], use_cache=True, logits_to_keep=1)
    logits = [out.logits[[0, -1]]]
    for start in range(len(prompt), ids.shape[1] - 1, block):
        some = ids[:, start : min(start + block, ids.shape[1] - 1)]
        out = target.model(some, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[[0, -1]])
    return torch.cat(logits, dim=1)[..., : target.vocab_size].float()
