"""Bounds on the bodies of HTTP requests, and the id that follows each request.

    AddRequestIds --> Authenticate --> LimitBodies --> the application
     x-request-id      401, 403         413, 408

Heads are bounded before (`asgi/uvicorn_http.py`), messages of WebSockets by uvicorn itself.
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
_GOOD_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID_CHARS)
_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
_DROP_S = 2.0
_DROP_BYTES = 64 * 1024 * 1024


class LimitBodies:
    """ASGI middleware that reads each body whole before the application is called.

    Every endpoint takes one JSON value, so nothing is gained by reading it bit by bit. A body
    that is too large is answered with 413, one that is too slow with 408.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int = MAX_MESSAGE_BYTES, timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request, or refuses it as soon as it is known to be too much."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except InvalidCallError as too_large:
            await _refuse(too_large, 413, scope, receive, send)
        except TimeoutError:
            too_slow = CallTimeoutError(
                f"expected the whole body within {self._timeout_s:g} s, got a part of it; send it"
                " faster, or in smaller requests"
            )
            await _refuse(too_slow, 408, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _beginning_with(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client left before its end."""
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
                f"expected a body of at most {self._max_bytes} bytes, got more; send less at a"
                " time, or use gRPC or a WebSocket for long episodes"
            )


class AddRequestIds:
    """ASGI middleware that gives each request an id, for the application and on the response.

    It is the caller's `x-request-id` where that is short and plain, else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request under its id."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        header = (_REQUEST_ID_HEADER, request_id_of(scope["headers"]).encode())

        async def echo(message: Message) -> None:
            if message["type"] in _STARTS:
                message = {**message, "headers": _with(header, message.get("headers", ()))}
            await send(message)

        await self._app({**scope, "headers": _with(header, scope["headers"])}, receive, echo)


def request_id_of(headers: list[_Header]) -> str:
    """The caller's request id where it has exactly one that is fit for logs, else a new one."""
    given = [value for name, value in headers if name == _REQUEST_ID_HEADER]
    if len(given) == 1 and _GOOD_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return secrets.token_hex(16)


def _with(
    header: tuple[bytes, bytes], headers: Iterable[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    return [*(other for other in headers if other[0] != header[0]), header]


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            # Longer numbers would cost time to read; they are too large anyway.
            return int(value) if len(value) < 20 else 10**20
    return 0  # chunked, or nonsense: the body is counted


def _beginning_with(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse(error: EnvError, status: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error and end the connection.

    What the client still sends is read and dropped for a moment: were the connection closed
    under it, it would never see why.
    """
    response = error_response(error, status)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    # A client that waits for `100 Continue` sends nothing, and reading on would ask it to.
    if not any(name == b"expect" for name, _ in scope["headers"]):
        await _drop_rest(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drop_rest(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(_DROP_S):
            while num_bytes < _DROP_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
