"""A stock Hugging Face causal language model, driven layer by layer.

The one file that touches a model's insides. It needs the anatomy that the decoder-only families share (token
embedding, a list of layers, rotary or learned positions, a final norm, a head); `Target.check` compares the staged
forward with the model's own once at load, so a family with another anatomy is refused instead of being measured
wrongly. Draft models are driven by this same class.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from specbench.decoding.kv_cache import KVCache, Places, RowCache
from specbench.decoding.layers import quick, weight_bytes
from specbench.decoding.linear import lay_out
from specbench.errors import UserError, reason

if TYPE_CHECKING:  # importing it takes seconds, which whoever only asks a method what it needs need not spend
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PretrainedConfig, PreTrainedModel

    from specbench.decoding.draft import Draft

NORMS = ("norm", "final_layer_norm")  # what families call the norm in front of the head
# Kinds of rotary scaling whose angles depend on the position alone, so that one table serves every pass.
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True, slots=True)
class Prefill:
    """The outcome of a prompt's pass.

    Attributes:
        logits: [1, vocab] after the prompt's last token.
        hidden: for each tapped layer its input states [1, n, d].
    """

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes lie on the path to each node of a tree, itself included.

    Args:
        parents: [k] index of each node's parent, -1 for children of the root; parents stand before their children.

    Returns:
        [k, k] bool, a row for each node.
    """
    k = parents.shape[0]
    closure = torch.eye(k, dtype=torch.bool, device=parents.device)
    parent = torch.where(parents < 0, torch.arange(k, device=parents.device), parents)
    for _ in range(max(k - 1, 0).bit_length()):  # each doubling reaches twice as far towards the root
        closure = closure | closure[parent]
        parent = parent[parent]
    return closure


@dataclass(frozen=True, slots=True)
class Nodes:
    """Tree visibility among the last m entries of a cache; all earlier entries are visible to every token.

    Attributes:
        offsets: [m] positions, counted from the first of these entries.
        seen: [n, m], which entries each of the n tokens of a pass attends to; these tokens are the last n entries.
    """

    offsets: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def tree(cls, parents: torch.Tensor) -> Nodes:
        """Those of the pending token and the k nodes of a draft's tree; parents: [k], as in `ancestors`."""
        k = parents.shape[0]
        seen = torch.zeros(k + 1, k + 1, dtype=torch.bool, device=parents.device)
        seen[:, 0] = True
        seen[1:, 1:] = ancestors(parents)
        return cls(seen.sum(1) - 1, seen)


