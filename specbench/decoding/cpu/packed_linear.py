"""Linear layers for decoding, whose weights lie in memory as they are read fastest.

A product with a few tokens takes only as long as reading its weight, if the weight is stored in the order in which the
kernel reads it. On a CPU a weight therefore has a copy in that order, see `forms`. Layers that read the same states,
such as the projections to queries, keys and values, are fused into one product: a product with one large matrix comes
nearer to the speed of memory than several with small ones. Values never change, only their order, and with it the order
in which products are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import linear

from specbench.decoding.cpu import native
from specbench.decoding.cpu.huge_pages import in_huge_pages
from specbench.system.errors import warn
from specbench.system.processes import free_memory

if TYPE_CHECKING:
    Layout = Callable[[torch.Tensor], "Matrix"]

FEW = 64  # tokens of a product: with more, a weight in bfloat16 is worth turning into float32 first
DRAFT = 6  # tokens that oneDNN's kernel is asked for: the pending one and five drafted ones
# Numbers of a fused weight. The outputs of a fused product are slices of one tensor, which later operations read more
# slowly if there are several tokens: with small matrices that costs more than fewer calls save.
LEAST_JOINED = 2**16
LARGE = 2**19  # numbers of a float32 weight from which on blocks are faster for several tokens
SHARE = 0.5  # of the free memory that copies of a module's weights may take
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read the same states


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
        filled = plain(weight).contiguous()
        self.outputs, columns = weight.shape
        rows, multiple = torch.ops.specbench.panel(weight.dtype)
        lacking = -columns % multiple, -self.outputs % rows
        if any(lacking):
            filled = torch.nn.functional.pad(filled, (0, lacking[0], 0, lacking[1]))
        by_panel = filled.view(len(filled) // rows, rows, -1)
        if native.has_tiles(weight.device, weight.dtype):
            blocks = by_panel.unflatten(2, (-1, multiple // 2, 2)).permute(0, 2, 3, 1, 4)
        else:
            halves = 4 // weight.element_size()  # vectors of floats that one of words holds
            lanes = torch.ops.specbench.lanes()
            blocks = by_panel.unflatten(2, (-1, halves, lanes)).permute(0, 2, 1, 4, 3)
        self.panels = in_huge_pages(blocks).flatten(1)

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """States [..., in] of at most `native.MOST_TOKENS` tokens -> [..., out]."""
        return torch.ops.specbench.product.default(states, self.panels, bias, self.outputs)


Matrix = torch.Tensor | Panels  # that products read


def forms(weight: torch.Tensor) -> tuple[Matrix, Matrix]:
    """The forms of a weight [out, in] that products with one token and those with several tokens read."""
    for_one, for_several = _layouts(weight)
    one = for_one(weight)
    return one, one if for_several is for_one else for_several(weight)


def _layouts(weight: torch.Tensor) -> tuple[Layout, Layout]:
    """The functions that make the two forms of a weight.

    With our own kernels, both are panels. Without them, one token reads a float32 weight of more rows than columns
    column by column: the head in 0.4 of the time. Several tokens read a large weight in oneDNN's blocks, whose start-up
    is too slow for a small one. On other devices, or in other types, the weight is read unchanged.
    """
    if native.has_kernel(weight.device, weight.dtype):
        return Panels, Panels
    if weight.device.type != "cpu" or not _has_blocks(weight.dtype):
        return as_it_is, as_it_is
    if weight.dtype != torch.float32:
        return in_blocks, in_blocks
    rows, columns = weight.shape
    small = by_columns if rows > columns else as_it_is
    return small, in_blocks if weight.numel() >= LARGE else small


def _has_blocks(dtype: torch.dtype) -> bool:
    """Whether oneDNN reads weights of a type in blocks of its own on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    half = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or half


