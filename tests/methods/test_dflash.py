"""DFlash, DDTree, DSpark, DFlash2: drafts against transformers' own DFlash model or by hand; training; checkpoints."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from methods.common.dynamic_trees import candidate_children, tree_of_marginals
from methods.common.training import mask_to_fill
from methods.dflash import DDTree, DFlash, DFlash2, DSpark
from methods.dflash import train as dflash_train
from methods.dflash.checkpoint import CHOICE, FILLS_IN, NESTED, PREDICTS, SELECTS, load_blocks, save_blocks
from methods.dflash.drafter import all_see_all
from methods.dflash.model import BlockConfig, BlockModel, default_taps
from methods.dflash.train import BlockDistillation, fresh_model
from methods.eqspec import EqSpec
from methods.exspec import ExSpec
from methods.oracle import Oracle
from methods.ragged import RaggedBatch
from specbench.config.checks import check
from specbench.data.training import RECORD
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.models.expansion import Expansion, expand_model
from specbench.system.errors import UserError
from tests.support import batches
from tests.support.conf import composed
from tests.support.decoding import random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.lossless import (
    assert_lossless,
    assert_rounds_of_every_kind,
    assert_samples_like_plain_decoding,
    cases,
    sampled_requests,
)
from tests.support.methods import randomise, teach
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.training import training_settings, training_workplace

PROMPT = [3, 9, 27, 11, 33, 29, 17]
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
    """One that learnt the answers of the tests of losslessness, so that it is right now and then."""
    pair = random_pair(arch)
    model = drafting_model(pair, head)
    teach(BlockDistillation(model, StagedModel(pair.target), 8, 4.0, 0.0), model, arch, 40)
    return model.requires_grad_(False)


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


# -- drafting


@pytest.mark.first_fast
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_chain_is_what_transformers_own_model_guesses(arch, tmp_path):
    pair = random_pair(arch)
    drafter, compared = drafter_of(DFlash, arch, tmp_path), []
    model, draft_of = trained_model(arch, "independent"), drafter.draft

    def check(batch):
        draft = draft_of(batch)
        known, k = batch.sequences[0].tokens, draft.tokens.shape[1]
        states = filled_by_transformers(pair, model, known)
        logits = pair.target.lm_head(states[1 : 1 + k])
        assert draft.tokens[0].tolist() == logits.argmax(-1).tolist()
        compared.append(k)
        return draft

    drafter.draft = check
    prompt, cap, *_ = cases(arch)[6]
    steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap)).steps
    assert len(compared) > 5 and {*compared} > {BLOCK - 1} and any(step.accepted for step in steps)


def test_a_markov_chain_is_corrected_by_the_token_in_front(tmp_path):
    pair = random_pair("llama")
    drafter, compared = drafter_of(DSpark, "llama", tmp_path), []
    model, draft_of = trained_model("llama", "markov"), drafter.draft
    head = model.markov_head

    def check(batch):
        draft = draft_of(batch)
        known, k = batch.sequences[0].tokens, draft.tokens.shape[1]
        states = filled_by_transformers(pair, model, known)
        token, expected = known[-1], []
        for j in range(k):
            correction = head.markov_w2.weight @ head.markov_w1.weight[token]
            token = int((pair.target.lm_head(states[j]) + correction).argmax())
            expected.append(token)
        assert draft.tokens[0].tolist() == expected
        compared.append(k)
        return draft

    drafter.draft = check
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(30))
    assert len(compared) > 4 and max(compared) == BLOCK


def test_a_selected_chain_is_chosen_among_the_likeliest_of_each_place(tmp_path):
    pair = random_pair("llama")
    drafter, compared, changed = drafter_of(DFlash2, "llama", tmp_path), [], []
    model, draft_of = trained_model("llama", "selector"), drafter.draft
    selector = model.candidate_selector

    def check(batch):
        draft = draft_of(batch)
        known, k = batch.sequences[0].tokens, draft.tokens.shape[1]
        states = filled_by_hand(pair, model, known)
        token, expected = known[-1], []
        for j in range(k):
            logits = pair.target.lm_head(states[1 + j])
            weighed = selector.predecessor_codebook[token] * selector.hidden_projection(states[1 + j])
            candidates = logits.topk(16).indices.tolist()
            scores = [float(logits[c] + weighed @ selector.successor_codebook[c]) for c in candidates]
            token = candidates[scores.index(max(scores))]
            changed.append(token != int(logits.argmax()))
            expected.append(token)
        assert draft.tokens[0].tolist() == expected
        compared.append(k)
        return draft

    drafter.draft = check
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(30))
    assert len(compared) > 4 and {*compared} >= {BLOCK - 1} and any(changed)


def by_hand(log_probs: torch.Tensor, nodes: int) -> set[tuple[int, ...]]:
    """The likeliest paths [nodes] of levels that guess by themselves, by looking at all of them."""
    levels, rows = log_probs.shape
    paths = [p for depth in range(1, levels + 1) for p in product(range(rows), repeat=depth)]
    scores = {p: float(sum(log_probs[level, token] for level, token in enumerate(p))) for p in paths}
    return set(sorted(paths, key=lambda p: (-scores[p], len(p)))[:nodes])


@pytest.mark.parametrize("nodes", [1, 2, 5, 7])
def test_a_tree_of_marginals_holds_the_likeliest_paths(nodes):
    torch.manual_seed(nodes)
    logits = torch.randn(3, 4, 7) * 2
    logits[2, 0, 3], logits[2, 1] = 30.0, logits[2, 1] / 9  # one sure path, whose children are nearly alike
    width = 7
    tokens, tree = tree_of_marginals(logits, candidate_children(width, torch.device("cpu")), width, nodes)
    for i in range(3):
        parents, found = tree.parents[i].tolist(), tokens[i].tolist()
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(found, parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert set(paths) == by_hand(logits[i].log_softmax(-1), nodes) and len(set(paths)) == nodes


def test_a_certain_path_and_what_is_no_number_make_a_tree():
    children = candidate_children(4, torch.device("cpu"))
    certain = torch.full((1, 3, 6), -1e9)
    certain[..., 2] = 1e9
    tokens, tree = tree_of_marginals(certain, children, 4, 4)
    assert tree.depths.max() == 3 and tokens[0, :3].tolist().count(2) >= 1
    broken = torch.full((1, 3, 6), float("nan"))
    assert tree_of_marginals(broken, children, 4, 4)[1].parents.shape == (1, 4)


def test_all_places_of_a_block_see_each_other():
    block = all_see_all(4, torch.device("cpu"))
    assert block.visible.all() and block.visible.shape == (1, 4, 4)
    assert block.offsets().tolist() == [[0, 1, 2, 3]] and block.parents.tolist() == [[-1, 0, 1]]


def test_a_block_does_not_depend_on_how_many_tokens_may_follow(tmp_path):
    """A shorter draft is the beginning of a longer one: masks guess by how many there are."""
    pair, folder = random_pair("llama"), saved("llama", DFlash, tmp_path)
    firsts = []
    for cap in (3, 20):
        drafter = DFlash(pair, folder)
        draft_of = drafter.draft
        drafts: list[list[int]] = []
        drafter.draft = lambda batch, d=draft_of, s=drafts: (
            s.append((made := d(batch)).tokens[0].tolist()) or made
        )
        Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(cap))
        firsts.append(drafts[0])
    short, long = firsts
    assert len(short) < len(long) == BLOCK - 1 and long[: len(short)] == short


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", EVERY_ARCHITECTURE)
def test_lossless(arch, kind, tmp_path):
    steps = assert_lossless(arch, drafter_of(kind, arch, tmp_path))
    assert any(s.accepted for s in steps) and any(not s.accepted for s in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_on_one_architecture(kind, tmp_path):
    steps = assert_lossless("llama", drafter_of(kind, "llama", tmp_path))
    if kind is DDTree:
        assert {0, 1} <= {s.accepted for s in steps}
    else:
        assert_rounds_of_every_kind(steps, partly=True)


@pytest.mark.parametrize("kind", [DFlash, DSpark, DFlash2])
def test_an_oracle_proposes_its_tokens_in_place_of_these(kind, tmp_path):
    """Token by token, though all places are guessed at once."""
    pair, folder = random_pair("llama"), saved("llama", kind, tmp_path)
    config = {"_target_": f"methods.dflash.{kind.__name__}", "name": "block", "weights": folder}
    drafter = Oracle(pair, config, [1.0, 1.0, 0.0], cost_of="block", max_draft_tokens=4)
    prompt, cap, _, answer = cases("llama")[6]
    drafter.set_reference_answers([prompt], [answer])
    said = Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap))
    assert said.tokens == answer and {s.accepted for s in said.steps if s.drafted > 2} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", [RaggedBatch, EqSpec, lambda size: ExSpec(size, window=7)])
def test_lossless_in_batches(scheduler, kind, tmp_path):
    requests, expected = batches.cases("qwen2")
    drafter = drafter_of(kind, "qwen2", tmp_path)
    engine = Engine(StagedModel(random_pair("qwen2").target), drafter, frozenset(), scheduler(4))
    assert any(s.accepted for s in batches.assert_lossless(engine, requests, expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DFlash, DSpark, DFlash2])
def test_samples_follow_the_target(kind, tmp_path):
    pair = random_pair("llama", **SHAPE)
    save_blocks(drafting_model(pair, KINDS[kind]), tmp_path, torch.float32)
    assert p_value_alone(pair, kind(pair, str(tmp_path), 3)) > 1e-3


@pytest.mark.slow
def test_samples_follow_the_target_where_drafts_end_early(tmp_path):
    """The estimate may not see the token that it is of."""
    pair = random_pair("llama", **SHAPE)
    save_blocks(drafting_model(pair, "markov"), tmp_path, torch.float32)
    assert p_value_alone(pair, DSpark(pair, str(tmp_path), 3, confidence_threshold=0.5)) > 1e-3


@pytest.mark.slow
def test_sampled_trees_give_the_text_of_autoregressive_decoding(tmp_path):
    drafter = drafter_of(DDTree, "qwen2", tmp_path)
    pair = random_pair("qwen2")
    assert assert_samples_like_plain_decoding(pair, drafter, sampled_requests(pair, 16, 0.7))


def test_a_threshold_ends_drafts(tmp_path):
    pair, folder = random_pair("llama"), saved("llama", DSpark, tmp_path)
    lengths = {}
    for threshold in (0.0, 0.5, 1.0):
        drafter = DSpark(pair, folder, confidence_threshold=threshold)
        engine = Engine(StagedModel(pair.target), drafter, frozenset())
        answer = engine.answer(PROMPT, SamplingParams(24))
        lengths[threshold] = [step.drafted for step in answer.steps]
    assert max(lengths[0.0]) == BLOCK and max(lengths[1.0]) == 0
    assert sum(lengths[0.5]) / len(lengths[0.5]) < sum(lengths[0.0]) / len(lengths[0.0])


def test_an_estimate_is_of_the_place_and_the_token_in_front(tmp_path):
    """A draft ends in front of the first unsure place, whatever the token there: to look at it would bias samples."""
    pair = random_pair("llama")
    folder, model = saved("llama", DSpark, tmp_path), trained_model("llama", "markov")
    drafter, compared = DSpark(pair, folder, confidence_threshold=0.5), []
    draft_of, embedding = drafter.draft, model.markov_head.markov_w1.weight

    def check(batch):
        draft = draft_of(batch)
        known = batch.sequences[0].tokens
        states = filled_by_transformers(pair, model, known)
        token, count = known[-1], 0
        for j in range(min(BLOCK, batch.max_draft)):
            if model.confidence(states[j], embedding[token]).sigmoid() < 0.5:
                break
            correction = model.markov_head.markov_w2.weight @ embedding[token]
            token, count = int((pair.target.lm_head(states[j]) + correction).argmax()), count + 1
        assert draft.tokens.shape[1] == count
        compared.append(count)
        return draft

    drafter.draft = check
    for prompt, cap, *_ in cases("llama"):
        Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap))
    assert len({*compared}) > 2


def test_a_draft_reads_its_model_once(tmp_path):
    pair = random_pair("llama")
    head = pair.target.lm_head.weight.nbytes + pair.target.model.norm.weight.nbytes
    for kind in KINDS:
        drafter = drafter_of(kind, "llama", tmp_path / kind.__name__)
        model = trained_model("llama", KINDS[kind])
        steps = Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(9)).steps
        weights = {name: w.nbytes for name, w in model.state_dict().items()}
        by_row = ("markov_head", "candidate_selector.predecessor", "candidate_selector.successor")
        once = sum(size for name, size in weights.items() if not name.startswith(by_row))
        again = BLOCK * weights.get("markov_head.markov_w2.weight", 0)
        assert steps[0].draft_bytes == once + head + again


# -- training


def test_training_sees_what_drafting_sees():
    """Blocks of a text, all at once, are those that transformers' own model fills after each beginning."""
    for head, arch in product(HEADS, ("llama", "qwen2")):
        pair = random_pair(arch)
        model = drafting_model(pair, head)
        module = BlockDistillation(model, StagedModel(pair.target), 2, 4.0, 0.0)
        ids, starts = torch.tensor([PROMPT, PROMPT[::-1]]), torch.tensor([[2, 6], [1, 4]])
        with torch.no_grad():
            states, _ = module.states({"input_ids": ids}, starts)
            for row, column in product(range(2), range(2)):
                known = ids[row, : starts[row, column] + 1].tolist()
                expected = filled_by_transformers(pair, model, known)[model.config.fills_in :]
                torch.testing.assert_close(states[row, column], expected, atol=1e-4, rtol=1e-4)


