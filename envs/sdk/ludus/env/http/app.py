"""The HTTP wire of a server or gateway: OpenEnv's endpoints, `/ws`, `/mcp`, and health checks.

    request --RequireToken--> route --Sessions--> response
                                |
                                +-- EnvError --> {"detail": {"message", "code", ...}}

`asgi/sessions.py` selects the session of a request. Bodies are JSON, have at most 16 MiB, and must
be complete within 30 s.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import orjson
from fastapi import Body, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ludus.env.asgi.sessions import (
    UNUSED_TIMEOUT_S,
    HttpSessions,
    make_expired_cookie,
    make_json_response,
    make_session_headers,
    read_session_id,
)
from ludus.env.encoding import encode_json
from ludus.env.http.health import make_health_routes
from ludus.env.http.websocket import WebSocketWire
from ludus.env.incoming.faults import list_faults
from ludus.env.limits import BODY_TIMEOUT_S, MAX_MESSAGE_BYTES
from ludus.env.mcp.routes import McpSocket, add_mcp_routes
from ludus.env.mcp.server import McpServer, ReadKeys
from ludus.env.messages.openenv import (
    ResetRequest,
    StepRequest,
    encode_faults,
    make_error_data,
    make_ludus_metadata,
    make_upstream_payload,
    parse_reset_args,
)
from ludus.env.messages.status import STATUSES_BY_CODE
from ludus.env.security.middleware import RefuseForeignOrigins, RequireToken
from ludus.env.security.tokens import AcceptedTokens
from ludus.env.security.tracing import REQUEST_ID, TRACEPARENT, open_server_span
from ludus.env.sessions.interface import Sessions
from ludus.env.text.unicode import parse_json
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError, to_env_error

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Paths of health checks, which need no token."""
LEGACY_HTTP_VARIABLE = "OPENENV_LEGACY_HTTP"
_FALSE_WORDS = frozenset({"", "0", "false", "no", "off"})
_MAX_READ_BYTES = 4 * MAX_MESSAGE_BYTES
"""Maximum number of bytes to read from a body that is too large, before it is refused. A client
whose connection closes while it sends would not see the refusal."""


def build_app(
    sessions: Sessions,
    *,
    tokens: AcceptedTokens | None = None,
    read_mcp_keys: ReadKeys | None = None,
    unused_timeout_s: float = UNUSED_TIMEOUT_S,
) -> FastAPI:
    """Build the ASGI application of a server or gateway.

    Args:
        tokens: tokens of which all paths except the health checks require one.
        read_mcp_keys: returns the keys of MCP session ids; the first one signs. Replicas that share
            sessions need the same keys.
        unused_timeout_s: time that a session from `/reset` stays open without a call.
    """
    app = FastAPI(title=sessions.description.name, version="1.0.0", docs_url=None)
    app.router.route_class = _LimitedRoute
    mcp = McpServer(sessions, read_mcp_keys)
    is_legacy = os.environ.get(LEGACY_HTTP_VARIABLE, "").lower() not in _FALSE_WORDS
    http = HttpSessions(
        sessions, mcp.evictable, unused_timeout_s=unused_timeout_s, is_legacy=is_legacy
    )
    _add_description_routes(app, sessions)
    _add_play_routes(app, sessions, http, mcp)
    add_mcp_routes(app, mcp)
    app.router.routes.extend(make_health_routes(sessions))
    app.router.routes[:0] = [
        WebSocketRoute("/ws", WebSocketWire(mcp)),
        WebSocketRoute("/mcp", McpSocket(mcp)),
    ]
    handle_error = _make_error_handler(sessions)
    app.add_exception_handler(EnvError, handle_error)
    app.add_exception_handler(Exception, handle_error)
    app.add_exception_handler(RequestValidationError, _refuse_invalid_request)
    app.add_middleware(_IgnoreTrailingSlash)
    app.add_middleware(RefuseForeignOrigins)
    app.add_middleware(_TraceMiddleware)
    if tokens is not None:
        app.add_middleware(RequireToken, tokens=tokens, open_paths=OPEN_PATHS)
    return app


def _add_description_routes(app: FastAPI, sessions: Sessions) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/metadata")
    async def metadata() -> JsonObject:
        description = sessions.description
        return {
            "name": description.name,
            "description": description.description,
            "readme_content": None,
            "version": description.version,
            "author": None,
            "documentation_url": None,
            "ludus": make_ludus_metadata(description),
        }

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        # A relative address, because a proxy may serve the application under a prefix.
        return get_swagger_ui_html(openapi_url="openapi.json", title=sessions.description.name)

    @app.get("/schema")
    async def schema() -> JsonObject:
        description = sessions.description
        return {
            "action": description.action_schema,
            "observation": description.observation_schema,
            "state": description.state_schema,
            "reset_observation": description.observation_schema,
        }


