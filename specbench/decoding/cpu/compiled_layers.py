"""Decoder layers whose short passes are one compiled function: norms, rotations, activations and sums fused.

On a CPU a pass of one token starts some thousand small operations, which take a third of its time. A family's own layer
is traced once: products and attention remain opaque calls, and torch's compiler fuses the rest. All layers of a kind
share the function, for every number of tokens. Compiled code is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbench.decoding.cpu.grouped_attention import NAME as GROUPED
from specbench.decoding.cpu.grouped_attention import attending, grouped_attention_config, is_plain
from specbench.decoding.cpu.lean_modules import M, lean_copy
from specbench.decoding.cpu.native import COMPILERS, MOST_TOKENS, compiler, has_kernel, processor
from specbench.decoding.cpu.packed_linear import FusedSlice, PackedLinear, packed_weights
from specbench.system.errors import one_line, warn
from specbench.system.files import make_folder
from specbench.system.paths import cache_folder

if TYPE_CHECKING:
    Tensors = Sequence[torch.Tensor]
    Key = tuple[torch.dtype, bool]

COMPILED = "compiled"  # the folder in the user's cache
NAMESPACE = "specbench_layer"
NAME = "specbench_compiled"  # of the attention function that tracing meets
EAGER = "eager_attention_forward"  # what transformers calls a family's own attention function
ELF = b"\x7fELF"  # a library begins with it, and linkers write that last
LINKING = 2.0  # seconds that a linker takes at most
SIZES = (3, 5)  # sizes of batch and pass that represent all sizes in a trace
# Largest difference between the states of a compiled layer and of the layer, relative to the largest state.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# No operation here is large enough for several threads; the code that calls the kernels is compiled, too.
OPTIONS = {"cpp.threads": 1, "cpp_wrapper": True, "size_asserts": False, "alignment_asserts": False}

TRACING = threading.Lock()  # one trace at a time in a process: its attention function is registered globally
CALL = threading.local()  # the inputs of the layer call in progress
# By everything that a trace depends on; a text states why there is none.
_FUNCTIONS: dict[tuple, Traced | str] = {}
_UNCOMPILED: dict[str, str] = {}  # kinds of layers that should be compiled and are not, and why


class Traced(NamedTuple):
    """A compiled layer.

    Attributes:
        function: accepts a list of the states, the angles and the tensors of a layer; returns a list with the states.
        attention: name of the module within the layer that attends.
        options: arguments of its attention function.
    """

    function: Callable[..., Any]
    attention: str
    options: dict[str, Any]


class Attention(NamedTuple):
    """How a layer attends.

    Attributes:
        module: the attention module of the layer.
        layer: its number in the cache.
        function: of transformers' interface.
        options: its arguments.
        scale: of the scores, if our own kernel replaces the function in passes with a mask or of one token.
    """

    module: Any
    layer: int
    function: Callable[..., Any]
    options: dict[str, Any]
    scale: float | None


class TraceError(Exception):
    """A layer cannot be compiled; the text says why."""


def uncompiled() -> dict[str, str]:
    """The kinds of layers that this process could not compile, of targets and drafters, and why."""
    return dict(_UNCOMPILED)


def release() -> None:
    """Releases the inputs of this thread's last pass, such as its KV cache."""
    if getattr(CALL, "cache", None) is not None:
        CALL.cache = CALL.mask = None
        torch.ops.specbench.set_layer.default([], [], None, None, 1.0)


