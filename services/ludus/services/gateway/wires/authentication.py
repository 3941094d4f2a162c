"""Asks for a token before anything else is done: ASGI middleware, and a gRPC interceptor.

HTTP, WebSocket --> Authenticate ------+--> the application, where `current_tenant()`
gRPC -----------> AuthenticateCalls ---+    says who calls
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
from starlette.types import Scope as Connection

from ludus.env.asgi.socket import cut_close_reason
from ludus.env.grpc.servicer import abort
from ludus.proto.errors import EnvError
from ludus.services.gateway.tenancy.access import Access
from ludus.services.gateway.tenancy.callers import enter_tenant
from ludus.services.gateway.tenancy.tenants import Scope, Tenant
from ludus.services.gateway.wires.refusals import refuse

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""The kubelet has no token."""
ADMIN_PATHS = ("/admin", "/drain")
"""They and what is below them need the scope `admin`, everything else needs `step`."""
_REVOKED = 1008
"""The close code of WebSockets whose caller may not use them any more: a policy was violated."""
_AUTHORIZATION = re.compile(r"(\bauthorization\b\W{1,6}).+", re.IGNORECASE)
_LOGGERS_OF_CONNECTIONS = (
    "uvicorn.error",
    "uvicorn.access",
    "uvicorn.asgi",
    "websockets.server",
    "websockets.client",
)


class Authenticate:
    """ASGI middleware that answers 401 or 403 instead of the application."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        keep_tokens_out_of_logs()

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serves the request or refuses it."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = [value for key, value in scope["headers"] if key == b"authorization"]
        is_admin = any(path == one or path.startswith(f"{one}/") for one in ADMIN_PATHS)
        try:
            tenant = self._access.authenticate(*given)
            self._access.require(tenant, Scope.ADMIN if is_admin else Scope.STEP)
        except EnvError as error:
            await refuse(error, scope, receive, send)
            return
        enter_tenant(tenant)
        if scope["type"] == "http":
            await self._app(scope, receive, send)
            return
        closing: set[asyncio.Task[None]] = set()

        def end(error: EnvError) -> None:
            closing.add(asyncio.create_task(_close(send, error)))

        with self._access.holding(tenant, Scope.STEP, end):
            await self._app(scope, receive, send)


class AuthenticateCalls(grpc.aio.ServerInterceptor):
    """Refuses every call whose metadata has no good token with the scope `step`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler behind a check of the token."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        given = [value for key, value in metadata if key == "authorization"]

        async def check(context: grpc.aio.ServicerContext) -> Tenant:
            try:
                tenant = self._access.authenticate(*given)
                self._access.require(tenant, Scope.STEP)
            except EnvError as error:
                await abort(context, error)
            enter_tenant(tenant)
            return tenant

        if not (handler.request_streaming or handler.response_streaming):
            return _behind(check, handler)
        return _behind(check, handler, self._access)


async def _close(send: Send, error: EnvError) -> None:
    """Close a WebSocket and say why; one that closes by itself meanwhile is no error."""
    with contextlib.suppress(OSError, RuntimeError):
        reason = cut_close_reason(error.message)
        await send({"type": "websocket.close", "code": _REVOKED, "reason": reason})


def _behind(
    check: Callable[[grpc.aio.ServicerContext], Awaitable[Tenant]],
    handler: grpc.RpcMethodHandler,
    access: Access | None = None,
) -> grpc.RpcMethodHandler:
    """A handler of the same shape that is called only when the check returns.

    Args:
        access: ends the call when its tenant may not use it any more; None leaves it alone.
    """
    kind = (
        f"{'stream' if handler.request_streaming else 'unary'}_"
        f"{'stream' if handler.response_streaming else 'unary'}"
    )
    answer = getattr(handler, kind)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        tenant = await check(context)
        if access is None:
            return await answer(request, context)
        return await _while_admitted(access, tenant, answer(request, context), context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(call, handler.request_deserializer, handler.response_serializer)


async def _while_admitted(
    access: Access, tenant: Tenant, work: Awaitable[Any], context: grpc.aio.ServicerContext
) -> Any:
    """What the work returns; it is cancelled when the tenant may not use the stream any more."""
    serving = asyncio.ensure_future(work)
    refusals: list[EnvError] = []

    def end(error: EnvError) -> None:
        refusals.append(error)
        serving.cancel()

    with access.holding(tenant, Scope.STEP, end):
        try:
            return await serving
        except asyncio.CancelledError:
            if not refusals:
                raise
    await abort(context, refusals[0])


def keep_tokens_out_of_logs() -> None:
    """Make the loggers that see raw requests leave out tokens, whatever their level."""
    for name in _LOGGERS_OF_CONNECTIONS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _WithoutTokens) for one in logger.filters):
            logger.addFilter(_WithoutTokens())


class _WithoutTokens(logging.Filter):
    """Rewrites records that show an Authorization header."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True, always: the record stays, its secrets go."""
        text = record.getMessage()
        cleaned = _AUTHORIZATION.sub(r"\1***", text)
        if cleaned != text:
            record.msg, record.args = cleaned, ()
        return True
