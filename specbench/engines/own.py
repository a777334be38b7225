"""This project's own decoding behind a server of completions: one sequence at a time, every pass told as it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specbench.decoding.engine import exhaust
from specbench.decoding.sampling import SamplingParams
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.state import Request
from specbench.engines.standalone.completions import RequestError
from specbench.system.errors import UserError
from specbench.system.settings import Seed, check

if TYPE_CHECKING:
    from specbench.decoding.state import SequenceState
    from specbench.engines.standalone.completions import Completion, Send
    from specbench.measure.arms import Arm
    from specbench.models.pairs import Pair


class Streamed(Scheduler):
    """Runs one sequence, and sends the new tokens of each round before the next one begins."""

    def __init__(self) -> None:
        super().__init__(1)
        self._send: Send | None = None
        self._sent = 0

    @contextmanager
    def sending(self, send: Send) -> Iterator[None]:
        """Within the context, sends each pass when the next round begins; `tell` sends the last one."""
        self._send, self._sent = send, 0
        try:
            yield
        finally:
            self._send = None

    def choose(self, held: list[SequenceState]) -> list[int]:
        """The one sequence that is held."""
        [one] = held
        counts = [(step.drafted, step.accepted) for step in one.steps[-1:]] or [(0, 0)]
        self.tell(one.new_tokens, *counts[0])
        return super().choose(held)

    def tell(self, answer: list[int], drafted: int | None, accepted: int) -> None:
        """Sends the unsent tokens of an answer with the counts of its last round, if there is a receiver."""
        if self._send is not None and len(answer) > self._sent:
            self._send(answer[self._sent :], drafted, accepted)
            self._sent = len(answer)


class OwnDecoder:
    """Decodes the requests of a server of completions.

    Args:
        pair: with the target.
        arm: an engine's rounds.
        scheduler: of that engine.
        verification: as in `SamplingParams`.
    """

    def __init__(self, pair: Pair, arm: Arm, scheduler: Streamed, verification: str):
        self.vocab_size, self.stop_ids = pair.vocab_size, pair.stop_ids
        self.arm, self.scheduler, self.verification = arm, scheduler, verification

    def __call__(self, completion: Completion, send: Send) -> str:
        """Decodes one request and sends every pass as it ends.

        Returns:
            "stop" or "length".

        Raises:
            RequestError: The engine cannot decode it.
        """
        if max(completion.prompt) >= self.vocab_size:
            raise RequestError(
                f"'prompt' has token {max(completion.prompt)}, but only {self.vocab_size} exist"
            )
        temperature, top_p = float(completion.temperature), float(completion.top_p)
        decoding = SamplingParams(
            completion.max_tokens, temperature, self.verification, completion.top_k, top_p
        )
        stops = self.stop_ids | frozenset(completion.stop_token_ids)
        request = Request(completion.prompt, decoding, completion.seed, stops)
        with self.scheduler.sending(send):
            try:
                check("seed", completion.seed, Seed)
                [answer] = exhaust(self.arm([request]))
            except UserError as error:
                raise RequestError(str(error)) from error
            counts = [(step.drafted, step.accepted) for step in answer.steps[-1:]] or [(0, 0)]
            self.scheduler.tell(answer.tokens, *counts[0])
        return answer.finish
