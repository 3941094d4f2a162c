"""A gateway as a process: its ports, its environments, and the sources of their servers.

    sources --endpoints--> GatewaySessions (one per environment) <--Sessions-- HTTP, WebSocket
                                                                 <--calls----- gRPC

Who waits for whom: `start` waits for each source's first list and for the first attempts to
connect, at most a few seconds; the ports listen meanwhile. A drained gateway waits for the
sessions that were opened through it, a stopping one for nobody.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ludus.env.runtime import run_until_signal
from ludus.env.sandbox.privileges import hide_process
from ludus.env.security.session_ids import SessionKey
from ludus.env.security.tls import TlsFiles, client_channel_credentials
from ludus.env.security.variables import SESSION_KEY_VARIABLE
from ludus.env.serving.listeners import (
    HttpListener,
    authority,
    bind,
    build_grpc_server,
    stop_grpc_server,
)
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import LudusError, UserError
from ludus.services.gateway.config import (
    Environment,
    GatewayConfig,
    KubernetesEnvironment,
    SandboxEnvironment,
    ServersSection,
    StaticEnvironment,
    SubprocessEnvironment,
    value_of,
)
from ludus.services.gateway.fleet.admission import Admission
from ludus.services.gateway.fleet.endpoints import EndpointSource
from ludus.services.gateway.fleet.server_link import LinkOptions
from ludus.services.gateway.fleet.sources import StaticSource, SubprocessSource
from ludus.services.gateway.sessions.routes import RouteCache
from ludus.services.gateway.sessions.sessions import GatewayContext, GatewaySessions
from ludus.services.gateway.tenancy.access import Access
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.wires.authentication import Authenticate, AuthenticateCalls
from ludus.services.gateway.wires.http_app import build_admin_app, build_gateway_app
from ludus.services.gateway.wires.request_limits import AddRequestIds, LimitBodies
from ludus.services.gateway.wires.servicer import GatewayServicer

_log = logging.getLogger(__name__)

_SETTLE_TIMEOUT_S = 10.0
_SOURCE_BACKOFF_S = 5.0
REVOKE_EVERY_S = 1.0
"""Between two looks at the callers of open connections; the tenants file is read as often."""

OnReady = Callable[["Gateway"], None]


class Gateway:
    """A gateway within a running event loop: `async with Gateway(config) as gateway`.

    Args:
        sources: where servers come from, by environment; None makes them from the config.
        clock: seconds that only grow, for tenants and their quotas.
    """

    def __init__(
        self,
        config: GatewayConfig,
        sources: Mapping[str, EndpointSource] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.access = _access_of(config, clock)
        self.access.check_host(config.host, insecure=config.insecure)
        self.quotas = Quotas(clock, renew=self.access.renew)
        self.environments: dict[str, GatewaySessions] = {}
        self.sources: dict[str, EndpointSource] = dict(sources or {})
        self.http_address = ""
        """For example http://127.0.0.1:8000."""
        self.grpc_address = ""
        """For example grpc://127.0.0.1:18000."""
        self.admin_address = ""
        """Empty where there is no admin port."""
        self.is_draining = False
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._revoking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on every port, and wait until the servers that answer are known.

        Raises:
            PortInUseError: something else listens there; nothing was started.
            UserError: an environment's servers cannot be started.
        """
        config = self.config
        tls = TlsFiles(**dict(config.tls)) if config.tls else None
        key = config.session_key()
        sockets = [bind(config.host, config.port, "port")]
        try:
            if config.admin_port is not None:
                sockets.append(bind(config.host, config.admin_port, "admin_port"))
            self._build_environments(key)
            self._listeners = [HttpListener(self._application(key), sockets[0], tls)]
            if config.admin_port is not None:
                self._listeners.append(HttpListener(self._admin_application(), sockets[1]))
            self._grpc_server, grpc_port = build_grpc_server(
                config.host,
                config.bound_grpc_port,
                tls,
                [AuthenticateCalls(self.access)],
                config.max_connection_age_s,
            )
            env_pb2_grpc.add_EnvServiceServicer_to_server(self._servicer, self._grpc_server)
        except BaseException:
            for one in sockets:
                one.close()
            await self._shut_down()
            raise
        self._revoking = asyncio.create_task(self._end_refused_forever())
        await self._grpc_server.start()
        await asyncio.gather(*(listener.start() for listener in self._listeners))
        self._name_addresses(grpc_port)
        try:
            await self._begin_watching(key)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close everything; sessions stay on their servers for their linger."""
        for sessions in self.environments.values():
            sessions.drain()
            sessions.leave()
        await asyncio.gather(
            stop_grpc_server(self._grpc_server), *(one.stop() for one in self._listeners)
        )
        await self._shut_down()

    @property
    def is_ready(self) -> bool:
        """True when every source has said which servers there are."""
        return all(one.fleet.is_published for one in self.environments.values())

    @property
    def num_sessions(self) -> int:
        """Those that were opened here and continue."""
        return sum(one.num_tracked for one in self.environments.values())

    def drain(self) -> None:
        """Take no new sessions from now on; those there are continue."""
        self.is_draining = True
        for sessions in self.environments.values():
            sessions.drain()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # -- parts -------------------------------------------------------------------------

    def _build_environments(self, key: str) -> None:
        config = self.config
        self.metrics = GatewayMetrics(config.environments, self._read_loads)
        self.access.on_failure = self.metrics.auth_failed
        session_key = SessionKey(key.encode())
        routes = RouteCache(session_key)
        links = _link_options(config.servers)
        context = GatewayContext(
            session_key, routes, self.access, self.quotas, self.metrics, config.sessions, links
        )
        for name in config.environments:
            self.environments[name] = GatewaySessions(name, context)
        self._servicer = GatewayServicer(self.environments, self.quotas, self.metrics)

    def _application(self, key: str) -> Any:
        # Of one origin, but no use as a session key to whoever learns it.
        mcp_key = hmac.digest(key.encode(), b"ludus mcp sessions", "sha256")
        app = build_gateway_app(
            self.environments,
            self.metrics,
            mcp_key=mcp_key,
            is_ready=lambda: self.is_ready,
            drain=self.drain,
        )
        return AddRequestIds(Authenticate(LimitBodies(app), self.access))

    def _admin_application(self) -> Any:
        return build_admin_app(
            self.environments,
            self.metrics,
            is_ready=lambda: self.is_ready,
            drain=self.drain,
        )

    def _name_addresses(self, grpc_port: int) -> None:
        host, secure = self.config.host, "s" if self.config.tls else ""
        http, *admin = (authority(host, one.port) for one in self._listeners)
        self.http_address = f"http{secure}://{http}"
        self.grpc_address = f"grpc{secure}://{authority(host, grpc_port)}"
        self.admin_address = f"http://{admin[0]}" if admin else ""

    def _read_loads(self) -> list[Any]:
        return [sessions.environment_load for sessions in self.environments.values()]

    async def _begin_watching(self, key: str) -> None:
        """Follow the sources, and wait until the first servers are known, or not in time.

        Raises:
            UserError: of a source that cannot work.
        """
        for name, environment in self.config.environments.items():
            if name not in self.sources:
                admission = self.environments[name].admission
                lifetime_s = self.config.sessions.id_lifetime_s
                start = partial(self._local_server, environment, key)
                self.sources[name] = _source_of(environment, start, admission, lifetime_s)
            source = self.sources[name]
            self._watching[name] = asyncio.create_task(self._watch(name, source))
        settled = asyncio.create_task(self._settle())
        watching = self._watching.values()
        try:
            # A source watches for ever, unless it cannot work.
            await asyncio.wait([settled, *watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        for task in watching:
            if task.done():
                await task

    def _local_server(self, environment: Environment, key: str) -> LocalServer:
        assert isinstance(environment, SubprocessEnvironment)
        return LocalServer(
            environment.target,
            environment.options,
            max_sessions=environment.max_sessions,
            isolation=environment.isolation,
            extra_arguments=list(environment.arguments),
            environment={SESSION_KEY_VARIABLE: key},
            withheld=self._own_variables(),
        )

    def _own_variables(self) -> frozenset[str]:
        """Environment variables that no server is to have: tokens, by name or by what they hold."""
        named = {*self.config.secret_variables, SESSION_KEY_VARIABLE}
        tokens = {name for name, text in os.environ.items() if self.access.knows(text.strip())}
        return frozenset(named | tokens)

    async def _settle(self) -> None:
        fleets = [one.fleet for one in self.environments.values()]
        await asyncio.gather(*(fleet.wait_settled(_SETTLE_TIMEOUT_S) for fleet in fleets))

    async def _watch(self, name: str, source: EndpointSource) -> None:
        """Follow a source for ever, also after failures that are not the user's.

        Raises:
            UserError: the source cannot work at all.
        """
        fleet = self.environments[name].fleet
        while True:
            try:
                await source.watch(fleet.publish)
            except UserError as error:
                if not fleet.is_published:
                    raise
                _log.error("servers of %s: %s", name, error)
            except LudusError as error:
                _log.error("servers of %s: %s", name, error)
            await asyncio.sleep(_SOURCE_BACKOFF_S)

    async def _end_refused_forever(self) -> None:
        """End connections whose callers may not use them any more, until cancelled."""
        while True:
            await asyncio.sleep(REVOKE_EVERY_S)
            self.access.end_refused()

    async def _shut_down(self) -> None:
        if self._revoking is not None:
            self._revoking.cancel()
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await asyncio.gather(*(one.shut_down() for one in self.environments.values()))
        await asyncio.gather(*(source.close() for source in self.sources.values()))


def serve_gateway(config: GatewayConfig, on_ready: OnReady | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then drain and stop.

    A second signal ends the wait for sessions.

    Raises:
        PortInUseError: something else listens there; nothing was started.
        UserError: the configuration cannot work.
    """
    hide_process()
    gateway = Gateway(config)
    run_until_signal(
        gateway,
        drain_grace_s=config.drain_grace_s,
        on_ready=None if on_ready is None else partial(on_ready, gateway),
        sigint_drains=True,
    )


def _access_of(config: GatewayConfig, clock: Callable[[], float]) -> Access:
    if config.tenants_file is not None:
        return Access.from_file(config.tenants_file, clock=clock)
    token = value_of(config.token_env)
    return Access.single(token) if token else Access.open()


def _link_options(servers: ServersSection) -> LinkOptions:
    token = value_of(servers.token_env)
    return LinkOptions(
        authorization=f"Bearer {token}" if token else "",
        poll_interval_s=servers.poll_interval_s,
        unreachable_after_s=servers.unreachable_after_s,
        retry_within_s=servers.retry_within_s,
        call_timeout_s=servers.call_timeout_s,
        credentials=client_channel_credentials(servers.ca_file, servers.identity)
        if servers.ca_file or servers.identity
        else None,
        server_name=servers.server_name,
    )


def _source_of(
    environment: Environment,
    local_server: Callable[[], LocalServer],
    admission: Admission,
    lifetime_s: float,
) -> EndpointSource:
    fleet = admission.fleet
    match environment:
        case StaticEnvironment():
            return StaticSource(environment.addresses)
        case SubprocessEnvironment():
            return SubprocessSource(
                local_server,
                environment.num_servers,
                environment.drain_grace_s,
                fleet.num_sessions_of,
            )
        case KubernetesEnvironment():
            # The cluster's client is loaded where there is a cluster only.
            from ludus.services.gateway.kubernetes.cluster import ClusterSource
            from ludus.services.kubernetes.api import KubernetesApi

            return ClusterSource(KubernetesApi(), environment, fleet.loads_of_pods)
        case SandboxEnvironment():
            from ludus.services.gateway.kubernetes.sandboxes import SandboxSource
            from ludus.services.kubernetes.api import KubernetesApi

            sandboxes = SandboxSource(
                KubernetesApi(),
                environment,
                fleet.link_at,
                lambda: admission.num_wanted,
                lifetime_s,
            )
            admission.supply = sandboxes
            return sandboxes
