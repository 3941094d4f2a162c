"""ASGI middleware that requires a token and refuses requests from foreign web pages."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.proto.errors import ErrorCode

MISSING_TOKEN = (
    "expected `authorization: Bearer <token>` with this server's token;"
    " pass token=... to the client"
)

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def is_authorized(authorization: str | bytes, token: str) -> bool:
    """Return True if an `authorization` value contains the token, in constant time."""
    authorization_bytes = (
        authorization if isinstance(authorization, bytes) else authorization.encode()
    )
    return hmac.compare_digest(authorization_bytes, f"Bearer {token}".encode())


class RequireToken:
    """ASGI middleware that answers 401 to requests and handshakes without the token."""

    def __init__(self, app: ASGIApp, *, token: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._token = token
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        authorization = next(
            (value for name, value in scope["headers"] if name == b"authorization"), b""
        )
        if is_authorized(authorization, self._token):
            await self._app(scope, receive, send)
            return
        detail = {"message": MISSING_TOKEN, "code": str(ErrorCode.UNAUTHENTICATED)}
        response = JSONResponse({"detail": detail}, 401, {"www-authenticate": "Bearer"})
        await _deny(response, scope, receive, send)


class RefuseForeignOrigins:
    """ASGI middleware that refuses web pages from other origins on a loopback server.

    A browser lets any page call localhost, and a page can resolve its own name to localhost.
    Only browsers send `origin`, so other clients are not affected.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _is_foreign(scope):
            await self._app(scope, receive, send)
            return
        detail = {
            "message": "a web page from another origin cannot use this server; give the server"
            " a token and listen on a public host name to allow it",
            "code": str(ErrorCode.PERMISSION_DENIED),
        }
        await _deny(JSONResponse({"detail": detail}, 403), scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
    server = scope.get("server")
    if origin is None or not server or server[0] not in _LOOPBACK_HOSTS:
        return False
    try:
        return urlsplit(origin.decode("latin-1")).hostname not in _LOOPBACK_HOSTS
    except ValueError:
        return True


async def _deny(response: JSONResponse, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
