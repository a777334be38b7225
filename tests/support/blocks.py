"""Models of DFlash's kind for tests, and the blocks that transformers' own DFlash model, or plain arithmetic, fills."""

from __future__ import annotations

from functools import cache

import torch
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from methods.dflash import DDTree, DFlash, DFlash2, DSpark
from methods.dflash.checkpoint import save_blocks
from methods.dflash.model import BlockModel
from methods.dflash.train import BlockDistillation, fresh_model
from specbench.decoding.model.staged_model import StagedModel
from tests.support.decoding import random_pair
from tests.support.methods import randomise, taught

BLOCK, MASK = 5, 1
KINDS = {DFlash: "independent", DDTree: "independent", DSpark: "markov", DFlash2: "selector"}
HEADS = ["independent", "markov", "selector"]


def settings_of(head: str, **changes: object):
    class Settings:
        block_size, draft_layers, taps, rank = BLOCK, 2, 2, 6

    found = Settings()
    found.head = head
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def drafting_model(pair, head: str, **changes: object) -> BlockModel:
    """Random weights, as large as those of the target."""
    model = fresh_model(settings_of(head, **changes), StagedModel(pair.target), MASK)
    randomise(model, "candidate_selector" if head == "selector" else "markov")
    return model.eval()


@cache
@torch.inference_mode(False)
def trained_model(arch: str, head: str) -> BlockModel:
    pair = random_pair(arch)
    model = drafting_model(pair, head)
    return taught(BlockDistillation(model, pair.staged, 8, 4.0, 0.0), model, arch, 30)


def saved(arch: str, kind: type, folder) -> str:
    save_blocks(trained_model(arch, KINDS[kind]), folder, torch.float32)
    return str(folder)


def drafter_of(kind: type, arch: str, folder, **settings: object):
    return kind(random_pair(arch), saved(arch, kind, folder), **settings)


def known_states(pair, taps: tuple[int, ...], known: list[int]) -> torch.Tensor:
    """What transformers' target computed of all known tokens but the pending one, side by side."""
    output = pair.target(torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[tap] for tap in taps], dim=-1)


@cache
def reference(model: BlockModel) -> MuseGlimmerAssistantModel:
    """The same weights in transformers' own DFlash model."""
    config = model.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += (
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
        "block_size",
    )
    other = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in names},
            layer_types=["full_attention"] * config.num_hidden_layers,
            target_layer_ids=[tap - 1 for tap in model.taps],
            mask_token_id=config.mask_token_id,
            attn_implementation="sdpa",
        )
    ).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    state = {renamed.get(name, name): weight for name, weight in model.state_dict().items()}
    other.load_state_dict({name: w for name, w in state.items() if "_head." not in name})
    return other


def convolved_by_hand(states: torch.Tensor, kernel: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """States [places, d] summed with those in front.

    Weighed by a kernel [reach, d] and what is added to it [places, reach, groups].
    """
    sums = torch.zeros_like(states)
    for place in range(len(states)):
        for back in range(min(len(kernel), place + 1)):
            shared = added[place, back].repeat_interleave(states.shape[1] // added.shape[-1])
            sums[place] += (kernel[back] + shared) * states[place - back]
    return sums


def filled_by_hand(pair, model: BlockModel, known: list[int]) -> torch.Tensor:
    """As `filled_by_transformers`, of a model with convolutions, which transformers has not."""
    config, places = model.config, model.config.block_size
    block = torch.tensor([known[-1], *[config.mask_token_id] * (places - 1)])
    context = model.hidden_norm(model.fc(known_states(pair, model.taps, known)))[0]
    hidden = pair.target.get_input_embeddings()(block)
    count, heads = len(context) + places, (-1, config.head_dim)
    cos, sin = (part[0] for part in model.rope(torch.arange(count)[None], hidden))

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

    def around(conv, sublayer, states: torch.Tensor) -> torch.Tensor:
        added = (states @ conv.kernel_projection.weight.T).view(places, 2, config.conv_kernel_size, -1)
        front = convolved_by_hand(states, conv.base_kernel[0], added[:, 0])
        return convolved_by_hand(sublayer(front), conv.base_kernel[1], added[:, 1])

    for layer in model.layers:
        attention = layer.self_attn

        def attend(states: torch.Tensor, attention=attention) -> torch.Tensor:
            seen = torch.cat([context, states])
            query = rotated(
                attention.q_norm(attention.q_proj(states).unflatten(-1, heads)), cos[-places:], sin[-places:]
            )
            key = rotated(attention.k_norm(attention.k_proj(seen).unflatten(-1, heads)), cos, sin)
            value = attention.v_proj(seen).unflatten(-1, heads)
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            weights = torch.einsum("qhd,khd->hqk", query, key).mul(attention.scaling).softmax(-1)
            return attention.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))

        hidden = hidden + around(layer.attention_conv, attend, layer.input_layernorm(hidden))
        hidden = hidden + around(layer.mlp_conv, layer.mlp, layer.post_attention_layernorm(hidden))
    return model.norm(hidden)


def filled_by_transformers(pair, model: BlockModel, known: list[int]) -> torch.Tensor:
    """Normed states [places, d] of a block after known tokens, by transformers' own DFlash model, without a cache."""
    if model.config.conv_kernel_size:
        return filled_by_hand(pair, model, known)
    places = model.config.block_size
    block = torch.tensor([[known[-1], *[model.config.mask_token_id] * (places - 1)]])
    states = known_states(pair, model.taps, known)
    count = states.shape[1] + places
    return reference(model)(
        noise_embeds=pair.target.get_input_embeddings()(block),
        context_hidden_states=states,
        position_ids=torch.arange(count).unsqueeze(0),
        attention_mask={"full_attention": torch.zeros(1, 1, places, count)},
    ).last_hidden_state[0]
