"""The sessions of one server: admission, calls, and the end of each session.

    wire --Sessions--> SessionCore --HostedSession--> environment (sessions/hosts.py)

An open waits for a free session for at most `wait_for_slot_s`, in order of arrival. The calls of a
session run one after another; a call waits only for earlier calls of the same session.
A session ends by `close`, at the end of its episode (`close_when_done`), `linger_s` after the end
of its last connection, after `idle_timeout_s` without a call, if a step takes longer than
`step_timeout_s`, or with its worker. Its last result stays available for repeated calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from ludus.env.encoding import DefaultSeeds, EncodedResult, EncodedToolResult, ResetArgs
from ludus.env.security.session_ids import SessionIdIssuer, hide_full_id, make_tools_only_error
from ludus.env.sessions.admission_queue import SessionSlots
from ludus.env.sessions.hosts import HostedSession, OpenSession, SessionHost
from ludus.env.sessions.interface import (
    Connection,
    ImmediateCalls,
    Load,
    OpenArgs,
    OpenResult,
    SessionCounts,
    SessionEvents,
    SessionRecorder,
    WorkerCounts,
)
from ludus.env.sessions.options import ServerOptions
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone, Tombstones
from ludus.env.types import JsonObject
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
    """Sessions by id; implements `Sessions`, which documents its methods."""

    def __init__(self, host: SessionHost, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.events = SessionEvents()
        self.counts = SessionCounts()
        self.host = host
        self.open_sessions: dict[str, OpenSession] = {}
        self._session_ids: dict[str, str] = {}
        """Session id by tools id."""
        self._lingering_ids: set[str] = set()
        """Ids of sessions that outlive a connection. Every connection keeps those that it calls."""
        self._slots = SessionSlots(self.options, self.events)
        self.tombstones = Tombstones()
        self._issuer = SessionIdIssuer(self.options.server_id, self.options.make_key())
        self._seeds = DefaultSeeds(self.options.first_seed)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recorder = SessionRecorder()
        self.immediate_calls: ImmediateCalls | None = self if host.runs_inline else None
        self.description = dataclasses.replace(
            host.description,
            max_sessions=self.options.max_sessions,
            is_deterministic=self.options.deterministic or host.description.is_deterministic,
            server_id=self.options.server_id,
            idle_timeout_s=self.options.idle_timeout_s,
        )

    @property
    def worker_counts(self) -> WorkerCounts | None:
        return self.host.worker_counts

    @property
    def unavailable_reason(self) -> str:
        return self.host.unavailable_reason

    @property
    def load(self) -> Load:
        return self._slots.load

    def record(self, recorder: SessionRecorder) -> None:
        """Report all episodes from now on to a recorder."""
        self._recorder = recorder
        self.events.on_end.append(recorder.record_end)

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> OpenResult:
        with self.counts.count_errors():
            session_id = self._issuer.choose(args.session_id)
            await self._slots.take(1)
            open_result = await self._shield(self._open_reserved(session_id, args, connection))
        self.counts.num_opens += 1
        self.counts.num_resets += args.reset is not None
        return open_result

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[OpenResult]:
        with self.counts.count_errors():
            if size < 1:
                raise InvalidCallError(f"a group needs at least 1 session, got {size}")
            chosen_ids = [self._issuer.choose(given_id) for given_id in session_ids or [""] * size]
            args = dataclasses.replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
            await self._slots.take(size)
            opens = (self._open_reserved(chosen_id, args, connection) for chosen_id in chosen_ids)
            open_results = await self._shield(self._open_all(opens, args))
        self.counts.num_opens += len(open_results)
        self.counts.num_resets += len(open_results)
        return open_results

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        if self.host.runs_inline:
            return self.reset_now(session_id, args)
        with self.counts.count_errors():
            session = self._find_session(session_id)
            args = self._fill_seed(args)
            call = partial(session.hosted_session.reset, args)
            record = partial(self._recorder.record_reset, session_id, args)
            result: EncodedResult = await self._call_in_order(session, "reset", call, record)
        self.counts.num_resets += 1
        return result

    async def step(
        self,
        session_id: str,
        action: bytes | str,
        step_index: int = 0,
        timeout_s: float = 0.0,
        attempt_id: int = 0,
    ) -> EncodedResult:
        if self.host.runs_inline:
            return self.step_now(session_id, action, step_index, attempt_id)
        started_s = time.monotonic()
        with self.counts.count_errors():
            try:
                session = self._find_session(session_id)
                call = partial(session.step, action, step_index, attempt_id)
                record = partial(self._record_step, session, action)
                result: EncodedResult = await self._call_in_order(
                    session, "step", call, record, timeout_s
                )
            except SessionLostError:  # an earlier call may have ended the session
                result = self.tombstones.recall(session_id, step_index)
        self.counts.count_step(time.monotonic() - started_s)
        return result

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        with self.counts.count_errors():
            session = self._find_session(session_id).hosted_session.inline_session
            assert session is not None, "reset_now needs an inline session"
            args = self._fill_seed(args)
            try:
                result = session.reset(args)
            except EnvError as error:
                self._recorder.record_reset(session_id, args, error)
                raise
        self._recorder.record_reset(session_id, args, result)
        self.counts.num_resets += 1
        return result

    def step_now(
        self, session_id: str, action: bytes | str, step_index: int = 0, attempt_id: int = 0
    ) -> EncodedResult:
        started_s = time.monotonic()
        try:
            session = self.open_sessions.get(session_id)
            if session is None:
                self._refuse_tools_id(session_id)
                result = self.tombstones.recall(session_id, step_index)
            else:
                session.last_used_s, session.detached_s = started_s, None
                result = session.step_now(action, step_index, attempt_id)
                self._recorder.record_step(session_id, action, result)
                if session.close_when_done and (result.terminated or result.truncated):
                    self._end(session, _EPISODE_ENDED)
        except EnvError as error:
            self.counts.num_errors_by_code[error.code] += 1
            if session is None or not session.repeats_error:
                self._recorder.record_step(session_id, action, error)
            raise
        self.counts.count_step(time.monotonic() - started_s)
        return result

    async def state(self, session_id: str) -> bytes:
        with self.counts.count_errors():
            session = self._find_session(session_id)
            return await self._call_in_order(session, "state", session.hosted_session.read_state)

    async def call_tool(
        self, session_id: str, name: str, arguments: JsonObject
    ) -> EncodedToolResult:
        full_id = self._session_ids.get(session_id, session_id)
        with self.counts.count_errors(), hide_full_id(full_id, session_id):
            session = self._find_session(full_id)
            call = partial(session.hosted_session.call_tool, name, arguments)
            record = partial(self._recorder.record_tool_call, full_id, name, arguments)
            return await self._call_in_order(session, "call_tool", call, record)

    async def close(self, session_id: str) -> bool:
        self._refuse_tools_id(session_id)
        if session := self.open_sessions.get(session_id):
            self._end(session, _CLOSED)
        return session_id in self.tombstones

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        self._refuse_tools_id(session_id)
        if session := self.open_sessions.get(session_id):
            self._detach_session(session, connection)

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        has_all = len(connection.session_ids) == len(self.open_sessions)
        if has_all or not self._lingering_ids or connection.end_event.is_set():
            return
        for session_id in self._lingering_ids.intersection(session_ids) - connection.session_ids:
            session = self.open_sessions[session_id]
            session.connections.add(connection)
            session.detached_s = None
            connection.session_ids.add(session_id)

    def release(self, connection: Connection) -> None:
        connection.end_event.set()
        for session_id in list(connection.session_ids):
            self._detach_session(self.open_sessions[session_id], connection)

    def drain(self) -> None:
        self._slots.drain()

    async def close_idle_forever(self) -> None:
        """Close idle sessions until cancelled."""
        idle_timeout_s = self.options.idle_timeout_s
        pause_s = min(max(idle_timeout_s / 4, 0.02), _MAX_SWEEP_PAUSE_S)
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            for session in list(self.open_sessions.values()):
                if session.lock.locked():
                    continue
                detached_s = session.detached_s
                if session.last_used_s < now_s - idle_timeout_s:
                    reason = f"it was idle for {idle_timeout_s:g} s"
                    self._end(session, SessionTombstone(SessionEnd.IDLE, reason))
                elif detached_s is not None and detached_s < now_s - session.linger_s:
                    reason = f"{_CONNECTION_ENDED.reason} {session.linger_s:g} s ago"
                    self._end(session, SessionTombstone(SessionEnd.CONNECTION_ENDED, reason))

    async def shut_down(self, grace_s: float = 1.0) -> None:
        """End all sessions; steps that are still running after the grace are abandoned."""
        self.drain()
        for session in list(self.open_sessions.values()):
            self._end(session, _SHUTDOWN)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await self.host.shut_down()

    async def _open_all(
        self, opens: Iterable[Coroutine[Any, Any, OpenResult]], args: OpenArgs
    ) -> list[OpenResult]:
        """Return the open sessions of a group; close them and raise if their views differ."""
        outcomes = await asyncio.gather(*opens, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        open_results = [outcome for outcome in outcomes if isinstance(outcome, OpenResult)]
        if not errors and len({open_result.view for open_result in open_results}) == 1:
            return open_results
        for open_result in open_results:
            await self.close(open_result.session_id)
        if errors:
            raise errors[0]
        seed = args.reset.seed if args.reset else None
        raise GroupMismatchError(
            f"{len(open_results)} sessions with seed {seed} returned different first"
            f" observations; see: ludus env check {self.description.name}"
        )

    async def _open_reserved(
        self, session_id: str, args: OpenArgs, connection: Connection | None
    ) -> OpenResult:
        try:
            hosted_session = await self.host.open(
                session_id, with_text=args.with_text, on_lost=partial(self._record_loss, session_id)
            )
            first_result = None
            if args.reset is not None:
                reset_args = self._fill_seed(args.reset)
                first_result = await self._reset_first(hosted_session, reset_args)
            if session_id in self.tombstones:  # the worker died before the session was added
                raise self.tombstones.make_lost_error(session_id)
            if first_result is not None:
                self._recorder.record_reset(session_id, reset_args, first_result)
            session = self._add_session(session_id, hosted_session, args, connection)
        except BaseException:
            self._slots.give_back()
            raise
        return OpenResult(session_id, first_result, session.tools_id)

    async def _reset_first(self, session: HostedSession, args: ResetArgs) -> EncodedResult:
        timeout_s = self.options.step_timeout_s
        try:
            if session.inline_session is not None:
                return session.inline_session.reset(args)
            return await self._wait_for(session, session.reset(args), timeout_s or None)
        except TimeoutError:
            session.kill(f"a reset took longer than {timeout_s:g} s")
            message = f"the first reset did not finish within {timeout_s:g} s"
            raise CallTimeoutError(message) from None
        except BaseException:
            self._start_task(session.close())
            raise

    def _add_session(
        self,
        session_id: str,
        hosted_session: HostedSession,
        args: OpenArgs,
        connection: Connection | None,
    ) -> OpenSession:
        session = OpenSession(
            id=session_id,
            hosted_session=hosted_session,
            close_when_done=args.close_when_done,
            linger_s=args.linger_s,
            last_used_s=time.monotonic(),
        )
        self.open_sessions[session_id] = session
        if self.description.tools:
            session.tools_id = secrets.token_urlsafe(18)
            self._session_ids[session.tools_id] = session_id
        if args.linger_s > 0:
            self._lingering_ids.add(session_id)
        if connection is not None:
            session.connections.add(connection)
            connection.session_ids.add(session_id)
            if connection.end_event.is_set():
                self._detach_session(session, connection)
        return session

    def _fill_seed(self, args: ResetArgs) -> ResetArgs:
        needs_seed = self.options.first_seed is not None or self._recorder.needs_seeds
        return self._seeds.fill(args) if needs_seed else args

    def _find_session(self, session_id: str) -> OpenSession:
        session = self.open_sessions.get(session_id)
        if session is None:
            self._refuse_tools_id(session_id)
            raise self.tombstones.make_lost_error(session_id)
        session.last_used_s, session.detached_s = time.monotonic(), None
        return session

    def _refuse_tools_id(self, session_id: str) -> None:
        if session_id in self._session_ids:
            raise make_tools_only_error()

    def _detach_session(self, session: OpenSession, connection: Connection | None) -> None:
        if connection is not None:
            session.connections.discard(connection)
            connection.session_ids.discard(session.id)
        if not session.connections and session.linger_s > 0:
            session.detached_s = time.monotonic()
        elif not session.connections:
            self._end(session, _CONNECTION_ENDED)

    def _record_loss(self, session_id: str, reason: str) -> None:
        tombstone = SessionTombstone(SessionEnd.LOST, reason)
        if session := self.open_sessions.get(session_id):
            self._remove_session(session, tombstone)
        else:
            self.tombstones.remember(session_id, tombstone, None)

    def _end(self, session: OpenSession, tombstone: SessionTombstone) -> None:
        if not self._remove_session(session, tombstone):
            return
        if session.hosted_session.inline_session is not None:
            session.hosted_session.inline_session.close()
        else:
            self._start_task(self._close_in_order(session))

    def _remove_session(self, session: OpenSession, tombstone: SessionTombstone) -> bool:
        if self.open_sessions.pop(session.id, None) is None:
            return False
        self._lingering_ids.discard(session.id)
        self._session_ids.pop(session.tools_id, None)
        for connection in session.connections:
            connection.session_ids.discard(session.id)
        self.tombstones.remember(session.id, tombstone, session.hosted_session.last_result)
        self.counts.num_ends_by_kind[tombstone.kind] += 1
        self.events.notify_end(session.id, tombstone)
        self._slots.give_back()
        return True

    async def _call_in_order(
        self,
        session: OpenSession,
        call_name: str,
        call: Callable[[], Awaitable[ResultT]],
        record: Callable[[ResultT | EnvError], None] = lambda outcome: None,
        timeout_s: float = 0.0,
    ) -> ResultT:
        """Make a call after the session's earlier calls; a slow call ends the session."""
        limits_s = [seconds for seconds in (timeout_s, self.options.step_timeout_s) if seconds > 0]
        limit_s = min(limits_s, default=None)
        try:
            coroutine = self._call_with_lock(session, call, record)
            if self.host.runs_inline:
                return await coroutine
            return await self._wait_for(session.hosted_session, coroutine, limit_s)
        except TimeoutError:
            reason = f"a {call_name} took longer than {limit_s:g} s"
            if self._remove_session(session, SessionTombstone(SessionEnd.TIMEOUT, reason)):
                session.hosted_session.kill(reason)
                self._start_task(self._close_in_order(session))
            raise CallTimeoutError(f"session {session.id!r} is gone: {reason}") from None

    async def _wait_for(
        self, session: HostedSession, call: Coroutine[Any, Any, ResultT], limit_s: float | None
    ) -> ResultT:
        """Return the result of a coroutine that also finishes if the caller gives up.

        Raises:
            TimeoutError: the coroutine ran for longer than the limit. Time in which other sessions
                occupied all threads does not count.
        """
        task, remaining_s = self._start_task(call), limit_s
        try:
            while not (await asyncio.wait({task}, timeout=remaining_s))[0]:
                remaining_s = session.remaining_s(limit_s or 0.0)
                if remaining_s <= 0:
                    raise TimeoutError
        except BaseException:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise
        return task.result()

    async def _call_with_lock(
        self,
        session: OpenSession,
        call: Callable[[], Awaitable[ResultT]],
        record: Callable[[ResultT | EnvError], None],
    ) -> ResultT:
        async with session.lock:
            if session.id not in self.open_sessions:
                raise self.tombstones.make_lost_error(session.id)
            try:
                result = await call()
            except EnvError as error:
                record(error)
                raise
            record(result)
            session.last_used_s = time.monotonic()
        is_over = isinstance(result, EncodedResult | EncodedToolResult) and result.done
        if is_over and session.close_when_done:
            self._end(session, _EPISODE_ENDED)
        return result

    def _record_step(
        self, session: OpenSession, action: bytes | str, outcome: EncodedResult | EnvError
    ) -> None:
        if not session.repeats_error:
            self._recorder.record_step(session.id, action, outcome)

    async def _close_in_order(self, session: OpenSession) -> None:
        async with session.lock:
            await session.hosted_session.close()

    async def _shield(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of a coroutine that also finishes if the caller gives up.

        Its thread cannot be stopped, and a second thread must not call the same session.
        """
        if self.host.runs_inline:
            return await coroutine
        return await asyncio.shield(self._start_task(coroutine))

    def _start_task(self, coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
