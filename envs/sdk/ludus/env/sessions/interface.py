"""The interface that every wire calls: the sessions of a server or gateway.

    HTTP, WebSocket, MCP, gRPC --> Sessions --> environments in this process, in worker
                                                processes, or on the servers of a fleet

`SessionCore` implements it for the sessions of this server (see `sessions/hosts.py`). The sessions
of a gateway run on other servers. Wires call both in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ludus.env.encoding import EncodedResult, EncodedToolResult, ResetArgs
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError

STEP_BUCKETS_S = (
    *(0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of step durations."""


@dataclass(slots=True, eq=False)
class Connection:
    """A client's connection over any wire, with the sessions that end with it."""

    session_ids: set[str] = field(default_factory=set)
    end_event: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class SessionEvents:
    """Callbacks for events of sessions, which wires add to the lists."""

    on_end: list[Callable[[str, SessionTombstone], None]] = field(default_factory=list)
    """Called with the id and the reason after a session has ended."""
    on_shortage: list[Callable[[int], Awaitable[None]]] = field(default_factory=list)
    """Called with the number of missing slots; may close sessions that are not needed."""

    def notify_end(self, session_id: str, tombstone: SessionTombstone) -> None:
        """Report that a session has ended."""
        for callback in self.on_end:
            callback(session_id, tombstone)

    async def make_room(self, num_missing: int) -> None:
        """Close sessions that are not needed if slots are missing for new sessions."""
        if num_missing > 0:
            for callback in self.on_shortage:
                await callback(num_missing)


class SessionRecorder:
    """A recorder of the result or error of each call; this base class records nothing."""

    needs_seeds = False
    """True if each reset must have a seed. A reset without a seed then gets a default seed."""

    def record_reset(
        self, session_id: str, args: ResetArgs, outcome: EncodedResult | EnvError
    ) -> None:
        """Record a reset."""

    def record_step(
        self, session_id: str, action: bytes | str, outcome: EncodedResult | EnvError
    ) -> None:
        """Record a step."""

    def record_tool_call(
        self,
        session_id: str,
        name: str,
        arguments: JsonObject,
        outcome: EncodedToolResult | EnvError,
    ) -> None:
        """Record the call of a tool."""

    def record_end(self, session_id: str, tombstone: SessionTombstone) -> None:
        """Record the end of a session."""


@dataclass(frozen=True, slots=True)
class OpenArgs:
    """Arguments of an open."""

    reset: ResetArgs | None = None
    """Arguments of the first reset; None opens without a reset."""
    close_when_done: bool = False
    """Close the session as soon as an episode has ended."""
    linger_s: float = 0.0
    """Time that the session survives the end of its last connection."""
    with_text: bool = True
    """False omits the text view from results, which saves the time to render it."""
    session_id: str = ""
    """Session id signed by a gateway; "" lets the server choose."""

    def __post_init__(self) -> None:
        if not 0 <= self.linger_s < math.inf:
            raise InvalidCallError(
                f"linger_s must be a finite number of seconds from 0, got {self.linger_s}"
            )


