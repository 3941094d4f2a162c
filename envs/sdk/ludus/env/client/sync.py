"""The synchronous client: the calls of `AsyncEnvClient` without `await`.

with EnvClient.connect("http://127.0.0.1:8000") as client:
    session, first = client.open(seed=7)
    result = session.step({"action_id": 1})
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from ludus.env.client.client import AsyncEnvClient, AsyncSession
from ludus.env.security.tracing import is_traced
from ludus.env.transports.interface import ConnectOptions
from ludus.env.types import StepResult

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")
ConvertedT = TypeVar("ConvertedT")


def _synchronous(
    method: Callable[Concatenate[Any, ArgumentsT], Coroutine[Any, Any, ResultT]],
    convert: Callable[[ResultT, LoopThread], ConvertedT],
) -> Callable[Concatenate[Any, ArgumentsT], ConvertedT]:
    """Return a method that runs `method` on the client's loop and converts its result."""

    @functools.wraps(method)
    def call(
        owner: EnvClient | Session, /, *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs
    ) -> ConvertedT:
        result = owner.loop.run(method(owner.asynchronous, *args, **kwargs))
        return convert(result, owner.loop)

    return call


def _keep(result: ResultT, loop: LoopThread) -> ResultT:
    return result


def _make_session(session: AsyncSession, loop: LoopThread) -> Session:
    return Session(session, loop)


def _make_opened(
    opened: tuple[AsyncSession, StepResult], loop: LoopThread
) -> tuple[Session, StepResult]:
    session, first_result = opened
    return Session(session, loop), first_result


def _make_group(
    group: list[tuple[AsyncSession, StepResult]], loop: LoopThread
) -> list[tuple[Session, StepResult]]:
    return [_make_opened(opened_session, loop) for opened_session in group]


class EnvClient:
    """A connection to an environment server or a gateway, with any number of sessions.

    Its methods have the arguments of the methods of `AsyncEnvClient`.
    """

    def __init__(self, asynchronous: AsyncEnvClient, loop: LoopThread) -> None:
        self.asynchronous = asynchronous
        self.loop = loop

    @classmethod
    def connect(cls, address: str, options: ConnectOptions | None = None) -> EnvClient:
        """Return a client once the server has responded; see `AsyncEnvClient.connect`."""
        loop = LoopThread()
        try:
            return cls(loop.run(AsyncEnvClient.connect(address, options)), loop)
        except BaseException:
            loop.stop()
            raise

    describe = _synchronous(AsyncEnvClient.describe, _keep)
    open = _synchronous(AsyncEnvClient.open, _make_opened)
    open_group = _synchronous(AsyncEnvClient.open_group, _make_group)
    open_session = _synchronous(AsyncEnvClient.open_session, _make_session)

    def close(self) -> None:
        """Close the connection and all its sessions."""
        self.loop.run(self.asynchronous.close())
        self.loop.stop()

    def __enter__(self) -> EnvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Session:
    """One session of a remote environment.

    Its methods have the arguments of the methods of `AsyncSession`.
    """

    def __init__(self, asynchronous: AsyncSession, loop: LoopThread) -> None:
        self.asynchronous = asynchronous
        self.loop = loop

    @property
    def id(self) -> str:
        """The session's id on the server. It changes when the session is rebuilt."""
        return self.asynchronous.id

    @property
    def tools_id(self) -> str:
        """The id for an agent, which can only call the session's tools."""
        return self.asynchronous.tools_id

    @property
    def step_index(self) -> int:
        """The number of steps taken in this episode."""
        return self.asynchronous.step_index

    @property
    def num_resumes(self) -> int:
        """The number of times that the session was lost and rebuilt by replay."""
        return self.asynchronous.num_resumes

    reset = _synchronous(AsyncSession.reset, _keep)
    step = _synchronous(AsyncSession.step, _keep)
    state = _synchronous(AsyncSession.state, _keep)
    call_tool = _synchronous(AsyncSession.call_tool, _keep)
    close = _synchronous(AsyncSession.close, _keep)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LoopThread:
    """An event loop in a thread, for callers without an event loop.

    A call takes 39 us through this class and 75 us through anyio's blocking portal.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ludus-env-client", daemon=True
        )
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the loop and return its value; an interrupt cancels the coroutine."""
        if is_traced():
            call = _run_in_context(call, contextvars.copy_context())
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _run_in_context(
    call: Coroutine[Any, Any, ResultT], context: contextvars.Context
) -> ResultT:
    """Run a coroutine with the trace span and request id of the calling thread."""
    return await asyncio.get_running_loop().create_task(call, context=context)
