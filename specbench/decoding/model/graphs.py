"""Passes of one shape, captured once and replayed: on CUDA as graphs.

A pass starts some thousand operations, each of which costs the host microseconds; a graph starts all of them at once. A
graph repeats the very same operations on the very same memory, so that everything that differs between two passes must
be an input.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from specbench.decoding.cpu.packed_linear import assume_unchanged
from specbench.system.errors import JobError, one_line

if TYPE_CHECKING:
    Function = Callable[..., Sequence[torch.Tensor | None]]

WARM_UPS = 2  # runs in front of a capture, in which libraries choose their kernels and reserve what they need
# The inputs and outputs of all captured passes of one owner take more than so many bytes only while at least this share
# of the device's memory is free.
HELD_BYTES, SPARE = 2**32, 1 / 4
VERSIONS = 1024  # most compiled versions of one function
CAPTURING = threading.Lock()  # only one capture at a time in a process
WITHIN = threading.local()  # whether this thread calls a function that is being captured


@dataclass(frozen=True, slots=True)
class Options:
    """How the passes of a model run.

    Attributes:
        graphs: on CUDA, as graphs.
        compile: what graphs hold is compiled first; on a CPU, layers are.
    """

    graphs: bool = True
    compile: bool = False


DEFAULT = Options()


def set_options(model: torch.nn.Module, options: Options) -> None:
    """Sets how the passes of a model run, whoever drives it; otherwise they run as `DEFAULT`."""
    model.specbench_passes = options  # type: ignore[assignment] # of torch, whose attributes are tensors and modules


def options_of(model: object) -> Options:
    """How the passes of a model run."""
    return getattr(model, "specbench_passes", DEFAULT)


class EagerRunner:
    """Runs passes as they are."""

    def run(
        self, owner: object, key: Hashable, function: Function, *inputs: torch.Tensor | None
    ) -> Sequence[Any]:
        """Runs a pass.

        Args:
            owner: what the function works on beside its inputs, such as a cache: compared by identity, not kept alive.
            key: identifies the function, together with `owner` and the shapes of the inputs.
            function: of the inputs; it returns tensors, or None in place of some, and leaves the inputs as they are.
            inputs: everything that may differ between two passes with one key; None for what is not there.

        Returns:
            What the function returns.
        """
        return function(*inputs)

    def forget(self) -> None:
        """Forgets captured passes: memory that they use has moved."""


@dataclass(slots=True)
class Captured:
    """A pass that was captured: `replay` reads `inputs` and writes `outputs`, the same tensors each time."""

    inputs: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor | None]
    replay: Callable[[], None]

    @property
    def bytes(self) -> int:
        """Bytes of its inputs and outputs, such as the logits of a batch of trees."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs) if tensor is not None)


