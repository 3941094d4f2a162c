"""The calls of one session of a remote environment.

    Session --LoopThread--> AsyncSession --> [ReplayingSession] --> WireSession --> gRPC or OpenEnv

A call that times out ends its wire session. Otherwise, its late response could be taken for the
response to the next call. A broken connection also ends the wire session, unless the session
outlives its connection on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ludus.env.encoding import ResetArgs, encode_json, make_encode_error
from ludus.env.security.tracing import is_traced
from ludus.env.types import Action, JsonObject, StepResult, ToolResult
from ludus.proto.errors import (
    EpisodeStateError,
    ErrorCode,
    InfrastructureError,
    InvalidCallError,
    SessionLostError,
)

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")
ConvertedT = TypeVar("ConvertedT")


class WireSession(Protocol):
    """A session over one protocol. Every method raises EnvError with the code from the wire."""

    @property
    def session_id(self) -> str:
        """The session's id on the server."""

    @property
    def tools_session_id(self) -> str:
        """An id that can only be used to call the session's tools; empty if there is no such id."""

    def reset(self, args: ResetArgs) -> Awaitable[StepResult]:
        """Start a new episode and return its first result."""

    def step(self, action: bytes | str, step_index: int) -> Awaitable[StepResult]:
        """Return the result of an action. Bytes are JSON; a str is text."""

    def state(self) -> Awaitable[JsonObject]:
        """Return the environment's state."""

    def call_tool(self, name: str, arguments: JsonObject) -> Awaitable[ToolResult]:
        """Call a tool of the environment and return its result."""

    def close(self) -> Awaitable[None]:
        """Close the session."""

    def abandon(self) -> None:
        """Ask the server to close the session, without waiting for the response."""


SessionStart = tuple[WireSession, StepResult | None]
"""A wire session, and its first result if a reset was requested."""


