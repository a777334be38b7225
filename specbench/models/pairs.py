"""Model pairs: target, draft model, tokenizer, chat template, stop tokens; the vocabularies must agree.

transformers takes seconds to import, so it is imported where a model is loaded: a check of names does not wait for it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from specbench.decoding.model.graphs import Options, set_options
from specbench.models.devices import DTYPES, choose_device, compiles, prepare_device
from specbench.models.expansion import Expansion, embedded
from specbench.models.gguf import source_of
from specbench.models.model_source import Source
from specbench.models.names import draft_source
from specbench.models.surgery import share_embeddings, shares_embeddings
from specbench.system.errors import UserError, one_line
from specbench.system.paths import packaged
from specbench.system.settings import plain

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specbench.decoding.drafter import Needs
    from specbench.decoding.model.staged_model import StagedModel

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
USER_WORDS = "WORDS OF THE USER"  # which no template writes by itself
# The date for templates, from Llama 3's own: with the current one, prompts would differ from day to day.
TODAY = datetime(2024, 7, 26)
# The function that templates call for the date, as a Jinja macro: transformers cannot pass them functions.
DATE = "{% macro strftime_now(form) %}{{ form"
DATE += "".join(f"|replace('%{c}', '{TODAY.strftime('%' + c)}')" for c in (*"aAbBdmyYHIMSpj", "-d", "-m"))
DATE += " }}{% endmacro %}"


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
        context_length: positions that every loaded model supports.
        vocab_size: ids that the tokenizer has, and the models have rows for; heads may be padded further.
        parts: trained parts of methods by name, each a local path or a hub id.
        init: "pretrained", "random" or "expanded".
        chat_template: Jinja text.
        template_kwargs: variables for the template.
        expansion: how the target was expanded, for trained parts that work at its width; None if it was not.
        draft_expansion: the same of the draft model.
        source: the origin of the target's weights, if they were converted: "dequantised from Q4_1".
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
        """The target, layer by layer, which the engine verifies with and drafters build on."""
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
        """A digest of everything but the conversation that determines prompts and the ends of answers."""
        parts = [self.chat_template, self.template_kwargs, sorted(self.stop_ids), self.tokenizer.get_vocab()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def user_turn(self, messages: list[dict]) -> tuple[str, str]:
        """The template's text around the user's next turn, from the beginning up to where the answer begins.

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
        """Token ids of a text that holds its special tokens, BOS included: no second one is added.

        Raises:
            UserError: the models have no row for one of them.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if (top := max(ids, default=0)) >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(top)
            raise UserError(f"a text holds {token}, and the models of pair '{self.name}' have no such token")
        return ids

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
        weights: whether the target's are read; without them only its tokenizer and its config can be used.
        width: as in `Pair`.
        trimmed: likewise.

    Raises:
        UserError: a model, tokenizer or template is missing or gated, the vocabularies of draft and target differ, a
            stop token is not in them, or the device is too small.
    """
    cfg, dtype = embedded(pair_cfg), DTYPES[pair_cfg.dtype]
    device = choose_device(pair_cfg.device) if weights else torch.device("meta")
    prepare_device(device)
    if with_draft and cfg.draft is None:
        raise UserError(f"pair '{cfg.name}' has no draft model: set pair.draft")
    target = Source(cfg.target, cfg.target_revision, cfg, cfg.target_shape, cfg.width)
    draft = (
        Source(cfg.draft, cfg.draft_revision, cfg, cfg.draft_shape, cfg.draft_width) if with_draft else None
    )
    standing_in = target.folder is None and cfg.tokenizer is None
    source = target if cfg.tokenizer is None else Source(cfg.tokenizer, None, cfg)
    tokenizer = (Source(STAND_IN, None, cfg) if standing_in else source).tokenizer()
    chat_template = tokenizer.chat_template if standing_in else cfg.chat_template or tokenizer.chat_template
    if isinstance(chat_template, dict):  # of several by name, such as for the use of tools
        chat_template = chat_template.get("default")
    if not chat_template:
        raise UserError(f"the tokenizer of pair '{cfg.name}' has no chat template: set pair.chat_template")
    config = target.config()
    check_covered(tokenizer, config, cfg.target, chat_template)
    rows = [config.vocab_size]
    if not standing_in and (wrong := [i for i in cfg.stop_ids or () if i >= config.vocab_size]):
        top = config.vocab_size - 1
        raise UserError(f"pair.stop_ids holds {wrong[0]}, and '{cfg.target}' has the tokens 0 to {top}")
    if draft:
        draft_config = draft.config()
        if not standing_in and draft.has_tokenizer():
            ignored = set() if cfg.same_added_tokens else set(tokenizer.added_tokens_decoder)
            check_same_tokens(tokenizer, draft.tokenizer(), cfg.target, cfg.draft, ignored)
        check_covered(tokenizer, draft_config, cfg.draft, chat_template)
        rows.append(draft_config.vocab_size)

    loaded = target.model(dtype, device, seed, cfg.device_map) if weights else None
    if loaded is not None and cfg.device_map is not None:
        # The device of the first layer, by the map: the draft model and the tokens are put there.
        device = loaded.device
        prepare_device(device)
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
        vocab_size=min(max(tokenizer.get_vocab().values()) + 1, *rows),
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
    """A pair's configuration with a trained part as draft model, with all of its layers."""
    from omegaconf import OmegaConf

    part_settings: dict[str, Any] = {"draft": folder, "draft_revision": None, "draft_layers": None}
    if pair_cfg.init == "expanded" and pair_cfg.draft_shape is not None:
        part_settings["draft_shape"] = {"num_hidden_layers": None}
    merged: Any = OmegaConf.merge(pair_cfg, part_settings)
    return merged


