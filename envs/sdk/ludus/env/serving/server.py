"""One process that serves an environment over HTTP, WebSocket and gRPC.

    port, grpc_port --Sessions--> SessionCore <--health-- admin_port, without token and TLS

SIGTERM drains: the server opens no new sessions and stops when the last session has ended, at most
`drain_grace_s` later. SIGINT and a second SIGTERM stop the server at once. `/drain` only stops new
sessions and does not stop the server, because Kubernetes would restart a container that exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from starlette.types import ASGIApp

from ludus.env.contract.rules import is_deterministic
from ludus.env.grpc.call_server import EnvServicer, TokenInterceptor
from ludus.env.http.app import build_app
from ludus.env.http.health import build_admin_app
from ludus.env.limits import MAX_SERVER_MESSAGE_BYTES
from ludus.env.recording.recorder import EpisodeRecorder
from ludus.env.runtime import Watchdog, run_until_signal
from ludus.env.sandbox.confine import Layer
from ludus.env.sandbox.processes import hide_process
from ludus.env.security.secret_files import CHECK_INTERVAL_S
from ludus.env.security.tls import TlsFiles
from ludus.env.serving.listeners import (
    HttpListener,
    bind,
    build_grpc_server,
    format_authority,
    protect_ports,
    stop_grpc_server,
    unprotect_ports,
)
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import EnvironmentFactory, SessionHost, make_local_host
from ludus.env.sessions.options import (
    DEFAULT_PORT,
    ServerAddresses,
    ServerOptions,
    make_server_options,
)
from ludus.env.sessions.threads import STEP_THREAD_NAME
from ludus.env.targets.targets import TargetFactory, make_importable_factory
from ludus.env.text.terminal import format_notice, log_to_stderr
from ludus.env.workers.host import WorkerHost
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import UserError

__all__ = ["EnvServer", "ServerOptions", "build_openenv_app", "run_server", "serve"]

_log = logging.getLogger(__name__)


class EnvServer:
    """A server in a running event loop: `async with EnvServer(factory) as server`."""

    def __init__(self, factory: EnvironmentFactory, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self._factory = factory
        self._tls = _make_tls_files(self.options)
        self._listeners: list[HttpListener] = []
        self.addresses = ServerAddresses("", "")
        """Addresses of the ports; empty before the server listens."""
        self.missing_layers = ""
        """Layers that the workers' sandbox lacks, with the reasons; "" if none is missing."""

    async def start(self) -> None:
        """Listen on every port.

        Raises:
            PortInUseError: a port is in use; nothing was started.
            ConfigError: the host or a port cannot be bound, or a TLS file cannot be used.
        """
        options = self.options
        sockets = [bind(options.host, options.port, "port")]
        host: SessionHost | None = None
        try:
            if options.admin_port is not None:
                sockets.append(bind(options.host, options.admin_port, "admin_port"))
            # Check the port first, because building an environment may take long.
            bind(options.host, options.requested_grpc_port, "grpc_port").close()
            host = await self._start_host()
            self.core = SessionCore(host, options)
            self._recorder = self._start_recording()
            self._tokens = options.make_tokens()
            app = build_app(self.core, tokens=self._tokens)
            hosts = options.allow_host
            self._listeners = [HttpListener(app, sockets[0], self._tls, allowed_hosts=hosts)]
            if options.admin_port is not None:
                admin_app = build_admin_app(self.core)
                self._listeners.append(HttpListener(admin_app, sockets[1], allowed_hosts=hosts))
            grpc_port = self._build_grpc_server()
        except BaseException:
            for listener in sockets:
                listener.close()
            if host is not None:
                await host.shut_down()
            raise
        await self._grpc_server.start()
        await asyncio.gather(*(listener.start() for listener in self._listeners))
        self._tasks = [asyncio.create_task(self.core.close_idle_forever())]
        if self._tokens is not None:
            close_refused = self._tokens.close_refused_connections_forever(CHECK_INTERVAL_S)
            self._tasks.append(asyncio.create_task(close_refused))
        self.addresses = self._build_addresses(grpc_port)
        self._ports = [grpc_port, *(listener.port for listener in self._listeners)]
        protect_ports(self._ports)

    @property
    def http_address(self) -> str:
        """HTTP address, for example http://127.0.0.1:8000."""
        return self.addresses.http

    @property
    def grpc_address(self) -> str:
        """gRPC address, for example grpc://127.0.0.1:18000."""
        return self.addresses.grpc

    async def stop(self) -> None:
        """Close all ports and sessions, and stop all workers, within a few seconds."""
        for task in self._tasks:
            task.cancel()
        unprotect_ports(self._ports)
        await asyncio.gather(
            stop_grpc_server(self._grpc_server), *(listener.stop() for listener in self._listeners)
        )
        await self.core.shut_down()
        if self._recorder is not None:
            self._recorder.finish()

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return self.core.load.num_sessions

    def drain(self) -> None:
        """Open no new sessions from now on."""
        self.core.drain()

    def _build_addresses(self, grpc_port: int) -> ServerAddresses:
        options = self.options
        scheme_suffix = "s" if self._tls is not None else ""
        http_authority, *admin_authorities = (
            format_authority(options.host, listener.port) for listener in self._listeners
        )
        return ServerAddresses(
            f"http{scheme_suffix}://{http_authority}",
            f"grpc{scheme_suffix}://{format_authority(options.host, grpc_port)}",
            f"http://{admin_authorities[0]}" if admin_authorities else "",
        )

    def _build_grpc_server(self) -> int:
        options = self.options
        interceptors = [TokenInterceptor(self._tokens)] if self._tokens is not None else []
        host, requested_port = options.host, options.requested_grpc_port
        self._grpc_server, port = build_grpc_server(
            host,
            requested_port,
            self._tls,
            interceptors,
            max_message_bytes=MAX_SERVER_MESSAGE_BYTES,
        )
        add_servicer: Any = env_pb2_grpc.add_EnvServiceServicer_to_server
        add_servicer(EnvServicer(self.core), self._grpc_server)
        return port

    async def _start_host(self) -> SessionHost:
        options = self.options
        if options.isolation != "inline":
            hide_process()
            worker_host = await WorkerHost.start(make_importable_factory(self._factory), options)
            self.missing_layers = worker_host.missing_layers
            return worker_host
        host = make_local_host(self._factory, options.num_threads, options.step_timeout_s)
        if options.check_determinism and not options.deterministic:
            is_verified = is_deterministic(self._factory)
            host.description = dataclasses.replace(host.description, is_deterministic=is_verified)
        return host

    def _start_recording(self) -> EpisodeRecorder | None:
        if self.options.record is None:
            return None
        factory = self._factory if isinstance(self._factory, TargetFactory) else None
        recorder = EpisodeRecorder(self.options.record, self.core.description, factory)
        self.core.record(recorder)
        return recorder

    async def __aenter__(self) -> EnvServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


