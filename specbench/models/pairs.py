"""Model pairs: target, draft model, tokenizer, chat template, stop tokens; the vocabularies must agree.

transformers takes seconds to import, so it is imported where a model is loaded: a check of names does not wait for it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from jinja2 import TemplateError
from safetensors import SafetensorError

from specbench.decoding.model.graphs import Options, set_options
from specbench.models.expansion import Expansion, embedded, expand_model, expansion_of
from specbench.models.gguf import converted, gguf_file, is_gguf, source_of
from specbench.models.names import local_folder
from specbench.models.packages import fetched, is_package
from specbench.models.surgery import cut, embedding_names, share_embeddings, shares_embeddings
from specbench.system.errors import UserError, one_line, out_of_memory, warn
from specbench.system.paths import packaged
from specbench.system.settings import plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from omegaconf import DictConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specbench.decoding.drafter import Needs
    from specbench.decoding.model.staged_model import StagedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SWITCH = "SPECBENCH_COMPILE"  # an environment variable; 0: layers on a CPU are compiled where that is asked for alone
# Any of these makes a tokenizer; tokenizer_config.json alone does not.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# For models made from their shape alone: real text in real proportions, within every vocabulary that we know of.
STAND_IN = "specbench/tiny/weights/tokenizer"
# What a model's logits are checked on: some 300 tokens for most tokenizers.
SAMPLE = (
    "Please read the following report and tell me in two or three sentences what it is about. On Monday morning the "
    "ferry to the island left the harbour twenty minutes late, because a lorry with fresh bread had been held up on "
    "the coast road. The captain, who has made this journey for more than thirty years, decided to wait: the bakery on "
    "the island closed last winter, and without the lorry there would have been no bread for two days. Most of the 148 "
    "passengers did not mind. A school class from the mainland used the time to draw the gulls on the pier, and two "
    "engineers finished a long discussion about the new wind turbines. Their question was simple: how much power can "
    "three turbines give when the wind blows at 9 metres per second, and is that enough for 420 houses? They found "
    'that it was enough in spring and in autumn, but not on quiet days in July. "Then we need a battery," said the '
    "younger one, and wrote down a few numbers. At ten past nine the ferry was on its way, and an hour later everybody "
    "had arrived. In the evening the mayor thanked the captain and promised that a small shop would open before the "
    "end of the year, with bread, milk, newspapers and a table where people can sit and talk."
)
MANY_PARAMETERS = 200_000_000  # of random weights: drawing more takes long enough to be told of
USER_WORDS = "WORDS OF THE USER"  # which no template writes by itself
GENERATION = "generation_config.json"
# What templates are told the date is: by today's, prompts would differ from day to day. The one of Llama 3's own.
TODAY = datetime(2024, 7, 26)
# The function that templates call for it, in their own language: transformers hands them no functions.
DATE = "{% macro strftime_now(form) %}{{ form"
DATE += "".join(f"|replace('%{c}', '{TODAY.strftime('%' + c)}')" for c in (*"aAbBdmyYHIMSpj", "-d", "-m"))
DATE += " }}{% endmacro %}"
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]  # code, for who sets trust_remote_code
SAFETENSORS = "*.safetensors"
WEIGHT_FILES = [SAFETENSORS, "*.bin", "*.pt"]
CONSOLIDATED = "consolidated*"  # Mistral's second copy of the weights, which transformers does not read

# Given nothing but .bin files, transformers starts a thread that talks to the hub: not while we measure.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


@dataclass
class Pair:
    """A loaded pair, ready to measure: models in eval mode without gradients, on one device, in one dtype.

    Attributes:
        name: of the pair.
        target: the model that verifies.
        draft: the draft model; None unless asked for.
        tokenizer: of both.
        stop_ids: token ids that end an answer.
        device: of the models.
        dtype: of the models.
        context_length: positions that every loaded model has.
        vocab_size: ids that the tokenizer has; heads may be padded further.
        parts: trained parts of methods by name, each a local path or a hub id.
        init: "pretrained", "random" or "expanded".
        chat_template: Jinja text.
        template_kwargs: variables for the template.
        expansion: how the target was expanded, for trained parts that work at its width; None if it was not.
        draft_expansion: the same of the draft model.
        source: what the target's weights were made from, where that is not the checkpoint's own form:
            "dequantised from Q4_1".
        width: what the target's passes are padded to, as in `StagedModel`.
        trimmed: folder of the vocabulary map that draft heads are trimmed by, and how many of its tokens they keep,
            None for all of them; None: heads stay whole.
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    context_length: int
    vocab_size: int
    parts: dict[str, str]
    init: str
    chat_template: str
    template_kwargs: dict = field(default_factory=dict)
    expansion: Expansion | None = None
    draft_expansion: Expansion | None = None
    source: str | None = None
    width: int | None = None
    trimmed: tuple[str, int | None] | None = None

    @cached_property
    def staged(self) -> StagedModel:
        """The target, layer by layer: the one that the engine verifies with and drafters build on."""
        from specbench.decoding.model.staged_model import StagedModel  # late: it takes seconds

        return StagedModel(self.target, width=self.width)

    @property
    def exported_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with the pair's own chat template, for other programs."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = self.chat_template
        return tokenizer

    @property
    def anatomy(self) -> str | None:
        """What an expanded target is, for tables: "Llama of 36 layers x 4096"; None for any other."""
        return None if self.expansion is None else self.expansion.anatomy()

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation, `[{"role": ..., "content": ...}]`, up to where the answer begins."""
        return self.encode(self.rendered(messages))

    def rendered(self, messages: list[dict]) -> str:
        """The text that the template makes of a conversation, up to where the answer begins.

        Raises:
            UserError: the template refuses the conversation, such as one with a system message.
        """
        template = self.chat_template
        if "strftime_now" in template and "strftime_now" not in self.template_kwargs:
            template = DATE + template
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
        except TemplateError as error:
            raise UserError(f"the chat template of pair '{self.name}' refuses: {one_line(error)}") from error
        return text

    @property
    def prompting(self) -> str:
        """A digest of what prompts and the ends of answers depend on beside the conversation."""
        parts = [self.chat_template, self.template_kwargs, sorted(self.stop_ids), self.tokenizer.get_vocab()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def user_turn(self, messages: list[dict]) -> tuple[str, str]:
        """What the template writes around the user's next turn, from the beginning up to where the answer begins.

        Args:
            messages: the conversation before that turn.

        Returns:
            The text before the user's words, and the text after them.

        Raises:
            UserError: the template does not write what the user says.
        """
        text = self.rendered([*messages, {"role": "user", "content": USER_WORDS}])
        before, written, after = text.rpartition(USER_WORDS)
        if not written:
            raise UserError(f"the chat template of pair '{self.name}' does not write what the user says")
        return before, after

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that holds its special tokens, BOS included: no second one is added."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sample_ids(self) -> list[int]:
        """Token ids of a prompt of ordinary text, the same for every pair, for `check_staged`."""
        return self.prompt_ids([{"role": "user", "content": SAMPLE}])

    def decode(self, ids: list[int]) -> str:
        """The text of an answer, without its stop token and other special tokens."""
        text_ids = [i for i in ids if i not in self.stop_ids]
        text: Any = self.tokenizer.decode(
            text_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def load_pair(
    pair_cfg: DictConfig,
    seed: int,
    with_draft: bool,
    weights: bool = True,
    width: int | None = None,
    trimmed: tuple[str, int | None] | None = None,
) -> Pair:
    """Loads what `conf/pair/*.yaml` describes; everything is checked before the first weight is read.

    Args:
        pair_cfg: the configuration of the pair.
        seed: draws the weights where `init` is "random".
        with_draft: whether the draft model is loaded, too.
        weights: whether the target's are read; without them it serves for what its tokenizer and its config tell.
        width: as in `Pair`.
        trimmed: likewise.

    Raises:
        UserError: a model, tokenizer or template is missing or gated, the vocabularies of draft and target differ, or
            the device is too small.
    """
    cfg, dtype = embedded(pair_cfg), DTYPES[pair_cfg.dtype]
    device = choose_device(pair_cfg.device) if weights else torch.device("meta")
    prepare_device(device)
    if with_draft and cfg.draft is None:
        raise UserError(f"pair '{cfg.name}' has no draft model: set pair.draft")
    target = _Source(cfg.target, cfg.target_revision, cfg, cfg.target_shape, cfg.width)
    draft = (
        _Source(cfg.draft, cfg.draft_revision, cfg, cfg.draft_shape, cfg.draft_width) if with_draft else None
    )
    standing_in = target.folder is None and cfg.tokenizer is None
    source = target if cfg.tokenizer is None else _Source(cfg.tokenizer, None, cfg)
    tokenizer = (_Source(STAND_IN, None, cfg) if standing_in else source).tokenizer()
    chat_template = tokenizer.chat_template if standing_in else cfg.chat_template or tokenizer.chat_template
    if isinstance(chat_template, dict):  # of several by name, such as for the use of tools
        chat_template = chat_template.get("default")
    if not chat_template:
        raise UserError(f"the tokenizer of pair '{cfg.name}' has no chat template: set pair.chat_template")
    config = target.config()
    check_covered(tokenizer, config, cfg.target)
    if draft:
        draft_config = draft.config()
        if not standing_in and draft.has_tokenizer():
            ignored = set() if cfg.same_added_tokens else set(tokenizer.added_tokens_decoder)
            check_same_tokens(tokenizer, draft.tokenizer(), cfg.target, cfg.draft, ignored)
        check_covered(tokenizer, draft_config, cfg.draft)

    loaded = target.model(dtype, device, seed, cfg.device_map) if weights else None
    target_model = target.without_weights() if loaded is None else loaded
    draft_model = draft.model(dtype, device, seed + 1, layers=cfg.draft_layers) if draft else None
    if draft_model is not None and loaded is not None and shares_embeddings(draft_model):
        share_embeddings(draft_model, loaded, (cfg.draft, cfg.target))
    models = [model for model in (target_model, draft_model) if model is not None]
    for model in models:
        set_options(model, Options(pair_cfg.graphs is not False, compiles(pair_cfg.compile, device)))
    configs = [model.config.get_text_config() for model in models]
    return Pair(
        name=cfg.name,
        target=target_model,
        draft=draft_model,
        tokenizer=tokenizer,
        stop_ids=find_stop_ids(target_model, tokenizer) if cfg.stop_ids is None else frozenset(cfg.stop_ids),
        device=device,
        dtype=dtype,
        context_length=min(config.max_position_embeddings for config in configs),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        parts={name: str(packaged(path)) for name, path in cfg.parts.items() if path is not None},
        init=cfg.init,
        chat_template=chat_template,
        template_kwargs=plain(cfg.template_kwargs),
        expansion=target.expansion,
        draft_expansion=draft.expansion if draft else None,
        source=source_of(target.folder),
        width=width,
        trimmed=trimmed,
    )


def with_part(pair_cfg: DictConfig, folder: str | None) -> DictConfig:
    """A pair's configuration with a trained part as draft model: whole, and of as many layers as it has."""
    from omegaconf import OmegaConf

    part_settings: dict[str, Any] = {"draft": folder, "draft_layers": None}
    if pair_cfg.init == "expanded" and pair_cfg.draft_shape is not None:
        part_settings["draft_shape"] = {"num_hidden_layers": None}
    merged: Any = OmegaConf.merge(pair_cfg, part_settings)
    return merged


