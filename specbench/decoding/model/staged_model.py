"""A stock Hugging Face causal language model, driven layer by layer.

The one file that touches a model's insides. It needs the anatomy that the decoder-only families share (token
embedding, a list of layers, rotary or learned positions, a final norm, a head). What differs between families is read
from the model and its config, by the tables below: no family is named here. `StagedModel.check` compares the staged
forward with the model's own once at load, so a family with another anatomy is refused instead of being measured
wrongly. Draft models are driven by this same class.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from specbench.decoding.cpu.grouped_attention import SHORT, fold_mask, grouped_attention_config
from specbench.decoding.cpu.lean_modules import (
    PARTS,
    check_parts,
    experts_of,
    experts_wait,
    lean_copy,
    thinned,
    weight_bytes,
)
from specbench.decoding.cpu.packed_linear import pack_linears
from specbench.decoding.kv_cache import EMPTY, ForwardContext, KVCache
from specbench.decoding.model.agreement import Agreement, agreement, own_ways
from specbench.decoding.model.graphs import EagerRunner, GraphRunner, is_within, options_of
from specbench.decoding.state import NORMED, Draft, Prefill
from specbench.system.errors import UserError, one_line

if TYPE_CHECKING:  # a slow import, not needed to read `Drafter.needs`
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from specbench.decoding.state import Batch

NORMS = ("norm", "final_layer_norm", "final_layernorm")  # what families call the norm in front of the head
CACHES = ("past_key_values", "layer_past")  # what layers call the cache
EMBEDDING_SCALE = "embedding_multiplier"  # a config's factor of token embeddings that their module leaves out
# What a config can ask to be done with the products of states and head, by the name of the number in it.
LOGIT_STEPS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "logit_scale": lambda logits, scale: logits * scale,
    "logits_scaling": lambda logits, scale: logits / scale,
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
}
LogitSteps = list[tuple["Callable[[torch.Tensor, float], torch.Tensor]", float]]
# What a config calls the number of its routed experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Kinds of rotary scaling whose angles depend on the position alone, so that one table serves every pass.
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
# The KV length of a fixed-shape pass is rounded up to a multiple of this; the excess is masked.
KV_BUCKET = 256
ROPE_STEP = 4096  # and the angles of so many positions are made at once: a graph reads them where they are
# Tokens of the text that a model is checked on; those after a layer's window, and the longest window that is filled.
CHECKED, BEYOND, LONGEST_FILLED = 72, 32, 512
# What such a pass gives: the states after its last layer, the same after the final norm, or logits.
STATES, NORMED_STATES, LOGITS = "states", "normed states", "logits"
# What layers of one kind have in common: the window that they look back on, and the type that names their angles in a
# model that has several tables of them; None for all positions and for the one table.
Kind = tuple[int | None, str | None]


class StagedModel:
    """Stages of a model: `embed`, `run_layers`, `head`, and `prefill` and `verify` built from them.

    Args:
        model: a causal language model; it stays as it is, but for the layout of its weights in memory.
        vocab_size: logits are cut to this many ids (a draft model's head may be padded further than the target's).
        embedded_ids: of a draft model, how many ids its target has, which may be more than it has embeddings for:
            Qwen2.5's large models pad to 152064 ids, the small ones to 151936. An id beyond is embedded as the last one
            that there is.
        width: pad every decode pass to this many tokens per sequence; None: no padding.

    Attributes:
        runner: runs the passes of fixed shapes, see `_fixed`; None where passes have the shapes that they are given in.
        padding: entries after the last one of a sequence that `width` may write to.

    Raises:
        UserError: the model cannot be driven layer by layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int | None = None,
        embedded_ids: int | None = None,
        width: int | None = None,
    ):
        self.model = model
        self.config = model.config.get_text_config()
        with drivable(model):
            self.hidden_size = self.config.hidden_size
            base: Any = model.get_decoder()  # from here on a family's own modules
            norm: Any = next((getattr(base, name) for name in NORMS if hasattr(base, name)), None)
            positions: list[Any] = [getattr(base, name, None) for name in ("rotary_emb", "embed_positions")]
            if not (hasattr(base, "layers") and norm and any(positions)):
                raise UserError(
                    f"model type '{model.config.model_type}' cannot be driven layer by layer: it lacks layers, a "
                    "final norm, or positions that are rotary or learned"
                )
            check_rope(self.config)
            self.embed_tokens = cast("torch.nn.Embedding", model.get_input_embeddings())
            self.norm: torch.nn.Module = norm
            self.lm_head: torch.nn.Linear = cast("torch.nn.Linear", model.get_output_embeddings())
            pack_linears(base.layers)
            pack_linears(
                self.lm_head, fixed=getattr(self.lm_head, "weight", None) is self.embed_tokens.weight
            )
            # Without a mask torch's attention is causal in an empty cache; the families' own code is not.
            self._implied_masks = self.config._attn_implementation == "sdpa"
            self.width, self.padding = width, (width or 1) - 1
            self.runner = runner_of(model) or (EagerRunner() if width else None)
            kv_heads, _ = self._cache_shape()
            # Without graphs, most passes on CUDA have no mask; with them all do.
            grouped = self.config.num_attention_heads > kv_heads and (
                model.device.type == "cpu" or isinstance(self.runner, GraphRunner)
            )
            # What attention is given for each query head of a group; 1 where it gets a mask as transformers does.
            self._groups = (
                self.config.num_attention_heads // kv_heads if grouped and self._implied_masks else 1
            )
            config = grouped_attention_config(self.config) if self._groups > 1 else None
            self.layers: list[torch.nn.Module] = [lean_copy(layer, config) for layer in base.layers]
            self._head = lean_copy(self.lm_head)
            self.rotary, self.learned_positions = positions  # one of them is None
            self.device = model.device
            self.dtype = model.dtype
            self.vocab_size = vocab_size or self.lm_head.out_features
            self._devices = [device_of(layer) for layer in self.layers]
            self._cut_head = self.vocab_size < self.lm_head.out_features
            self._head_device = next(chain(self.lm_head.parameters(), self.lm_head.buffers())).device
            embeddings = self.embed_tokens.weight.shape[0]
            self._last_id = embeddings - 1 if (embedded_ids or 0) > embeddings else None
            self._embedding_scale = getattr(self.config, EMBEDDING_SCALE, None) or 1.0
            self._logit_steps = logit_steps(self.config)
            arguments = signature(base.layers[0].forward).parameters
            self._cache_name = next(name for name in CACHES if name in arguments)
            types = getattr(self.config, "layer_types", None) or [None] * len(self.layers)
            windows = [_window(self.config, i) for i in range(len(self.layers))]
            typed = self.rotary is not None and "layer_type" in signature(self.rotary.forward).parameters
            self._kinds: list[Kind] = [(w, t if typed else None) for w, t in zip(windows, types, strict=True)]
            self._kinds_there = tuple(dict.fromkeys(self._kinds))
            self._counting = torch.arange(0)
            self._rope_tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
            self._experts = [experts_of(layer) for layer in base.layers]
            self._layer_bytes = [
                weight_bytes(layer) - (0 if experts is None else experts.bytes)
                for layer, experts in zip(base.layers, self._experts)
            ]
            self._has_experts = any(self._experts)
            # Experts that are nowhere to be found would be counted as if every token read all of them.
            self._uncounted = not self._has_experts and any(getattr(self.config, name, 0) for name in EXPERTS)
            self._head_bytes = weight_bytes(self.norm) + weight_bytes(self.lm_head)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> StagedModel:
        """This model with some parts of its layers left out, for drafting; it shares weights and caches.

        Its passes are neither captured nor widened.

        Args:
            attention: layers whose attention is left out.
            mlp: layers whose feed-forward part is left out.

        Raises:
            UserError: the layers do not have these parts as modules.
        """
        twin = copy.copy(self)
        twin.runner, twin.width, twin.padding = None, None, 0
        twin.layers = [
            thinned(layer, i in attention, i in mlp, pair)
            for i, (layer, pair) in enumerate(zip(self.layers, self._mlp_gives_pair))
        ]
        twin._experts = [None if i in mlp else experts for i, experts in enumerate(self._experts)]
        twin._layer_bytes = [
            0 if i in attention and i in mlp else whole - (i in attention) * own - (i in mlp) * fed
            for i, (whole, (own, fed)) in enumerate(zip(self._layer_bytes, self._part_bytes))
        ]
        return twin

    @cached_property
    @torch.inference_mode()
    def _mlp_gives_pair(self) -> list[bool]:
        """Of each layer, whether its feed-forward part returns more than states: only a call shows it."""
        for layer in self.layers:
            check_parts(layer)
        states = self.embed(torch.zeros(1, 1, dtype=torch.int64, device=self.model.device))
        return [isinstance(getattr(layer, PARTS[1])(states), tuple) for layer in self.layers]

    @cached_property  # a search makes many models, and counting takes longer than making one
    def _part_bytes(self) -> list[tuple[int, int]]:
        """Bytes of the attention and of the feed-forward part of each layer, routed experts apart."""
        parts = []
        for layer, experts in zip(self.layers, self._experts):
            own, fed = (weight_bytes(getattr(layer, name)) for name in PARTS)
            parts.append((own, fed - (0 if experts is None else experts.bytes)))
        return parts

    # -- what a pass costs -------------------------------------------------------------------------------------

    def pass_bytes(self, lo: int = 0, hi: int | None = None, head: bool = True, tokens: int = 1) -> float:
        """Bytes of weights that a pass of `tokens` tokens through layers [lo, hi) reads, with or without norm and head.

        A whole number, or NaN where it cannot be known. The embedding look-up reads one row and is not counted; a head
        tied to it is read whole and is counted. Of routed experts those are counted that so many tokens are expected to
        choose, see `Experts`.
        """
        read: float = sum(self._layer_bytes[lo:hi]) + head * self._head_bytes
        if self._has_experts:
            read += sum(experts.read(tokens) for experts in self._experts[lo:hi] if experts is not None)
        return math.nan if self._uncounted and self._layer_bytes[lo:hi] else read

    # -- stages ------------------------------------------------------------------------------------------------

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        """An empty cache for `slots` sequences of up to `capacity` positions."""
        return KVCache(self._devices, *self._cache_shape(), slots, capacity, self.dtype)

    def _cache_shape(self) -> tuple[int, int]:
        """Heads of keys and values, width of a head."""
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return kv_heads, getattr(self.config, "head_dim", None) or self.hidden_size // heads

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [b, n] -> hidden states [b, n, d]."""
        embedded = self.embed_tokens(ids if self._last_id is None else ids.clamp(max=self._last_id))
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def run_layers(
        self,
        hidden: torch.Tensor,
        cache: KVCache,
        ctx: ForwardContext | int,
        lo: int = 0,
        hi: int | None = None,
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Runs layers [lo, hi) over the states of b sequences.

        Args:
            hidden: [b, n, d] states.
            cache: receives keys and values.
            ctx: positions, write places and visibility; a number for tokens that follow so many others.
            lo: the first layer.
            hi: the layer after the last one; None for all.
            taps: layers in front of which `on_hidden` is called.
            on_hidden: called with a layer and the states [b, n, d] that enter it.

        Returns:
            States [b, n, d] after the layers.
        """
        n = hidden.shape[1]
        if isinstance(ctx, int):
            ctx = ForwardContext.consecutive(ctx, n)
        hi = len(self.layers) if hi is None else hi
        if self.runner is not None and has_fixed_shape(ctx, n):
            return self._fixed(hidden, cache, ctx, lo, hi, taps, on_hidden)[STATES]
        return self._layers(hidden, cache, ctx, lo, hi, self._masks(ctx, n, hidden), taps, on_hidden)

    def _layers(
        self,
        hidden: torch.Tensor,
        cache: KVCache,
        ctx: ForwardContext,
        lo: int,
        hi: int,
        masks: Sequence[torch.Tensor | None],
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """As `run_layers`, with the mask of each kind of layers."""
        b, n = hidden.shape[:2]
        if self.rotary is None and lo == 0:
            hidden = hidden + self._learned(ctx, n)
        cache.begin_pass(lo, hi, ctx, b, n)
        arguments = self._arguments(ctx, n, cache, masks)
        current = hidden.device
        parts = zip(self.layers[lo:hi], self._kinds[lo:hi], self._devices[lo:hi])
        for i, (layer, kind, device) in enumerate(parts, lo):
            if i in taps and on_hidden is not None:
                on_hidden(i, hidden)
            if device != current:  # of a target that is spread over several
                hidden, current = hidden.to(device), device
                arguments = {key: _moved(own, device) for key, own in arguments.items()}
            hidden = layer(hidden, **arguments[kind])
        return hidden

    def _masks(self, ctx: ForwardContext, n: int, like: torch.Tensor) -> list[torch.Tensor | None]:
        """The attention mask of each kind of layers."""
        masks = [attention_mask(ctx, n, like, window, self._implied_masks) for window, _ in self._kinds_there]
        return [fold_mask(mask, self._groups) for mask in masks] if self._groups > 1 else masks

    def _arguments(
        self, ctx: ForwardContext, n: int, cache: KVCache, masks: Sequence[torch.Tensor | None]
    ) -> dict[Kind, dict[str, Any]]:
        """What the layers of each kind are called with in a pass, beside the states [b, n, d]."""
        rope = {} if self.rotary is None else self._rope(ctx, n, cache.capacity)
        arguments: dict[Kind, dict[str, Any]] = {}
        for kind, mask in zip(self._kinds_there, masks):
            arguments[kind] = {"attention_mask": mask, self._cache_name: cache, "use_cache": True}
            if rope:
                arguments[kind]["position_embeddings"] = rope[kind[1]]
        return arguments

    # -- stages of a fixed shape ---------------------------------------------------------------------------------

    def _fixed(
        self,
        given: torch.Tensor,
        cache: KVCache,
        ctx: ForwardContext,
        lo: int,
        hi: int,
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] | None = None,
        cut: bool = True,
        wanted: Sequence[str | int] = (STATES,),
    ) -> dict[str | int, torch.Tensor]:
        """Runs a fixed-shape pass, which can be captured and whose results do not depend on the number of its tokens.

        It is padded to `width` tokens by repeating the last one, in entries that the next pass overwrites. Its KV
        length is rounded up to a multiple of `KV_BUCKET`; the excess is masked.

        Args:
            given: ids [b, n], or states [b, n, d] in front of layer `lo`.
            cache: as in `run_layers`.
            ctx: likewise.
            lo: likewise.
            hi: likewise.
            taps: likewise.
            on_hidden: likewise.
            cut: if true, split the pass at each tap, so that `on_hidden` runs before the remaining layers; else it
                runs after the whole pass.
            wanted: of STATES, NORMED_STATES and LOGITS.

        Returns:
            What was wanted, [b, n, ...].
        """
        assert self.runner is not None
        b, n = given.shape[:2]
        inside: list[int] = []
        if on_hidden is not None:
            if lo in taps and lo < hi:
                on_hidden(lo, self._embed_with_positions(given, ctx) if lo == 0 else given)
            inside = [layer for layer in range(lo + 1, hi) if layer in taps]
        cuts = inside if cut else []
        wanted = wanted if cut else (*inside, *wanted)
        if self.rotary is not None:
            self._angles(cache.capacity)  # made now: not in the middle of a capture
        width = max(n, self.width or 1)
        ctx = self._materialize(ctx, cache, b, n, width)
        if width > n:
            given = torch.cat([given, given[:, -1:].expand(-1, width - n, *given.shape[2:])], dim=1)
        inputs = ctx.positions, ctx.write_index, *self._masks(ctx, width, self.embed_tokens.weight)
        for start, end in zip([lo, *cuts], [*cuts, hi]):
            names: Sequence[str | int] = wanted if end == hi else (STATES,)
            key = (start, end, ctx.kv_len, *names)
            stage = self._stage(cache, ctx.kv_len, start, end, names)
            outputs = self.runner.run(cache, key, stage, given, *inputs)  # type: ignore[arg-type] # all spelled out
            own = [output[:, :n] for output in outputs] if width > n else outputs
            if end < hi:
                given = outputs[0]
                on_hidden(end, own[0])  # type: ignore[misc] # there are cuts only with it
        found = dict(zip(names, own))
        if not cut:
            for tap in inside:
                on_hidden(tap, found[tap])  # type: ignore[misc] # likewise
        return found

    def run_batch(
        self,
        batch: Batch,
        memory: Any,
        key: Hashable,
        function: Callable[..., Sequence[torch.Tensor]],
        *given: torch.Tensor,
        entries: int | None = None,
    ) -> Sequence[torch.Tensor]:
        """Runs a function of a batch; where passes are captured, as one graph with all passes in it.

        In a graph the function learns of the batch on the host only its size and how tokens are chosen. All else is on
        the device, and `RaggedLayout.place` and the batch's methods look for it there.

        Args:
            batch: the running sequences.
            memory: as in `EagerRunner.run`: what `open` made for this function, a cache as a rule.
            key: likewise.
            function: of a batch and of what is given; it returns tensors, and changes nothing but `memory`. What it
                reads beside its arguments stays the same and where it is for as long as `memory` is there.
            *given: tensors that differ from round to round.
            entries: of the cache `memory`, after the known tokens, that its passes may attend to; None: it attends to
                nothing.

        Returns:
            What the function returns.
        """
        if not isinstance(self.runner, GraphRunner) or not torch.is_inference_mode_enabled():
            return function(batch, *given)
        kv_bucket = 0 if entries is None else self._kv_bucket(max(batch.lengths) + entries, memory)
        drawn = [] if batch.uniforms is None else [batch.uniforms[: batch.size]]

        def whole(known: torch.Tensor, tokens: torch.Tensor, *rest: torch.Tensor) -> Sequence[torch.Tensor]:
            uniforms = rest[0] if drawn else None
            return function(batch.device_only(kv_bucket, known, tokens, uniforms), *rest[len(drawn) :])

        key = key, kv_bucket, batch.decoding.temperature, len(drawn)
        return self.runner.run(memory, key, whole, batch.known, batch.tokens[: batch.size], *drawn, *given)

    @staticmethod
    def _kv_bucket(kv_len: int, cache: KVCache) -> int:
        """The KV length of a fixed-shape pass that needs `kv_len` entries."""
        return min(-(-kv_len // KV_BUCKET) * KV_BUCKET, cache.capacity)

    def _stage(
        self, cache: KVCache, kv_len: int, lo: int, hi: int, wanted: Sequence[str | int]
    ) -> Callable[..., list[torch.Tensor]]:
        """The function of such a pass: all that differs between two of them is among its arguments.

        wanted: as in `_fixed`, and layers, for the states in front of them.
        """
        taps = [layer for layer in range(lo, hi) if layer in wanted]

        def stage(
            given: torch.Tensor, positions: torch.Tensor, write_index: torch.Tensor, *masks: torch.Tensor
        ) -> list[torch.Tensor]:
            found: dict[str | int, torch.Tensor] = {}

            def keep(layer: int, states: torch.Tensor) -> None:
                found[layer] = states

            ctx = ForwardContext(kv_len, write_index, None, positions)
            hidden = self.embed(given) if given.dim() == 2 else given
            hidden = self._layers(hidden, cache, ctx, lo, hi, masks, taps, keep)
            if wanted == (STATES,):
                return [hidden]
            normed = self.norm(hidden)
            found |= {STATES: hidden, NORMED_STATES: normed, LOGITS: self.unembed(normed)}
            return [found[name] for name in wanted]

        return stage

    def _materialize(self, ctx: ForwardContext, cache: KVCache, b: int, n: int, width: int) -> ForwardContext:
        """The same pass, of `width` tokens in place of n, with tensors for numbers and a fixed number of entries."""
        capacity = cache.capacity
        if self._counting.shape[0] < capacity:
            self._counting = torch.arange(capacity, device=self.device)
        counting, kv_len = self._counting, self._kv_bucket(ctx.kv_len, cache)
        visible, more = ctx.visible, (0, kv_len - ctx.kv_len)
        if ctx.start is not None:
            positions = counting[None, ctx.start : ctx.start + n]
            kv_positions = counting[None, :kv_len]
        else:
            assert ctx.positions is not None
            assert ctx.kv_positions is not None
            positions = ctx.positions
            kv_positions = torch.nn.functional.pad(ctx.kv_positions, more, value=EMPTY)
            if visible is not None:
                visible = torch.nn.functional.pad(visible, more)
        if isinstance(ctx.write_index, int):
            entries = counting[ctx.write_index : ctx.write_index + n].unsqueeze(0)
            if b > 1:
                entries = entries + capacity * counting[:b].unsqueeze(1)
        else:
            entries = ctx.write_index.view(b, n)
        if width > n:
            positions = torch.cat([positions, positions[:, -1:].expand(-1, width - n)], dim=1)
            entries = torch.cat([entries, entries[:, -1:] + counting[1 : 1 + width - n]], dim=1)
            if visible is not None:
                visible = torch.cat([visible, visible[:, -1:].expand(-1, width - n, -1)], dim=1)
        return ForwardContext(kv_len, entries.flatten(), None, positions, kv_positions, visible)

    def _embed_with_positions(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """The states [b, n, d] that enter the first layer."""
        hidden = self.embed(ids)
        return hidden + self._learned(ctx, ids.shape[1]) if self.rotary is None else hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., d] after the last layer -> logits [..., vocab]."""
        return self.unembed(self.norm(hidden))

    def unembed(self, normed: torch.Tensor) -> torch.Tensor:
        """The head without the final norm, for drafters that bring a norm of their own."""
        products = self._head(normed.to(self._head_device)).to(self.device)
        return self.finish_logits(products[..., : self.vocab_size] if self._cut_head else products)

    def finish_logits(self, products: torch.Tensor) -> torch.Tensor:
        """Products of normed states and rows of the head, of any shape -> logits, scaled or capped as the model's."""
        return finished(products, self._logit_steps)

    # -- passes ------------------------------------------------------------------------------------------------

    def prefill(self, ids: torch.Tensor, cache: KVCache, taps: Sequence[int] = ()) -> Prefill:
        """Runs a prompt [1, n] into an empty cache; only its last position goes through the head."""
        tapped: dict[int, torch.Tensor] = {}
        hidden = self.run_layers(self.embed(ids), cache, 0, taps=taps, on_hidden=tapped.__setitem__)
        if len(self.layers) in taps:
            tapped[len(self.layers)] = hidden
        if NORMED in taps:
            tapped[NORMED] = self.norm(hidden)
        return Prefill(ids, self.head(hidden[:, -1]), tapped)

    def verify(
        self,
        pending: torch.Tensor,
        draft: Draft,
        cache: KVCache,
        ctx: ForwardContext | int,
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] | None = None,
        cut: bool = True,
    ) -> torch.Tensor:
        """Verifies the drafts of b sequences in one pass.

        Args:
            pending: [b, 1] the newest tokens.
            draft: k tokens after each.
            cache: holds all tokens before the pending ones.
            ctx: of the pending and the draft tokens.
            taps: as in `Drafter`; those below the layer that the draft resumes at are left out.
            on_hidden: called on the way with a tap and the states [b, 1 + k, d] there.
            cut: whether a captured pass is cut at each tap for that; otherwise it calls `on_hidden` after its end.

        Returns:
            Logits [b, 1 + k, vocab] that follow the pending token and each of the draft's tokens.
        """
        if draft.resume is not None:
            given, lo = draft.resume.hidden, draft.resume.layer
        else:
            given, lo = torch.cat([pending, draft.tokens], dim=1) if draft.tokens.shape[1] else pending, 0
        if self.runner is not None:
            n = given.shape[1]
            ctx = ForwardContext.consecutive(ctx, n) if isinstance(ctx, int) else ctx
            if has_fixed_shape(ctx, n):
                return self._verify_fixed(given, cache, ctx, lo, taps, on_hidden, cut)
        hidden = self.embed(given) if draft.resume is None else given
        if lo < len(self.layers):
            hidden = self.run_layers(hidden, cache, ctx, lo, taps=taps, on_hidden=on_hidden)
        if not taps or on_hidden is None:
            return self.head(hidden)
        if len(self.layers) in taps:
            on_hidden(len(self.layers), hidden)
        normed = self.norm(hidden)
        if NORMED in taps:
            on_hidden(NORMED, normed)
        return self.unembed(normed)

    def _verify_fixed(
        self,
        given: torch.Tensor,
        cache: KVCache,
        ctx: ForwardContext,
        lo: int,
        taps: Sequence[int],
        on_hidden: Callable[[int, torch.Tensor], None] | None,
        cut: bool,
    ) -> torch.Tensor:
        """As `verify`, of ids or states in front of layer `lo`, in a pass of a fixed shape."""
        layers = len(self.layers)
        last = {layers: STATES, NORMED: NORMED_STATES}
        told = [tap for tap in last if tap in taps] if on_hidden is not None else []
        wanted = (*(last[tap] for tap in told), LOGITS)
        found = self._fixed(given, cache, ctx, lo, layers, taps, on_hidden, cut, wanted)
        for tap in told:
            on_hidden(tap, found[last[tap]])  # type: ignore[misc] # some are told only where there is one
        return found[LOGITS]

    @torch.inference_mode()
    def check(self, text: Sequence[int] | None = None) -> Agreement:
        """Compares the staged forward with the model's own.

        It takes four passes of `_checked_length` tokens, three of them the model's own, and ten short ones.

        Args:
            text: token ids of a text that the model could be asked to go on with, see `Pair.sample_ids`; the first ones
                are used. None: ids drawn by chance, for a model without a tokenizer.

        Returns:
            What was measured.

        Raises:
            UserError: the logits differ by more than the model's own do from one way of computing them to another.
        """
        length = self._checked_length()
        text = random_ids(self.config, self.vocab_size, length) if text is None else text
        ids = torch.tensor([filled(text, length)], device=self.device)
        # The prompt, two verifications, and single tokens: each has masks, positions and kernels of its own.
        ends = [0, *(length - behind for behind in (19, 11, 3, 2, 1, 0))]
        with drivable(self.model):
            ways = [way[:, : self.vocab_size].to(self.device) for way in own_ways(self.model, ids, ends)]
            cache = self.new_cache(length + self.padding)
            parts = [self.head(self.run_layers(self.embed(ids[:, : ends[1]]), cache, 0))]
            for start, end in pairwise(ends[1:]):
                draft = Draft(ids[:, start + 1 : end])
                parts.append(self.verify(ids[:, start : start + 1], draft, cache, start))
            staged = torch.cat([part[0] for part in parts])
        if not ways[0].isfinite().all():
            raise UserError(
                f"model type '{self.config.model_type}' gives logits that are no finite numbers in "
                f"{name_of(self.dtype)}: set another pair.dtype"
            )
        found = agreement(staged, ways, [(0, ends[1]), (ends[1], ends[3]), (ends[3], length)])
        if not found.holds:
            raise UserError(
                f"model type '{self.config.model_type}' cannot be driven layer by layer: its logits differ from the "
                f"model's own by {found.distance:.1e} of their scale, and the model's own by {found.noise:.1e} among "
                f"themselves, in {name_of(self.dtype)}; {found.limit:.1e} would be accepted"
            )
        return found

    def _checked_length(self) -> int:
        """Tokens that `check` needs: more than short windows of layers have, and with graphs more than `KV_BUCKET`.

        A pass of a window's length costs memory for the logits of every token of it, so that long ones are not filled.
        """
        windows = [window + BEYOND for window, _ in self._kinds_there if window and window <= LONGEST_FILLED]
        length = max(CHECKED, *windows, KV_BUCKET + 11 if isinstance(self.runner, GraphRunner) else 0)
        return min(length, self.config.max_position_embeddings)

    # -- positions ---------------------------------------------------------------------------------------------

    def _rope(
        self, ctx: ForwardContext, n: int, capacity: int
    ) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines [b or 1, n, rotary_dim] of the positions of a pass, of each table of angles."""
        tables = self._angles(max(capacity, ctx.kv_len))
        return {name: rope_of(table, ctx, n) for name, table in tables.items()}

    def _angles(self, capacity: int) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines [1, at least capacity, rotary_dim] of all positions, computed once for each table."""
        if not self._rope_tables or next(iter(self._rope_tables.values()))[0].shape[1] < capacity:
            if self.runner is not None:  # those before are no longer there
                self.runner.forget()
                capacity = -(-capacity // ROPE_STEP) * ROPE_STEP
            positions = torch.arange(capacity, device=self.device).unsqueeze(0)
            # Of the first argument only its dtype and device are read.
            like = torch.empty(1, device=self.device, dtype=self.dtype)
            for name in {angles for _, angles in self._kinds}:
                self._rope_tables[name] = self.rotary(like, positions, *([] if name is None else [name]))
        return self._rope_tables

    def _learned(self, ctx: ForwardContext, n: int) -> torch.Tensor:
        """Learned embeddings [b or 1, n, d] of the same positions, added to the token embeddings (OPT)."""
        if ctx.start is not None:
            positions = torch.arange(ctx.start, ctx.start + n, device=self.device).unsqueeze(0)
        else:
            assert ctx.positions is not None  # of every pass without a start
            positions = ctx.positions
        # A draft may reach further than the answer can: what is computed there is never used.
        positions = positions.clamp(max=self.config.max_position_embeddings - 1)
        return self.learned_positions(None, position_ids=positions)


def logit_steps(config: PretrainedConfig) -> LogitSteps:
    """What a model does with the products of its states and its head, in order; see `LOGIT_STEPS`."""
    named = ((step, getattr(config, name, None)) for name, step in LOGIT_STEPS.items())
    return [(step, number) for step, number in named if number is not None and number != 1]


def finished(products: torch.Tensor, steps: LogitSteps) -> torch.Tensor:
    """The logits that the steps make of products, of any shape."""
    for step, number in steps:
        products = step(products, number)
    return products


@contextmanager
def drivable(model: PreTrainedModel) -> Iterator[None]:
    """Turns the errors that an unsupported anatomy causes into a UserError that names the model type.

    Running out of memory stays the error that it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        TypeError,
        AttributeError,
        RuntimeError,
        ValueError,
        IndexError,
        KeyError,
        NotImplementedError,
    ) as error:
        raise UserError(
            f"model type '{model.config.model_type}' cannot be driven layer by layer: {one_line(error)}"
        ) from error


def random_ids(config: PretrainedConfig, vocab_size: int, length: int) -> list[int]:
    """Token ids drawn by chance, always the same, without those that the config names as special."""
    named = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    special = {i for ids in named for i in (ids if isinstance(ids, list) else [ids])}
    drawn = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    return filled([i for i in drawn if i not in special], length)


def filled(ids: Sequence[int], length: int) -> list[int]:
    """The first `length` token ids of a text that is said again as often as that takes."""
    return (list(ids) * -(-length // len(ids)))[:length]


def name_of(dtype: torch.dtype) -> str:
    """A dtype as the configuration names it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def runner_of(model: PreTrainedModel) -> GraphRunner | None:
    """What captures the passes of a model on CUDA; None elsewhere, and for a model that no graph can hold.

    That is one whose layers are spread over devices; one with quantised weights, whose kernels may look at them on the
    host; and one whose routed experts do, see `experts_wait`.
    """
    options = options_of(model)
    if model.device.type != "cuda" or not options.graphs:
        return None
    devices = {weight.device for weight in chain(model.parameters(), model.buffers())}
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    quantised = getattr(model.config, "quantization_config", None) is not None
    config = model.config.get_text_config()
    experts = any(getattr(config, name, 0) for name in EXPERTS)
    if len(devices) > 1 or hooked or quantised or (experts and experts_wait(model)):
        return None
    return GraphRunner(model.device, options.compile)


def has_fixed_shape(ctx: ForwardContext, n: int) -> bool:
    """Whether others of the same shape will follow a pass of n tokens: not that of a prompt."""
    return ctx.start != 0 and n <= SHORT and (is_within() or torch.is_inference_mode_enabled())


def check_rope(config: PretrainedConfig) -> None:
    """Raises UserError for rotary positions whose angles depend on more than the position.

    With "longrope" and "dynamic" transformers chooses the angles of a whole pass by the largest position in it. A draft
    that reaches over a threshold would change the angles of the target's own tokens too, and the longest sequence of a
    batch those of all others: no answer would equal that of autoregressive decoding.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [
        rope,
        *(part for part in rope.values() if isinstance(part, dict)),
    ]  # some keep one for each layer type
    for kind in kinds:
        if (name := kind.get("rope_type", "default")) not in STATIC_ROPE:
            raise UserError(
                f"model type '{config.model_type}' has rotary positions of type '{name}', whose angles may change with "
                "the length of a pass, so that drafts would change the answer: use a checkpoint whose rope_type is one "
                f"of {', '.join(sorted(STATIC_ROPE))}"
            )


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
        like: gives dtype and device.
        window: positions that a layer looks back on; None for all.
        implied: whether the attention kernel has a rule of its own: causal where there are several positions.

    Returns:
        [b or 1, 1, n, kv_len]; None where none is needed: of a single position all are visible, in an empty cache the
        kernel's own rule is the right one.
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
    back = positions.unsqueeze(-1) - kv_positions.unsqueeze(-2)
    allowed = back >= 0
    if ctx.visible is not None:
        visible = ctx.visible.expand(allowed.shape[0], -1, -1)
        allowed = torch.cat([allowed[..., : ctx.kv_len - visible.shape[-1]], visible], dim=-1)
    if window is not None and not in_window:
        allowed &= back < window
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=device)
    return mask.masked_fill_(~allowed, float("-inf")).unsqueeze(1)


def _moved(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What layers are called with, on another device; the cache knows its devices itself."""
    moved = dict(arguments)
    if arguments["attention_mask"] is not None:
        moved["attention_mask"] = arguments["attention_mask"].to(device)
    if "position_embeddings" in arguments:
        moved["position_embeddings"] = tuple(part.to(device) for part in arguments["position_embeddings"])
    return moved


def _window(config: PretrainedConfig, layer: int) -> int | None:
    """The number of positions that a layer attends to, its own included; None for all.

    Raises UserError for attention of another type, which a short check might not find out.
    """
    kind = (getattr(config, "layer_types", None) or ["sliding_attention"] * (layer + 1))[layer]
    if kind not in ("sliding_attention", "full_attention"):
        raise UserError(
            f"model type '{config.model_type}' cannot be driven layer by layer: it has layers of type '{kind}'"
        )
    return getattr(config, "sliding_window", None) if kind == "sliding_attention" else None


def device_of(module: torch.nn.Module) -> torch.device:
    """The device a module runs on: that of accelerate's hook, if it has one, or else that of its weights."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return next(module.parameters()).device if device is None else torch.device(device)