class GraphRunner(EagerRunner):
    """Captures a pass when its key is new, and replays it from then on. For inference mode alone.

    Results are always copies: a replay overwrites the outputs of the last one, which a drafter may have kept. A graph
    is dropped when its owner, such as a KV cache, is garbage-collected, or as the least recently used one when all
    graphs of the owner hold more than `HELD_BYTES` and the device's memory is scarce.

    Args:
        device: a CUDA device.
        compile: whether functions are compiled before they are captured.

    Attributes:
        captures_of_all: number of captures by all runners of this process, deleted ones included.
    """

    captures_of_all = 0

    def __init__(self, device: torch.device, compile: bool = False):
        self.device, self.compile = device, compile
        self._captured: WeakKeyDictionary[object, dict[Hashable, Captured]] = WeakKeyDictionary()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # what torch calls a handle

    def run(
        self, owner: object, key: Hashable, function: Function, *inputs: torch.Tensor | None
    ) -> Sequence[Any]:
        """As `EagerRunner.run`; the tensors that are returned belong to the caller.

        A pass that runs within a capture, of this or another runner, becomes part of that capture.
        """
        if is_within():
            return function(*inputs)
        by_shape = self._captured.setdefault(owner, {})
        key = shaped(key, inputs)
        # It is reinserted at the end: the least recently used one is first.
        captured = by_shape.pop(key, None)
        if captured is None:
            static_inputs = [
                None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
                for tensor in inputs
            ]
            with uncaptured():
                captured = self.capture(function, static_inputs)
            GraphRunner.captures_of_all += 1
            by_shape = self._captured.setdefault(owner, {})  # anew: what it ran may have called `forget`
            held = captured.bytes + sum(other.bytes for other in by_shape.values())
            if held > HELD_BYTES and is_scarce(self.device):
                while by_shape and held > HELD_BYTES:
                    held -= by_shape.pop(next(iter(by_shape))).bytes
        else:
            for static_input, tensor in zip(captured.inputs, inputs):
                if static_input is not None and tensor is not None:
                    static_input.copy_(tensor)
        by_shape[key] = captured
        captured.replay()
        return [None if output is None else output.clone() for output in captured.outputs]

    def forget(self) -> None:
        """Drops all graphs."""
        self._captured.clear()

    def capture(self, function: Function, inputs: Sequence[torch.Tensor | None]) -> Captured:
        """Captures a function of these very tensors. Raises JobError if it does something that no graph can hold."""
        if self._stream is None:
            # Kernels of a graph keep the priority of the stream that they were captured on.
            priority = torch.cuda.current_stream(self.device).priority
            self._stream = torch.cuda.Stream(self.device, priority=priority)
        if not any(self._captured.values()):
            # One for all graphs: none runs beside another, and outputs are copied before the next one runs. Once all
            # are dropped, tensors that they made may still live, and torch refuses their pool.
            self._pool = torch.cuda.graph_pool_handle()
        if self.compile:
            function = compiled(function)
        graph = torch.cuda.CUDAGraph()
        try:
            with CAPTURING, uncollected():
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_UPS):
                        function(*inputs)
                # Kernels keep the address of cuBLAS's workspace. An earlier one could be freed while the graph uses it,
                # such as by inductor's own graphs; without one, it is allocated in the graph's pool.
                torch._C._cuda_clearCublasWorkspaces()
                with capturing(graph, self._pool, self._stream):
                    outputs = function(*inputs)
                torch._C._cuda_clearCublasWorkspaces()  # uncaptured work must not use the pool's
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            remedy = "pair.compile=null" if self.compile else "pair.graphs=false"
            raise JobError(
                f"a pass cannot be captured as a CUDA graph: {one_line(error)}; set {remedy}"
            ) from error
        return Captured(inputs, outputs, graph.replay)


def is_scarce(device: torch.device) -> bool:
    """Whether less than `SPARE` of a device's memory is free; on a CPU it always counts as scarce."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free < SPARE * total


def shaped(key: Hashable, inputs: Sequence[torch.Tensor | None]) -> Hashable:
    """The look-up key of a captured pass: its key, and the shapes of its inputs."""
    return key, *(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)


def compiled(function: Function, backend: str = "inductor") -> Function:
    """The function compiled as a whole, for the shapes that it is first called with."""
    import torch._dynamo  # late: it takes a second

    # Each pass is a separate closure over the same code, so there are as many versions of it as keys.
    assume_unchanged()
    config = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = VERSIONS
    mode = "max-autotune-no-cudagraphs" if backend == "inductor" else None
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Captures the operations within the context; an error among them is raised unchanged.

    If an operation breaks the capture, the end of `torch.cuda.graph` raises another error in place of the operation's,
    and leaves the thread on the stream of the capture.
    """
    failed: BaseException | None = None
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    failed = error
                    raise
        except RuntimeError:
            if failed is None:
                raise
            raise failed from None


def is_within() -> bool:
    """Whether this thread calls a function that is being captured."""
    return getattr(WITHIN, "depth", 0) > 0


@contextmanager
def uncaptured() -> Iterator[None]:
    """No pass within is captured by itself: it is part of what is being captured, or will not come again.

    Also a decorator, `@uncaptured()`.
    """
    WITHIN.depth = getattr(WITHIN, "depth", 0) + 1
    try:
        yield
    finally:
        WITHIN.depth -= 1


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection within the context: it would free tensors in the middle of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
