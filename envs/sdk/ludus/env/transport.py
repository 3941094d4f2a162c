"""The seam between the client and its wires.

A transport opens sessions; a wire session is one of them. Timeouts and a broken
connection end a wire session for good: a late answer must never be taken for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ludus.env.encoding import ResetArgs
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import EnvError, UnavailableError

ResultT = TypeVar("ResultT")

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How a client reaches a server."""

    address: str
    token: str | None = None
    timeout_s: float = 60.0
    """For one call."""
    reconnect_timeout_s: float = 60.0
    """How long `open` waits for a server that went away."""

    @property
    def authorization(self) -> str | None:
        """The value of the `authorization` header."""
        return f"Bearer {self.token}" if self.token else None


class WireSession(Protocol):
    """One session on a wire; every method raises EnvError with the wire's code."""

    session_id: str

    def reset(self, args: ResetArgs) -> Awaitable[StepResult]:
        """The first result of a new episode."""
        ...

    def step(self, action: bytes | str, step_index: int) -> Awaitable[StepResult]:
        """The result of an action: bytes are JSON, a str is text."""
        ...

    def state(self) -> Awaitable[JsonObject]:
        """The environment's state."""
        ...

    def close(self) -> Awaitable[None]:
        """Returns when the server has freed the session."""
        ...

    def abandon(self) -> None:
        """Lets the server free the session, without waiting for it."""
        ...


@dataclass(frozen=True, slots=True)
class StepCall:
    """One step of a `step_many`."""

    session: WireSession
    action: bytes | str
    step_index: int


class Transport(Protocol):
    """A connection to a server, shared by any number of sessions."""

    async def connect(self, patience_s: float) -> None:
        """Returns when the server answers.

        Raises:
            UnavailableError: it did not within `patience_s`.
        """
        ...

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        ...

    async def open(
        self, reset: ResetArgs | None, close_when_done: bool
    ) -> tuple[WireSession, StepResult | None]:
        """A new session, with its first result when a reset was asked for."""
        ...

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order."""
        ...

    async def close(self) -> None:
        """Ends the connection and with it all its sessions."""
        ...


async def retry_until(attempt: Callable[[], Awaitable[ResultT]], patience_s: float) -> ResultT:
    """The value of the first attempt that reaches the server; the pauses double up to 1 s.

    Raises:
        UnavailableError: of the last attempt that fits into `patience_s`.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    backoff_s = _FIRST_BACKOFF_S
    while True:
        try:
            return await attempt()
        except UnavailableError:
            if loop.time() + backoff_s >= deadline_s:
                raise
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
