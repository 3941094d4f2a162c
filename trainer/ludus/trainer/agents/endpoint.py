"""The endpoint of a rollout worker: OpenAI's API and MCP, a key for each episode.

    POST /v1/chat/completions   POST /v1/responses   GET /v1/models
    POST /mcp                   the environment's tools, where the episode has some

A key is drawn when an episode begins and refused once it is over. It says which episode a request
belongs to, and gives nothing else: whoever has it can make this one episode longer, and no other.
A request whose client has gone away is given up: what nobody is told is never trained on.
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
from ludus.trainer.agents.api_error import ApiError, unauthorized
from ludus.trainer.agents.chat_completions import chat_chunks, chat_response, read_chat_request
from ludus.trainer.agents.exchange import Answerer, ChatMessage
from ludus.trainer.agents.fields import JsonObject
from ludus.trainer.agents.mcp import EpisodeTools, answer_mcp
from ludus.trainer.agents.responses import (
    begun_of,
    conversation_after,
    read_responses_request,
    response,
    response_events,
)

_ResultT = TypeVar("_ResultT")

MODEL = "ludus"
"""What the policy is called; a request may call it something else."""


_KEEP_ALIVE_S = 3600
"""Agents keep connections while they think, and not all of them try again on one that has ended."""


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent needs to ask the policy."""

    base_url: str
    """With /v1."""
    api_key: str
    model: str = MODEL
    mcp_url: str | None = None
    """Where the environment's tools are called, with the same key; None where it has none."""


@dataclass(slots=True, eq=False)
class _Episode:
    answerer: Answerer
    tools: EpisodeTools | None
    responses: dict[str, tuple[ChatMessage, ...]] = field(default_factory=dict)
    """What was said up to each response, by its id."""
    under_way: set[asyncio.Future[Any]] = field(default_factory=set)
    failure: Exception | None = None
    """Why the policy could not answer: the episode is lost, whatever its agent makes of that."""


