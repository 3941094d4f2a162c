"""The MCP endpoints: `POST /mcp` with JSON responses, and JSON-RPC frames on `WS /mcp`.

A `POST` without `Mcp-Session-Id` follows OpenEnv and gets status 200, or 202 if there is no
response. A `POST` with the header follows MCP's streamable HTTP and gets status 404 if its session
has ended. The server never sends requests, so `GET /mcp`, which would listen for them, is not
allowed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from ludus.env.asgi.sessions import make_json_response
from ludus.env.asgi.socket import AsgiSocket, accept_socket
from ludus.env.mcp.server import (
    INVALID_REQUEST,
    McpCaller,
    McpError,
    McpServer,
    make_error_response,
)
from ludus.env.sessions.interface import Connection
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.proto.errors import ErrorCode, SessionLostError

SESSION_ID_HEADER = "mcp-session-id"


def add_mcp_routes(app: FastAPI, mcp: McpServer) -> None:
    """Add `/mcp` over HTTP."""

    @app.post("/mcp")
    async def call(request: Request) -> Response:
        body = await request.body()
        signed_id = request.headers.get(SESSION_ID_HEADER)
        caller = McpCaller()
        if signed_id:
            try:
                caller = McpCaller(mcp.verify_session_id(signed_id), may_play=True)
            except SessionLostError as error:
                return make_json_response(_make_invalid_request(error.message), 404)
        response = await mcp.answer_json(body, caller)
        if response is None:
            return Response(status_code=202)
        if signed_id:
            return make_json_response(response, 404 if _is_session_lost(response) else 200)
        if caller.may_play and caller.session_id is not None:
            headers = {SESSION_ID_HEADER: mcp.sign_session_id(caller.session_id)}
            return make_json_response(response, headers=headers)
        return make_json_response(response)

    @app.delete("/mcp")
    async def end(request: Request) -> Response:
        signed_id = request.headers.get(SESSION_ID_HEADER)
        if not signed_id:
            return make_json_response(
                _make_invalid_request("expected an Mcp-Session-Id header, got none"), 400
            )
        try:
            await mcp.sessions.close(mcp.verify_session_id(signed_id))
        except SessionLostError as error:
            return make_json_response(_make_invalid_request(error.message), 404)
        return Response(status_code=204)


class McpSocket:
    """The ASGI application of `WS /mcp`. The first call that needs a session opens it."""

    def __init__(self, mcp: McpServer) -> None:
        self._mcp = mcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until it ends, then close its session."""
        async with accept_socket(scope, receive, send, self._mcp.sessions) as (socket, connection):
            await _SocketServer(socket, self._mcp, connection).serve()


class _SocketServer:
    """The server's side of one connection."""

    def __init__(self, socket: AsgiSocket, mcp: McpServer, connection: Connection) -> None:
        self._socket = socket
        self._mcp = mcp
        self._caller = McpCaller(belongs_to_connection=True, connection=connection)
        self._close_task: asyncio.Task[None] | None = None

    def on_session_end(self, tombstone: SessionTombstone) -> None:
        close_call = self._socket.close_with_reason(tombstone)
        self._close_task = asyncio.get_running_loop().create_task(close_call)

    async def serve(self) -> None:
        try:
            while True:
                response = await self._answer(await self._socket.receive())
                if response is not None:
                    await self._socket.send(orjson.dumps(response))
        except SessionLostError as error:
            await self._socket.send(orjson.dumps(_make_invalid_request(error.message)))
        finally:
            if self._caller.session_id is not None:
                self._mcp.sockets.remove(self._caller.session_id)

    async def _answer(self, request_json: str) -> Any:
        try:
            return await self._mcp.answer_json(request_json, self._caller)
        finally:
            if self._caller.session_id is not None:
                self._mcp.sockets.claim(self._caller.session_id, self.on_session_end)


def _make_invalid_request(message: str) -> dict[str, Any]:
    return make_error_response(None, McpError(INVALID_REQUEST, message))


def _is_session_lost(response: dict[str, Any]) -> bool:
    error_data = response.get("error", {}).get("data")
    return isinstance(error_data, dict) and error_data.get("code") == ErrorCode.SESSION_LOST
