"""The MCP endpoints: `POST /mcp` with JSON responses, and JSON-RPC frames on `WS /mcp`.

A `POST` without `Mcp-Session-Id` follows OpenEnv and always gets status 200. A `POST` with the
header follows MCP's streamable HTTP and gets status 404 if its session has ended. The server never
sends requests, so `GET /mcp`, which would listen for them, is not allowed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from ludus.env.asgi.sessions import json_response
from ludus.env.asgi.socket import AsgiSocket, accept_socket
from ludus.env.mcp.server import (
    INVALID_REQUEST,
    McpCaller,
    McpError,
    McpServer,
    error_response,
)
from ludus.env.sessions.interface import Connection
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.proto.errors import ErrorCode, SessionLostError

TICKET_HEADER = "mcp-session-id"


def add_mcp_routes(app: FastAPI, mcp: McpServer) -> None:
    """Add `/mcp` over HTTP."""

    @app.post("/mcp")
    async def call(request: Request) -> Response:
        body = await request.body()
        ticket = request.headers.get(TICKET_HEADER)
        caller = McpCaller()
        if ticket:
            try:
                caller = McpCaller(mcp.read_ticket(ticket), may_play=True)
            except SessionLostError as error:
                return json_response(_invalid_request(error.message), 404)
        response = await mcp.answer_text(body, caller)
        if response is None:
            return Response(status_code=202)
        if ticket:
            return json_response(response, 404 if _is_session_lost(response) else 200)
        if caller.may_play and caller.session_id is not None:
            return json_response(
                response, headers={TICKET_HEADER: mcp.make_ticket(caller.session_id)}
            )
        return json_response(response)

    @app.delete("/mcp")
    async def end(request: Request) -> Response:
        ticket = request.headers.get(TICKET_HEADER)
        if not ticket:
            return json_response(
                _invalid_request("expected an Mcp-Session-Id header, got none"), 400
            )
        try:
            await mcp.sessions.close(mcp.read_ticket(ticket))
        except SessionLostError as error:
            return json_response(_invalid_request(error.message), 404)
        return Response(status_code=204)


class McpSocket:
    """The ASGI application of `WS /mcp`. The first call that needs a session opens it."""

    def __init__(self, mcp: McpServer) -> None:
        self._mcp = mcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until it ends, then close its session."""
        async with accept_socket(scope, receive, send, self._mcp.sessions) as (socket, connection):
            await _McpSocketServer(socket, self._mcp, connection).serve()


class _McpSocketServer:
    """The server's side of one connection."""

    def __init__(self, socket: AsgiSocket, mcp: McpServer, connection: Connection) -> None:
        self._socket = socket
        self._mcp = mcp
        self._caller = McpCaller(is_managed=True, connection=connection)
        self._closing: asyncio.Task[None] | None = None

    def on_session_end(self, tombstone: SessionTombstone) -> None:
        closing = self._socket.close_with_reason(tombstone)
        self._closing = asyncio.get_running_loop().create_task(closing)

    async def serve(self) -> None:
        try:
            while True:
                response = await self._answer(await self._socket.receive())
                if response is not None:
                    await self._socket.send(orjson.dumps(response))
        except SessionLostError as error:
            await self._socket.send(orjson.dumps(_invalid_request(error.message)))
        finally:
            if self._caller.session_id is not None:
                self._mcp.sockets.remove(self._caller.session_id)

    async def _answer(self, text: str) -> Any:
        try:
            return await self._mcp.answer_text(text, self._caller)
        finally:
            if self._caller.session_id is not None:
                self._mcp.sockets.claim(self._caller.session_id, self.on_session_end)


def _invalid_request(message: str) -> dict[str, Any]:
    return error_response(None, McpError(INVALID_REQUEST, message))


def _is_session_lost(response: dict[str, Any]) -> bool:
    data = response.get("error", {}).get("data")
    return isinstance(data, dict) and data.get("code") == ErrorCode.SESSION_LOST
