"""Hosts of sessions: the event loop, threads, or worker processes.

| host                  | isolation           | effect of a step that hangs                    |
|-----------------------|---------------------|------------------------------------------------|
| LocalHost, no threads | none                | ends the server                                |
| LocalHost             | none                | ends its session; its thread is replaced       |
| WorkerHost            | `pool` or `process` | ends its worker and all sessions of the worker |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from ludus.env.encoding import EncodedResult, EncodedToolResult, ResetArgs
from ludus.env.environment import AnyEnvironment, takes_any_text
from ludus.env.sessions.interface import Connection, WorkerCounts
from ludus.env.sessions.session import EnvironmentSession, exit_if_forked, list_reset_options
from ludus.env.sessions.threads import Job, StepThreads
from ludus.env.text.unicode import replace_surrogates
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    EnvError,
    EpisodeStateError,
    ErrorCode,
    wrap_exception,
)

_log = logging.getLogger(__name__)

EnvironmentFactory = Callable[[], AnyEnvironment]
LostCallback = Callable[[str], None]
"""Called with the reason when a session has ended without a request."""
ResultT = TypeVar("ResultT")


class HostedSession(Protocol):
    """A session on its host; `SessionCore` makes one call at a time."""

    @property
    def inline_session(self) -> EnvironmentSession | None:
        """Session whose calls return without waiting; None if calls have to wait."""

    @property
    def last_result(self) -> EncodedResult | None:
        """Latest result, or None before the first reset."""

    def remaining_s(self, limit_s: float) -> float:
        """Return the remaining time of the current call; waiting for a thread does not count."""

    async def reset(self, args: ResetArgs) -> EncodedResult:
        """Start a new episode and return its first result."""

    async def step(self, action: bytes | str, step_index: int) -> EncodedResult:
        """Take a step and return its result."""

    async def read_state(self) -> bytes:
        """Return the environment's state as JSON."""

    async def call_tool(self, name: str, arguments: JsonObject) -> EncodedToolResult:
        """Call a tool and return its result."""

    async def close(self) -> None:
        """Free the environment's resources."""

    def kill(self, reason: str) -> None:
        """End the session during a call, if the host can."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """An open session, with the conditions that end it."""

    id: str
    hosted_session: HostedSession
    close_when_done: bool
    linger_s: float
    last_used_s: float
    connections: set[Connection] = field(default_factory=set)
    """Connections that use the session. The session ends with its last connection."""
    detached_s: float | None = None
    """Time at which the last connection ended. A later call clears it."""
    tools_id: str = ""
    """Second id of the session, which permits only tool calls."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call that runs off the event loop."""
    repeats_error: bool = False
    """True if the latest step raised a remembered error and did not reach the environment."""
    _failed_attempt: tuple[int, EnvError] | None = None
    """Id and error of the latest attempt of a step that failed in the environment."""

    async def step(self, action: bytes | str, step_index: int, attempt_id: int) -> EncodedResult:
        """Take a step; see `Sessions.step`."""
        self._raise_remembered_error(attempt_id)
        try:
            return await self.hosted_session.step(action, step_index)
        except EnvError as error:
            self._remember_error(attempt_id, error)
            raise

    def step_now(self, action: bytes | str, step_index: int, attempt_id: int) -> EncodedResult:
        """Take a step of an inline session; see `Sessions.step`."""
        assert self.hosted_session.inline_session is not None, "not an inline session"
        self._raise_remembered_error(attempt_id)
        try:
            return self.hosted_session.inline_session.step(action, step_index)
        except EnvError as error:
            self._remember_error(attempt_id, error)
            raise

    def _raise_remembered_error(self, attempt_id: int) -> None:
        self.repeats_error = False
        if attempt_id and self._failed_attempt is not None:
            failed_id, error = self._failed_attempt
            if attempt_id == failed_id:
                self.repeats_error = True
                raise error

    def _remember_error(self, attempt_id: int, error: EnvError) -> None:
        # A call that is out of turn does not reach the environment, so it can be made again.
        if attempt_id and not isinstance(error, EpisodeStateError):
            self._failed_attempt = attempt_id, error


class SessionHost(Protocol):
    """Makes sessions and runs their calls."""

    @property
    def description(self) -> EnvironmentDescription:
        """Description of the environment; `SessionCore` adds capacity and server id."""

    @property
    def runs_inline(self) -> bool:
        """True if its sessions are called directly."""

    @property
    def worker_counts(self) -> WorkerCounts | None:
        """Counts of worker processes; None without workers."""

    @property
    def unavailable_reason(self) -> str:
        """Reason why no session can be served now; "" if sessions can be served."""

    @property
    def is_stuck(self) -> bool:
        """True if only a new server process could serve sessions again."""

    async def open(
        self, session_id: str, *, with_text: bool, on_lost: LostCallback
    ) -> HostedSession:
        """Open a session, which must then be reset.

        Raises:
            ExecutionError: the factory raised an error (code FACTORY_ERROR).
            CallTimeoutError: the environment took too long to build.
        """

    async def shut_down(self) -> None:
        """Free threads and processes; running calls are abandoned."""


