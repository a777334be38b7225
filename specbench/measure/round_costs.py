"""What a round of a method costs by its draft length, measured before the first question: for the rule `goodput`."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from specbench.config.spec import BASELINE, METHOD
from specbench.measure.draft_length import Constant, Goodput, VariableLength, costs_by_length, listed_costs
from specbench.measure.warm_up import end_requests, filled

if TYPE_CHECKING:
    from specbench.decoding.trace import Generation
    from specbench.measure.arms import Setup
    from specbench.measure.protocol import Protocol

TOKENS = 64  # per answer, to measure costs
LEAST_ROUNDS = 5  # of a length, for a median of their costs


def set_round_costs(setup: Setup, protocol: Protocol, costs: list[float] | None) -> list[float]:
    """Sets the method's rule to goodput. Costs stay the same for a whole run, so that answers do, too.

    Args:
        setup: whose drafter is a `VariableLength`.
        protocol: of the run.
        costs: as in `draft_length.costs_by_length`, from the configuration or an earlier process; None: they are
            measured on warm-up questions.

    Returns:
        The costs.
    """
    assert isinstance(setup.drafter, VariableLength)
    longest = setup.drafter.rule.longest  # in a batch with a budget, less than the drafter's own
    if costs is None:
        costs = _measured(setup, setup.drafter, protocol, longest)
    costs = list(map(float, costs))  # a list of a configuration is no list
    setup.drafter.rule = Goodput(longest, costs)
    return costs


def _measured(setup: Setup, drafter: VariableLength, protocol: Protocol, longest: int) -> list[float]:
    """Costs in rounds of the baseline, interpolated between the measured lengths."""
    requests = filled(end_requests(protocol, TOKENS), setup.spec.batch_size)
    setup.set_reference_answers(requests)
    size = setup.spec.batch_size
    costs = {0: _cost(setup.answers(BASELINE, requests), 0, size)}
    for length in sorted({1, longest, *(2**i for i in range(1, 20) if 2**i < longest)}):
        drafter.rule = Constant(length)
        costs[length] = _cost(setup.answers(METHOD, requests), length, size)
    medians = {length: cost for length, cost in costs.items() if cost is not None}
    between = listed_costs(medians)
    if between is None or 0 not in medians:  # too short answers or too few drafts: all lengths count as equal
        return [1.0, 1.0]
    rising = costs_by_length(between, max(medians)) / medians[0]
    return [round(float(cost), 3) for cost in rising]


def _cost(answers: Iterable[Generation], length: int, size: int) -> float | None:
    """Median seconds of full rounds whose longest path has `length` draft tokens; None if there are too few."""
    steps = (step for answer in answers for step in answer.steps)
    rounds = [step.seconds * size for step in steps if step.depth == length and step.sequences == size]
    return median(rounds) if len(rounds) >= LEAST_ROUNDS else None
