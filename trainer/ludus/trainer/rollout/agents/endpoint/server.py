"""The endpoint of a rollout worker: OpenAI's API and MCP, with one key for each episode.

    POST /v1/chat/completions   POST /v1/responses   GET /v1/models
    POST /mcp                   the environment's tools, if the episode has some

A key is created when an episode starts and is invalid once the episode is over. It identifies the
episode of a request and grants nothing else: its holder can extend this one episode only. A request
whose client disconnects is cancelled, because a completion that the agent never receives must not
be trained on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.serving.listeners import HttpListener, authority, bind
from ludus.proto.errors import EngineLostError
from ludus.trainer.rollout.agents.endpoint.chat_completions import (
    chat_chunks,
    chat_response,
    read_chat_request,
)
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ApiError,
    ChatMessage,
    PolicyRequest,
    PolicyResponse,
    Responder,
)
from ludus.trainer.rollout.agents.endpoint.fields import JsonObject
from ludus.trainer.rollout.agents.endpoint.mcp import EpisodeTools, respond_to_mcp
from ludus.trainer.rollout.agents.endpoint.responses import (
    conversation_after,
    read_responses_request,
    response_body,
    response_events,
)

_ResultT = TypeVar("_ResultT")

MODEL = "ludus"
"""Default name of the policy's model; a request may use another name."""
_KEEP_ALIVE_S = 3600
"""Idle time of a connection. Agents keep connections open for long, and some do not reconnect."""


@dataclass(frozen=True, slots=True)
class EndpointAccess:
    """The addresses and the key with which an agent reaches the policy."""

    base_url: str
    """Base URL of OpenAI's API, including /v1."""
    api_key: str
    model: str = MODEL
    mcp_url: str | None = None
    """URL of the environment's tools, with the same key; None if the environment has none."""


@dataclass(slots=True, eq=False)
class EndpointEpisode:
    """An episode that its agent can reach through the endpoint."""

    access: EndpointAccess
    responder: Responder
    tools: EpisodeTools | None
    conversations: dict[str, tuple[ChatMessage, ...]] = field(default_factory=dict)
    """Conversation up to and including each response, by the response's id."""
    running: set[asyncio.Future[Any]] = field(default_factory=set)
    """Requests that are being served."""
    failure: Exception | None = None
    """Error of the policy. It makes the episode void, whatever the agent does with it."""

    def raise_failure(self) -> None:
        """Raise the error of the policy, if there was one."""
        if self.failure is not None:
            raise self.failure

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        """Return the responses to a request.

        Raises:
            ApiError: the request is refused, or the policy failed.
        """
        try:
            return await self.responder.respond(request)
        except ApiError:
            raise
        except Exception as error:
            self.failure = error
            is_lost = isinstance(error, EngineLostError)
            summary = "the engine has failed" if is_lost else "the policy could not respond"
            raise ApiError(
                f"{summary}: {type(error).__name__}: {error}",
                status=422,  # clients would retry after 5xx
                kind="policy_error",
                code="policy_error",
            ) from error


_Handler = Callable[[EndpointEpisode, Any], Awaitable[Response]]


