"""Graphs without a GPU: captured passes that may do no more than a graph can, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.decoding import acceptance, sampling
from specbench.decoding.engine import Engine
from specbench.decoding.model import fixed_shape
from specbench.decoding.model import staged_model as targets
from specbench.decoding.model.graphs import Captured, GraphRunner, shaped, uncaptured
from specbench.decoding.trace import Generation

HUGE = 2**61  # no id, position or index: whatever reads it fails


class Trace(TorchDispatchMode):
    """The operations within, each with the addresses of the tensors that it did not find in the pass itself.

    Args:
        own: tensors whose addresses stay.
    """

    def __init__(self, own: Sequence[torch.Tensor]):
        super().__init__()
        self.made = {address(tensor) for tensor in own}
        self.kept: list[torch.Tensor] = []  # what is made must not be freed: its address would come again
        self.operations: list[tuple[object, list[tuple]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        found = [
            (place, leaf.storage_offset(), leaf.shape, leaf.stride())
            for leaf in tensors_in(given)
            if (place := address(leaf)) not in self.made
        ]
        result = func(*args, **kwargs) if kwargs else func(*args)
        taken = {place[0] for place in found}
        for leaf in tensors_in((result,)):
            place = address(leaf)
            if place not in taken:
                self.made.add(place)
                self.kept.append(leaf)
        self.operations.append((func, found))
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation is given or gives: of its lists, too, which hold no further ones.

    torch's own walk through any tree takes most of the time of these tests.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, torch.Tensor))


def address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins."""
    return tensor.untyped_storage().data_ptr()


class PretendedRunner(GraphRunner):
    """Replays a pass as it was captured: the same operations, which read the same addresses as then.

    Outputs of the replay before are spoilt. What was captured is called again, and nothing that is known later.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captures = self.replays = 0

    def capture(self, function: Callable, inputs: Sequence[torch.Tensor]) -> Captured:
        """Captures a function of these very tensors."""
        outputs = [None if one is None else torch.empty_like(one) for one in function(*inputs)]
        own = [given for given in inputs if given is not None]
        with Trace(own) as captured:
            function(*inputs)

        def replay() -> None:
            self.replays += 1
            kept = [output for output in outputs if output is not None]
            for output in kept:
                output.fill_(float("nan") if output.is_floating_point() else HUGE)
            with Trace(own) as trace, uncaptured():
                results = function(*inputs)
            assert trace.operations == captured.operations, "a graph would do what was captured"
            for output, result in zip(kept, (one for one in results if one is not None), strict=True):
                output.copy_(result)

        self.captures += 1
        return Captured(inputs, outputs, replay)


class Unguarded(PretendedRunner):
    """A fault: what is returned is overwritten by the next replay."""

    def run(self, owner: object, key: Hashable, function: Callable, *inputs: torch.Tensor) -> Sequence:
        """As `GraphRunner.run`, without the copies."""
        super().run(owner, key, function, *inputs)
        known = self._captured[owner]
        return known[shaped(key, inputs)].outputs


def choose_as_on_a_gpu(monkeypatch) -> None:
    """Tokens are chosen and accepted by operations of torch alone: neither by NumPy nor by a look at the numbers."""
    monkeypatch.setattr(sampling, "argmax_token", lambda logits: logits.argmax(-1))
    monkeypatch.setattr(acceptance, "may_look", lambda _: False)


def pretend(
    monkeypatch, kv_bucket: int = 16, make: Callable[[], GraphRunner] = PretendedRunner
) -> list[GraphRunner]:
    """Lets models that are made from now on capture their passes; the list gets what each of them does it with.

    kv_bucket: so short that most answers grow beyond it.
    """
    made: list[GraphRunner] = []

    def runner_of(model: object) -> GraphRunner:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(targets, "runner_of", runner_of)
    choose_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(fixed_shape, "KV_BUCKET", kv_bucket)
    return made


def replays_by_round(monkeypatch, made: list[GraphRunner]) -> list[int]:
    """The replays of all rounds to come; the list grows."""
    counts: list[int] = []
    inner = Engine._round

    def counted(self, *given):
        before = sum(graphs.replays for graphs in made)
        done = inner(self, *given)
        counts.append(sum(graphs.replays for graphs in made) - before)
        return done

    monkeypatch.setattr(Engine, "_round", counted)
    return counts


def what_was_drafted(answers: list[Generation]) -> list[list[tuple[int, int]]]:
    """Of each round the tokens that were drafted and accepted."""
    return [[(step.drafted, step.accepted) for step in answer.steps] for answer in answers]