class CompiledLayer(torch.nn.Module):
    """A layer that is called like the original one; short passes run compiled functions.

    The first pass in a dtype, and the first one with angles for each of several sequences, is run both ways. A layer
    that cannot be compiled, or whose compiled states differ, runs uncompiled, and a warning gives the reason.

    Attributes:
        firsts_of_all: number of passes of all layers of this process that were run both ways.

    Args:
        layer: as `lean_copy` makes it.
        cache_name: its name of the cache argument.
    """

    firsts_of_all = 0

    def __init__(self, layer: torch.nn.Module, cache_name: str):
        super().__init__()
        self.layer, self._cache_name = layer, cache_name
        self._names, self._tensors = _tensors(layer)
        self.products = packed_weights([layer])
        # By dtype, and by whether there are angles for each of several sequences; None: not compiled.
        self._compiled: dict[Key, tuple[Callable[..., Any], Attention] | None] = {}

    def __call__(self, *states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """States, one or several of [b, n, width] -> [b, n, d]; arguments as of the layer."""
        b, n, _ = states[0].shape
        if b * n > MOST_TOKENS or torch.is_grad_enabled():
            return self.layer(*states, **arguments)
        angles = arguments.get("position_embeddings", ())
        key = states[0].dtype, bool(angles) and angles[0].shape[0] > 1
        if key not in self._compiled:
            return self._first(key, states, arguments)
        compiled = self._compiled[key]
        if compiled is None:
            return self.layer(*states, **arguments)
        return self._call(*compiled, states, arguments)

    @property
    def is_compiled(self) -> bool:
        """Whether passes of some shape have been compiled."""
        return any(self._compiled.values())

    def _call(
        self,
        function: Callable[..., Any],
        attention: Attention,
        states: Tensors,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        CALL.products, CALL.attention = self.products, attention
        CALL.cache, CALL.mask = arguments[self._cache_name], arguments["attention_mask"]
        b, n, _ = states[0].shape
        panels, entries, index = self._of_kernels(attention, b, n)
        torch.ops.specbench.set_layer.default(panels, entries, index, CALL.mask, attention.scale or 1.0)
        # Compiled code ignores strides: in views of wider states, or of buffers, it would read other rows.
        inputs = [part.contiguous() for part in (*states, *arguments.get("position_embeddings", ()))]
        return function([*inputs, *self._tensors])[0]

    def _of_kernels(
        self, attention: Attention, b: int, n: int
    ) -> tuple[list[torch.Tensor | None], Tensors, torch.Tensor | None]:
        """Inputs of our own kernels in the call in progress, over states of b sequences with n tokens.

        Returns:
            The panels of each product; the result of `KVCache.entries`. Python computes what is None or empty.
        """
        panels = [weight.panels(b * n) for weight in self.products]
        if attention.scale is None or (CALL.mask is None and n > 1):
            return panels, (), None
        return panels, *CALL.cache.entries(attention.layer)

    def _first(self, key: Key, states: Tensors, arguments: dict[str, Any]) -> torch.Tensor:
        """Runs the first pass both ways, if the layer can be compiled."""
        CompiledLayer.firsts_of_all += 1
        expected = self.layer(*states, **arguments)
        self._compiled[key] = None
        try:
            traced = self._shared(key, states, arguments)
            if isinstance(traced, str):
                self._warn(traced)
                return expected  # the cache is as the layer left it
            compiled = traced.function, self._attention(traced, expected)
            output = self._call(*compiled, states, arguments)
        except Exception as error:  # noqa: BLE001 - whatever a family's layer or the compiler meets
            return self._uncompiled(_reason(error), states, arguments)
        if output.shape != expected.shape:
            return self._uncompiled(f"it would give {list(output.shape)}", states, arguments)
        apart = (output - expected).abs().max() / expected.abs().max()
        if not apart <= TOLERANCE[output.dtype]:
            return self._uncompiled(f"its states would be {apart:.1g} off", states, arguments)
        self._compiled[key] = compiled
        return output

    def _uncompiled(self, why: str, states: Tensors, arguments: dict[str, Any]) -> torch.Tensor:
        """Runs the pass uncompiled: again, since the cache has the compiled layer's keys and values."""
        self._warn(why)
        return self.layer(*states, **arguments)

    def _warn(self, why: str) -> None:
        kind = type(self.layer).__name__
        if _UNCOMPILED.get(kind) != why:
            warn(f"{kind} is not compiled: {why}")
        _UNCOMPILED[kind] = why

    def _attention(self, traced: Traced, like: torch.Tensor) -> Attention:
        """How this layer attends, from the trace of a layer like it."""
        module: Any = self.layer.get_submodule(traced.attention)
        name, options = module.config._attn_implementation, traced.options
        plain = is_plain(options) and not options.get("dropout")
        has_own = name == GROUPED and plain and has_kernel(like.device, like.dtype)
        scale = options.get("scaling") if has_own else None
        return Attention(module, module.layer_idx, _attention_function(module, name), options, scale)

    def _shared(self, key: Key, states: Tensors, arguments: dict[str, Any]) -> Traced | str:
        """The function of this layer, shared with all layers of equal signature; or why there is none."""
        if any(part._forward_hooks or part._forward_pre_hooks for part in self.layer.modules()):
            raise TraceError("it has hooks")
        angles = arguments.get("position_embeddings", ())
        shapes = tuple((part.shape[-1], part.dtype) for part in (*states, *angles))
        signature = key, len(states), shapes, _signature(self.layer)
        with TRACING:
            if signature not in _FUNCTIONS:
                try:
                    _FUNCTIONS[signature] = self._trace(states, angles, arguments)
                except Exception as error:  # noqa: BLE001 - as in `_first`
                    _FUNCTIONS[signature] = _reason(error)  # as text: the error's frames hold the cache
            return _FUNCTIONS[signature]

    def _trace(self, states: Tensors, angles: Tensors, arguments: dict[str, Any]) -> Traced:
        """Traces and compiles the layer."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        met: list[tuple[Any, dict[str, Any]]] = []

        def attention(module: Any, query: Any, key: Any, value: Any, _: Any, **options: Any) -> Any:
            met.append((module, options))
            return torch.ops.specbench.layer_attend(query, key, value), None

        rest = arguments | {self._cache_name: _NoCache(), "attention_mask": None}

        def function(*inputs: torch.Tensor) -> torch.Tensor:
            first, last = len(states), len(states) + len(angles)
            rotary = {"position_embeddings": inputs[first:last]} if angles else {}
            with self._with_tensors(inputs[last:]):
                return self.layer(*inputs[:first], **(rest | rotary))

        # One function for every size, including 1: a token then has the same bits, alone or among others.
        shapes = ShapeEnv(specialize_zero_one=False)
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        b, n = SIZES

        def fake(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
            example = torch.empty(*sizes, *tensor.shape[len(sizes) :], dtype=tensor.dtype)
            kinds = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in sizes]
            kinds += [DimDynamic.STATIC] * (tensor.dim() - len(sizes))
            return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

        with torch.inference_mode(False), torch.no_grad():
            fakes = [
                *(fake(part, b, n) for part in states),
                *(fake(part, b if part.shape[0] > 1 else 1, n) for part in angles),
            ]
            fakes += [fake(tensor) for tensor in self._tensors]
            with self._traceable(attention), mode:
                graph = make_fx(function, tracing_mode="real")(*fakes)
            if len(met) != 1 or any(isinstance(value, torch.Tensor) for value in met[0][1].values()):
                raise TraceError("its attention does not call an attention function")
            if [*graph.parameters(), *graph.buffers()]:  # they would be inputs, but belong to one layer
                raise TraceError("it reads a tensor that is none of its parameters and buffers")
            module, options = met.pop()  # the registered function keeps `met`
            name = next(name for name, part in self.layer.named_modules() if part is module)
            compiled = _compile(graph, fakes, type(self.layer).__name__)
        return Traced(compiled, name, options)

    @contextmanager
    def _with_tensors(self, tensors: Tensors) -> Iterator[None]:
        """Within the context, the layer and its fused products have these tensors in place of their own."""
        owners = [self.layer.get_submodule(name.rpartition(".")[0]) for name in self._names]
        leaves = [name.rpartition(".")[2] for name in self._names]
        before = [owner.__dict__.get(leaf) for owner, leaf in zip(owners, leaves)]
        parts = [part for part in self.layer.modules() if isinstance(part, FusedSlice)]
        fused = [(part._fused, part._fused.biases) for part in parts if part._index == 0]
        inputs = dict(zip(map(id, self._tensors), tensors))
        for owner, leaf, tensor in zip(owners, leaves, tensors):
            owner.__dict__[leaf] = tensor
        for product, biases in fused:
            product.biases = tuple(inputs.get(id(bias)) for bias in biases)
        try:
            yield
        finally:
            for product, biases in fused:
                product.biases = biases
            for owner, leaf, original in zip(owners, leaves, before):
                if original is None:
                    del owner.__dict__[leaf]
                else:
                    owner.__dict__[leaf] = original

    @contextmanager
    def _traceable(self, attention: Callable[..., Any]) -> Iterator[None]:
        """Within the context, products and attention are opaque calls.

        This affects only this layer: another thread may be running a pass of another model.
        """
        from transformers import AttentionInterface

        of_parts = [part.config for part in self.layer.modules() if hasattr(part, "config")]
        configs: dict[int, Any] = {id(config): config for config in of_parts}
        if len(configs) != 1:
            raise TraceError("its parts have no config, or several")
        AttentionInterface.register(NAME, attention)
        (config,) = configs.values()
        linears = [part for part in self.layer.modules() if isinstance(part, PackedLinear)]

        def product(number: int, rows: int, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return torch.ops.specbench.layer_product(states, bias, number, rows)

        for number, packed in enumerate(self.products):
            vars(packed)["times"] = partial(product, number, packed.weight.shape[0])
        for part in linears:
            vars(part)["forward"] = lambda states, part=part: part._packed.times(states, part.bias)
        try:
            with attending(config, NAME):
                yield
        finally:
            for packed in self.products:
                vars(packed).pop("times", None)
            for part in linears:
                vars(part).pop("forward", None)


def compiled_copy(module: M, *layers: str) -> M:
    """As `lean_copy`, for a module that drafts with a few layers: short passes use our kernels and compiled layers.

    Args:
        module: on one device, with a config.
        *layers: names of layers within the module that are to be compiled; they call their cache `past_key_values`.
    """
    weight = next(module.parameters())
    on_kernels = has_kernel(weight.device, weight.dtype)
    config: Any = module.config
    twin = lean_copy(module, grouped_attention_config(config) if on_kernels else None)
    for name in layers if on_kernels else ():
        parent, _, leaf = name.rpartition(".")
        owner = twin.get_submodule(parent)
        layer = CompiledLayer(owner.get_submodule(leaf), "past_key_values")
        owner._modules[leaf] = owner.__dict__[leaf] = layer
    return twin


class _NoCache:
    """Replaces the cache in a trace: the attention function gets only the new keys and values."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> Any:
        return keys, values


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Output [b, n, heads, d] of the layer's own attention in the call in progress."""
    attention = CALL.attention
    keys, values = CALL.cache.update(key, value, attention.layer)
    return attention.function(attention.module, query, keys, values, CALL.mask, **attention.options)[0]


def _product(states: torch.Tensor, bias: torch.Tensor | None, number: int, _: int) -> torch.Tensor:
    """A product of the layer; only a trace needs the number of outputs."""
    return CALL.products[number].times(states, bias)


# Operators that kernels/layer.cpp calls if none of our kernels applies.
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("attend(Tensor query, Tensor key, Tensor value) -> Tensor")
_LIBRARY.define("product(Tensor states, Tensor? bias, int number, int rows) -> Tensor")
_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("product", _product, "CPU")


def _reason(error: Exception) -> str:
    """Describes an error in one line: if a C++ compiler failed, by the first error that it reports."""
    named = (line.strip() for line in str(error).splitlines() if "error:" in line)
    return next(named, one_line(error))


def _tensors(layer: torch.nn.Module) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors of a layer, without packed weights: the function's inputs, so that layers can share it."""
    matrices = {id(part.weight) for part in layer.modules() if isinstance(part, FusedSlice | PackedLinear)}
    tensors = dict([*layer.named_parameters(), *layer.named_buffers()])
    tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) not in matrices}
    return [*tensors], [*tensors.values()]