def _add_play_routes(app: FastAPI, sessions: Sessions, http: HttpSessions, mcp: McpServer) -> None:
    @app.post("/reset")
    async def reset(
        request: Request, body: Annotated[ResetRequest | None, Body()] = None
    ) -> Response:
        reset_data = body.model_dump(exclude_unset=True) if body else {}
        args = parse_reset_args(reset_data, sessions.description, ignores_unknown=True)
        open_result = await http.reset(read_session_id(request), args)
        assert open_result.first_result is not None, "the session was reset"
        headers = make_session_headers(request, open_result)
        return make_json_response(make_upstream_payload(open_result.first_result), headers=headers)

    @app.post("/step")
    async def step(request: Request, body: StepRequest) -> Response:
        action, session_id = body.parsed_action, read_session_id(request)
        if mcp.takes_tool_step(action):
            payload_json = await mcp.step(http.mark_session_used(session_id), action)
            return make_json_response(orjson.Fragment(payload_json))
        action_json = encode_json(action, "an action")
        result = await http.step(session_id, action_json, body.timeout_s or 0.0)
        return make_json_response(make_upstream_payload(result))

    @app.get("/state")
    async def state(request: Request) -> Response:
        return make_json_response(orjson.Fragment(await http.state(read_session_id(request))))

    @app.post("/close")
    @app.delete("/session")
    async def close(request: Request) -> Response:
        was_open = await http.close(read_session_id(request))
        return make_json_response({"closed": was_open}, headers=make_expired_cookie(request))


def _make_error_handler(sessions: Sessions) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        error = to_env_error(error)
        if isinstance(error.__cause__, ValidationError):
            detail: Any = encode_faults(list_faults(error.__cause__, with_documentation=True))
        else:
            detail = make_error_data(error, sessions, is_upstream=False)
        headers = {}
        if error.retry_after_s > 0:
            headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        status = STATUSES_BY_CODE[error.code].http_status
        return make_json_response({"detail": detail}, status, headers)

    return handle


async def _refuse_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "the handler is registered for this type"
    faults = error.errors()
    if faults and faults[0]["type"] == "json_invalid":
        message = f"the body must be JSON: {faults[0]['ctx']['error']}"
        detail = {"message": message, "code": str(ErrorCode.INVALID_JSON)}
        return make_json_response({"detail": detail}, 400)
    return make_json_response({"detail": encode_faults(list(error.errors()))}, 422)


class _IgnoreTrailingSlash:
    """ASGI middleware that removes the slash at the end of a path.

    A redirect would lose the prefix under which a proxy serves the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path.strip("/") != scope.get("root_path", "").strip("/"):
            scope = {**scope, "path": path.rstrip("/")}
        await self._app(scope, receive, send)


class _TraceMiddleware:
    """ASGI middleware that continues the trace span and request id of the caller."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        traceparent = headers.get(TRACEPARENT.encode(), b"").decode("latin-1")
        request_id = headers.get(REQUEST_ID.encode(), b"").decode("latin-1")
        with open_server_span(str(scope["type"]), traceparent, request_id):
            await self._app(scope, receive, send)


class _LimitedRequest(Request):
    """A request with strict JSON of limited size and nesting: no NaN, and no lone surrogates."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    self._body = await self._read_body()
            except TimeoutError:
                raise _make_body_error(
                    408,
                    ErrorCode.TIMEOUT,
                    f"the body was not complete within {BODY_TIMEOUT_S:g} s; send it faster, or in"
                    " smaller requests",
                ) from None
        return self._body

    async def _read_body(self) -> bytes:
        body, num_bytes = bytearray(), 0
        async for chunk in self.stream():
            num_bytes += len(chunk)
            if num_bytes <= MAX_MESSAGE_BYTES:
                body += chunk
            elif num_bytes > _MAX_READ_BYTES:
                break
        if num_bytes > MAX_MESSAGE_BYTES:
            raise _make_body_error(
                413,
                ErrorCode.VALIDATION_ERROR,
                f"a body must have at most {MAX_MESSAGE_BYTES} bytes; send smaller requests, or use"
                " gRPC or a WebSocket",
            )
        return bytes(body)

    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except InvalidCallError as error:
            raise _make_body_error(413, error.code, error.message) from None


def _make_body_error(status: int, code: ErrorCode, message: str) -> HTTPException:
    """Return the error for a refused body. The connection closes without reading the rest."""
    return HTTPException(status, {"message": message, "code": str(code)}, {"connection": "close"})


class _LimitedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle_request = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handle_request(_LimitedRequest(request.scope, request.receive))

        return handle
