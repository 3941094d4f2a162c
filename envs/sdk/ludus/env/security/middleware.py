"""ASGI middleware that requires a token and refuses requests of foreign web pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.env.security.hosts import is_allowed_host, is_loopback_name, is_loopback_origin
from ludus.env.security.tokens import MISSING_TOKEN, REVOKED_TOKEN, AcceptedTokens
from ludus.proto.errors import ErrorCode

FOREIGN_ORIGIN = (
    "a web page from another origin cannot use this server; give the server a token and listen on a"
    " public host name to allow it"
)
FOREIGN_HOST = (
    "this server listens on loopback and accepts only the host names localhost, 127.0.0.1 and"
    " [::1]; use one of them, or allow the other name (allow_host)"
)
_REVOKED_CLOSE_CODE = 1008
"""WebSocket close code "policy violation"."""


class RequireToken:
    """ASGI middleware that answers 401 to requests and handshakes without a valid token.

    A WebSocket is closed when its token is no longer valid.
    """

    def __init__(
        self, app: ASGIApp, *, tokens: AcceptedTokens, open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        authorization = next(
            (value for name, value in scope["headers"] if name == b"authorization"), b""
        )
        if self._tokens.is_authorized(authorization):
            if scope["type"] == "http":
                await self._app(scope, receive, send)
            else:
                await self._serve_websocket(authorization, scope, receive, send)
            return
        detail = {"message": MISSING_TOKEN, "code": str(ErrorCode.UNAUTHENTICATED)}
        response = JSONResponse({"detail": detail}, 401, {"www-authenticate": "Bearer"})
        await _deny(response, scope, receive, send)

    async def _serve_websocket(
        self, authorization: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def close() -> None:
            tasks.add(asyncio.create_task(_close_revoked(send)))

        with self._tokens.track_connection(authorization, close):
            await self._app(scope, receive, send)


class RefuseForeignHosts:
    """ASGI middleware for loopback servers that refuses host names of other machines.

    A web page can resolve the name of its server to 127.0.0.1. Its browser then takes this
    server for the page's own and sends no `origin`, but still the page's name as `host`.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [
            value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"
        ]
        if all(is_allowed_host(host, self._allowed_hosts) for host in hosts):
            await self._app(scope, receive, send)
            return
        detail = {"message": FOREIGN_HOST, "code": str(ErrorCode.PERMISSION_DENIED)}
        await _deny(JSONResponse({"detail": detail}, 403), scope, receive, send)


class RefuseForeignOrigins:
    """ASGI middleware that refuses web pages from other origins on a loopback server.

    A browser lets any page call localhost. Only browsers send `origin`, so other clients are not
    affected.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _is_foreign(scope):
            await self._app(scope, receive, send)
            return
        detail = {"message": FOREIGN_ORIGIN, "code": str(ErrorCode.PERMISSION_DENIED)}
        await _deny(JSONResponse({"detail": detail}, 403), scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    server = scope.get("server")
    if not server or not is_loopback_name(server[0]):
        return False
    origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
    return not all(map(is_loopback_origin, origins))


async def _deny(response: JSONResponse, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)


async def _close_revoked(send: Send) -> None:
    """Close a WebSocket; do nothing if it is already closed."""
    with contextlib.suppress(OSError, RuntimeError):
        message = {"type": "websocket.close", "code": _REVOKED_CLOSE_CODE, "reason": REVOKED_TOKEN}
        await send(message)
