"""One process that serves an environment over HTTP, WebSocket and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import uvicorn

from ludus.env.core_options import CoreOptions
from ludus.env.determinism import is_deterministic
from ludus.env.factory_names import named
from ludus.env.grpc_messages import MAX_MESSAGE_BYTES
from ludus.env.grpc_server import EnvServicer, TokenInterceptor
from ludus.env.hosts import EnvironmentFactory, SessionHost, local_host
from ludus.env.http_app import build_app
from ludus.env.metered_core import MeteredCore
from ludus.env.recording import RecordingOptions, RecordingSessions
from ludus.env.server_cli import command_of, leave_stuck_threads_behind, server_parser
from ludus.env.server_options import ServerOptions
from ludus.env.sessions import Sessions
from ludus.env.targets import TargetFactory
from ludus.env.websocket_protocol import DirectWebSocketProtocol
from ludus.env.worker_host import WorkerHost
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import ConfigError, PortInUseError, UserError

__all__ = ["EnvServer", "ServerOptions", "run_server", "run_server_cli", "serve"]

_HTTP_GRACE_S = 1.0
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers share a port and split its calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

OnReady = Callable[[str, str], None]
"""Called with the HTTP and the gRPC address once both listen."""


class EnvServer:
    """A server within a running event loop: `async with EnvServer(factory) as server`."""

    def __init__(self, factory: EnvironmentFactory, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self._factory = factory
        self._tasks: list[asyncio.Task[None]] = []
        self.http_address = ""
        """For example http://127.0.0.1:8000."""
        self.grpc_address = ""
        """For example grpc://127.0.0.1:18000."""

    async def start(self) -> None:
        """Returns when both ports listen.

        Raises:
            PortInUseError: something else listens there; nothing was started.
            ConfigError: the host or port cannot be bound.
        """
        options = self.options
        http_socket = _bind(options.host, options.port, "port")
        host: SessionHost | None = None
        try:
            _bind(options.host, options.bound_grpc_port, "grpc_port").close()
            host = await self._new_host()
            self.core = MeteredCore(host, self._core_options(host))
            self._recording = self._new_recording()
            sessions: Sessions = self._recording or self.core
            self._grpc_server, grpc_port = _build_grpc_server(sessions, options)
        except BaseException:
            http_socket.close()
            if host is not None:
                await host.shut_down()
            raise
        await self._grpc_server.start()
        self._http_server = _HttpServer(_http_config(sessions, options))
        self._tasks = [
            asyncio.create_task(self._http_server.serve(sockets=[http_socket])),
            asyncio.create_task(self.core.close_idle_forever()),
        ]
        while not self._http_server.started:
            if self._tasks[0].done():
                await self._tasks[0]
            await asyncio.sleep(0.005)
        self.http_address = f"http://{_authority(options.host, http_socket.getsockname()[1])}"
        self.grpc_address = f"grpc://{_authority(options.host, grpc_port)}"

    async def stop(self) -> None:
        """Returns within a few seconds, when everything is closed and no worker is left."""
        http_serving, sweeping = self._tasks
        sweeping.cancel()
        self._http_server.stop()
        await asyncio.gather(self._grpc_server.stop(grace=0.3), http_serving)
        await self.core.shut_down()
        if self._recording is not None:
            self._recording.finish()

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
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    async with server:
        if on_ready is not None:
            on_ready(server.http_address, server.grpc_address)
        await stop.wait()


class _HttpServer(uvicorn.Server):
    """uvicorn that stops when told, not when it next looks, and leaves signals to `serve`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Lets `serve` return."""
        self._stop.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # fills the default headers
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_HTTP_GRACE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_config(sessions: Sessions, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(sessions, token=options.token),
        loop="none",
        http="httptools",
        ws=DirectWebSocketProtocol,
        ws_per_message_deflate=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        access_log=False,
        date_header=False,
        server_header=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
    )


def _build_grpc_server(sessions: Sessions, options: ServerOptions) -> tuple[grpc.aio.Server, int]:
    interceptors = [TokenInterceptor(options.token)] if options.token else []
    server = grpc.aio.server(options=_GRPC_OPTIONS, interceptors=interceptors)
    env_pb2_grpc.add_EnvServiceServicer_to_server(EnvServicer(sessions), server)
    try:
        port = server.add_insecure_port(_authority(options.host, options.bound_grpc_port))
    except RuntimeError as error:
        raise _port_in_use("grpc_port", options.host, options.bound_grpc_port) from error
    return server, port


def _bind(host: str, port: int, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(name, host, port) from error
        raise ConfigError(
            f"expected a host and {name} to listen on, got {host}:{port}: {error.strerror}"
        ) from error


def _port_in_use(name: str, host: str, port: int) -> PortInUseError:
    return PortInUseError(
        f"expected a free {name}, got {port}: something else listens on {host}:{port};"
        f" stop it or choose another {name} (0 takes a free one)"
    )


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
