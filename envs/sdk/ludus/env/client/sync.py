"""The synchronous client: the same calls as `AsyncEnvClient`, without `await`.

with EnvClient.connect("http://127.0.0.1:8000") as client:
    session, first = client.open(seed=7)
    result = session.step({"action_id": 1})
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from ludus.env.client.client import AsyncEnvClient, AsyncSession, Reset
from ludus.env.client.resume import ResumeLimits
from ludus.env.security.tracing import is_traced
from ludus.env.types import Action, EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import EnvError

ResultT = TypeVar("ResultT")


class ConnectArguments(TypedDict, total=False):
    """The keyword arguments of `AsyncEnvClient.connect`, explained there."""

    token: str | None
    timeout_s: float
    connect_timeout_s: float
    reconnect_timeout_s: float
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    server_name: str | None
    keepalive_s: float
    allow_ignored_seed: bool


class GroupArguments(TypedDict, total=False):
    """The keyword arguments of `AsyncEnvClient.open_group`, explained there."""

    seed: int | None
    options: JsonObject | None
    close_when_done: bool
    with_text: bool
    linger_s: float
    resume: bool | ResumeLimits
    wait_s: float


class OpenArguments(GroupArguments, total=False):
    """The keyword arguments of `AsyncEnvClient.open`, explained there."""

    episode_id: str


class EnvClient:
    """A connection to an environment server or a gateway; opens any number of sessions."""

    def __init__(self, client: AsyncEnvClient, loop: _LoopThread) -> None:
        self._client = client
        self._loop = loop

    @classmethod
    def connect(cls, address: str, **arguments: Unpack[ConnectArguments]) -> EnvClient:
        """A client whose server has answered; see `AsyncEnvClient.connect`."""
        loop = _LoopThread()
        try:
            client = loop.run(AsyncEnvClient.connect(address, **arguments))
        except BaseException:
            loop.stop()
            raise
        return cls(client, loop)

    def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return self._loop.run(self._client.describe())

    def open(self, **arguments: Unpack[OpenArguments]) -> tuple[Session, StepResult]:
        """A new session and the first result of its first episode; see `AsyncEnvClient.open`."""
        session, first = self._loop.run(self._client.open(**arguments))
        return Session(session, self._loop), first

    def open_group(
        self, size: int, **arguments: Unpack[GroupArguments]
    ) -> list[tuple[Session, StepResult]]:
        """Sessions on one seed, all or none; see `AsyncEnvClient.open_group`."""
        group = self._loop.run(self._client.open_group(size, **arguments))
        return [(Session(session, self._loop), first) for session, first in group]

    def open_session(self) -> Session:
        """A new session, to be reset before its first step."""
        return Session(self._loop.run(self._client.open_session()), self._loop)

    def step_many(
        self, steps: Sequence[tuple[Session, Action | JsonObject | str | Reset]]
    ) -> list[StepResult | EnvError]:
        """One result or error per step, in order; see `AsyncEnvClient.step_many`."""
        inner = [(session.asynchronous, action) for session, action in steps]
        return self._loop.run(self._client.step_many(inner))

    def close(self) -> None:
        """End the connection and with it all its sessions."""
        self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> EnvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Session:
    """One session of a remote environment; see `AsyncSession`."""

    def __init__(self, asynchronous: AsyncSession, loop: _LoopThread) -> None:
        self.asynchronous = asynchronous
        self._loop = loop

    @property
    def id(self) -> str:
        """The session's id on the server."""
        return self.asynchronous.id

    @property
    def tools_id(self) -> str:
        """The id to give to an agent: it may call the session's tools and nothing else."""
        return self.asynchronous.tools_id

    @property
    def step_index(self) -> int:
        """Steps taken in this episode."""
        return self.asynchronous.step_index

    @property
    def num_resumes(self) -> int:
        """How often it was lost and rebuilt by replay."""
        return self.asynchronous.num_resumes

    def reset(
        self,
        *,
        seed: int | None = None,
        options: JsonObject | None = None,
        episode_id: str = "",
    ) -> StepResult:
        """The first result of a new episode."""
        return self._loop.run(
            self.asynchronous.reset(seed=seed, options=options, episode_id=episode_id)
        )

    def step(
        self, action: Action | JsonObject | None = None, *, text: str | None = None
    ) -> StepResult:
        """The result of an action, given as JSON or as a language model's text."""
        return self._loop.run(self.asynchronous.step(action, text=text))

    def call_tool(self, name: str, arguments: JsonObject | None = None) -> JsonObject:
        """What a tool of the environment returned; see AsyncSession.call_tool."""
        return self._loop.run(self.asynchronous.call_tool(name, arguments))

    def state(self) -> JsonObject:
        """The environment's state."""
        return self._loop.run(self.asynchronous.state())

    def close(self) -> None:
        """Frees the session; one that is gone already is no error."""
        self._loop.run(self.asynchronous.close())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _LoopThread:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ludus-env-client", daemon=True
        )
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The call's value; an interrupt cancels the call before it continues."""
        if is_traced():
            call = _in_context(call, contextvars.copy_context())
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _in_context(call: Coroutine[Any, Any, ResultT], context: contextvars.Context) -> ResultT:
    """The call's value, made under the span and the request id of the calling thread."""
    return await asyncio.get_running_loop().create_task(call, context=context)
