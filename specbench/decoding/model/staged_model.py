"""A stock Hugging Face causal language model, driven layer by layer.

It needs the anatomy that the decoder-only families share (token embedding, a list of layers, rotary or learned
positions, a final norm, a head). What differs between families is read from the model and its config, see `anatomy`.
A run compares the staged forward with the model's own before it measures (`measure.agreement`), so a family with
another anatomy is refused instead of being measured wrongly. Draft models are driven by this same class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from specbench.decoding.cpu.compiled_layers import release
from specbench.decoding.cpu.lean_modules import lean_copy
from specbench.decoding.cpu.packed_linear import pack_linears, uses_torch
from specbench.decoding.kv_cache import ForwardContext, KVCache
from specbench.decoding.model import anatomy, fixed_shape
from specbench.decoding.model.cost import EXPERTS, NO_EXPERTS, Experts, experts_of, experts_wait, weight_bytes
from specbench.decoding.model.graphs import EagerRunner, GraphRunner, is_within, options_of
from specbench.decoding.model.layer_stack import LayerStack, ignore
from specbench.decoding.state import NORMED, Draft, Prefill
from specbench.system.errors import UserError

if TYPE_CHECKING:  # a slow import, not needed to read `Drafter.needs`
    from transformers import PreTrainedModel

    from specbench.decoding.state import Batch

ROPE_STEP = 4096  # angles are computed for this many positions at a time: a graph reads them in place


class StagedModel:
    """Stages of a model: `embed`, `run_layers`, `head`, and `prefill` and `verify` built from them.

    Args:
        model: a causal language model; only the layout of its weights in memory is changed.
        vocab_size: logits are cut to this many ids (a draft model's head may be padded further than the target's).
        embedded_ids: for a draft model, the number of its target's ids, which may exceed its own embeddings: Qwen2.5's
            large models pad to 152064 ids, the small ones to 151936. An id beyond is embedded as the last one.
        width: pad every decode pass to this many tokens per sequence, or to one more if the kernels would round the
            last token differently from those before it; None: no padding.

    Attributes:
        width: the padded width.
        runner: runs the passes of fixed shapes, and what drafters compute.
        fixed_shapes: whether passes after a prompt have fixed shapes: they are captured, or have a width.
        padding: entries after the last one of a sequence that `width` may write to.
        layer_bytes: bytes of each layer's weights, without routed experts.
        experts: the routed experts of each layer.
        embedding_scale: factor of the embeddings.

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
        with anatomy.drivable(model):
            self.hidden_size = self.config.hidden_size
            base: Any = model.get_decoder()  # from here on a family's own modules
            norm: Any = next((getattr(base, name) for name in anatomy.NORMS if hasattr(base, name)), None)
            positions = any(getattr(base, name, None) for name in anatomy.POSITIONS)
            if not (hasattr(base, "layers") and norm and positions):
                raise UserError(
                    f"model type '{model.config.model_type}' cannot be driven layer by layer: it lacks layers, a "
                    "final norm, or positions that are rotary or learned"
                )
            anatomy.check_rope(self.config)
            self.embed_tokens = cast("torch.nn.Embedding", model.get_input_embeddings())
            self.norm: torch.nn.Module = norm
            self.lm_head: torch.nn.Linear = cast("torch.nn.Linear", model.get_output_embeddings())
            pack_linears(base.layers, self.lm_head)
            self.runner = runner_of(model)
            captured = isinstance(self.runner, GraphRunner)
            if width is not None and width > fixed_shape.LONGEST:
                raise UserError(
                    f"decoding.verify_width={width}: passes of one width have at most {fixed_shape.LONGEST} tokens"
                )
            self.fixed_shapes = captured or width is not None
            self.device = model.device
            self.dtype = model.dtype
            like = torch.empty(1, device=self.device, dtype=self.dtype)
            self.stack = LayerStack(base, self.config, captured, options_of(model).compile, like)
            self.width = None if width is None else fixed_shape.without_lone_query(width, self.stack.groups)
            self.padding = (self.width or 1) - 1
            self._norm, self._head = lean_copy(norm), lean_copy(self.lm_head)
            self.vocab_size = vocab_size or self.lm_head.out_features
            self._head_device = next(chain(self.lm_head.parameters(), self.lm_head.buffers())).device
            embeddings = self.embed_tokens.weight.shape[0]
            self._last_id = embeddings - 1 if (embedded_ids or 0) > embeddings else None
            self.embedding_scale = getattr(self.config, anatomy.EMBEDDING_SCALE, None) or 1.0
            self._logit_steps = anatomy.logit_steps(self.config)
            self.experts = [experts_of(layer) for layer in base.layers]
            self.layer_bytes = [
                weight_bytes(layer) - experts.bytes for layer, experts in zip(base.layers, self.experts)
            ]
            if not any(one.bytes for one in self.experts) and any(
                getattr(self.config, name, 0) for name in EXPERTS
            ):
                # Experts that were not found would be counted as if every token read all of them.
                self.experts = [Experts(0, 0, None)] * len(self.layers)
            self._routes = any(one is not NO_EXPERTS for one in self.experts)
            self._head_bytes = weight_bytes(self.norm) + weight_bytes(self.lm_head)

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers."""
        return self.stack.layers

    @property
    def uses_torch(self) -> str | None:
        """Why short passes run on torch's kernels; None if they run on our own, or on a GPU."""
        if self.device.type != "cpu":
            return None
        if self.config._attn_implementation == "eager":
            return "for attention, of which the family has its own"
        return uses_torch([*self.layers, self.lm_head])

    # -- what a pass costs -------------------------------------------------------------------------------------

    def pass_bytes(self, lo: int = 0, hi: int | None = None, head: bool = True, tokens: int = 1) -> float:
        """Bytes of weights that a pass of `tokens` tokens through layers [lo, hi) reads, with or without norm and head.

        A whole number, or NaN if unknown. The embedding look-up reads one row and is not counted; a head tied to it is
        read whole and is counted. Routed experts count as far as this many tokens are expected to choose them, see
        `Experts`.
        """
        read = sum(self.layer_bytes[lo:hi]) + head * self._head_bytes
        if not self._routes:  # asked for in every round
            return read
        return read + sum(experts.read(tokens) for experts in self.experts[lo:hi])

    # -- stages ------------------------------------------------------------------------------------------------

    def new_cache(self, capacity: int, slots: int = 1) -> KVCache:
        """An empty cache for `slots` sequences of up to `capacity` positions."""
        if self.width is not None:  # so that the last bucket of KV lengths is a full one
            capacity = fixed_shape.rounded_up(capacity, fixed_shape.KV_BUCKET)
        release()  # the cache of the last pass, which may have been given up for this one
        stack = self.stack
        return KVCache(stack.devices, stack.kv_heads, stack.head_dim, slots, capacity, self.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [b, n] -> hidden states [b, n, d]; states are returned unchanged."""
        if ids.is_floating_point():
            return ids
        embedded = self.embed_tokens(ids if self._last_id is None else ids.clamp(max=self._last_id))
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def run_layers(
        self,
        inputs: torch.Tensor,
        cache: KVCache,
        ctx: ForwardContext | int,
        lo: int = 0,
        hi: int | None = None,
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] = ignore,
        split: bool = True,
        to_logits: bool = False,
    ) -> torch.Tensor:
        """Runs layers [lo, hi) over the states of b sequences, in a fixed shape if that shape will recur.

        Args:
            inputs: [b, n, d] states in front of layer `lo`, or ids [b, n].
            cache: receives keys and values.
            ctx: positions, write indices and visibility; a number for tokens that follow this many others.
            lo: the first layer.
            hi: the layer after the last one; None for all.
            taps: layers in front of which `on_hidden` is called; with `to_logits` also their number and `NORMED`.
            on_hidden: called with a tap and the states [b, n, d] there.
            split: as in `verify`.
            to_logits: whether final norm and head follow, after all layers.

        Returns:
            States [b, n, d] after the layers, or logits [b, n, vocab].
        """
        hi = len(self.layers) if hi is None else hi
        b, n = inputs.shape[:2]
        if isinstance(ctx, int):
            ctx = ForwardContext.consecutive(ctx, n)
        if not (self.fixed_shapes and recurs(ctx, n)):
            self._make_angles(max(cache.capacity, ctx.kv_len))
            hidden = self.stack.run(self.embed(inputs), cache, ctx, lo, hi, None, taps, on_hidden)
            return self._logits(hidden, taps, on_hidden) if to_logits else hidden.to(self.device)
        self._make_angles(cache.capacity)  # now: not in the middle of a capture
        width = max(n, self.width or 1)
        ctx = fixed_shape.materialize(ctx, cache, b, n, width)
        inputs = fixed_shape.widened(inputs, width)
        tensors = ctx.positions, ctx.write_index, *self.stack.masks(ctx, width, self.embed_tokens.weight)
        if split and lo in taps:  # before all layers, so that the drafter's work runs beside them
            inputs = self.embed(inputs)
            on_hidden(lo, self.stack.entering(inputs, ctx, lo)[:, :n])
        # If the pass is split, a stage ends at each tap between two layers.
        inner = [tap for tap in range(lo, hi) if tap in taps]
        for start, end in pairwise([lo, *(tap for tap in inner if split and tap > lo), hi]):
            last, tapped = end == hi, [] if split else [*inner]
            if last and to_logits:
                tapped += [tap for tap in (hi, NORMED) if tap in taps]
            stage = self._fixed_stage(cache, ctx.kv_len, start, end, tapped, last and to_logits)
            key = start, end, ctx.kv_len, last and to_logits, *tapped
            inputs, *states = self.runner.run(cache, key, stage, inputs, *tensors)  # type: ignore[arg-type]
            for tap, seen in zip([*tapped, *([] if last else [end])], [*states, inputs]):
                on_hidden(tap, seen[:, :n])
        return inputs[:, :n]

    def _fixed_stage(
        self, cache: KVCache, kv_len: int, lo: int, hi: int, taps: Sequence[int], to_logits: bool
    ) -> Callable[..., list[torch.Tensor]]:
        """The function of a fixed-shape pass: everything that differs between two passes is an argument.

        It returns states or logits, then the states at each tap.
        """

        def stage(
            inputs: torch.Tensor, positions: torch.Tensor, write_index: torch.Tensor, *masks: torch.Tensor
        ) -> list[torch.Tensor]:
            states: dict[int, torch.Tensor] = {}
            ctx = ForwardContext(kv_len, write_index, None, positions)
            end = self.stack.run(self.embed(inputs), cache, ctx, lo, hi, masks, taps, states.__setitem__)
            end = self._logits(end, taps, states.__setitem__) if to_logits else end.to(self.device)
            return [end, *(states[tap] for tap in taps)]

        return stage

    def _logits(
        self, hidden: torch.Tensor, taps: Sequence[int], on_hidden: Callable[[int, torch.Tensor], None]
    ) -> torch.Tensor:
        """As `head`; passes the normed states to `on_hidden` if `NORMED` is among the taps."""
        normed = self._norm(hidden)
        if NORMED in taps:
            on_hidden(NORMED, normed.to(self.device))
        return self.unembed(normed)

    def run_batch(
        self,
        batch: Batch,
        owner: Any,
        key: Hashable,
        function: Callable[..., Sequence[Any]],
        *inputs: torch.Tensor,
        entries: int = 0,
    ) -> Sequence[Any]:
        """Runs a function of a batch; if passes are captured, as one graph of all passes in it.

        In a graph the host knows only the batch's size and how tokens are chosen. All else is on the device, and
        `RaggedLayout.place` and the batch's methods read it there.

        Args:
            batch: the running sequences.
            owner: as in `EagerRunner.run`: what `open` made for this function, usually a cache.
            key: likewise.
            function: of a batch and of the inputs; it returns tensors or None, and changes nothing but `owner`. Tensors
                that it reads beside its arguments keep their values and addresses as long as `owner` exists.
            *inputs: tensors that differ from round to round.
            entries: number of entries of the cache `owner` after the known tokens that its passes may attend to; 0:
                none.

        Returns:
            What the function returns.
        """
        if not isinstance(self.runner, GraphRunner) or not torch.is_inference_mode_enabled():
            return function(batch, *inputs)
        kv_len = fixed_shape.kv_bucket(max(batch.lengths) + entries, owner.capacity) if entries else 0
        b, drawn = batch.size, batch.uniforms
        key = key, kv_len, batch.decoding.distribution

        def on_tensors(
            seq_lens: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor | None, *rest: torch.Tensor
        ) -> Sequence[torch.Tensor]:
            return function(batch.device_only(kv_len, seq_lens, tokens, uniforms), *rest)

        of_batch = batch.seq_lens, batch.tokens[:b], None if drawn is None else drawn[:b]
        return self.runner.run(owner, key, on_tensors, *of_batch, *inputs)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., d] after the last layer -> logits [..., vocab]."""
        return self.unembed(self._norm(hidden))

    def unembed(self, normed: torch.Tensor) -> torch.Tensor:
        """The head without the final norm, for drafters that bring a norm of their own."""
        products = self._head(normed.to(self._head_device)).to(self.device)
        return self.finish_logits(products[..., : self.vocab_size])

    def finish_logits(self, products: torch.Tensor) -> torch.Tensor:
        """Products of normed states and rows of the head, of any shape -> logits, scaled or capped as the model's."""
        return anatomy.finished(products, self._logit_steps)

    # -- passes ------------------------------------------------------------------------------------------------

    def prefill(self, ids: torch.Tensor, cache: KVCache, taps: Sequence[int] = ()) -> Prefill:
        """Runs a prompt [1, n] into an empty cache; only its last position goes through the head."""
        tapped: dict[int, torch.Tensor] = {}
        hidden = self.run_layers(self.embed(ids), cache, 0, taps=taps, on_hidden=tapped.__setitem__)
        if NORMED in taps:
            tapped[NORMED] = self._norm(hidden).to(self.device)
        return Prefill(ids, self.head(hidden[:, -1]), tapped)

    def verify(
        self,
        pending: torch.Tensor,
        draft: Draft,
        cache: KVCache,
        ctx: ForwardContext | int,
        taps: Sequence[int] = (),
        on_hidden: Callable[[int, torch.Tensor], None] = ignore,
        split: bool = True,
    ) -> torch.Tensor:
        """Verifies the drafts of b sequences in one pass.

        Args:
            pending: [b, 1] the newest tokens.
            draft: k tokens after each.
            cache: holds all tokens before the pending ones.
            ctx: of the pending and the draft tokens.
            taps: as in `Drafter`; those below the layer that the draft resumes at are left out.
            on_hidden: called on the way with a tap and the states [b, 1 + k, d] there.
            split: whether a captured pass is split at each tap for that, so that `on_hidden` is called before the
                remaining layers run; otherwise it is called after the whole pass.

        Returns:
            Logits [b, 1 + k, vocab] that follow the pending token and each of the draft's tokens.
        """
        if draft.resume is not None:
            inputs, lo = draft.resume.hidden, draft.resume.layer
        else:
            inputs, lo = torch.cat([pending, draft.tokens], dim=1) if draft.tokens.shape[1] else pending, 0
        return self.run_layers(inputs, cache, ctx, lo, None, taps, on_hidden, split, to_logits=True)

    def _make_angles(self, capacity: int) -> None:
        """Makes sure that the angles of `capacity` positions are computed, once."""
        if self.stack.rotary is None or self.stack.positions >= capacity:
            return
        if self.fixed_shapes:  # graphs hold the addresses of the old ones
            self.runner.forget()
            capacity = fixed_shape.rounded_up(capacity, ROPE_STEP)
        self.stack.make_angles(capacity)


def runner_of(model: PreTrainedModel) -> EagerRunner:
    """The runner of a model's passes: a `GraphRunner` on CUDA, unless no graph can hold them.

    Raises:
        UserError: passes are to be compiled, but no graph can hold them.
    """
    options = options_of(model)
    if model.device.type != "cuda":
        return EagerRunner()
    why = why_uncaptured(model) if options.graphs else "pair.graphs=false"
    if why is None:
        return GraphRunner(model.device, options.compile)
    if options.compile:
        raise UserError(
            f"pair.compile=true is for passes that are captured, and these are not ({why}): set pair.compile=null"
        )
    return EagerRunner()


def why_uncaptured(model: PreTrainedModel) -> str | None:
    """Why no graph can hold the passes of a model on CUDA; None if one can."""
    devices = {weight.device for weight in chain(model.parameters(), model.buffers())}
    if len(devices) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "layers spread over devices"
    if getattr(model.config, "quantization_config", None) is not None:
        return "quantised weights, whose kernels may look at them on the host"
    config = model.config.get_text_config()
    if any(getattr(config, name, 0) for name in EXPERTS) and experts_wait(model):
        return "routed experts that wait for the host"
    return None


def recurs(ctx: ForwardContext, n: int) -> bool:
    """Whether a pass of n tokens has a shape that comes again and can be captured: a prompt's does not."""
    return ctx.start != 0 and n <= fixed_shape.LONGEST and (is_within() or torch.is_inference_mode_enabled())
