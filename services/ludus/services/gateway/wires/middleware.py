"""Request ids, authentication and error responses in front of the wires.

    HTTP, WebSocket --> RequestIdMiddleware --> AuthenticationMiddleware --+
                        x-request-id            401, 403                   +--> the application
    gRPC -------------------------------------> AuthenticationInterceptor -+

In the application, `get_current_tenant()` returns the caller. `ConnectionCloser` makes HTTP clients
leave a draining gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope
from starlette.websockets import WebSocket

from ludus.env.asgi.socket import truncate_reason
from ludus.env.grpc.call_server import abort_call
from ludus.env.messages.status import STATUSES_BY_CODE
from ludus.env.security.tracing import MAX_REQUEST_ID_CHARS, REQUEST_ID
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import UnknownEnvironmentError
from ludus.services.gateway.tenancy.access import TenantAccess
from ludus.services.gateway.tenancy.tenants import Scope, Tenant, set_current_tenant

_Header = tuple[bytes, bytes]
_REQUEST_ID_HEADER = REQUEST_ID.encode()
_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID_CHARS)
_RESPONSE_START_TYPES = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Paths that need no token, because the kubelet, which probes them, has none."""
ADMIN_PATHS = ("/admin", "/drain")
"""Paths that need the scope `admin`, like all paths below them; other paths need `step`."""
_REVOKED_CLOSE_CODE = 1008
"""WebSocket close code "policy violation", for callers whose token was revoked."""
_AUTHORIZATION_PATTERN = re.compile(r"(\bauthorization\b\W{1,6}).+", re.IGNORECASE)
_CONNECTION_LOGGERS = (
    "uvicorn.error",
    "uvicorn.access",
    "uvicorn.asgi",
    "websockets.server",
    "websockets.client",
)


class RequestIdMiddleware:
    """ASGI middleware that adds a request id to each request and response.

    The id is the caller's `x-request-id` if that is valid, otherwise a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
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
    request_ids = [text for name, text in headers if name == _REQUEST_ID_HEADER]
    if len(request_ids) == 1 and _VALID_REQUEST_ID.fullmatch(request_ids[0]):
        return request_ids[0].decode("ascii")
    return secrets.token_hex(16)


def _replace_header(header: _Header, headers: Iterable[_Header]) -> list[_Header]:
    return [*(other_header for other_header in headers if other_header[0] != header[0]), header]


class ConnectionCloser:
    """ASGI middleware that ends HTTP connections after a response, while the gateway drains.

    A client that keeps its connection would otherwise send every open to this gateway. Any gateway
    can answer the next call of an open session.

    Args:
        is_draining: returns True while the gateway drains.
    """

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve a request, and close its connection if the gateway is draining."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                headers = _replace_header((b"connection", b"close"), message.get("headers", ()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_and_close)


class AuthenticationMiddleware:
    """ASGI middleware that refuses unauthorized requests with status 401 or 403."""

    def __init__(self, app: ASGIApp, access: TenantAccess) -> None:
        self._app = app
        self._access = access
        remove_tokens_from_logs()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it if its token is invalid."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        authorizations = [text for name, text in scope["headers"] if name == b"authorization"]
        is_admin = any(path == prefix or path.startswith(f"{prefix}/") for prefix in ADMIN_PATHS)
        try:
            tenant = self._access.authenticate(*authorizations)
            self._access.require_scope(tenant, Scope.ADMIN if is_admin else Scope.STEP)
        except EnvError as error:
            await send_error(error, scope, receive, send)
            return
        set_current_tenant(tenant)
        if scope["type"] == "http":
            await self._app(scope, receive, send)
            return
        tasks: set[asyncio.Task[None]] = set()

        def close_connection(error: EnvError) -> None:
            tasks.add(asyncio.create_task(_close_websocket(send, error)))

        with self._access.track_connection(tenant, close_connection):
            await self._app(scope, receive, send)


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """A gRPC interceptor that refuses calls without a valid token with the scope `step`."""

    def __init__(self, access: TenantAccess) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return a handler that checks the token before it serves the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        authorizations = [text for name, text in metadata if name == "authorization"]
        is_stream = handler.request_streaming
        serve_call = handler.stream_stream if is_stream else handler.unary_unary

        async def serve_authenticated(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                tenant = self._access.authenticate(*authorizations)
                self._access.require_scope(tenant, Scope.STEP)
            except EnvError as error:
                await abort_call(context, error)
            set_current_tenant(tenant)
            if not is_stream:
                return await serve_call(request, context)
            return await self._run_while_admitted(tenant, serve_call(request, context), context)

        make_handler = (
            grpc.stream_stream_rpc_method_handler
            if is_stream
            else grpc.unary_unary_rpc_method_handler
        )
        return make_handler(
            serve_authenticated, handler.request_deserializer, handler.response_serializer
        )

    async def _run_while_admitted(
        self, tenant: Tenant, work: Awaitable[Any], context: grpc.aio.ServicerContext
    ) -> Any:
        """Run the work and return its result; cancel it when the tenant's access is revoked."""
        serve_task = asyncio.ensure_future(work)
        refusals: list[EnvError] = []

        def cancel_call(error: EnvError) -> None:
            refusals.append(error)
            serve_task.cancel()

        with self._access.track_connection(tenant, cancel_call):
            try:
                return await serve_task
            except asyncio.CancelledError:
                if not refusals:
                    raise
        await abort_call(context, refusals[0])


async def _close_websocket(send: Send, error: EnvError) -> None:
    """Close a WebSocket with the error as the reason; do nothing if it is already closed."""
    with contextlib.suppress(OSError, RuntimeError):
        reason = truncate_reason(error.message)
        await send({"type": "websocket.close", "code": _REVOKED_CLOSE_CODE, "reason": reason})


def remove_tokens_from_logs() -> None:
    """Remove tokens from the records of all loggers that log raw requests."""
    for name in _CONNECTION_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(log_filter, _TokenFilter) for log_filter in logger.filters):
            logger.addFilter(_TokenFilter())


class _TokenFilter(logging.Filter):
    """A filter that removes Authorization headers from log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove the token from the record, and keep the record."""
        message = record.getMessage()
        cleaned_message = _AUTHORIZATION_PATTERN.sub(r"\1***", message)
        if cleaned_message != message:
            record.msg, record.args = cleaned_message, ()
        return True


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


async def send_error(error: EnvError, scope: AsgiScope, receive: Receive, send: Send) -> None:
    """Send an error as the response to a request or a WebSocket handshake."""
    response = build_error_response(error)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
