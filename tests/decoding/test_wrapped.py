"""A drafter around another one passes on all that it does not do itself."""

from __future__ import annotations

import inspect

from specbench.decoding.drafter import Drafter, Needs
from specbench.decoding.wrapped import WrappedDrafter


class Inner(Drafter):
    """Notes what it is asked to do."""

    needs = Needs(draft_model=True, batching=False)
    taps, siblings, deterministic, max_draft_tokens, max_nodes, extra_cores = (2,), 3, True, 5, 9, 1

    def __init__(self):
        self.asked: list[tuple] = []


def noted(name: str):
    return lambda self, *given: self.asked.append((name, *given)) or name


# What is asked of a drafter, but for those of its class, and for what follows from its own longest draft.
MEMBERS = {
    name: len(inspect.signature(member).parameters) - 1
    for name, member in vars(Drafter).items()
    if inspect.isfunction(member) and name != "draft_limit"
}
for _name in MEMBERS:
    setattr(Inner, _name, noted(_name))


def test_every_member_is_passed_on():
    inner = Inner()
    outer = WrappedDrafter(inner)
    for name, count in MEMBERS.items():
        given = tuple(object() for _ in range(count))
        answer = getattr(outer, name)(*given)
        assert inner.asked.pop() == (name, *given)
        assert answer == name
    assert {"forget", "snapshot", "restore", "set_reference_answers", "on_hidden", "close"} <= MEMBERS.keys()


def test_attributes_are_the_inner_ones():
    outer = WrappedDrafter(Inner())
    for name, value in vars(Drafter).items():
        if (
            not name.startswith("_")
            and not callable(value)
            and not isinstance(value, staticmethod | classmethod)
        ):
            assert getattr(outer, name) == getattr(Inner(), name), name
    assert outer.overlaps_verification()


class Alone(WrappedDrafter):
    needs = Needs(sampling=False, reference_answer=True)


def test_needs_are_those_of_both():
    assert Alone(Inner()).needs == Needs(
        draft_model=True, batching=False, sampling=False, reference_answer=True
    )
