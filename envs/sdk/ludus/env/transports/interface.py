"""The seam between the client and its wires.

    AsyncSession --> [ReplayingSession] --> WireSession --> gRPC stream, socket or HTTP

A transport opens sessions; a wire session is one of them. A call that timed out ends its
wire session for good: a late answer must never be taken for the next one. So does a broken
connection, unless the session survives it on the server.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import grpc

from ludus.env.backoff import doubling
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

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_LAST_REFUSAL_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How a client reaches a server."""

    address: ServerAddress
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0
    """For one call."""
    reconnect_timeout_s: float = 60.0
    """How long a call waits for a server that went away."""
    ca_file: str | None = None
    """The authority that a TLS server's certificate comes from; None trusts the system's."""
    cert_file: str | None = None
    """The certificate that is shown to a TLS server that asks for one."""
    key_file: str | None = None
    """Its private key."""
    server_name: str | None = None
    """The name in the certificate of a TLS server; None is the address's host."""
    keepalive_s: float = 10.0
    """A gRPC connection that is silent for so long is asked for a sign of life."""
    allow_ignored_seed: bool = False
    """Lets seeds be given to servers that ignore them."""
    max_calls_per_message: int = 0
    """Over gRPC; 0 sends all calls that gather in one message."""

    def __post_init__(self) -> None:
        if self.token and self.address.credentials:
            raise ConfigError(
                f"expected one way to authenticate at {self.address}, got a token and credentials"
                " in the address; leave one of them out"
            )
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError(
                f"expected cert_file and key_file for {self.address} together, got"
                f" {self.cert_file!r} and {self.key_file!r}; give both or none"
            )

    @property
    def authorization(self) -> str | None:
        """The value of the `authorization` header."""
        return f"Bearer {self.token}" if self.token else self.address.credentials

    @property
    def identity(self) -> TlsFiles | None:
        """What is shown to a TLS server that asks for certificates."""
        if not (self.cert_file and self.key_file):
            return None
        return TlsFiles(Path(self.cert_file), Path(self.key_file))

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS and WSS; None where the address speaks no TLS.

        Raises:
            ConfigError: a file is missing or unusable.
        """
        if not self.address.is_secure:
            return None
        return client_ssl_context(Path(self.ca_file) if self.ca_file else None, self.identity)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """The same for gRPC."""
        if not self.address.is_secure:
            return None
        ca_file = Path(self.ca_file) if self.ca_file else None
        return client_channel_credentials(ca_file, self.identity)


class WireSession(Protocol):
    """One session on a wire; every method raises EnvError with the wire's code."""

    @property
    def session_id(self) -> str:
        """Its id on the server."""

    @property
    def tools_session_id(self) -> str:
        """The id that calls its tools and does nothing else; empty where there is none."""

    def reset(self, args: ResetArgs) -> Awaitable[StepResult]:
        """The first result of a new episode."""

    def step(self, action: bytes | str, step_index: int) -> Awaitable[StepResult]:
        """The result of an action: bytes are JSON, a str is text."""

    def state(self) -> Awaitable[JsonObject]:
        """The environment's state."""

    def call_tool(self, name: str, arguments: JsonObject) -> Awaitable[JsonObject]:
        """What a tool of the environment returned."""

    def close(self) -> Awaitable[None]:
        """Free the session."""

    def abandon(self) -> None:
        """Let the server free the session, without waiting for it."""


OpenedWire = tuple[WireSession, StepResult | None]
"""A session, and its first result when a reset was asked for."""


class StepCall(NamedTuple):
    """One step of a `step_many`, or the start of the next episode in its place."""

    session: WireSession
    action: bytes | str | ResetArgs
    step_index: int


class Transport(Protocol):
    """A connection to a server, shared by any number of sessions."""

    async def connect(self, patience_s: float) -> None:
        """Wait for the server to answer.

        Raises:
            UnavailableError: it did not within `patience_s`.
        """

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""

    async def open(self, args: OpenArgs) -> OpenedWire:
        """A new session, with its first result when a reset was asked for."""

    async def open_group(self, args: OpenArgs, size: int) -> list[OpenedWire]:
        """Sessions on one seed, all or none, whose first results are the same."""

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order."""

    async def close(self) -> None:
        """End the connection and with it all its sessions."""


async def step_or_error(call: StepCall) -> StepResult | EnvError:
    """The outcome of one call of a `step_many`, made by itself."""
    try:
        if isinstance(call.action, ResetArgs):
            return await call.session.reset(call.action)
        return await call.session.step(call.action, call.step_index)
    except EnvError as error:
        return error


def check_group(firsts: Iterable[StepResult | None], seed: int | None) -> None:
    """Refuse a group whose sessions do not begin alike.

    Raises:
        GroupMismatchError: their first results differ.
    """
    views = [(first.observation, first.text) for first in firsts if first is not None]
    if any(view != views[0] for view in views[1:]):
        raise GroupMismatchError(
            f"expected {len(views)} sessions on seed {seed} to begin alike, got different first"
            " observations: the environment's reset does not depend on its seed alone; see:"
            " ludus env check"
        )


async def retry_until(attempt: Callable[[], Awaitable[ResultT]], patience_s: float) -> ResultT:
    """The value of the first attempt that reaches the server; the pauses double up to 1 s.

    Raises:
        UnavailableError: of the last attempt that fits into `patience_s`.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    pauses = doubling(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
    while True:
        pause_s = next(pauses)
        try:
            return await attempt()
        except UnavailableError:
            if loop.time() + pause_s >= deadline_s:
                raise
        await asyncio.sleep(pause_s)


async def retry_refused(attempt: Callable[[], Awaitable[ResultT]], patience_s: float) -> ResultT:
    """The value of the first attempt that a full server does not refuse.

    The pauses are those the server asks for, else doubling; jitter keeps callers that were
    refused together from coming back together.

    Raises:
        CapacityError: of the last attempt that fits into `patience_s`.
        RateLimitError: likewise.
        UnavailableError: likewise, where the server drains.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    pauses = doubling(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
    while True:
        try:
            return await attempt()
        except (CapacityError, RateLimitError, UnavailableError) as error:
            is_refusal = not isinstance(error, UnavailableError) or error.code == ErrorCode.DRAINING
            remaining_s = deadline_s - loop.time()
            if not is_refusal or remaining_s <= 0:
                raise
            wanted_s = min(error.retry_after_s or next(pauses), _LAST_REFUSAL_PAUSE_S)
        await asyncio.sleep(min(wanted_s * random.uniform(1.0, 1.25), remaining_s))
