"""The interface between the clients and the wires.

    AsyncSession --> [ReplayingSession] --> WireSession --> gRPC stream, WebSocket or HTTP

A transport opens sessions, and a wire session is one open session. A call that times out ends its
wire session, so that a late response is never taken for the response to the next call. A broken
connection also ends the wire session, unless the session outlives its connection on the server.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from ludus.env.backoff import retry
from ludus.env.encoding import ResetArgs
from ludus.env.security.tls import TlsFiles, client_channel_credentials, client_ssl_context
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.address import ServerAddress
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import (
    CapacityError,
    ConfigError,
    EnvError,
    ErrorCode,
    GroupMismatchError,
    RateLimitError,
    UnavailableError,
)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """Options for connecting to a server, the same over every wire."""

    token: str | None = field(default=None, repr=False)
    """Bearer token for servers that require one."""
    timeout_s: float = 60.0
    """Time limit of one call. A call that takes longer ends its session."""
    connect_timeout_s: float = 10.0
    """Time limit for the first response of the server."""
    reconnect_timeout_s: float = 60.0
    """Maximum wait for an unavailable server, by an open or by a call of a session that outlives a
    broken connection."""
    ca_file: str | None = None
    """PEM file of the authorities that may sign a TLS server's certificate. Default: the
    system's authorities."""
    cert_file: str | None = None
    """PEM file of the certificate for TLS servers that require one from the client."""
    key_file: str | None = None
    """PEM file of the private key of `cert_file`."""
    server_name: str | None = None
    """Name in the certificate of a TLS server. Default: the host of the address."""
    keepalive_s: float = 10.0
    """Time without traffic after which a gRPC connection is probed. The connection is closed if
    the probe gets no response within the same time."""
    allow_ignored_seed: bool = False
    """Allows seeds for OpenEnv 0.1 servers, which ignore them, so that their episodes cannot be
    repeated. By default such a seed is a ConfigError."""
    max_calls_per_message: int = 0
    """Maximum number of calls in one gRPC message. 0 sends all pending calls in one message."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError(
                "cert_file and key_file must be set together, got"
                f" {self.cert_file!r} and {self.key_file!r}; set both or neither"
            )


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server's address and the options for connecting to it."""

    address: ServerAddress
    options: ConnectOptions = field(default_factory=ConnectOptions)

    def __post_init__(self) -> None:
        if self.options.token and self.address.credentials:
            raise ConfigError(
                f"{self.address} must have one way to authenticate, got a token and credentials in"
                " the address; remove one of them"
            )

    @property
    def authorization(self) -> str | None:
        """The value of the `authorization` header."""
        token = self.options.token
        return f"Bearer {token}" if token else self.address.credentials

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for HTTPS and WSS, or None if the address uses no TLS.

        Raises:
            ConfigError: a file is missing or unusable.
        """
        return client_ssl_context(*self._tls_files()) if self.address.is_secure else None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the TLS credentials for gRPC, or None if the address uses no TLS.

        Raises:
            ConfigError: a file is missing or unusable.
        """
        return client_channel_credentials(*self._tls_files()) if self.address.is_secure else None

    def _tls_files(self) -> tuple[Path | None, TlsFiles | None]:
        options = self.options
        identity = None
        if options.cert_file and options.key_file:
            identity = TlsFiles(Path(options.cert_file), Path(options.key_file))
        return Path(options.ca_file) if options.ca_file else None, identity


class WireSession(Protocol):
    """One session on a wire. Every method raises EnvError with the code from the wire."""

    @property
    def session_id(self) -> str:
        """The session's id on the server."""

    @property
    def tools_session_id(self) -> str:
        """The id that can only call the session's tools; empty if the session has no such id."""

    def reset(self, args: ResetArgs) -> Awaitable[StepResult]:
        """Start a new episode and return its first result."""

    def step(self, action: bytes | str, step_index: int) -> Awaitable[StepResult]:
        """Return the result of an action. Bytes are JSON; a str is text."""

    def state(self) -> Awaitable[JsonObject]:
        """Return the environment's state."""

    def call_tool(self, name: str, arguments: JsonObject) -> Awaitable[JsonObject]:
        """Call a tool of the environment and return its result."""

    def close(self) -> Awaitable[None]:
        """Close the session."""

    def abandon(self) -> None:
        """Ask the server to close the session, without waiting for the response."""


OpenedWire = tuple[WireSession, StepResult | None]
"""A session, and its first result if a reset was requested."""


class Transport(Protocol):
    """A connection to a server, shared by any number of sessions."""

    server: RemoteServer
    """The server and the options of new connections and sessions."""

    async def connect(self, timeout_s: float) -> None:
        """Wait for the server to respond.

        Raises:
            UnavailableError: the server did not respond within `timeout_s`.
        """

    async def describe(self) -> EnvironmentDescription:
        """Return the server's description of its environment."""

    async def open(self, args: OpenArgs) -> OpenedWire:
        """Open a session, and return it with its first result if a reset was requested."""

    async def open_group(self, args: OpenArgs, size: int) -> list[OpenedWire]:
        """Open `size` sessions with one seed and equal first results, or none of them."""

    async def close(self) -> None:
        """Close the connection and all its sessions."""


def check_group(first_results: Iterable[StepResult | None], seed: int | None) -> None:
    """Check that the sessions of a group start with the same observation.

    Raises:
        GroupMismatchError: their first results differ.
    """
    views = [(result.observation, result.text) for result in first_results if result is not None]
    if any(view != views[0] for view in views[1:]):
        raise GroupMismatchError(
            f"{len(views)} sessions with seed {seed} returned different first observations; the"
            " environment's reset must depend on its seed alone; see: ludus env check"
        )


async def retry_unavailable(attempt: Callable[[], Awaitable[ResultT]], timeout_s: float) -> ResultT:
    """Return the value of the first attempt that reaches the server.

    Raises:
        UnavailableError: the attempts failed for `timeout_s`.
    """
    return await retry(attempt, lambda error: isinstance(error, UnavailableError), timeout_s)


async def retry_refused(attempt: Callable[[], Awaitable[ResultT]], timeout_s: float) -> ResultT:
    """Return the value of the first attempt that a full server does not refuse.

    Raises:
        CapacityError: the attempts were refused for `timeout_s`.
        RateLimitError: the attempts were refused for `timeout_s`.
        UnavailableError: the server is unavailable, or it drained for `timeout_s`.
    """
    return await retry(attempt, _is_refusal, timeout_s)


def _is_refusal(error: EnvError) -> bool:
    if isinstance(error, UnavailableError):
        return error.code == ErrorCode.DRAINING
    return isinstance(error, (CapacityError, RateLimitError))
