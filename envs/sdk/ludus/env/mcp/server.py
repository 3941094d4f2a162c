"""The MCP server (JSON-RPC 2.0), through which any MCP client can use any environment.

    initialize ---------------> a session of the client: play tools + environment's tools
    openenv/session/create ---> a session of OpenEnv:    environment's tools
    tools/call without either -> a new environment for this call

Only clients that called `initialize` get the play tools (`start_episode`, `take_action`,
`get_state`), because code that a policy runs inside a training session must not reset the session.
The endpoints are in `mcp/routes.py` and `http/websocket.py`, and the tools in `mcp/tools.py`.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ludus.env.asgi.sessions import EvictableSessions, require_session, use_session
from ludus.env.asgi.socket import SessionSockets
from ludus.env.incoming.faults import shorten
from ludus.env.mcp.tools import (
    call_tool,
    format_tools,
    is_tool_action,
    make_play_tools,
    step_with_tools,
)
from ludus.env.messages.openenv import make_error_data
from ludus.env.sessions.interface import Connection, OpenArgs, Sessions
from ludus.env.text.unicode import parse_json
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    CapacityError,
    EnvError,
    ErrorCode,
    InfrastructureError,
    InvalidCallError,
    RateLimitError,
    SessionLostError,
    to_env_error,
)

ReadKeys = Callable[[], Sequence[bytes]]
"""Function that returns the current keys of MCP session ids; the first one signs."""
PROTOCOL_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000
_NO_TOOLS_MESSAGE = "Environment does not support MCP"
_INSTRUCTIONS = (
    "Call start_episode, then take_action until the result contains done: true. Results contain"
    " the observations of the player."
)


@dataclass(slots=True)
class McpCaller:
    """The client that makes a call, and its session."""

    session_id: str | None = None
    """Session for the client's calls. None means a new session for each call."""
    tools_session_id: str = ""
    """Id that can only be used to call the session's tools; empty if there is no such id."""
    may_play: bool = False
    """True if the client started the session by `initialize`."""
    belongs_to_connection: bool = False
    """True if the session belongs to the connection, and only the connection may close it."""
    connection: Connection | None = None
    """The client's connection. The first call that needs a session opens one for it."""


@dataclass(eq=False)
class McpError(Exception):
    """A JSON-RPC error."""

    code: int
    message: str
    data: Any = None


