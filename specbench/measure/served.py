"""A run whose baseline and method are another engine's: its arms, and the rounding that it is judged by.

Our own autoregressive decoding is an arm, too: it shows whether the engine's plain answers are the target's. The plain
arm answers twice: the speedup of its second answer over its first is noise.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from specbench.config.spec import AGAIN, BASELINE, METHOD, OWN_LOOP, SINGLE
from specbench.data.questions import warmup_questions
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.sampling import SamplingParams
from specbench.measure.agreement import check_staged
from specbench.measure.arms import Setup
from specbench.measure.bench import Bench
from specbench.measure.certify import Certifier
from specbench.measure.conductor import Conductor
from specbench.measure.machine import provenance
from specbench.measure.protocol import Protocol
from specbench.models.pairs import load_pair, pair_for
from specbench.system.errors import UserError
from specbench.system.settings import parameters
from specbench.system.threads import use_threads

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.config.spec import RunSpec

HANDSHAKE_TOKENS = 32  # per answer in a trial of the servers


def prepare_served(cfg: DictConfig, spec: RunSpec) -> Bench:
    """Loads the pair, which the engine is judged by, and starts the engine's servers.

    Raises:
        UserError: They do not start, lack what a measurement relies on, or give answers that cannot be judged.
    """
    assert spec.engine is not None
    make = pkgutil.resolve_name(spec.engine["_target_"])
    make.check(spec.engine, spec.drafter, spec.batch_size)
    decoding = SamplingParams.from_settings(cfg.decoding)
    if spec.engine.get("target") and not decoding.greedy:
        raise UserError(
            "sampled answers of a file that only the engine reads cannot be judged: decoding=greedy"
        )
    needs = spec.needs
    pair_cfg = pair_for(cfg.pair, needs)
    pair = load_pair(pair_cfg, cfg.seed, with_draft=needs.draft_model)
    threads = use_threads(cfg.threads, None).threads  # of the servers and of our loop alike
    chosen = {"drafter": spec.drafter, "threads": threads, "batch_size": spec.batch_size}
    served = make(pair=pair, **chosen, **parameters(spec.engine))
    check_staged(pair.staged, pair.sample_ids())  # after the models were written: it packs their weights
    protocol = Protocol(pair, decoding, cfg.protocol, cfg.seed, warmup_questions(cfg.data, cfg.task))
    served.open(protocol.warm_up_requests(HANDSHAKE_TOKENS))
    loop = Engine(pair.staged, Drafter(), pair.stop_ids, None, pair.context_length)
    arms = {BASELINE: served.plain, METHOD: served.speculative, AGAIN: served.plain, OWN_LOOP: loop.rounds}
    if spec.batch_size > 1:
        arms[SINGLE] = served.single
    setup = Setup(pair, pair.staged, Drafter(), arms, spec, served=served, engines=[loop])
    of_pair = not spec.drafts_elsewhere
    training = provenance.trained(pair_cfg, spec.drafter, needs.draft_model) if of_pair else {}
    conductor = Conductor(setup, None, cfg.remeasure)
    return Bench(setup, protocol, conductor, Certifier(setup, protocol), training, {})
