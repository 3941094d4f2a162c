"""A session over one wire, as a client of that wire uses it: gRPC, WebSocket or plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Protocol

import httpx

from ludus.env.client import AsyncEnvClient, AsyncSession, ConnectOptions
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    EnvError,
    ErrorCode,
    SessionLostError,
    UnavailableError,
    make_wire_error,
)

RECONNECT_S = 60.0
_PAUSE_S = 0.25


class PlayedSession(Protocol):
    """An open session."""

    first: JsonObject
    """Observation of the reset."""

    async def step(self, action: JsonObject) -> tuple[JsonObject, bool]:
        """Take a step; return the observation and whether the episode is over."""

    async def state(self) -> JsonObject:
        """Return the state of the episode."""

    async def close(self) -> None:
        """Close the session."""


class Door(Protocol):
    """An opener of one environment's sessions."""

    async def open(self, seed: int, player: str, num_steps: int) -> PlayedSession:
        """Open a session.

        Raises:
            EnvError: it was refused, or the way there is broken.
        """

    async def close(self) -> None:
        """Close the connection."""


class _SdkSession:
    def __init__(self, session: AsyncSession, first: JsonObject) -> None:
        self._session = session
        self.first = first

    async def step(self, action: JsonObject) -> tuple[JsonObject, bool]:
        result = await self._session.step(action)
        return result.observation, result.done

    async def state(self) -> JsonObject:
        return await self._session.state()

    async def close(self) -> None:
        await self._session.close()


class SdkDoor:
    """Our client over gRPC or WebSocket, by the address, connected at first use."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._client: AsyncEnvClient | None = None
        self._connecting = asyncio.Lock()

    async def open(self, seed: int, player: str, num_steps: int) -> PlayedSession:
        async with self._connecting:
            if self._client is None:
                self._client = await AsyncEnvClient.connect(
                    self._address,
                    ConnectOptions(token=self._token, reconnect_timeout_s=RECONNECT_S),
                )
        options = {"player": player, "num_steps": num_steps}
        session, first = await self._client.open(seed=seed, options=options)
        return _SdkSession(session, first.observation)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


@dataclass(slots=True)
class _HttpAnswer:
    body: JsonObject
    headers: httpx.Headers


class _HttpSession:
    def __init__(self, door: HttpDoor, session_id: str, first: JsonObject, num_steps: int) -> None:
        self._door = door
        self._named = {"x-session-id": session_id}
        self._num_steps = num_steps
        self._number = 0
        self.first = first

    async def step(self, action: JsonObject) -> tuple[JsonObject, bool]:
        """Take a step without a number; after an error, read the state instead of repeating it."""
        for _ in range(100):
            try:
                answer = await self._door.post("step", {"action": action}, self._named)
            except _NoAnswer:
                state = await self.state()
                if state["number"] == self._number:
                    continue  # the step was not taken
                observation = {**self.first, **state}
                done = state["number"] >= self._num_steps
            else:
                observation, done = answer.body["observation"], answer.body["done"]
            self._number += 1
            return observation, done
        raise UnavailableError("a hundred tries, and no answer")

    async def state(self) -> JsonObject:
        return (await self._door.patiently(lambda: self._door.get("state", self._named))).body

    async def close(self) -> None:
        await self._door.patiently(lambda: self._door.post("close", {}, self._named))


class _NoAnswer(Exception):
    """The connection broke, or the server is not reachable."""


class HttpDoor:
    """OpenEnv's plain HTTP, with a request per call."""

    def __init__(self, address: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={"authorization": f"Bearer {token}"},
            timeout=RECONNECT_S,
            limits=httpx.Limits(max_connections=64, keepalive_expiry=5.0),
        )
        # Drop the cookie of the earlier player, because each reset here is a new player.
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    async def open(self, seed: int, player: str, num_steps: int) -> PlayedSession:
        try:
            answer = await self.post(
                "reset", {"seed": seed, "player": player, "num_steps": num_steps}, {}
            )
        except _NoAnswer as error:
            raise UnavailableError(str(error)) from None
        session_id = answer.headers["x-session-id"]
        return _HttpSession(self, session_id, answer.body["observation"], num_steps)

    async def post(self, path: str, body: JsonObject, headers: dict[str, str]) -> _HttpAnswer:
        """The answer to a POST.

        Raises:
            EnvError: what the gateway said.
            _NoAnswer: it said nothing, or that it has no way to the server.
        """
        return await self._read(self._http.post(path, json=body, headers=headers))

    async def get(self, path: str, headers: dict[str, str]) -> _HttpAnswer:
        """The answer to a GET; raises what `post` does."""
        return await self._read(self._http.get(path, headers=headers))

    async def patiently(self, ask: Callable[[], Awaitable[_HttpAnswer]]) -> _HttpAnswer:
        """The answer to what may be asked again.

        Raises:
            SessionLostError: there was none for too long.
        """
        deadline_s = time.monotonic() + RECONNECT_S
        while True:
            try:
                return await ask()
            except _NoAnswer as error:
                if time.monotonic() > deadline_s:
                    raise SessionLostError(f"no answer for {RECONNECT_S:g} s: {error}") from None
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def _read(self, answering: Awaitable[httpx.Response]) -> _HttpAnswer:
        try:
            response = await answering
        except httpx.TransportError as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}") from None
        if response.status_code == 200:
            return _HttpAnswer(response.json(), response.headers)
        error = _read_error(response)
        if error.code == ErrorCode.UNAVAILABLE:
            raise _NoAnswer(error.message)
        raise error


def _read_error(response: httpx.Response) -> EnvError:
    detail: Any = None
    with contextlib.suppress(ValueError):
        detail = response.json().get("detail")
    if not isinstance(detail, dict) or "code" not in detail:
        return EnvError(f"HTTP {response.status_code}: {response.text[:500]}")
    return make_wire_error(detail["code"], detail.get("message", ""))


def make_door(wire: str, address: str, token: str) -> Door:
    """Return an opener of sessions over the wire."""
    return HttpDoor(address, token) if wire == "http" else SdkDoor(address, token)