def test_what_a_block_is_judged_by():
    pair = random_pair("llama")
    module = BlockDistillation(drafting_model(pair, "independent"), StagedModel(pair.target), 2, 4.0, 0.0)
    weight = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1.0]])
    goals = module.goals({"loss_weight": weight}, torch.tensor([[2, 5]]))
    assert goals.positions.view(2, -1).tolist() == [[3, 4, 5, 6], [6, 7, 7, 7]]
    e = torch.exp(torch.tensor(-0.25)).item()
    # After a token that is not judged nothing of the block is, nor beyond the row's end.
    assert goals.weights.view(2, -1).tolist() == [[1, pytest.approx(e), 0, 0], [1, pytest.approx(e), 0, 0]]


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_loss_by_hand(share):
    pair = random_pair("llama")
    model = drafting_model(pair, "markov")
    module = BlockDistillation(model, StagedModel(pair.target), 1, 4.0, share)
    ids, start = torch.tensor([PROMPT]), 2
    batch = {"input_ids": ids, "loss_weight": torch.ones(1, len(PROMPT))}
    module.drawn = lambda _: torch.tensor([[start]])
    found = module(batch)
    states = filled_by_transformers(pair, model, PROMPT[: start + 1])
    truth = pair.target(ids, use_cache=False).logits[0].softmax(-1)
    total, weights = 0.0, 0.0
    for j in range(len(PROMPT) - 1 - start):
        before, weight = PROMPT[start + j], torch.exp(torch.tensor(-j / 4.0))
        embedded = model.markov_head.markov_w1.weight[before]
        logits = pair.target.lm_head(states[j]) + model.markov_head.markov_w2.weight @ embedded
        goal, guessed = truth[start + j], logits.softmax(-1)
        distance = (goal - guessed).abs().sum()
        estimate = model.confidence(states[j], embedded).sigmoid()
        accepted = (1 - distance / 2).detach()
        loss = (1 - share) * -(goal * logits.log_softmax(-1)).sum() + share * distance
        loss = loss - accepted * estimate.log() - (1 - accepted) * (1 - estimate).log()
        total, weights = total + weight * loss, weights + weight
    torch.testing.assert_close(found, total / weights * len(PROMPT), atol=1e-3, rtol=1e-4)
    found.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert pair.target.lm_head.weight.grad is None


