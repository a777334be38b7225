"""Why does a drafter accept nothing? Its drafts beside the target's own text, with controls.

A drafter runs unchanged, and once more for each control: with its states in a shuffled order, or from another depth of
the target than it asks for. A control that does better than the unchanged drafter identifies the fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.state import NORMED, Draft
from specbench.decoding.wrapped import WrappedDrafter

if TYPE_CHECKING:
    from specbench.decoding.state import Batch, Prefill, Request, SequenceState, Verified
    from specbench.models.pairs import Pair

SHIFTS = (-2, -1, 1, 2)  # offsets at which a draft token may be by mistake
CLEAR = 3.0  # standard errors by which two rates must differ
MARGIN = 0.1  # and by how much
LEAST_ROUNDS = 20  # that a finding rests on
COVERED = 0.8  # least share of the target's tokens that a drafter must be able to draft
NO_WORSE = 0.95  # of the rate with its states, from which shuffled states count as no worse
ALL = 0.97  # least share of its own tokens that a target accepts: some are near-ties in half precision
FALLS = 0.25  # of the rate at place 1: least rate at place 2


@dataclass(slots=True)
class Counts:
    """Counts of drafts compared with the target's text.

    Attributes:
        rounds: that drafted, and after which the text has two more places.
        agreed: by shift, rounds whose first draft tokens include the target's token at that offset.
        judged: rounds that judged each place of a draft.
        accepted: rounds that accepted it.
        following: by whether the round before accepted a draft token, and whether this one did: rounds that judged one.
    """

    rounds: int = 0
    agreed: Counter[int] = field(default_factory=Counter)
    judged: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    following: Counter[tuple[bool, bool]] = field(default_factory=Counter)

    def rate(self, shift: int = 0) -> float:
        """The share of the rounds that agreed at a shift."""
        return self.agreed[shift] / max(self.rounds, 1)

    def at(self, place: int) -> float | None:
        """Acceptance at a place of a draft, given that all before it was accepted; None if none got there."""
        return self.accepted[place] / self.judged[place] if self.judged[place] else None

    @property
    def all_places(self) -> float:
        """Acceptance at all places of the drafts, each given that all before it was accepted."""
        return self.accepted.total() / max(self.judged.total(), 1)


class Watched(WrappedDrafter):
    """Records the drafts of a drafter, and changes the states that it receives.

    Args:
        inner: the drafter.
        read: by tap of the drafter, the depth whose states it receives.
        change: applied to the states [1, n, d].
    """

    def __init__(
        self,
        inner: Drafter,
        read: Mapping[int, int] | None = None,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__(inner)
        self.read = {tap: tap for tap in inner.taps} | dict(read or {})
        self.change = change
        self.taps = tuple(dict.fromkeys(self.read.values()))
        self.firsts: dict[int, list[tuple[int, set[int]]]] = {}  # by request: position and first draft tokens

    def begin(self, slot: int, sequence: SequenceState, prefill: Prefill) -> None:
        """Starts a sequence with the states that the drafter is to see."""
        super().begin(slot, sequence, replace(prefill, hidden_states=self._states(prefill.hidden_states)))

    def draft(self, batch: Batch) -> Draft:
        """Notes the tokens that a draft begins with."""
        draft = super().draft(batch)
        roots = draft.tokens[0]
        if draft.tree is not None:
            roots = roots[draft.tree.parents[0] < 0]
        elif draft.tokens.shape[1]:
            roots = roots[:1]
        acceptable = draft.acceptable()
        if roots.numel() and (acceptable is None or bool(acceptable[0, 0])):
            noted = self.firsts.setdefault(batch.sequences[0].request_index, [])
            noted.append((batch.lengths[0], set(roots.tolist())))
        return draft

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Passes on the outcome with the states that the drafter is to see."""
        super().commit(batch, replace(verified, hidden_states=self._states(verified.hidden_states)))

    def _states(self, states: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        seen = {tap: states[depth] for tap, depth in self.read.items() if depth in states}
        return seen if self.change is None else {tap: self.change(one) for tap, one in seen.items()}


def observed(pair: Pair, watched: Watched, requests: Sequence[Request]) -> Counts:
    """Runs a drafter on some requests, one after the other."""
    engine = Engine(pair.staged, watched, pair.stop_ids, None, pair.context_length)
    counts = Counts()
    for index, (request, answer) in enumerate(zip(requests, engine.generate(list(requests)))):
        text = [*request.prompt, *answer.tokens]
        for position, firsts in watched.firsts.get(index, ()):
            if position + max(SHIFTS) < len(text):
                counts.rounds += 1
                counts.agreed.update(s for s in (0, *SHIFTS) if text[position + s] in firsts)
        before: bool | None = None  # whether the round before accepted a draft token
        for step in answer.steps:
            assert step.depth is not None  # this project's own decoding sets it
            stopped = step.emitted == step.accepted
            if before is not None and step.depth and (step.accepted or not stopped):
                counts.following[before, step.accepted > 0] += 1
            before = step.accepted > 0
            for place in range(min(step.accepted + 1, step.depth)):
                if place < step.accepted or not stopped:
                    counts.judged[place] += 1
                    counts.accepted[place] += place < step.accepted
    return counts


def shuffled(states: torch.Tensor) -> torch.Tensor:
    """States [1, n, d] in the order of another text: each dimension rolled by some tokens, and half of them negated."""
    n = states.shape[1]
    signs = torch.ones(states.shape[-1], device=states.device, dtype=states.dtype)
    signs[::2] = -1
    return states.roll(max(1, n // 2), dims=1) * signs


def other_depths(tap: int, layers: int) -> Iterator[int]:
    """Depths that may be mistaken for a tap."""
    if tap == NORMED:
        yield from (layers, layers - 1)
        return
    yield from (depth for depth in (tap - 1, tap + 1) if 0 <= depth <= layers)
    if tap >= layers - 1:
        yield NORMED


def examine(
    pair: Pair, make: Callable[..., Drafter], requests: Sequence[Request]
) -> tuple[Counts, list[str]]:
    """Runs a drafter and its controls.

    Args:
        pair: with the target.
        make: returns a new drafter; of another pair, if it is called with `pair`.
        requests: greedy ones.

    Returns:
        The counts of the unchanged drafter, and a line for each finding.
    """
    drafter = make()
    base = observed(pair, Watched(drafter), requests)
    findings = [
        *weight_findings(drafter, pair),
        *template_findings(pair),
        *vocabulary_findings(pair, drafter, requests),
    ]
    if base.rounds < LEAST_ROUNDS:
        findings.append(f"it drafted in only {base.rounds} rounds: too few to say more")
        return base, findings
    if not base.rate() and (drafter.taps or drafter.needs.part or drafter.needs.draft_model):
        findings.append("nothing is accepted at place 1: was it trained for this target?")
    findings += shift_findings(base) + chain_findings(base) + stale_findings(base)
    if drafter.needs.draft_model and drafter.needs.part is None and not drafter.overlaps_verification():
        findings += own_draft_findings(pair, make, requests)
    if drafter.taps and not drafter.overlaps_verification():
        findings += state_findings(pair, make, requests, base)
    return base, findings


def own_draft_findings(pair: Pair, make: Callable[..., Drafter], requests: Sequence[Request]) -> list[str]:
    """Checks that a drafter with the target itself as draft model drafts the target's tokens."""
    if pair.trimmed:
        return []
    counts = observed(pair, Watched(make(pair=replace(pair, draft=pair.target))), requests)
    if counts.all_places >= ALL:
        return []
    return [
        f"with the target itself as draft model {counts.all_places:.2f} of what is judged is accepted, not all: its "
        "cache or its positions are wrong, unless it asks its model for more than the next token"
    ]


def state_findings(
    pair: Pair, make: Callable[..., Drafter], requests: Sequence[Request], base: Counts
) -> list[str]:
    """Checks whether a drafter uses the states that it reads, and whether others suit it better."""
    findings, target, taps = [], pair.staged, make().taps
    if base.rate():  # else no control does worse
        blind = observed(pair, Watched(make(), change=shuffled), requests)
        if not clearly_above(base, blind) and blind.rate() >= NO_WORSE * base.rate():
            findings.append(
                f"acceptance at place 1 is that of the shuffled control ({base.rate():.2f}, {blind.rate():.2f}): it "
                "does not use the states that it reads"
            )
    layers = len(target.layers)
    for tap in taps:
        for depth in other_depths(tap, layers):
            rival = observed(pair, Watched(make(), read={tap: depth}), requests)
            if clearly_above(rival, base):
                findings.append(
                    f"with the states of {depth_name(depth, layers)} in place of {depth_name(tap, layers)} acceptance "
                    f"at place 1 is {rival.rate():.2f}, not {base.rate():.2f}: it was trained on those"
                )
    return findings


def shift_findings(base: Counts) -> list[str]:
    """Checks whether drafts are the target's tokens of other places."""
    best = max(SHIFTS, key=base.rate)
    if not _differ(base.rate(best), base.rate(), base.rounds, base.rounds):
        return []
    where = f"{abs(best)} place{'s' if abs(best) > 1 else ''} {'later' if best > 0 else 'earlier'}"
    return [
        f"its first draft token is the target's token {where} ({base.rate(best):.2f}) rather than that of its own "
        f"place ({base.rate():.2f}): positions or states are shifted"
    ]


def chain_findings(base: Counts) -> list[str]:
    """Checks that a drafter continues from its own tokens."""
    first, second = base.at(0), base.at(1)
    if first is None or second is None or base.judged[1] < LEAST_ROUNDS or second >= FALLS * first:
        return []
    if not _differ(first, second, base.judged[0], base.judged[1]):
        return []
    return [
        f"place 2 is accepted at {second:.2f} after {first:.2f} at place 1: it does not continue from its own first "
        "token"
    ]


def stale_findings(base: Counts) -> list[str]:
    """Checks that a drafter continues from accepted tokens as well as from others."""
    some, none = (base.following[before, True] + base.following[before, False] for before in (True, False))
    if min(some, none) < LEAST_ROUNDS:
        return []
    after, elsewhere = base.following[True, True] / some, base.following[False, True] / none
    if not _differ(elsewhere, after, none, some):
        return []
    return [
        f"place 1 is accepted at {after:.2f} after rounds that accepted draft tokens and at {elsewhere:.2f} after "
        "those that accepted none: what it keeps of accepted tokens is stale or shifted"
    ]


def weight_findings(drafter: Drafter, pair: Pair) -> list[str]:
    """Finds weights that no training produces; skips those of the target, which a drafter may hold."""
    findings = []
    of_target = {weight.data_ptr() for weight in pair.target.state_dict().values()}
    padded = pair.expansion is not None or pair.draft_expansion is not None
    for name, weight in weights_of(drafter):
        if weight.data_ptr() in of_target:
            continue
        values = weight.detach().float()
        if not torch.isfinite(values).all():
            findings.append(f"weight {name} is not finite")
        elif padded:  # with zeros, to the target's width
            continue
        elif values.numel() > 1 and bool((values == 0).all()):
            findings.append(f"weight {name} is zero throughout: was it loaded?")
        elif values.dim() == 2 and (empty := longest_run((values == 0).all(dim=1))) > values.shape[0] // 4:
            findings.append(
                f"weight {name}: {empty} consecutive rows of {values.shape[0]} are zero: is it all loaded?"
            )
    return findings


def longest_run(flags: torch.Tensor) -> int:
    """The length of the longest run of flags [n] that are set."""
    ends = nn.functional.pad(flags.long(), (1, 1)).diff()
    lengths = (ends == -1).nonzero().flatten() - (ends == 1).nonzero().flatten()
    return int(lengths.max()) if len(lengths) else 0


def weights_of(drafter: Drafter) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the modules that a drafter holds, directly or one level down."""
    seen: set[int] = set()
    for name, value in vars(drafter).items():
        held = [(name, value)]
        if isinstance(value, list):
            held = [(f"{name}.{place}", one) for place, one in enumerate(value)]
        elif not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
            held = [(f"{name}.{inner}", one) for inner, one in vars(value).items()]
        for path, one in held:
            if isinstance(one, nn.Module):
                for key, weight in one.state_dict().items():
                    if weight.data_ptr() not in seen and weight.is_floating_point():
                        seen.add(weight.data_ptr())
                        yield f"{path}.{key}", weight


def vocabulary_findings(pair: Pair, drafter: Drafter, requests: Sequence[Request]) -> list[str]:
    """Checks that a drafter with a trimmed head can draft the target's tokens."""
    ids: torch.Tensor | None = getattr(getattr(drafter, "head", None), "token_ids", None)
    if ids is None:
        return []
    findings = []
    if int(ids.min()) < 0 or int(ids.max()) >= pair.target.config.get_text_config().vocab_size:
        return [f"its vocabulary map names ids up to {int(ids.max())}, which the target does not have"]
    if len(ids.unique()) < len(ids):
        findings.append(f"its vocabulary map names {len(ids) - len(ids.unique())} ids twice")
    plain = Engine(pair.staged, Drafter(), pair.stop_ids, None, pair.context_length)
    tokens = torch.tensor([token for answer in plain.generate(list(requests)) for token in answer.tokens])
    covered = torch.isin(tokens, ids.cpu()).float().mean().item()
    if covered < COVERED:
        findings.append(
            f"its vocabulary map holds {covered:.0%} of what the target says: it was made for another text or tokenizer"
        )
    return findings


def template_findings(pair: Pair) -> list[str]:
    """Checks that prompts are as the checkpoint's own template makes them."""
    published: Any = pair.tokenizer.chat_template
    if isinstance(published, dict):  # several by name
        published = published.get("default")
    if not published or published == pair.chat_template:
        return []
    messages = [{"role": "user", "content": "How many owls are there?"}]
    theirs = replace(pair, chat_template=published, template_kwargs={}).rendered(messages)
    ours = pair.rendered(messages)
    if ours == theirs:
        return []
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return [
        f"the pair's template writes {ours[at : at + 24]!r} where the checkpoint's own has {theirs[at : at + 24]!r}: "
        "drafters were trained with one of them"
    ]


def clearly_above(one: Counts, other: Counts) -> bool:
    """Whether the agreement of one is clearly above that of the other."""
    return _differ(one.rate(), other.rate(), one.rounds, other.rounds)


def _differ(high: float, low: float, n_high: int, n_low: int) -> bool:
    """Whether one rate is above another by `MARGIN` and `CLEAR` standard errors."""
    if high - low < MARGIN or not n_high or not n_low:
        return False
    error = math.sqrt(high * (1 - high) / n_high + low * (1 - low) / n_low)
    return high - low > CLEAR * error


def depth_name(depth: int, layers: int) -> str:
    """A tap in words."""
    if depth == NORMED:
        return "the final norm"
    return "the embeddings" if depth == 0 else f"layer {depth} of {layers}"
