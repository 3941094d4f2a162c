"""One process that serves an environment over HTTP, WebSocket and gRPC.

    port, grpc_port --Sessions--> SessionCore <--health-- admin_port, without token and TLS

SIGTERM drains: no new sessions, and an end as soon as the last one has ended, at most
`drain_grace_s` later. SIGINT and a second SIGTERM end the server at once. `/drain` stops
admission and nothing else: a container that ended by itself would be started again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ludus.env.contract.determinism import is_deterministic
from ludus.env.grpc.servicer import EnvServicer, TokenInterceptor
from ludus.env.http.app import build_app
from ludus.env.http.health import build_admin_app
from ludus.env.recording.writer import RecordingOptions, RecordingSessions
from ludus.env.runtime import freeze_heap
from ludus.env.serving.cli import command_of, leave_stuck_threads_behind, server_parser
from ludus.env.serving.listeners import (
    HttpListener,
    authority,
    bind,
    build_grpc_server,
    stop_grpc_server,
)
from ludus.env.serving.options import ServerAddresses, ServerOptions
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import EnvironmentFactory, SessionHost, local_host
from ludus.env.sessions.interface import Sessions
from ludus.env.sessions.options import CoreOptions
from ludus.env.targets.importable import named
from ludus.env.targets.targets import TargetFactory
from ludus.env.workers.host import WorkerHost
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import UserError

__all__ = ["EnvServer", "ServerOptions", "run_server", "run_server_cli", "serve"]

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05

OnReady = Callable[[ServerAddresses], None]
"""Called once every port listens."""


class EnvServer:
    """A server within a running event loop: `async with EnvServer(factory) as server`."""

    def __init__(self, factory: EnvironmentFactory, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self._factory = factory
        self._listeners: list[HttpListener] = []
        self._addresses = ServerAddresses("", "")

    async def start(self) -> None:
        """Returns when every port listens.

        Raises:
            PortInUseError: something else listens there; nothing was started.
            ConfigError: the host or a port cannot be bound, or a file of TLS cannot be used.
        """
        options = self.options
        sockets = [bind(options.host, options.port, "port")]
        host: SessionHost | None = None
        try:
            if options.admin_port is not None:
                sockets.append(bind(options.host, options.admin_port, "admin_port"))
            # A port in use is found before an environment is built.
            bind(options.host, options.bound_grpc_port, "grpc_port").close()
            host = await self._new_host()
            self.core = SessionCore(host, self._core_options(host))
            self._recording = self._new_recording()
            sessions: Sessions = self._recording or self.core
            app = build_app(sessions, token=options.token)
            self._listeners = [HttpListener(app, sockets[0], options.tls)]
            if options.admin_port is not None:
                self._listeners.append(HttpListener(build_admin_app(sessions), sockets[1]))
            grpc_port = self._build_grpc_server(sessions)
        except BaseException:
            for one in sockets:
                one.close()
            if host is not None:
                await host.shut_down()
            raise
        await self._grpc_server.start()
        await asyncio.gather(*(listener.start() for listener in self._listeners))
        self._sweeping = asyncio.create_task(self.core.close_idle_forever())
        self._addresses = self._find_addresses(grpc_port)

    @property
    def addresses(self) -> ServerAddresses:
        """Where it listens; empty until it does."""
        return self._addresses

    @property
    def http_address(self) -> str:
        """For example http://127.0.0.1:8000."""
        return self._addresses.http

    @property
    def grpc_address(self) -> str:
        """For example grpc://127.0.0.1:18000."""
        return self._addresses.grpc

    async def stop(self) -> None:
        """Returns within a few seconds, when everything is closed and no worker is left."""
        self._sweeping.cancel()
        await asyncio.gather(
            stop_grpc_server(self._grpc_server), *(one.stop() for one in self._listeners)
        )
        await self.core.shut_down()
        if self._recording is not None:
            self._recording.finish()

    async def drain(self) -> None:
        """Returns when no session is left; new ones are refused from now on."""
        self.core.drain()
        while self.core.load.num_sessions:
            await asyncio.sleep(_DRAIN_POLL_S)

    def _find_addresses(self, grpc_port: int) -> ServerAddresses:
        options = self.options
        secure = "s" if options.tls is not None else ""
        http, *admin = (authority(options.host, one.port) for one in self._listeners)
        return ServerAddresses(
            f"http{secure}://{http}",
            f"grpc{secure}://{authority(options.host, grpc_port)}",
            f"http://{admin[0]}" if admin else "",
        )

    def _build_grpc_server(self, sessions: Sessions) -> int:
        options = self.options
        interceptors = [TokenInterceptor(options.token)] if options.token else []
        self._grpc_server, port = build_grpc_server(
            options.host, options.bound_grpc_port, options.tls, interceptors
        )
        env_pb2_grpc.add_EnvServiceServicer_to_server(EnvServicer(sessions), self._grpc_server)
        return port

    async def _new_host(self) -> SessionHost:
        options = self.options
        if options.isolation == "inline":
            return local_host(self._factory, options.num_threads)
        return await WorkerHost.start(named(self._factory), options.worker_options)

    def _new_recording(self) -> RecordingSessions | None:
        if self.options.record is None:
            return None
        factory = self._factory
        options = RecordingOptions(
            built_from=factory if isinstance(factory, TargetFactory) else None,
            first_seed=self.options.first_seed,
        )
        return RecordingSessions(self.core, self.options.record, options)

    def _core_options(self, host: SessionHost) -> CoreOptions:
        options = self.options
        # Workers have tried it themselves: this process never builds what they isolate.
        seen = host.description.is_deterministic
        if options.isolation == "inline" and options.check_determinism:
            seen = is_deterministic(self._factory)
        return CoreOptions(
            max_sessions=options.max_sessions,
            idle_timeout_s=options.idle_timeout_s,
            step_timeout_s=options.bound_step_timeout_s,
            wait_for_slot_s=options.wait_for_slot_s,
            first_seed=options.first_seed,
            is_deterministic=seen,
            server_id=options.server_id,
            key=options.key,
        )

    async def __aenter__(self) -> EnvServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