def test_the_loss_of_a_selector_by_hand():
    """Beside the cross-entropy of each place: which of its candidates is the target's first choice, put among them."""
    pair = random_pair("llama")
    model = drafting_model(pair, "selector")
    module = BlockDistillation(model, StagedModel(pair.target), 1, 4.0, 0.0)
    ids, start, selector = torch.tensor([PROMPT]), 2, model.candidate_selector
    module.drawn = lambda _: torch.tensor([[start]])
    module.candidates = 24
    found = module({"input_ids": ids, "loss_weight": torch.ones(1, len(PROMPT))})
    states = filled_by_hand(pair, model, PROMPT[: start + 1])
    truth = pair.target(ids, use_cache=False).logits[0].softmax(-1)
    total, weights, missed = 0.0, 0.0, 0
    for j in range(BLOCK - 1):
        weight = torch.exp(torch.tensor(-j / 4.0))
        logits, goal = pair.target.lm_head(states[1 + j]), truth[start + j]
        first, candidates = int(goal.argmax()), logits.topk(24).indices.tolist()
        if first not in candidates:
            candidates[-1], missed = first, missed + 1
        weighed = selector.predecessor_codebook[PROMPT[start + j]] * selector.hidden_projection(states[1 + j])
        scores = logits[candidates] + selector.successor_codebook[candidates] @ weighed
        loss = -(goal * logits.log_softmax(-1)).sum() - scores.log_softmax(-1)[candidates.index(first)]
        total, weights = total + weight * loss, weights + weight
    torch.testing.assert_close(found, total / weights * len(PROMPT), atol=1e-3, rtol=1e-4)
    assert 0 < missed < BLOCK - 1
    found.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_stored_distributions_are_read_where_tokens_are_judged_alone(head):
    """Elsewhere there may be none; and a batch in which nothing is judged costs nothing, but has gradients."""
    pair = random_pair("llama")
    model = drafting_model(pair, head)
    module = BlockDistillation(model, StagedModel(pair.target), 3, 4.0, 0.5)
    ids, weight = torch.tensor([PROMPT]), torch.tensor([[0, 0, 1, 1, 0, 0, 0.0]])
    with torch.no_grad():
        probs, likeliest = pair.target(ids, use_cache=False).logits.softmax(-1).topk(8)
    probs = torch.cat([torch.zeros(1, 1, 8), probs[:, :-1]], 1).roll(-1, 1) * weight.roll(-1, 1).unsqueeze(-1)
    batch = {"input_ids": ids, "loss_weight": weight, "probs": probs, "likeliest": likeliest}
    loss = module(batch)
    assert torch.isfinite(loss) and loss > 0
    nothing = module(batch | {"loss_weight": torch.zeros(1, 7)})
    assert nothing == 0 and nothing.requires_grad
    nothing.backward()


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_training_teaches_blocks(head, tmp_path):
    workplace = training_workplace(tmp_path / "pair")
    more = (
        "steps=60",
        "save_every=20",
        "block_size=4",
        "mask_token=255",
        "learning_rate=5e-3",
        f"head={head}",
    )
    out = dflash_train.train(training_settings("train_dflash", workplace, tmp_path / "out", *more, "taps=2"))
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    assert rows[-1]["place_1_agreement"] > rows[0]["place_1_agreement"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert json.loads((out / RECORD).read_text())["place_3_agreement"] == rows[-1]["place_3_agreement"]
    settings = json.loads((out / "config.json").read_text())
    architectures = {"independent": FILLS_IN, "markov": PREDICTS, "selector": SELECTS}
    assert settings["architectures"] == [architectures[head]]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mask_token=100000", "mask_token=100000"),
        ("block_size=1", "block_size"),
        ("head=other", "head"),
        ("block_size=64", "no room"),
        ("vocab_sample=8", "vocab_sample=null"),
        ("loss_tokens=8", "loss_tokens=null"),
    ],
)
def test_a_setting_of_the_training_that_cannot_work(tmp_path, setting, says):
    workplace = training_workplace(tmp_path / "pair")
    with pytest.raises(UserError, match=says):
        dflash_train.train(training_settings("train_dflash", workplace, tmp_path / "out", setting))


