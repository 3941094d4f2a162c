"""Where sessions run: on the event loop, in threads, or in worker processes.

| host                  | isolation           | a step that hangs                              |
|-----------------------|---------------------|------------------------------------------------|
| LocalHost, no threads | none                | ends the server: it promised not to            |
| LocalHost             | none                | ends its session; its thread is replaced       |
| WorkerHost            | `pool` or `process` | is killed with its worker and its sessions     |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.environment import AnyEnvironment, takes_any_text
from ludus.env.sessions.interface import Connection
from ludus.env.sessions.metrics import WorkerCounts
from ludus.env.sessions.session import EnvironmentSession, declared_options, exit_if_forked
from ludus.env.threads import Job, StepThreads
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import CallTimeoutError, CapacityError, ErrorCode, wrap_exception

_log = logging.getLogger(__name__)

EnvironmentFactory = Callable[[], AnyEnvironment]
OnLost = Callable[[str], None]
"""Told why, when a session ended by itself."""
ResultT = TypeVar("ResultT")


class HostedSession(Protocol):
    """One session where it runs; `SessionCore` makes one call at a time."""

    @property
    def direct(self) -> EnvironmentSession | None:
        """What may be called without a wait; None where that would take one."""

    @property
    def last(self) -> EncodedResult | None:
        """The latest answer, None before the first reset."""

    def left_s(self, limit_s: float) -> float:
        """How much is left for its call, that was made so long ago; more where it had to wait."""

    async def reset(self, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""

    async def step(self, action: bytes | str, step_index: int) -> EncodedResult:
        """The answer to one action."""

    async def state_json(self) -> bytes:
        """The environment's state."""

    async def call_tool(self, name: str, arguments: JsonObject) -> bytes:
        """What a tool returned, as JSON."""

    async def close(self) -> None:
        """Free what the environment holds."""

    def kill(self, reason: str) -> None:
        """End it in the middle of a call, as far as the host can."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that is open, and what ends it."""

    id: str
    hosted: HostedSession
    session: EnvironmentSession | None
    """What to call directly, where sessions run on the event loop."""
    close_when_done: bool
    linger_s: float
    last_used_s: float
    connections: set[Connection] = field(default_factory=set)
    """Those it goes with; it ends with the last of them."""
    detached_s: float | None = None
    """When the last of them ended; a call that begins later makes that good again, the end of one
    that was under way does not."""
    tools_id: str = ""
    """What calls its tools and does nothing else."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call of this session runs off the event loop."""


