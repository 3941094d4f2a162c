"""The HTTP wire of a gateway: OpenEnv's own paths for each environment, and what there is.

    /envs/<name>/...             what a server of that environment answers: /reset, /ws, /mcp ...
    /v1/envs                     which environments there are, and how full they are
    /healthz /readyz /drain /metrics

Which server a session is on says its signed id and nothing else: no part of a request names
an upstream, and nothing is answered with a redirect. Who calls is decided before
(`authentication.Authenticate`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Path, Request, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from ludus.env.http.app import build_app
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import UnknownEnvironmentError, find_environment
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.callers import EnvironmentLoad, current_tenant
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.services.gateway.wires.refusals import error_response, refuse

_OWN_PATHS = frozenset({"/healthz", "/readyz", "/drain", "/metrics"})
"""The gateway answers these for itself, never for one environment."""
_Name = Annotated[str, Path(max_length=63)]


def build_gateway_app(
    environments: Mapping[str, GatewaySessions],
    metrics: GatewayMetrics,
    *,
    mcp_key: bytes,
    is_ready: Callable[[], bool],
    drain: Callable[[], None],
) -> FastAPI:
    """The ASGI application of a gateway.

    Args:
        mcp_key: signs ids of MCP sessions; the same on every gateway.
        is_ready: what `/readyz` asks.
        drain: what `/drain` calls.
    """
    app = FastAPI(title="Ludus gateway", version="1.0.0", redirect_slashes=False)
    _add_health_routes(app, environments, is_ready, drain)
    _add_metrics_route(app, metrics)
    _add_environment_routes(app, environments)
    app.router.routes.append(Mount("/envs/{name}", app=EnvironmentMounts(environments, mcp_key)))
    app.add_exception_handler(EnvError, _answer_error)
    return app


def build_admin_app(
    environments: Mapping[str, GatewaySessions],
    metrics: GatewayMetrics,
    *,
    is_ready: Callable[[], bool],
    drain: Callable[[], None],
) -> FastAPI:
    """An application of probes, drain and metrics alone; it asks for no token."""
    app = FastAPI(title="Ludus gateway", redirect_slashes=False, openapi_url=None)
    _add_health_routes(app, environments, is_ready, drain)
    # A preStop hook can send nothing but GET; elsewhere any page in a browser could.
    app.add_api_route("/drain", _drain_of(environments, drain), include_in_schema=False)
    _add_metrics_route(app, metrics)
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
            await refuse(error, scope, receive, send)
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


def _add_health_routes(
    app: FastAPI,
    environments: Mapping[str, GatewaySessions],
    is_ready: Callable[[], bool],
    drain: Callable[[], None],
) -> None:
    @app.get("/health", include_in_schema=False)
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        # A draining gateway stays ready: its sessions still need its address.
        if is_ready():
            return _json({"status": "ok"})
        return _json({"status": "waiting for the first list of servers"}, 503)

    app.post("/drain", include_in_schema=False)(_drain_of(environments, drain))


def _drain_of(
    environments: Mapping[str, GatewaySessions], drain: Callable[[], None]
) -> Callable[[], Awaitable[Response]]:
    async def drain_now() -> Response:
        drain()
        num_tracked = sum(sessions.num_tracked for sessions in environments.values())
        return _json({"is_draining": True, "num_sessions": num_tracked})

    return drain_now


def _add_metrics_route(app: FastAPI, metrics: GatewayMetrics) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def scrape(request: Request) -> Response:
        body, content_type = await metrics.render(request.headers.get("accept", ""))
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


def _load_json(load: EnvironmentLoad) -> JsonObject:
    return {
        "name": load.environment,
        "num_sessions": load.num_active,
        "max_sessions": load.capacity,
        "num_waiting": load.num_pending,
        "num_draining": load.num_draining,
        "num_servers": load.num_servers,
    }


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EnvError), "registered for EnvError only"
    return error_response(error)
