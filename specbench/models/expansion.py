"""Function-preserving expansion (Net2Net, Chen et al. 2016): a Llama model at the dimensions of a larger one.

Text and acceptance of the expanded model are those of the trained one, its cost is that of the dimensions. Every matrix
is padded with zeros, and what depends on a width is compensated for:

- RMSNorm divides by the mean over all dimensions: weights are scaled by sqrt(old / new width), eps by old / new.
- Attention divides by the square root of the head's width: queries are scaled by sqrt(new / old).
- The place of a rotary pair in the head determines its frequency: old pair i becomes new pair k i, and the rotary base
  is chosen so that pair k i turns as pair i did.
- Grouped heads: a query head goes into the group of its own keys and values.
- Added layers have zeros in the matrices that write, so that they pass their input on. They are inserted between the
  old ones, which keep their relative depth.
- Added tokens have a large negative logit, see `Expansion._exclude_added_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from specbench import CONF
from specbench.system.errors import UserError
from specbench.system.files import read_record
from specbench.system.paths import packaged
from specbench.system.settings import plain

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from transformers import LlamaConfig, PreTrainedModel

Module = TypeVar("Module", bound="torch.nn.Module")

EMBEDDED = "tiny"  # the pair that the embedded family begins with and is expanded from, and its questions
# Keys that such a pair keeps.
OWN = (
    *("name", "target_shape", "draft_shape", "width", "draft_width"),
    *("dtype", "device", "device_map", "graphs", "compile", "init", "draft_layers"),
)

# Powers of two: exact in every dtype. Their product over a state's root mean square (2 to 30 in the embedded family) is
# the distance of an added token's logit from 0.
CONSTANT, ADDED_ROW, NORM_WEIGHT = 2.0**-10, -(2.0**15), 2.0**8

# The axes of each matrix, as named in `Expansion.__init__`: rows, columns.
AXES = {
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("values", "hidden"),
    "o_proj": ("hidden", "attended"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
    "embed_tokens": ("tokens", "hidden"),
    "lm_head": ("tokens", "hidden"),
    "fc": ("hidden", "hidden"),  # of drafters, which join states with it
    "input_proj": ("hidden", "hidden"),  # likewise
    "markov_w1": ("tokens", "rank"),  # of DSpark
    "markov_w2": ("tokens", "rank"),
}
# Norms of heads (Qwen3): that of queries also compensates for the attention's scale.
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions of a model.

    Attributes:
        hidden: width of the states.
        inner: width of the feed-forward part.
        layers: of the model.
        kv_heads: heads of keys and values.
        group: query heads for each of them.
        head_dim: width of a head.
        vocab: tokens, padding included.
    """

    hidden: int
    inner: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, settings: Mapping, name: str = "the model") -> Sizes:
        """The sizes in a config.json or a pair's shape, of any family. Raises UserError if one is missing or none.

        Args:
            settings: the config or shape.
            name: whose it is, for messages.
        """

        def count(*keys: str) -> int:
            value = next((settings[key] for key in keys if settings.get(key) is not None), None)
            if not isinstance(value, int) or value < 1:
                what = f"{' or '.join(keys)} of 1 or more, not {value}"
                raise UserError(f"the shape of '{name}' needs {what}")
            return value

        hidden, heads = count("hidden_size"), count("num_attention_heads")
        kv_heads = count("num_key_value_heads", "num_attention_heads")
        return cls(
            hidden=hidden,
            inner=count("intermediate_size", "ffn_dim"),
            layers=count("num_hidden_layers"),
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_dim=settings.get("head_dim") or hidden // heads,
            vocab=count("vocab_size"),
        )


NAMES = {
    "hidden": "a hidden size",
    "inner": "an intermediate size",
    "layers": "a number of layers",
    "kv_heads": "a number of key/value heads",
    "group": "a number of query heads per key/value head",
    "head_dim": "a head width",
    "vocab": "a vocabulary",
}


def layer_at(layers: int, old: int, new: int) -> int:
    """Number of layers of a model expanded from `old` to `new` layers that compute what its first `layers` did.

    The old layer of index i has the index `layer_at(i, old, new)`.
    """
    return layers * new // old