def pair_for(pair_cfg: DictConfig, needs: Needs) -> DictConfig:
    """A pair's configuration as a drafter with these needs has it: its part may bring the draft model with it."""
    return with_part(pair_cfg, needs.draft_of(pair_cfg)) if needs.part else pair_cfg


def draft_of(pair: Pair) -> PreTrainedModel:
    """The draft model of a pair. Raises UserError where the pair was loaded without."""
    if pair.draft is None:
        raise UserError(f"pair '{pair.name}' was loaded without a draft model")
    return pair.draft


def model_folder(name: str, packages: Mapping) -> Path | None:
    """The folder that the model of a package or of a GGUF file becomes, which is made once; None for any other name.

    Args:
        name: of the model.
        packages: of the pair.

    Raises:
        UserError: it cannot be fetched or read.
    """
    if is_package(name):
        return converted(fetched(name, packages))
    return converted(gguf_file(name)) if is_gguf(name) else None


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one, each process its own where several were launched.

    Raises UserError for a device that this machine does not have.
    """
    if name == "auto":
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"several processes cannot share pair.device={name}: use auto, which gives each its own"
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"pair.device '{name}' is not a device: use auto, cpu or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"pair.device is '{name}', but this machine has {torch.cuda.device_count()} CUDA devices"
        )
    # With its number: torch takes no other for the current device.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def prepare_device(device: torch.device) -> None:
    """Makes a GPU ready to decode on; on a CPU there is nothing to do.

    It becomes the current device of this process, for whatever names none. Attention never takes cuDNN's kernels: those
    need a plan, tens of ms of the host's time, for each new number of keys, and every decoded token is a new number.
    That holds for the whole process, and so for transformers' generate, too.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)