class LocalHost:
    """Sessions in this process; implements `SessionHost`, which documents its methods.

    Args:
        num_threads: number of threads for calls; 0 makes calls on the event loop, for
            environments that promise to return immediately. A thread cannot be stopped, only
            abandoned.
        limit_s: time limit to build or close an environment in a thread; 0 sets no limit.
    """

    worker_counts = None

    def __init__(
        self,
        factory: EnvironmentFactory,
        description: EnvironmentDescription,
        num_threads: int,
        limit_s: float = 0.0,
    ) -> None:
        self._name = getattr(factory, "__name__", description.name)
        self.description = description
        self.runs_inline = num_threads == 0
        self._factory = factory
        self._threads = None if self.runs_inline else StepThreads(num_threads)
        self._limit_s = limit_s

    @property
    def unavailable_reason(self) -> str:
        return "" if self._threads is None else self._threads.unavailable_reason

    @property
    def is_stuck(self) -> bool:
        return bool(self.unavailable_reason)

    async def open(
        self, session_id: str, *, with_text: bool, on_lost: LostCallback
    ) -> LocalSession:
        build = partial(build_session, self._factory, self._name, session_id, with_text)
        threads, limit_s = self._threads, self._limit_s
        if threads is None:
            return LocalSession(build(), None, limit_s)
        try:
            return LocalSession(await threads.run(build, _close_session, limit_s), threads, limit_s)
        except TimeoutError:
            raise CallTimeoutError(f"the environment was not built within {limit_s:g} s") from None

    async def shut_down(self) -> None:
        if self._threads is not None:
            self._threads.shut_down()


class LocalSession:
    """A session whose calls run in threads, or directly without threads.

    Implements `HostedSession`, which documents its methods.
    """

    __slots__ = ("_is_abandoned", "_job", "_limit_s", "_session", "_threads", "inline_session")

    def __init__(
        self, session: EnvironmentSession, threads: StepThreads | None, limit_s: float
    ) -> None:
        self._session = session
        self._threads = threads
        self._limit_s = limit_s
        self._job: Job[Any] | None = None
        """Latest call."""
        self._is_abandoned = False
        """True if a thread hangs in the session."""
        self.inline_session = session if threads is None else None

    @property
    def last_result(self) -> EncodedResult | None:
        return self._session.last_result

    def remaining_s(self, limit_s: float) -> float:
        return 0.0 if self._job is None else self._job.remaining_s(limit_s)

    async def reset(self, args: ResetArgs) -> EncodedResult:
        return await self._run(lambda: self._session.reset(args))

    async def step(self, action: bytes | str, step_index: int) -> EncodedResult:
        return await self._run(lambda: self._session.step(action, step_index))

    async def read_state(self) -> bytes:
        return await self._run(self._session.read_state)

    async def call_tool(self, name: str, arguments: JsonObject) -> EncodedToolResult:
        return await self._run(lambda: self._session.call_tool(name, arguments))

    async def close(self) -> None:
        if self._is_abandoned:
            return
        if self._threads is None:
            self._session.close()
            return
        try:
            await self._threads.run(self._session.close, lambda unused_result: None, self._limit_s)
        except TimeoutError:
            _log.error("an environment took longer than %g s to close", self._limit_s)
        finally:
            self._job = None  # the job refers to its call, and the call to this session

    def kill(self, reason: str) -> None:
        if self._threads is not None and self._job is not None:
            self._is_abandoned |= self._threads.give_up(self._job)

    async def _run(self, call: Callable[[], ResultT]) -> ResultT:
        if self._threads is None:
            return call()
        job = self._job = self._threads.submit(call, lambda _: self._session.close())
        result: ResultT = await job.future
        return result


def _close_session(session: EnvironmentSession | None) -> None:
    if session is not None:
        session.close()


def make_local_host(
    factory: EnvironmentFactory, num_threads: int = 32, limit_s: float = 0.0
) -> LocalHost:
    """Make a host in this process, without threads if the environment steps on the event loop.

    Raises every error of the factory, because a server with a broken factory must not start.
    """
    environment = factory()
    try:
        description = describe_environment(environment)
        runs_inline = environment.steps_on_event_loop
    finally:
        environment.close()
    return LocalHost(factory, description, 0 if runs_inline else num_threads, limit_s)


def describe_environment(environment: AnyEnvironment) -> EnvironmentDescription:
    """Describe an environment, without the capacity and the id of its server."""
    environment_type = type(environment)
    description = EnvironmentDescription(
        name=environment_type.name or environment_type.__name__,
        description=environment_type.description
        or (environment_type.__doc__ or "").strip().split("\n")[0],
        version=environment_type.version,
        action_schema=environment_type.action_type.model_json_schema(),
        observation_schema=environment_type.observation_type.model_json_schema(),
        state_schema=environment_type.state_type.model_json_schema(),
        has_text_view=environment.text_renderer is not None,
        max_sessions=0,
        options=environment.options,
        reset_options=list_reset_options(environment_type),
        tools=environment.tools,
        tasks=environment.tasks,
        takes_any_text=takes_any_text(environment.text_renderer),
        return_range=environment.return_range,
        is_game=environment.is_game,
    )
    encodable_description: EnvironmentDescription = replace_surrogates(description)
    return encodable_description


def build_session(
    factory: EnvironmentFactory, name: str, session_id: str, with_text: bool
) -> EnvironmentSession:
    """Make a session of a new environment.

    Raises:
        ExecutionError: the factory raised an error (code FACTORY_ERROR).
        CapacityError: the process can have only one such environment and has it already.
    """
    pid = os.getpid()
    try:
        return EnvironmentSession(session_id, factory(), with_text=with_text)
    except CapacityError:
        raise
    except BaseException as error:  # the boundary to third-party code
        _log.exception("environment factory %s failed", name)
        message = f"Environment factory '{name}' failed to create instance. "
        raise wrap_exception(message, error, ErrorCode.FACTORY_ERROR) from error
    finally:
        exit_if_forked(pid)