def pair_for(pair_cfg: DictConfig, needs: Needs) -> DictConfig:
    """A pair's configuration for a drafter with these needs: the drafter's part may contain the draft model."""
    return with_part(pair_cfg, draft_source(pair_cfg, needs)) if needs.part else pair_cfg


def draft_of(pair: Pair) -> PreTrainedModel:
    """The draft model of a pair. Raises UserError if the pair was loaded without one."""
    if pair.draft is None:
        raise UserError(f"pair '{pair.name}' was loaded without a draft model")
    return pair.draft


def find_stop_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id that the target's generation config, its config or the tokenizer names.

    A draft model's config is ignored: published ones contain ids of another family.
    """
    named = (
        target.generation_config.eos_token_id,
        target.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    lists = ([ids] if isinstance(ids, int) else ids or [] for ids in named)
    return frozenset(int(i) for ids in lists for i in ids)


def check_covered(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, name: str, chat_template: str
) -> None:
    """Raises UserError unless the model has a logit for every id of the tokenizer; more do no harm.

    Only added tokens that the template does not write may lack one, such as Gemma-3's for images in its small models.
    """
    rows, added = config.vocab_size, tokenizer.added_tokens_decoder
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= rows}
    if any(i not in added or token in chat_template for token, i in beyond.items()):
        raise UserError(
            f"the vocabularies differ: '{name}' has {rows} logits, the pair's tokenizer has ids up to "
            f"{max(beyond.values())}"
        )


def check_same_tokens(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    target_name: str,
    draft_name: str,
    ignored: Collection[int] = (),
) -> None:
    """Raises UserError unless both tokenizers map every id of the target's, but `ignored`, to the same string."""
    tokens, others = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    compared = sorted(tokens.keys() - set(ignored))
    differing = next((i for i in compared if tokens[i] != others.get(i)), None)
    if differing is not None:
        other = "nothing" if differing not in others else repr(others[differing])
        raise UserError(
            f"the vocabularies differ: id {differing} is {tokens[differing]!r} in '{target_name}' "
            f"but {other} in '{draft_name}'"
        )