@dataclass(frozen=True, slots=True)
class OpenResult:
    """The result of an open: a new session."""

    session_id: str
    first_result: EncodedResult | None
    """Result of the first reset, if a reset was requested."""
    tools_session_id: str = ""
    """Id that may only call the session's tools; "" without tools."""

    @property
    def view(self) -> tuple[bytes, bytes]:
        """First observation and text, for comparison within a group."""
        assert self.first_result is not None, "a group is opened with a reset"
        text_view = self.first_result.text
        return (
            self.first_result.observation_json,
            text_view.messages_json if text_view is not None else b"",
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a server."""

    num_sessions: int
    max_sessions: int
    num_waiting: int = 0
    """Number of opens that wait for a free session."""
    is_draining: bool = False
    """True if the server opens no new sessions and stops after the last session."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Counts of a host's worker processes."""

    num_workers: int
    """Number of workers that are alive."""
    num_ended_workers: int
    """Number of workers that died or were killed since the host started."""
    layers: Mapping[Layer, bool] = field(default_factory=dict)
    """Layers of the sandbox, and whether each is active."""


@dataclass(slots=True, eq=False)
class SessionCounts:
    """Counts since the process started, for metrics (`http/health.py`)."""

    num_opens: int = 0
    num_resets: int = 0
    total_step_s: float = 0.0
    num_steps_by_bucket: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    """Steps by `STEP_BUCKETS_S`; the last bucket is for steps above all bounds."""
    num_errors_by_code: dict[ErrorCode, int] = field(
        default_factory=lambda: dict.fromkeys(ErrorCode, 0)
    )
    num_ends_by_kind: dict[SessionEnd, int] = field(
        default_factory=lambda: dict.fromkeys(SessionEnd, 0)
    )

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        return sum(self.num_steps_by_bucket)

    def count_step(self, duration_s: float) -> None:
        """Count a step."""
        self.total_step_s += duration_s
        self.num_steps_by_bucket[bisect_left(STEP_BUCKETS_S, duration_s)] += 1

    @contextlib.contextmanager
    def count_errors(self) -> Iterator[None]:
        """Count the error that the block raises, if any."""
        try:
            yield
        except EnvError as error:
            self.num_errors_by_code[error.code] += 1
            raise


class ImmediateCalls(Protocol):
    """Calls that return without waiting, for environments that step on this event loop."""

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """Reset a session; see `Sessions.reset`."""

    def step_now(
        self, session_id: str, action: bytes | str, step_index: int = 0, attempt_id: int = 0
    ) -> EncodedResult:
        """Take a step; see `Sessions.step`."""


class Sessions(Protocol):
    """All sessions of a process; its methods belong to one event loop.

    Every method raises EnvError with the error's wire code.
    """

    @property
    def description(self) -> EnvironmentDescription:
        """Description of the environment."""

    @property
    def load(self) -> Load:
        """Load, including sessions that are being opened."""

    @property
    def events(self) -> SessionEvents:
        """Callbacks for events of sessions."""

    @property
    def counts(self) -> SessionCounts | None:
        """Counts since the start; None for a gateway, whose servers count."""

    @property
    def worker_counts(self) -> WorkerCounts | None:
        """Counts of worker processes; None without workers."""

    @property
    def unavailable_reason(self) -> str:
        """Reason why no session can be served now; "" if sessions can be served."""

    @property
    def immediate_calls(self) -> ImmediateCalls | None:
        """Calls that return without waiting; None if calls have to wait."""

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> OpenResult:
        """Open a session, waiting for a free session as long as the server's options allow.

        Raises:
            CapacityError: no session became free.
        """

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[OpenResult]:
        """Open several sessions with the same seed; all are opened or none.

        Args:
            session_ids: ids signed by a gateway, one per session; empty lets the server choose.

        Raises:
            CapacityError: too few sessions became free together.
            GroupMismatchError: the first observations differ; all sessions are closed again.
        """

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """Start a new episode and return its first result."""

    async def step(
        self,
        session_id: str,
        action: bytes | str,
        step_index: int = 0,
        timeout_s: float = 0.0,
        attempt_id: int = 0,
    ) -> EncodedResult:
        """Take a step: bytes are an action as JSON, a str is a language model's text.

        Args:
            step_index: number of the step in its episode, from 1. A repeated number returns
                the first result again. 0 means not numbered.
            timeout_s: time limit, if shorter than the server's; 0 keeps the server's limit.
            attempt_id: id of this attempt of a numbered step. If the attempt failed, a call with
                the same id raises the first error again, and the environment takes no step.
                0 means without an id.
        """

    async def state(self, session_id: str) -> bytes:
        """Return the environment's state as JSON."""

    async def call_tool(
        self, session_id: str, name: str, arguments: JsonObject
    ) -> EncodedToolResult:
        """Call a tool of the environment and return its result. It may end the episode."""

    async def close(self, session_id: str) -> bool:
        """Close a session. Return False if there is no such session and none is remembered.

        A session that has ended is not an error.
        """

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """Detach a session from a connection. Without connections it closes after `linger_s`.

        A call within this time keeps the session open. So do other connections, because the end of
        an old connection may be noticed after the session was called on a new one.
        """

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Attach lingering sessions to another connection that calls them.

        A session lingers after its last connection has ended. Sessions that do not linger are
        skipped: they end with the connection that opened them.
        """

    def release(self, connection: Connection) -> None:
        """End or detach the sessions of an ended connection, including those being opened."""

    def drain(self) -> None:
        """Open no new sessions from now on; open sessions continue."""
