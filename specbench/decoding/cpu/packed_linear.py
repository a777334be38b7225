"""Linear layers for decoding, whose weights lie in memory as they are read fastest.

A product with a few tokens takes as long as its weight takes to be read, if the weight lies in memory in the order in
which the kernel reads it. A weight may therefore have copies in other layouts, which `autotune.choose_layouts` chooses
by measuring. Layers that read the same states, such as the projections to queries, keys and values, are one product: a
product with one large matrix comes nearer to the speed of memory than several with small ones. Values never change,
only their order, and with it the order in which products are summed.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakSet

import torch
from torch.nn.functional import linear

from specbench.decoding.cpu import native
from specbench.decoding.cpu.huge_pages import in_huge_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    # Of a matrix: the layout by number of tokens of a product. Another number takes that of the nearest one, but one
    # token never that of several, nor several that of one.
    Layouts = Mapping[int, str]

DRAFT = 6  # tokens that the kernel of `packed` is asked for: the pending one and five drafted ones
# Numbers of a weight that is joined. The outputs of a joint product are slices of one tensor, which later operations
# read more slowly where there are several tokens: with small matrices that costs more than fewer calls gain.
LEAST_JOINED = 2**16
FEW = 64  # tokens of a product: with more, a weight in bfloat16 is worth turning into float32 first
BAGS = (256, 512)  # outputs that one sum of columns makes: few enough to stay in registers
PANELS = "panels"
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read the same states


class Product(Protocol):
    """What stands for a matrix [out, in] in products."""

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """States [..., in] -> [..., out]."""


def by_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] row after row, as torch makes it."""
    return plain(weight).contiguous()


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] column after column.

    Columns that begin a whole number of pages apart compete for the same lines of the CPU's caches; a gap of two cache
    lines between them takes off a tenth.
    """
    if weight.stride(0) == 1:
        return weight
    rows, columns = weight.shape
    gap = 32 if rows % 1024 == 0 else 0
    with torch.inference_mode(False), torch.no_grad():  # gradients may pass through a frozen weight
        return weight.new_empty(columns, rows + gap)[:, :rows].copy_(weight.detach().t()).t()


def packed(weight: torch.Tensor, tokens: int = DRAFT) -> torch.Tensor:
    """A weight [out, in] in the blocks that oneDNN's kernel for so many tokens reads, for `product` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(plain(weight), tokens)


