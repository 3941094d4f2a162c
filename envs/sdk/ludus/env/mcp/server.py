"""MCP (JSON-RPC 2.0) over sessions: any environment can be played from any MCP client.

    initialize ---------------> a session of the client's own: play tools + environment's tools
    openenv/session/create ---> a session of OpenEnv's:        environment's tools
    tools/call without either -> a fresh environment for the one call

The play tools (`start_episode`, `take_action`, `get_state`) are for clients that began by
`initialize` alone: code that a policy runs inside a training session must not reset it.
The wires are in `mcp/routes.py` and `http/websocket.py`; tools in `mcp/tools.py`.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from ludus.env.asgi.sessions import EvictableSessions, fresh_session
from ludus.env.asgi.socket import SessionSockets
from ludus.env.mcp.tools import (
    call_environment_tool,
    is_tool_action,
    listed_tools,
    play,
    play_tools,
    step_with_tools,
)
from ludus.env.messages.openenv import error_data
from ludus.env.sessions.interface import Connection, OpenArgs, Sessions
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    AuthenticationError,
    CapacityError,
    EnvError,
    ErrorCode,
    InfrastructureError,
    RateLimitError,
    SessionLostError,
    to_env_error,
)

PROTOCOL_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000
_MAX_SHOWN_CHARS = 200
_INSTRUCTIONS = (
    "Call start_episode, then take_action until the result says done. Results hold what the"
    " player sees."
)


@dataclass(slots=True)
class McpCaller:
    """On whose behalf a call is made."""

    session_id: str | None = None
    """The session that calls act on; None is a fresh one for each call."""
    tools_session_id: str = ""
    """The id that calls its tools and does nothing else; empty where it has none."""
    may_play: bool = False
    """True where the client itself began the session by `initialize`."""
    is_managed: bool = False
    """True where the session belongs to the connection, which alone ends it."""
    connection: Connection | None = None
    """A connection that opens its session with the first call that needs one."""


class McpError(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class McpServer:
    """Answers JSON-RPC requests.

    Args:
        key: signs the ids of sessions that clients may play in; None draws one.
    """

    def __init__(
        self,
        sessions: Sessions,
        sockets: SessionSockets,
        spare: EvictableSessions,
        key: bytes | None = None,
    ) -> None:
        self._sessions = sessions
        self._sockets = sockets
        self._spare = spare
        self._key = key or secrets.token_bytes(32)
        self._methods: dict[str, Callable[[JsonObject, McpCaller], Awaitable[JsonObject]]] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "openenv/session/create": self._create_session,
            "openenv/session/close": self._close_session,
        }

    # -- calls -------------------------------------------------------------------------

    async def answer(self, request: Any, caller: McpCaller) -> JsonObject | None:
        """The JSON-RPC response; None where none is due, as for notifications."""
        request_id = None
        try:
            if not isinstance(request, dict) or request.get("jsonrpc") != "2.0":
                raise McpError(
                    INVALID_REQUEST, 'Invalid request: expected an object with "jsonrpc": "2.0"'
                )
            request_id = _request_id(request)
            method = request.get("method")
            if method is None and ("result" in request or "error" in request):
                return None  # a response; this server asks nothing
            if not isinstance(method, str):
                raise McpError(INVALID_REQUEST, "Invalid request: expected a method")
            if method.startswith("notifications/") and "id" not in request:
                return None
            params = request.get("params", {})
            if not isinstance(params, dict):
                raise McpError(INVALID_PARAMS, "Params must be an object")
            call = self._methods.get(method)
            if call is None:
                raise McpError(METHOD_NOT_FOUND, f"Method not found: {_shown(method)}")
            return {"jsonrpc": "2.0", "id": request_id, "result": await call(params, caller)}
        except McpError as error:
            return error_response(request_id, error)
        except Exception as error:  # noqa: BLE001 - every request is answered in JSON-RPC
            return error_response(request_id, self._error_of(to_env_error(error)))

    async def reply(self, request: JsonObject, caller: McpCaller) -> JsonObject:
        """The same where every request gets a reply, as on `/ws`."""
        response = await self.answer(request, caller)
        return response or {"jsonrpc": "2.0", "id": None, "result": {}}

    def understands(self, action: JsonObject) -> bool:
        """True when a step's action is OpenEnv's for tools."""
        return (
            "type" in action and bool(self._sessions.description.tools) and is_tool_action(action)
        )

    async def step(self, session_id: str | None, action: JsonObject) -> bytes:
        """The payload of a step whose action is OpenEnv's for tools, as JSON."""
        if session_id is not None or action["type"] == "list_tools":
            return await step_with_tools(self._sessions, session_id or "", action)
        async with fresh_session(self._sessions) as fresh:
            return await step_with_tools(self._sessions, fresh, action)

    # -- session ids of clients that may play ------------------------------------------

    def ticket_of(self, session_id: str) -> str:
        """The `Mcp-Session-Id` of a session in which the client may play."""
        digest = hmac.digest(self._key, session_id.encode(), "sha256")
        return f"{session_id}.{base64.urlsafe_b64encode(digest[:16]).decode().rstrip('=')}"

    def caller_of(self, ticket: str) -> McpCaller:
        """Who holds the ticket.

        Raises:
            SessionLostError: nobody was given it here.
        """
        session_id = ticket.rpartition(".")[0]
        if not hmac.compare_digest(self.ticket_of(session_id).encode(), ticket.encode()):
            raise SessionLostError(
                "expected the Mcp-Session-Id that initialize returned, got another one;"
                " initialize again"
            )
        return McpCaller(session_id, may_play=True)

    async def end(self, caller: McpCaller) -> None:
        """End the caller's session."""
        if caller.session_id is not None:
            await self._sessions.close(caller.session_id)

    # -- methods -----------------------------------------------------------------------

    async def _initialize(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        if caller.session_id is None:
            caller.may_play = True
            if caller.connection is None:
                caller.session_id = (await self._sessions.open(OpenArgs())).session_id
                self._spare.add(caller.session_id)
        asked = params.get("protocolVersion")
        description = self._sessions.description
        result: JsonObject = {
            "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": description.name, "version": description.version},
        }
        if caller.may_play:
            result["instructions"] = f"{description.description} {_INSTRUCTIONS}".strip()
        return result

    async def _ping(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        return {}

    async def _list_tools(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        description = self._sessions.description
        tools = [*description.tools, *(play_tools(description) if caller.may_play else ())]
        if not tools:
            raise McpError(INTERNAL_ERROR, "Environment does not support MCP")
        return {"tools": listed_tools(tools)}

    async def _call_tool(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        name, arguments = params.get("name"), params.get("arguments")
        if not name or not isinstance(name, str):
            raise McpError(INVALID_PARAMS, "Missing 'name' in params")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise McpError(INVALID_PARAMS, "expected 'arguments' to be an object")
        description = self._sessions.description
        is_own = any(tool.name == name for tool in description.tools)
        is_play = caller.may_play and any(t.name == name for t in play_tools(description))
        if not is_own and not is_play:
            raise self._unknown_tool(name, caller)
        call = call_environment_tool if is_own else play
        session_id = await self._session_for(params, caller)
        if session_id is not None:
            return await call(self._sessions, session_id, name, arguments)
        async with fresh_session(self._sessions) as fresh:
            return await call(self._sessions, fresh, name, arguments)

    async def _create_session(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        if caller.session_id is None and caller.connection is None:
            opened = await self._sessions.open(OpenArgs(with_text=False))
            return _created(opened.session_id, opened.tools_session_id)
        return _created(await self._own_session(caller), caller.tools_session_id)

    async def _close_session(self, params: JsonObject, caller: McpCaller) -> JsonObject:
        session_id = params.get("session_id")
        if not session_id or not isinstance(session_id, str):
            raise McpError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
        if caller.is_managed and session_id == caller.session_id:
            raise McpError(
                INVALID_REQUEST, "Cannot close active WebSocket-managed session via MCP method"
            )
        if self._sockets.close_later(session_id):
            return {"session_id": session_id, "closed": False, "closing": True}
        await self._check_exists(session_id)
        await self._sessions.close(session_id)
        return {"session_id": session_id, "closed": True}

    # -- sessions ----------------------------------------------------------------------

    async def _session_for(self, params: JsonObject, caller: McpCaller) -> str | None:
        """The session a tool is called in; None for one that is opened for the one call."""
        if caller.session_id is not None:
            self._spare.used(caller.session_id)
            return caller.session_id
        if caller.connection is not None:
            return await self._own_session(caller)
        named = params.get("session_id")
        if named and not isinstance(named, str):
            raise McpError(INVALID_PARAMS, "expected 'session_id' to be a string")
        return named or None

    async def _own_session(self, caller: McpCaller) -> str:
        if caller.session_id is None:
            opened = await self._sessions.open(OpenArgs(), caller.connection)
            caller.session_id, caller.tools_session_id = opened.session_id, opened.tools_session_id
        return caller.session_id

    async def _check_exists(self, session_id: str) -> None:
        try:
            await self._sessions.state(session_id)
        except (SessionLostError, AuthenticationError):
            raise McpError(INVALID_PARAMS, f"Unknown session_id: {_shown(session_id)}") from None

    # -- errors ------------------------------------------------------------------------

    def _unknown_tool(self, name: str, caller: McpCaller) -> McpError:
        if caller.may_play:
            return McpError(INVALID_PARAMS, f"Unknown tool: {_shown(name)!r}")
        if not self._sessions.description.tools:
            return McpError(INTERNAL_ERROR, "Environment does not support MCP")
        return McpError(INTERNAL_ERROR, f"Unknown tool: {_shown(name)!r}")

    def _error_of(self, error: EnvError) -> McpError:
        data = error_data(error, self._sessions, upstream=True)
        message = data.pop("message")
        if error.retry_after_s > 0:
            data["retry_after_s"] = error.retry_after_s
        if isinstance(error, SessionLostError):
            return McpError(INVALID_PARAMS, f"Unknown session_id: {message}", data)
        is_server_side = isinstance(error, CapacityError | InfrastructureError | RateLimitError)
        if is_server_side or error.code is ErrorCode.FACTORY_ERROR:
            return McpError(SERVER_ERROR, message, data)
        return McpError(INTERNAL_ERROR, message, data)


def error_response(request_id: Any, error: McpError) -> JsonObject:
    """The JSON-RPC response that says what went wrong."""
    said = {"code": error.code, "message": error.message, "data": error.data}
    return {"jsonrpc": "2.0", "id": request_id, "error": said}


def parse_error(error: orjson.JSONDecodeError) -> JsonObject:
    """The response to what is no JSON."""
    return error_response(None, McpError(PARSE_ERROR, f"Parse error: {error}"))


def _created(session_id: str, tools_session_id: str) -> JsonObject:
    """What creating a session returns: upstream's key, and an id that an agent may be given."""
    return {"session_id": session_id} | (
        {"tools_session_id": tools_session_id} if tools_session_id else {}
    )


def _request_id(request: JsonObject) -> Any:
    request_id = request.get("id")
    is_id = isinstance(request_id, str | int | float) and not isinstance(request_id, bool)
    if request_id is not None and not is_id:
        raise McpError(INVALID_REQUEST, "Invalid request: expected id to be a string or number")
    return request_id


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
