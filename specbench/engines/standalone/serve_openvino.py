"""OpenVINO GenAI behind an HTTP server of completions: `python serve_openvino.py PORT JSON`, in its own environment.

It imports nothing of this project but the modules beside it: the environment has neither torch nor specbench.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found] # of another environment
import openvino_genai  # type: ignore[import-not-found]
from completions import Completion, CompletionServer, RequestError, Send  # type: ignore[import-not-found] # beside it
from parameters import set_all  # type: ignore[import-not-found]

DEVICE = "CPU"


def pipeline(settings: dict[str, Any]) -> Any:
    """The pipeline of a server's settings.

    `target` and `draft` are GGUF files, the latter or None; `properties` are the device's, `scheduler` holds settings
    of OpenVINO's scheduler, `lookup` enables looking drafts up in the prompt.
    """
    properties = settings["properties"]
    options: dict[str, Any] = dict(properties)
    options["scheduler_config"] = set_all(openvino_genai.SchedulerConfig(), settings["scheduler"])
    if settings["lookup"]:
        options["prompt_lookup"] = True
    if settings["draft"] is not None:
        folder = converted(Path(settings["draft"]))
        options["draft_model"] = openvino_genai.draft_model(str(folder), DEVICE, **properties)
    return openvino_genai.LLMPipeline(settings["target"], DEVICE, **options)


def converted(file: Path) -> Path:
    """The folder of a GGUF file in OpenVINO's format, which a draft model must have; made if it does not exist."""
    folder = file.with_name(f"{file.stem}-openvino-{openvino_genai.__version__}")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            work = Path(scratch) / folder.name  # OpenVINO writes beside the file
            work.mkdir()
            os.link(file, work / file.name)
            openvino_genai.LLMPipeline(str(work / file.name), DEVICE, enable_save_ov_model=True)
            (work / file.name).unlink()
            try:
                work.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
    return folder


class Streamer(openvino_genai.StreamerBase):
    """Sends the tokens of each pass: OpenVINO delivers them once a pass, and does not report what it drafted."""

    def __init__(self, send: Send):
        super().__init__()
        self.send, self.sent = send, 0
        self.failed: Exception | None = None

    def write(self, token: int | list[int]) -> Any:
        """Receives the tokens of a pass."""
        tokens = token if isinstance(token, list) else [token]
        self.sent += len(tokens)
        try:
            self.send(tokens, None, None)
        except Exception as error:  # noqa: BLE001 - raised again, but not through OpenVINO's own code
            self.failed = error
            return openvino_genai.StreamingStatus.CANCEL
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Has nothing to do."""


class Decoder:
    """Decodes for the server. The setting `generation` applies to every answer; see `pipeline` for the others."""

    def __init__(self, settings: dict[str, Any]):
        self.generation = settings["generation"]
        set_all(openvino_genai.GenerationConfig(), self.generation)  # fails here, not at the first answer
        self.pipeline = pipeline(settings)

    def __call__(self, completion: Completion, send: Send) -> str:
        """Decodes one request and sends every pass as it ends; returns "stop" or "length"."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = completion.max_tokens
        config.stop_token_ids = set(completion.stop_token_ids)
        config.do_sample = completion.temperature > 0
        if config.do_sample and completion.top_k > 0 and completion.top_p < 1:
            raise RequestError("OpenVINO's releases apply top_k and top_p in different orders: set only one")
        if config.do_sample:
            config.temperature, config.rng_seed = completion.temperature, completion.seed
            config.top_p = float(completion.top_p)
            if completion.top_k > 0:
                config.top_k = completion.top_k
        set_all(config, self.generation)
        streamer = Streamer(send)
        prompt = openvino.Tensor(np.array([completion.prompt], dtype=np.int64))
        result = self.pipeline.generate(prompt, config, streamer)
        if streamer.failed is not None:
            raise streamer.failed
        if not result.tokens or not result.tokens[0]:
            raise RequestError(
                "OpenVINO gives no tokens: does the prompt fit engine.plain.scheduler.cache_size?"
            )
        [tokens] = result.tokens
        if rest := tokens[streamer.sent :]:
            send(rest, None, None)
        return "stop" if tokens[-1] in completion.stop_token_ids else "length"


def main() -> None:
    """Serves until it is ended."""
    decoder = Decoder(json.loads(sys.argv[2]))
    with CompletionServer(int(sys.argv[1])) as server:
        print(f"serving at {server.url}", flush=True)
        server.run(decoder)


if __name__ == "__main__":
    main()
