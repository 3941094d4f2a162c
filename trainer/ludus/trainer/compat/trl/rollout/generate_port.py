"""`POST /generate/` on a loopback port of a rollout worker, in the format of `trl vllm-serve`.

    {"prompts": ["..."], "n": 8, "temperature": 1.0, "max_tokens": 32}
        --> {"prompt_ids": [[...]], "completion_ids": [[...] * 8], "logprobs": [[...] * 8]}

The response has one list of tokens for each prompt and n lists for its completions. The policy
samples with the worker's current weights, so a client does not need to send weights. The port is
for code on the same machine: it listens on 127.0.0.1 only and has no authentication.
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
from ludus.trainer.compat.trl.rollout.completion_service import CompletionService
from ludus.trainer.core.types import Sampling

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_COMPLETIONS = 16_384
"""Maximum number of completions of a request, which are all stored until the last one ends."""
_ANY_FREE_PORT = 0


class GenerateRequest(BaseModel):
    """The body of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Annotated[list[str | list[int]], Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    """Number of most likely tokens; 0 and below select all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    """Maximum number of sampled tokens; reduced if there is less room."""
    images: None = None
    truncate_prompt_tokens: None = None
    guided_decoding_regex: None = None
    structured_outputs_regex: None = None

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of each completion."""
        return Sampling(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )


class GeneratePort:
    """The server of one runner, created and used on one event loop."""

    def __init__(self, completions: CompletionService, port: int) -> None:
        """Bind the port, or a free one if `port` is 0 or is in use."""
        self._completions = completions
        routes = [
            Route(path, self._generate, methods=["POST"]) for path in ("/generate/", "/generate")
        ]
        routes += [Route(path, _health) for path in ("/health/", "/health")]
        self._listener = HttpListener(Starlette(routes=routes), _bind(port))

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._listener.port

    async def start(self) -> None:
        """Start the server."""
        await self._listener.start()

    async def stop(self) -> None:
        """Stop the server."""
        await self._listener.stop()

    async def _generate(self, request: Request) -> Response:
        body = await _read_body(request)
        if body is None:
            return JSONResponse({"detail": f"expected at most {MAX_MESSAGE_BYTES} bytes"}, 413)
        try:
            generate = GenerateRequest.model_validate_json(body)
        except ValidationError as error:
            return JSONResponse({"detail": _describe_errors(error)}, 422)
        if len(generate.prompts) * generate.n > MAX_COMPLETIONS:
            detail = (
                f"expected at most {MAX_COMPLETIONS} completions of one request, got "
                f"{len(generate.prompts)} prompts times n = {generate.n}; send several requests"
            )
            return JSONResponse({"detail": detail}, 422)
        try:
            prompts = [self._completions.prompt_ids(prompt) for prompt in generate.prompts]
            completions = await self._completions.complete(prompts, generate.n, generate.sampling)
        except LudusError as error:
            return JSONResponse({"detail": str(error)}, 422)
        return JSONResponse(
            {
                "prompt_ids": prompts,
                "completion_ids": [completion.token_ids for completion in completions],
                "logprobs": [completion.logprobs for completion in completions],
            }
        )


async def _read_body(request: Request) -> bytes | None:
    """Return the body; None if it is too large, in which case the rest is not read."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_MESSAGE_BYTES:
            return None
    return bytes(content)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _describe_errors(error: ValidationError) -> list[dict[str, Any]]:
    return [
        {"loc": ["body", *entry["loc"]], "msg": entry["msg"], "type": entry["type"]}
        for entry in error.errors()
    ]


def _bind(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        listener = socket.create_server((HOST, _ANY_FREE_PORT))
        _log.warning(
            "rollout.generate_port = %d cannot be bound (%s); this worker listens on %d, as "
            "args.vllm_server_port reports",
            *(port, error.strerror, listener.getsockname()[1]),
        )
        return listener
