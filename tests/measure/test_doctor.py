"""The doctor: every shipped drafter is healthy, and each planted fault is named."""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from functools import partial

import pytest
import torch

from methods.sps import SpeculativeSampling
from specbench.commands import doctor as command
from specbench.config.checks import check
from specbench.config.spec import make_drafter
from specbench.data.questions import warmup_questions
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.state import NORMED, Draft
from specbench.decoding.wrapped import WrappedDrafter
from specbench.measure import doctor
from specbench.measure.doctor import examine, observed, weight_findings
from specbench.measure.protocol import Protocol
from specbench.models.names import draft_source
from specbench.models.pairs import load_pair, with_part
from tests.support.commands import exit_code
from tests.support.conf import composed
from tests.support.decoding import random_pair

pytestmark = pytest.mark.slow  # answers of the embedded target
TRAINED = (
    *("sps", "vocabtrim", "kangaroo", "medusa", "hydra_heads", "eagle", "eagle2", "eagle3", "s2d"),
    *("dflash", "ddtree", "dspark", "dflash2", "peagle", "mtp"),
)


class Case:
    """A method on the embedded pair."""

    def __init__(self, method: str, *words: str):
        cfg = composed("bench", f"method={method}", "pair=tiny", "pair.device=cpu", *words)
        self.spec = check(cfg)
        pair_cfg = cfg.pair
        if self.spec.needs.part:
            pair_cfg = with_part(cfg.pair, draft_source(cfg.pair, self.spec.needs))
        self.pair = load_pair(pair_cfg, 0, with_draft=self.spec.needs.draft_model, trimmed=self.spec.trimmed)
        protocol = Protocol(self.pair, SamplingParams(32), "paired", 0, warmup_questions(cfg.data))
        self.requests = protocol.warm_up_requests(32)
        self.make = partial(make_drafter, self.spec.drafter, pair=self.pair)

    def findings(self, wrap=lambda drafter: drafter) -> str:
        return "\n".join(examine(self.pair, lambda **other: wrap(self.make(**other)), self.requests)[1])


@pytest.fixture(scope="module")
def eagle():
    return Case("eagle")


