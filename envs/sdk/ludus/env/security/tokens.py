"""The token that a server may ask for, on HTTP and WebSocket, and pages it does not serve."""

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


def is_authorized(given: str | bytes, token: str) -> bool:
    """True when an `authorization` value carries the token; takes the same time either way."""
    given_bytes = given if isinstance(given, bytes) else given.encode()
    return hmac.compare_digest(given_bytes, f"Bearer {token}".encode())


class RequireToken:
    """ASGI middleware that answers 401 to requests and handshakes without the token."""

    def __init__(self, app: ASGIApp, *, token: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._token = token
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request or refuse it."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        if is_authorized(given, self._token):
            await self._app(scope, receive, send)
            return
        detail = {"message": MISSING_TOKEN, "code": str(ErrorCode.UNAUTHENTICATED)}
        response = JSONResponse({"detail": detail}, 401, {"www-authenticate": "Bearer"})
        await _deny(response, scope, receive, send)


class RefuseForeignOrigins:
    """ASGI middleware that keeps web pages from elsewhere off a server on this machine.

    A browser lets any page call localhost, and a page can point its own name there. Only
    browsers send `origin`, so clients never notice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request or refuse it."""
        if scope["type"] not in ("http", "websocket") or not _is_foreign(scope):
            await self._app(scope, receive, send)
            return
        detail = {
            "message": "expected a request from this machine, got one from a page elsewhere;"
            " give the server a token and a name of its own to use it from web pages",
            "code": str(ErrorCode.PERMISSION_DENIED),
        }
        await _deny(JSONResponse({"detail": detail}, 403), scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    origin = next((v for k, v in scope["headers"] if k == b"origin"), None)
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
