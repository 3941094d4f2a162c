"""Errors as HTTP responses with typed JSON, also in reply to a WebSocket handshake."""

from __future__ import annotations

import math

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.env.messages.status import STATUS_OF_CODE
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import UnknownEnvironmentError


def error_response(error: EnvError, status: int | None = None) -> JSONResponse:
    """Build the response to an error; `status` replaces the HTTP status of its code."""
    if status is None:
        is_unknown = isinstance(error, UnknownEnvironmentError)
        status = 404 if is_unknown else STATUS_OF_CODE[error.code].http
    detail: JsonObject = {"message": error.message, "code": str(error.code)}
    headers: dict[str, str] = {}
    if error.retry_after_s > 0:
        detail["retry_after_s"] = error.retry_after_s
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        headers["www-authenticate"] = 'Bearer, Basic realm="ludus"'
    return JSONResponse({"detail": detail}, status, headers)


async def refuse(error: EnvError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error as the response to a request or a handshake."""
    response = error_response(error)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
