"""Layers of a model, run one after the other: the masks and angles of a pass, and what the layers are called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.cpu.compiled_layers import CompiledLayer
from specbench.decoding.cpu.grouped_attention import attention_of, fold_mask
from specbench.decoding.cpu.lean_modules import lean_copy
from specbench.decoding.cpu.native import has_kernel
from specbench.decoding.model.anatomy import CACHES, POSITIONS, Kind, device_of, window_of

if TYPE_CHECKING:
    from specbench.decoding.kv_cache import ForwardContext, KVCache


def ignore(layer: int, hidden: torch.Tensor) -> None:
    """The default `on_hidden`: ignores the states at a tap."""


class LayerStack:
    """The layers of a model.

    Args:
        decoder: the family's own module that contains them.
        config: of it.
        captured: whether passes are captured.
        compiled: whether short passes use compiled layers, if there are kernels for these.
        like: a tensor with the dtype and the device of the states.

    Attributes:
        layers: as `lean_copy` makes them.
        kinds: of each layer.
        kinds_there: each kind once.
        devices: of each layer.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        groups: query heads that share keys and a mask; 1 if each has its own mask.
        implied_masks: whether the attention kernel is causal without a mask, in an empty cache.
        rotary: computes the angles of positions; None if positions are learned.
        learned: computes embeddings of positions; None if they are rotary.
        compiled: each layer as one function; None if they are not compiled.
        angles: cosines and sines [1, positions, rotary_dim], of each table of angles.
    """

    def __init__(self, decoder: Any, config: Any, captured: bool, compiled: bool, like: torch.Tensor):
        layers, heads = decoder.layers, config.num_attention_heads
        positions: list[Any] = [getattr(decoder, name, None) for name in POSITIONS]
        self.rotary, self.learned = positions
        self.last_position, self.like = config.max_position_embeddings - 1, like
        self.kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        # Without a mask torch's attention is causal in an empty cache; the families' own code is not.
        self.implied_masks = config._attn_implementation == "sdpa"
        self.groups, attention = attention_of(config, heads // self.kv_heads, captured, like)
        types = getattr(config, "layer_types", None) or [None] * len(layers)
        windows = [window_of(config, i) for i in range(len(layers))]
        typed = self.rotary is not None and "layer_type" in signature(self.rotary.forward).parameters
        self.kinds: list[Kind] = [(w, t if typed else None) for w, t in zip(windows, types, strict=True)]
        self.kinds_there = tuple(dict.fromkeys(self.kinds))
        self.layers = [lean_copy(layer, attention) for layer in layers]
        self.devices = [device_of(layer) for layer in layers]
        takes = signature(layers[0].forward).parameters
        self.cache_name = next(name for name in CACHES if name in takes)
        self.compiled: list[CompiledLayer] | None = None
        if compiled and has_kernel(like.device, like.dtype):
            self.compiled = [CompiledLayer(layer, self.cache_name) for layer in self.layers]
        self.angles: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether short passes have gone through compiled layers."""
        return any(layer.is_compiled for layer in self.compiled or ())

    def run(
        self,
        hidden: torch.Tensor,
        cache: KVCache,
        ctx: ForwardContext,
        lo: int,
        hi: int,
        masks: Sequence[torch.Tensor | None] | None = None,
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] = ignore,
    ) -> torch.Tensor:
        """Runs layers [lo, hi) over states [b, n, d]. Their angles must have been made, see `make_angles`.

        Args:
            hidden: the states.
            cache: receives keys and values.
            ctx: of the pass.
            lo: the first layer.
            hi: the layer after the last one.
            masks: of each kind of layers; None: those of `ctx`.
            taps: layers in front of which `on_hidden` is called; `hi`: after the last one.
            on_hidden: called with a layer and the states [b, n, d] that enter it.

        Returns:
            States [b, n, d] after the layers.
        """
        if lo == hi:
            return hidden
        b, n = hidden.shape[:2]
        masks = self.masks(ctx, n, hidden) if masks is None else masks
        hidden = self.entering(hidden, ctx, lo)
        cache.begin_pass(lo, hi, ctx, b, n)
        ropes = self.ropes(ctx, n)
        arguments: dict[Kind, dict[str, Any]] = {}  # of the layers of each kind
        for kind, mask in zip(self.kinds_there, masks):
            arguments[kind] = {"attention_mask": mask, self.cache_name: cache, "use_cache": True}
            if ropes:
                arguments[kind]["position_embeddings"] = ropes[kind[1]]
        current = hidden.device
        layers: Sequence[Any] = self.layers if self.compiled is None else self.compiled
        stages = zip(layers[lo:hi], self.kinds[lo:hi], self.devices[lo:hi])
        for i, (layer, kind, device) in enumerate(stages, lo):
            if i in taps:
                on_hidden(i, hidden.to(self.like.device))
            if device != current:  # of a target that is spread over several
                hidden, current = hidden.to(device), device
                arguments = {key: _moved(keywords, device) for key, keywords in arguments.items()}
            hidden = layer(hidden, **arguments[kind])
        if hi in taps:
            on_hidden(hi, hidden.to(self.like.device))
        return hidden

    def entering(self, hidden: torch.Tensor, ctx: ForwardContext, lo: int) -> torch.Tensor:
        """The input states of layer `lo`: learned embeddings of positions are added before the first layer."""
        if self.rotary is None and lo == 0:
            return hidden + self.embedded_positions(ctx, hidden.shape[1])
        return hidden

    def masks(self, ctx: ForwardContext, n: int, like: torch.Tensor) -> list[torch.Tensor | None]:
        """The attention mask of each kind of layers."""
        masks = [attention_mask(ctx, n, like, window, self.implied_masks) for window, _ in self.kinds_there]
        return [fold_mask(mask, self.groups) for mask in masks] if self.groups > 1 else masks

    # -- positions

    def make_angles(self, count: int) -> None:
        """Makes the cosines and sines [1, count, rotary_dim] of the first positions, of each table of angles."""
        positions = torch.arange(count, device=self.like.device).unsqueeze(0)
        for name in {angles for _, angles in self.kinds}:
            # Of the first argument only its dtype and device are read.
            self.angles[name] = self.rotary(self.like, positions, *([] if name is None else [name]))

    @property
    def positions(self) -> int:
        """Number of positions with precomputed angles."""
        counts = [cos.shape[1] for cos, _ in self.angles.values()]
        return min(counts) if counts else 0  # dynamo knows no default of `min`

    def ropes(self, ctx: ForwardContext, n: int) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines [b or 1, n, rotary_dim] of the positions of a pass, of each table of angles."""
        return {name: rope_of(table, ctx, n) for name, table in self.angles.items()}

    def embedded_positions(self, ctx: ForwardContext, n: int) -> torch.Tensor:
        """Learned embeddings [b or 1, n, d] of the same positions, added to the token embeddings (OPT)."""
        if ctx.start is not None:
            positions = torch.arange(ctx.start, ctx.start + n, device=self.like.device).unsqueeze(0)
        else:
            assert ctx.positions is not None  # of every pass without a start
            positions = ctx.positions
        # A draft may reach beyond the longest possible answer: results there are never used.
        return self.learned(None, position_ids=positions.clamp(max=self.last_position))


def rope_of(
    table: tuple[torch.Tensor, torch.Tensor], ctx: ForwardContext, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [b or 1, n, rotary_dim] of a pass of n tokens, from those of all positions."""
    cos, sin = table
    if ctx.start is not None:
        return cos.narrow(1, ctx.start, n), sin.narrow(1, ctx.start, n)
    return cos[0][ctx.positions], sin[0][ctx.positions]


