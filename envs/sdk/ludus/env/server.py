"""One process that serves an environment over HTTP, WebSocket and gRPC."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
import uvicorn

from ludus.env.core import CoreOptions, SessionCore
from ludus.env.grpc_messages import MAX_MESSAGE_BYTES
from ludus.env.grpc_server import EnvServicer, TokenInterceptor
from ludus.env.hosts import STEP_THREAD_NAME, EnvironmentFactory, local_host
from ludus.env.http_app import build_app
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import ConfigError, PortInUseError, UserError

_log = logging.getLogger(__name__)

GRPC_PORT_OFFSET = 10_000
_HTTP_GRACE_S = 1.0
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers share a port and split its calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

OnReady = Callable[[str, str], None]
"""Called with the HTTP and the gRPC address once both listen."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    """HTTP and WebSocket; 0 takes a free port."""
    grpc_port: int | None = None
    """None means port + 10000, or a free port when `port` is 0."""
    max_sessions: int = 256
    idle_timeout_s: float = 600.0
    """A session without a call for so long is ended."""
    num_threads: int = 32
    """For environments that do not step on the event loop."""
    token: str | None = None
    insecure: bool = False
    """Allows listening beyond this machine without a token."""

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK_HOSTS and not self.token and not self.insecure:
            raise ConfigError(
                f"expected a token to listen on {self.host}, which other machines can reach,"
                " got none; give one, listen on 127.0.0.1, or allow it as insecure"
            )
        if self.max_sessions < 1:
            raise ConfigError(f"expected max_sessions >= 1, got {self.max_sessions}")
        for name, port in (("port", self.port), ("grpc_port", self.bound_grpc_port)):
            if not 0 <= port <= 65_535:
                raise ConfigError(
                    f"expected {name} between 0 and 65535, got {port}; set port and grpc_port"
                )

    @property
    def bound_grpc_port(self) -> int:
        """The gRPC port to ask for."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + GRPC_PORT_OFFSET if self.port else 0


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
        try:
            _bind(options.host, options.bound_grpc_port, "grpc_port").close()
            self.core = SessionCore(
                local_host(self._factory, options.num_threads),
                CoreOptions(
                    max_sessions=options.max_sessions, idle_timeout_s=options.idle_timeout_s
                ),
            )
            self._grpc_server, grpc_port = _build_grpc_server(self.core, options)
        except BaseException:
            http_socket.close()
            raise
        await self._grpc_server.start()
        self._http_server = _HttpServer(_http_config(self.core, options))
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
        """Returns within about two seconds, when everything is closed."""
        http_serving, sweeping = self._tasks
        sweeping.cancel()
        self._http_server.stop()
        await asyncio.gather(self._grpc_server.stop(grace=0.3), http_serving)
        await self.core.shut_down()

    async def __aenter__(self) -> EnvServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


def serve(
    factory: EnvironmentFactory,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int | None = None,
    max_sessions: int = 256,
    idle_timeout_s: float = 600.0,
    token: str | None = None,
    insecure: bool = False,
    on_ready: OnReady | None = None,
) -> None:
    """Returns after SIGTERM or SIGINT, when the server has shut down; see `ServerOptions`.

    Raises:
        PortInUseError: something else listens there; nothing was started.
        ConfigError: the options cannot work.
    """
    options = ServerOptions(
        host=host,
        port=port,
        grpc_port=grpc_port,
        max_sessions=max_sessions,
        idle_timeout_s=idle_timeout_s,
        token=token,
        insecure=insecure,
    )
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve_until_signal(EnvServer(factory, options), on_ready))


def run_server_cli(
    factory: EnvironmentFactory, default_port: int = 8000, argv: Sequence[str] | None = None
) -> NoReturn:
    """Ends the process: 0 after a signal, 2 after one line on standard error for bad input."""
    arguments = _parse_arguments(default_port, argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    ready_file: Path | None = arguments.ready_file
    try:
        serve(
            factory,
            host=arguments.host,
            port=arguments.port,
            grpc_port=arguments.grpc_port,
            max_sessions=arguments.max_sessions,
            idle_timeout_s=arguments.idle_timeout_s,
            token=os.environ.get(arguments.token_env),
            insecure=arguments.insecure,
            on_ready=lambda http, grpc_: _announce(http, grpc_, ready_file),
        )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
    _leave_stuck_threads_behind()
    sys.exit(0)


def _parse_arguments(default_port: int, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serves an environment over HTTP, WebSocket and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = ServerOptions()
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=default_port, help="0 takes a free port")
    parser.add_argument("--grpc-port", type=int, help="port + 10000 unless given")
    parser.add_argument("--max-sessions", type=int, default=defaults.max_sessions)
    parser.add_argument("--idle-timeout-s", type=float, default=defaults.idle_timeout_s)
    parser.add_argument(
        "--token-env", default="LUDUS_ENV_TOKEN", help="environment variable with the token"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine without a token"
    )
    parser.add_argument(
        "--ready-file", type=Path, help="written as JSON (http, grpc, pid) once it listens"
    )
    return parser.parse_args(argv)


def _announce(http_address: str, grpc_address: str, ready_file: Path | None) -> None:
    _log.info("listening on %s and %s", http_address, grpc_address)
    if ready_file is None:
        return
    ready = {"http": http_address, "grpc": grpc_address, "pid": os.getpid()}
    unfinished = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(ready))
    unfinished.replace(ready_file)


def _leave_stuck_threads_behind() -> None:
    # The interpreter would wait for a step that hangs in a thread for ever.
    for thread in threading.enumerate():
        if thread.name.startswith(STEP_THREAD_NAME):
            thread.join(timeout=0.2)
            if thread.is_alive():
                logging.shutdown()
                os._exit(0)


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


def _http_config(core: SessionCore, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(core, token=options.token),
        loop="none",
        http="httptools",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        access_log=False,
        date_header=False,
        server_header=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
    )


def _build_grpc_server(core: SessionCore, options: ServerOptions) -> tuple[grpc.aio.Server, int]:
    interceptors = [TokenInterceptor(options.token)] if options.token else []
    server = grpc.aio.server(options=_GRPC_OPTIONS, interceptors=interceptors)
    env_pb2_grpc.add_EnvServiceServicer_to_server(EnvServicer(core), server)
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