class McpServer:
    """A server of JSON-RPC requests.

    Args:
        read_keys: returns the keys of the ids of sessions that clients may play in; the first one
            signs. Default: one random key.
    """

    def __init__(self, sessions: Sessions, read_keys: ReadKeys | None = None) -> None:
        self.sessions = sessions
        self.sockets = SessionSockets(sessions.events)
        self.evictable = EvictableSessions(sessions)
        random_keys = (secrets.token_bytes(32),)
        self._read_keys = read_keys or (lambda: random_keys)
        self._methods: dict[str, Callable[[JsonObject, McpCaller], Awaitable[JsonObject]]] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "openenv/session/create": self._create_session,
            "openenv/session/close": self._close_session,
        }

    # -- calls -------------------------------------------------------------------------

    async def answer_json(self, request_json: str | bytes, caller: McpCaller) -> JsonObject | None:
        """Return the response to a request as JSON, or None if it needs no response."""
        try:
            request = parse_json(request_json)
        except orjson.JSONDecodeError as error:
            return make_error_response(None, McpError(PARSE_ERROR, f"Parse error: {error}"))
        except InvalidCallError as error:
            return make_error_response(None, McpError(INVALID_REQUEST, error.message))
        return await self.answer(request, caller)

    async def answer(self, request: Any, caller: McpCaller) -> JsonObject | None:
        """Return the JSON-RPC response, or None for notifications and responses."""
        request_id = None
        try:
            if not isinstance(request, dict) or request.get("jsonrpc") != "2.0":
                raise McpError(
                    INVALID_REQUEST, 'Invalid request: expected an object with "jsonrpc": "2.0"'
                )
            request_id = _read_request_id(request)
            method = request.get("method")
            if method is None and ("result" in request or "error" in request):
                return None  # a response, although this server sends no requests
            if not isinstance(method, str):
                raise McpError(INVALID_REQUEST, "Invalid request: expected a method")
            if method.startswith("notifications/") and "id" not in request:
                return None
            params = request.get("params", {})
            if not isinstance(params, dict):
                raise McpError(INVALID_PARAMS, "Params must be an object")
            handler = self._methods.get(method)
            if handler is None:
                raise McpError(METHOD_NOT_FOUND, f"Method not found: {shorten(method)}")
            return {"jsonrpc": "2.0", "id": request_id, "result": await handler(params, caller)}
        except McpError as error:
            return make_error_response(request_id, error)
        except Exception as error:  # noqa: BLE001 - every request needs a JSON-RPC response
            return make_error_response(request_id, self._convert_error(to_env_error(error)))

    async def answer_always(self, request: JsonObject, caller: McpCaller) -> JsonObject:
        """Return the JSON-RPC response, or an empty response if the request needs none."""
        response = await self.answer(request, caller)
        return response or {"jsonrpc": "2.0", "id": None, "result": {}}

    def takes_tool_step(self, action: JsonObject) -> bool:
        """Return True if a step's action is OpenEnv's action for tools."""
        return "type" in action and bool(self.sessions.description.tools) and is_tool_action(action)

    async def step(self, session_id: str | None, action: JsonObject) -> bytes:
        """Take a step with OpenEnv's action for tools, and return the payload as JSON."""
        if action["type"] == "list_tools":
            return await step_with_tools(self.sessions, session_id or "", action)
        async with use_session(self.sessions, session_id) as call_session_id:
            return await step_with_tools(self.sessions, call_session_id, action)

    # -- session ids of clients that may play ------------------------------------------

    def sign_session_id(self, session_id: str) -> str:
        """Return the `Mcp-Session-Id` of a session in which the client may play."""
        return _sign_session_id(self._read_keys()[0], session_id)

    def verify_session_id(self, signed_id: str) -> str:
        """Return the session id in an `Mcp-Session-Id`.

        Raises:
            SessionLostError: this server did not issue the id.
        """
        session_id = signed_id.rpartition(".")[0]
        expected_ids = [_sign_session_id(key, session_id) for key in self._read_keys()]
        if not any(hmac.compare_digest(text.encode(), signed_id.encode()) for text in expected_ids):
            raise SessionLostError(
                "the Mcp-Session-Id is not an id that initialize returned; initialize again"
            )
        return session_id

    # -- methods -----------------------------------------------------------------------

    async def _initialize(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        if caller.session_id is None:
            caller.may_play = True
            if caller.connection is None:
                caller.session_id = (await self.sessions.open(OpenArgs())).session_id
                self.evictable.add(caller.session_id)
        version = params.get("protocolVersion")
        description = self.sessions.description
        result: JsonObject = {
            "protocolVersion": version if version in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": description.name, "version": description.version},
        }
        if caller.may_play:
            result["instructions"] = f"{description.description} {_INSTRUCTIONS}".strip()
        return result

    async def _ping(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        return {}

    async def _list_tools(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        description = self.sessions.description
        tools = [*description.tools, *(make_play_tools(description) if caller.may_play else ())]
        if not tools:
            raise McpError(INTERNAL_ERROR, _NO_TOOLS_MESSAGE)
        return {"tools": format_tools(tools)}

    async def _call_tool(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        name, arguments = params.get("name"), params.get("arguments")
        if not name or not isinstance(name, str):
            raise McpError(INVALID_PARAMS, "Missing 'name' in params")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise McpError(INVALID_PARAMS, "'arguments' must be an object")
        description = self.sessions.description
        is_environment_tool = any(tool.name == name for tool in description.tools)
        is_play_tool = caller.may_play and any(
            tool.name == name for tool in make_play_tools(description)
        )
        if not is_environment_tool and not is_play_tool:
            has_no_tools = not caller.may_play and not description.tools
            raise McpError(
                INVALID_PARAMS if caller.may_play else INTERNAL_ERROR,
                _NO_TOOLS_MESSAGE if has_no_tools else f"Unknown tool: {shorten(name)!r}",
            )
        session_id = await self._find_call_session(params, caller)
        async with use_session(self.sessions, session_id) as call_session_id:
            return await call_tool(
                self.sessions, call_session_id, name, arguments, is_play_tool=is_play_tool
            )

    async def _create_session(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        if caller.session_id is None and caller.connection is None:
            open_result = await self.sessions.open(OpenArgs(with_text=False))
            session_id, tools_session_id = open_result.session_id, open_result.tools_session_id
        else:
            session_id = await self._open_caller_session(caller)
            tools_session_id = caller.tools_session_id
        return {"session_id": session_id} | (
            {"tools_session_id": tools_session_id} if tools_session_id else {}
        )

    async def _close_session(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        session_id = params.get("session_id")
        if not session_id or not isinstance(session_id, str):
            raise McpError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
        if caller.belongs_to_connection and session_id == caller.session_id:
            raise McpError(
                INVALID_REQUEST, "Cannot close active WebSocket-managed session via MCP method"
            )
        if self.sockets.close_later(session_id):
            return {"session_id": session_id, "closed": False, "closing": True}
        try:
            await require_session(self.sessions, session_id)
        except SessionLostError as error:
            raise McpError(INVALID_PARAMS, error.message) from None
        await self.sessions.close(session_id)
        return {"session_id": session_id, "closed": True}

    # -- sessions ----------------------------------------------------------------------

    async def _find_call_session(self, params: JsonObject, caller: McpCaller) -> str | None:
        """Return the session for a tool call, or None for a new session."""
        if caller.session_id is not None:
            self.evictable.mark_used(caller.session_id)
            return caller.session_id
        if caller.connection is not None:
            return await self._open_caller_session(caller)
        session_id = params.get("session_id")
        if session_id and not isinstance(session_id, str):
            raise McpError(INVALID_PARAMS, "'session_id' must be a string")
        return session_id or None

    async def _open_caller_session(self, caller: McpCaller) -> str:
        if caller.session_id is None:
            open_result = await self.sessions.open(OpenArgs(), caller.connection)
            caller.session_id = open_result.session_id
            caller.tools_session_id = open_result.tools_session_id
        return caller.session_id

    # -- errors ------------------------------------------------------------------------

    def _convert_error(self, error: EnvError) -> McpError:
        error_data = make_error_data(error, self.sessions, is_upstream=True)
        message = error_data.pop("message")
        if error.retry_after_s > 0:
            error_data["retry_after_s"] = error.retry_after_s
        if isinstance(error, SessionLostError):
            return McpError(INVALID_PARAMS, f"Unknown session_id: {message}", error_data)
        is_server_error = isinstance(error, CapacityError | InfrastructureError | RateLimitError)
        if is_server_error or error.code is ErrorCode.FACTORY_ERROR:
            return McpError(SERVER_ERROR, message, error_data)
        return McpError(INTERNAL_ERROR, message, error_data)


def make_error_response(request_id: Any, error: McpError) -> JsonObject:
    """Return the JSON-RPC response for an error."""
    error_json = {"code": error.code, "message": error.message, "data": error.data}
    return {"jsonrpc": "2.0", "id": request_id, "error": error_json}


def _sign_session_id(key: bytes, session_id: str) -> str:
    digest = hmac.digest(key, session_id.encode(), "sha256")
    return f"{session_id}.{base64.urlsafe_b64encode(digest[:16]).decode().rstrip('=')}"


def _read_request_id(request: JsonObject) -> Any:
    request_id = request.get("id")
    is_id = isinstance(request_id, str | int | float) and not isinstance(request_id, bool)
    if request_id is not None and not is_id:
        raise McpError(INVALID_REQUEST, "Invalid request: expected id to be a string or number")
    return request_id
