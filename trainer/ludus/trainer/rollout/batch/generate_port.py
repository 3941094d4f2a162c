"""`POST /generate/` on a loopback port of a rollout worker, as `trl vllm-serve` answers it.

    {"prompts": ["..."], "n": 8, "temperature": 1.0, "max_tokens": 32}
        --> {"prompt_ids": [[...]], "completion_ids": [[...] * 8], "logprobs": [[...] * 8]}

Prompt tokens come once per prompt, completions n times. What samples is the policy that is
trained, with the weights that the worker holds now; nobody has to send it weights. It is for code
on the same machine: it listens on 127.0.0.1 alone, and knows no callers apart.
"""

from __future__ import annotations

import logging
import socket
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.serving.listeners import HttpListener
from ludus.proto.errors import LudusError
from ludus.trainer.core.types import Sampling
from ludus.trainer.rollout.batch.completions import Completions

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_COMPLETIONS = 16_384
"""Of one request: each is a sequence of the engine, and all are held until the last has ended."""
_ANY_FREE_PORT = 0


class GenerateRequest(BaseModel):
    """What is asked for; a field that is not here is refused, unless it says nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Annotated[list[str | list[int]], Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    """0 and below take all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    """As many as there is room for, where that is less."""
    images: None = None
    truncate_prompt_tokens: None = None
    guided_decoding_regex: None = None
    structured_outputs_regex: None = None

    @property
    def sampling(self) -> Sampling:
        """How each completion is sampled."""
        return Sampling(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )


class GenerateAnswer(BaseModel):
    """What was sampled."""

    prompt_ids: list[list[int]]
    """[prompts]"""
    completion_ids: list[list[int]]
    """[prompts * n]"""
    logprobs: list[list[float]]
    """[prompts * n] of each sampled token, under the distribution that it was drawn from."""


class GeneratePort:
    """The port of one worker; made, started and stopped within its event loop."""

    def __init__(self, completions: Completions, port: int) -> None:
        """`port` 0 takes a free one; so does a port that another worker of this machine has."""
        self._completions = completions
        routes = [
            Route(path, self._generate, methods=["POST"]) for path in ("/generate/", "/generate")
        ]
        routes += [Route(path, _health) for path in ("/health/", "/health")]
        self._listener = HttpListener(Starlette(routes=routes), _bound(port))

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.port

    async def start(self) -> None:
        """Start to answer."""
        await self._listener.start()

    async def stop(self) -> None:
        """Stop answering."""
        await self._listener.stop()

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return JSONResponse({"detail": f"expected at most {MAX_MESSAGE_BYTES} bytes"}, 413)
        try:
            asked = GenerateRequest.model_validate_json(body)
        except ValidationError as error:
            return JSONResponse({"detail": _faults(error)}, 422)
        if len(asked.prompts) * asked.n > MAX_COMPLETIONS:
            detail = (
                f"expected at most {MAX_COMPLETIONS} completions of one request, got "
                f"{len(asked.prompts)} prompts times n = {asked.n}; send several requests"
            )
            return JSONResponse({"detail": detail}, 422)
        try:
            prompts = [self._completions.prompt_ids(prompt) for prompt in asked.prompts]
            answers = await self._completions.complete(prompts, asked.n, asked.sampling)
        except LudusError as error:
            return JSONResponse({"detail": str(error)}, 422)
        answer = GenerateAnswer(
            prompt_ids=prompts,
            completion_ids=[one.token_ids for one in answers],
            logprobs=[one.logprobs for one in answers],
        )
        return Response(answer.model_dump_json(), media_type="application/json")


async def _body(request: Request) -> bytes | None:
    """The whole of it; None where it is too large, of which nothing more is read."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_MESSAGE_BYTES:
            return None
    return bytes(content)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _faults(error: ValidationError) -> list[dict[str, Any]]:
    return [
        {"loc": ["body", *fault["loc"]], "msg": fault["msg"], "type": fault["type"]}
        for fault in error.errors()
    ]


def _bound(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        listener = socket.create_server((HOST, _ANY_FREE_PORT))
        _log.warning(
            "rollout.generate_port = %d is taken (%s); this worker listens on %d, which "
            "args.vllm_server_port names",
            *(port, error.strerror, listener.getsockname()[1]),
        )
        return listener