def test_depths_that_the_target_lacks(tmp_path):
    workplace = training_workplace(tmp_path / "pair")
    for taps in ("[99]", "[]"):
        settings = training_settings(
            "train_dflash", workplace, tmp_path / "out", f"taps={taps}", "mask_token=9"
        )
        with pytest.raises(UserError, match="depths of the target, 0 to 3"):
            dflash_train.train(settings)


def test_the_mask_is_the_tokenizers_unknown_or_padding_token():
    class Tokenizer:
        unk_token_id, pad_token_id = None, 7

    class Two:
        mask_token, tokenizer = None, Tokenizer()

    assert mask_to_fill(Two, Two, 8) == 7
    with pytest.raises(UserError, match="embeddings of 7 tokens"):
        mask_to_fill(Two, Two, 7)


# -- checkpoints


def z_lab(model: BlockModel, folder) -> dict:
    save_blocks(model, folder, torch.float32)
    return json.loads((folder / "config.json").read_text())


def test_files_are_those_of_the_authors(tmp_path):
    """Keys and settings as the authors' code and vLLM read them."""
    pair = random_pair("llama")
    filled, chained = (drafting_model(pair, head) for head in ("independent", "markov"))
    settings = z_lab(filled, tmp_path / "dflash")
    assert settings[NESTED] == {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in filled.taps]}
    layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    shared = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    shared |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(filled.state_dict()) == shared
    heads = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    heads |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(chained.state_dict()) == shared | heads
    settings = z_lab(chained, tmp_path / "dspark")
    assert settings["markov_rank"] == 6 and settings["markov_head_type"] == "vanilla"
    assert settings["enable_confidence_head"] and settings["confidence_head_with_markov"]


