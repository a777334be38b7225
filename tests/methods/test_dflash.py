"""DFlash, DDTree, DSpark, DFlash2: drafts against transformers' own DFlash model or by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from methods.common.dynamic_trees import candidate_children, tree_of_marginals
from methods.common.heads import DraftHead, target_ids
from methods.dflash import DDTree, DFlash, DFlash2, DSpark
from methods.dflash.checkpoint import save_blocks
from methods.dflash.drafter import all_see_all
from specbench.decoding.engine import Engine
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from tests.support.blocks import (
    BLOCK,
    KINDS,
    drafter_of,
    drafting_model,
    filled_by_hand,
    filled_by_transformers,
    saved,
    trained_model,
)
from tests.support.decoding import PROMPT, random_pair
from tests.support.distribution import SHAPE, p_value_alone
from tests.support.lossless import assert_lossless, assert_rounds_of_every_kind, cases
from tests.support.methods import (
    WIDE,
    assert_an_oracle_proposes_in_place_of,
    assert_drafts_the_same,
    expanded_pair,
)
from tests.support.models import EVERY_ARCHITECTURE
from tests.support.schedulers import EVERY_SCHEDULER, assert_lossless_with


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
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(20))
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
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(20))
    assert len(compared) > 4 and {*compared} >= {BLOCK - 1} and any(changed)


@pytest.mark.parametrize("kind", [DSpark, DFlash2])
def test_a_trimmed_chain_is_corrected_at_the_tokens_that_are_kept(tmp_path, monkeypatch, kind):
    """By the rows of these tokens, not by the first rows."""
    pair, token_ids = random_pair("llama"), torch.arange(1, 61, 3)
    monkeypatch.setattr(
        "methods.dflash.drafter.draft_head",
        lambda pair, model, layers=None: DraftHead(model, target_ids(pair), token_ids),
    )
    drafter, compared = drafter_of(kind, "llama", tmp_path), []
    model, draft_of = trained_model("llama", "markov" if kind is DSpark else "selector"), drafter.draft

    def first_token(known: list[int]) -> int:
        if kind is DSpark:
            head, states = model.markov_head, filled_by_transformers(pair, model, known)
            scores = pair.target.lm_head(states[0]) + head.markov_w2.weight @ head.markov_w1.weight[known[-1]]
            return int(token_ids[scores[token_ids].argmax()])
        selector, states = model.candidate_selector, filled_by_hand(pair, model, known)
        logits = pair.target.lm_head(states[1])[token_ids]
        weighed = selector.predecessor_codebook[known[-1]] * selector.hidden_projection(states[1])
        likeliest = logits.topk(16)
        scores = likeliest.values + selector.successor_codebook[token_ids[likeliest.indices]] @ weighed
        return int(token_ids[likeliest.indices[scores.argmax()]])

    def check(batch):
        draft = draft_of(batch)
        assert int(draft.tokens[0, 0]) == first_token(batch.sequences[0].tokens)
        compared.append(1)
        return draft

    drafter.draft = check
    Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(20))
    assert len(compared) > 4


def by_hand(log_probs: torch.Tensor, nodes: int) -> set[tuple[int, ...]]:
    """The likeliest paths [nodes] of levels that guess by themselves, by looking at all of them."""
    levels, rows = log_probs.shape
    paths = [p for depth in range(1, levels + 1) for p in product(range(rows), repeat=depth)]
    table = log_probs.numpy()  # as many times as there are paths it is read faster than a tensor
    scores = {p: float(sum(table[level, token] for level, token in enumerate(p))) for p in paths}
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


def test_a_tree_is_no_deeper_than_it_has_nodes_and_its_block_is_a_whole_one(tmp_path):
    pair, folder = random_pair("llama"), saved("llama", DDTree, tmp_path)
    guessed = {}
    for nodes in (2, 32):
        drafter, places = DDTree(pair, folder, nodes=nodes), []
        states = drafter._states
        drafter._states = lambda batch, k, s=states, p=places: p.append(s(batch, k)) or p[-1]
        Engine(StagedModel(pair.target), drafter, frozenset()).answer(PROMPT, SamplingParams(20))
        guessed[nodes] = places[0]
    assert guessed[2].shape[1] == 2 < guessed[32].shape[1]
    assert torch.equal(guessed[2], guessed[32][:, :2])


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
    if kind is DDTree:
        assert {0, 1} <= {s.accepted for s in steps}
    else:
        assert_rounds_of_every_kind(steps, partly=True)


@pytest.mark.parametrize("kind", [DFlash, DSpark, DFlash2])
def test_an_oracle_proposes_its_tokens_in_place_of_these(kind, tmp_path):
    """Token by token, though all places are guessed at once."""
    folder = saved("llama", kind, tmp_path)
    assert_an_oracle_proposes_in_place_of(f"methods.dflash.{kind.__name__}", folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@EVERY_SCHEDULER
def test_lossless_in_batches(scheduler, kind, tmp_path):
    assert_lossless_with(scheduler, "qwen2", drafter_of(kind, "qwen2", tmp_path))


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
    for prompt, cap, *_ in (cases("llama")[3], cases("llama")[7]):
        Engine(StagedModel(pair.target), drafter, frozenset()).answer(prompt, SamplingParams(cap))
    assert len({*compared}) > 2


def test_a_draft_reads_its_model_once_and_keys_and_values_twice(tmp_path):
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
        # Keys and values of known tokens, too, before the block's own.
        of_known = sum(
            size for name, size in weights.items() if "k_proj.weight" in name or "v_proj.weight" in name
        )
        assert steps[0].draft_bytes == once + of_known + head + again


@pytest.mark.first_fast
@pytest.mark.parametrize("kind", [DFlash, DSpark])
def test_the_drafter_of_an_expanded_target_drafts_the_same(kind, tmp_path):
    pair, folder = random_pair("llama"), saved("llama", kind, tmp_path)
    wide = expanded_pair(pair, WIDE | {"vocab_size": 120})
    prompt, cap, *_ = cases("llama")[4]
    assert_drafts_the_same(lambda which: kind(which, folder), pair, wide, prompt, cap)
