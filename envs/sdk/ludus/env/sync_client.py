"""The synchronous client: the same calls as `AsyncEnvClient`, without `await`.

with EnvClient.connect("http://127.0.0.1:8000") as client:
    session, first = client.open(seed=7)
    result = session.step({"action_id": 1})
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.types import Action, EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import EnvError

ResultT = TypeVar("ResultT")


class EnvClient:
    """A connection to an environment server; opens any number of sessions."""

    def __init__(self, client: AsyncEnvClient, loop: _LoopThread) -> None:
        self._client = client
        self._loop = loop

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 60.0,
    ) -> EnvClient:
        """A client whose server has answered; see `AsyncEnvClient.connect`."""
        loop = _LoopThread()
        try:
            client = loop.run(
                AsyncEnvClient.connect(
                    address,
                    token=token,
                    timeout_s=timeout_s,
                    connect_timeout_s=connect_timeout_s,
                    reconnect_timeout_s=reconnect_timeout_s,
                )
            )
        except BaseException:
            loop.stop()
            raise
        return cls(client, loop)

    def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return self._loop.run(self._client.describe())

    def open(
        self,
        *,
        seed: int | None = None,
        options: JsonObject | None = None,
        episode_id: str = "",
        close_when_done: bool = False,
    ) -> tuple[Session, StepResult]:
        """A new session and the first result of its first episode."""
        session, first = self._loop.run(
            self._client.open(
                seed=seed,
                options=options,
                episode_id=episode_id,
                close_when_done=close_when_done,
            )
        )
        return Session(session, self._loop), first

    def open_session(self) -> Session:
        """A new session, to be reset before its first step."""
        return Session(self._loop.run(self._client.open_session()), self._loop)

    def step_many(
        self, steps: Sequence[tuple[Session, Action | JsonObject | str]]
    ) -> list[StepResult | EnvError]:
        """One result or error per step, in order; a str is text, anything else an action."""
        inner = [(session.asynchronous, action) for session, action in steps]
        return self._loop.run(self._client.step_many(inner))

    def close(self) -> None:
        """Ends the connection and with it all its sessions."""
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
    def step_index(self) -> int:
        """Steps taken in this episode."""
        return self.asynchronous.step_index

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
        """The call's value; an interrupt cancels the call before it goes on."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._loop.close()
