"""The sessions that one server holds: who is admitted, and when a session ends.

    wire --Sessions--> SessionCore --HostedSession--> environment (sessions/hosts.py)

Who waits for whom: an open waits for a free session at most `wait_for_slot_s`, in order of
arrival; calls of one session run one after another, and only a session's own earlier call
keeps a call waiting. A session leaves by `close`, by the end of its episode
(`close_when_done`), with the connection that opened it (after `linger_s`), after
`idle_timeout_s` without a call, when a step takes longer than `step_timeout_s`, or with the
worker it ran in. Its last answer stays available for repeats.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.security.session_ids import SessionIdIssuer
from ludus.env.sessions.admission_queue import AdmissionQueue
from ludus.env.sessions.hosts import (
    HostedSession,
    InlineHost,
    InlineSession,
    SessionHost,
    WorkerCounts,
)
from ludus.env.sessions.interface import Load, OpenArgs, Opened, Owner, SessionEvents
from ludus.env.sessions.options import CoreOptions
from ludus.env.sessions.session import Session
from ludus.env.sessions.tombstones import Tombstones
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    ErrorCode,
    GroupMismatchError,
    InvalidCallError,
    SessionLostError,
    UnavailableError,
)

ResultT = TypeVar("ResultT")

_MAX_SWEEP_PAUSE_S = 1.0
_RETRY_AFTER_S = 1.0
_CONNECTION_ENDED = "the connection that opened it ended"
_EPISODE_ENDED = "its episode ended and it was opened with close_when_done"


@dataclass(slots=True, eq=False)
class _Entry:
    """A session that is open."""

    id: str
    hosted: HostedSession
    session: Session | None
    """What to call directly, where sessions run on the event loop."""
    owner: Owner | None
    close_when_done: bool
    linger_s: float
    last_used_s: float
    detached_s: float | None = None
    """When its connection ended; a later call makes that good again."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call of this session runs off the event loop."""


