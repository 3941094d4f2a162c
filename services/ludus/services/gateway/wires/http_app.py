"""The HTTP wire of a gateway: OpenEnv's own paths for each environment, and an API.

    /envs/<name>/...             what a server of that environment answers: /reset, /ws, /mcp ...
    /v1/envs                     which environments there are, and how full they are
    /v1/envs/<name>/sessions     sessions for clients that speak nothing but HTTP
    /healthz /readyz /drain /metrics

Which server a session is on says its signed id and nothing else: no part of a request names
an upstream, and nothing is answered with a redirect. Who calls is decided before
(`authentication.Authenticate`, which also takes `/t/<token>` off the path).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from ludus.env.encoding import MAX_SEED, EncodedResult, ResetArgs
from ludus.env.http.app import build_app
from ludus.env.messages.openenv import HTTP_STATUS_OF_CODE, ludus_payload
from ludus.env.sessions.interface import OpenArgs, Opened
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError, ErrorCode
from ludus.services.gateway.sessions.environments import UnknownEnvironmentError, find_environment
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.callers import EnvironmentLoad, current_tenant
from ludus.services.gateway.tenancy.metrics import GatewayMetrics

_OWN_PATHS = frozenset({"/healthz", "/readyz", "/drain", "/metrics"})
"""The gateway answers these for itself, never for one environment."""
_Name = Annotated[str, Path(max_length=63)]
_Id = Annotated[str, Path(max_length=512)]


@dataclass(frozen=True, slots=True)
class Probes:
    """What the gateway as a whole says of itself."""

    is_ready: Callable[[], bool]
    drain: Callable[[], None]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetBody(_Body):
    """The arguments of a reset."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    episode_id: str = Field(default="", max_length=255)
    options: JsonObject = Field(default_factory=dict)

    def args(self) -> ResetArgs:
        """The same for sessions."""
        return ResetArgs(self.seed, self.episode_id, self.options)


class OpenBody(ResetBody):
    """What is opened: sessions with a first episode, or in direct mode only their ids."""

    group_size: Annotated[int, Field(ge=1)] | None = None
    """Sessions on one seed, all or none; left out, one session is opened."""
    direct: bool = False
    """Answers with ids and the address of the server where the client opens them itself."""
    close_when_done: bool = False
    with_text: bool = True


class StepBody(_Body):
    """An action, as JSON or as a language model's text."""

    action: JsonObject | None = None
    text: str | None = None
    step_index: int = Field(default=0, ge=0)
    timeout_s: float = Field(default=0.0, ge=0.0)

    @model_validator(mode="after")
    def _has_one(self) -> StepBody:
        if (self.action is None) == (self.text is None):
            raise ValueError("expected action or text, got both or neither")
        return self


def build_gateway_app(
    environments: Mapping[str, GatewaySessions],
    probes: Probes,
    metrics: GatewayMetrics,
    mcp_key: bytes,
) -> FastAPI:
    """The ASGI application of a gateway.

    Args:
        mcp_key: signs ids of MCP sessions; the same on every gateway.
    """
    app = FastAPI(title="Ludus gateway", version="1.0.0", redirect_slashes=False)
    _add_probes(app, environments, probes, metrics)
    _add_environment_routes(app, environments)
    _add_session_routes(app, environments)
    app.router.routes.append(Mount("/envs/{name}", app=EnvironmentMounts(environments, mcp_key)))
    app.add_exception_handler(EnvError, _answer_error)
    return app


