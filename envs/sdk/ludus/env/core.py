"""All sessions of a server, and every call to them; every wire stands on this.

    wire --open--> SessionCore --factory--> Environment
    wire --reset, step, state, close--> SessionCore --> Session --> Environment

Who waits for whom: calls of one session run one after another. Environments with
`steps_on_event_loop` are called directly; all others run in the server's threads, and
only a session's own earlier call keeps a call waiting there. A session leaves by `close`,
by the end of its episode (`close_when_done`), with the connection that opened it, or
after `idle_timeout_s` without a call; its last answer stays available for repeats.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.environment import AnyEnvironment
from ludus.env.session import Owner, Session
from ludus.env.types import EnvironmentDescription
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    EnvError,
    ErrorCode,
    ExecutionError,
    SessionLostError,
)

_log = logging.getLogger(__name__)

EnvironmentFactory = Callable[[], AnyEnvironment]
ResultT = TypeVar("ResultT")

STEP_THREAD_NAME = "ludus-env-step"
MAX_REMEMBERED_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class _Departed:
    """What is remembered of a session that is gone."""

    reason: str
    last: EncodedResult | None


class SessionCore:
    """Sessions by id, at most `max_sessions` of them; all methods belong to one event loop.

    Raises:
        EnvError: from every call, with the wire code of what went wrong. Whatever the
            factory raises when the server starts is raised as it is.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        max_sessions: int = 256,
        idle_timeout_s: float = 600.0,
        num_threads: int = 32,
    ) -> None:
        self.max_sessions = max_sessions
        self._factory = factory
        self._idle_timeout_s = idle_timeout_s
        self._sessions: dict[str, Session] = {}
        self._num_opening = 0
        self._departed: OrderedDict[str, _Departed] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        sample = factory()
        self.environment_type = type(sample)
        self.description = describe_environment(sample, max_sessions)
        sample.close()
        self.runs_inline = self.environment_type.steps_on_event_loop
        """True when the `*_now` methods may be used."""
        self._threads = (
            None if self.runs_inline else ThreadPoolExecutor(num_threads, STEP_THREAD_NAME)
        )

    @property
    def num_sessions(self) -> int:
        """Sessions open now, those being built included."""
        return len(self._sessions) + self._num_opening

    @property
    def factory_name(self) -> str:
        """The factory's own name, or what it makes when it has none."""
        return getattr(self._factory, "__name__", self.environment_type.__name__)

    # -- calls without a wait, for environments that step on the event loop ------------

    def open_now(
        self,
        reset: ResetArgs | None = None,
        *,
        close_when_done: bool = False,
        owner: Owner | None = None,
    ) -> tuple[str, EncodedResult | None]:
        """The new session's id, and its first answer when a reset was asked for."""
        self._check_capacity()
        session = self._build(close_when_done, owner)
        try:
            first = None if reset is None else session.reset(reset)
        except EnvError:
            session.close()
            raise
        self._admit(session)
        return session.id, first

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        return self._find(session_id).reset(args)

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """The answer to an action: bytes are JSON, a str is a language model's text."""
        session = self._sessions.get(session_id)
        if session is None:
            return self._recall(session_id, step_index)
        session.last_used_s = time.monotonic()
        result = session.step(action, step_index)
        if session.close_when_done and (result.terminated or result.truncated):
            self._depart(session, _EPISODE_ENDED)
        return result

    def state_now(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        return self._find(session_id).state_json()

    def close_now(self, session_id: str) -> None:
        """Ends a session; one that is gone already is no error."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._depart(session, "it was closed")

    # -- calls for any environment -----------------------------------------------------

    async def open(
        self,
        reset: ResetArgs | None = None,
        *,
        close_when_done: bool = False,
        owner: Owner | None = None,
    ) -> tuple[str, EncodedResult | None]:
        """The new session's id, and its first answer when a reset was asked for."""
        if self.runs_inline:
            return self.open_now(reset, close_when_done=close_when_done, owner=owner)
        self._check_capacity()
        self._num_opening += 1
        return await self._finish(self._open_in_thread(reset, close_when_done, owner))

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        if self.runs_inline:
            return self.reset_now(session_id, args)
        session = self._find(session_id)
        return await self._in_order(session, lambda: session.reset(args))

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action: bytes are JSON, a str is a language model's text.

        Args:
            timeout_s: ends the session when its environment does not answer in time;
                0 waits. Environments that step on the event loop cannot be timed out.
        """
        if self.runs_inline:
            return self.step_now(session_id, action, step_index)
        session = self._sessions.get(session_id)
        if session is None:
            return self._recall(session_id, step_index)
        call = self._in_order(session, lambda: session.step(action, step_index))
        try:
            return await (asyncio.wait_for(call, timeout_s) if timeout_s else call)
        except TimeoutError:
            reason = f"a step took longer than {timeout_s:g} s"
            self._depart(session, reason)
            raise CallTimeoutError(f"session {session_id!r} is gone: {reason}") from None
        except SessionLostError:  # an earlier call, waited for, ended the session
            return self._recall(session_id, step_index)

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        session = self._find(session_id)
        if self.runs_inline:
            return session.state_json()
        return await self._in_order(session, session.state_json)

    async def close(self, session_id: str) -> None:
        """Ends a session; one that is gone already is no error."""
        self.close_now(session_id)

    # -- the server's side -------------------------------------------------------------

    def close_owned(self, owner: Owner) -> None:
        """Ends what the owner opened, also what is still being built."""
        owner.ended = True
        for session_id in list(owner.session_ids):
            self._depart(self._sessions[session_id], _CONNECTION_ENDED)

    async def close_idle_forever(self) -> None:
        """Never returns: ends sessions that were not called for `idle_timeout_s`."""
        pause_s = min(max(self._idle_timeout_s / 4, 0.02), 10.0)
        while True:
            await asyncio.sleep(pause_s)
            oldest_s = time.monotonic() - self._idle_timeout_s
            for session in list(self._sessions.values()):
                if session.last_used_s < oldest_s and not session.lock.locked():
                    self._depart(session, f"it was idle for {self._idle_timeout_s:g} s")

    async def shut_down(self, grace_s: float = 1.0) -> None:
        """Ends all sessions; steps that still run after the grace are abandoned."""
        for session in list(self._sessions.values()):
            self._depart(session, "the server is shutting down")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # -- inside ------------------------------------------------------------------------

    def _check_capacity(self) -> None:
        if self.num_sessions >= self.max_sessions:
            raise CapacityError(
                f"Server at capacity: {self.num_sessions}/{self.max_sessions} sessions active."
                " Cannot accept new connections."
            )

    def _build(self, close_when_done: bool, owner: Owner | None) -> Session:
        try:
            environment = self._factory()
        except Exception as error:
            _log.exception("environment factory %s failed", self.factory_name)
            raise ExecutionError(
                f"Environment factory '{self.factory_name}' failed to create instance."
                f" {type(error).__name__}: {error}",
                ErrorCode.FACTORY_ERROR,
            ) from error
        return Session(
            secrets.token_urlsafe(18),
            environment,
            close_when_done=close_when_done,
            owner=owner,
        )

    def _admit(self, session: Session) -> None:
        session.last_used_s = time.monotonic()
        self._sessions[session.id] = session
        if session.owner is not None:
            session.owner.session_ids.add(session.id)
            if session.owner.ended:
                self._depart(session, _CONNECTION_ENDED)

    def _find(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise self._lost(session_id)
        session.last_used_s = time.monotonic()
        return session

    def _lost(self, session_id: str) -> SessionLostError:
        departed = self._departed.get(session_id)
        reason = (
            "this server does not know it (it may have restarted)"
            if departed is None
            else departed.reason
        )
        return SessionLostError(f"session {session_id!r} is gone: {reason}; open a new one")

    def _recall(self, session_id: str, step_index: int) -> EncodedResult:
        departed = self._departed.get(session_id)
        last = None if departed is None else departed.last
        if last is not None and 0 < step_index == last.step_index:
            return last
        raise self._lost(session_id)

    def _depart(self, session: Session, reason: str) -> None:
        if self._sessions.pop(session.id, None) is None:
            return
        if session.owner is not None:
            session.owner.session_ids.discard(session.id)
        self._departed[session.id] = _Departed(reason, session.last)
        if len(self._departed) > MAX_REMEMBERED_SESSIONS:
            self._departed.popitem(last=False)
        if self._threads is None:
            session.close()
        else:
            self._start(self._close_in_thread(session))

    async def _open_in_thread(
        self, reset: ResetArgs | None, close_when_done: bool, owner: Owner | None
    ) -> tuple[str, EncodedResult | None]:
        def build_and_reset() -> tuple[Session, EncodedResult | None]:
            session = self._build(close_when_done, owner)
            try:
                return session, None if reset is None else session.reset(reset)
            except EnvError:
                session.close()
                raise

        try:
            session, first = await self._in_thread(build_and_reset)
            self._admit(session)
        finally:
            self._num_opening -= 1
        return session.id, first

    async def _in_order(self, session: Session, call: Callable[[], EncodedResult | bytes]) -> Any:
        """The call's value; runs after the session's earlier calls, in a thread."""
        return await self._finish(self._locked(session, call))

    async def _locked(self, session: Session, call: Callable[[], ResultT]) -> ResultT:
        async with session.lock:
            if session.id not in self._sessions:
                raise self._lost(session.id)
            result = await self._in_thread(call)
            session.last_used_s = time.monotonic()
        if session.close_when_done and isinstance(result, EncodedResult) and result.done:
            self._depart(session, _EPISODE_ENDED)
        return result

    async def _close_in_thread(self, session: Session) -> None:
        async with session.lock:
            await self._in_thread(session.close)

    async def _finish(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The work's value; it runs to its end even when the caller gives up.

        A thread cannot be stopped, and its session must not be entered by a second one.
        """
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, call: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


_CONNECTION_ENDED = "the connection that opened it ended"
_EPISODE_ENDED = "its episode ended and it was opened with close_when_done"


def describe_environment(environment: AnyEnvironment, max_sessions: int) -> EnvironmentDescription:
    """What a server says of this environment."""
    kind = type(environment)
    return EnvironmentDescription(
        name=kind.name or kind.__name__,
        description=kind.description or (kind.__doc__ or "").strip().split("\n")[0],
        version=kind.version,
        action_schema=kind.action_type.model_json_schema(),
        observation_schema=kind.observation_type.model_json_schema(),
        state_schema=kind.state_type.model_json_schema(),
        has_text_view=environment.text_face is not None,
        max_sessions=max_sessions,
        options=environment.options,
    )