class EmbeddingBagGemv:
    """A weight [out, in] for products with one token, which are sums of its columns, each times an input.

    Torch's sums over bags of embeddings are such sums, and their kernel fetches what it will read and uses all threads;
    its products of a matrix and a vector do neither. Small matrices were read 1.2 to 1.5 times as fast by one thread,
    and all of them by two.

    Args:
        weight: [out, in].
        width: outputs of a bag; the last bag is filled up with zeros.
    """

    def __init__(self, weight: torch.Tensor, width: int):
        weight = plain(weight)
        self.outputs, self._inputs = weight.shape
        self._count = -(-self.outputs // width)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, self._count * width - self.outputs))
        pieces = padded.view(self._count, width, self._inputs).transpose(1, 2)
        self.table = pieces.reshape(-1, width).contiguous()  # piece after piece of every column

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The states [..., in] of one token -> [..., out]."""
        entries, begins = _bags(self._count, self._inputs)
        weights = states.reshape(1, -1).expand(self._count, -1).reshape(-1)
        sums = torch.embedding_bag(self.table, entries, begins, False, 0, False, weights)[0]
        outputs = sums.view(*states.shape[:-1], -1)[..., : self.outputs]
        return outputs if bias is None else outputs + bias


class Panels:
    """A weight [out, in] in panels of a few rows, for our own kernel: see kernels/product.cpp.

    The bits of an output do not depend on how many tokens the product has.

    Args:
        weight: [out, in] in float32 or bfloat16.

    Raises:
        RuntimeError: there are no kernels, or none for such a weight.
    """

    def __init__(self, weight: torch.Tensor):
        if not native.has_kernel(weight.device, weight.dtype):
            raise RuntimeError(native.reason() or f"there is no kernel for {weight.dtype} on {weight.device}")
        self.weight = plain(weight)
        self.outputs, columns = weight.shape
        rows, lanes = torch.ops.specbench.panel(), torch.ops.specbench.lanes()
        halves = 4 // weight.element_size()  # vectors of floats that one of words holds
        filled = torch.nn.functional.pad(
            self.weight, (0, -columns % (lanes * halves), 0, -self.outputs % rows)
        )
        blocks = filled.view(len(filled) // rows, rows, -1, halves, lanes)
        self.panels = in_huge_pages(blocks.permute(0, 2, 1, 4, 3).flatten(1))

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        if states.numel() > native.MOST_TOKENS * states.shape[-1]:
            return plain_product(states, self.weight, bias)
        return torch.ops.specbench.product.default(states, self.panels, bias, self.outputs)


def plain_product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """States [..., in] times a weight [out, in] that lies as it is -> [..., out].

    Of many tokens, such as a prompt's, torch takes seven times as long in bfloat16 as in float32 where the processor
    has no instructions for it.
    """
    many = states.numel() > FEW * states.shape[-1]
    half = states.dtype == torch.bfloat16 and weight.device.type == "cpu"
    if not (half and many) or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return linear(states, weight, bias)
    summand = None if bias is None else bias.float()
    return linear(states.float(), weight.float(), summand).to(states.dtype)


@cache
def _bags(count: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a table in the order in which they are summed, and where each sum begins."""
    with torch.inference_mode(False):
        return torch.arange(count * inputs, dtype=torch.int32), torch.arange(
            count, dtype=torch.int32
        ) * inputs


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor | Product]] = {
    "rows": by_rows,
    "columns": by_columns,
    "packed": packed,
    "packed_one": partial(packed, tokens=1),
    PANELS: Panels,
    **{f"bags_{width}": partial(EmbeddingBagGemv, width=width) for width in BAGS},
}
PLAIN = ("rows", "columns")  # layouts that every operation reads
ONE_TOKEN = tuple(f"bags_{width}" for width in BAGS)  # layouts for products with one token alone
_PACKED_PRODUCT = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def product(states: torch.Tensor, weight: torch.Tensor | Product, bias: torch.Tensor | None) -> torch.Tensor:
    """States [..., in] times a weight [out, in] in any layout, without gradients -> [..., out]."""
    if not isinstance(weight, torch.Tensor):
        return weight.times(states, bias)
    if weight.is_mkldnn:
        return _PACKED_PRODUCT(states, weight, bias, "none", [], "")  # type: ignore[misc] # there is no such weight without
    return plain_product(states, weight, bias)


def default(weight: torch.Tensor) -> str:
    """The layout before anything is measured.

    In fp32 on a CPU columns: for one token a head of 16384 x 128 then takes a third of the time, and six tokens through
    the layers of the embedded target a fifth less.
    """
    return "columns" if weight.device.type == "cpu" and weight.dtype == torch.float32 else "rows"


def completed(layouts: Layouts, usual: str) -> Layouts:
    """Layouts, in the order of their tokens, with `usual` for one token and for several where they lack these."""
    complete = {1: usual, **layouts}
    if len(complete) == 1:
        complete[DRAFT] = usual
    return dict(sorted(complete.items()))