class AgentEndpoint:
    """The HTTP server, created and used on one event loop."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, advertised_host: str | None = None
    ) -> None:
        """Bind the address.

        Args:
            port: port of the server; 0 selects a free one.
            advertised_host: host in the URLs that agents receive; None selects `host`.

        Raises:
            UserError: the address cannot be bound.
        """
        self._episodes: dict[str, EndpointEpisode] = {}
        routes = [
            Route("/v1/chat/completions", self._route(_chat), methods=["POST"]),
            Route("/v1/responses", self._route(_respond), methods=["POST"]),
            Route("/v1/models", self._route(_list_models)),
            Route("/v1/models/{name:path}", self._route(_show_model)),
            Route("/mcp", self._route(_mcp), methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        listening = bind(host, port, "environment.agent.host")
        self._listener = HttpListener(app, listening, keep_alive_s=_KEEP_ALIVE_S)
        self._address = f"http://{authority(advertised_host or host, self._listener.port)}"

    async def start(self) -> None:
        """Start the server."""
        await self._listener.start()

    async def stop(self) -> None:
        """Stop the server."""
        await self._listener.stop()

    @contextmanager
    def episode(
        self, responder: Responder, tools: EpisodeTools | None = None
    ) -> Iterator[EndpointEpisode]:
        """Yield an episode that its agent can reach until the block ends."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        mcp_url = f"{self._address}/mcp" if tools is not None else None
        access = EndpointAccess(f"{self._address}/v1", key, MODEL, mcp_url)
        episode = self._episodes[key] = EndpointEpisode(access, responder, tools)
        try:
            yield episode
        finally:
            del self._episodes[key]
            for request in episode.running:
                request.cancel()

    def _route(self, handle: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that passes a request to the episode of its key."""

        async def serve(request: Request) -> Response:
            try:
                scheme, _, key = request.headers.get("authorization", "").partition(" ")
                episode = self._episodes.get(key.strip())
                if scheme.lower() != "bearer" or episode is None:
                    raise ApiError(
                        "expected the key of an episode that is being played here (OPENAI_API_KEY "
                        "of its agent), got another one; the key ends with its episode",
                        status=401,
                        code="invalid_api_key",
                    )
                # The body must be read before waiting for the disconnect, which would consume it.
                body = (
                    await _read_json(request) if request.method == "POST" else request.path_params
                )
                return await _run_until_gone(request, episode, handle(episode, body))
            except ApiError as error:
                return _json_response(error.body, error.status)

        return serve


async def _chat(episode: EndpointEpisode, body: Any) -> Response:
    request = read_chat_request(body, MODEL)
    responses = await episode.respond(request.content)
    if request.is_stream:
        return _stream(chat_chunks(request, responses), is_named=False)
    return _json_response(chat_response(request, responses))


async def _respond(episode: EndpointEpisode, body: Any) -> Response:
    request = read_responses_request(body, MODEL, episode.conversations)
    [response] = await episode.respond(request.content)
    result = response_body(request, response)
    episode.conversations[result["id"]] = conversation_after(request, response)
    if request.is_stream:
        return _stream(response_events(result), is_named=True)
    return _json_response(result)


async def _list_models(episode: EndpointEpisode, body: Any) -> Response:
    return _json_response({"object": "list", "data": [_model_entry(MODEL)]})


async def _show_model(episode: EndpointEpisode, body: Any) -> Response:
    return _json_response(_model_entry(body["name"]))


async def _mcp(episode: EndpointEpisode, body: Any) -> Response:
    if episode.tools is None:
        raise ApiError(
            "the environment offers this agent no tools; set environment.tools = true if it "
            "has some",
            status=404,
            code="no_tools",
        )
    result = await respond_to_mcp(episode.tools, body)
    return Response(status_code=202) if result is None else _json_response(result)


async def _run_until_gone(
    request: Request, episode: EndpointEpisode, handling: Awaitable[_ResultT]
) -> _ResultT:
    """Return the result, and cancel it if the client disconnects or the episode ends.

    Raises:
        ApiError: the result was cancelled.
    """
    handling_task = asyncio.ensure_future(handling)
    episode.running.add(handling_task)
    watching = asyncio.ensure_future(_cancel_on_disconnect(request, handling_task))
    try:
        return await handling_task
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ApiError(
            "the episode is over, or its client has disconnected", status=401, code="episode_over"
        ) from None
    finally:
        episode.running.discard(handling_task)
        handling_task.cancel()
        watching.cancel()


async def _cancel_on_disconnect(request: Request, running: asyncio.Future[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    running.cancel()


async def _read_json(request: Request) -> Any:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_MESSAGE_BYTES:
            raise ApiError(f"expected at most {MAX_MESSAGE_BYTES} bytes, got more", status=413)
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not a JSON object: {error}") from None


def _model_entry(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "ludus"}


def _json_response(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _stream(chunks: Iterator[JsonObject], *, is_named: bool) -> Response:
    """Return server-sent events; with event names, or with an end mark as for chat completions."""

    async def lines() -> AsyncIterator[bytes]:
        for chunk in chunks:
            name = f"event: {chunk['type']}\n".encode() if is_named else b""
            yield name + b"data: " + orjson.dumps(chunk) + b"\n\n"
        if not is_named:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
