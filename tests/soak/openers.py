"""Sessions over gRPC, WebSocket and plain HTTP behind one interface."""

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


class SessionOpener(Protocol):
    """Opens sessions of one environment."""

    async def open(self, seed: int, player: str, num_steps: int) -> PlayedSession:
        """Open a session.

        Raises:
            EnvError: the open was refused, or the connection is broken.
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


class SdkOpener:
    """Opens sessions with the SDK's client, which connects at the first open."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._client: AsyncEnvClient | None = None
        self._connect_lock = asyncio.Lock()

    async def open(self, seed: int, player: str, num_steps: int) -> PlayedSession:
        async with self._connect_lock:
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
class _HttpResponse:
    body: JsonObject
    headers: httpx.Headers


class _HttpSession:
    def __init__(
        self, opener: HttpOpener, session_id: str, first: JsonObject, num_steps: int
    ) -> None:
        self._opener = opener
        self._headers = {"x-session-id": session_id}
        self._num_steps = num_steps
        self._number = 0
        self.first = first

    async def step(self, action: JsonObject) -> tuple[JsonObject, bool]:
        """Take a step without a number; after an error, read the state before a repetition."""
        for _ in range(100):
            try:
                reply = await self._opener.post("step", {"action": action}, self._headers)
            except _NoResponseError:
                state = await self.state()
                if state["number"] == self._number:
                    continue  # the step was not taken
                observation = {**self.first, **state}
                done = state["number"] >= self._num_steps
            else:
                observation, done = reply.body["observation"], reply.body["done"]
            self._number += 1
            return observation, done
        raise UnavailableError("a hundred attempts returned no response")

    async def state(self) -> JsonObject:
        return (await self._opener.retry(lambda: self._opener.get("state", self._headers))).body

    async def close(self) -> None:
        await self._opener.retry(lambda: self._opener.post("close", {}, self._headers))


class _NoResponseError(Exception):
    """An error for a broken connection or an unreachable server."""


class HttpOpener:
    """Opens sessions over OpenEnv's plain HTTP, with one request per call."""

    def __init__(self, address: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={"authorization": f"Bearer {token}"},
            timeout=RECONNECT_S,
            limits=httpx.Limits(max_connections=64, keepalive_expiry=5.0),
        )
        # Each reset must open a new session, so keep no session cookie.
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    async def open(self, seed: int, player: str, num_steps: int) -> PlayedSession:
        try:
            reply = await self.post(
                "reset", {"seed": seed, "player": player, "num_steps": num_steps}, {}
            )
        except _NoResponseError as error:
            raise UnavailableError(str(error)) from None
        session_id = reply.headers["x-session-id"]
        return _HttpSession(self, session_id, reply.body["observation"], num_steps)

    async def post(self, path: str, body: JsonObject, headers: dict[str, str]) -> _HttpResponse:
        """Send a POST and return the response.

        Raises:
            EnvError: the gateway returned an error.
            _NoResponseError: the gateway did not respond, or cannot reach the server.
        """
        return await self._read(self._http.post(path, json=body, headers=headers))

    async def get(self, path: str, headers: dict[str, str]) -> _HttpResponse:
        """Send a GET and return the response; raises the same errors as `post`."""
        return await self._read(self._http.get(path, headers=headers))

    async def retry(self, send_request: Callable[[], Awaitable[_HttpResponse]]) -> _HttpResponse:
        """Repeat a request until there is a response, and return it.

        Raises:
            SessionLostError: there was no response for RECONNECT_S.
        """
        deadline_s = time.monotonic() + RECONNECT_S
        while True:
            try:
                return await send_request()
            except _NoResponseError as error:
                if time.monotonic() > deadline_s:
                    raise SessionLostError(f"no response for {RECONNECT_S:g} s: {error}") from None
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def _read(self, pending_response: Awaitable[httpx.Response]) -> _HttpResponse:
        try:
            response = await pending_response
        except httpx.TransportError as error:
            raise _NoResponseError(f"{type(error).__name__}: {error}") from None
        if response.status_code == 200:
            return _HttpResponse(response.json(), response.headers)
        error = _read_error(response)
        if error.code == ErrorCode.UNAVAILABLE:
            raise _NoResponseError(error.message)
        raise error


def _read_error(response: httpx.Response) -> EnvError:
    detail: Any = None
    with contextlib.suppress(ValueError):
        detail = response.json().get("detail")
    if not isinstance(detail, dict) or "code" not in detail:
        return EnvError(f"HTTP {response.status_code}: {response.text[:500]}")
    return make_wire_error(detail["code"], detail.get("message", ""))


def make_opener(wire: str, address: str, token: str) -> SessionOpener:
    """Return an opener for sessions over the wire."""
    return HttpOpener(address, token) if wire == "http" else SdkOpener(address, token)
