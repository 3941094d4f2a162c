"""The HTTP face of a server: OpenEnv's endpoints, `/ws`, and probes for Kubernetes.

`POST /reset`, `POST /step` and `GET /state` are stateless as in OpenEnv 0.2 and later:
each call has an environment of its own. A step there starts a fresh episode first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import orjson
from fastapi import Body, FastAPI, Request, Response, WebSocket
from pydantic import ValidationError

from ludus.env.authentication import RequireToken
from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.openenv_messages import (
    ResetRequest,
    StepRequest,
    error_data,
    faults,
    ludus_metadata,
    observation_payload,
    reset_args,
)
from ludus.env.sessions import OpenArgs, Sessions
from ludus.env.types import JsonObject
from ludus.env.websocket_server import serve_websocket
from ludus.proto.errors import EnvError, ErrorCode

_NO_TEXT = OpenArgs(with_text=False)
OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Probes carry no token."""

_STATUS_OF_CODE = {
    ErrorCode.CAPACITY_REACHED: 503,
    ErrorCode.VALIDATION_ERROR: 422,
    ErrorCode.ILLEGAL_ACTION: 422,
}


def build_app(sessions: Sessions, *, token: str | None = None) -> FastAPI:
    """The ASGI application; with a token, every path but the probes asks for it."""
    app = FastAPI(title=sessions.description.name, version="1.0.0")
    _add_description_routes(app, sessions)
    _add_episode_routes(app, sessions)
    app.add_exception_handler(EnvError, _error_handler(sessions))
    if token:
        app.add_middleware(RequireToken, token=token, open_paths=OPEN_PATHS)
    return app


def _add_description_routes(app: FastAPI, sessions: Sessions) -> None:
    description = sessions.description

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/healthz", include_in_schema=False)
    @app.get("/readyz", include_in_schema=False)
    async def probe() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metadata")
    async def metadata() -> JsonObject:
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
        return {
            "action": description.action_schema,
            "observation": description.observation_schema,
            "state": description.state_schema,
        }


def _add_episode_routes(app: FastAPI, sessions: Sessions) -> None:
    @app.post("/reset")
    async def reset(body: Annotated[ResetRequest | None, Body()] = None) -> Response:
        data = body.model_dump(exclude_unset=True) if body else {}
        args = reset_args(data, sessions.description, lenient=True)
        session_id = (await sessions.open(_NO_TEXT)).session_id
        try:
            result = await sessions.reset(session_id, args)
        finally:
            await sessions.close(session_id)
        return _observation(result)

    @app.post("/step")
    async def step(body: StepRequest) -> Response:
        session_id = (await sessions.open(OpenArgs(ResetArgs(), with_text=False))).session_id
        try:
            result = await sessions.step(session_id, orjson.dumps(body.action))
        finally:
            await sessions.close(session_id)
        return _observation(result)

    @app.get("/state")
    async def state() -> Response:
        session_id = (await sessions.open(_NO_TEXT)).session_id
        try:
            state_json = await sessions.state(session_id)
        finally:
            await sessions.close(session_id)
        return Response(state_json, media_type="application/json")

    @app.websocket("/ws")
    async def websocket(websocket: WebSocket) -> None:
        await serve_websocket(websocket, sessions)


def _observation(result: EncodedResult) -> Response:
    body = orjson.dumps(observation_payload(result))
    return Response(body, media_type="application/json")


def _error_handler(sessions: Sessions) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, EnvError), "registered for EnvError only"
        if isinstance(error.__cause__, ValidationError):
            body = orjson.dumps({"detail": faults(error.__cause__)})
            return Response(body, 422, media_type="application/json")
        status = _STATUS_OF_CODE.get(error.code)
        if status is None:
            return Response("Internal Server Error", 500, media_type="text/plain")
        body = orjson.dumps({"detail": error_data(error, sessions, stock=False)})
        return Response(body, status, media_type="application/json")

    return handle
