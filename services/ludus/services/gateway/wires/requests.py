"""Common parts of HTTP requests: ids, and errors as responses.

AddRequestIds --> Authenticate --> the application
 x-request-id      401, 403         413, 408 for bodies that are too large or too slow
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.env.messages.status import STATUS_OF_CODE
from ludus.env.security.tracing import MAX_REQUEST_ID_CHARS, REQUEST_ID
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import UnknownEnvironmentError

_Header = tuple[bytes, bytes]
_REQUEST_ID_HEADER = REQUEST_ID.encode()
_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID_CHARS)
_RESPONSE_STARTS = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)


class RequestIdMiddleware:
    """ASGI middleware that adds a request id to each request and response.

    The id is the caller's `x-request-id` if it is valid, otherwise a new id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request with its id."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        header = (_REQUEST_ID_HEADER, choose_request_id(scope["headers"]).encode())

        async def echo(message: Message) -> None:
            if message["type"] in _RESPONSE_STARTS:
                headers = _replace_header(header, message.get("headers", ()))
                message = {**message, "headers": headers}
            await send(message)

        headers = _replace_header(header, scope["headers"])
        await self._app({**scope, "headers": headers}, receive, echo)


def choose_request_id(headers: list[_Header]) -> str:
    """Return the caller's request id if it is single and safe to log, otherwise a new id."""
    request_ids = [value for name, value in headers if name == _REQUEST_ID_HEADER]
    if len(request_ids) == 1 and _VALID_ID.fullmatch(request_ids[0]):
        return request_ids[0].decode("ascii")
    return secrets.token_hex(16)


def _replace_header(header: _Header, headers: Iterable[_Header]) -> list[_Header]:
    return [*(other_header for other_header in headers if other_header[0] != header[0]), header]


def error_response(error: EnvError) -> JSONResponse:
    """Build the response to an error."""
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