class Endpoint:
    """The HTTP server; made and used on one event loop."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, advertised: str | None = None
    ) -> None:
        """Bind the address.

        Args:
            port: 0 takes a free one.
            advertised: the host that agents are told; None is the one it listens on.

        Raises:
            UserError: it cannot be bound.
        """
        self._episodes: dict[str, _Episode] = {}
        routes = [
            Route("/v1/chat/completions", self._in_episode(_chat), methods=["POST"]),
            Route("/v1/responses", self._in_episode(_respond), methods=["POST"]),
            Route("/v1/models", self._in_episode(_models)),
            Route("/v1/models/{name:path}", self._in_episode(_model)),
            Route("/mcp", self._in_episode(_mcp), methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        listening = bind(host, port, "environment.agent.host")
        self._listener = HttpListener(app, listening, keep_alive_s=_KEEP_ALIVE_S)
        self._address = f"http://{authority(advertised or host, self._listener.port)}"

    async def start(self) -> None:
        """Begin to listen."""
        await self._listener.start()

    async def stop(self) -> None:
        """Listen no longer."""
        await self._listener.stop()

    @contextmanager
    def episode(self, answerer: Answerer, tools: EpisodeTools | None = None) -> Iterator[Episode]:
        """An episode that its agent can reach until the block ends."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        episode = _Episode(answerer, tools)
        self._episodes[key] = episode
        mcp_url = f"{self._address}/mcp" if tools is not None else None
        try:
            yield Episode(Access(f"{self._address}/v1", key, MODEL, mcp_url), episode)
        finally:
            del self._episodes[key]
            for request in episode.under_way:
                request.cancel()

    def _in_episode(
        self, answer: Callable[[_Episode, Any], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that answers for the episode whose key came with the request."""

        async def handle(request: Request) -> Response:
            try:
                scheme, _, key = request.headers.get("authorization", "").partition(" ")
                episode = self._episodes.get(key.strip())
                if scheme.lower() != "bearer" or episode is None:
                    raise unauthorized()
                # Whoever looks for the client's end would take what is left of the body.
                body = await _body(request) if request.method == "POST" else request.path_params
                return await _until_gone(request, episode, answer(episode, body))
            except ApiError as error:
                return _json(error.body, error.status)

        return handle


class Episode:
    """An episode of the endpoint."""

    def __init__(self, access: Access, episode: _Episode) -> None:
        self.access = access
        self._episode = episode

    def raise_failure(self) -> None:
        """Raise what kept the policy from answering, if anything did."""
        if self._episode.failure is not None:
            raise self._episode.failure


async def _chat(episode: _Episode, body: Any) -> Response:
    asked = read_chat_request(body, MODEL)
    said = await _answer(episode, asked.asked)
    if asked.is_stream:
        return _stream(chat_chunks(asked, said), is_named=False)
    return _json(chat_response(asked, said))


async def _respond(episode: _Episode, body: Any) -> Response:
    asked = read_responses_request(body, MODEL, episode.responses)
    [said] = await _answer(episode, asked.asked)
    finished = response(asked, said)
    episode.responses[finished["id"]] = conversation_after(asked, said)
    if asked.is_stream:
        return _stream(response_events(begun_of(finished), finished), is_named=True)
    return _json(finished)


async def _models(episode: _Episode, body: Any) -> Response:
    return _json({"object": "list", "data": [_described(MODEL)]})


async def _model(episode: _Episode, body: Any) -> Response:
    return _json(_described(body["name"]))


async def _mcp(episode: _Episode, body: Any) -> Response:
    if episode.tools is None:
        raise ApiError(
            "the environment offers this agent no tools; set environment.tools = true where it "
            "has some",
            status=404,
            code="no_tools",
        )
    answered = await answer_mcp(episode.tools, body)
    return Response(status_code=202) if answered is None else _json(answered)


async def _answer(episode: _Episode, asked: Any) -> Any:
    try:
        return await episode.answerer.answer(asked)
    except ApiError:
        raise
    except Exception as error:
        # It is not the agent's doing: whatever it makes of the answer below, the episode is void.
        episode.failure = error
        lost = isinstance(error, EngineLostError)
        what = "the policy is gone" if lost else "the policy could not answer"
        raise ApiError(
            f"{what}: {type(error).__name__}: {error}",
            status=422,  # clients would ask again after 5xx
            kind="policy_error",
            code="policy_error",
        ) from error


async def _until_gone(
    request: Request, episode: _Episode, answering: Awaitable[_ResultT]
) -> _ResultT:
    """What the request is answered with; given up when its client or its episode has gone.

    Raises:
        ApiError: it was given up.
    """
    answer = asyncio.ensure_future(answering)
    episode.under_way.add(answer)
    gone = asyncio.ensure_future(_gone(request, answer))
    try:
        return await answer
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ApiError(
            "the episode is over, or its client has gone", status=401, code="episode_over"
        ) from None
    finally:
        episode.under_way.discard(answer)
        answer.cancel()
        gone.cancel()


async def _gone(request: Request, answer: asyncio.Future[Any]) -> None:
    """Cancel the answer when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


async def _body(request: Request) -> Any:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_MESSAGE_BYTES:
            raise ApiError(f"expected at most {MAX_MESSAGE_BYTES} bytes, got more", status=413)
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"expected a JSON object, got what is no JSON: {error}") from None


def _described(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "ludus"}


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _stream(chunks: Iterator[JsonObject], *, is_named: bool) -> Response:
    """Server-sent events; those of `/v1/responses` have names, those of chat an end mark."""

    async def written() -> AsyncIterator[bytes]:
        for chunk in chunks:
            name = f"event: {chunk['type']}\n".encode() if is_named else b""
            yield name + b"data: " + orjson.dumps(chunk) + b"\n\n"
        if not is_named:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(written(), media_type="text/event-stream")
