"""Serves a method over HTTP, one answer at a time: `specbench serve method=NAME pair=NAME [port=N] [key=value ...]`.

It is what a run measures, asked as servers of other engines are: `engine=openai`, or any client that sends and takes
token ids.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from specbench.config.checks import check
from specbench.config.compose import program
from specbench.config.spec import QUESTION
from specbench.engines.standalone.completions import PATH, CompletionServer
from specbench.system.errors import UserError
from specbench.system.settings import Range, check_all

if TYPE_CHECKING:
    from omegaconf import DictConfig

SETTINGS = {"port": Annotated[int, Range(1, 65535)]}


def serve(cfg: DictConfig) -> None:
    """Loads the pair, warms up as a run does, and serves until it is ended.

    Raises:
        UserError: The configuration cannot be served, or the port is taken.
    """
    check_all(cfg, SETTINGS)
    spec = check(cfg, asks=False)
    if spec.engine is not None or spec.unit != QUESTION or spec.needs.reference_answer:
        raise UserError("serve takes one drafter of this project, one answer at a time, such as method=sps")
    try:
        listening = CompletionServer(cfg.port)
    except OSError as error:
        raise UserError(f"cannot listen on port {cfg.port}: {error.strerror}") from error
    from specbench.config.spec import METHOD
    from specbench.engines.own import OwnDecoder, Streamed  # late: torch takes seconds
    from specbench.measure.runner import choose, make_ready, prepare

    with listening as server:
        scheduler = Streamed()
        bench = prepare(cfg, scheduler)
        with closing(bench.setup) as setup:
            choose(bench, cfg, {})
            make_ready(bench, cfg, {})
            setup.drafter.forget()  # what it was warmed up with
            print(f"{spec.drafter['name']} on {setup.pair.name} at {server.url}{PATH}", flush=True)
            decoder = OwnDecoder(setup.pair, setup.arms[METHOD], scheduler, cfg.decoding.verification)
            server.run(decoder)


main = program("serve", serve, resumes=False)
