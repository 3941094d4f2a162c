"""The request ids and the error responses of the HTTP wire.

RequestIdMiddleware --> AuthenticationMiddleware --> the application
 x-request-id            401, 403                     413, 408 for too large or too slow bodies
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.env.messages.status import STATUSES_BY_CODE
from ludus.env.security.tracing import MAX_REQUEST_ID_CHARS, REQUEST_ID
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import UnknownEnvironmentError

_Header = tuple[bytes, bytes]
_REQUEST_ID_HEADER = REQUEST_ID.encode()
_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID_CHARS)
_RESPONSE_START_TYPES = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)


class RequestIdMiddleware:
    """ASGI middleware that adds a request id to each request and response.

    The id is the caller's `x-request-id` if that is valid, otherwise a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and add the id to the request and to its response."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        header = (_REQUEST_ID_HEADER, choose_request_id(scope["headers"]).encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] in _RESPONSE_START_TYPES:
                headers = _replace_header(header, message.get("headers", ()))
                message = {**message, "headers": headers}
            await send(message)

        headers = _replace_header(header, scope["headers"])
        await self._app({**scope, "headers": headers}, receive, send_with_id)


def choose_request_id(headers: list[_Header]) -> str:
    """Return the caller's request id if it is unique and safe to log, otherwise a new id."""
    request_ids = [header_value for name, header_value in headers if name == _REQUEST_ID_HEADER]
    if len(request_ids) == 1 and _VALID_REQUEST_ID.fullmatch(request_ids[0]):
        return request_ids[0].decode("ascii")
    return secrets.token_hex(16)


def _replace_header(header: _Header, headers: Iterable[_Header]) -> list[_Header]:
    return [*(other_header for other_header in headers if other_header[0] != header[0]), header]


def build_error_response(error: EnvError) -> JSONResponse:
    """Build the HTTP response that reports an error."""
    is_unknown_environment = isinstance(error, UnknownEnvironmentError)
    status = 404 if is_unknown_environment else STATUSES_BY_CODE[error.code].http_status
    detail: JsonObject = {"message": error.message, "code": str(error.code)}
    headers: dict[str, str] = {}
    if error.retry_after_s > 0:
        detail["retry_after_s"] = error.retry_after_s
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        headers["www-authenticate"] = 'Bearer, Basic realm="ludus"'
    return JSONResponse({"detail": detail}, status, headers)


async def send_error(error: EnvError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error as the response to a request or a WebSocket handshake."""
    response = build_error_response(error)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
