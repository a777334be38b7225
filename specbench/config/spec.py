"""What a run is, whichever of its two spellings the configuration has: `method=sps`, or `method=ragged drafter=sps`."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.system import settings as values
from specbench.system.settings import LASTING, MEMORY, WRAPPED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specbench.decoding.drafter import Drafter, Needs
    from specbench.decoding.scheduler import Scheduler

# What has times of its own: a question, or a pool of questions, whose sequences share their rounds.
QUESTION, POOL = "question", "pool"
# The arms. SINGLE: the baseline at batch size 1, in batched runs the reference for equivalence and for the throughput
# ratio. Of another engine: AGAIN: the baseline once more; OWN_LOOP: our own autoregressive decoding.
BASELINE, METHOD, HF, SINGLE = "baseline", "method", "hf_generate", "single"
AGAIN, OWN_LOOP = "again", "own_loop"
OWN = "own"  # the name of the engine that is this project's
OWN_CODE = "own_code"  # set where this project's own code drafts inside another engine


@dataclass(frozen=True)
class RunSpec:
    """A drafter, and a scheduler where sequences are decoded together.

    Attributes:
        drafter: configuration of what drafts, resolved.
        scheduler: of what chooses the sequences of a round; None: one sequence at a time.
        batch_size: sequences of a round; 1 without a scheduler.
        engine: configuration of another engine, which then drafts as the drafter is called; None: this project decodes.
        trimmed: as in `models.pairs.Pair`.
    """

    drafter: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None = None
    batch_size: int = 1
    engine: Mapping[str, Any] | None = None
    trimmed: tuple[str, int | None] | None = None

    @classmethod
    def of(cls, config: Mapping, unit: str | None = None) -> RunSpec:
        """The run of a configuration.

        Args:
            config: as it is composed.
            unit: what has times of its own; None: the class of the method tells, which imports it.
        """
        if unit is None:
            unit = unit_of(pkgutil.resolve_name(config["method"]["_target_"]))
        method = values.plain(config["method"])
        served = other_engine(config)
        vocab = config.get("vocab") or {}  # of an older folder the drafter itself names a map
        trimmed = None if vocab.get("map") is None else (vocab["map"], vocab["size"])
        if unit == QUESTION:
            return cls(method, engine=served, trimmed=trimmed)
        return cls(values.plain(config["drafter"]), method, config["batch_size"], served, trimmed)

    @property
    def unit(self) -> str:
        """What has times of its own: a "question", or a "pool" of them."""
        return QUESTION if self.scheduler is None else POOL

    @property
    def groups(self) -> dict[str, Mapping[str, Any]]:
        """By the group that chooses it: "method" drafts by itself, or schedules what "drafter", the last, drafts."""
        if self.scheduler is None:
            return {"method": self.drafter}
        return {"method": self.scheduler, "drafter": self.drafter}

    @property
    def needs(self) -> Needs:
        """What the drafter requires, together with one that it wraps; no weights where an engine has them."""
        needs = needs_of(self.drafter)
        return replace(needs, draft_model=False, part=None) if self.drafts_elsewhere else needs

    @property
    def drafts_elsewhere(self) -> bool:
        """Whether another engine drafts with weights of its own, and not with the pair's."""
        if self.engine is None:
            return False
        named = self.engine.get("draft") or self._in_its_words.get("model")
        is_other = named is not None and named not in self.drafter.values()
        return is_other or getattr(pkgutil.resolve_name(self.engine["_target_"]), "module", None) is None

    @property
    def drafting(self) -> dict[str, Any]:
        """The drafter's configuration, and what its head is trimmed to as settings of it."""
        return dict(self.drafter) | dict(zip(values.TRIMMING, self.trimmed or ()))

    @property
    def settings(self) -> dict[str, Any]:
        """What a user sets of the method, and of a scheduler's drafter as `drafter.NAME`; of an engine in its words."""
        if not self.is_own_code:
            return values.flat(self._in_its_words)
        *_, last = self.groups
        chosen_here = {
            key_of(group, name): value
            for group, chosen in (self.groups | {last: self.drafting}).items()
            for name, value in values.settings(chosen).items()
        }
        return chosen_here | {
            key_of(last, f"{WRAPPED}.{name}"): value for name, value in self.wrapped.items()
        }

    @property
    def wrapped(self) -> dict[str, Any]:
        """What a user sets of a drafter that the drafter wraps; what the wrapper itself fixes is left out."""
        fixed = getattr(_class_of(self.drafter), "fixes", ())
        chosen = values.settings(self.drafter.get(WRAPPED) or {})
        return {name: value for name, value in chosen.items() if name not in fixed}

    @property
    def is_own_code(self) -> bool:
        """Whether this project's own code drafts: here, or inside another engine."""
        return self.engine is None or bool(self._in_its_words.get(OWN_CODE))

    @property
    def _in_its_words(self) -> dict[str, Any]:
        """How another engine is told to draft."""
        if self.engine is None:
            return {}
        return (self.engine["speculative"] or {}).get(self.drafter["name"]) or {}

    @property
    def learns(self) -> bool:
        """Whether state of the drafter, or of one that it wraps, outlives an answer."""
        return self.engine is None and any(
            group.get(MEMORY) == LASTING for group in (self.drafter, self.drafter.get(WRAPPED) or {})
        )

    @property
    def owners(self) -> list[type[Drafter | Scheduler]]:
        """The classes that have numbers of their own: of the scheduler, the drafter, and one that it wraps.

        Those that this installation does not have, such as a user's own in a folder from elsewhere, are left out: the
        run can still be read, without numbers of their own. Another engine has none.
        """
        if self.engine is not None:
            return []
        groups = [*self.groups.values(), self.drafter.get(WRAPPED)]
        return [cls for cls in map(_class_of, filter(None, groups)) if cls is not None]