@pytest.mark.parametrize("head", HEADS)
def test_what_is_trained_drafts_the_same_when_loaded(head, tmp_path):
    pair = random_pair("qwen2")
    target, model = StagedModel(pair.target), drafting_model(random_pair("qwen2"), head)
    save_blocks(model, tmp_path / "first", torch.bfloat16, loss=1.0)
    loaded = load_blocks(tmp_path / "first", target)
    save_blocks(loaded, tmp_path / "second", torch.bfloat16)
    again = load_blocks(tmp_path / "second", target)
    assert again.taps == model.taps and again.config.block_size == BLOCK
    assert (again.config.fills_in, again.config.confidence) == (head != "markov", head == "markov")
    assert again.config.head == head
    hidden, features = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    rope = model.rope(torch.arange(3)[None], hidden)
    outputs = [(one(hidden, rope), *one.context(features, rope)) for one in (loaded, again)]
    assert all(torch.equal(*pair) for pair in zip(*outputs))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.bfloat16().float(), again.state_dict()[name]), name


def of_speculators(folder, head: str, **changes: object) -> BlockModel:
    """A checkpoint of a fresh model as speculators writes it, with a head of its own over a third of the tokens."""
    model = drafting_model(random_pair("llama"), head)
    settings = z_lab(model, folder)
    state = load_file(folder / "model.safetensors")
    layer = {name: value for name, value in settings.items() if name in Qwen3Config().to_dict()}
    layer = {
        name: value for name, value in layer.items() if name not in ("architectures", "transformers_version")
    }
    nested = {
        "transformer_layer_config": layer | {"model_type": "qwen3"},
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }
    nested |= {"aux_hidden_state_layer_ids": [*model.taps], "draft_vocab_size": len(KEPT)}
    if head == "markov":
        nested |= {
            "speculators_model_type": "dspark",
            "architectures": ["DSparkSpeculator"],
            "markov_rank": 6,
        }
        nested |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][KEPT].clone()
    elif head == "selector":
        nested |= {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
        nested |= {name: getattr(model.config, name) for name in CHOICE}
    else:
        nested |= {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}
    torch.manual_seed(8)
    scored = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    scored[KEPT] = True
    state |= {"lm_head.weight": torch.randn(len(KEPT), 64), "t2d": scored}
    state["d2t"] = torch.tensor(KEPT) - torch.arange(len(KEPT))
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(nested | changes))
    return model


