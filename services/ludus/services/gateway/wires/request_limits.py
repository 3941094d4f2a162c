"""Bounds on what an HTTP request may send, and an id and a trace that follow it.

    TraceRequests --> LimitRequests --> Authenticate --> the application
      x-request-id      413, 408, 431
      traceparent

A refusal is typed JSON and ends the connection. What the client still sends is read and dropped
for a moment: were the connection closed under it, it would never see why.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import dataclass

from opentelemetry import context, propagate
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.env.security.tracing import (
    MAX_REQUEST_ID_CHARS,
    REQUEST_ID,
    current_request_id,
    request_id,
)
from ludus.proto.errors import CallTimeoutError, ConfigError, EnvError, InvalidCallError
from ludus.services.gateway.tenancy.authentication import refuse

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID_CHARS)
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_MAX_TRACE_HEADER_BYTES = 1024
_DROP_S = 2.0
_DROP_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may send."""

    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 30.0
    """For the whole body: a client that drips bytes does not hold a connection for ever."""
    max_headers: int = 100
    max_header_bytes: int = 32 * 1024
    """Names and values together."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_timeout_s", "max_headers", "max_header_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"expected {name} above 0, got {getattr(self, name)}")


class LimitRequests:
    """ASGI middleware that answers 413, 408 or 431 to requests beyond the limits.

    Messages of WebSockets are bounded by the server (uvicorn's `ws_max_size`); the headers of
    their handshakes are bounded here.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits | None = None) -> None:
        self._app = app
        self._limits = limits or RequestLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request, or refuses it as soon as it is known to be too much."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        limits = self._limits
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.max_headers or num_bytes > limits.max_header_bytes:
            error = InvalidCallError(
                f"expected at most {limits.max_headers} headers of {limits.max_header_bytes}"
                f" bytes together, got {len(headers)} of {num_bytes}"
            )
            await refuse(error, 431, scope, receive, _closing(scope, receive, send))
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif _declared_bytes(headers) > limits.max_body_bytes:
            too_large = _too_large(limits)
            await refuse(too_large, 413, scope, receive, _closing(scope, receive, send))
        else:
            await _Body(limits, scope, receive, send).serve(self._app)


class _Body:
    """One request whose body is counted while the application reads it."""

    def __init__(self, limits: RequestLimits, scope: Scope, receive: Receive, send: Send) -> None:
        self._limits = limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._deadline_s = asyncio.get_running_loop().time() + limits.body_timeout_s
        self._num_bytes = 0
        self._is_complete = False
        self._has_started = False
        self._is_refused = False

    async def serve(self, app: ASGIApp) -> None:
        """Returns when the application has, or the refusal is sent."""
        try:
            await app(self._scope, self.receive, self.send)
        except ClientDisconnect:
            if not self._is_refused:
                raise

    async def receive(self) -> Message:
        """The next message; after a refusal the client seems to be gone."""
        if self._is_refused:
            return {"type": "http.disconnect"}
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            late = CallTimeoutError(
                f"expected the whole body within {self._limits.body_timeout_s:g} s, got"
                f" {self._num_bytes} bytes of it; send it faster, or in smaller requests"
            )
            return await self._refuse(late, 408)
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._num_bytes > self._limits.max_body_bytes:
                return await self._refuse(_too_large(self._limits), 413)
        return message

    async def send(self, message: Message) -> None:
        """Passes on what the application answers, unless it was refused."""
        if self._is_refused:
            return
        self._has_started = True
        await self._send(message)

    async def _refuse(self, error: EnvError, status: int) -> Message:
        if not self._has_started:  # else the answer stands, and only the reading ends
            self._is_refused = True
            closing = _closing(self._scope, self._receive, self._send)
            await refuse(error, status, self._scope, self._receive, closing)
        self._is_complete = True
        return {"type": "http.disconnect"}


class TraceRequests:
    """ASGI middleware that gives each request an id, and continues the caller's trace.

    The id is the caller's `x-request-id` where that is short and plain, else a new one; it
    comes back on the response, and `current_request_id()` has it meanwhile.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request within its id and trace."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        own = request_id_of(scope["headers"])
        echoed = (REQUEST_ID.encode(), own.encode())

        async def echo(message: Message) -> None:
            if message["type"] in _STARTS:
                others = [h for h in message.get("headers", ()) if h[0].lower() != echoed[0]]
                message = {**message, "headers": [*others, echoed]}
            await send(message)

        carrier = trace_carrier(scope["headers"])
        token = context.attach(propagate.extract(carrier)) if carrier else None
        try:
            with request_id(own):
                await self._app(scope, receive, echo)
        finally:
            if token is not None:
                context.detach(token)


class AddRequestId(logging.Filter):
    """Gives log records a `request_id`: handler.addFilter(AddRequestId()).

    Then a format may hold `%(request_id)s`, which is `-` outside requests.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """True, always."""
        record.request_id = current_request_id() or "-"
        return True


_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The caller's request id where it has exactly one that is fit for logs, else a new one."""
    given = [value for name, value in headers if name == REQUEST_ID.encode()]
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return secrets.token_hex(16)


def trace_carrier(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of W3C's trace context; empty where there is no `traceparent`."""
    carrier = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in _TRACE_HEADERS and len(value) <= _MAX_TRACE_HEADER_BYTES
    }
    return carrier if "traceparent" in carrier else {}


def _declared_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            # Longer numbers would cost time to read; they are too large anyway.
            return int(value) if len(value) < 20 else 10**20
    return 0  # chunked, or nonsense: the body is counted


def _too_large(limits: RequestLimits) -> InvalidCallError:
    return InvalidCallError(
        f"expected a body of at most {limits.max_body_bytes} bytes, got more; send less at a"
        " time, or use gRPC or a WebSocket for long episodes"
    )


def _closing(scope: Scope, receive: Receive, send: Send) -> Send:
    """A `send` that closes the connection once the client has had a chance to read."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif message["type"] == "http.response.body" and not _expects_leave(scope):
            await send({**message, "more_body": True})
            await _drop_rest(receive)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return closing


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


def _expects_leave(scope: Scope) -> bool:
    """True when the client waits for `100 Continue`, which reading on would send."""
    return any(name == b"expect" for name, _ in scope["headers"])