def serve(
    factory: EnvironmentFactory,
    options: ServerOptions | None = None,
    *,
    on_ready: OnReady | None = None,
    **settings: Any,
) -> None:
    """Returns after SIGTERM or SIGINT, when the server has shut down.

    Args:
        settings: fields of `ServerOptions`, for example isolation="process".

    Raises:
        PortInUseError: something else listens there; nothing was started.
        ConfigError: the options cannot work.
    """
    options = dataclasses.replace(options or ServerOptions(), **settings)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve_until_signal(EnvServer(factory, options), on_ready))


def run_server_cli(
    factory: EnvironmentFactory, default_port: int = 8000, argv: Sequence[str] | None = None
) -> NoReturn:
    """Ends the process: 0 after a signal, 2 after one line on standard error for bad input."""
    run_server(factory, vars(server_parser(default_port).parse_args(argv)), default_port)


def run_server(
    factory: EnvironmentFactory, given: Mapping[str, Any], default_port: int = 8000
) -> NoReturn:
    """The same, from a namespace of `add_server_arguments`; other names in it are ignored."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        if isinstance(factory, TargetFactory):
            given = {"isolation": factory.isolation, **given}
        command = command_of(given, default_port)
        try:
            serve(factory, command.options, on_ready=command.announce)
        finally:
            command.withdraw()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    leave_stuck_threads_behind()
    sys.exit(0)


async def _serve_until_signal(server: EnvServer, on_ready: OnReady | None) -> None:
    asked, told = asyncio.Event(), asyncio.Event()

    def on_sigterm() -> None:
        (told if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loop.add_signal_handler(signal.SIGINT, told.set)
    async with server:
        freeze_heap()
        if on_ready is not None:
            on_ready(server.addresses)
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(one.wait()) for one in (asked, told)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        grace_s = server.options.drain_grace_s
        if grace_s > 0 and not told.is_set():
            _log.info(
                "draining: waiting for %d sessions, at most %g s",
                server.core.load.num_sessions,
                grace_s,
            )
            draining = asyncio.create_task(server.drain())
            await asyncio.wait(
                (draining, waits[1]), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            waits.append(draining)
        for wait in waits:
            wait.cancel()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
