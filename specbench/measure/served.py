"""A run whose baseline and method are another engine's: its arms, and the rounding that it is judged by.

Our own autoregressive decoding is an arm, too: it says whether the engine's plain answers are the target's. The plain
arm answers twice: what its second answer gains over its first is noise.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from typing import TYPE_CHECKING, Any

import yaml

from specbench import CONF
from specbench.data.questions import warmup_questions
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.measure.agreement import check_staged
from specbench.measure.arms import AGAIN, BASELINE, METHOD, OWN_LOOP, SINGLE, Setup
from specbench.measure.bench import Bench
from specbench.measure.certify import Certifier
from specbench.measure.conductor import Conductor
from specbench.measure.machine import provenance
from specbench.measure.protocol import Protocol
from specbench.models.pairs import load_pair, pair_for
from specbench.system.errors import UserError
from specbench.system.settings import parameters, settings
from specbench.system.threads import use_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

    from specbench.config.spec import RunSpec

HANDSHAKE_TOKENS = 32  # of the answers that servers are tried with
READ = re.compile(r"\$\{(?:drafter_setting:|drafter\.|method\.)(\w+)")  # a setting of the method, in a preset


def prepare_served(cfg: DictConfig, spec: RunSpec) -> Bench:
    """Loads the pair, which the engine is judged by, and starts the engine's servers.

    Raises:
        UserError: They do not start, or do not do what a measurement rests on.
    """
    assert spec.engine is not None
    make = pkgutil.resolve_name(spec.engine["_target_"])
    make.check(spec.engine, spec.drafter, spec.batch_size)
    check_settings(cfg, spec)
    needs = spec.needs
    pair_cfg = pair_for(cfg.pair, needs)
    pair = load_pair(pair_cfg, cfg.seed, with_draft=needs.draft_model)
    threads = use_threads(cfg.threads, None).threads  # of the servers and of our loop alike
    chosen = {"drafter": spec.drafter, "threads": threads, "batch_size": spec.batch_size}
    served = make(pair=pair, **chosen, **parameters(spec.engine))
    check_staged(pair.staged, pair.sample_ids())  # after the models were written: it lays their weights out
    decoding = SamplingParams(cfg.decoding.max_new_tokens, cfg.decoding.temperature)
    protocol = Protocol(pair, decoding, cfg.protocol, cfg.seed, warmup_questions(cfg.data))
    served.open(protocol.warm_up_requests(HANDSHAKE_TOKENS))
    loop = Engine(pair.staged, Drafter(), pair.stop_ids, None, pair.context_length)
    arms = {BASELINE: served.plain, METHOD: served.speculative, AGAIN: served.plain, OWN_LOOP: loop.rounds}
    if spec.batch_size > 1:
        arms[SINGLE] = served.single
    setup = Setup(pair, pair.staged, Drafter(), arms, spec, served=served)
    training = provenance.trained(pair_cfg, spec.drafter, needs.draft_model)
    conductor = Conductor(setup, None, cfg.remeasure)
    return Bench(setup, protocol, conductor, Certifier(setup, protocol), training, {})


def check_settings(cfg: DictConfig, spec: RunSpec) -> None:
    """Refuses settings that nothing of another engine reads: all runs of a sweep over one would be the same.

    Args:
        cfg: of the run.
        spec: the run, of another engine.

    Raises:
        UserError: Such a setting has another value than it has by itself.
    """
    assert spec.engine is not None
    engine, method = spec.engine["name"], spec.drafter["name"]
    preset = (_file("engine", engine).get("speculative") or {}).get(method)
    for group, chosen in spec.groups.items():
        drafts = chosen is spec.drafter
        if drafts and spec.is_own_code:  # which reads all of them
            continue
        read = sorted(set(READ.findall(str(preset)))) if drafts else []
        if unread := [key for key in _changed(cfg, chosen) if key not in read]:
            raise UserError(
                f"engine {engine} does not read {group}.{unread[0]}: of {chosen['name']} it reads "
                f"{', '.join(read) or 'no setting'}; set engine.speculative.{method}, in its own words"
            )


def _changed(cfg: DictConfig, group: Mapping[str, Any]) -> list[str]:
    """Settings of a method that are not as published, or as tuned where the run has those; not what the pair brings."""
    from specbench.config.compose import tuned_on  # late: it imports Hydra
    from specbench.config.tuned import TUNED

    name, takes = group["name"], inspect.signature(pkgutil.resolve_name(group["_target_"])).parameters
    usual = {key: parameter.default for key, parameter in takes.items()} | _file("method", name)
    if cfg.get("settings") == TUNED:
        usual |= _file(f"tuned/{tuned_on(cfg.pair.name, name)}", name)
    brought = {key for key, value in usual.items() if value is inspect.Parameter.empty or "${" in str(value)}
    return [key for key, value in settings(group).items() if key not in brought and value != usual[key]]


def _file(group: str, name: str) -> dict[str, Any]:
    """What a file of conf/ says, or else one of the user's own; {} where there is none."""
    from specbench.config.compose import own_conf  # late, as above

    paths = [folder / group / f"{name}.yaml" for folder in (CONF, own_conf()) if folder is not None]
    path = next((path for path in paths if path.is_file()), None)
    return {} if path is None else yaml.safe_load(path.read_text(encoding="utf-8")) or {}
