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
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ludus.env.asgi.sessions import (
    UNUSED_TIMEOUT_S,
    HttpSessions,
    forget_header,
    json_response,
    named_session,
    session_headers,
)
from ludus.env.encoding import EncodedResult, plain_json
from ludus.env.http.health import health_routes
from ludus.env.http.websocket import WebSocketWire
from ludus.env.limits import BODY_TIMEOUT_S, MAX_MESSAGE_BYTES
from ludus.env.mcp.routes import McpSocket, add_mcp_routes
from ludus.env.mcp.server import McpServer
from ludus.env.messages.openenv import (
    ResetRequest,
    StepRequest,
    error_data,
    limit_faults,
    ludus_metadata,
    observation_payload,
    reset_args,
)
from ludus.env.messages.status import STATUS_OF_CODE
from ludus.env.security.tokens import RefuseForeignOrigins, RequireToken
from ludus.env.security.tracing import REQUEST_ID, TRACEPARENT, server_span
from ludus.env.sessions.interface import Sessions
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError, ErrorCode, to_env_error

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Paths of health checks, which need no token."""
LEGACY_HTTP_VARIABLE = "OPENENV_LEGACY_HTTP"
_FALSE_WORDS = frozenset({"", "0", "false", "no", "off"})
_MAX_READ_BYTES = 4 * MAX_MESSAGE_BYTES
"""Bytes of a body that is too large that are read before its refusal, because a client whose
connection closes while it sends would not see the refusal."""


def build_app(
    sessions: Sessions,
    *,
    token: str | None = None,
    mcp_key: bytes | None = None,
    unused_timeout_s: float = UNUSED_TIMEOUT_S,
) -> FastAPI:
    """Build the ASGI application of a server or gateway.

    Args:
        token: bearer token that all paths except the health checks require.
        mcp_key: key for signing MCP session ids. Replicas that share sessions need the same key.
        unused_timeout_s: how long a session from `/reset` waits for its first call.
    """
    app = FastAPI(title=sessions.description.name, version="1.0.0")
    app.router.route_class = _BoundedRoute
    mcp = McpServer(sessions, mcp_key)
    legacy = os.environ.get(LEGACY_HTTP_VARIABLE, "").lower() not in _FALSE_WORDS
    http = HttpSessions(sessions, mcp.evictable, unused_timeout_s=unused_timeout_s, legacy=legacy)
    _add_description_routes(app, sessions)
    _add_episode_routes(app, sessions, http, mcp)
    add_mcp_routes(app, mcp)
    app.router.routes.extend(health_routes(sessions))
    app.router.routes[:0] = [
        WebSocketRoute("/ws", WebSocketWire(mcp)),
        WebSocketRoute("/mcp", McpSocket(mcp)),
    ]
    answer_error = _error_handler(sessions)
    app.add_exception_handler(EnvError, answer_error)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_middleware(RefuseForeignOrigins)
    app.add_middleware(_ContinueTrace)
    if token:
        app.add_middleware(RequireToken, token=token, open_paths=OPEN_PATHS)
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
            "ludus": ludus_metadata(description),
        }

    @app.get("/schema")
    async def schema() -> JsonObject:
        description = sessions.description
        return {
            "action": description.action_schema,
            "observation": description.observation_schema,
            "state": description.state_schema,
            "reset_observation": description.observation_schema,
        }


def _add_episode_routes(
    app: FastAPI, sessions: Sessions, http: HttpSessions, mcp: McpServer
) -> None:
    @app.post("/reset")
    async def reset(
        request: Request, body: Annotated[ResetRequest | None, Body()] = None
    ) -> Response:
        data = body.model_dump(exclude_unset=True) if body else {}
        args = reset_args(data, sessions.description, lenient=True)
        reset_reply = await http.reset(named_session(request), args)
        assert reset_reply.first is not None, "the session was reset"
        return _observation(reset_reply.first, session_headers(request, reset_reply))

    @app.post("/step")
    async def step(request: Request, body: StepRequest) -> Response:
        action, session_id = body.parsed_action, named_session(request)
        if mcp.understands(action):
            return json_response(orjson.Fragment(await mcp.step(http.use(session_id), action)))
        result = await http.step(session_id, plain_json(action, "an action"), body.timeout_s or 0.0)
        return _observation(result)

    @app.get("/state")
    async def state(request: Request) -> Response:
        return json_response(orjson.Fragment(await http.state(named_session(request))))

    @app.post("/close")
    @app.delete("/session")
    async def close(request: Request) -> Response:
        close_reply = await http.close(named_session(request))
        return json_response({"closed": close_reply}, headers=forget_header(request))


def _observation(result: EncodedResult, headers: dict[str, str] | None = None) -> Response:
    return json_response(observation_payload(result), headers=headers)


def _error_handler(sessions: Sessions) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        error = to_env_error(error)
        if isinstance(error.__cause__, ValidationError):
            detail: Any = limit_faults(error.__cause__.errors())
        else:
            detail = error_data(error, sessions, upstream=False)
        headers = {}
        if error.retry_after_s > 0:
            headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        return json_response({"detail": detail}, STATUS_OF_CODE[error.code].http, headers)

    return handle


async def _refuse_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "the handler is registered for this type"
    return json_response({"detail": limit_faults(list(error.errors()))}, 422)


class _ContinueTrace:
    """ASGI middleware that serves a call with the caller's trace span and request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        traceparent = headers.get(TRACEPARENT.encode(), b"").decode("latin-1")
        request = headers.get(REQUEST_ID.encode(), b"").decode("latin-1")
        with server_span(str(scope["type"]), traceparent, request):
            await self._app(scope, receive, send)


class _BoundedRequest(Request):
    """A request with limited JSON: no NaN, no lone surrogates, and limited size and nesting."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    self._body = await self._read()
            except TimeoutError:
                raise _body_error(
                    408,
                    ErrorCode.TIMEOUT,
                    f"the body was not complete within {BODY_TIMEOUT_S:g} s; send it faster, or in"
                    " smaller requests",
                ) from None
        return self._body

    async def _read(self) -> bytes:
        body, num_bytes = bytearray(), 0
        async for chunk in self.stream():
            num_bytes += len(chunk)
            if num_bytes <= MAX_MESSAGE_BYTES:
                body += chunk
            elif num_bytes > _MAX_READ_BYTES:
                break
        if num_bytes > MAX_MESSAGE_BYTES:
            raise _body_error(
                413,
                ErrorCode.VALIDATION_ERROR,
                f"a body must have at most {MAX_MESSAGE_BYTES} bytes; send smaller requests, or use"
                " gRPC or a WebSocket",
            )
        return bytes(body)

    async def json(self) -> Any:
        return orjson.loads(await self.body())


def _body_error(status: int, code: ErrorCode, message: str) -> HTTPException:
    """Return the error for a refused body. It closes the connection instead of reading the rest."""
    return HTTPException(status, {"message": message, "code": str(code)}, {"connection": "close"})


class _BoundedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_BoundedRequest(request.scope, request.receive))

        return handle