KEPT = [3, 4, 9, 11, 17, 20, 29, 33, 40]


@pytest.mark.first_fast
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_speculators_draft_with_the_head_that_they_hold(kind, tmp_path):
    """Over the tokens that it scores; the rest is as in the other forms."""
    pair = random_pair("llama")
    model = of_speculators(tmp_path, KINDS[kind])
    loaded = load_blocks(tmp_path, StagedModel(pair.target))
    assert loaded.taps == model.taps and loaded.token_ids.tolist() == KEPT
    assert loaded.config.fills_in == (kind is not DSpark)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    drafter = kind(pair, str(tmp_path))
    draft_of, compared = drafter.draft, []

    def check(batch):
        draft = draft_of(batch)
        known, k = batch.sequences[0].tokens, draft.tokens.shape[1]
        logits = filled_by_transformers(pair, model, known)[model.config.fills_in :] @ head.T
        if kind is DFlash:
            assert draft.tokens[0].tolist() == [KEPT[row] for row in logits[:k].argmax(-1)]
        if kind is DSpark:
            correction = load_file(tmp_path / "model.safetensors")["markov_head.markov_w2.weight"]
            row = (logits[0] + correction @ model.markov_head.markov_w1.weight[known[-1]]).argmax()
            assert int(draft.tokens[0, 0]) == KEPT[row]
        assert {*draft.tokens.flatten().tolist()} <= {*KEPT}
        compared.append(k)
        return draft

    drafter.draft = check
    assert_lossless("llama", drafter)
    assert len(compared) > 10