class SessionCore:
    """Sessions by id, at most `max_sessions` of them; implements `Sessions`."""

    def __init__(self, host: SessionHost, options: CoreOptions | None = None) -> None:
        self.options = options or CoreOptions()
        self.events = SessionEvents()
        self._host = host
        self._entries: dict[str, _Entry] = {}
        self.orphans: set[str] = set()
        """Sessions that outlived their connection; what calls one may `adopt` it."""
        self._num_opening = 0
        self._line = AdmissionQueue(
            self._take_slots,
            self._give_slots_back,
            timeout_s=self.options.wait_for_slot_s,
            max_waiting=self.options.max_waiting,
        )
        self._departed = Tombstones()
        self._ids = SessionIdIssuer(self.options.server_id, self.options.key)
        self._next_seed = self.options.first_seed
        self._is_draining = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._description = dataclasses.replace(
            host.description,
            max_sessions=self.options.max_sessions,
            is_deterministic=self.options.is_deterministic,
            server_id=self.options.server_id,
        )
        self.runs_inline = isinstance(host, InlineHost)
        """True when `step_now` may be used."""

    @property
    def workers(self) -> WorkerCounts | None:
        """Its worker processes; None where sessions run in this one."""
        return self._host.workers

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is."""
        return self._description

    @property
    def load(self) -> Load:
        """How full it is, sessions that are being built included."""
        return Load(
            num_sessions=len(self._entries) + self._num_opening,
            max_sessions=self.options.max_sessions,
            num_waiting=len(self._line),
            is_draining=self._is_draining,
        )

    # -- calls -------------------------------------------------------------------------

    async def open(self, args: OpenArgs, owner: Owner | None = None) -> Opened:
        """A new session; see `Sessions`."""
        session_id = self._ids.choose(args.session_id)
        await self._reserve(1)
        return await self._finish(self._open_reserved(session_id, args, owner))

    async def open_group(
        self, args: OpenArgs, size: int, owner: Owner | None = None
    ) -> list[Opened]:
        """Sessions on one seed, all or none; see `Sessions`."""
        return await self.open_group_as([""] * size, args, owner)

    async def open_group_as(
        self, session_ids: list[str], args: OpenArgs, owner: Owner | None = None
    ) -> list[Opened]:
        """The same under given ids; an empty one lets the server choose."""
        if not session_ids:
            raise InvalidCallError("expected a group of at least 1 session, got 0")
        chosen = [self._ids.choose(session_id) for session_id in session_ids]
        reset = self._seeded(args.reset or ResetArgs())
        if reset.seed is None:
            reset = dataclasses.replace(reset, seed=secrets.randbits(63))
        args = dataclasses.replace(args, reset=reset)
        await self._reserve(len(chosen))
        outcomes = await self._finish(self._open_all(chosen, args, owner))
        failed = next((o for o in outcomes if isinstance(o, BaseException)), None)
        opened = [o for o in outcomes if isinstance(o, Opened)]
        if failed is None and len({_view_of(o.first) for o in opened}) == 1:
            return opened
        for one in opened:
            await self.close(one.session_id)
        if failed is not None:
            raise failed
        raise GroupMismatchError(
            f"expected {len(chosen)} sessions on seed {reset.seed} to begin alike, got different"
            f" first observations; see: ludus env check {self._description.name}"
        )

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        if self.runs_inline:
            return self.reset_now(session_id, args)
        entry = self._find(session_id)
        args = self._seeded(args)
        return await self._timed(entry, lambda: entry.hosted.reset(args), "reset", 0.0)

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action; see `Sessions`."""
        entry = self._entries.get(session_id)
        if entry is None:
            return self._departed.recall(session_id, step_index)
        if entry.session is not None:
            return self.step_now(session_id, action, step_index)
        try:
            return await self._timed(
                entry, lambda: entry.hosted.step(action, step_index), "step", timeout_s
            )
        except SessionLostError:  # an earlier call, waited for, ended the session
            return self._departed.recall(session_id, step_index)

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The same without a wait, for environments that step on the event loop."""
        entry = self._find(session_id)
        assert entry.session is not None, "reset_now is for inline sessions"
        return entry.session.reset(self._seeded(args))

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """The same without a wait, for environments that step on the event loop."""
        return self.take_step(session_id, action, step_index)

    def take_step(self, session_id: str, action: bytes | str, step_index: int) -> EncodedResult:
        """What `step_now` does; who takes many calls it and reports them to `count_steps`."""
        entry = self._entries.get(session_id)
        if entry is None:
            return self._departed.recall(session_id, step_index)
        entry.last_used_s = time.monotonic()
        assert entry.session is not None, "take_step is for inline sessions"
        result = entry.session.step(action, step_index)
        if entry.close_when_done and (result.terminated or result.truncated):
            self._depart(entry, _EPISODE_ENDED)
        return result

    def count_steps(self, num_steps: int, took_s: float) -> None:
        """Told of steps that were taken one by one in so many seconds together."""

    def count_error(self, code: ErrorCode) -> None:
        """Told of a step that failed."""

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        entry = self._find(session_id)
        return await self._timed(entry, entry.hosted.state_json, "state", 0.0)

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool of the environment returned, as JSON."""
        entry = self._find(session_id)
        return await self._timed(
            entry, lambda: entry.hosted.call_tool(name, arguments), "call_tool", 0.0
        )

    async def close(self, session_id: str) -> None:
        """Ends a session; one that is gone already is no error."""
        if entry := self._entries.get(session_id):
            self._depart(entry, "it was closed")

    async def detach(self, session_id: str) -> None:
        """Ends a session after its `linger_s` unless it is called again before."""
        if entry := self._entries.get(session_id):
            self._detach(entry)

    def release(self, owner: Owner) -> None:
        """Ends or detaches what the owner opened, also what is still being built."""
        owner.ended.set()
        for session_id in list(owner.session_ids):
            self._detach(self._entries[session_id])

    def adopt(self, session_id: str, owner: Owner) -> None:
        """Gives an orphan to the connection that calls it; other sessions stay whose they are.

        Without that a session would not end with its second connection, only when idle.
        """
        if session_id in self.orphans and not owner.ended.is_set():
            self.orphans.discard(session_id)
            entry = self._entries[session_id]
            entry.owner, entry.detached_s = owner, None
            owner.session_ids.add(session_id)

    # -- the server's side -------------------------------------------------------------

    def drain(self) -> None:
        """Takes no new sessions from now on; those that are open continue."""
        self._is_draining = True
        self._line.refuse_all(self._draining())

    def end_reason(self, session_id: str) -> str | None:
        """Why a session that was here has ended; None while it lives or where unknown."""
        return self._departed.reason(session_id)

    async def close_idle_forever(self) -> None:
        """Never returns: ends sessions that nobody calls any more."""
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
                    self._depart(entry, f"it was idle for {idle_s:g} s")
                elif detached_s is not None and detached_s < now_s - entry.linger_s:
                    if entry.last_used_s <= detached_s:
                        self._depart(entry, f"{_CONNECTION_ENDED} {entry.linger_s:g} s ago")
                    else:
                        entry.detached_s = None

    async def shut_down(self, grace_s: float = 1.0) -> None:
        """Ends all sessions; steps that still run after the grace are abandoned."""
        self.drain()
        for entry in list(self._entries.values()):
            self._depart(entry, "the server is shutting down")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await self._host.shut_down()

    # -- admission ---------------------------------------------------------------------

    async def _reserve(self, size: int) -> None:
        """Returns when `size` sessions are set aside for the caller."""
        if self._is_draining:
            raise self._draining()
        await self.events.make_room(size)
        if size > self.options.max_sessions:
            raise InvalidCallError(
                f"expected a group of at most {self.options.max_sessions} sessions, which is all"
                f" this server holds; got {size}"
            )
        if not await self._line.take(size):
            raise self._full()

    def _take_slots(self, size: int) -> bool:
        if len(self._entries) + self._num_opening + size > self.options.max_sessions:
            return False
        self._num_opening += size
        return True

    def _give_slots_back(self, size: int) -> None:
        self._num_opening -= size
        self._line.advance()

    def _full(self) -> CapacityError:
        load = self.load
        return CapacityError(
            f"Server at capacity: {load.num_sessions}/{load.max_sessions} sessions active."
            " Cannot accept new connections.",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _draining(self) -> UnavailableError:
        return UnavailableError(
            "this server is draining and takes no new sessions; open it elsewhere",
            ErrorCode.DRAINING,
        )

    async def _open_all(
        self, session_ids: list[str], args: OpenArgs, owner: Owner | None
    ) -> list[Opened | BaseException]:
        return await asyncio.gather(
            *(self._open_reserved(session_id, args, owner) for session_id in session_ids),
            return_exceptions=True,
        )

    async def _open_reserved(self, session_id: str, args: OpenArgs, owner: Owner | None) -> Opened:
        try:
            hosted = await self._host.open(
                session_id, with_text=args.with_text, on_lost=partial(self._on_lost, session_id)
            )
            first = None
            if args.reset is not None:
                first = await self._first_of(hosted, self._seeded(args.reset))
            if session_id in self._departed:  # its worker died before it was entered
                raise self._departed.lost(session_id)
            self._enter(session_id, hosted, args, owner)
        finally:
            self._give_slots_back(1)
        return Opened(session_id, first)

    async def _first_of(self, hosted: HostedSession, reset: ResetArgs) -> EncodedResult:
        timeout_s = self.options.step_timeout_s
        try:
            if isinstance(hosted, InlineSession):
                return hosted.session.reset(reset)
            return await asyncio.wait_for(hosted.reset(reset), timeout_s or None)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                hosted.kill(f"a reset took longer than {timeout_s:g} s")
                raise CallTimeoutError(
                    f"expected the first reset within {timeout_s:g} s, got no answer"
                ) from None
            self._start(hosted.close())
            raise

    def _enter(
        self, session_id: str, hosted: HostedSession, args: OpenArgs, owner: Owner | None
    ) -> None:
        session = hosted.session if isinstance(hosted, InlineSession) else None
        entry = _Entry(
            id=session_id,
            hosted=hosted,
            session=session,
            owner=owner,
            close_when_done=args.close_when_done,
            linger_s=args.linger_s,
            last_used_s=time.monotonic(),
        )
        self._entries[session_id] = entry
        if owner is not None:
            owner.session_ids.add(session_id)
            if owner.ended.is_set():
                self._detach(entry)

    def _seeded(self, args: ResetArgs) -> ResetArgs:
        if args.seed is not None or self._next_seed is None:
            return args
        self._next_seed += 1
        return dataclasses.replace(args, seed=self._next_seed - 1)

    # -- sessions ----------------------------------------------------------------------

    def _find(self, session_id: str) -> _Entry:
        entry = self._entries.get(session_id)
        if entry is None:
            raise self._departed.lost(session_id)
        entry.last_used_s = time.monotonic()
        return entry

    def _detach(self, entry: _Entry) -> None:
        if entry.owner is not None:
            entry.owner.session_ids.discard(entry.id)
            entry.owner = None
        if entry.linger_s > 0:
            entry.detached_s = time.monotonic()
            self.orphans.add(entry.id)
        else:
            self._depart(entry, _CONNECTION_ENDED)

    def _on_lost(self, session_id: str, reason: str) -> None:
        if entry := self._entries.get(session_id):
            self._remove(entry, reason)
        else:
            self._departed.remember(session_id, reason, None)

    def _depart(self, entry: _Entry, reason: str) -> None:
        if not self._remove(entry, reason):
            return
        if entry.session is not None:
            entry.session.close()
        else:
            self._start(self._close_in_order(entry))

    def _remove(self, entry: _Entry, reason: str) -> bool:
        if self._entries.pop(entry.id, None) is None:
            return False
        self.orphans.discard(entry.id)
        if entry.owner is not None:
            entry.owner.session_ids.discard(entry.id)
        self._departed.remember(entry.id, reason, entry.hosted.last)
        self.events.ended(entry.id, reason)
        self._line.advance()
        return True

    async def _timed(
        self,
        entry: _Entry,
        call: Callable[[], Awaitable[ResultT]],
        what: str,
        timeout_s: float,
    ) -> ResultT:
        """The call's value, after the session's earlier calls; too slow ends the session."""
        limit_s = min((s for s in (timeout_s, self.options.step_timeout_s) if s > 0), default=None)
        try:
            return await asyncio.wait_for(self._finish(self._locked(entry, call)), limit_s)
        except TimeoutError:
            reason = f"a {what} took longer than {limit_s:g} s"
            if self._remove(entry, reason):
                entry.hosted.kill(reason)
                self._start(self._close_in_order(entry))
            raise CallTimeoutError(f"session {entry.id!r} is gone: {reason}") from None

    async def _locked(self, entry: _Entry, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        async with entry.lock:
            if entry.id not in self._entries:
                raise self._departed.lost(entry.id)
            result = await call()
            entry.last_used_s = time.monotonic()
        if entry.close_when_done and isinstance(result, EncodedResult) and result.done:
            self._depart(entry, _EPISODE_ENDED)
        return result

    async def _close_in_order(self, entry: _Entry) -> None:
        async with entry.lock:
            await entry.hosted.close()

    async def _finish(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The work's value; it runs to its end even when the caller gives up.

        A thread cannot be stopped, and its session must not be entered by a second one.
        """
        if self.runs_inline:
            return await work
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _view_of(first: EncodedResult | None) -> tuple[bytes, bytes]:
    """What a player sees, for comparison."""
    assert first is not None, "a group is opened with a reset"
    return first.observation_json, first.text.messages_json if first.text is not None else b""
