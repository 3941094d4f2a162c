"""Authentication in front of the wires: ASGI middleware and a gRPC interceptor.

HTTP, WebSocket --> AuthenticationMiddleware ----+--> the application, where
gRPC -----------> AuthenticationInterceptor -----+    `get_current_tenant()` returns the caller
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from ludus.env.asgi.socket import truncate_close_reason
from ludus.env.grpc.call_server import abort_call
from ludus.proto.errors import EnvError
from ludus.services.gateway.tenancy.access import TenantAccess
from ludus.services.gateway.tenancy.tenants import Scope, Tenant, set_current_tenant
from ludus.services.gateway.wires.requests import send_error

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
        authorizations = [value for key, value in scope["headers"] if key == b"authorization"]
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

        with self._access.register_connection(tenant, close_connection):
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
        authorizations = [value for key, value in metadata if key == "authorization"]
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

        with self._access.register_connection(tenant, cancel_call):
            try:
                return await serve_task
            except asyncio.CancelledError:
                if not refusals:
                    raise
        await abort_call(context, refusals[0])


async def _close_websocket(send: Send, error: EnvError) -> None:
    """Close a WebSocket with the error as the reason; do nothing if it is already closed."""
    with contextlib.suppress(OSError, RuntimeError):
        reason = truncate_close_reason(error.message)
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
