"""The ports of a server or gateway: HTTP with WebSockets, and gRPC, both optionally with TLS.

    HTTP  --BoundedHttp--> application <--DirectWebSocketProtocol-- WebSocket
    gRPC  --keepalive----> services

Both listen within one running event loop and stop on request within about a second. Pings detect
a dead client: over gRPC within half a minute, over WebSocket within forty seconds.

A child process that the environment forks inherits all open sockets. It would keep the ports
occupied after the server has exited, and keep connections of clients open. `protect_ports`
prevents this.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.types import ASGIApp

from ludus.env.asgi.uvicorn_protocols import (
    HEAD_TIMEOUT_S,
    BoundedHttpProtocol,
    DirectWebSocketProtocol,
)
from ludus.env.grpc.call_server import UnparsedStreamInterceptor
from ludus.env.limits import MAX_GATEWAY_CALL_BYTES, MAX_MESSAGE_BYTES
from ludus.env.security.hosts import is_loopback_name
from ludus.env.security.middleware import RefuseForeignHosts, RefuseForeignOrigins
from ludus.env.security.tls import TlsFiles, build_server_context, build_server_credentials
from ludus.proto.errors import ConfigError, PortInUseError

_HTTP_GRACE_S = 1.0
_KEEP_ALIVE_S = 5
_GRPC_GRACE_S = 0.3
_AGE_GRACE_MS = 10_000
_WEBSOCKET_PING_S = 20.0
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise two processes share a port and split its calls
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Pings detect a client that died silently, so that its sessions start to linger.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A bandwidth probe without a reply would delay the keepalive for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
)
_DESCRIPTOR_FOLDER = Path("/proc/self/fd")
_protected_ports: Counter[int] = Counter()


def bind(host: str, port: int, name: str) -> socket.socket:
    """Bind a socket and listen.

    Raises:
        PortInUseError: the port is in use.
        ConfigError: the host or port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # "::" also listens on IPv4, as in gRPC.
    is_dual_stack = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=is_dual_stack
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _make_port_error(name, host, port) from error
        raise ConfigError(f"cannot listen on {host}:{port} ({name}): {error.strerror}") from error


def format_authority(host: str, port: int) -> str:
    """Return host and port in the form of an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def build_grpc_server(
    host: str,
    port: int,
    tls: TlsFiles | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_connection_age_s: float = 0.0,
    max_message_bytes: int = MAX_GATEWAY_CALL_BYTES,
) -> tuple[grpc.aio.Server, int]:
    """Build a gRPC server without services; return the server, which is not started, and its port.

    Args:
        port: 0 uses a free port.
        max_connection_age_s: age at which connections are closed; 0 sets no limit.
        max_message_bytes: maximum size of a message, which is larger for servers behind gateways.

    Raises:
        PortInUseError: the port is in use.
        ConfigError: the host, the port or a file of `tls` cannot be used.
    """
    bind(host, port, "grpc_port").close()  # gRPC would not report the reason
    credentials = None if tls is None else build_server_credentials(tls)
    limit_options = [("grpc.max_receive_message_length", max_message_bytes)]
    # For TLS and the first frames of HTTP/2; by default gRPC would wait for 120 s.
    limit_options += [("grpc.server_handshake_timeout_ms", round(HEAD_TIMEOUT_S * 1000))]
    if max_connection_age_s > 0:
        limit_options += [("grpc.max_connection_age_ms", round(max_connection_age_s * 1000))]
        limit_options += [("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS)]
    server = grpc.aio.server(
        options=(*_GRPC_OPTIONS, *limit_options),
        interceptors=[UnparsedStreamInterceptor(), *interceptors],
    )
    address = format_authority(host, port)
    try:
        if credentials is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _make_port_error("grpc_port", host, port) from error


async def stop_grpc_server(server: grpc.aio.Server) -> None:
    """Stop a server; running calls are cancelled after a short grace."""
    await server.stop(grace=_GRPC_GRACE_S)


class HttpListener:
    """A uvicorn server on a bound socket, within a running event loop.

    On a loopback socket, requests of foreign web pages are refused.

    Args:
        keep_alive_s: maximum idle time of a connection.
        allowed_hosts: host names that requests on a loopback socket may have, in addition to the
            names of loopback.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening_socket: socket.socket,
        tls: TlsFiles | None = None,
        keep_alive_s: int = _KEEP_ALIVE_S,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        # Otherwise the body of a response waits 40 ms until the client acknowledges its head.
        # asyncio does this only for sockets that were created with a protocol number.
        listening_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = listening_socket
        if is_loopback_name(listening_socket.getsockname()[0]):
            app = RefuseForeignHosts(RefuseForeignOrigins(app), allowed_hosts=allowed_hosts)
        self._server = _UvicornServer(_build_uvicorn_config(app, tls, keep_alive_s))
        self._serve_task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Number of the port."""
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Start to answer requests."""
        self._serve_task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serve_task.done():
                await self._serve_task
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop; open connections are closed after a short grace."""
        self._server.stop()
        if self._serve_task is not None:
            await self._serve_task


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that stops immediately on request and handles no signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_event = asyncio.Event()

    def stop(self) -> None:
        self._stop_event.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # fills the default headers
        await self._stop_event.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for socket_server in self.servers:
            socket_server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_HTTP_GRACE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _build_uvicorn_config(app: ASGIApp, tls: TlsFiles | None, keep_alive_s: int) -> uvicorn.Config:
    options: dict[str, Any] = {}
    if tls is not None:
        context = build_server_context(tls)
        options["ssl_context_factory"] = lambda config, default: context
    return uvicorn.Config(
        app,
        loop="none",
        http=BoundedHttpProtocol,
        ws=DirectWebSocketProtocol,
        ws_per_message_deflate=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=_WEBSOCKET_PING_S,
        ws_ping_timeout=_WEBSOCKET_PING_S,
        timeout_keep_alive=keep_alive_s,
        access_log=False,
        date_header=False,
        server_header=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
        **options,
    )


def _make_port_error(name: str, host: str, port: int) -> PortInUseError:
    return PortInUseError(
        f"{name} {port} is in use on {host}; stop the other program or choose another {name}"
        " (0 uses a free port)"
    )


def protect_ports(ports: Iterable[int]) -> None:
    """Make processes that are forked from now on replace their copies of sockets on these ports."""
    _protected_ports.update(ports)


def unprotect_ports(ports: Iterable[int]) -> None:
    """Undo `protect_ports`."""
    _protected_ports.subtract(ports)


def _replace_sockets() -> None:
    """Replace every socket on a protected port by /dev/null, in the forked child.

    The sockets are not closed, because the objects that own them would later close descriptors
    that were reused.
    """
    ports = {port for port, count in _protected_ports.items() if count > 0}
    if not ports or not _DESCRIPTOR_FOLDER.is_dir():  # only Linux has this folder
        return
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor_name in os.listdir(_DESCRIPTOR_FOLDER):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if _find_port(int(descriptor_name)) in ports:
                os.dup2(null_fd, int(descriptor_name), inheritable=False)
    os.close(null_fd)
    _protected_ports.clear()


def _find_port(descriptor: int) -> int:
    """Return the local port of an internet socket, or 0 for other descriptors."""
    if not os.readlink(_DESCRIPTOR_FOLDER / str(descriptor)).startswith("socket:"):
        return 0
    open_socket = socket.socket(fileno=descriptor)
    try:
        is_internet = open_socket.family in (socket.AF_INET, socket.AF_INET6)
        return int(open_socket.getsockname()[1]) if is_internet else 0
    finally:
        open_socket.detach()


os.register_at_fork(after_in_child=_replace_sockets)