def test_a_head_of_its_own_is_not_trimmed(tmp_path):
    of_speculators(tmp_path, "independent")
    with pytest.raises(UserError, match="set vocab=full"):
        DFlash(random_pair("llama"), str(tmp_path), vocab_map="somewhere")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"projector_type": "domino"}, "projector_type=domino"),
        ({"speculators_model_type": "eagle3"}, "speculators' eagle3"),
        ({"aux_hidden_state_layer_ids": [2, 50]}, "states after layers"),
        (
            {"speculators_model_type": None, "architectures": ["DSparkSpeculator"]},
            "does not say speculators_model_type",
        ),
    ],
)
def test_other_files_of_speculators_are_refused(change, says, tmp_path):
    of_speculators(tmp_path, "independent", **change)
    with pytest.raises(UserError, match=says):
        load_blocks(tmp_path, StagedModel(random_pair("llama").target))


def test_settings_of_a_training_change_nothing(tmp_path):
    """As older versions of speculators write them; nor does one that is said to be null."""
    nothing = {"max_anchors": 256, "sample_from_anchor": None}
    of_speculators(tmp_path, "markov", **nothing)
    assert not load_blocks(tmp_path, StagedModel(random_pair("llama").target)).config.fills_in


def test_a_draft_vocabulary_without_a_head_is_refused(tmp_path):
    of_speculators(tmp_path, "independent")
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="d2t without lm_head.weight"):
        load_blocks(tmp_path, StagedModel(random_pair("llama").target))


