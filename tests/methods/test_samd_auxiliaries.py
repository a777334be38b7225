"""SAM-Decoding beside every auxiliary drafter: a copied draft leaves that one as if it had drafted itself."""

from __future__ import annotations

from typing import get_args

import pytest

from methods.ar import Autoregressive
from methods.ragged import RaggedBatch
from methods.samd import DRAWN, Auxiliary, SAMDecoding
from specbench.config.combinations import check_method
from specbench.config.spec import make_drafter
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.model.cost import weight_bytes
from specbench.decoding.model.staged_model import StagedModel
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import Request
from specbench.decoding.trace import Generation
from specbench.models.pairs import Pair, load_pair
from specbench.system import settings as values
from specbench.system.errors import UserError
from tests.support.conf import composed

AUXILIARIES = [name for name in get_args(Auxiliary) if name != "none"]
EVERY_AUXILIARY = pytest.mark.parametrize("auxiliary", AUXILIARIES)
NEW_TOKENS = 48
SETTINGS = ("pair=tiny", "pair.device=cpu", "settings=published")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(composed("bench", *SETTINGS).pair, 0, with_draft=True)


@pytest.fixture(scope="module")
def requests(pair) -> list[Request]:
    text = pair.sample_ids()
    return [
        Request(text[start : start + 40], SamplingParams(NEW_TOKENS), seed=start) for start in (0, 25, 60)
    ]


def made(pair: Pair, auxiliary: str) -> SAMDecoding:
    """The method as its configuration names it, with a threshold at which it often copies."""
    chosen = (
        "method=samd",
        f"method.auxiliary={auxiliary}",
        "method.threshold=2",
        "method.max_draft_tokens=6",
    )
    spec = check_method(composed("bench", *SETTINGS, *chosen))
    return make_drafter(values.plain(spec.drafter), pair=pair)


def answers(pair: Pair, drafter: Drafter, requests: list[Request], size: int = 1) -> list[Generation]:
    engine = Engine(StagedModel(pair.target), drafter, frozenset(), RaggedBatch(size), pair.context_length)
    return engine.generate(requests)


class Drafted(Exception):
    """Raised where the first draft is all that is wanted."""


def first_draft(pair: Pair, drafter: Drafter, request: Request) -> list[int]:
    """What a drafter drafts at the very beginning of an answer."""
    real = drafter.draft

    def stopped(batch):
        raise Drafted(real(batch).tokens[0].tolist())

    drafter.draft = stopped
    try:
        with pytest.raises(Drafted) as raised:
            answers(pair, drafter, [request])
    finally:
        drafter.draft = real
    return raised.value.args[0]


@EVERY_AUXILIARY
@pytest.mark.slow
def test_after_a_copied_draft_it_drafts_as_at_the_beginning_of_the_same_text(pair, requests, auxiliary):
    drafter, seen = made(pair, auxiliary), []
    real = drafter.inner.draft

    def noted(batch):
        draft = real(batch)
        seen.append(([*batch.sequences[0].tokens], draft.tokens[0].tolist()))
        return draft

    drafter.inner.draft = noted
    generated = answers(pair, drafter, requests[:2])
    right = answers(pair, Autoregressive(pair), requests[:2])
    assert [one.tokens for one in generated] == [one.tokens for one in right]
    copied = [step.stats["copied"] for one in generated for step in one.steps if step.stats]
    assert 3 < sum(copied) < len(copied) - 3, "both must draft"
    if auxiliary == "recycling":
        return  # it drafts from what it has seen of the whole answer
    anew = made(pair, auxiliary).inner
    for tokens, drafted in seen:
        done = len(tokens) - len(requests[0].prompt)
        decoding = SamplingParams(NEW_TOKENS - done + 1)  # the last of them is decoded again, by the prefill
        assert first_draft(pair, anew, Request(tokens[:-1], decoding)) == drafted


@EVERY_AUXILIARY
@pytest.mark.slow
def test_in_a_batch_some_copy_and_others_do_not(pair, requests, auxiliary):
    drafter = made(pair, auxiliary)
    real = drafter.inner.draft

    def checked(batch):
        assert any(batch.limits), "nobody needs this draft"
        assert not any(limit for copies, limit in zip(drafter._copies, batch.limits) if copies)
        return real(batch)

    drafter.inner.draft = checked
    alone, together = (answers(pair, drafter, requests, size) for size in (1, 3))
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    accepted = [[sum(step.accepted for step in one.steps) for one in some] for some in (alone, together)]
    assert accepted[0] == accepted[1], "what one sequence copies must not change what another one drafts"


@EVERY_AUXILIARY
def test_a_copied_draft_reads_what_keeps_the_auxiliary_drafter_up_to_date(pair, requests, auxiliary):
    drafter = made(pair, auxiliary)
    inner = drafter.inner
    upkeep = {
        "eagle": lambda: weight_bytes(inner.model),
        "eagle2": lambda: weight_bytes(inner.model),
        "eagle3": lambda: (
            weight_bytes(inner.model) - sum(map(weight_bytes, (inner.model.norm, inner.model.lm_head)))
        ),
        "hydra_heads": lambda: weight_bytes(inner.heads.prefix),
        "mtp": lambda: weight_bytes(inner.model),
    }.get(auxiliary, lambda: 0)()
    assert (upkeep > 0) == (auxiliary not in ("recycling", "sps", "medusa"))
    (answer,) = answers(pair, drafter, requests[:1])
    read = {step.draft_bytes for step in answer.steps if step.stats and step.stats["copied"]}
    assert read == {upkeep}


def test_another_drafter_than_the_one_that_is_named_is_one_line(pair):
    spec = check_method(composed("bench", *SETTINGS, "method=samd_eagle2", "method.auxiliary=mtp"))
    with pytest.raises(UserError, match="auxiliary=mtp, but its drafter is eagle2"):
        make_drafter(values.plain(spec.drafter), pair=pair)


def test_what_draws_its_tokens_is_known(pair):
    assert {name for name in AUXILIARIES if not made(pair, name).inner.deterministic} == set(DRAWN)
