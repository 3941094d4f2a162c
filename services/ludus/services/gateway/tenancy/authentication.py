"""Asks for a token before anything else is done: ASGI middleware, and a gRPC interceptor.

    HTTP, WebSocket --> Authenticate ------+--> the application, where `current_tenant()`
    gRPC -----------> AuthenticateCalls ---+    and scope["ludus.tenant"] say who calls

A token in the path ends here: the application sees the path without it, and cookies and
redirects it answers with are moved below the path that the client knows.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from inspect import isasyncgenfunction
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection
from starlette.websockets import WebSocket

from ludus.env.grpc.servicer import abort
from ludus.proto.errors import EnvError, ErrorCode
from ludus.services.gateway.tenancy.access import Access, Scope
from ludus.services.gateway.tenancy.callers import enter_tenant

_STATUS_OF_CODE = {
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.RATE_LIMITED: 429,
}
_PATH_TOKEN = re.compile(r"/t/([^/]*)(/.*)?", re.DOTALL)
_COOKIE_PATH = re.compile(rb"(;\s*path=)(/[^;]*)", re.IGNORECASE)
_SECRETS_IN_TEXT = re.compile(r"(/t/)[^/\s\"']+|(\bauthorization\b\W{1,6}).+", re.IGNORECASE)
_LOGGERS_OF_CONNECTIONS = (
    "uvicorn.error",
    "uvicorn.access",
    "uvicorn.asgi",
    "websockets.server",
    "websockets.client",
)
_PROBES = frozenset({"/health", "/healthz", "/readyz"})
_ADMIN_PATHS = ("/admin", "/drain")
_HEALTH_SERVICE = "/grpc.health.v1.Health/"


class Authenticate:
    """ASGI middleware that answers 401, 403 or 429 instead of the application.

    Args:
        open_paths: need no token; probes.
        admin_paths: they and what is below them need the scope `admin`; the rest `step`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        open_paths: Collection[str] = _PROBES,
        admin_paths: Collection[str] = _ADMIN_PATHS,
    ) -> None:
        self._app = app
        self._access = access
        self._open_paths = frozenset(open_paths)
        self._admin_paths = tuple(admin_paths)
        keep_tokens_out_of_logs()

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serves the request or refuses it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope, token = _without_path_token(scope)
        if token is None and _route_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        given = [value for key, value in scope["headers"] if key == b"authorization"]
        try:
            tenant = self._access.authenticate(
                # Two headers could mean two people; b"" is a header without a token.
                (given[0] if len(given) == 1 else b"") if given else None,
                token,
                (scope.get("client") or ("",))[0],
            )
            self._access.require(tenant, self._scope_for(_route_path(scope)))
        except EnvError as error:
            await refuse(error, _STATUS_OF_CODE.get(error.code, 401), scope, receive, send)
            return
        enter_tenant(tenant)
        scope["ludus.tenant"] = tenant
        if token is not None:
            send = _moved_below(f"/t/{token}", scope, send)
        await self._app(scope, receive, send)

    def _scope_for(self, path: str) -> Scope:
        is_admin = any(path == one or path.startswith(f"{one}/") for one in self._admin_paths)
        return Scope.ADMIN if is_admin else Scope.STEP


class AuthenticateCalls(grpc.aio.ServerInterceptor):
    """Refuses every call whose metadata has no good token.

    Args:
        admin_methods: full names (`/package.Service/Method`) that need the scope `admin`;
            the rest needs `step`, and gRPC's health service nothing.
    """

    def __init__(self, access: Access, admin_methods: Collection[str] = ()) -> None:
        self._access = access
        self._admin_methods = frozenset(admin_methods)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler behind a check of the token."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_HEALTH_SERVICE):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        given = [value for key, value in metadata if key == "authorization"]
        authorization = (given[0] if len(given) == 1 else "") if given else None
        scope = Scope.ADMIN if method in self._admin_methods else Scope.STEP

        async def check(context: grpc.aio.ServicerContext) -> None:
            try:
                tenant = self._access.authenticate(authorization, None, context.peer())
                self._access.require(tenant, scope)
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
        if isasyncgenfunction(answer):
            replies: AsyncIterator[Any] = answer(request, context)
            async for reply in replies:
                await context.write(reply)
            return None
        return await answer(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(call, handler.request_deserializer, handler.response_serializer)


async def refuse(
    error: EnvError, status: int, scope: Connection, receive: Receive, send: Send
) -> None:
    """Answers with the error as typed JSON; a WebSocket gets it instead of its handshake."""
    headers: dict[str, str] = {}
    if status == 401:
        headers["www-authenticate"] = 'Bearer, Basic realm="ludus"'
    if error.retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    detail = {"message": error.message, "code": str(error.code)}
    response = JSONResponse({"detail": detail}, status, headers)
    if scope["type"] == "http":
        await response(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": str(error.code)})


def keep_tokens_out_of_logs() -> None:
    """Makes the loggers that see raw requests leave out tokens, whatever their level."""
    for name in _LOGGERS_OF_CONNECTIONS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _WithoutTokens) for one in logger.filters):
            logger.addFilter(_WithoutTokens())


class _WithoutTokens(logging.Filter):
    """Rewrites records that show a path token or an Authorization header."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True, always: the record stays, its secrets go."""
        said = record.getMessage()
        cleaned = _SECRETS_IN_TEXT.sub(lambda found: f"{found[1] or found[2]}***", said)
        if cleaned != said:
            record.msg, record.args = cleaned, ()
        return True


def _route_path(scope: Connection) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _without_path_token(scope: Connection) -> tuple[Connection, str | None]:
    """The scope as if the token had not been in the path, and the token."""
    root: str = scope.get("root_path", "")
    found = _PATH_TOKEN.fullmatch(_route_path(scope))
    if found is None:
        return dict(scope), None
    rest = found[2] or "/"
    raw_path: bytes = scope.get("raw_path") or b""
    # An encoded slash in front of it would shift the parts: then the decoded path will do.
    raw_rest = re.fullmatch(re.escape(root.encode()) + rb"/t/[^/]*(/.*)?", raw_path, re.DOTALL)
    raw = (raw_rest[1] or b"/") if raw_rest else rest.encode("utf-8", "replace")
    return {**scope, "path": root + rest, "raw_path": root.encode() + raw}, found[1]


def _moved_below(prefix: str, scope: Connection, send: Send) -> Send:
    """A `send` whose cookies and redirects hold for the path with the token."""
    raw_prefix = prefix.encode("utf-8", "replace")
    host = next((value for key, value in scope["headers"] if key == b"host"), b"")

    def move(key: bytes, value: bytes) -> bytes:
        name = key.lower()
        if name == b"set-cookie":
            # The root path is the proxy's business, the prefix stands behind it.
            return _COOKIE_PATH.sub(lambda found: found[1] + raw_prefix + found[2], value)
        if name == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
            return raw_prefix + value
        if name == b"location" and host:
            here = re.match(rb"https?://" + re.escape(host) + rb"(?=/)", value)
            return value[: here.end()] + raw_prefix + value[here.end() :] if here else value
        return value

    async def moved(message: Message) -> None:
        if "headers" in message:
            headers = [(key, move(key, value)) for key, value in message["headers"]]
            message = {**message, "headers": headers}
        await send(message)

    return moved