def as_it_is(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself."""
    return weight


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight in the order in which oneDNN reads it."""
    return torch.ops.mkldnn._reorder_linear_weight(plain(weight), DRAFT)


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [out, in] column after column.

    Columns that begin a whole number of pages apart compete for the same lines of the CPU's caches; a gap of two cache
    lines between them takes off a tenth.
    """
    rows, columns = weight.shape
    gap = 32 if rows % 1024 == 0 else 0
    with torch.inference_mode(False), torch.no_grad():  # gradients may pass through a frozen weight
        return weight.new_empty(columns, rows + gap)[:, :rows].copy_(weight.detach().t()).t()


def product(states: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """States [..., in] times a weight [out, in] in any form, without gradients -> [..., out]."""
    if isinstance(weight, Panels):
        return weight.times(states, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")
    return plain_product(states, weight, bias)


def plain_product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """States [..., in] times an unpacked weight [out, in] -> [..., out].

    With many tokens, such as a prompt's, torch takes seven times as long in bfloat16 as in float32 if the processor has
    no instructions for bfloat16.
    """
    if states.dtype != torch.bfloat16:
        return linear(states, weight, bias)
    many = states.numel() > FEW * states.shape[-1] and weight.device.type == "cpu"
    if not many or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return linear(states, weight, bias)
    summand = None if bias is None else bias.float()
    return linear(states.float(), weight.float(), summand).to(states.dtype)


class PackedWeight:
    """A frozen weight and the forms of it that products read, shared by all layers that use it.

    Changes of a weight are detected, but not those of single numbers through its `data`, which torch does not count.

    Args:
        weights: [out, in] of one layer; or of several, which become views of one matrix.
        copies: whether there is room for copies; without them products read the weight itself.

    Attributes:
        is_plain: whether all products call `linear` with the weight itself.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], copies: bool = True):
        self.weights, self.copies = tuple(weights), copies
        self.weight = weights[0]
        # Made when a short pass first reads them: training a drafter on a target needs none.
        self._forms: tuple[Matrix, Matrix] | None = None
        self._renew()

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, (self.weights, self.copies)  # a copy, or another process, makes its own

    @torch.inference_mode(False)  # a view made in inference mode has no version counter
    def _renew(self) -> None:
        """Drops the copies, and joins several weights into one matrix unless they are one already."""
        if len(self.weights) > 1:
            matrix = _side_by_side(self.weights)
            if matrix is None:
                matrix = torch.cat([plain(weight) for weight in self.weights])
            self.weight = torch.nn.Parameter(matrix, False)
            views = self.weight.data.split([len(weight) for weight in self.weights])
            for weight, view in zip(self.weights, views):
                weight.data = view
        has_copies = self.copies and _copies_of(self.weight) > 0
        self._forms = None if has_copies else (self.weight, self.weight)
        # See `plain_product`.
        in_half = self.weight.dtype == torch.bfloat16 and self.weight.device.type == "cpu"
        self.is_plain = not (has_copies or in_half)
        # Address and version counter; tensors made in inference mode have no counter.
        self._seen = [(w, w.data_ptr(), None if w.is_inference() else w._version) for w in self.weights]

    @property
    def lacking(self) -> str | None:
        """Why short passes run on torch's kernels; None if they run on our own."""
        if not native.has_kernel(self.weight.device, self.weight.dtype):
            return native.reason() or f"none of our own for {self.weight.dtype}"
        return None if self.copies else "no room for copies of the weights"

    def panels(self, tokens: int) -> torch.Tensor | None:
        """The panels that a product with `tokens` tokens reads; None if it reads another form."""
        matrix = self._matrix(tokens)
        return matrix.panels if isinstance(matrix, Panels) else None

    def times(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """States [..., in] times the matrix [out, in], without gradients -> [..., out]."""
        return product(states, self._matrix(states.numel() // self.weight.shape[1]), bias)

    def _matrix(self, tokens: int) -> Matrix:
        """The form that a product with `tokens` tokens reads: if it is compute-bound, the weight itself."""
        if self._is_stale():
            self._renew()
        if tokens > native.MOST_TOKENS:
            return self.weight
        if self._forms is None:
            with torch.inference_mode(False):
                self._forms = forms(self.weight)
        return self._forms[tokens > 1]

    def _is_stale(self) -> bool:
        """Whether a weight was moved or changed in place, so that its forms must be made again."""
        for weight, pointer, version in self._seen:  # `any` would take twice as long
            if weight.data_ptr() != pointer or (version is not None and weight._version != version):
                return True
        return False


def _side_by_side(weights: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """The matrix whose rows the weights are, as in a process that shares memory with another; None if there is none."""
    first, end = plain(weights[0]), weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.storage_offset() != end or not weight.is_contiguous():
            return None
        end += weight.numel()
    rows = sum(len(weight) for weight in weights)
    return first.as_strided((rows, first.shape[1]), first.stride())


def _is_for_torch(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product has gradients or mixed types, which only torch's own function supports."""
    return torch.is_grad_enabled() or states.dtype != weight.dtype or torch.is_autocast_enabled("cpu")


class PackedLinear(torch.nn.Linear):
    """A linear layer whose products read a packed form of its weight; `weight` itself is always a plain tensor."""

    _packed: PackedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        packed, weight = self._packed, self.weight
        if packed.is_plain or packed.weight is not weight or not input.is_cpu or _is_for_torch(input, weight):
            return linear(input, weight, self.bias)
        return packed.times(input, self.bias)


class FusedLinear:
    """Linear layers that read the same states, as one product: the first layer's call computes the outputs of all.

    Args:
        weights: [out, in] of each layer, in the order in which the layers are called; they become views of one matrix.
        biases: [out] of each layer, likewise; None for all, or for none.
        copies: as in `PackedWeight`.
    """

    def __init__(
        self,
        weights: Sequence[torch.nn.Parameter],
        biases: Sequence[torch.Tensor | None],
        copies: bool = True,
    ):
        self.packed, self.biases = PackedWeight(weights, copies), tuple(biases)
        self._sizes = [len(weight) for weight in weights]
        self._states: torch.Tensor | None = None  # that the outputs belong to
        self._outputs: tuple[torch.Tensor, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedLinear, (self.packed.weights, self.biases, self.packed.copies)

    def output(self, states: torch.Tensor, index: int) -> torch.Tensor | None:
        """The output of the layer `index`; None if the layer must compute it itself.

        Outputs are kept until the last layer has received its own, or the first one is called again.
        """
        if index == 0:
            biases = [bias for bias in self.biases if bias is not None]
            bias = torch.cat(biases) if biases else None
            self._states, self._outputs = states, self.packed.times(states, bias).split(self._sizes, -1)
        elif self._states is not states:
            return None
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._states, self._outputs = None, ()
        return output


class FusedSlice(torch.nn.Linear):
    """A linear layer that is one of several in a joint product."""

    _fused: FusedLinear
    _index: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """States [..., in] -> [..., out]."""
        fused, index = self._fused, self._index
        output = None
        same = self.weight is fused.packed.weights[index] and self.bias is fused.biases[index]
        if same and not _is_for_torch(input, self.weight):
            output = fused.output(input, index)
        return linear(input, self.weight, self.bias) if output is None else output


def assume_unchanged() -> None:
    """Makes torch.compile assume that weights and the availability of kernels do not change.

    These checks cannot be compiled. Only code that compiles calls this, since its imports take seconds.
    """
    for look in (PackedWeight._is_stale, native._available):
        torch.compiler.assume_constant_result(look)


def pack_linears(*modules: torch.nn.Module) -> None:
    """Packs the frozen linear layers of modules in place: fused products, and weights in the forms of `forms`.

    Without room for copies of them all, products read the weights themselves, and a warning is printed.

    Args:
        *modules: with the layers; copies of them that share weights must be made after this.
    """
    parts = [part for module in modules for part in module.modules()]
    copies = _have_room([part.weight for part in parts if _can_pack(part)])
    for parent in parts:
        for names in SIBLINGS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if _can_fuse(layers):
                fused = FusedLinear(
                    [layer.weight for layer in layers], [layer.bias for layer in layers], copies
                )
                for index, layer in enumerate(layers):
                    layer.__class__ = FusedSlice
                    layer.__dict__.update(_fused=fused, _index=index)
    for other in parts:
        if _can_pack(other):
            other.__class__ = PackedLinear
            other.__dict__["_packed"] = PackedWeight([cast("torch.nn.Parameter", other.weight)], copies)


def _have_room(weights: Sequence[Any]) -> bool:
    """Whether the free memory has room for copies; True if the system does not report it."""
    sizes = [_copies_of(weight) * weight.nbytes for weight in weights]
    free = free_memory() if any(sizes) else None
    if free is None or sum(sizes) < SHARE * free:
        return True
    warn(
        f"copies of weights for this processor's kernels, {sum(sizes) / 1e9:.1f} GB, would take more than half of the "
        f"{free / 1e9:.1f} GB of free memory: none are made, so products are slower and a token's bits depend on the "
        "tokens beside it"
    )
    return False


def _copies_of(weight: torch.Tensor) -> int:
    """How many copies `forms` makes of a weight."""
    return len({*_layouts(weight)} - {as_it_is})


def _can_pack(layer: Any) -> bool:
    """Whether a layer is a frozen linear layer of plain numbers that is not packed yet.

    A quantised layer, or its weight, has another class and is left unchanged.
    """
    weight = layer.weight if type(layer) is torch.nn.Linear else None
    return type(weight) is torch.nn.Parameter and not (weight.requires_grad or weight.is_inference())


def _can_fuse(layers: Sequence[Any]) -> bool:
    """Whether layers should be fused: all can be packed, and they are of one kind, large, and in memory."""
    if not all(map(_can_pack, layers)) or any(hasattr(layer, "_hf_hook") for layer in layers):
        return False
    kinds = {(part.weight.dtype, part.weight.device, part.in_features, part.bias is None) for part in layers}
    large = min(part.weight.numel() for part in layers) >= LEAST_JOINED
    return large and len(kinds) == 1 and not layers[0].weight.is_meta


def packed_weights(modules: Iterable[torch.nn.Module]) -> list[PackedWeight]:
    """The weights of modules' products: first the joint ones, then those of single layers."""
    parts = [part for module in modules for part in module.modules()]
    fused = [part._fused.packed for part in parts if isinstance(part, FusedSlice) and part._index == 0]
    return [*fused, *(part._packed for part in parts if isinstance(part, PackedLinear))]


def uses_torch(parts: Sequence[torch.nn.Module]) -> str | None:
    """Why short passes of a model's parts run on torch's kernels on a CPU; None if they run on our own."""
    weights = packed_weights(parts)
    matrices = sum(one.nbytes for part in parts for one in part.parameters() if one.ndim > 1)
    others = 1 - sum(one.weight.nbytes for one in weights) / matrices
    if others > 0.01:
        return f"for {others:.0%} of the weights, which are not plain linear layers"
    return next((reason for weight in weights if (reason := weight.lacking)), native.reason())


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A frozen linear layer of a weight [out, in] and a bias [out], packed; the given weight is unchanged."""
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
