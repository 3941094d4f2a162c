"""The endpoint of a rollout worker: OpenAI's API and MCP, with one key for each episode.

    POST /v1/chat/completions   POST /v1/responses   GET /v1/models
    POST /mcp                   the environment's tools over JSON-RPC 2.0, if the episode has some

A key is created when an episode starts and becomes invalid when the episode ends. It identifies the
episode of a request and gives no access to other episodes. If the client of a request disconnects,
the request is cancelled, because a completion that the agent never receives must not be trained on.

MCP needs no session, because the key identifies the episode. The result of `initialize` therefore
contains no session id.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.mcp.server import PROTOCOL_VERSIONS
from ludus.env.serving.listeners import HttpListener, bind, format_authority
from ludus.env.text.unicode import parse_json
from ludus.env.types import Tool
from ludus.proto.errors import EngineLostError, InvalidCallError
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.tool_calls import ToolCall
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter
from ludus.trainer.rollout.agents.endpoint.chat_completions import (
    make_chat_chunks,
    make_chat_response,
    read_chat_request,
)
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ApiError,
    ChatMessage,
    PolicyRequest,
    PolicyResponse,
    Responder,
)
from ludus.trainer.rollout.agents.endpoint.fields import JsonObject, quote
from ludus.trainer.rollout.agents.endpoint.responses import (
    extend_conversation,
    make_response_body,
    make_response_events,
    read_responses_request,
)

_ResultT = TypeVar("_ResultT")

DEFAULT_MODEL = "ludus"
"""Default name of the policy's model; a request may use another name."""
_KEEP_ALIVE_S = 3600
"""Maximum idle time of a connection. It is long, because some agents do not reconnect."""
CallRecorder: TypeAlias = Callable[[int, int], None]
"""Function that records numbers: (tool calls, failed tool calls)."""

_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32600, -32601, -32602


class EpisodeTools:
    """The tools of an episode's environment, which the agent can call."""

    def __init__(self, adapter: ToolAdapter, record_calls: CallRecorder | None) -> None:
        self._adapter = adapter
        self._record_calls = record_calls
        self.status: RolloutStatus | None = None
        """Status of an episode that a call ended; None if the episode continues."""
        self.reward = 0.0
        """Sum of the rewards of all calls."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._adapter.toolbox.tools

    async def call_tool(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; return its result, and whether the call failed."""
        if self.status is not None:
            return "the episode is over", True
        outcome = await self._adapter.call_tool(call)
        self.status = outcome.status
        self.reward += outcome.reward
        if self._record_calls is not None:
            self._record_calls(1, outcome.num_calls_failed)
        return outcome.messages[0]["content"], outcome.num_calls_failed > 0


def make_tools(
    adapter: EnvironmentAdapter, record_calls: CallRecorder | None = None
) -> EpisodeTools | None:
    """Return the tools of an episode; None if the environment offers none."""
    return EpisodeTools(adapter, record_calls) if isinstance(adapter, ToolAdapter) else None


@dataclass(frozen=True, slots=True)
class EndpointAccess:
    """The URLs and the key with which an agent reaches the policy and the tools."""

    base_url: str
    """Base URL of OpenAI's API, including /v1."""
    api_key: str
    model: str = DEFAULT_MODEL
    mcp_url: str | None = None
    """MCP URL of the environment's tools; None if the environment has no tools."""


@dataclass(slots=True, eq=False)
class EndpointEpisode:
    """An episode that is being played through the endpoint."""

    access: EndpointAccess
    responder: Responder
    tools: EpisodeTools | None
    conversations: dict[str, tuple[ChatMessage, ...]] = field(default_factory=dict)
    """Conversation up to and including each response, by response id."""
    handler_tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    """Tasks that are serving requests."""
    failure: Exception | None = None
    """Error of the policy. It makes the episode void, even if the agent handles it."""

    def raise_if_failed(self) -> None:
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
                error_type="policy_error",
                code="policy_error",
            ) from error


