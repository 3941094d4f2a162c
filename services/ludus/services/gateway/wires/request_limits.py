"""Limits on the bodies of HTTP requests, and request ids.

    AddRequestIds --> Authenticate --> LimitBodies --> the application
     x-request-id      401, 403         413, 408

`asgi/uvicorn_http.py` limits request headers, and uvicorn limits WebSocket messages.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.env.limits import BODY_TIMEOUT_S, MAX_MESSAGE_BYTES
from ludus.env.security.tracing import MAX_REQUEST_ID_CHARS, REQUEST_ID
from ludus.proto.errors import CallTimeoutError, EnvError, InvalidCallError
from ludus.services.gateway.wires.refusals import error_response

_Header = tuple[bytes, bytes]
_REQUEST_ID_HEADER = REQUEST_ID.encode()
_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID_CHARS)
_RESPONSE_STARTS = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)
MAX_DROP_S = 2.0
_MAX_DROP_BYTES = 64 * 1024 * 1024


class LimitBodies:
    """ASGI middleware that reads each body completely before it calls the application.

    Every endpoint accepts one JSON value, so streaming a body has no advantage. A body that is too
    large is refused with status 413, a body that arrives too slowly with 408.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int = MAX_MESSAGE_BYTES, timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it as soon as its body is too large or too slow."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except InvalidCallError as too_large:
            await _refuse_body(too_large, 413, scope, receive, send)
        except TimeoutError:
            too_slow = CallTimeoutError(
                f"the body did not arrive within {self._timeout_s:g} s; send it faster, or in"
                " smaller requests"
            )
            await _refuse_body(too_slow, 408, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _prepend(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the body; return None if the client disconnected."""
        self._check(_declared_bytes(scope))
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InvalidCallError(
                f"the body is larger than {self._max_bytes} bytes; send smaller requests, or use"
                " gRPC or a WebSocket for long episodes"
            )


class AddRequestIds:
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
                message = {
                    **message,
                    "headers": _replace_header(header, message.get("headers", ())),
                }
            await send(message)

        await self._app(
            {**scope, "headers": _replace_header(header, scope["headers"])}, receive, echo
        )


def choose_request_id(headers: list[_Header]) -> str:
    """Return the caller's request id if it is single and safe to log, otherwise a new id."""
    request_ids = [value for name, value in headers if name == _REQUEST_ID_HEADER]
    if len(request_ids) == 1 and _VALID_ID.fullmatch(request_ids[0]):
        return request_ids[0].decode("ascii")
    return secrets.token_hex(16)


def _replace_header(header: _Header, headers: Iterable[_Header]) -> list[_Header]:
    return [*(other_header for other_header in headers if other_header[0] != header[0]), header]


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            # Parsing a longer number takes time, and the number is too large in any case.
            return int(value) if len(value) < 20 else 10**20
    return 0  # chunked or not valid: the body itself is counted


def _prepend(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse_body(
    error: EnvError, status: int, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the error and close the connection.

    The rest of the body is read and dropped for a short time. A client whose connection closes
    while it sends would never see the error.
    """
    response = error_response(error, status)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # Reading from a client that waits for `100 Continue` would make it send the body.
    if not any(name == b"expect" for name, _ in scope["headers"]):
        await _drop_rest(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drop_rest(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(MAX_DROP_S):
            while num_bytes < _MAX_DROP_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