class PackedWeight:
    """A frozen weight and its repacked copies, shared by all layers that use it.

    Args:
        weights: [out, in] of one layer; or of several, which become views of one matrix.
        fixed: the matrix stays row by row, since an embedding reads it, too.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], fixed: bool = False):
        self.weights, self.fixed = tuple(weights), fixed
        self._counted = [weight for weight in weights if not weight.is_inference()]
        self.layouts: Layouts | None = None  # none chosen yet
        self.weight = weights[0]
        # What a product with one token reads. None: no copies, all products are with the weight itself. Copies of an
        # embedding are made when they are first used.
        self.one_token: torch.Tensor | Product | None = self.weight if fixed else None
        # And a product with several, by their number.
        self.several: tuple[tuple[int, torch.Tensor | Product], ...] = ((DRAFT, self.weight),)
        self._pointers = self._where() if fixed else []
        self._versions: list[int] = []
        if not fixed:
            self.lay()
        PACKED.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, (self.weights, self.fixed)  # a copy, or another process, chooses for itself

    @torch.inference_mode(False)  # a view that is made in it has no count of changes
    def lay(self) -> None:
        """Lays the matrix out, and makes the copies that are needed."""
        several = len(self.weights) > 1
        if self._pointers != self._where():  # not laid out yet, or moved since then, maybe with another type
            self.layouts = None
            if several:
                self.weight = torch.nn.Parameter(torch.cat([plain(weight) for weight in self.weights]), False)
        layouts = completed(self.layouts or {}, default(self.weight))
        named = layouts.values()
        home = "rows"
        if not self.fixed:
            home = next((name for name in named if name in PLAIN), default(self.weight))
            self.weight.data = cast("torch.Tensor", LAYOUTS[home](self.weight))
            if several:
                views = self.weight.data.split([len(weight) for weight in self.weights])
                for weight, view in zip(self.weights, views):
                    weight.data = view
        copies = {name: LAYOUTS[name](self.weight) for name in set(named) - {home}}
        made = [(tokens, copies.get(name, self.weight)) for tokens, name in layouts.items()]
        self.one_token = made[0][1] if copies else None
        self.several = tuple(made[1:])
        self._pointers, self._versions = self._where(), self._changes()

    def choose(self, layouts: Layouts) -> None:
        """Changes to these layouts."""
        if layouts != self.layouts:
            self.layouts = dict(layouts)
            self.lay()

    def serve(self, matrix: torch.Tensor | Product | None) -> None:
        """Takes the same matrix in all products, without copies of its own, until layouts are chosen.

        Args:
            matrix: [out, in] the values of the weight; None: the weight itself.
        """
        self.layouts, self.one_token = None, matrix
        self.several = ((DRAFT, self.weight if matrix is None else matrix),)
        self._versions = self._changes()  # a weight that was never laid out would be in its first product

    def panels(self, tokens: int) -> torch.Tensor | None:
        """The panels that a product with so many tokens reads, where those are its layout."""
        matrix = self._matrix(tokens)
        return matrix.panels if isinstance(matrix, Panels) and tokens <= native.MOST_TOKENS else None

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """States [..., in] times the matrix [out, in], without gradients -> [..., out]."""
        matrix = self._matrix(states.numel() // self.weight.shape[1])
        return product(states, self.weight if matrix is None else matrix, bias)

    def _matrix(self, tokens: int) -> torch.Tensor | Product | None:
        """What a product with so many tokens reads; None: the weight itself, which has no copies."""
        if self._pointers != self._where() or self._versions != self._changes():
            self.lay()  # a weight was moved or changed: what was made of it must not stay what it was
        if self.one_token is None or tokens == 1:
            return self.one_token
        if len(self.several) == 1:
            return self.several[0][1]
        return min(self.several, key=lambda pair: abs(pair[0] - tokens))[1]

    def _where(self) -> list[int]:
        """Addresses of the weights."""
        return [weight.data_ptr() for weight in self.weights]

    def _changes(self) -> list[int]:
        """Counts of the weights' changes in place; what was made under inference mode has none."""
        return [weight._version for weight in self._counted]


PACKED: WeakSet[PackedWeight] = WeakSet()  # all that there are


class PackedLinear(torch.nn.Linear):
    """A linear layer whose weight may have copies in other layouts; `weight` itself is always a plain tensor."""

    _laid: PackedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        laid, weight = self._laid, self.weight
        if laid.one_token is None or torch.is_grad_enabled() or laid.weight is not weight:
            return linear(input, weight, self.bias)
        return laid.times(input, self.bias)


