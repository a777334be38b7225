"""Whether a run has the published settings of its method, those tuned on its pair, or others.

That follows from the values alone, whatever the command line asked for. Parameters that hold what the pair brings
(weights, a vocabulary map) are no settings, and neither is the memory of a drafter: it belongs to the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.config.folders import choices_of, group_file
from specbench.config.resolvers import as_it_stands, tuned_on
from specbench.config.spec import key_of
from specbench.data.warm_start import WARM
from specbench.system.settings import CONSTANT, MEMORY, WRAPPED, settings

if TYPE_CHECKING:
    from specbench.config.spec import RunSpec

PUBLISHED, TUNED, CHANGED = "published", "tuned", "changed"
JUDGED_ELSEWHERE = (MEMORY, WARM)  # memory belongs to the protocol
VOCAB = "vocab"


def settings_source(
    spec: RunSpec, on: str, rule: str = CONSTANT, vocab: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Where the settings of a run's method, and of its drafter in a batch, come from.

    Args:
        spec: the run.
        on: the name of its pair.
        rule: of draft lengths; any other than a constant one is a change.
        vocab: name and size of the drafter's vocabulary, which is a setting of it.

    Returns:
        `source`: "published", "tuned" or "changed". `pair`: where they were tuned, else None. `published`: the
        published value of each setting that differs, those of a drafter in a batch as "drafter.NAME". None for a
        method without settings, or one that conf/ does not have.
    """
    judged = False
    published: dict[str, Any] = {}
    pairs: set[str | None] = set()  # where the differing settings were tuned; None for untuned ones
    *_, last = spec.groups
    parts = [(group, chosen["name"], "", settings(chosen)) for group, chosen in spec.groups.items()]
    if spec.wrapped:
        parts.append((last, spec.drafter["name"], spec.drafter[WRAPPED]["name"], spec.wrapped))
    for group, name, wrapped, method_settings in parts:
        if not method_settings:
            continue
        if name not in choices_of(group):
            return None
        # A wrapper's file may set the wrapped drafter; otherwise that has the settings of a method.
        inside = bool(wrapped) and isinstance(as_it_stands(group, name, None).get(WRAPPED), dict)
        name = wrapped if wrapped and not inside else name
        of_conf = _settings_of(group, name, None, inside)
        brought = {key for key, value in of_conf.items() if isinstance(value, str) and "${" in value}
        method_settings = {
            key: value for key, value in method_settings.items() if key not in (*JUDGED_ELSEWHERE, *brought)
        }
        judged |= bool(method_settings)
        if method_settings and vocab is not None and group == last and not wrapped:
            method_settings[VOCAB] = vocab["name"], vocab["size"]
        if differing := _differing(method_settings, of_conf):
            prefix = f"{WRAPPED}." if wrapped else ""
            published |= {
                key_of(group, f"{prefix}{key}"): of_conf.get(key) for key in differing if key != VOCAB
            }
            if VOCAB in differing:
                usual, size = of_conf[VOCAB]
                published |= {VOCAB: usual} | ({} if size is None else {f"{VOCAB}.size": size})
            pair = tuned_on(on, name)
            is_tuned = pair is not None and not _differing(
                method_settings, _settings_of(group, name, pair, inside)
            )
            pairs.add(pair if is_tuned else None)
    if rule != CONSTANT:
        published["decoding.draft_length"] = CONSTANT
        pairs.add(None)
    if not judged:
        return None
    pair = next(iter(pairs)) if len(pairs) == 1 else None
    source = PUBLISHED if not published else TUNED if pair else CHANGED
    return {"source": source, "pair": pair, "published": published}


def _settings_of(group: str, name: str, pair: str | None, inside: bool) -> dict[str, Any]:
    """The settings that conf/ has for a method or drafter, as `as_it_stands`, and name and size of its vocabulary.

    `inside`: whether to return those of the drafter that its file wraps.
    """
    chosen = as_it_stands(group, name, pair)
    chosen = chosen[WRAPPED] if inside else chosen
    usual = chosen.get(VOCAB) or _usual_vocab(name)
    return settings(chosen) | {VOCAB: (usual, group_file(VOCAB, usual).get("size"))}


def _usual_vocab(method: str) -> str:
    """The vocabulary that a method's file chooses for its drafter."""
    for choice in group_file("method", method).get("defaults") or ():
        for group, name in choice.items() if isinstance(choice, dict) else ():
            if group.startswith("override /vocab"):
                return name
    return "full"


def _differing(values: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The settings that have another value in `other`."""
    return [key for key, value in values.items() if value != other.get(key)]
