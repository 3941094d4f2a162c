"""What every wire stands on: the sessions of a server or a gateway, and the calls to them.

    HTTP, WebSocket, MCP, gRPC --> Sessions --> environments in this process, in worker
                                                processes, or on the servers of a fleet

`SessionCore` answers for sessions that this server holds (`sessions/hosts.py` says where they run);
a gateway's sessions live on other servers. The wires cannot tell them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.sessions.metrics import SessionCounts, WorkerCounts
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.types import EnvironmentDescription, JsonObject


@dataclass(slots=True, eq=False)
class Connection:
    """A client's connection over any wire: the sessions that go with it."""

    session_ids: set[str] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class SessionEvents:
    """Whom a process tells of its sessions; wires add themselves to the lists."""

    on_end: list[Callable[[str, SessionTombstone], None]] = field(default_factory=list)
    """Called with the id and why, when a session has ended, whoever ended it."""
    on_shortage: list[Callable[[int], Awaitable[None]]] = field(default_factory=list)
    """Called with how many sessions too many are wanted; may end some that can be spared."""

    def ended(self, session_id: str, why: SessionTombstone) -> None:
        """Tell that a session has ended."""
        for tell in self.on_end:
            tell(session_id, why)

    async def make_room(self, num_missing: int) -> None:
        """End as many sessions that can be spared as new ones find no room."""
        if num_missing > 0:
            for spare in self.on_shortage:
                await spare(num_missing)


@dataclass(frozen=True, slots=True)
class OpenArgs:
    """What an open may ask for."""

    reset: ResetArgs | None = None
    """Starts the first episode at once."""
    close_when_done: bool = False
    """Frees the session as soon as an episode of it has ended."""
    linger_s: float = 0.0
    """How long the session outlives the connection that opened it."""
    with_text: bool = True
    """False leaves the text view out of results, which saves rendering it."""
    session_id: str = ""
    """An id signed by a gateway; empty lets the server choose."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A new session."""

    session_id: str
    first: EncodedResult | None
    """Its first answer, when a reset was asked for."""
    tools_session_id: str = ""
    """Calls the session's tools and does nothing else; empty where it has none."""

    @property
    def view(self) -> tuple[bytes, bytes]:
        """What a player sees first, for comparison within a group."""
        assert self.first is not None, "a group is opened with a reset"
        text = self.first.text
        return self.first.observation_json, text.messages_json if text is not None else b""


@dataclass(frozen=True, slots=True)
class Load:
    """How full a server is."""

    num_sessions: int
    max_sessions: int
    num_waiting: int = 0
    """Opens that wait for a free session."""
    is_draining: bool = False
    """It takes no new sessions and ends when the last one has."""


class ImmediateCalls(Protocol):
    """Calls whose answer needs no wait: to environments that step on this event loop."""

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """What `Sessions.reset` answers."""

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """What `Sessions.step` answers."""


class Sessions(Protocol):
    """All sessions that a process answers for; its methods belong to one event loop.

    Every method raises EnvError with the wire code of what went wrong.
    """

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is."""

    @property
    def load(self) -> Load:
        """How full it is."""

    @property
    def events(self) -> SessionEvents:
        """Whom it tells of its sessions."""

    @property
    def counts(self) -> SessionCounts | None:
        """What has happened; None where others count, as the servers of a gateway."""

    @property
    def workers(self) -> WorkerCounts | None:
        """Its worker processes; None where it has none."""

    @property
    def trouble(self) -> str:
        """Why it can serve no session now; empty where it can."""

    @property
    def immediate(self) -> ImmediateCalls | None:
        """The short way for steps and resets; None where answers have to be waited for."""

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> Opened:
        """A new session; it waits for a free one as long as the server is told to.

        Raises:
            CapacityError: none became free.
        """

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[Opened]:
        """Sessions on one seed, all or none, whose first answers are the same.

        Args:
            session_ids: ids signed by a gateway, one for each; none lets the server choose.

        Raises:
            CapacityError: so many did not become free together.
            GroupMismatchError: they begin differently; all are closed again.
        """

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action: bytes are JSON, a str is a language model's text.

        Args:
            step_index: the step's number in its episode, from 1; a repeated number gets
                the first answer again. 0 means not numbered.
            timeout_s: shortens the server's own limit; 0 leaves it.
        """

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool of the environment returned, as JSON."""

    async def close(self, session_id: str) -> None:
        """End a session; one that is gone already is no error."""

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """End a session after its `linger_s` unless it is called again before.

        Where it goes with other connections than the one that says so, it stays with those:
        the end of an old connection may be heard of after the session was called on a new one.
        """

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Let those among these sessions that linger go with the connection that calls them, too.

        They linger when the last of their connections has ended; all other sessions end with
        the connection that opened them.
        """

    def release(self, connection: Connection) -> None:
        """End or detach what goes with a connection that ended, also what is being built."""

    def drain(self) -> None:
        """Take no new sessions from now on; those that are open continue."""