class FusedLinear:
    """Linear layers that read the same states, as one product: the first layer's call computes the outputs of all.

    Args:
        weights: [out, in] of each layer, in the order in which the layers are called; they become views of one matrix.
        biases: [out] of each layer, likewise; None for all, or for none.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], biases: Sequence[torch.Tensor | None]):
        self.laid, self.biases = PackedWeight(weights), tuple(biases)
        self._sizes = [len(weight) for weight in weights]
        self._states: torch.Tensor | None = None  # that the outputs belong to
        self._outputs: tuple[torch.Tensor, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedLinear, (self.laid.weights, self.biases)

    def output(self, states: torch.Tensor, index: int) -> torch.Tensor | None:
        """The output of the layer of an index; None where it must be computed by itself.

        Outputs are kept until the last layer has had its own, or the first one is called again.
        """
        if index == 0:
            biases = [bias for bias in self.biases if bias is not None]
            bias = torch.cat(biases) if biases else None
            self._states, self._outputs = states, self.laid.times(states, bias).split(self._sizes, -1)
        elif self._states is not states:
            return None
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._states, self._outputs = None, ()
        return output


class JoinedLinear(torch.nn.Linear):
    """A linear layer that is one of several in a joint product."""

    _joined: FusedLinear
    _index: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        joined, index = self._joined, self._index
        output = None
        same = self.weight is joined.laid.weights[index] and self.bias is joined.biases[index]
        if same and not torch.is_grad_enabled():
            output = joined.output(input, index)
        return linear(input, self.weight, self.bias) if output is None else output


def assume_unchanged() -> None:
    """Lets torch.compile take weights for what and where they are now, and kernels for there or not.

    Looking cannot be compiled. Only what compiles calls this: it takes seconds to import what it needs.
    """
    for look in (PackedWeight._where, PackedWeight._changes, native._available):
        torch.compiler.assume_constant_result(look)


def pack_linears(module: torch.nn.Module, fixed: bool = False) -> None:
    """Gives the frozen linear layers of a module, in place, joint products and the default layouts.

    Args:
        module: with the layers; copies of it that share weights must be made after this.
        fixed: the weights stay row by row, since embeddings read them, too; other layouts are copies.
    """
    for parent in module.modules():
        for names in SIBLINGS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if _can_join(layers):
                joined = FusedLinear([layer.weight for layer in layers], [layer.bias for layer in layers])
                for index, layer in enumerate(layers):
                    layer.__class__ = JoinedLinear
                    layer.__dict__.update(_joined=joined, _index=index)
    for other in module.modules():
        if _can_lay(other):
            other.__class__ = PackedLinear
            other.__dict__["_laid"] = PackedWeight([cast("torch.nn.Parameter", other.weight)], fixed)


def _can_lay(layer: Any) -> bool:
    """Whether a layer is a frozen linear layer of plain numbers that is not laid out yet.

    A quantised one is another class, or its weight is: both stay what they are.
    """
    weight = layer.weight if type(layer) is torch.nn.Linear else None
    return type(weight) is torch.nn.Parameter and not (weight.requires_grad or weight.is_inference())


def _can_join(layers: Sequence[Any]) -> bool:
    """Whether layers are better one product: all can be laid out, and they are of one kind, large, and in memory."""
    if not all(map(_can_lay, layers)) or any(hasattr(layer, "_hf_hook") for layer in layers):
        return False
    kinds = {(part.weight.dtype, part.weight.device, part.in_features, part.bias is None) for part in layers}
    large = min(part.weight.numel() for part in layers) >= LEAST_JOINED
    return large and len(kinds) == 1 and not layers[0].weight.is_meta


def packed_weights(modules: Iterable[torch.nn.Module]) -> list[PackedWeight]:
    """The weights of modules' products: first the joint ones, then those of single layers."""
    parts = [part for module in modules for part in module.modules()]
    joined = [part._joined.laid for part in parts if isinstance(part, JoinedLinear) and part._index == 0]
    return [*joined, *(part._laid for part in parts if isinstance(part, PackedLinear))]


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A frozen linear layer of a weight [out, in] and a bias [out], laid out; the weight given stays as it is."""
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=bias is not None, device="meta")
    with torch.inference_mode(False):
        layer.weight = torch.nn.Parameter(plain(weight), requires_grad=False)
        if bias is not None:
            layer.bias = torch.nn.Parameter(plain(bias), requires_grad=False)
    pack_linears(layer)
    return layer.eval()


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, as a tensor that is no inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        return weight.clone() if weight.is_inference() else weight.detach()
