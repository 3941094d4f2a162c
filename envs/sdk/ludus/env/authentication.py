"""The token that a server may ask for, on HTTP and WebSocket."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.proto.errors import ErrorCode

MISSING_TOKEN = (
    "expected `authorization: Bearer <token>` with this server's token;"
    " pass token=... to the client"
)


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
        """Serves the request or refuses it."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        if is_authorized(given, self._token):
            await self._app(scope, receive, send)
            return
        detail = {"message": MISSING_TOKEN, "code": str(ErrorCode.UNAUTHENTICATED)}
        response = JSONResponse({"detail": detail}, 401, {"www-authenticate": "Bearer"})
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)