def _signature(layer: torch.nn.Module) -> tuple:
    """What a layer's operations depend on beside the states' shapes: types, configs, attributes, weight shapes."""
    plain = (int, float, bool, str, type(None))
    parts = []
    for name, part in layer.named_modules():
        attributes = {key: value for key, value in vars(part).items() if isinstance(value, plain)}
        attributes.pop("layer_idx", None)
        shapes = [
            (key, tuple(weight.shape), weight.dtype) for key, weight in part.named_parameters(recurse=False)
        ]
        config = str(part.config.to_dict()) if hasattr(part, "config") else None
        parts.append((name, type(part), config, *sorted(attributes.items(), key=str), *shapes))
    return tuple(parts)


def _attention_function(module: torch.nn.Module, name: str) -> Any:
    """The function of that name by which a layer attends, or its family's own, which transformers calls "eager"."""
    from transformers import AttentionInterface

    functions = AttentionInterface()
    if name in functions:
        return functions[name]
    # A lean copy is of a class of ours, whose base is the family's.
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(vars(file)[EAGER] for file in files if EAGER in vars(file))


def _folder() -> Path:
    """The folder of compiled layers. Keys of torch's compiler do not name the processor; a home may serve several."""
    able = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return cache_folder() / COMPILED / hashlib.sha256(able.encode()).hexdigest()[:16]