class Expansion:
    """How a Llama model becomes one of another shape that computes the same.

    Args:
        settings: the config of the model to expand, as a dictionary.
        shape: the config of any family's model, with the new dimensions; by default, the model's own number of layers.
        name: of what is built, for messages.

    Raises:
        UserError: a dimension of the shape is too small, or the model has another anatomy.
    """

    def __init__(self, settings: Mapping[str, Any], shape: Mapping[str, Any], name: str):
        if settings.get("num_hidden_layers") and shape.get("num_hidden_layers") is None:
            shape = {**shape, "num_hidden_layers": settings["num_hidden_layers"]}
        self.settings, self.shape = dict(settings), dict(shape)
        _check_anatomy(self.settings, name)
        self.old, self.new = old, new = Sizes.of(settings, name), Sizes.of(shape, name)
        for key, what in NAMES.items():
            least, there = getattr(old, key), getattr(new, key)
            if there < least:
                hint = f" (pair.draft_layers={there} cuts a draft model)" if key == "layers" else ""
                raise UserError(
                    f"pair.init=expanded cannot build '{name}' from the embedded family: it has {what} of {there}, "
                    f"and {least} is the least{hint}"
                )
        if new.vocab > old.vocab and new.hidden == old.hidden:
            raise UserError(
                f"pair.init=expanded cannot build '{name}': a larger vocabulary needs a hidden size above {old.hidden}"
            )
        if self.shape.get("tie_word_embeddings", False) > settings.get("tie_word_embeddings", False):
            raise UserError(
                f"pair.init=expanded cannot build '{name}': it ties head and embedding, the model does not"
            )
        if new.hidden % (new.kv_heads * new.group):
            raise UserError(
                f"pair.init=expanded cannot build '{name}': Llama needs a hidden size that is a multiple of the number "
                f"of heads, not {new.hidden} with {new.kv_heads * new.group}"
            )
        half, self._stride = old.head_dim // 2, (new.head_dim // 2) // (old.head_dim // 2)
        rotary = [self._stride * i for i in range(half)]
        rotary += [new.head_dim // 2 + i for i in rotary]
        heads = [(kv, kv * new.group + i) for kv in range(old.kv_heads) for i in range(old.group)]
        # New indices of the old entries of each axis.
        self._indices = {
            "hidden": list(range(old.hidden)),
            "inner": list(range(old.inner)),
            "tokens": list(range(old.vocab)),
            "queries": [head * new.head_dim + i for _, head in heads for i in rotary],
            "attended": [head * new.head_dim + i for _, head in heads for i in range(old.head_dim)],
            "keys": [head * new.head_dim + i for head in range(old.kv_heads) for i in rotary],
            "values": [head * new.head_dim + i for head in range(old.kv_heads) for i in range(old.head_dim)],
            "head": rotary,
        }

    def layers(self, count: int) -> int:
        """Number of layers of the new model that compute what the first `count` of the old one did."""
        return layer_at(count, self.old.layers, self.new.layers)

    def anatomy(self) -> str:
        """What was built, for tables: "Llama of 36 layers x 4096"."""
        return f"Llama of {self.new.layers} layers x {self.new.hidden}"

    def config(self) -> LlamaConfig:
        """The config of the new model; settings that do not depend on dimensions are those of the old one."""
        from transformers import LlamaConfig

        old, new = self.old, self.new
        base = self.settings["rope_parameters"]["rope_theta"]
        changes = {
            "hidden_size": new.hidden,
            "intermediate_size": new.inner,
            "num_hidden_layers": new.layers,
            "num_attention_heads": new.kv_heads * new.group,
            "num_key_value_heads": new.kv_heads,
            "head_dim": new.head_dim,
            "vocab_size": new.vocab,
            "max_position_embeddings": self.shape.get("max_position_embeddings")
            or self.settings["max_position_embeddings"],
            "tie_word_embeddings": self.shape.get("tie_word_embeddings", False),
            "rms_norm_eps": self.settings["rms_norm_eps"] * old.hidden / new.hidden,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": base ** ((new.head_dim // 2) / (self._stride * (old.head_dim // 2))),
            },
        }
        return LlamaConfig(**(self.settings | changes | {"attn_implementation": "sdpa"}))

    def build(
        self,
        make: Callable[[LlamaConfig], Module],
        source: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Module:
        """Builds the new module, in eval mode without gradients; the host never holds more of it than one small block.

        Args:
            make: makes a module from a config.
            source: the old module, of Llama's parts under Llama's names, in float32.
            device: of the new one.
            dtype: of the new one.
        """
        import torch

        config = self.config()
        config.dtype = dtype
        with torch.device("meta"):
            module = make(config)
        _materialise(module, config, device, dtype)
        with torch.no_grad():
            for name, weight in source.state_dict().items():
                self._copy(name, weight, module)
            if self._grows:
                self._exclude_added_tokens(module)
        return module.eval().requires_grad_(False)

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """States [..., old width] -> [..., new width]."""
        from torch.nn.functional import pad

        return pad(states, (0, self.new.hidden - self.old.hidden))

    @property
    def _grows(self) -> bool:
        return self.new.vocab > self.old.vocab

    def _copy(self, name: str, weight: torch.Tensor, module: torch.nn.Module) -> None:
        """Copies a parameter of the old module to its place in the new one."""
        into = module.get_parameter(
            re.sub(r"(?<=layers\.)\d+", lambda number: str(self.layers(int(number[0]))), name)
        )
        kind = name.split(".")[-2]
        if kind in HEAD_NORMS:
            scale = 1.0 if kind == HEAD_NORMS[0] else (self.old.head_dim / self.new.head_dim) ** 0.5
            into[self._along("head", weight.shape[0], into.device)] = (scale * weight).to(
                into.device, into.dtype
            )
            return
        if kind not in AXES:  # a norm
            scaled = weight * (self.old.hidden / self.new.hidden) ** 0.5
            into[self._along("hidden", weight.shape[0], into.device)] = scaled.to(into.device, into.dtype)
            return
        rows, columns = (
            self._along(axis, length, into.device) for axis, length in zip(AXES[kind], weight.shape)
        )
        if kind == "q_proj":
            weight = weight * (self.new.head_dim / self.old.head_dim) ** 0.5
        into[rows.unsqueeze(1), columns] = weight.to(into.device, into.dtype)

    def _along(self, axis: str, length: int, device: torch.device) -> torch.Tensor:
        """New indices of the old entries of a weight's axis; along "hidden" several states may be concatenated."""
        import torch

        if axis == "rank":
            return torch.arange(length, device=device)
        indices = torch.tensor(self._indices[axis], device=device)
        states = length // len(indices)
        return torch.cat([indices + i * self.new.hidden for i in range(states)])

    def _exclude_added_tokens(self, module: torch.nn.Module) -> None:
        """Gives every added token a logit below -200, so that it is neither chosen nor drawn.

        One added dimension of every token's embedding holds a small constant, which no layer reads or writes, and whose
        square is lost in the sums that norms divide by (1e-6 of 50 and more). The last norm alone lets it through, to
        the head, whose rows of added tokens hold a large negative number there. Where head and embedding are tied, the
        constant adds the same to the logits of all old tokens: some 1e-4.
        """
        dimension, scale = self.old.hidden, (self.old.hidden / self.new.hidden) ** 0.5
        for name, parameter in module.named_parameters(remove_duplicate=False):
            kind = name.split(".")[-2]
            if kind == "embed_tokens":
                parameter[:, dimension] = CONSTANT
            elif kind == "lm_head":  # after a tied embedding
                parameter[self.old.vocab :, dimension] = ADDED_ROW
            elif kind == "norm":
                parameter[dimension] = NORM_WEIGHT * scale


def expand_model(
    source: PreTrainedModel, expansion: Expansion, device: torch.device, dtype: torch.dtype
) -> Any:
    """The expanded model, ready to decode; the ids that end an answer are the source's."""
    from transformers import LlamaForCausalLM

    model = expansion.build(LlamaForCausalLM, source, device, dtype)
    model.generation_config = source.generation_config
    return model


def wide(settings: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The shape of a model widened to `width` in every matrix; heads grow to a width of up to 128, then in number.

    Raises:
        UserError: the width is no multiple of the model's own.
    """
    old = Sizes.of(settings)
    times, rest = divmod(width, old.hidden)
    if rest or not times:
        raise UserError(
            f"the width of an expanded model must be a multiple of its own, {old.hidden}, not {width}"
        )
    wider = min(times, max(1, 128 // old.head_dim))
    while old.kv_heads * times % wider:
        wider -= 1
    heads = old.kv_heads * times // wider
    return dict(settings) | {
        "hidden_size": width,
        "intermediate_size": old.inner * times,
        "num_attention_heads": heads * old.group,
        "num_key_value_heads": heads,
        "head_dim": old.head_dim * wider,
    }


def embedded(pair_cfg: DictConfig) -> DictConfig:
    """Returns a pair that is to be expanded with the embedded family's models, parts and presets instead of its own.

    Any other pair, and one whose target is a local folder, is returned unchanged.
    """
    if pair_cfg.init != "expanded":
        return pair_cfg
    from specbench.models.names import local_folder  # late: a misspelt name need not wait for torch

    if local_folder(pair_cfg.target):
        return pair_cfg
    from omegaconf import DictConfig, OmegaConf

    files = [OmegaConf.load(CONF / "pair" / f"{name}.yaml") for name in ("_base", EMBEDDED)]
    retained = {key: pair_cfg[key] for key in OWN}
    merged = OmegaConf.merge(*files, retained)
    assert isinstance(merged, DictConfig)
    del merged["defaults"]
    return merged


def expansion_of(
    settings: Mapping[str, Any], shape: DictConfig | None, width: int | None, name: str
) -> Expansion | None:
    """How a model of a pair is expanded; None if neither a shape nor a width is given."""
    if width is not None:
        return Expansion(settings, wide(settings, width), name)
    return None if shape is None else Expansion(settings, plain(shape), name)


def check(pair_cfg: DictConfig, draft: str | None) -> None:
    """Raises UserError if a pair cannot be expanded; reads config.json of its models, but no weights.

    Args:
        pair_cfg: its configuration, as `embedded` returns it.
        draft: the draft model that will be loaded; None for none.
    """
    shape, width = pair_cfg.target_shape, pair_cfg.width
    if (shape is None) == (width is None):
        raise UserError("pair.init=expanded takes either pair.target_shape or pair.width: set one of them")
    expansion_of(_settings(pair_cfg.target), shape, width, pair_cfg.name)
    if draft is not None:
        settings = _settings(draft)
        if draft == pair_cfg.draft and pair_cfg.draft_layers is not None:
            settings["num_hidden_layers"] = min(pair_cfg.draft_layers, settings["num_hidden_layers"])
        if pair_cfg.draft_shape is not None and pair_cfg.draft_width is not None:
            raise UserError("set pair.draft_shape or pair.draft_width, not both")
        name = f"the draft model of {pair_cfg.name}"
        expansion_of(settings, pair_cfg.draft_shape, pair_cfg.draft_width, name)


def _settings(folder: str) -> dict[str, Any]:
    return read_record(packaged(folder) / "config.json")


def _check_anatomy(settings: Mapping[str, Any], name: str) -> None:
    """Raises UserError for what is not plain Llama: added biases or other rotary angles would change the function."""
    rope = settings.get("rope_parameters") or {}
    plain_llama = settings.get("model_type") == "llama" and rope.get("rope_type") == "default"
    if not plain_llama or settings.get("attention_bias") or settings.get("mlp_bias"):
        raise UserError(
            f"pair.init=expanded cannot build '{name}': only Llama models without biases and rotary scaling can be "
            f"expanded, not one of type '{settings.get('model_type')}'"
        )


def _materialise(
    module: torch.nn.Module, config: LlamaConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Fills a module of the meta device with zeros, which are written and not only reserved.

    Reading pages that were never written costs less than reading memory.
    """
    import torch
    from transformers import PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def put(name: str, part: torch.nn.Module | torch.nn.Parameter) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, part)

    for name, parameter in list(module.named_parameters()):
        zeros = torch.empty(parameter.shape, dtype=dtype, device=device).zero_()
        put(name, torch.nn.Parameter(zeros, requires_grad=False))
    for name, part in list(module.named_modules()):
        if isinstance(part, LlamaRotaryEmbedding):
            with device:
                put(name, LlamaRotaryEmbedding(config))
    if isinstance(module, PreTrainedModel):
        module.tie_weights()