class EnvironmentMounts:
    """The applications of the environments, each built when its first server has answered.

    Each tenant has its own: what one keeps in mind for its clients is none of the others'
    business.
    """

    def __init__(self, environments: Mapping[str, GatewaySessions], mcp_key: bytes) -> None:
        self._environments = environments
        self._mcp_key = mcp_key
        self._apps: dict[tuple[str, str], ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request below `/envs/<name>`."""
        try:
            app = await self._app_for(scope)
        except EnvError as error:
            await _refuse(error, scope, receive, send)
            return
        await app(scope, receive, send)

    async def _app_for(self, scope: Scope) -> ASGIApp:
        name = scope["path_params"]["name"]
        sessions = find_environment(self._environments, name)
        rest = scope["path"].removeprefix(scope["root_path"])
        if rest in _OWN_PATHS:
            raise UnknownEnvironmentError(
                f"expected {rest} without an environment, got it below /envs/{name}"
            )
        key = (sessions.environment, current_tenant().name)
        if key not in self._apps:
            await sessions.admission.describe()
            app = build_app(sessions, mcp_key=self._mcp_key)
            app.router.redirect_slashes = False
            self._apps.setdefault(key, app)
        return self._apps[key]


def _add_probes(
    app: FastAPI,
    environments: Mapping[str, GatewaySessions],
    probes: Probes,
    metrics: GatewayMetrics,
) -> None:
    @app.get("/health", include_in_schema=False)
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        # A draining gateway stays ready: its sessions still need its address.
        if probes.is_ready():
            return _json({"status": "ok"})
        return _json({"status": "waiting for the first list of servers"}, 503)

    @app.get("/drain", include_in_schema=False)  # a preStop hook can send nothing but GET
    @app.post("/drain", include_in_schema=False)
    async def drain() -> Response:
        probes.drain()
        num_held = sum(sessions.num_held for sessions in environments.values())
        return _json({"is_draining": True, "num_sessions": num_held})

    @app.get("/metrics", include_in_schema=False)
    async def scrape(request: Request) -> Response:
        body, content_type = await metrics.render_aside(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _add_environment_routes(app: FastAPI, environments: Mapping[str, GatewaySessions]) -> None:
    @app.get("/v1/envs")
    async def list_environments() -> Response:
        loads = [_load_json(one.environment_load) for one in environments.values()]
        return _json({"environments": loads})

    @app.get("/v1/envs/{name}")
    async def show_environment(name: _Name) -> Response:
        sessions = find_environment(environments, name)
        await sessions.admission.describe()
        described = sessions.description
        return _json(
            _load_json(sessions.environment_load)
            | {
                "environment": described.name,
                "description": described.description,
                "version": described.version,
                "options": described.options,
                "has_text_view": described.has_text_view,
                "is_deterministic": described.is_deterministic,
                "action_schema": described.action_schema,
                "observation_schema": described.observation_schema,
                "linger_s": described.linger_s,
            }
        )


def _add_session_routes(app: FastAPI, environments: Mapping[str, GatewaySessions]) -> None:
    @app.post("/v1/envs/{name}/sessions", status_code=201)
    async def open_sessions(name: _Name, body: OpenBody) -> Response:
        sessions = find_environment(environments, name)
        if body.direct:
            placed = await sessions.place(body.group_size or 1)
            return _json(
                {
                    "grpc_address": placed.grpc_address,
                    "http_address": placed.http_address,
                    "session_ids": placed.session_ids,
                    "open_within_s": placed.open_within_s,
                },
                201,
            )
        args = OpenArgs(body.args(), close_when_done=body.close_when_done, with_text=body.with_text)
        if body.group_size is None:
            opened = [await sessions.open(args)]
        else:
            opened = await sessions.open_group(args, body.group_size)
        return _json({"sessions": [_opened_json(one) for one in opened]}, 201)

    @app.post("/v1/envs/{name}/sessions/{session_id}/reset")
    async def reset(name: _Name, session_id: _Id, body: ResetBody | None = None) -> Response:
        sessions = find_environment(environments, name)
        result = await sessions.reset(session_id, (body or ResetBody()).args())
        return _json(_result_json(session_id, result))

    @app.post("/v1/envs/{name}/sessions/{session_id}/step")
    async def step(name: _Name, session_id: _Id, body: StepBody) -> Response:
        sessions = find_environment(environments, name)
        action = body.text if body.text is not None else orjson.dumps(body.action)
        result = await sessions.step(session_id, action, body.step_index, body.timeout_s)
        return _json(_result_json(session_id, result))

    @app.get("/v1/envs/{name}/sessions/{session_id}/state")
    async def state(name: _Name, session_id: _Id) -> Response:
        state_json = await find_environment(environments, name).state(session_id)
        return Response(state_json, media_type="application/json")

    @app.delete("/v1/envs/{name}/sessions/{session_id}", status_code=204)
    async def close(name: _Name, session_id: _Id) -> Response:
        await find_environment(environments, name).close(session_id)
        return Response(status_code=204)


def _load_json(load: EnvironmentLoad) -> JsonObject:
    return {
        "name": load.environment,
        "num_sessions": load.num_active,
        "max_sessions": load.capacity,
        "num_waiting": load.num_pending,
        "num_draining": load.num_draining,
        "num_servers": load.num_servers,
    }


def _opened_json(opened: Opened) -> JsonObject:
    assert opened.first is not None, "it was opened with a reset"
    return _result_json(opened.session_id, opened.first)


def _result_json(session_id: str, result: EncodedResult) -> JsonObject:
    return ludus_payload(result) | {"session_id": session_id}


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error_response(error: EnvError) -> Response:
    is_unknown = isinstance(error, UnknownEnvironmentError)
    status = 404 if is_unknown else HTTP_STATUS_OF_CODE.get(error.code, 500)
    detail: JsonObject = {"message": error.message, "code": str(error.code)}
    response = _json({"detail": detail}, status)
    if error.retry_after_s > 0:
        detail["retry_after_s"] = error.retry_after_s
        response = _json({"detail": detail}, status)
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.code is ErrorCode.UNAUTHENTICATED:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EnvError), "registered for EnvError only"
    return _error_response(error)


async def _refuse(error: EnvError, scope: Scope, receive: Receive, send: Send) -> None:
    response = _error_response(error)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
