"""What a run is, whichever of its two spellings the configuration has: `method=sps`, or `method=ragged drafter=sps`."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.system import settings as values
from specbench.system.settings import LASTING, MEMORY, WRAPPED

if TYPE_CHECKING:
    from specbench.decoding.drafter import Drafter, Needs
    from specbench.decoding.scheduler import Scheduler

# The timed unit: a question, or a pool of questions, whose sequences share their rounds.
QUESTION, POOL = "question", "pool"
# The arms. SINGLE: the baseline at batch size 1, in batched runs the reference for equivalence and for the throughput
# ratio. Of another engine: AGAIN: the baseline once more; OWN_LOOP: our own autoregressive decoding.
BASELINE, METHOD, HF, SINGLE = "baseline", "method", "hf_generate", "single"
AGAIN, OWN_LOOP = "again", "own_loop"
OWN = "own"  # the name of this project's engine
OWN_CODE = "own_code"  # set if this project's own code drafts inside another engine


@dataclass(frozen=True)
class RunSpec:
    """A drafter, and a scheduler if sequences are decoded together.

    Attributes:
        drafter: its resolved configuration.
        scheduler: configuration of the scheduler; None: one sequence at a time.
        batch_size: sequences of a round; 1 without a scheduler.
        engine: configuration of another engine, which drafts by the drafter's name; None: this project decodes.
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
            unit: `QUESTION` or `POOL`; None to derive it from the method's class, which is imported.
        """
        if unit is None:
            unit = unit_of(pkgutil.resolve_name(config["method"]["_target_"]))
        method = values.plain(config["method"])
        served = other_engine(config)
        vocab = config.get("vocab") or {}  # in older run folders the drafter itself names the map
        trimmed = None if vocab.get("map") is None else (vocab["map"], vocab["size"])
        if unit == QUESTION:
            return cls(method, engine=served, trimmed=trimmed)
        return cls(values.plain(config["drafter"]), method, config["batch_size"], served, trimmed)

    @property
    def unit(self) -> str:
        """The timed unit: a "question", or a "pool" of them."""
        return QUESTION if self.scheduler is None else POOL

    @property
    def groups(self) -> dict[str, Mapping[str, Any]]:
        """Configurations by group: "method" drafts by itself, or schedules what "drafter", the last one, drafts."""
        if self.scheduler is None:
            return {"method": self.drafter}
        return {"method": self.scheduler, "drafter": self.drafter}

    @property
    def needs(self) -> Needs:
        """What the drafter and the one that it wraps require; no weights if another engine drafts with its own."""
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
        """The drafter's configuration, with the trimming of its head as settings."""
        return dict(self.drafter) | dict(zip(values.TRIMMING, self.trimmed or ()))

    @property
    def settings(self) -> dict[str, Any]:
        """The user's settings: the method's, a scheduler's drafter's as `drafter.NAME`, an engine's under its names."""
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
        """The user's settings of the wrapped drafter, without those that the wrapper fixes."""
        fixed = getattr(_class_of(self.drafter), "fixes", ())
        chosen = values.settings(self.drafter.get(WRAPPED) or {})
        return {name: value for name, value in chosen.items() if name not in fixed}

    @property
    def is_own_code(self) -> bool:
        """Whether this project's own code drafts: here, or inside another engine."""
        return self.engine is None or bool(self._in_its_words.get(OWN_CODE))

    @property
    def _in_its_words(self) -> dict[str, Any]:
        """The draft settings of another engine; {} if this project decodes."""
        # What is no dictionary is refused later, by the check of its type.
        methods = self.engine["speculative"] if self.engine is not None else None
        chosen = methods.get(self.drafter["name"]) if isinstance(methods, Mapping) else None
        return dict(chosen) if isinstance(chosen, Mapping) else {}

    @property
    def learns(self) -> bool:
        """Whether state of the drafter, or of one that it wraps, outlives an answer."""
        return self.engine is None and any(
            group.get(MEMORY) == LASTING for group in (self.drafter, self.drafter.get(WRAPPED) or {})
        )

    @property
    def owners(self) -> list[type[Drafter | Scheduler]]:
        """The classes that report their own statistics: of the scheduler, the drafter, and the one that it wraps.

        Classes that this installation lacks, such as another user's own, are left out: the run can still be read,
        without their statistics. Another engine has none.
        """
        if self.engine is not None:
            return []
        groups = [*self.groups.values(), self.drafter.get(WRAPPED)]
        return [cls for cls in map(_class_of, filter(None, groups)) if cls is not None]


def _class_of(group: Mapping) -> type | None:
    """The class of a method or drafter; None if this installation lacks it."""
    try:
        return pkgutil.resolve_name(group["_target_"])
    except (ImportError, AttributeError):
        return None


def needs_of(group: Mapping) -> Needs:
    """What the drafter of a configuration and the drafter that it wraps, if any, require.

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
    # Not hydra's instantiate, which would wrap a method's errors.
    return pkgutil.resolve_name(group["_target_"])(**values.parameters(group) | overrides)


def other_engine(config: Mapping) -> dict[str, Any] | None:
    """The configuration of another engine that decodes; None if this project does, as in all older run folders."""
    engine = config.get("engine")
    return None if engine is None or engine["name"] == OWN else values.plain(engine)


def unit_of(method: type) -> str:
    """The timed unit of a method's runs: `POOL` for a scheduler, else `QUESTION`."""
    from specbench.decoding.scheduler import Scheduler  # late: reading a run folder needs no torch

    return POOL if issubclass(method, Scheduler) else QUESTION


def key_of(group: str, name: str) -> str:
    """The name of a group's setting in summaries: those of a scheduler's drafter begin with "drafter."."""
    return name if group == "method" else f"{group}.{name}"


def without_group(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a summary with those of a scheduler's drafter under their own names, as without a scheduler."""
    return {key.removeprefix("drafter."): value for key, value in settings.items()}