_Handler = Callable[[EndpointEpisode, Any], Awaitable[Response]]


class AgentEndpoint:
    """The HTTP server. It must be created and used on the same event loop."""

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
            Route("/v1/chat/completions", self._make_route(_handle_chat), methods=["POST"]),
            Route("/v1/responses", self._make_route(_handle_responses), methods=["POST"]),
            Route("/v1/models", self._make_route(_describe_models)),
            Route("/v1/models/{name:path}", self._make_route(_describe_models)),
            Route("/mcp", self._make_route(_handle_mcp, is_for_policy=False), methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        listening_socket = bind(host, port, "environment.agent.host")
        self._listener = HttpListener(
            app,
            listening_socket,
            keep_alive_s=_KEEP_ALIVE_S,
            allowed_hosts=[advertised_host or host],
        )
        self._address = f"http://{format_authority(advertised_host or host, self._listener.port)}"

    async def start(self) -> None:
        await self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    @contextmanager
    def open_episode(
        self, responder: Responder, tools: EpisodeTools | None = None
    ) -> Iterator[EndpointEpisode]:
        """Yield an episode that its agent can reach until the block ends."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        mcp_url = f"{self._address}/mcp" if tools is not None else None
        access = EndpointAccess(f"{self._address}/v1", key, DEFAULT_MODEL, mcp_url)
        episode = self._episodes[key] = EndpointEpisode(access, responder, tools)
        try:
            yield episode
        finally:
            del self._episodes[key]
            for handler_task in episode.handler_tasks:
                handler_task.cancel()

    def _make_route(
        self, handle: _Handler, *, is_for_policy: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:

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
                # The body must be read first, because waiting for a disconnect would consume it.
                is_post = request.method == "POST"
                body = request.path_params
                if is_post:
                    body = await _read_json(request, episode.responder if is_for_policy else None)
                return await _run_until_disconnect(request, episode, handle(episode, body))
            except ApiError as error:
                return _make_json_response(error.body, error.status)

        return serve


async def _handle_chat(episode: EndpointEpisode, body: Any) -> Response:
    request = read_chat_request(body, DEFAULT_MODEL)
    responses = await episode.respond(request.policy_request)
    if request.is_streamed:
        return _make_stream(make_chat_chunks(request, responses), has_event_names=False)
    return _make_json_response(make_chat_response(request, responses))


async def _handle_responses(episode: EndpointEpisode, body: Any) -> Response:
    request = read_responses_request(body, DEFAULT_MODEL, episode.conversations)
    [response] = await episode.respond(request.policy_request)
    response_json = make_response_body(request, response)
    episode.conversations[response_json["id"]] = extend_conversation(request, response)
    if request.is_streamed:
        return _make_stream(make_response_events(response_json), has_event_names=True)
    return _make_json_response(response_json)


async def _describe_models(episode: EndpointEpisode, path_params: Any) -> Response:
    name = path_params.get("name", DEFAULT_MODEL)
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ludus"}
    return _make_json_response(model if path_params else {"object": "list", "data": [model]})


async def _handle_mcp(episode: EndpointEpisode, body: Any) -> Response:
    if episode.tools is None:
        raise ApiError(
            "the environment offers this agent no tools; set environment.tools = true if it "
            "has some",
            status=404,
            code="no_tools",
        )
    mcp_response = await _respond_to_mcp(episode.tools, body)
    return Response(status_code=202) if mcp_response is None else _make_json_response(mcp_response)


async def _run_until_disconnect(
    request: Request, episode: EndpointEpisode, handler_result: Awaitable[_ResultT]
) -> _ResultT:
    """Return the result of a handler, which a disconnect or the end of the episode cancels.

    Raises:
        ApiError: the handler was cancelled.
    """
    handler_task = asyncio.ensure_future(handler_result)
    episode.handler_tasks.add(handler_task)
    watcher_task = asyncio.ensure_future(_cancel_on_disconnect(request, handler_task))
    try:
        return await handler_task
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ApiError(
            "the episode is over, or its client has disconnected", status=401, code="episode_over"
        ) from None
    finally:
        episode.handler_tasks.discard(handler_task)
        handler_task.cancel()
        watcher_task.cancel()


async def _cancel_on_disconnect(request: Request, handler_task: asyncio.Future[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    handler_task.cancel()


async def _read_json(request: Request, responder: Responder | None) -> Any:
    """Return the content of a body, whose size is checked before it is read and parsed.

    Args:
        responder: the responder that limits the size; None if the body does not become a prompt.
    """

    def check_size(num_bytes: int) -> None:
        if responder is not None:
            responder.check_body_size(num_bytes)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ApiError(f"expected at most {MAX_MESSAGE_BYTES} bytes, got more", status=413)

    check_size(int(request.headers.get("content-length", 0)))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        check_size(len(body))
    try:
        return parse_json(bytes(body))
    except InvalidCallError as error:
        raise ApiError(error.message, status=413) from None
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not a JSON object: {error}") from None


def _make_json_response(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _make_stream(chunks: Iterator[JsonObject], *, has_event_names: bool) -> Response:
    """Return a stream of server-sent events, with event names or with [DONE] at its end."""

    async def write_lines() -> AsyncIterator[bytes]:
        for chunk in chunks:
            event_line = f"event: {chunk['type']}\n".encode() if has_event_names else b""
            yield event_line + b"data: " + orjson.dumps(chunk) + b"\n\n"
        if not has_event_names:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(write_lines(), media_type="text/event-stream")


async def _respond_to_mcp(tools: EpisodeTools, request: Any) -> JsonObject | None:
    """Return the response to an MCP request; None for a notification."""
    if not isinstance(request, dict) or not isinstance(request.get("method"), str):
        return _make_mcp_error(None, _INVALID_REQUEST, f"expected a request, got {quote(request)}")
    if "id" not in request:
        return None
    request_id, params = request["id"], request.get("params") or {}
    if not isinstance(params, dict):
        return _make_mcp_error(
            request_id, _INVALID_PARAMS, f"expected params by name, got {quote(params)}"
        )
    match request["method"]:
        case "initialize":
            return _make_mcp_result(request_id, _make_server_info(params))
        case "ping":
            return _make_mcp_result(request_id, {})
        case "tools/list":
            entries = [_make_tool_entry(tool) for tool in tools.tools]
            return _make_mcp_result(request_id, {"tools": entries})
        case "tools/call":
            return await _call_tool(tools, request_id, params)
    return _make_mcp_error(request_id, _METHOD_NOT_FOUND, f"no method {quote(request['method'])}")


async def _call_tool(tools: EpisodeTools, request_id: Any, params: JsonObject) -> JsonObject:
    name, arguments = params.get("name"), params.get("arguments") or {}
    tool_names = [tool.name for tool in tools.tools]
    if not isinstance(arguments, dict) or name not in tool_names:
        return _make_mcp_error(
            request_id,
            _INVALID_PARAMS,
            f"expected one of {tool_names} with arguments, got {quote(name)} with "
            f"{quote(arguments)}",
        )
    text, has_failed = await tools.call_tool(ToolCall(str(name), arguments))
    content = [{"type": "text", "text": text}]
    return _make_mcp_result(request_id, {"content": content, "isError": has_failed})


def _make_server_info(params: JsonObject) -> JsonObject:
    version = params.get("protocolVersion")
    return {
        "protocolVersion": version if version in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "ludus", "version": "1"},
    }


def _make_tool_entry(tool: Tool) -> JsonObject:
    schema = tool.input_schema or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _make_mcp_result(request_id: Any, result: JsonObject) -> JsonObject:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def _make_mcp_error(request_id: Any, code: int, message: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