class Target:
    """Stages of a model: `embed`, `run_layers`, `head`, and `prefill` and `verify` built from them.

    Args:
        model: a causal language model; it stays as it is, but for the layout of its weights in memory.
        vocab_size: logits are cut to this many ids (a draft model's head may be padded further than the target's).
        embedded_ids: of a draft model, how many ids its target has, which may be more than it has embeddings for:
            Qwen2.5's large models pad to 152064 ids, the small ones to 151936. An id beyond is embedded as the last one
            that there is.

    Raises:
        UserError: the model cannot be driven layer by layer.
    """

    def __init__(
        self, model: PreTrainedModel, vocab_size: int | None = None, embedded_ids: int | None = None
    ):
        self.model = model
        self.config = model.config
        with drivable(model):
            base: Any = getattr(model, "model", None)  # from here on a family's own modules
            base = getattr(base, "decoder", base)
            norm: Any = next((getattr(base, name) for name in NORMS if hasattr(base, name)), None)
            positions: list[Any] = [getattr(base, name, None) for name in ("rotary_emb", "embed_positions")]
            if not (hasattr(base, "embed_tokens") and hasattr(base, "layers") and norm and any(positions)):
                raise UserError(
                    f"model type '{model.config.model_type}' cannot be driven layer by layer: it lacks token "
                    "embeddings, layers, a final norm, or positions that are rotary or learned"
                )
            check_rope(self.config)
            self.embed_tokens: torch.nn.Embedding = base.embed_tokens
            self.norm: torch.nn.Module = norm
            self.lm_head: torch.nn.Linear = cast("torch.nn.Linear", model.get_output_embeddings())
            lay_out(base.layers)
            lay_out(self.lm_head, fixed=self.lm_head.weight is self.embed_tokens.weight)
            self.layers: list[torch.nn.Module] = [quick(layer) for layer in base.layers]
            self._head = quick(self.lm_head)
            self.rotary, self.learned_positions = positions  # one of them is None
            self.device = model.device
            self.dtype = model.dtype
            self.hidden_size = self.config.hidden_size
            self.vocab_size = vocab_size or self.lm_head.weight.shape[0]
            self._devices = [device_of(layer) for layer in self.layers]
            self._cut_head = self.vocab_size < self.lm_head.weight.shape[0]
            embeddings = self.embed_tokens.weight.shape[0]
            self._last_id = embeddings - 1 if (embedded_ids or 0) > embeddings else None
            self._windows = [_window(self.config, i) for i in range(len(self.layers))]
            self._window_kinds = frozenset(self._windows)
            self._rope_table: tuple[torch.Tensor, torch.Tensor] | None = None
            self._layer_bytes = [weight_bytes(layer) for layer in self.layers]
            self._head_bytes = weight_bytes(self.norm) + weight_bytes(self.lm_head)

    # -- what a pass costs -------------------------------------------------------------------------------------

    def pass_bytes(self, lo: int = 0, hi: int | None = None, head: bool = True) -> int:
        """Bytes of weights that a pass through layers [lo, hi) reads, with or without norm and head.

        The embedding look-up reads one row and is not counted; a head tied to it is read whole and is counted.
        """
        return sum(self._layer_bytes[lo:hi]) + head * self._head_bytes

    # -- stages ------------------------------------------------------------------------------------------------

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` positions of every layer."""
        return KVCache(self._devices, *self._cache_shape(), capacity, self.dtype)

    def new_rows(self, rows: int, capacity: int) -> RowCache:
        """An empty cache for `rows` sequences of up to `capacity` positions. All layers must be on one device."""
        return RowCache(len(self.layers), *self._cache_shape(), rows, capacity, self.device, self.dtype)

    def _cache_shape(self) -> tuple[int, int]:
        """Heads of keys and values, width of a head."""
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return kv_heads, getattr(self.config, "head_dim", None) or self.hidden_size // heads

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [1, n] -> hidden states [1, n, d]."""
        return self.embed_tokens(ids if self._last_id is None else ids.clamp(max=self._last_id))

    def run_layers(
        self,
        hidden: torch.Tensor,
        cache: KVCache,
        lo: int = 0,
        hi: int | None = None,
        nodes: Nodes | None = None,
    ) -> torch.Tensor:
        """Runs layers [lo, hi) over states that follow what the cache holds of these layers.

        Args:
            hidden: [1, n, d] states.
            cache: receives keys and values.
            lo: the first layer.
            hi: the layer behind the last one; None for all.
            nodes: positions and visibility of a tree; None where the tokens follow one another.

        Returns:
            States [1, n, d] behind the layers.
        """
        n, start = hidden.shape[1], cache.lengths[lo]
        rope = {}
        if self.rotary is not None:
            rope["position_embeddings"] = self._rope(start, n, nodes, cache.capacity)
        elif lo == 0:
            hidden = hidden + self._learned(start, n, nodes)
        cache.reserve(lo, len(self.layers) if hi is None else hi, n)
        masks = {w: attention_mask(n, start, hidden, w, nodes) for w in self._window_kinds}
        return self._through(hidden, cache, lo, hi, masks, rope)

    def run_rows(
        self, hidden: torch.Tensor, cache: RowCache, places: Places, lo: int = 0, hi: int | None = None
    ) -> torch.Tensor:
        """Runs layers [lo, hi) over states [b, n, d] of b sequences; write positions and visibility as in `places`."""
        rope = {}
        if self.rotary is not None:
            rope["position_embeddings"] = self._rope_of(places.positions, cache.capacity)
        elif lo == 0:
            # A sequence near its end is padded to the longer drafts of others: these states are never used.
            positions = places.positions.clamp(max=self.config.max_position_embeddings - 1)
            hidden = hidden + self.learned_positions(None, position_ids=positions)
        cache.open(lo, len(self.layers) if hi is None else hi, places)
        masks = {w: rows_mask(places, hidden, w) for w in self._window_kinds}
        return self._through(hidden, cache, lo, hi, masks, rope)

    def _through(
        self,
        hidden: torch.Tensor,
        cache: KVCache | RowCache,
        lo: int,
        hi: int | None,
        masks: Mapping[int | None, torch.Tensor | None],
        rope: Mapping[str, tuple[torch.Tensor, ...]],
    ) -> torch.Tensor:
        here = hidden.device
        for layer, window, device in zip(self.layers[lo:hi], self._windows[lo:hi], self._devices[lo:hi]):
            if device != here:  # of a target that is spread over several
                hidden, here = hidden.to(device), device
                masks = {w: None if mask is None else mask.to(device) for w, mask in masks.items()}
                rope = {name: tuple(part.to(device) for part in both) for name, both in rope.items()}
            hidden = layer(
                hidden,
                attention_mask=masks[window],
                past_key_values=cache,
                use_cache=True,
                **rope,
            )
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., d] after the last layer -> logits [..., vocab]."""
        return self.unembed(self.norm(hidden))

    def unembed(self, normed: torch.Tensor) -> torch.Tensor:
        """The head without the final norm, for drafters that bring a norm of their own."""
        logits = self._head(normed.to(self.lm_head.weight.device)).to(self.device)
        return logits[..., : self.vocab_size] if self._cut_head else logits

    # -- passes ------------------------------------------------------------------------------------------------

    def prefill(self, ids: torch.Tensor, cache: KVCache, taps: tuple[int, ...] = ()) -> Prefill:
        """Runs a prompt [1, n] into an empty cache; only its last position goes through the head."""
        hidden, done, tapped = self.embed(ids), 0, {}
        for layer in sorted(taps):
            hidden = self.run_layers(hidden, cache, done, layer)
            tapped[layer], done = hidden, layer
        hidden = self.run_layers(hidden, cache, done)
        return Prefill(self.head(hidden[:, -1]), tapped)

    def verify(
        self,
        pending: torch.Tensor,
        draft: Draft,
        cache: KVCache,
        exit_layer: int | None = None,
        at_exit: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Verifies a draft in one pass.

        Args:
            pending: [1, 1] the newest token.
            draft: k tokens behind it.
            cache: holds all tokens before the pending one.
            exit_layer: with `at_exit`, how many layers to run before it is called.
            at_exit: called on the way with the states [1 + k, d] that leave the first `exit_layer` layers.

        Returns:
            Logits [1 + k, vocab] that follow the pending token and each of the draft's tokens.
        """
        nodes = None if draft.parents is None else Nodes.tree(draft.parents)
        if draft.resume is not None:
            hidden, lo = draft.resume.hidden, draft.resume.layer
        else:
            hidden, lo = self.embed(torch.cat([pending, draft.tokens.unsqueeze(0)], dim=1)), 0
        if exit_layer is not None and at_exit is not None:
            if exit_layer > lo:
                hidden, lo = self.run_layers(hidden, cache, lo, exit_layer, nodes), exit_layer
            at_exit(hidden[0])
        if lo < len(self.layers):
            hidden = self.run_layers(hidden, cache, lo, nodes=nodes)
        return self.head(hidden)[0]

    def verify_rows(
        self, pending: torch.Tensor, draft: Draft, cache: RowCache, places: Places
    ) -> torch.Tensor:
        """Verifies drafts of b sequences, as `verify`.

        Args:
            pending: [b, 1] the newest tokens.
            draft: k tokens behind each, a chain.
            cache: holds all tokens before the pending ones.
            places: of the pending and the draft tokens.

        Returns:
            Logits [b, 1 + k, vocab].
        """
        if draft.resume is not None:
            hidden, lo = draft.resume.hidden, draft.resume.layer
        else:
            hidden, lo = self.embed(torch.cat([pending, draft.tokens], dim=1)), 0
        return self.head(self.run_rows(hidden, cache, places, lo))

    @torch.inference_mode()
    def check(self) -> None:
        """Compares the staged forward with the model's own. Raises UserError where their logits differ."""
        ids = torch.arange(24, device=self.device).remainder(self.vocab_size).unsqueeze(0)
        own = self.model(ids, use_cache=False).logits[0, :, : self.vocab_size].float()
        half = ids.shape[1] // 2  # two parts, to check positions and masks behind a filled cache too
        with drivable(self.model):
            cache = self.new_cache(ids.shape[1])
            parts = (self.run_layers(self.embed(part), cache) for part in (ids[:, :half], ids[:, half:]))
            staged = torch.cat([self.head(part)[0] for part in parts]).float()
        scale = own.abs().max().clamp(min=1.0)
        error = ((own - staged).abs().max() / scale).item()
        if not error <= (1e-4 if self.dtype == torch.float32 else 0.1):
            raise UserError(
                f"model type '{self.config.model_type}' cannot be driven layer by layer: its logits differ from the "
                f"model's own by {error:.1e} of their scale"
            )

    # -- positions ---------------------------------------------------------------------------------------------

    def _rope(
        self, start: int, n: int, nodes: Nodes | None, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, n, rotary_dim] of the n positions from `start` on, or of nodes."""
        cos, sin = self._angles(max(capacity, start + n))
        if nodes is None:
            return cos.narrow(1, start, n), sin.narrow(1, start, n)
        positions = self._positions(start, n, nodes)
        return cos.index_select(1, positions), sin.index_select(1, positions)

    def _positions(self, start: int, n: int, nodes: Nodes | None) -> torch.Tensor:
        """[n] positions of the tokens of a pass behind a cache of `start`."""
        if nodes is None:
            return torch.arange(start, start + n, device=self.device)
        m = nodes.offsets.shape[0]
        return nodes.offsets[m - n :] + (start + n - m)

    def _rope_of(self, positions: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [b, n, rotary_dim] of positions [b, n]."""
        cos, sin = self._angles(capacity)
        return cos[0][positions], sin[0][positions]

    def _angles(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, at least capacity, rotary_dim] of all positions, computed once."""
        if self._rope_table is None or self._rope_table[0].shape[1] < capacity:
            positions = torch.arange(capacity, device=self.device).unsqueeze(0)
            # Of the first argument only its dtype and device are read.
            like = torch.empty(1, device=self.device, dtype=self.dtype)
            self._rope_table = self.rotary(like, positions)
        return self._rope_table

    def _learned(self, start: int, n: int, nodes: Nodes | None) -> torch.Tensor:
        """Learned embeddings [1, n, d] of the same positions, added to the token embeddings (OPT)."""
        # Nodes may look further than the answer can reach: what they compute there is never used.
        positions = self._positions(start, n, nodes).clamp(max=self.config.max_position_embeddings - 1)
        return self.learned_positions(None, position_ids=positions.unsqueeze(0))


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
            f"model type '{model.config.model_type}' cannot be driven layer by layer: {reason(error)}"
        ) from error


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


def attention_mask(
    n: int,
    start: int,
    like: torch.Tensor,
    window: int | None = None,
    nodes: Nodes | None = None,
) -> torch.Tensor | None:
    """The attention mask of a pass.

    Args:
        n: positions of the pass.
        start: positions that the cache holds before it.
        like: gives dtype and device.
        window: positions a layer looks back on; None for all.
        nodes: as in `Target.run_layers`.

    Returns:
        Additive mask [1, 1, n, start + n]; None where the attention kernel's own rule (all for a single position,
        causal for an empty cache) is the right one.
    """
    reaches_all = window is None or start + n <= window
    if nodes is None and reaches_all and (n == 1 or start == 0):
        return None
    steps = torch.arange(n, device=like.device)
    m = n if nodes is None else nodes.offsets.shape[0]
    base = start + n - m  # columns that are a sequence
    columns = steps if nodes is None else nodes.offsets
    among = torch.ones(n, n, dtype=torch.bool, device=like.device).tril() if nodes is None else nodes.seen
    allowed = torch.ones(n, base, dtype=torch.bool, device=like.device)
    if window is not None and start + n > window:
        own = columns[m - n :].unsqueeze(1)
        allowed = own + base - torch.arange(base, device=like.device) < window
        among = among & (own - columns < window)
    mask = torch.zeros(n, start + n, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~torch.cat([allowed, among], dim=1), float("-inf")).view(1, 1, n, start + n)


def rows_mask(places: Places, like: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Additive mask [b, 1, n, reach] for `places`; `like` and `window` as in `attention_mask`."""
    back = places.positions.unsqueeze(-1) - places.columns.unsqueeze(1)
    allowed = back >= 0
    if window is not None and places.reach > window:
        allowed &= back < window
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, float("-inf")).unsqueeze(1)


def _window(config: PretrainedConfig, layer: int) -> int | None:
    """The number of positions that a layer attends to, its own included; None for all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def device_of(module: torch.nn.Module) -> torch.device:
    """The device a module runs on: that of accelerate's hook, if it has one, or else that of its weights."""
    hook = getattr(module, "_hf_hook", None)
    where = getattr(hook, "execution_device", None)
    return next(module.parameters()).device if where is None else torch.device(where)