class SessionHost(Protocol):
    """Builds sessions and runs their calls."""

    @property
    def name(self) -> str:
        """What makes the environments, for messages."""

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is; capacity and server are filled in by the core."""

    @property
    def runs_inline(self) -> bool:
        """True when its sessions are called directly."""

    @property
    def workers(self) -> WorkerCounts | None:
        """Its worker processes; None of a host that has none."""

    @property
    def trouble(self) -> str:
        """Why it can serve no session now; empty where it can."""

    @property
    def is_stuck(self) -> bool:
        """True when only another server process could serve again."""

    async def open(self, session_id: str, *, with_text: bool, on_lost: OnLost) -> HostedSession:
        """A new session, to be reset.

        Raises:
            ExecutionError: the factory failed (code FACTORY_ERROR).
            CallTimeoutError: the environment took too long to build.
        """

    async def shut_down(self) -> None:
        """Free threads and processes; running calls are abandoned."""


class LocalHost:
    """Sessions in this process.

    Args:
        num_threads: where their calls run; 0 is the event loop, for environments that promise
            to answer at once. A thread cannot be stopped, only left behind.
        limit_s: for building and closing an environment in a thread; 0 is none.
    """

    workers = None

    def __init__(
        self,
        factory: EnvironmentFactory,
        description: EnvironmentDescription,
        num_threads: int,
        limit_s: float = 0.0,
    ) -> None:
        self.name = factory_name(factory, description)
        self.description = description
        self.runs_inline = num_threads == 0
        self._factory = factory
        self._threads = None if self.runs_inline else StepThreads(num_threads)
        self._limit_s = limit_s

    @property
    def trouble(self) -> str:
        """Why it can serve no session now; empty where it can."""
        return "" if self._threads is None else self._threads.trouble

    @property
    def is_stuck(self) -> bool:
        """True when only another server process could serve again."""
        return bool(self.trouble)

    async def open(self, session_id: str, *, with_text: bool, on_lost: OnLost) -> LocalSession:
        """A new session, to be reset."""
        build = partial(build_session, self._factory, self.name, session_id, with_text)
        threads, limit_s = self._threads, self._limit_s
        if threads is None:
            return LocalSession(build(), None, limit_s)
        try:
            return LocalSession(await threads.run(build, _close_late, limit_s), threads, limit_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"expected the environment to be built within {limit_s:g} s, but it was not"
            ) from None

    async def shut_down(self) -> None:
        """Let go of the threads; steps that still run are abandoned."""
        if self._threads is not None:
            self._threads.shut_down()


class LocalSession:
    """A session whose calls run in threads, one at a time, or where there are none, directly."""

    __slots__ = ("_is_left", "_job", "_limit_s", "_session", "_threads", "direct")

    def __init__(
        self, session: EnvironmentSession, threads: StepThreads | None, limit_s: float
    ) -> None:
        self._session = session
        self._threads = threads
        self._limit_s = limit_s
        self._job: Job[Any] | None = None
        """Its latest call."""
        self._is_left = False
        """A thread that hangs in it has it for good."""
        self.direct = session if threads is None else None

    @property
    def last(self) -> EncodedResult | None:
        """The latest answer, None before the first reset."""
        return self._session.last

    def left_s(self, limit_s: float) -> float:
        """How much is left for its call, that was made so long ago; more where it had to wait."""
        return 0.0 if self._job is None else self._job.left_s(limit_s)

    async def reset(self, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        return await self._run(lambda: self._session.reset(args))

    async def step(self, action: bytes | str, step_index: int) -> EncodedResult:
        """The answer to one action."""
        return await self._run(lambda: self._session.step(action, step_index))

    async def state_json(self) -> bytes:
        """The environment's state."""
        return await self._run(self._session.state_json)

    async def call_tool(self, name: str, arguments: JsonObject) -> bytes:
        """What a tool returned, as JSON."""
        return await self._run(lambda: self._session.call_tool(name, arguments))

    async def close(self) -> None:
        """Free what the environment holds, unless a thread still hangs in it."""
        if self._is_left:
            return
        if self._threads is None:
            self._session.close()
            return
        try:
            await self._threads.run(self._session.close, lambda _: None, self._limit_s)
        except TimeoutError:
            _log.error("an environment took longer than %g s to close", self._limit_s)
        finally:
            self._job = None  # it has its call, and that this session

    def kill(self, reason: str) -> None:
        """Leave the thread behind that its call keeps, and the session with it."""
        if self._threads is not None and self._job is not None:
            self._is_left |= self._threads.give_up(self._job)

    async def _run(self, call: Callable[[], ResultT]) -> ResultT:
        if self._threads is None:
            return call()
        job = self._job = self._threads.start(call, lambda _: self._session.close())
        result: ResultT = await job.future
        return result


def _close_late(session: EnvironmentSession | None) -> None:
    if session is not None:
        session.close()


def make_local_host(
    factory: EnvironmentFactory, num_threads: int = 32, limit_s: float = 0.0
) -> LocalHost:
    """The host in this process that fits the environment.

    Raises whatever the factory raises: a server with a broken factory does not start.
    """
    sample = factory()
    try:
        description = describe_environment(sample)
        runs_inline = sample.steps_on_event_loop
    finally:
        sample.close()
    return LocalHost(factory, description, 0 if runs_inline else num_threads, limit_s)


def describe_environment(environment: AnyEnvironment) -> EnvironmentDescription:
    """What a server says of this environment; capacity and server are still open."""
    kind = type(environment)
    return EnvironmentDescription(
        name=kind.name or kind.__name__,
        description=kind.description or (kind.__doc__ or "").strip().split("\n")[0],
        version=kind.version,
        action_schema=kind.action_type.model_json_schema(),
        observation_schema=kind.observation_type.model_json_schema(),
        state_schema=kind.state_type.model_json_schema(),
        has_text_view=environment.text_renderer is not None,
        max_sessions=0,
        options=environment.options,
        reset_options=declared_options(kind),
        tools=environment.tools,
        tasks=environment.tasks,
        takes_any_text=takes_any_text(environment.text_renderer),
    )


def factory_name(factory: EnvironmentFactory, description: EnvironmentDescription) -> str:
    """The factory's own name, or what it makes when it has none."""
    return getattr(factory, "__name__", description.name)


def build_session(
    factory: EnvironmentFactory, name: str, session_id: str, with_text: bool
) -> EnvironmentSession:
    """A new session of a new environment.

    Raises:
        ExecutionError: the factory failed (code FACTORY_ERROR).
        CapacityError: the environment is one of those that a process holds one at a time.
    """
    pid = os.getpid()
    try:
        return EnvironmentSession(session_id, factory(), with_text=with_text)
    except CapacityError:
        raise
    except BaseException as error:  # the boundary to foreign code
        _log.exception("environment factory %s failed", name)
        raise wrap_exception(
            f"Environment factory '{name}' failed to create instance. ",
            error,
            ErrorCode.FACTORY_ERROR,
        ) from error
    finally:
        exit_if_forked(pid)
