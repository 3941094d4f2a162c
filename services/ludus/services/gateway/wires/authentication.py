"""Asks for a token before anything else is done: ASGI middleware, and a gRPC interceptor.

HTTP, WebSocket --> Authenticate ------+--> the application, where `current_tenant()`
gRPC -----------> AuthenticateCalls ---+    says who calls
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from ludus.env.grpc.servicer import abort
from ludus.proto.errors import EnvError
from ludus.services.gateway.tenancy.access import Access
from ludus.services.gateway.tenancy.callers import enter_tenant
from ludus.services.gateway.tenancy.tenants import Scope
from ludus.services.gateway.wires.refusals import refuse

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""The kubelet has no token."""
ADMIN_PATHS = ("/admin", "/drain")
"""They and what is below them need the scope `admin`, everything else needs `step`."""
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

        async def check(context: grpc.aio.ServicerContext) -> None:
            try:
                tenant = self._access.authenticate(*given)
                self._access.require(tenant, Scope.STEP)
            except EnvError as error:
                await abort(context, error)
            enter_tenant(tenant)

        return _behind(check, handler)


def _behind(
    check: Callable[[grpc.aio.ServicerContext], Awaitable[None]], handler: grpc.RpcMethodHandler
) -> grpc.RpcMethodHandler:
    """A handler of the same shape that is called only when the check returns."""
    kind = (
        f"{'stream' if handler.request_streaming else 'unary'}_"
        f"{'stream' if handler.response_streaming else 'unary'}"
    )
    answer = getattr(handler, kind)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await check(context)
        return await answer(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(call, handler.request_deserializer, handler.response_serializer)


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