class AsyncSession:
    """One session of a remote environment, with one call at a time.

    Steps are numbered, so that the client can repeat a step without taking it twice. A call that
    is cancelled or times out ends the session, because its effect is unknown.
    """

    def __init__(self, wire_session: WireSession, close_when_done: bool) -> None:
        self.wire_session = wire_session
        """The session on the wire, for callers that choose the step number themselves."""
        self._close_when_done = close_when_done
        self._step_index = 0
        self._is_busy = False
        self._end_reason: str | None = None

    @property
    def id(self) -> str:
        """The session's id on the server. It changes when the session is rebuilt."""
        return self.wire_session.session_id

    @property
    def tools_id(self) -> str:
        """An id for agents, which can only be used to call the session's tools.

        Empty if the environment has no tools, or its server does not support such ids.
        """
        return self.wire_session.tools_session_id

    @property
    def step_index(self) -> int:
        """The number of steps taken in this episode."""
        return self._step_index

    @property
    def num_resumes(self) -> int:
        """The number of times that the session was lost and rebuilt by replay."""
        return getattr(self.wire_session, "num_resumes", 0)

    async def reset(
        self, *, seed: int | None = None, options: JsonObject | None = None, episode_id: str = ""
    ) -> StepResult:
        """Start a new episode and return its first result."""
        args = ResetArgs(seed, episode_id, options or {})
        return self._record(await self._call_alone(lambda: self.wire_session.reset(args)))

    async def step(
        self, action: Action | JsonObject | None = None, *, text: str | None = None
    ) -> StepResult:
        """Return the result of an action, which is JSON or a language model's text.

        Raises:
            ActionError: the action is invalid; the episode is unchanged.
            InfrastructureError: the session has ended and its episode is void.
        """
        if (action is None) == (text is None):
            raise InvalidCallError("expected either an action or a text, got both or neither")
        encoded_action = encode_action(action if text is None else text)
        step_index = self._step_index + 1
        return self._record(
            await self._call_alone(lambda: self.wire_session.step(encoded_action, step_index))
        )

    async def state(self) -> JsonObject:
        """Return the environment's state."""
        return await self._call_alone(lambda: self.wire_session.state())

    async def call_tool(self, name: str, arguments: JsonObject | None = None) -> ToolResult:
        """Call a tool of the environment and return its result, which may end the episode.

        A tool call is not a step. It has an effect on the return only if its result has a reward.

        Raises:
            ToolError: there is no such tool, or it failed; the episode continues.
            InfrastructureError: the session has ended and its episode is void.
        """
        result = await self._call_alone(lambda: self.wire_session.call_tool(name, arguments or {}))
        self._end_if_done(result)
        return result

    async def close(self) -> None:
        """Close the session. Closing a session that has ended is not an error."""
        if self._end_reason is None:
            self._end_reason = "it was closed"
            with contextlib.suppress(SessionLostError):
                await self.wire_session.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _call_alone(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        if self._end_reason is not None:
            raise SessionLostError(
                f"session {self.id!r} has ended: {self._end_reason}; open a new one"
            )
        if self._is_busy:
            raise EpisodeStateError(
                f"session {self.id!r} got a second call while the first is pending; await the"
                " first call",
                ErrorCode.STEP_CONFLICT,
            )
        self._is_busy = True
        try:
            return await call()
        except InfrastructureError as error:
            self._abandon(error.message.removesuffix("; open a new one"))
            raise
        except asyncio.CancelledError:
            self._abandon("a pending call was cancelled")
            raise
        finally:
            self._is_busy = False

    def _record(self, result: StepResult) -> StepResult:
        self._step_index = result.step_index
        self._end_if_done(result)
        return result

    def _end_if_done(self, result: StepResult | ToolResult) -> None:
        if self._close_when_done and result.done:
            self._end_reason = "its episode ended and it was opened with close_when_done"

    def _abandon(self, reason: str) -> None:
        self._end_reason = reason
        self.wire_session.abandon()


def make_synchronous(
    method: Callable[Concatenate[Any, ArgumentsT], Coroutine[Any, Any, ResultT]],
    convert: Callable[[ResultT, LoopThread], ConvertedT],
) -> Callable[Concatenate[Any, ArgumentsT], ConvertedT]:
    """Return a synchronous method that runs `method` of the counterpart and converts its result."""

    @functools.wraps(method)
    def call(owner: Any, /, *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs) -> ConvertedT:
        result = owner.loop_thread.run(method(owner.async_counterpart, *args, **kwargs))
        return convert(result, owner.loop_thread)

    return call


def keep_result(result: ResultT, loop_thread: LoopThread) -> ResultT:
    """Return the result, for methods whose result needs no conversion."""
    return result


class LoopThread:
    """An event loop that runs in a thread.

    A call takes 39 us through this class and 75 us through anyio's blocking portal.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ludus-env-client", daemon=True
        )
        self._thread.start()

    @property
    def is_copy(self) -> bool:
        """True in a forked process, which has no copy of the thread."""
        return os.getpid() != self._process_id

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the loop and return its value; an interrupt cancels the coroutine.

        Raises:
            InvalidCallError: the process is a fork of the one that made the loop.
        """
        if self.is_copy:
            coroutine.close()
            raise InvalidCallError(
                f"a client of process {self._process_id} cannot be used in process {os.getpid()}, "
                "which was forked from it; connect a new client in the forked process"
            )
        if is_traced():
            coroutine = _run_in_context(coroutine, copy_context())
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and its thread; a forked process has none to stop."""
        if self.is_copy:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _run_in_context(coroutine: Coroutine[Any, Any, ResultT], context: Context) -> ResultT:
    """Run a coroutine with the trace span and request id of the calling thread."""
    return await asyncio.get_running_loop().create_task(coroutine, context=context)


class Session:
    """One session of a remote environment.

    Its methods have the arguments of the methods of `AsyncSession`.
    """

    def __init__(self, async_counterpart: AsyncSession, loop_thread: LoopThread) -> None:
        self.async_counterpart = async_counterpart
        self.loop_thread = loop_thread

    @property
    def id(self) -> str:
        """The session's id on the server. It changes when the session is rebuilt."""
        return self.async_counterpart.id

    @property
    def tools_id(self) -> str:
        """An id for agents, which can only be used to call the session's tools."""
        return self.async_counterpart.tools_id

    @property
    def step_index(self) -> int:
        """The number of steps taken in this episode."""
        return self.async_counterpart.step_index

    @property
    def num_resumes(self) -> int:
        """The number of times that the session was lost and rebuilt by replay."""
        return self.async_counterpart.num_resumes

    reset = make_synchronous(AsyncSession.reset, keep_result)
    step = make_synchronous(AsyncSession.step, keep_result)
    state = make_synchronous(AsyncSession.state, keep_result)
    call_tool = make_synchronous(AsyncSession.call_tool, keep_result)

    def close(self) -> None:
        """Close the session, unless a forked process calls this, whose parent may still use it."""
        if not self.loop_thread.is_copy:
            self.loop_thread.run(self.async_counterpart.close())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def encode_action(action: Action | JsonObject | str | None) -> bytes | str:
    """Return a text unchanged, and any other action as JSON bytes.

    Raises:
        InvalidCallError: the action cannot be encoded.
    """
    if isinstance(action, Action):
        try:
            return action.__pydantic_serializer__.to_json(action)
        except ValueError as error:
            raise make_encode_error("an action", error) from None
    if isinstance(action, str):
        try:
            action.encode()
        except UnicodeEncodeError as error:
            raise make_encode_error("a text", error) from None
        return action
    return encode_json(action, "an action")
