"""Says why a drafter accepts little: `specbench doctor method=NAME pair=NAME [key=value ...]`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from specbench.config.checks import check
from specbench.config.combinations import unusual
from specbench.config.compose import program
from specbench.config.spec import QUESTION, make_drafter
from specbench.system.errors import UserError
from specbench.system.settings import WRAPPED

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.measure.doctor import Counts

TOKENS = 64  # tokens of each answer to examine
PLACES = 8  # positions of a draft to print
HEALTHY = "healthy: no finding"


def examine(cfg: DictConfig) -> int:
    """Examines the drafter of a run and prints the findings; returns 1 if there are any."""
    spec = check(cfg)
    if spec.engine is not None or spec.unit != QUESTION or cfg.decoding.temperature > 0:
        raise UserError("the doctor looks at one greedy sequence of this project's own decoding at a time")
    if changed := unusual(cfg.decoding):
        raise UserError(f"the doctor looks at a drafter without {changed[0]}: leave that out")
    from specbench.data.questions import warmup_questions  # late: torch takes seconds
    from specbench.decoding.sampling import SamplingParams
    from specbench.measure import doctor
    from specbench.measure.protocol import Protocol
    from specbench.models.pairs import load_pair, pair_for
    from specbench.system.threads import use_threads

    needs = spec.needs
    if needs.reference_answer:
        raise UserError(
            f"{spec.drafter['name']} has its acceptance chosen at random: there is nothing to examine"
        )
    use_threads(cfg.threads, None)
    pair = load_pair(pair_for(cfg.pair, needs), cfg.seed, with_draft=needs.draft_model, trimmed=spec.trimmed)
    protocol = Protocol(
        pair, SamplingParams(TOKENS), cfg.protocol, cfg.seed, warmup_questions(cfg.data, cfg.task)
    )
    # A wrapper's own drafts reveal nothing about the weights and states of the wrapped drafter.
    inner = spec.drafter.get(WRAPPED)
    drafter = inner if inner and inner["name"] != "none" else spec.drafter
    make = partial(make_drafter, drafter, pair=pair)
    base, findings = doctor.examine(pair, make, protocol.warm_up_requests(TOKENS))
    print(f"{drafter['name']} on {pair.name}: {_in_words(base)}")
    print("\n".join(findings or [HEALTHY]))
    return int(bool(findings))


def _in_words(base: Counts) -> str:
    """Describes the counts of the unmodified drafter."""
    rates = [rate for place in range(PLACES) if (rate := base.at(place)) is not None]
    by_place = ", ".join(f"{rate:.2f}" for rate in rates)
    shifts = ", ".join(f"{base.rate(shift):.2f} at {shift:+d}" for shift in sorted(base.agreed) if shift)
    controls = f"; agreement at other places {shifts}" if shifts else ""
    return f"{base.rounds} rounds, acceptance by place of the draft {by_place or 'none'}{controls}"


main = program("bench", examine, resumes=False)
