"""The sessions that one server holds: who is admitted, and when a session ends.

    wire --Sessions--> SessionCore --HostedSession--> environment (sessions/hosts.py)

Who waits for whom: an open waits for a free session at most `wait_for_slot_s`, in order of
arrival; calls of one session run one after another, and only a session's own earlier call
keeps a call waiting. A session leaves by `close`, by the end of its episode
(`close_when_done`), with the connection that opened it (where it lingers, `linger_s` after the
last one that called it), after `idle_timeout_s` without a call, when a step takes longer than
`step_timeout_s`, or with the worker it ran in. Its last answer stays available for repeats.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from ludus.env.encoding import DefaultSeeds, EncodedResult, ResetArgs
from ludus.env.security.session_ids import SessionIdIssuer, hide_driving_id, tools_only_error
from ludus.env.sessions.admission_queue import SessionSlots
from ludus.env.sessions.hosts import HostedSession, OpenSession, SessionHost
from ludus.env.sessions.interface import (
    Connection,
    ImmediateCalls,
    Load,
    OpenArgs,
    Opened,
    SessionEvents,
)
from ludus.env.sessions.metrics import SessionCounts, WorkerCounts
from ludus.env.sessions.options import CoreOptions
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone, Tombstones
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import (
    CallTimeoutError,
    EnvError,
    GroupMismatchError,
    InvalidCallError,
    SessionLostError,
)

ResultT = TypeVar("ResultT")

_MAX_SWEEP_PAUSE_S = 1.0
_CLOSED = SessionTombstone(SessionEnd.CLOSED, "it was closed")
_CONNECTION_ENDED = SessionTombstone(
    SessionEnd.CONNECTION_ENDED, "the connection that opened it ended"
)
_EPISODE_ENDED = SessionTombstone(
    SessionEnd.EPISODE_ENDED, "its episode ended and it was opened with close_when_done"
)
_SHUTDOWN = SessionTombstone(SessionEnd.SHUTDOWN, "the server is shutting down")


class SessionCore:
    """Sessions by id, at most `max_sessions` of them; implements `Sessions`."""

    def __init__(self, host: SessionHost, options: CoreOptions | None = None) -> None:
        self.options = options or CoreOptions()
        self.events = SessionEvents()
        self.counts = SessionCounts()
        self._host = host
        self._entries: dict[str, OpenSession] = {}
        self._of_tools_id: dict[str, str] = {}
        self._lingering: set[str] = set()
        """Sessions that outlive a connection: they also go with others that call them."""
        self._slots = SessionSlots(self.options, self.events)
        self._tombstones = Tombstones()
        self._ids = SessionIdIssuer(self.options.server_id, self.options.key)
        self._seeds = DefaultSeeds(self.options.first_seed)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._description = dataclasses.replace(
            host.description,
            max_sessions=self.options.max_sessions,
            is_deterministic=self.options.is_deterministic,
            server_id=self.options.server_id,
            idle_timeout_s=self.options.idle_timeout_s,
        )

    @property
    def immediate(self) -> ImmediateCalls | None:
        """This core, where environments step on the event loop; see `Sessions`."""
        return self if self._host.runs_inline else None

    @property
    def workers(self) -> WorkerCounts | None:
        """Its worker processes; None where sessions run in this one."""
        return self._host.workers

    @property
    def trouble(self) -> str:
        """Why it can serve no session now; empty where it can."""
        return self._host.trouble

    @property
    def is_stuck(self) -> bool:
        """True when only another server process could serve again."""
        return self._host.is_stuck

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is."""
        return self._description

    @property
    def load(self) -> Load:
        """How full it is, sessions that are being built included."""
        return self._slots.load

    # -- calls -------------------------------------------------------------------------

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> Opened:
        """A new session; see `Sessions`."""
        with self.counts.errors():
            session_id = self._ids.choose(args.session_id)
            await self._slots.take(1)
            opened = await self._finish(self._open_reserved(session_id, args, connection))
        self.counts.num_opened += 1
        self.counts.num_resets += args.reset is not None
        return opened

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[Opened]:
        """Sessions on one seed, all or none; see `Sessions`."""
        with self.counts.errors():
            if size < 1:
                raise InvalidCallError(f"expected a group of at least 1 session, got {size}")
            chosen = [self._ids.choose(one) for one in session_ids or [""] * size]
            args = dataclasses.replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
            await self._slots.take(size)
            outcomes = await self._finish(self._open_all(chosen, args, connection))
            opened = await self._all_alike(outcomes, args)
        self.counts.num_opened += len(opened)
        self.counts.num_resets += len(opened)
        return opened

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        if self._host.runs_inline:
            return self.reset_now(session_id, args)
        with self.counts.errors():
            entry = self._find(session_id)
            call = partial(entry.hosted.reset, self._seeded(args))
            result = await self._timed(entry, call, "reset")
        self.counts.num_resets += 1
        return result

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action; see `Sessions`."""
        if self._host.runs_inline:
            return self.step_now(session_id, action, step_index)
        begun_s = time.monotonic()
        with self.counts.errors():
            try:
                entry = self._find(session_id)
                call = partial(entry.hosted.step, action, step_index)
                result = await self._timed(entry, call, "step", timeout_s)
            except SessionLostError:  # maybe an earlier call, waited for, ended the session
                result = self._tombstones.recall(session_id, step_index)
        self.counts.stepped(time.monotonic() - begun_s)
        return result

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The same without a wait, for environments that step on the event loop."""
        try:
            session = self._find(session_id).session
            assert session is not None, "reset_now is for inline sessions"
            result = session.reset(self._seeded(args))
        except EnvError as error:
            self.counts.num_errors[error.code] += 1
            raise
        self.counts.num_resets += 1
        return result

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """The same without a wait, for environments that step on the event loop."""
        begun_s = time.monotonic()
        try:
            entry = self._entries.get(session_id)
            if entry is None:
                self._refuse_tools_id(session_id)
                result = self._tombstones.recall(session_id, step_index)
            else:
                entry.last_used_s, entry.detached_s = begun_s, None
                assert entry.session is not None, "step_now is for inline sessions"
                result = entry.session.step(action, step_index)
                if entry.close_when_done and (result.terminated or result.truncated):
                    self._end(entry, _EPISODE_ENDED)
        except EnvError as error:
            self.counts.num_errors[error.code] += 1
            raise
        self.counts.stepped(time.monotonic() - begun_s)
        return result

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        with self.counts.errors():
            entry = self._find(session_id)
            return await self._timed(entry, entry.hosted.state_json, "state")

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool of the environment returned, as JSON."""
        driving_id = self._of_tools_id.get(session_id, session_id)
        with self.counts.errors(), hide_driving_id(driving_id, session_id):
            entry = self._find(driving_id)
            call = partial(entry.hosted.call_tool, name, arguments)
            return await self._timed(entry, call, "call_tool")

    async def close(self, session_id: str) -> None:
        """End a session; one that is gone already is no error."""
        self._refuse_tools_id(session_id)
        if entry := self._entries.get(session_id):
            self._end(entry, _CLOSED)

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """Take a session from a connection; see `Sessions`."""
        self._refuse_tools_id(session_id)
        if entry := self._entries.get(session_id):
            self._detach(entry, connection)

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Let those among these sessions that linger go with a connection; see `Sessions`."""
        has_all = len(connection.session_ids) == len(self._entries)
        if has_all or not self._lingering or connection.ended.is_set():
            return
        for session_id in self._lingering.intersection(session_ids) - connection.session_ids:
            entry = self._entries[session_id]
            entry.connections.add(connection)
            entry.detached_s = None
            connection.session_ids.add(session_id)

    def release(self, connection: Connection) -> None:
        """End or detach what goes with a connection that ended, also what is being built."""
        connection.ended.set()
        for session_id in list(connection.session_ids):
            self._detach(self._entries[session_id], connection)

    def drain(self) -> None:
        """Take no new sessions from now on; those that are open continue."""
        self._slots.drain()

    # -- the server's side -------------------------------------------------------------

    def ended(self, session_id: str) -> SessionTombstone | None:
        """Why a session that was here has ended; None while it lives or where unknown."""
        return self._tombstones.ended(session_id)

    async def close_idle_forever(self) -> None:
        """End sessions that nobody calls any more, until cancelled."""
        idle_s = self.options.idle_timeout_s
        pause_s = min(max(idle_s / 4, 0.02), _MAX_SWEEP_PAUSE_S)
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            for entry in list(self._entries.values()):
                if entry.lock.locked():
                    continue
                detached_s = entry.detached_s
                if entry.last_used_s < now_s - idle_s:
                    self._end(
                        entry, SessionTombstone(SessionEnd.IDLE, f"it was idle for {idle_s:g} s")
                    )
                elif detached_s is not None and detached_s < now_s - entry.linger_s:
                    reason = f"{_CONNECTION_ENDED.reason} {entry.linger_s:g} s ago"
                    self._end(entry, SessionTombstone(SessionEnd.CONNECTION_ENDED, reason))

    async def shut_down(self, grace_s: float = 1.0) -> None:
        """End all sessions; steps that still run after the grace are abandoned."""
        self.drain()
        for entry in list(self._entries.values()):
            self._end(entry, _SHUTDOWN)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await self._host.shut_down()

    # -- opening ---------------------------------------------------------------------

    async def _open_all(
        self, session_ids: list[str], args: OpenArgs, connection: Connection | None
    ) -> list[Opened | BaseException]:
        return await asyncio.gather(
            *(self._open_reserved(one, args, connection) for one in session_ids),
            return_exceptions=True,
        )

    async def _all_alike(
        self, outcomes: list[Opened | BaseException], args: OpenArgs
    ) -> list[Opened]:
        """The sessions, if all were opened and begin alike; else all are closed again."""
        failed = next((one for one in outcomes if isinstance(one, BaseException)), None)
        opened = [one for one in outcomes if isinstance(one, Opened)]
        if failed is None and len({one.view for one in opened}) == 1:
            return opened
        for one in opened:
            await self.close(one.session_id)
        if failed is not None:
            raise failed
        seed = args.reset.seed if args.reset else None
        raise GroupMismatchError(
            f"expected {len(opened)} sessions on seed {seed} to begin alike, got different"
            f" first observations; see: ludus env check {self._description.name}"
        )

    async def _open_reserved(
        self, session_id: str, args: OpenArgs, connection: Connection | None
    ) -> Opened:
        try:
            hosted = await self._host.open(
                session_id, with_text=args.with_text, on_lost=partial(self._on_lost, session_id)
            )
            first = None
            if args.reset is not None:
                first = await self._first_of(hosted, self._seeded(args.reset))
            if session_id in self._tombstones:  # its worker died before it was entered
                raise self._tombstones.lost(session_id)
            entry = self._enter(session_id, hosted, args, connection)
        except BaseException:
            self._slots.give_back()
            raise
        return Opened(session_id, first, entry.tools_id)

    async def _first_of(self, hosted: HostedSession, reset: ResetArgs) -> EncodedResult:
        timeout_s = self.options.step_timeout_s
        try:
            if hosted.direct is not None:
                return hosted.direct.reset(reset)
            return await self._within(hosted, hosted.reset(reset), timeout_s or None)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                hosted.kill(f"a reset took longer than {timeout_s:g} s")
                raise CallTimeoutError(
                    f"expected the first reset within {timeout_s:g} s, got no answer"
                ) from None
            self._start(hosted.close())
            raise

    def _enter(
        self, session_id: str, hosted: HostedSession, args: OpenArgs, connection: Connection | None
    ) -> OpenSession:
        entry = OpenSession(
            id=session_id,
            hosted=hosted,
            session=hosted.direct,
            close_when_done=args.close_when_done,
            linger_s=args.linger_s,
            last_used_s=time.monotonic(),
        )
        self._entries[session_id] = entry
        if self._description.tools:
            entry.tools_id = secrets.token_urlsafe(18)
            self._of_tools_id[entry.tools_id] = session_id
        if args.linger_s > 0:
            self._lingering.add(session_id)
        if connection is not None:
            entry.connections.add(connection)
            connection.session_ids.add(session_id)
            if connection.ended.is_set():
                self._detach(entry, connection)
        return entry

    def _seeded(self, args: ResetArgs) -> ResetArgs:
        return args if self.options.first_seed is None else self._seeds.fill(args)

    # -- sessions ----------------------------------------------------------------------

    def _find(self, session_id: str) -> OpenSession:
        entry = self._entries.get(session_id)
        if entry is None:
            self._refuse_tools_id(session_id)
            raise self._tombstones.lost(session_id)
        entry.last_used_s, entry.detached_s = time.monotonic(), None
        return entry

    def _refuse_tools_id(self, session_id: str) -> None:
        if session_id in self._of_tools_id:
            raise tools_only_error()

    def _detach(self, entry: OpenSession, connection: Connection | None) -> None:
        if connection is not None:
            entry.connections.discard(connection)
            connection.session_ids.discard(entry.id)
        if entry.connections:
            return
        if entry.linger_s > 0:
            entry.detached_s = time.monotonic()
        else:
            self._end(entry, _CONNECTION_ENDED)

    def _on_lost(self, session_id: str, reason: str) -> None:
        lost = SessionTombstone(SessionEnd.LOST, reason)
        if entry := self._entries.get(session_id):
            self._remove(entry, lost)
        else:
            self._tombstones.remember(session_id, lost, None)

    def _end(self, entry: OpenSession, why: SessionTombstone) -> None:
        if not self._remove(entry, why):
            return
        if entry.session is not None:
            entry.session.close()
        else:
            self._start(self._close_in_order(entry))

    def _remove(self, entry: OpenSession, why: SessionTombstone) -> bool:
        if self._entries.pop(entry.id, None) is None:
            return False
        self._lingering.discard(entry.id)
        self._of_tools_id.pop(entry.tools_id, None)
        for connection in entry.connections:
            connection.session_ids.discard(entry.id)
        self._tombstones.remember(entry.id, why, entry.hosted.last)
        self.counts.num_ends[why.kind] += 1
        self.events.ended(entry.id, why)
        self._slots.give_back()
        return True

    async def _timed(
        self,
        entry: OpenSession,
        call: Callable[[], Awaitable[ResultT]],
        what: str,
        timeout_s: float = 0.0,
    ) -> ResultT:
        """The call's value, after the session's earlier calls; too slow ends the session."""
        limit_s = min((s for s in (timeout_s, self.options.step_timeout_s) if s > 0), default=None)
        try:
            if self._host.runs_inline:
                return await self._locked(entry, call)
            return await self._within(entry.hosted, self._locked(entry, call), limit_s)
        except TimeoutError:
            reason = f"a {what} took longer than {limit_s:g} s"
            if self._remove(entry, SessionTombstone(SessionEnd.TIMEOUT, reason)):
                entry.hosted.kill(reason)
                self._start(self._close_in_order(entry))
            raise CallTimeoutError(f"session {entry.id!r} is gone: {reason}") from None

    async def _within(
        self, hosted: HostedSession, work: Coroutine[Any, Any, ResultT], limit_s: float | None
    ) -> ResultT:
        """The work's value; it runs to its end even when the caller gives up, as in `_finish`.

        Raises:
            TimeoutError: it has run for longer than the limit. The time in which others kept
                every thread does not count.
        """
        task, left_s = self._start(work), limit_s
        try:
            while not (await asyncio.wait({task}, timeout=left_s))[0]:
                left_s = hosted.left_s(limit_s or 0.0)
                if left_s <= 0:
                    raise TimeoutError
        except BaseException:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        return task.result()

    async def _locked(self, entry: OpenSession, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        async with entry.lock:
            if entry.id not in self._entries:
                raise self._tombstones.lost(entry.id)
            result = await call()
            entry.last_used_s = time.monotonic()
        if entry.close_when_done and isinstance(result, EncodedResult) and result.done:
            self._end(entry, _EPISODE_ENDED)
        return result

    async def _close_in_order(self, entry: OpenSession) -> None:
        async with entry.lock:
            await entry.hosted.close()

    async def _finish(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The work's value; it runs to its end even when the caller gives up.

        A thread cannot be stopped, and its session must not be entered by a second one.
        """
        if self._host.runs_inline:
            return await work
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