def _remove_torn(folder: Path) -> None:
    """Removes incomplete libraries of a killed linker, which torch's compiler would load."""
    for path in folder.rglob("*.so"):
        with suppress(FileNotFoundError):  # another process has removed it
            is_new = time.time() - path.stat().st_mtime < LINKING
            with path.open("rb") as library:
                is_whole = library.read(len(ELF)) == ELF
            if not is_new and not is_whole:
                path.unlink()


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], label: str) -> Callable[..., Any]:
    """Compiles a graph with torch's compiler, which keeps the result in the user's cache.

    Args:
        graph: of inputs whose sizes may be symbols.
        inputs: of the graph, without data.
        label: name of the layer, for the line that is printed if it was not compiled before.

    Returns:
        A function of the list of inputs, which it empties, that returns the list of outputs.
    """
    folder = make_folder(_folder())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    from torch._functorch import config as of_autograd
    from torch._inductor import config, standalone_compile
    from torch._inductor.compile_fx import compile_fx_inner

    programs: list[Any] = []

    def compiled(*arguments: Any, **options: Any) -> Any:
        programs.append(compile_fx_inner(*arguments, **options))
        return programs[-1]

    config.compile_threads = 1
    # It accepts the name of a program, or several names, of which it uses the first that exists.
    cxx = tuple(compiler()) if len(compiler()) == 1 else COMPILERS
    shapes = [(str(part.dtype), *map(str, part.shape)) for part in inputs]
    digest = hashlib.sha256(str((torch.__version__, cxx, graph.code, shapes)).encode()).hexdigest()[:16]
    done = folder / f"{digest}.done"
    if not done.exists():
        _remove_torn(folder)
        print(f"compiling {label} for this processor, once: up to a minute", file=sys.stderr, flush=True)
    options = {"config_patches": OPTIONS | {"cpp.cxx": cxx}, "inner_compile": compiled}
    with of_autograd.patch(enable_autograd_cache=False):  # it holds wrapped programs
        standalone_compile(graph, [*inputs], dynamic_shapes="from_graph", options=options)
    done.touch()
    # The wrapper handles gradients and mutated inputs, and takes 4 to 7 % of a pass of SmolLM2-135M.
    (program,) = programs
    return program.current_callable
