"""A gateway process: its ports, its environments and the sources of their servers.

    sources --endpoints--> GatewaySessions (one per environment) <--Sessions-- HTTP, WebSocket
                                                                 <--calls----- gRPC

`start` listens on the ports, then waits a few seconds at most for each source's first list and for
the first connection attempts. A draining gateway waits for the sessions that were opened through
it. A stopping gateway does not wait.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial

from ludus.env.runtime import run_until_signal
from ludus.env.sandbox.processes import hide_process
from ludus.env.security.session_ids import (
    SERVER_KEY_VARIABLE,
    SESSION_KEY_VARIABLE,
    SessionKey,
)
from ludus.env.serving import listeners
from ludus.env.serving.subprocess import LocalServer
from ludus.env.sessions.options import SERVER_ID_VARIABLE, choose_grpc_port
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import LudusError, UserError
from ludus.services.gateway.config import (
    GatewayConfig,
    KubernetesEnvironment,
    SandboxEnvironment,
    StaticEnvironment,
    SubprocessEnvironment,
)
from ludus.services.gateway.fleet.sources import EndpointSource, StaticSource, SubprocessSource
from ludus.services.gateway.sessions.environments import Environments
from ludus.services.gateway.sessions.sessions import GatewayContext, GatewaySessions
from ludus.services.gateway.tenancy.access import TenantAccess
from ludus.services.gateway.tenancy.metrics import EnvironmentLoad, GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.wires import middleware
from ludus.services.gateway.wires.grpc_service import GatewayServicer
from ludus.services.gateway.wires.http_app import build_admin_app, build_gateway_app

_log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 10.0
_SOURCE_BACKOFF_S = 5.0
REVOCATION_INTERVAL_S = 1.0
"""Interval between checks of the tenants of open connections, in seconds."""


class Gateway:
    """A gateway in a running event loop: `async with Gateway(config) as gateway`.

    Args:
        sources: source of the servers of each environment. Missing ones are built from the
            configuration.
        clock: monotonic clock in seconds, for tenants and their quotas.
    """

    def __init__(
        self,
        config: GatewayConfig,
        sources: Mapping[str, EndpointSource] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.access = _make_access(config, clock)
        self.access.check_host(config.host, insecure=config.insecure)
        self.metrics = GatewayMetrics(config.environments, self._read_loads)
        self.access.on_failure = self.metrics.count_auth_failure
        self.quotas = Quotas(clock)
        self.environments = Environments()
        self.sources: dict[str, EndpointSource] = dict(sources or {})
        self.http_address = ""
        """HTTP address, for example http://127.0.0.1:8000."""
        self.grpc_address = ""
        """gRPC address, for example grpc://127.0.0.1:18000."""
        self.admin_address = ""
        """Address of the admin port; empty if there is none."""
        self._local_session_key = SessionKey.random()
        """Key for servers that this gateway starts, which other gateways cannot reach."""
        self._watch_tasks: list[asyncio.Task[None]] = []
        self._revocation_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on every port, and wait for the first connections to servers.

        Raises:
            PortInUseError: a port is in use; nothing was started.
            UserError: an environment's servers cannot be started.
        """
        config = self.config
        self._session_key = config.make_session_key()
        sockets = [listeners.bind(config.host, config.port, "port")]
        try:
            if config.admin_port is not None:
                sockets.append(listeners.bind(config.host, config.admin_port, "admin_port"))
            self._build_environments()
            make_listener = partial(listeners.HttpListener, allowed_hosts=config.allow_host)
            self._listeners = [make_listener(self._build_app(), sockets[0], config.tls)]
            if config.admin_port is not None:
                admin_app = build_admin_app(self.environments, self.metrics)
                self._listeners.append(make_listener(admin_app, sockets[1]))
            self.grpc_server, grpc_port = listeners.build_grpc_server(
                config.host,
                choose_grpc_port(config.port, config.grpc_port),
                config.tls,
                [middleware.AuthenticationInterceptor(self.access)],
                config.max_connection_age_s,
            )
            servicer = GatewayServicer(self.environments)
            env_pb2_grpc.add_EnvServiceServicer_to_server(servicer, self.grpc_server)
        except BaseException:
            for socket in sockets:
                socket.close()
            await self._shut_down()
            raise
        self._revocation_task = asyncio.create_task(self._revoke_connections_forever())
        await self.grpc_server.start()
        await asyncio.gather(*(listener.start() for listener in self._listeners))
        self._set_addresses(grpc_port)
        try:
            await self._start_watching()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all ports and links; sessions stay on their servers for their linger time."""
        for sessions in self.environments.values():
            sessions.leave()
        stop_work = [listener.stop() for listener in self._listeners]
        await asyncio.gather(listeners.stop_grpc_server(self.grpc_server), *stop_work)
        await self._shut_down()

    @property
    def num_sessions(self) -> int:
        """Number of open sessions that were opened through this gateway."""
        return self.environments.num_sessions

    def drain(self) -> None:
        """Refuse new sessions from now on; existing sessions continue."""
        self.environments.drain()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _build_environments(self) -> None:
        config = self.config
        # Reading the credentials raises a ConfigError before anything is started.
        if config.servers.credentials is not None:
            _log.info("connecting to environment servers with TLS")
        for name, section in config.environments.items():
            is_local = section.kind == "subprocess"
            key = self._local_session_key if is_local else self._session_key
            context = GatewayContext(
                key, self.access, self.quotas, self.metrics, config.sessions, config.servers
            )
            self.environments[name] = GatewaySessions(name, context)

    def _build_app(self) -> middleware.RequestIdMiddleware:
        app = build_gateway_app(self.environments, self.metrics, self._read_mcp_keys)
        authenticated_app = middleware.AuthenticationMiddleware(app, self.access)
        closing_app = middleware.ConnectionCloser(
            authenticated_app, lambda: self.environments.is_draining
        )
        return middleware.RequestIdMiddleware(closing_app)

    def _read_mcp_keys(self) -> list[bytes]:
        """Derive the keys from the session keys, which they do not reveal if they leak."""
        return [
            hmac.digest(secret.encode(), b"ludus mcp sessions", "sha256")
            for secret in self._session_key.current_secrets
        ]

    def _set_addresses(self, grpc_port: int) -> None:
        host, tls_suffix = self.config.host, "s" if self.config.tls else ""
        http_authority, *admin_authorities = (
            listeners.format_authority(host, listener.port) for listener in self._listeners
        )
        self.http_address = f"http{tls_suffix}://{http_authority}"
        self.grpc_address = f"grpc{tls_suffix}://{listeners.format_authority(host, grpc_port)}"
        self.admin_address = f"http://{admin_authorities[0]}" if admin_authorities else ""

    def _read_loads(self) -> list[EnvironmentLoad]:
        return [sessions.environment_load for sessions in self.environments.values()]

    async def _start_watching(self) -> None:
        """Watch the sources, and wait a limited time for the first servers."""
        for name in self.config.environments:
            if name not in self.sources:
                self.sources[name] = self._make_source(name)
            self._watch_tasks.append(asyncio.create_task(self._watch_source(name)))
        settle_task = asyncio.create_task(self._wait_for_servers())
        tasks = [settle_task, *self._watch_tasks]
        try:
            # A watch task ends only if its source raises a UserError.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settle_task.cancel()
        for task in self._watch_tasks:
            if task.done():
                await task

    def _make_source(self, name: str) -> EndpointSource:
        environment = self.config.environments[name]
        admission = self.environments[name].admission
        fleet = admission.fleet
        match environment:
            case StaticEnvironment():
                return StaticSource(environment.addresses)
            case SubprocessEnvironment():
                make_server = partial(self._make_local_server, environment)
                return SubprocessSource(make_server, environment.num_servers)
            case KubernetesEnvironment():
                # Imported here, so that other kinds of gateway do not load the Kubernetes client.
                from ludus.services.gateway.kubernetes.source import EndpointSliceSource
                from ludus.services.kubernetes.api import KubernetesApi

                return EndpointSliceSource(KubernetesApi(), environment, fleet.read_pod_loads)
            case SandboxEnvironment():
                from ludus.services.gateway.kubernetes.sandboxes import SandboxSource
                from ludus.services.kubernetes.api import KubernetesApi

                admission.supply = sandbox_source = SandboxSource(
                    KubernetesApi(),
                    environment,
                    fleet.find_link_by_key,
                    lambda: admission.num_requested,
                    self.config.sessions.id_lifetime_s,
                )
                return sandbox_source

    def _make_local_server(self, environment: SubprocessEnvironment) -> LocalServer:
        server_id = secrets.token_hex(6)
        (server_key,) = self._local_session_key.list_server_keys(server_id)
        return LocalServer(
            environment.target,
            environment.options,
            max_sessions=environment.max_sessions,
            isolation=environment.isolation,
            extra_arguments=list(environment.arguments),
            extra_variables={SERVER_ID_VARIABLE: server_id, SERVER_KEY_VARIABLE: server_key},
            hidden_variables=self._find_secret_variables(),
        )

    def _find_secret_variables(self) -> frozenset[str]:
        """Return the names of the environment variables that contain a key or a token."""
        config = self.config
        names = {config.token_env, config.servers.token_env, config.session_key_env}
        names |= {name for name, text in os.environ.items() if self.access.has_token(text.strip())}
        return frozenset(names | {SESSION_KEY_VARIABLE})

    async def _wait_for_servers(self) -> None:
        fleets = [sessions.fleet for sessions in self.environments.values()]
        await asyncio.gather(*(fleet.wait_until_settled(SETTLE_TIMEOUT_S) for fleet in fleets))

    async def _watch_source(self, name: str) -> None:
        """Watch a source until cancelled; retry after failures, except mistakes of the user."""
        source, fleet = self.sources[name], self.environments[name].fleet
        while True:
            try:
                await source.watch(fleet.replace_servers)
            except LudusError as error:
                if isinstance(error, UserError) and not fleet.has_server_list:
                    raise
                _log.error("environment %s: cannot list its servers: %s", name, error)
            await asyncio.sleep(_SOURCE_BACKOFF_S)

    async def _revoke_connections_forever(self) -> None:
        """Close the connections of tenants whose access is revoked, until cancelled."""
        while True:
            await asyncio.sleep(REVOCATION_INTERVAL_S)
            self.access.close_refused_connections()

    async def _shut_down(self) -> None:
        if self._revocation_task is not None:
            self._revocation_task.cancel()
        for task in self._watch_tasks:
            task.cancel()
        await asyncio.gather(*self._watch_tasks, return_exceptions=True)
        await asyncio.gather(*(sessions.shut_down() for sessions in self.environments.values()))
        await asyncio.gather(*(source.close() for source in self.sources.values()))


def serve_gateway(config: GatewayConfig, on_ready: Callable[[Gateway], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain and stop.

    A second signal ends the wait for sessions.

    Raises:
        PortInUseError: a port is in use; nothing was started.
        UserError: the configuration is invalid.
    """
    hide_process()
    gateway = Gateway(config)
    run_until_signal(
        gateway,
        drain_grace_s=config.drain_grace_s,
        on_ready=partial(on_ready, gateway),
        sigint_drains=True,
    )


def _make_access(config: GatewayConfig, clock: Callable[[], float]) -> TenantAccess:
    if config.tenants_file is not None:
        return TenantAccess.from_file(config.tenants_file, clock=clock)
    if config.token_file is not None:
        return TenantAccess.from_token_file(config.token_file, clock=clock)
    token = os.environ.get(config.token_env, "")
    return TenantAccess.from_token(token) if token else TenantAccess()
