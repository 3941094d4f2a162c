"""The HTTP wire of a gateway: OpenEnv's paths for each environment, and the gateway's own paths.

    /envs/<name>/...             the paths of that environment's servers: /reset, /ws, /mcp ...
    /v1/envs                     the environments and their load
    /healthz /readyz /drain /metrics

The signed session id alone determines a session's server. No other part of a request can select a
server, and no response is a redirect. `middleware.AuthenticationMiddleware` checks the caller
first.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path, Request, Response
from starlette.responses import JSONResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from ludus.env.http.app import build_app
from ludus.env.mcp.server import ReadKeys
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import Environments, UnknownEnvironmentError
from ludus.services.gateway.tenancy.metrics import EnvironmentLoad, GatewayMetrics
from ludus.services.gateway.tenancy.tenants import get_current_tenant
from ludus.services.gateway.wires.middleware import build_error_response, send_error

_GATEWAY_PATHS = frozenset({"/healthz", "/readyz", "/drain", "/metrics"})
"""Paths of the gateway itself, which do not exist below an environment."""
_EnvironmentName = Annotated[str, Path(max_length=63)]


def build_gateway_app(
    environments: Environments, metrics: GatewayMetrics, read_mcp_keys: ReadKeys
) -> FastAPI:
    """Build the ASGI application of a gateway.

    Args:
        read_mcp_keys: returns the keys of the ids of MCP sessions, the same for all gateways.
    """
    app = FastAPI(title="Ludus gateway", version="1.0.0", redirect_slashes=False)
    _add_gateway_routes(app, environments, metrics)
    _add_environment_routes(app, environments)
    app.router.routes.append(
        Mount("/envs/{name}", app=_EnvironmentApps(environments, read_mcp_keys))
    )
    app.add_exception_handler(EnvError, _respond_with_error)
    return app


def build_admin_app(environments: Environments, metrics: GatewayMetrics) -> FastAPI:
    """Build an application with only the probes, /drain and /metrics, and without token checks."""
    app = FastAPI(title="Ludus gateway", redirect_slashes=False, openapi_url=None)
    _add_gateway_routes(app, environments, metrics)
    return app


class _EnvironmentApps:
    """The ASGI applications of the environments, built when their first request arrives.

    Each tenant has its own applications, because an application stores data of its clients.
    """

    def __init__(self, environments: Environments, read_mcp_keys: ReadKeys) -> None:
        self._environments = environments
        self._read_mcp_keys = read_mcp_keys
        self._apps: dict[tuple[str, str], ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request below `/envs/<name>`."""
        try:
            app = await self._find_app(scope)
        except EnvError as error:
            await send_error(error, scope, receive, send)
            return
        await app(scope, receive, send)

    async def _find_app(self, scope: Scope) -> ASGIApp:
        name = scope["path_params"]["name"]
        sessions = self._environments.find(name)
        path = scope["path"].removeprefix(scope["root_path"])
        if path in _GATEWAY_PATHS:
            raise UnknownEnvironmentError(
                f"{path} belongs to the gateway, not to an environment; remove /envs/{name}"
            )
        app_key = (sessions.environment, get_current_tenant().name)
        if app_key not in self._apps:
            await sessions.admission.wait_until_described()
            app = build_app(sessions, read_mcp_keys=self._read_mcp_keys)
            app.router.redirect_slashes = False
            self._apps.setdefault(app_key, app)
        return self._apps[app_key]


def _add_gateway_routes(app: FastAPI, environments: Environments, metrics: GatewayMetrics) -> None:
    @app.get("/health", include_in_schema=False)
    @app.get("/healthz", include_in_schema=False)
    async def report_health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/readyz", include_in_schema=False)
    async def report_readiness() -> Response:
        # A draining gateway stays ready, because its sessions still need its address.
        if environments.is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "waiting for the first list of servers"}, 503)

    @app.post("/drain", include_in_schema=False)
    async def drain() -> Response:
        environments.drain()
        return JSONResponse({"is_draining": True, "num_sessions": environments.num_sessions})

    @app.get("/metrics", include_in_schema=False)
    async def render_metrics(request: Request) -> Response:
        body, content_type = await metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _add_environment_routes(app: FastAPI, environments: Environments) -> None:
    @app.get("/v1/envs")
    async def list_environments() -> Response:
        loads = [_describe_load(sessions.environment_load) for sessions in environments.values()]
        return JSONResponse({"environments": loads})

    @app.get("/v1/envs/{name}")
    async def show_environment(name: _EnvironmentName) -> Response:
        sessions = environments.find(name)
        await sessions.admission.wait_until_described()
        description = sessions.description
        fields = {
            "environment": description.name,
            "description": description.description,
            "version": description.version,
            "options": description.options,
            "has_text_view": description.has_text_view,
            "is_deterministic": description.is_deterministic,
            "action_schema": description.action_schema,
            "observation_schema": description.observation_schema,
            "linger_s": description.linger_s,
        }
        return JSONResponse(_describe_load(sessions.environment_load) | fields)


def _describe_load(load: EnvironmentLoad) -> JsonObject:
    return {
        "name": load.environment,
        "num_sessions": load.num_active,
        "max_sessions": load.capacity,
        "num_waiting": load.num_pending,
        "num_draining": load.num_draining,
        "num_servers": load.num_servers,
    }


async def _respond_with_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EnvError), "registered for EnvError only"
    return build_error_response(error)