def attention_mask(
    ctx: ForwardContext, n: int, like: torch.Tensor, window: int | None = None, implied: bool = True
) -> torch.Tensor | None:
    """The additive attention mask of a pass.

    Args:
        ctx: the pass.
        n: its tokens of each sequence.
        like: a tensor with the mask's dtype and device.
        window: positions that a layer looks back on; None for all.
        implied: whether the attention kernel itself is causal if there are several positions.

    Returns:
        [b or 1, 1, n, kv_len]; None if none is needed: a single position sees all entries, and in an empty cache the
        kernel's own rule is right.
    """
    device = like.device
    in_window = window is None or ctx.kv_len <= window
    if ctx.start is not None:
        if in_window and (n == 1 or (implied and ctx.start == 0)):
            return None
        positions = torch.arange(ctx.start, ctx.kv_len, device=device).unsqueeze(0)
        kv_positions = torch.arange(ctx.kv_len, device=device).unsqueeze(0)
    else:
        assert ctx.positions is not None
        assert ctx.kv_positions is not None
        positions, kv_positions = ctx.positions, ctx.kv_positions
    # Comparisons only: as numbers, the distances of a long prompt would take gigabytes.
    positions, kv_positions = positions.unsqueeze(-1), kv_positions.unsqueeze(-2)
    allowed = kv_positions <= positions
    if ctx.visible is not None:
        visible = ctx.visible.expand(allowed.shape[0], -1, -1)
        allowed = torch.cat([allowed[..., : ctx.kv_len - visible.shape[-1]], visible], dim=-1)
    if window is not None and not in_window:
        allowed &= kv_positions > positions - window
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=device)
    return mask.masked_fill_(~allowed, float("-inf")).unsqueeze(1)


def _moved(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments of layers, on another device; the cache handles devices itself."""
    moved = dict(arguments)
    if arguments["attention_mask"] is not None:
        moved["attention_mask"] = arguments["attention_mask"].to(device)
    if "position_embeddings" in arguments:
        moved["position_embeddings"] = tuple(part.to(device) for part in arguments["position_embeddings"])
    return moved