def _class_of(group: Mapping) -> type | None:
    """The class of a method or drafter; None where this installation does not have it."""
    try:
        return pkgutil.resolve_name(group["_target_"])
    except (ImportError, AttributeError):
        return None


def needs_of(group: Mapping) -> Needs:
    """What the drafter of a configuration requires, together with the drafter that it wraps, if it does.

    Args:
        group: with `_target_`; `drafter` holds the configuration of the wrapped one.
    """
    needs = pkgutil.resolve_name(group["_target_"]).needs
    return needs.around(needs_of(group[WRAPPED])) if WRAPPED in group else needs


def make_drafter(group: Mapping, **overrides: Any) -> Drafter:
    """Makes the drafter of a configuration: that of a run, or one that another drafter wraps.

    Args:
        group: with `_target_` and parameters.
        overrides: the pair, and parameters in place of those in `group`.

    Raises:
        UserError: as the drafter's class.
    """
    # Not hydra's instantiate, which would wrap what a method says is wrong.
    return pkgutil.resolve_name(group["_target_"])(**values.parameters(group) | overrides)


def other_engine(config: Mapping) -> dict[str, Any] | None:
    """The configuration of the engine that decodes; None where this project does, as in all older folders."""
    engine = config.get("engine")
    return None if engine is None or engine["name"] == OWN else values.plain(engine)


def unit_of(method: type) -> str:
    """The unit of a method's runs: of a scheduler's the pool."""
    from specbench.decoding.scheduler import Scheduler  # late: reading a run folder needs no torch

    return POOL if issubclass(method, Scheduler) else QUESTION


def key_of(group: str, name: str) -> str:
    """What summaries call a setting of a group: those of a scheduler's drafter begin with "drafter."."""
    return name if group == "method" else f"{group}.{name}"


def without_group(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a summary with those of a scheduler's drafter under their own names, as without a scheduler."""
    return {key.removeprefix("drafter."): value for key, value in settings.items()}