def serve(factory: EnvironmentFactory, options: ServerOptions | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until the environment blocks the server.

    Raises:
        PortInUseError: a port is in use; nothing was started.
        ConfigError: the environment cannot be built, or a TLS file cannot be used.
    """
    hide_process()
    server = EnvServer(factory, options)
    ready_file = server.options.ready_file

    def on_ready() -> None:
        _announce(server, ready_file)
        host, limit_s = server.core.host, server.options.step_timeout_s
        Watchdog(limit_s, lambda: host.unavailable_reason if host.is_stuck else "")

    try:
        run_until_signal(server, drain_grace_s=server.options.drain_grace_s, on_ready=on_ready)
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def run_server(
    factory: EnvironmentFactory, arguments: Mapping[str, Any], default_port: int = DEFAULT_PORT
) -> NoReturn:
    """Serve until a signal and exit with 0, or exit with 2 after an error of the user.

    Args:
        arguments: namespace of `add_server_arguments`; other names in it are ignored.
    """
    log_to_stderr(logging.INFO)
    with exit_after_user_error():
        if isinstance(factory, TargetFactory):
            if factory.one_per_process and "isolation" not in arguments:
                # The environment needs processes; the operator has not asked for isolation.
                arguments = {"accept_missing": tuple(Layer), **arguments}
            arguments = {"isolation": factory.isolation, **arguments}
        serve(factory, make_server_options(arguments, default_port))
    _exit_despite_stuck_threads()
    sys.exit(0)


@contextlib.contextmanager
def exit_after_user_error() -> Iterator[None]:
    """Exit with 2 and one message if the block raises an error of the user."""
    try:
        yield
    except UserError as error:
        sys.stderr.write(f"{format_notice('error', error)}\n")
        sys.exit(UserError.exit_code)


def build_openenv_app(
    factory: EnvironmentFactory, arguments: Mapping[str, Any] | None = None
) -> ASGIApp:
    """Build the application that OpenEnv's images run with `uvicorn server.app:app`.

    Args:
        arguments: server options that concern sessions, as for `run_server`.
    """
    options = ServerOptions(**(arguments or {}))
    host = make_local_host(factory, options.num_threads, options.step_timeout_s)
    return build_app(SessionCore(host, options))


def _announce(server: EnvServer, ready_file: Path | None) -> None:
    """Log the addresses, and write the ready file atomically."""
    addresses = {name: url for name, url in dataclasses.asdict(server.addresses).items() if url}
    _log.info("listening on %s", ", ".join(addresses.values()))
    if exposed_secrets := server.options.list_exposed_secrets():
        _log.warning(
            "isolation inline runs the environment in this process, where its code can read the"
            " server's %s; use isolation pool or process, or a server key (server_key_file)",
            " and ".join(exposed_secrets),
        )
    workers = server.core.worker_counts
    if workers is not None:
        active_layers = [layer for layer, is_active in workers.layers.items() if is_active]
        _log.info("the sandbox of workers has %s", ", ".join(active_layers) or "no layers")
    if server.missing_layers:
        _log.warning("the sandbox of workers lacks %s", server.missing_layers)
    if ready_file is None:
        return
    temporary_file = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
    temporary_file.write_text(json.dumps({**addresses, "pid": os.getpid()}))
    temporary_file.replace(ready_file)


def _exit_despite_stuck_threads() -> None:
    """Exit now if a step hangs in a thread, because the interpreter would wait for it."""
    for thread in threading.enumerate():
        if thread.name.startswith(STEP_THREAD_NAME):
            thread.join(timeout=0.2)
            if thread.is_alive():
                logging.shutdown()
                os._exit(0)


def _make_tls_files(options: ServerOptions) -> TlsFiles | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    return TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