@pytest.mark.one_in(9)
@pytest.mark.parametrize("method", TRAINED)
def test_a_shipped_drafter_is_healthy(method, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", f"method={method}", "pair=tiny", "threads=1"])
    code, out = exit_code(command.main), capsys.readouterr().out
    assert (code, out.splitlines()[-1]) == (0, command.HEALTHY), out
    assert re.search(
        rf"^{method} on tiny: \d+ rounds, acceptance by place of the draft 0\.\d\d, ", out, re.MULTILINE
    )


@pytest.mark.parametrize("word", ["verification=typical", "draft_length=adaptive", "verify_width=2"])
def test_another_way_of_decoding_is_refused(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", "method=sps", "pair=tiny", f"decoding.{word}"])
    assert exit_code(command.main) == 2
    assert f"decoding.{word.partition('=')[0]}: leave that out" in capsys.readouterr().err


class Spoiled(WrappedDrafter):
    """A drafter with what a function makes of the states that it reads and of the tokens that it drafts."""

    def __init__(self, inner, states=lambda x: x, tokens=lambda x: x):
        super().__init__(inner)
        self.of_states, self.of_tokens = states, tokens

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def begin(self, slot, sequence, prefill):
        super().begin(
            slot, sequence, doctor.replace(prefill, hidden_states=self.changed(prefill.hidden_states))
        )

    def commit(self, batch, verified):
        super().commit(batch, doctor.replace(verified, hidden_states=self.changed(verified.hidden_states)))

    def draft(self, batch):
        draft = super().draft(batch)
        return doctor.replace(draft, tokens=self.of_tokens(draft.tokens))

    def changed(self, states):
        return {tap: self.of_states(one) for tap, one in states.items()}


def other_tap(drafter: Drafter, tap: int, depth: int) -> Drafter:
    """The drafter, with the states of another depth than it was trained on."""
    watched = doctor.Watched(drafter, read={tap: depth})

    class OfAnotherDepth(type(watched)):
        """Names the depth that it reads as its tap, as one that was configured so does."""

        def _states(self, states):
            return {depth: states[depth]} if depth in states else {}

        def begin(self, slot, sequence, prefill):
            inner = {tap: prefill.hidden_states[depth]}
            self.inner.begin(slot, sequence, doctor.replace(prefill, hidden_states=inner))

        def commit(self, batch, verified):
            inner = {tap: verified.hidden_states[depth]}
            self.inner.commit(batch, doctor.replace(verified, hidden_states=inner))

    return OfAnotherDepth(drafter, read={tap: depth})


class TestPlantedFaults:
    def test_states_before_the_norm_instead_of_after_it(self):
        case = Case("medusa")
        layers = len(case.pair.staged.layers)
        [tap] = case.make().taps
        assert tap == NORMED
        text = case.findings(lambda drafter: other_tap(drafter, NORMED, layers))
        assert "with the states of the final norm in place of" in text

    def test_states_of_another_layer(self, eagle, monkeypatch):
        """Rates that differ by depth, as of a drafter that was trained on layer 11: no trained toy is so choosy."""

        class Reads(Drafter):
            taps = (12,)

        def rates(pair, watched, requests):
            rate = 5 if watched.change else {12: 20, 11: 70, 13: 10}[watched.read[12]]
            return doctor.Counts(100, Counter({0: rate}))

        monkeypatch.setattr(doctor, "observed", rates)
        base = rates(eagle.pair, doctor.Watched(Reads()), ())
        [finding] = doctor.state_findings(eagle.pair, Reads, (), base)
        assert (
            "with the states of layer 11 of 24 in place of layer 12 of 24 acceptance at place 1 is 0.70"
            in finding
        )

    def test_states_that_are_not_used(self, eagle):
        text = eagle.findings(lambda drafter: Spoiled(drafter, states=torch.zeros_like))
        assert "shuffled control" in text

    @pytest.mark.parametrize("method", ["eagle", "sps", "s2d"])
    def test_a_drafter_of_which_nothing_is_accepted(self, method):
        text = Case(method).findings(lambda drafter: Spoiled(drafter, tokens=torch.zeros_like))
        assert "nothing is accepted at place 1" in text and "shuffled control" not in text

    def test_a_shifted_position(self, eagle):
        def later(drafter):
            return Spoiled(drafter, tokens=lambda tokens: tokens.roll(-1, dims=1))

        chain = Case("sps")
        assert "target's token 1 place later" in chain.findings(later)

    def test_a_chain_that_does_not_go_on(self):
        def broken(drafter):
            def tokens(drafted):
                drafted = drafted.clone()
                drafted[:, 1:] = (drafted[:, 1:] + 7) % 100 + 5
                return drafted

            return Spoiled(drafter, tokens=tokens)

        assert "place 2 is accepted at 0.0" in Case("sps").findings(broken)

    def test_a_cache_of_a_draft_model_that_lacks_a_token(self, monkeypatch):
        """A draft model still guesses much of the text: its rates look like those of a weak one."""
        monkeypatch.setattr(
            SpeculativeSampling, "_lacking", lambda drafter, batch: 1
        )  # also after a full acceptance
        assert "with the target itself as draft model 0." in Case("sps").findings()

    def test_states_that_are_stale_after_an_acceptance(self, eagle):
        """States of the wrong sign wherever a draft token was accepted."""

        class Stale(Spoiled):
            def commit(self, batch, verified):
                self.of_states = (lambda x: x) if max(verified.own_counts) == 0 else torch.neg
                super().commit(batch, verified)

        assert "after rounds that accepted draft tokens" in eagle.findings(Stale)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda weight: weight.zero_(), "is zero throughout"),
            (lambda weight: weight[: len(weight) // 2].zero_(), "are zero: is it all loaded?"),
            (lambda weight: weight.fill_(float("nan")), "is not finite"),
        ],
    )
    def test_half_loaded_weights(self, spoil, message):
        case = Case("eagle")
        drafter = case.make()
        weights = [weight for _, weight in doctor.weights_of(drafter) if weight.dim() == 2]
        assert weights
        with torch.no_grad():
            spoil(weights[0])
        assert any(message in line for line in doctor.weight_findings(drafter, case.pair))

    def test_a_wrong_vocabulary_map(self):
        case = Case("vocabtrim")
        drafter = case.make()
        drafter.head.token_ids = drafter.head.token_ids.flip(0)[:20]
        assert "of what the target says" in "".join(
            doctor.vocabulary_findings(case.pair, drafter, case.requests)
        )
        drafter.head.token_ids = torch.tensor([1, 1, 2])
        assert "1 ids twice" in "".join(doctor.vocabulary_findings(case.pair, drafter, case.requests))
        drafter.head.token_ids = torch.tensor([1, 10**6])
        assert "which the target does not have" in "".join(
            doctor.vocabulary_findings(case.pair, drafter, case.requests)
        )

    def test_another_template(self, eagle):
        pair = eagle.pair
        assert doctor.template_findings(pair) == []
        other = doctor.replace(pair, chat_template="{{ bos_token }}User: {{ messages[0]['content'] }}")
        pair.tokenizer.chat_template = pair.tokenizer.chat_template or pair.chat_template
        assert "where the checkpoint's own has" in "".join(doctor.template_findings(other))

    def test_a_drafter_that_drafts_nothing(self, eagle):
        _, findings = examine(eagle.pair, Drafter, eagle.requests)
        assert "drafted in only 0 rounds" in findings[-1]


def test_agreement_is_counted_at_every_place(eagle):
    """A drafter that knows the text agrees everywhere at its own place, and is accepted everywhere."""
    engine = doctor.Engine(eagle.pair.staged, Drafter(), eagle.pair.stop_ids)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(eagle.requests, engine.generate(list(eagle.requests)))]

    class Knows(Drafter):
        max_draft_tokens = 3

        def draft(self, batch):
            [sequence] = batch.sequences
            text = next(text for text in texts if text[: sequence.length] == sequence.tokens)
            return Draft.of([text[sequence.length :][: min(3, batch.limits[0])]], batch.tokens.device)

    counts = observed(eagle.pair, doctor.Watched(Knows()), eagle.requests)
    assert counts.rate() == 1.0 and counts.rate(1) < 0.5
    assert counts.at(0) == counts.at(1) == counts.at(2) == 1.0 and counts.at(3) is None
    assert not doctor.shift_findings(counts) and not doctor.chain_findings(counts)


def test_weights_of_the_target_are_not_the_drafters():
    """A drafter may hold the target; a bias of it that is zero throughout is how it was made."""
    pair = copy.deepcopy(random_pair("qwen2"))  # which others use as it is
    drafter = Drafter()
    drafter.target = pair.staged
    with torch.no_grad():
        pair.target.model.layers[0].self_attn.q_proj.bias.zero_()
    assert weight_findings(drafter, pair) == []
    drafter.layer = torch.nn.Linear(4, 4)
    with torch.no_grad():
        drafter.layer.bias.zero_()
    [finding] = weight_findings(drafter, pair)
    assert "layer.bias is zero throughout" in finding
    pair.expansion = object()
    assert weight_findings(drafter, pair) == [], "an expanded drafter is padded with zeros"