def test_files_may_hold_the_targets_embedding_and_head(tmp_path):
    """As DeepSpec writes them; those of another target are refused."""
    pair = random_pair("llama")
    model, target = drafting_model(pair, "markov"), StagedModel(pair.target)
    copies = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}

    class WithCopies:
        config, taps = model.config, model.taps

        def __init__(self, factor: float):
            self.factor = factor

        def state_dict(self):
            return model.state_dict() | {name: weight * self.factor for name, weight in copies.items()}

    save_blocks(WithCopies(1.0), tmp_path / "same", torch.bfloat16)
    assert load_blocks(tmp_path / "same", target).markov_head is not None
    save_blocks(WithCopies(1.5), tmp_path / "other", torch.bfloat16)
    with pytest.raises(UserError, match="another target"):
        load_blocks(tmp_path / "other", target)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Domino"]}, "Domino"),
        ({"selector_rank": 256}, "missing candidate_selector"),
        ({"conv_kernel_size": 2}, "missing layers.0.attention_conv"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size=7"),
        ({NESTED: {"mask_token_id": MASK, "target_layer_ids": [0], "use_swa": True}}, "use_swa"),
        ({NESTED: {"mask_token_id": MASK, "target_layer_ids": [50]}}, "states after layers"),
        ({NESTED: {"target_layer_ids": [0, 1]}}, "lacks mask_token_id"),
        ({NESTED: {"mask_token_id": 10**6, "target_layer_ids": [0, 1]}}, "no token 1000000"),
        ({"layer_types": ["sliding_attention"] * 2}, "layers of type sliding_attention"),
        ({"hidden_size": 32}, "another target"),
        ({"num_hidden_layers": 3}, "missing layers.2"),
        ({"markov_rank": 4}, "markov_head"),
        ({"model_type": "gemma"}, "model_type=gemma"),
        ({"enable_confidence_head": True}, "enable_confidence_head without"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(change, says, tmp_path):
    pair = random_pair("llama")
    settings = z_lab(drafting_model(pair, "independent"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UserError, match=says):
        load_blocks(tmp_path, StagedModel(pair.target))


def test_who_lacks_the_part_is_told_how_it_is_trained():
    with pytest.raises(UserError, match="methods.dflash.train pair=tiny head=markov`"):
        check(composed("bench", "method=dspark", "pair=tiny", "pair.parts.dspark=null"))


def test_weights_of_the_other_method_are_refused(tmp_path):
    pair = random_pair("llama")
    for kind, other in ((DFlash, DSpark), (DSpark, DFlash2), (DFlash2, DDTree), (DDTree, DSpark)):
        folder = saved("llama", kind, tmp_path / kind.__name__)
        name = {DFlash: "dflash", DDTree: "dflash", DSpark: "dspark", DFlash2: "dflash2"}[kind]
        with pytest.raises(UserError, match=f"set method={name}$"):
            other(pair, folder)
    model = drafting_model(pair, "markov")
    without = BlockModel(BlockConfig(**model.config.to_dict() | {"confidence": False}), model.taps)
    save_blocks(without, tmp_path / "without", torch.float32)
    with pytest.raises(UserError, match="no confidence head"):
        DSpark(pair, str(tmp_path / "without"), confidence_threshold=0.5)


def test_taps_of_the_authors():
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)  # after layers 1, 9, 17, 25, 33
    assert default_taps(28, 5)[0] == 2 and default_taps(28, 5)[-1] == 26
    for layers in range(2, 12):
        taps = default_taps(layers, 3)
        assert 0 < taps[0] <= taps[-1] < layers and len(set(taps)) == len(taps)


@pytest.mark.parametrize("kind", [DFlash, DSpark])
def test_the_drafter_of_an_expanded_target_drafts_the_same(kind, tmp_path):
    pair, folder = random_pair("llama"), saved("llama", kind, tmp_path)
    shape = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "vocab_size": 120,
    }
    expansion = Expansion(pair.target.config.to_dict(), shape, "x")
    target = expand_model(pair.target, expansion, torch.device("cpu"), torch.float32)
    wide = type(pair)(**(vars(pair) | {"target": target, "expansion": expansion}))
    drafted = []
    for which in (pair, wide):
        drafter = kind(which, folder)
        draft_of = drafter.draft
        drafter.draft = lambda batch, draft_of=draft_of: drafted.append(made := draft_of(batch)) or made
        prompt, cap, *_ = cases("llama")[6]
        Engine(StagedModel(which.target), drafter, frozenset()).answer(prompt, SamplingParams(cap))
    half = len(drafted) // 2
    assert half > 2 and len(drafted) == 2 * half
    for one, two in zip(drafted[:half], drafted[half:]):
        assert torch.equal(one.tokens, two.tokens)
