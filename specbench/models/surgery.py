"""Models made of other models: some layers of one, a draft model with the embeddings and the head of its target."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from specbench.system.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHARED = (
    "shares_embeddings"  # in the config of a draft model whose checkpoint holds neither embeddings nor head
)


def cut(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A new model in float32 from some of a model's layers, its embeddings, final norm and head.

    Raises:
        UserError: the model also sees or hears: its layers are a part of it; or its weights are quantised.
    """
    if model.config.get_text_config() is not model.config:
        raise UserError(f"a {type(model).__name__} is more than a language model: some layers of it are none")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            "some layers of quantised weights cannot be taken (pair.draft_layers, or a trainer's layers): name a model "
            "whose weights are not quantised"
        )
    config = copy.deepcopy(model.config)
    depth, config.num_hidden_layers = config.num_hidden_layers, len(layers)
    # Families describe each layer in lists of their own: layer_types, no_rope_layers, mlp_layer_types.
    for name, value in list(vars(config).items()):
        per_layer = isinstance(value, list | tuple) and len(value) == depth
        if per_layer and not name.endswith("_token_id"):  # a model can have as many stop tokens as layers
            setattr(config, name, type(value)(value[i] for i in layers))
    shorter, weights = type(model)(config).float(), {}
    for name, weight in model.state_dict().items():
        prefix, _, rest = name.partition("layers.")
        number, _, rest = rest.partition(".")
        if not number:
            weights[name] = weight
        elif int(number) in layers:
            weights[f"{prefix}layers.{layers.index(int(number))}.{rest}"] = weight
    shorter.load_state_dict(weights)
    shorter.generation_config = copy.deepcopy(model.generation_config)
    return shorter.to(model.device).eval()


def shares_embeddings(model: PreTrainedModel) -> bool:
    """Whether a draft model has the embeddings and the head of its target, and none of its own."""
    return bool(getattr(model.config, SHARED, False))


def share_embeddings(draft: PreTrainedModel, target: PreTrainedModel, names: tuple[str, str]) -> None:
    """Gives a draft model the embeddings and the head of its target.

    Args:
        draft: whose checkpoint has none.
        target: whose modules they are.
        names: of both models, for the error message.

    Raises:
        UserError: the target has another width or vocabulary.
    """
    for name in ("hidden_size", "vocab_size"):
        sizes = [getattr(model.config.get_text_config(), name) for model in (draft, target)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"'{names[0]}' has the embeddings of its target, with {name}={sizes[0]}; '{names[1]}' has {sizes[1]}"
            )
    embeddings: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    draft.set_input_embeddings(embeddings)
    draft.set_output_embeddings(head)


def embedding_names(model: PreTrainedModel) -> set[str]:
    """Names of the weights of a model's embeddings and head."""
    both = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return {
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if id(module) in both
        for weight, _ in module.named_parameters()
    }


def saved_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a draft model that are written: all, or all but those that it shares with its target."""
    left_out = embedding_names(model) if shares_embeddings(model) else set()
    return {name: weight for name, weight in model.state_dict().items() if name not in left_out}