def place_weights(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a module to a device, and its parameters alone to a dtype.

    Its buffers keep theirs: frequencies of rotary positions in bfloat16 put the cosine of position 512 wrong by 0.4.
    """
    module.to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as the configuration names it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def compiles(setting: bool | None, device: torch.device) -> bool:
    """Whether a pair's models are compiled, by its setting `compile`: if that is null, on a CPU alone."""
    return device.type == "cpu" and os.environ.get(SWITCH) != "0" if setting is None else setting


def find_stop_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id that the target's generation config, its config or the tokenizer names.

    A draft model's config has no say: published ones carry ids of another family.
    """
    named = (
        target.generation_config.eos_token_id,
        target.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    lists = ([ids] if isinstance(ids, int) else ids or [] for ids in named)
    return frozenset(int(i) for ids in lists for i in ids)


def check_covered(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, name: str) -> None:
    """Raises UserError unless the model has a logit for every id of the tokenizer; more do no harm."""
    rows, top = config.vocab_size, max(tokenizer.get_vocab().values())
    if rows <= top:
        raise UserError(
            f"the vocabularies differ: '{name}' has {rows} logits, the pair's tokenizer has ids up to {top}"
        )


def check_same_tokens(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    target_name: str,
    draft_name: str,
    ignored: Collection[int] = (),
) -> None:
    """Raises UserError unless the draft's tokenizer gives every id of the target's, but `ignored`, the same string."""
    tokens, others = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    compared = sorted(tokens.keys() - set(ignored))
    differing = next((i for i in compared if tokens[i] != others.get(i)), None)
    if differing is not None:
        other = "nothing" if differing not in others else repr(others[differing])
        raise UserError(
            f"the vocabularies differ: id {differing} is {tokens[differing]!r} in '{target_name}' "
            f"but {other} in '{draft_name}'"
        )


class _Source:
    """One model of a pair: a local folder, a package or GGUF file that becomes one, or a hub id.

    Of a hub id the small files come at once, the weights later.

    With random weights and a `shape`, nothing is fetched at all: `folder` is None. To be expanded, it has a shape, or a
    width; how it was expanded is known when the model is loaded.
    """

    def __init__(
        self,
        name: str,
        revision: str | None,
        cfg: DictConfig,
        shape: DictConfig | None = None,
        width: int | None = None,
    ):
        self.name, self.revision, self.cfg, self.shape, self.width = name, revision, cfg, shape, width
        self.expansion: Expansion | None = None
        self.path: Path | str = name  # what transformers is given: a hub id keeps its revision
        self.folder = local_folder(name)
        if self.folder is None and cfg.init == "random" and shape is not None:
            return
        self.folder = self.folder or model_folder(name, cfg.packages)
        if self.folder is not None:
            self.path = self.folder
        else:
            self.folder = fetch_small_files(name, revision, cfg.gated)

    def config(self) -> PretrainedConfig:
        """The config of the language model (for a model that also sees or hears: of that part)."""
        from transformers import AutoConfig

        if self.folder is None:
            assert self.shape is not None  # else the small files would have been fetched
            return AutoConfig.for_model(**plain(self.shape))
        with _one_line(self):
            full_config = AutoConfig.from_pretrained(
                self.folder, trust_remote_code=self.cfg.trust_remote_code
            )
        return full_config.get_text_config()

    def has_tokenizer(self) -> bool:
        """Whether the folder holds a file that makes a tokenizer."""
        return self.folder is not None and any((self.folder / file).is_file() for file in TOKENIZER_FILES)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises UserError where there is none."""
        from transformers import AutoTokenizer

        if not self.has_tokenizer():
            raise UserError(f"there is no tokenizer in '{self.name}': name one as pair.tokenizer")
        with _one_line(self):
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.cfg.trust_remote_code)

    def model(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        device_map: str | None = None,
        layers: int | None = None,
    ) -> PreTrainedModel:
        """The model, ready to decode; layers: only so many of its first ones."""
        if self.cfg.init != "expanded" or (self.shape is None and self.width is None):
            return self._load(dtype, device, seed, device_map, layers)
        source = self._load(torch.float32, torch.device("cpu"), seed, None, layers)
        if shares_embeddings(source):
            raise UserError(f"'{self.name}' has the embeddings of its target: it cannot be expanded")
        self.expansion = expansion_of(source.config.to_dict(), self.shape, self.width, self.cfg.name)
        assert self.expansion is not None  # there is a shape or a width
        with _one_line(self):
            return expand_model(source, self.expansion, device, dtype)

    def without_weights(self) -> PreTrainedModel:
        """The model of the config, on torch's "meta" device."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        with _one_line(self), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                self.config(), trust_remote_code=self.cfg.trust_remote_code
            )
            if self.folder is not None and (self.folder / GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model

    def _load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        device_map: str | None,
        layers: int | None,
    ) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        # Attention is left to transformers: torch's own kernel, or a family's own code where it caps its scores.
        options = {"dtype": dtype, "trust_remote_code": self.cfg.trust_remote_code}
        with _one_line(self):
            if self.cfg.init == "random":
                if (count := self.without_weights().num_parameters()) > MANY_PARAMETERS:
                    print(f"making random weights ({count / 1e9:.1f} B parameters) ...", file=sys.stderr)
                torch.manual_seed(seed)
                with device:
                    model = AutoModelForCausalLM.from_config(self.config(), **options)
            else:
                with _without_load_report():
                    loaded: Any = AutoModelForCausalLM.from_pretrained(
                        self.path,
                        revision=self.revision or "main",
                        device_map=device_map or {"": device},
                        weights_only=True,
                        output_loading_info=True,
                        ignore_mismatched_sizes=True,  # they are refused by name, below
                        **options,
                    )
                model, info = loaded
                self._check_weights(model, info)
        if any(parameter.is_meta for parameter in model.parameters()):  # left on the disk by accelerate
            raise UserError(f"'{self.name}' does not fit into the memory of the devices of this machine")
        if layers is not None:
            if not 0 < layers <= (depth := model.config.num_hidden_layers):
                raise UserError(
                    f"pair.draft_layers is {layers}, and '{self.name}' has {depth} layers: "
                    "set pair.draft_layers=null for all of them"
                )
            if getattr(model.config, "quantization_config", None) is not None:
                raise UserError(f"the weights of '{self.name}' are quantised: set pair.draft_layers=null")
            model = cut(model, list(range(layers)))
            place_weights(model, device, dtype)
        return model.eval().requires_grad_(False)

    def _check_weights(self, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
        """Warns of weights that the config does not use.

        Args:
            model: as transformers has loaded it.
            info: what it tells of that.

        Raises:
            UserError: weights are missing, or have another shape than the config says.
        """
        if info["mismatched_keys"]:
            tensor, size, expected = min(info["mismatched_keys"])
            raise UserError(
                f"the weights of '{self.name}' do not fit its config: {tensor} has the shape {list(size)}, but the "
                f"config says {list(expected)}"
            )
        if unused := sorted(info["unexpected_keys"]):
            warn(f"'{self.name}' has {len(unused)} tensors that its config does not use, such as {unused[0]}")
        # transformers fills what a checkpoint lacks with random numbers; a benchmark must not.
        lacking = set(info["missing_keys"])
        if shares_embeddings(model):
            lacking -= embedding_names(model)
        if lacking:
            missing = sorted(lacking)
            raise UserError(f"the weights of '{self.name}' lack {len(missing)} tensors, such as {missing[0]}")


def fetch_small_files(
    name: str,
    revision: str | None = None,
    gated: bool = False,
    patterns: Collection[str] = SMALL_FILES,
    ignored: str | None = None,
) -> Path:
    """The folder in the hub's cache with a model's config and tokenizer; without a network, what is cached.

    Args:
        name: hub id.
        revision: of it; None: the newest.
        gated: whether the hub asks for a licence to be accepted first.
        patterns: of the names of other files to fetch in place of these.
        ignored: pattern of those among them to leave out.

    Raises UserError for a model or revision that is not there, is gated, or cannot be reached.
    """
    accept = "accept its licence on its page, then log in with `hf auth login` or set HF_TOKEN"
    hint = f"; it is gated: {accept}" if gated else ""
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=ignored)
        )
    except GatedRepoError as error:
        raise UserError(f"'{name}' is gated: {accept}") from error
    except RevisionNotFoundError as error:
        raise UserError(f"model '{name}' has no revision '{revision}'") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"no model '{name}': neither a local folder nor on the hub{hint}") from error
    except LocalEntryNotFoundError as error:
        pinned = "" if revision is None else f" --revision {revision}"
        raise UserError(
            f"no model '{name}': not a local folder, not in the hub's cache, and the hub cannot be reached; "
            f"fetch it where there is a network with `hf download {name}{pinned}`, or all that the pair has with "
            f"`specbench fetch PAIR`{hint}"
        ) from error


def fetch_with_weights(name: str, revision: str | None = None, gated: bool = False) -> Path:
    """As `fetch_small_files`, with the weights: as safetensors, or where there are none, as torch saved them."""
    folder = fetch_small_files(name, revision, gated, [*SMALL_FILES, SAFETENSORS], CONSOLIDATED)
    if any(folder.glob(SAFETENSORS)):
        return folder
    return fetch_small_files(name, revision, gated, [*SMALL_FILES, *WEIGHT_FILES])


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Without what transformers reports of the weights that a checkpoint lacks: they are judged by the caller."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def _one_line(source: _Source) -> Iterator[None]:
    """What transformers says about a broken or unknown model, in one line with the model's name."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"'{source.name}' does not fit into the memory of {source.cfg.device}") from error
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        # ImportError: a package that quantised weights, or the checkpoint's own code, need; RuntimeError: of torch's
        # own files, where they were cut short
        if out_of_memory(error):
            raise
        raise UserError(f"cannot load '{source.name}': {one_line(error)}") from error
